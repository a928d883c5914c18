"""Datasets on a worker: made by functions that it finds by their names, read batch by batch."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jdist.data.dataset import DistributedDataset
from jdist.data.feed import distributed_dataset
from jdist.data.options import FeedOptions, InputContext, InputOptions
from jdist.errors import DatasetError, WireError
from jdist.ps.transport.interface import Header, Method, integers

SCRIPT = "__main__"
MOST_KEPT = 64  # batches of a share that were read and not asked for
_BEHIND = 16  # as many as a worker has at a time
_ADVANCE_S = 20.0
_MODULE = "__jdist_script__"


class WorkerData:
    """The datasets of a worker's jobs; a batch must divide among its `num_replicas` devices."""

    # Names that begin with "__main__:" are looked up in the file `script`. It runs once, as a
    # module of another name, so that code under `if __name__ == "__main__"` is left out.

    def __init__(self, script: str | None = None, num_replicas: int = 1):
        self._script, self._num_replicas, self._lock = script, num_replicas, threading.Lock()
        self._datasets: dict[int, Callable[[int], DistributedDataset]] = {}  # from a pipeline to its share
        self._pipelines: dict[tuple[int, int, int], _Pipeline] = {}

    def methods(self) -> dict[str, Method]:
        """Returns the methods that a transport serves."""
        return {"open": Method(_with_traceback(self._open)), "advance": Method(_with_traceback(self._advance))}

    def batch(self, name: Any) -> list[np.ndarray]:
        """Returns the leaves of the batch `(dataset, pass, pipeline, number)`."""
        dataset, number_of_pass, pipeline, number = name
        return self._pipeline(dataset, number_of_pass, pipeline).batch(number)

    def _open(self, header: Header) -> Header:
        """Makes a dataset known, and says how the batches of one of its shares look."""
        make = self._opened(header)
        if "pipeline" not in header:
            return {}
        (pipeline,) = integers(header, "pipeline")
        dataset = make(pipeline)
        return {"spec": to_structure(dataset.element_spec), "steps": dataset.num_steps}

    def _advance(self, header: Header) -> Header:
        """Reads ahead, and says how many batches are there, and whether that is all."""
        names = ("dataset", "pass", "pipeline", "until", "asked")
        dataset, number_of_pass, pipeline, until, asked = integers(header, *names)
        self._opened(header)
        return self._pipeline(dataset, number_of_pass, pipeline).advance(until, asked)

    def _opened(self, header: Header) -> Callable[[int], DistributedDataset]:
        """Returns what makes the shares of a dataset, which may be new to this process."""
        (number,) = integers(header, "dataset")
        with self._lock:
            known = self._datasets.get(number)
        make = known or _maker(header, self._script, self._num_replicas)
        with self._lock:
            return self._datasets.setdefault(number, make)

    def _pipeline(self, dataset: int, number_of_pass: int, pipeline: int) -> _Pipeline:
        key = (dataset, number_of_pass, pipeline)
        with self._lock:
            known, make = self._pipelines.get(key), self._datasets.get(dataset)
        if known is not None:
            return known
        if make is None:
            raise DatasetError(f"dataset {dataset} was not opened on this worker")
        begun = _Pipeline(functools.partial(make, pipeline))
        with self._lock:
            older = [k for k in self._pipelines if k[0] == dataset and k[1] < number_of_pass]
            for k in older:
                self._pipelines.pop(k).close()
            return self._pipelines.setdefault(key, begun)


def _maker(header: Header, script: str | None, num_replicas: int) -> Callable[[int], DistributedDataset]:
    """Returns a function that makes the share of a pipeline, of the dataset that a header names."""
    name, options = header.get("name"), header.get("options")
    (pipelines,) = integers(header, "pipelines")
    if not isinstance(name, str) or not isinstance(options, dict):
        raise WireError("a dataset needs a `name` and `options`")
    function = function_named(name, script)
    feed = FeedOptions(
        num_replicas=num_replicas,
        partial=options["partial"],
        with_mask=bool(options["with_mask"]),
        input=InputOptions(prefetch=options["prefetch"]),
    )

    def make(pipeline: int) -> DistributedDataset:
        source: Iterable[Any] = function(
            InputContext(num_input_pipelines=pipelines, input_pipeline_id=pipeline, num_replicas_in_sync=pipelines)
        )
        return distributed_dataset(source, dataclasses.replace(feed, orders={}))  # told of once a dataset, not a pass

    return make


class EndOfDataError(DatasetError):
    """A request for a batch that the share does not have; it has `count` batches."""

    def __init__(self, count: int, number: int):
        super().__init__(f"the dataset has {count} batches, and number {number} was asked for")
        self.count = count


