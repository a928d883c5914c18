"""Sources of batches, and the saved positions of those that can be resumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jdist.errors import DatasetError
from jdist.support.checks import as_int

PyTree = Any
STATE_VERSION = 1


@runtime_checkable
class RandomAccessSource(Protocol):
    """A source that makes any batch by its number, and so resumes at any step for the same price.

    Attributes:
        num_steps: how many batches there are; None: without end.
        global_batch: rows of a full batch.
        fingerprint: identifies the data and its order; a saved position only fits the same fingerprint.
            Written as "name=value name=value ...", so that an error can name the mismatch.
    """

    @property
    def num_steps(self) -> int | None: ...

    @property
    def global_batch(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def batch_at(self, step: int) -> PyTree:
        """Makes batch number `step`, from 0: a pure function, which may be called from a background thread."""
        ...


@dataclass(frozen=True, kw_only=True)
class JointSource:
    """The random-access sources of all processes, seen as one; see `RandomAccessSource`."""

    num_steps: int | None
    global_batch: int
    fingerprint: str


Resumable = RandomAccessSource | JointSource  # what a saved position refers to


@dataclass(frozen=True)
class Restartable(Iterable[PyTree]):
    """An iterable that asks `make` for a new iterator each time."""

    make: Callable[[], Iterator[PyTree]]

    def __iter__(self) -> Iterator[PyTree]:
        return self.make()


def steps_from(source: Resumable, step: int) -> Iterator[int]:
    """Counts the numbers of a random-access source's batches from `step` on."""
    return iter(itertools.count(step) if source.num_steps is None else range(step, source.num_steps))


def check_step(step: int, num_steps: int | None, what: str = "source") -> None:
    """Raises a `DatasetError` for a step that the source does not have."""
    if step < 0 or (num_steps is not None and step >= num_steps):
        raise DatasetError(f"there is no batch {step}: the {what} has {num_steps} steps, counted from 0")


def whole_number(value: Any, *, name: str, least: int) -> int:
    """Converts an integer (numpy's too) to an int, or raises a `DatasetError` that names the option."""
    number = as_int(value, least=least)
    if number is None:
        raise DatasetError(f"`{name}` must be a whole number, {least} or more, but it is {value!r}")
    return number


def check_source(source: Any) -> None:
    """Refuses an object that is not a source, such as a dict, an array or no iterable."""
    if isinstance(source, RandomAccessSource):
        if source.num_steps is not None and source.num_steps < 1:
            raise DatasetError(
                f"the dataset is empty: {source!r} has num_steps={source.num_steps}; "
                "check its rows, its filters, and that its global batch is not larger than its data"
            )
        if source.global_batch < 1:
            raise DatasetError(f"a source needs `global_batch` of at least 1, but {source!r} has {source.global_batch}")
        return
    if isinstance(source, Mapping | np.ndarray | jax.Array | str | bytes):
        raise DatasetError(
            f"a {type(source).__name__} is not a source of batches; make one with "
            "`jdist.data.from_arrays(arrays, global_batch=...)`, or pass an iterable of batches"
        )
    are_arrays = isinstance(source, tuple) and all(isinstance(x, np.ndarray | jax.Array) for x in source)
    if are_arrays and len({(np.shape(x)[1:], x.dtype) for x in source}) > 1:
        raise DatasetError(
            f"a tuple is taken as a list of batches, and this is a tuple of {len(source)} arrays of different kinds. Make "
            "batches of their rows by `jdist.data.from_arrays((x, y), global_batch=...)`"
        )
    if not isinstance(source, Iterable):
        raise DatasetError(
            f"a {type(source).__name__} is not a source of batches; pass `jdist.data.from_arrays(...)`, or "
            "any iterable whose elements are numpy pytrees, one global batch each"
        )


def num_batches(source: Any) -> int | None:
    """Counts the batches of a pass over a source, by its `num_steps` or `len()`; None: not known, or without end."""
    if isinstance(source, RandomAccessSource) or not isinstance(source, Sized):
        return getattr(source, "num_steps", None)
    try:
        return len(source)
    except TypeError:  # a loader or a `tf.data.Dataset` that does not know it
        return None


