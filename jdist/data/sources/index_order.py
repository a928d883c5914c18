"""A random order of rows that is computed place by place, without a list of all of them."""

from __future__ import annotations

import math

import numpy as np

# Fewer leave small orders uneven: with 6, the 120 orders of 5 rows differ in frequency by a third.
_ROUNDS = 10


def rows_at(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Computes the rows at some places of an epoch's random order of `count` rows, as int64."""
    # A Feistel network permutes a grid of `height * width` cells, of which the first `count` are
    # the rows: it splits a number into two halves, and adds to each in turn a hash of the other. A
    # cell behind the rows is permuted again until it is a row, which is rare: the grid has at most
    # one row of cells too many. Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    # CT-RSA 2002: the generalized Feistel cipher.
    width = math.isqrt(count - 1) + 1
    height = -(-count // width)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    rows = _permute(np.asarray(places, np.uint64), np.uint64(height), np.uint64(width), keys)
    while (outside := rows >= np.uint64(count)).any():
        rows[outside] = _permute(rows[outside], np.uint64(height), np.uint64(width), keys)
    return rows.astype(np.int64)


def _permute(cells: np.ndarray, height: np.uint64, width: np.uint64, keys: np.ndarray) -> np.ndarray:
    upper, lower = np.divmod(cells, width)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            upper = (upper + _hash(lower ^ key) % height) % height
        else:
            lower = (lower + _hash(upper ^ key) % width) % width
    return upper * width + lower


def _hash(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of uint64 values, as SplitMix64 does at its end; products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
