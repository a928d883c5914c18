"""Two baselines for predicting bytes: an add-one order-2 model, and `zlib -9`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

_CHUNK_BYTES = 1 << 24  # counted at once: bounds the memory of the 8-byte indices to some 130 MB


@dataclass(frozen=True, eq=False)
class Order2Model:
    """P(c | a, b) = (count(a, b, c) + 1) / (count(a, b) + 256), for any three bytes in a row.

    Example:
        >>> model = fit_order2(np.frombuffer(b"abcabc", np.uint8))
        >>> float(model.probabilities(ord("a"), ord("b"))[ord("c")]) == 3 / 258
        True
    """

    counts: np.ndarray  # of each triple, int32 [256 * 256, 256]; row `256 * a + b`, column `c`

    def probabilities(self, a: int, b: int) -> np.ndarray:
        """Computes P(c | a, b) of every byte c, float64 [256]."""
        row = self.counts[256 * a + b]
        return (row + 1) / (row.sum(dtype=np.int64) + 256)

    def bits_per_byte(self, data: np.ndarray) -> float:
        """Computes the mean of -log2 P over bytes, uint8 [n], each predicted once; NaN for no bytes."""
        totals = self.counts.sum(axis=1, dtype=np.int64)
        bits = 0.0
        for triples in _triples(data):
            seen, of = self.counts.reshape(-1)[triples], totals[triples >> 8]
            bits += float(np.sum(np.log2(of + 256.0) - np.log2(seen + 1.0)))
        return bits / data.size if data.size else float("nan")


def fit_order2(data: np.ndarray) -> Order2Model:
    """Counts all triples of bytes in `data`, uint8 [n]; the two before the first are taken to be 0. The counts take 67 MB."""
    counts = np.zeros(1 << 24, np.int32)
    for triples in _triples(data):
        counts += np.bincount(triples, minlength=counts.size).astype(np.int32)
    return Order2Model(counts.reshape(1 << 16, 256))


def zlib_bits_per_byte(data: np.ndarray) -> float:
    """Computes the bits per byte that `zlib` at level 9 needs for bytes, uint8 [n]; NaN for no bytes."""
    return 8 * len(zlib.compress(data.tobytes(), 9)) / data.size if data.size else float("nan")


def _triples(data: np.ndarray) -> Any:
    """Computes the index `65536 * a + 256 * b + c` of each byte c and the two before it, int64, in chunks."""
    padded = np.concatenate([np.zeros(2, np.uint8), data])
    for start in range(0, data.size, _CHUNK_BYTES):
        part = padded[start : start + _CHUNK_BYTES + 2].astype(np.int64)
        yield (part[:-2] << 16) | (part[1:-1] << 8) | part[2:]
