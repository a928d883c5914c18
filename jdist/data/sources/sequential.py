"""Sources that only go forward: those of libraries that can save a place among their batches, and those that cannot."""

from __future__ import annotations

import abc
import base64
import importlib
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jdist.data.sources.protocol import RandomAccessSource
from jdist.errors import DatasetError
from jdist.typing import PyTree

_TYPE = "__type__"
# The batches of a pass, each with the state behind it; at the end it returns the state that the next pass begins with.
Batches = Generator[tuple[PyTree, Any], None, Any]


class SequentialSource(Iterable[PyTree], abc.ABC):
    """Batches in order; unless there is `advice`, of a library that can save a place and go on there without reading."""

    kind: str  # its name in messages, "grain IterDataset"
    advice: str = ""  # why no place can be saved, and which source has places
    num_steps: int | None = None  # batches of a pass; None: unknown
    is_endless: bool = False  # a pass is known to be endless
    is_stream: bool = False  # it cannot begin again
    is_fresh: bool = False  # nobody else has or reuses the memory of its batches
    # `(index, count)` if the library gives this process only its part of the data
    own_part: tuple[int, int] | None = None
    # code that makes the library share the data among processes; "": jdist shares it
    how_to_share: str = ""

    @abc.abstractmethod
    def open(self, epoch: int, state: Any) -> Batches:
        """Begins pass number `epoch`, from 0, or goes on at a state of it; None: from the beginning."""
        # A state comes with each batch, so it must be cheap. An error of `open` itself is one of the state.

    @property
    def full_batch(self) -> int | None:
        """Rows of a full batch; None: as many as the first one has."""
        return None

    @property
    def fingerprint(self) -> str:
        """Identifies the data; a saved place only fits the same. Written as that of a `RandomAccessSource`."""
        return ""

    def describe_batch(self, number: int, error: Exception) -> str | None:
        """Describes the rows of a batch of a pass in which an error was raised, for its message; None: not known."""
        return None

    def to_plain(self, state: Any) -> Any:
        """Converts a state to values that JSON can hold."""
        return to_plain(state, self.kind)

    def from_plain(self, value: Any) -> Any:
        """Undoes `to_plain`."""
        return from_plain(value)

    def __iter__(self) -> Iterator[PyTree]:
        return (batch for batch, _ in self.open(0, None))


@dataclass(kw_only=True, eq=False)
class PlainSource(SequentialSource):
    """Batches of another library's loader that has no places."""

    kind: str
    begin: Callable[[int], Iterator[PyTree]]  # opens a pass by its number, from 0
    advice: str
    how_to_share: str
    num_steps: int | None = None
    own_part: tuple[int, int] | None = None
    # describes the row that raised an error; None: unknown
    describe_row: Callable[[Exception], str | None] = lambda _: None
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False)

    def __iter__(self) -> Iterator[PyTree]:
        return self.begin(next(self._numbers))

    def open(self, epoch: int, state: Any) -> Batches:
        return ((batch, None) for batch in self.begin(epoch))

    def describe_batch(self, number: int, error: Exception) -> str | None:
        return self.describe_row(error)


class IterableSource(SequentialSource):
    """A user's iterable of batches."""

    advice = (
        "a plain iterable only goes forward, so resuming would mean reading everything again up to there. Use "
        "`jdist.data.from_arrays(...)`, or a source object with `num_steps`, `global_batch`, `fingerprint` and `batch_at(step)`"
    )

    def __init__(self, batches: Iterable[PyTree]):
        self._batches = batches
        self.kind = type(batches).__name__
        self.is_stream = isinstance(batches, Iterator)

    @property
    def num_steps(self) -> int | None:  # type: ignore[override]  # asked each time: it may grow
        try:
            return len(self._batches)  # type: ignore[arg-type]  # refused in the next line
        except (TypeError, NotImplementedError):  # also of a loader that does not know it
            return getattr(self._batches, "num_steps", None)

    def open(self, epoch: int, state: Any) -> Batches:
        return ((batch, None) for batch in self._batches)


def resumable(source: Any) -> RandomAccessSource | SequentialSource:
    """Returns a source with a position that can be saved; raises a `DatasetError` for any other."""
    if isinstance(source, RandomAccessSource):
        return source
    source = source if isinstance(source, SequentialSource) else IterableSource(source)
    if source.advice:
        raise DatasetError(f"the position in a {source.kind} cannot be saved or restored: {source.advice}")
    return source


def to_plain(value: Any, kind: str, path: str = "") -> Any:
    """Converts a tree of plain values, bytes, arrays and torch tensors to JSON values."""
    torch = sys.modules.get("torch")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return {_TYPE: "bytes", "data": base64.b64encode(value).decode()}
    if torch is not None and isinstance(value, torch.Tensor):
        return {**_of_array(value.detach().cpu().numpy()), _TYPE: "tensor"}
    if isinstance(value, np.ndarray | np.generic) and not np.asarray(value).dtype.hasobject:
        return _of_array(np.asarray(value))
    if isinstance(value, list):
        return [to_plain(each, kind, f"{path}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {_TYPE: "tuple", "items": to_plain(list(value), kind, path)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TYPE not in value:
            return {key: to_plain(each, kind, f"{path}[{key!r}]") for key, each in value.items()}
        return {_TYPE: "dict", "items": [to_plain(list(pair), kind, path) for pair in value.items()]}
    raise DatasetError(
        f"the position of the {kind} cannot be saved: its state has a {type(value).__name__} at {path or 'the top'}. Let "
        "`state_dict()` return numbers, texts, bytes, arrays, tensors, lists and dicts alone"
    )


def from_plain(value: Any) -> Any:
    """Undoes `to_plain`."""
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TYPE)
    if kind is None:
        return {key: from_plain(each) for key, each in value.items()}
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "tuple":
        return tuple(from_plain(value["items"]))
    if kind == "dict":
        return dict(from_plain(pair) for pair in value["items"])
    array = np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"]).copy()
    if kind == "tensor":
        return importlib.import_module("torch").from_numpy(array)
    return array if value["shape"] or kind != "array" else array[()]


def _of_array(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_TYPE: "array", "dtype": str(array.dtype), "shape": list(array.shape), "data": data}