class _Pipeline:
    """One pass over one worker's share."""

    # Keeps batches that were read ahead, and a few behind the newest request: requests of a lost
    # worker come late. Other batches are read again.

    def __init__(self, make: Callable[[], DistributedDataset]):
        self._make, self._dataset = make, make()
        self._reading, self._lock = threading.Lock(), threading.Lock()  # the second only for moments
        self._batches: Iterator[Any] | None = None
        self._next = 0  # the number of the iterator's next batch
        self._known = 0  # batches that are there for sure
        self._end: int | None = None  # all that there are
        self._asked = 0  # the newest that was asked for
        self._kept: dict[int, list[np.ndarray]] = {}
        self._error: Exception | None = None

    def advance(self, until: int, asked: int) -> Header:
        """Reads on until so many batches are known, though not for long; those far below `asked` are not kept."""
        end = time.monotonic() + _ADVANCE_S
        while time.monotonic() < end:
            with self._reading:
                self._forget(asked)
                if self._known >= until or self._end is not None:
                    break
                number, leaves = self._next, self._read()
                if leaves is not None:
                    self._keep(number, leaves)
        return {"available": self._known, "ended": self._end is not None}

    def batch(self, number: int) -> list[np.ndarray]:
        """Returns one batch's leaves; requests come in order, except a lost worker's."""
        if (leaves := self._take(number)) is not None:  # also while another thread reads on
            return leaves
        with self._reading:
            if (leaves := self._take(number)) is not None:
                return leaves
            if number < self._next and (self._end is None or number < self._end):
                self._go_to(number)
            while self._end is None or number < self._end:
                at, leaves = self._next, self._read()
                if at == number and leaves is not None:
                    return leaves
                if leaves is not None:
                    self._keep(at, leaves)
            raise EndOfDataError(self._end, number)

    def close(self) -> None:
        """Ends what reads ahead."""
        self._dataset.close()

    def _take(self, number: int) -> list[np.ndarray] | None:
        self._forget(number)
        with self._lock:
            return self._kept.pop(number, None)

    def _forget(self, asked: int) -> None:
        with self._lock:
            self._asked = max(self._asked, asked)
            for number in [n for n in self._kept if n < self._asked - _BEHIND]:
                del self._kept[number]

    def _keep(self, number: int, leaves: list[np.ndarray]) -> None:
        with self._lock:
            if number >= self._asked - _BEHIND and len(self._kept) < MOST_KEPT:
                self._kept[number] = leaves

    def _read(self) -> list[np.ndarray] | None:
        """Reads the iterator's next batch; None at the end."""
        if self._error is not None:
            raise self._error  # an iterator that has failed calls itself at its end
        if self._batches is None:
            self._batches = iter(self._dataset)
        try:
            leaves = jax.tree.leaves(next(self._batches))
        except StopIteration:
            self._known = self._end = self._next
            return None
        except Exception as exc:
            self._error = exc
            raise
        self._next += 1
        self._known = max(self._known, self._next)
        return [np.asarray(x) for x in leaves]

    def _go_to(self, number: int) -> None:
        """Begins again at a batch; what has no position is read from its beginning."""
        self._error = None
        try:
            self._dataset.go_to(number)
            self._next = number
        except DatasetError:  # a plain iterable
            self._dataset.close()
            self._dataset, self._next = self._make(), 0
        self._batches = iter(self._dataset)


def _with_traceback(run: Callable[[Header], Header]) -> Callable[[Header, list[np.ndarray]], tuple[Header, list[Any]]]:
    """Answers with the traceback where the dataset function fails: it is the caller's own code."""

    def answer(header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        try:
            return run(header), []
        except WireError:
            raise
        except Exception:  # noqa: BLE001  # whatever a user's function raises
            return {"error": traceback.format_exc()}, []

    return answer


def function_named(name: str, script: str | None) -> Callable[[InputContext], Any]:
    """Returns the function that "module:function" names."""
    module, _, path = name.partition(":")
    if module == SCRIPT:
        if script is None:
            raise DatasetError(
                f"{name!r} is defined in the script that the program was started with, which this worker does not have. "
                "Start it with `jdist serve --script FILE`, or move the function into a module that can be imported here."
            )
        found: Any = _script_module(script)
    else:
        try:
            found = importlib.import_module(module)
        except ImportError as exc:
            raise DatasetError(f"the worker cannot import {module!r} for the dataset function {name!r}: {exc}") from exc
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise DatasetError(
            f"{name!r} names no function that the worker can find. Workers import its module, or run the script as a module of "
            'another name: define it there at the top, not under `if __name__ == "__main__":`.'
        )
    return found


def _script_module(script: str) -> Any:
    if _MODULE not in sys.modules:
        spec = importlib.util.spec_from_file_location(_MODULE, script)
        if spec is None or spec.loader is None:
            raise DatasetError(f"--script is {script!r}, which is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        sys.modules[_MODULE] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[_MODULE]
            raise
    return sys.modules[_MODULE]


def to_structure(spec: Any) -> Any:
    """Describes a tree of `jax.ShapeDtypeStruct` by plain dicts, lists and tuples."""
    if isinstance(spec, dict):
        if not all(isinstance(key, str) for key in spec):
            raise DatasetError("a batch that is made on a worker must have names (str) as keys")
        return {"dict": {key: to_structure(x) for key, x in spec.items()}}
    if type(spec) in (list, tuple):
        return {type(spec).__name__: [to_structure(x) for x in spec]}
    if isinstance(spec, jax.ShapeDtypeStruct):
        return {"array": [list(spec.shape), np.dtype(spec.dtype).name]}
    raise DatasetError(
        f"a batch that is made on a worker has a {type(spec).__name__} in it; it may hold dicts, lists, tuples and arrays."
    )


def from_structure(plain: Any) -> Any:
    """Makes the tree of `jax.ShapeDtypeStruct` that plain values describe."""
    if not isinstance(plain, dict) or len(plain) != 1:
        raise WireError("a node of a batch must be a map of one entry")
    ((kind, value),) = plain.items()
    if kind == "dict" and isinstance(value, dict):
        return {key: from_structure(x) for key, x in value.items()}
    if kind in ("list", "tuple") and isinstance(value, list):
        nodes = [from_structure(x) for x in value]
        return nodes if kind == "list" else tuple(nodes)
    if kind == "array" and isinstance(value, list) and len(value) == 2:
        return jax.ShapeDtypeStruct(tuple(value[0]), np.dtype(value[1]))
    raise WireError("a node of a batch must be a dict, a list, a tuple or an array")
