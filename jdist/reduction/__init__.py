"""All-reduce algorithms, by which replicas sum their gradients, each an `(init, apply)` pair of pure functions.

Start at `algorithm`, which has the interface and `psum`. `by_name` lists all.

May import: support, errors.
"""

from jdist.reduction.algorithm import Reduction, psum
from jdist.reduction.bucketed import bucketed
from jdist.reduction.by_name import make_reduction
from jdist.reduction.compressed import compressed
from jdist.reduction.staged import hierarchical, ring, to_one_device

__all__ = [
    "Reduction",
    "bucketed",
    "compressed",
    "hierarchical",
    "make_reduction",
    "psum",
    "ring",
    "to_one_device",
]
