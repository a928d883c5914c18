"""A state as checksums, by which two runs are compared bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from jdist.checkpoint import leaves as codec

PyTree = Any


def checksums(state: PyTree) -> dict[str, str]:
    """The sha256 of each leaf's dtype, shape and bytes, by its path.

    Args:
        state: a tree of arrays, PRNG keys and numbers on the host.

    Example:
        >>> list(checksums({"w": np.zeros(3)}))
        ["['w']"]
    """
    sums = {}
    for path, leaf in codec.flatten(state).items():
        array = np.ascontiguousarray(codec.without_keys(leaf))
        digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        sums[path] = digest.hexdigest()
    return sums
