"""The reading of a checkpoint by all processes of a job: each reads its share, and none takes what another finds damaged."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from jdist.checkpoint import folder as disk
from jdist.checkpoint import leaves as codec
from jdist.checkpoint.fit import Fit, Selection, check_has_values, fit
from jdist.checkpoint.folder import Damaged, Place
from jdist.checkpoint.job import Job
from jdist.checkpoint.pieces import read_leaves
from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.cluster.runtime import Runtime, together


def read_together(
    paths: list[Place],
    like: dict[str, Any],
    problems: dict[str, str],
    *,
    selection: Selection,
    cluster: Runtime,
    name: str,
    timeout_s: float,
) -> tuple[dict[str, Any], list[Any], Fit] | None:
    """Reads the last checkpoint in which no process finds damage; all processes call this."""
    # Returns the manifest's body, the leaves, and the filled ones; None if no checkpoint can be
    # read. `problems` is filled with the faults of skipped checkpoints, by name. `paths` are the
    # same on all processes, in the order of saving.
    # First, so that a tree of the wrong kind is not mistaken for a damaged checkpoint.
    described = [codec.describe_leaf(path, leaf) for path, leaf in like.items()]
    for path in reversed(paths):
        found, problem = None, None
        with together(f"{name}: reading", timeout_s, cluster):
            try:
                found = _read(path, like, described, selection, timeout_s)
            except Damaged as error:
                problem = str(error)
        failpoints.reached(Point.IN_RESTORE)
        met = cluster.exchange(f"{name}: damage", problem, timeout_s)
        first = next((f"process {i}: {text}" for i, text in enumerate(met) if text is not None), None)
        if first is None:
            return found
        problems[path.name] = problem or first
    return None


def _read(
    path: Place, like: dict[str, Any], described: list[dict[str, Any]], selection: Selection, timeout_s: float
) -> tuple[dict[str, Any], list[Any], Fit]:
    """Reads a checkpoint onto the devices leaf by leaf: of whole leaves the host holds one at a time."""
    body = disk.read_manifest(path)
    fitted = fit(path, body["leaves"], described, selection)
    names, leaves = list(like), list(like.values())
    check_has_values(
        path, like, {name for name, number in zip(names, fitted.numbers, strict=True) if number is not None}
    )
    places = {number: i for i, number in enumerate(fitted.numbers) if number is not None}
    reading = read_leaves(path, body, {number: codec.needed(leaves[i]) for number, i in places.items()})
    placed: list[Any] = []

    def read_on() -> dict[int, np.ndarray] | None:
        jax.block_until_ready(placed)  # the host's arrays are kept until then
        placed.clear()
        return next(reading, None)

    begun_s = time.monotonic()
    while (arrays := Job(read_on).result(timeout_s, f"reading {path}", begun_s)) is not None:
        while arrays:
            number, array = arrays.popitem()
            i, key = places[number], body["leaves"][number].get("key")
            leaves[i] = codec.place(names[i], array, key, leaves[i])
            placed.append(leaves[i])
            del array  # not kept while the next is read
    return body, leaves, fitted