def refuse_a_row(element: PyTree, source: Any) -> None:
    """Raises a `DatasetError` for an element of another library's dataset that is one row, where it should be a batch."""
    kind = getattr(source, "kind", None)
    if kind is None:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(element):
        if isinstance(leaf, bool | int | float) or getattr(leaf, "ndim", 1) == 0:
            name = jax.tree_util.keystr(path) or "its top"
            if path and isinstance(path[-1], jax.tree_util.SequenceKey):
                name += " (if that is a list of one number a row, make it an array: `np.asarray`)"
            raise DatasetError(
                f"the elements of a {kind} are taken as batches, but one has a single number at {name}, so it is a row. Batch "
                "them by the library, `dataset.batch(...)` or a loader's batch size, or say how many rows a step takes: "
                "`jdist.data.from_rows(dataset, global_batch=...)` if it has random access, or the `global_batch` of "
                "`jdist.fit`"
            )


def resumable(source: Any) -> RandomAccessSource:
    """Returns a source whose position can be saved; raises a `DatasetError` for any other."""
    if isinstance(source, RandomAccessSource):
        return source
    if (advice := getattr(source, "advice", None)) is not None:
        raise DatasetError(f"the position in a {source.kind} cannot be saved or restored: {advice}")
    raise DatasetError(
        f"the position in a {type(source).__name__} cannot be saved or restored: a plain iterable only "
        "goes forward, so resuming would mean reading everything again up to there. Use "
        "`jdist.data.from_arrays(...)`, or a source object with `num_steps`, `global_batch`, "
        "`fingerprint` and `batch_at(step)`"
    )


def write_state(source: Resumable, step: int) -> dict[str, Any]:
    """Writes a position as a dict that JSON can hold: its version, the step, and the source's fingerprint."""
    return {
        "version": STATE_VERSION,
        "step": step,
        "global_batch": source.global_batch,
        "fingerprint": source.fingerprint,
    }


def read_state(source: Resumable, state: Mapping[str, Any]) -> int:
    """Reads the number of batches handed out from a saved position; refuses that of other data."""
    check_saved(state)
    check_fingerprint(state["fingerprint"], source.fingerprint)
    step = whole_number(state["step"], name="step", least=0)
    if source.num_steps is not None and step > source.num_steps:
        raise DatasetError(
            f"the saved position is step {step}, but the dataset has only {source.num_steps} steps, fewer than when it was "
            "saved. Give at least as many `epochs` as then"
        )
    return step


def check_saved(state: Any) -> None:
    """Raises a `DatasetError` for what is no saved position that this version reads."""
    if not isinstance(state, Mapping):
        raise DatasetError(f"a saved position is the dict that `state()` returned, not a {type(state).__name__}")
    missing = [key for key in ("version", "step", "fingerprint") if key not in state]
    if missing:
        raise DatasetError(f"this is not a dataset's saved position: it lacks {missing}, and has {sorted(state)}")
    if state["version"] != STATE_VERSION:
        raise DatasetError(
            f"the saved position has version {state['version']!r}, but this jdist reads version "
            f"{STATE_VERSION}; restore it with the jdist that saved it"
        )


def check_fingerprint(saved: Any, now: str) -> None:
    """Raises a `DatasetError` that names what differs, if a position was saved of other data."""
    if saved != now:
        raise DatasetError(
            f"the saved position belongs to another dataset: {_difference(saved, now)}. A position counts batches, so data, "
            "global batch and shuffle seed must be the same (the number of devices may differ); make the "
            "source as it was, or start at step 0"
        )


def _difference(saved: Any, now: str) -> str:
    before, after = fields(str(saved)), fields(now)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if not changed or len(before) < 2 or len(after) < 2:
        return f"its fingerprint was {saved!r} and is {now!r}"
    return "; ".join(
        f"{key} was {before.get(key, 'not there')} and is {after.get(key, 'not there')}" for key in changed
    )


def fields(fingerprint: str) -> dict[str, str]:
    """Parses the names and values of a fingerprint; leaves out other text."""
    return dict(part.split("=", 1) for part in fingerprint.split() if "=" in part)
