"""Datasets on a worker: made by functions that it finds by their names, read batch by batch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jdist.data.dataset import DistributedDataset
from jdist.data.distribute import distributed_dataset
from jdist.data.input_context import InputContext
from jdist.errors import DatasetError, WireError
from jdist.ps.batch_tree import to_structure
from jdist.ps.transport.seam import Header, Method

SCRIPT = "__main__"
MOST_AHEAD = 64
_MODULE = "__jdist_script__"


class WorkerData:
    """The datasets of a worker's jobs.

    Args:
        script: the file that names beginning with "__main__:" are looked up in; run once, as a module of another name, so that
            what it guards by `if __name__ == "__main__"` is left out.
        num_replicas: the worker's devices, among which a batch has to divide.
    """

    def __init__(self, script: str | None = None, num_replicas: int = 1):
        self._script, self._num_replicas, self._lock = script, num_replicas, threading.Lock()
        self._made: dict[int, _Made] = {}
        self._pipelines: dict[tuple[int, int, int], _Pipeline] = {}

    def methods(self) -> dict[str, Method]:
        """What a transport serves."""
        return {"open": Method(_telling(self._open)), "advance": Method(_telling(self._advance))}

    def batch(self, name: Any) -> list[np.ndarray]:
        """The leaves of a batch.

        Args:
            name: dataset, pass over it, pipeline, number.

        Raises:
            DatasetError: the dataset is not known, or has no such batch.
        """
        dataset, number_of_pass, pipeline, number = name
        return self._pipeline(dataset, number_of_pass, pipeline).batch(number)

    def _open(self, header: Header) -> Header:
        """Makes a dataset known, and says how its batches look."""
        number, pipeline = _whole(header, "dataset", "pipeline")
        with self._lock:
            known = self._made.get(number)
        made = known or _Made(header, self._script, self._num_replicas)
        with self._lock:
            self._made[number] = made
        dataset = made.dataset(pipeline)
        return {"spec": to_structure(dataset.element_spec), "steps": dataset.num_steps}

    def _advance(self, header: Header) -> Header:
        """Reads ahead; how many batches are there, and whether that is all."""
        dataset, number_of_pass, pipeline, ahead = _whole(header, "dataset", "pass", "pipeline", "ahead")
        return self._pipeline(dataset, number_of_pass, pipeline).advance(min(ahead, MOST_AHEAD))

    def _pipeline(self, dataset: int, number_of_pass: int, pipeline: int) -> _Pipeline:
        key = (dataset, number_of_pass, pipeline)
        with self._lock:
            found, made = self._pipelines.get(key), self._made.get(dataset)
        if found is None:
            if made is None:
                raise DatasetError(f"dataset {dataset} was not opened on this worker")
            found = _Pipeline(functools.partial(made.dataset, pipeline))
            with self._lock:
                older = [k for k in self._pipelines if k[0] == dataset and k[1] < number_of_pass]
                for k in older:
                    self._pipelines.pop(k).close()
                found = self._pipelines.setdefault(key, found)
        return found


class _Made:
    """A dataset function with its options."""

    def __init__(self, header: Header, script: str | None, num_replicas: int):
        self._num_replicas = num_replicas
        name, options = header.get("name"), header.get("options")
        (self._pipelines,) = _whole(header, "pipelines")
        if not isinstance(name, str) or not isinstance(options, dict):
            raise WireError("a dataset of no name")
        self._fn, self._options = function_named(name, script), options

    def dataset(self, pipeline: int) -> DistributedDataset:
        context = InputContext(
            num_input_pipelines=self._pipelines, input_pipeline_id=pipeline, num_replicas_in_sync=self._pipelines
        )
        source: Iterable[Any] = self._fn(context)
        return distributed_dataset(
            source,
            num_replicas=self._num_replicas,
            place=None,
            partial=self._options["partial"],
            with_mask=bool(self._options["with_mask"]),
            prefetch=self._options["prefetch"],
        )


class _Pipeline:
    """One pass over one worker's share."""

    def __init__(self, make: Callable[[], DistributedDataset]):
        self._make, self._dataset, self._lock = make, make(), threading.Lock()
        self._batches: Iterator[Any] | None = None
        self._read = 0  # batches that were taken from the iterator
        self._ahead: dict[int, list[np.ndarray]] = {}
        self._ended = False

    def advance(self, ahead: int) -> Header:
        """Reads so many batches ahead of what was asked for."""
        with self._lock:
            while len(self._ahead) < ahead and not self._ended:
                self._take_next()
            return {"available": self._read, "ended": self._ended}

    def batch(self, number: int) -> list[np.ndarray]:
        """The leaves of one batch; batches are asked for in their order, but for those of a worker that was lost."""
        with self._lock:
            if number not in self._ahead:
                if number < self._read:
                    self._go_to(number)
                while self._read <= number and not self._ended:
                    self._ahead.clear()
                    self._take_next()
            if number not in self._ahead:
                raise DatasetError(f"the dataset has {self._read} batches, and number {number} was asked for")
            return self._ahead.pop(number)

    def close(self) -> None:
        """Ends what reads ahead."""
        self._dataset.close()

    def _take_next(self) -> None:
        if self._batches is None:
            self._batches = iter(self._dataset)
        try:
            leaves = jax.tree.leaves(next(self._batches))
        except StopIteration:
            self._ended = True
            return
        self._ahead[self._read] = [np.asarray(x) for x in leaves]
        self._read += 1

    def _go_to(self, number: int) -> None:
        """Begins again at a batch; what has no position is read from its beginning."""
        self._ahead.clear()
        self._ended = False
        try:
            self._dataset.go_to(number)
            self._read = number
        except DatasetError:  # a plain iterable
            self._dataset.close()
            self._dataset, self._read = self._make(), 0
        self._batches = iter(self._dataset)


def _telling(run: Callable[[Header], Header]) -> Callable[[Header, list[np.ndarray]], tuple[Header, list[Any]]]:
    """Tells the coordinator, whose function it is, where that failed; it is his code, and his errors."""

    def told(header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        try:
            return run(header), []
        except WireError:
            raise
        except Exception:  # noqa: BLE001  # whatever a user's function raises
            return {"error": traceback.format_exc()}, []

    return told


def function_named(name: str, script: str | None) -> Callable[[InputContext], Any]:
    """The function that "module:function" names.

    Raises:
        DatasetError: there is none.
    """
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
            raise DatasetError(f"--script is {script!r}, which is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        sys.modules[_MODULE] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[_MODULE]
            raise
    return sys.modules[_MODULE]


def _whole(header: Header, *names: str) -> list[int]:
    found = [header.get(name) for name in names]
    if any(type(x) is not int or x < 0 for x in found):
        raise WireError("a number that is none")
    return found  # type: ignore[return-value]  # they are whole numbers, as was just checked
