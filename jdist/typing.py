"""The types that jdist's signatures name, for annotations of programs that use it."""

from typing import Any

PyTree = Any  # arrays, numbers and PRNG keys in nested containers, such as dicts, tuples and flax's dataclasses
State = PyTree  # what a step takes and returns: parameters, optimiser state, counters
Batch = PyTree  # arrays with rows on one axis, whole: all rows of a global batch
