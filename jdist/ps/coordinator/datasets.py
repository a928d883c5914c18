"""Datasets that workers read, as the coordinator has them."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jdist.errors import DatasetError
from jdist.ps.coordinator.dataset_pass import DatasetPass, RemoteBatch
from jdist.ps.program.batch_tree import from_structure
from jdist.ps.transport.interface import CallFailed, Channel, Header
from jdist.ps.worker.data import SCRIPT

PyTree = Any
_CALL_S = 60.0
_numbers = itertools.count(1)


class WorkerDataset:
    """A dataset of which each worker reads its own share, made by a function that runs there.

    Iterating gives one `RemoteBatch` for each batch of all workers together, and ends when every worker's share is read. It
    takes the place of a batch: of a step, or of an argument of a scheduled function.

    Source: `tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset`.
    """

    def __init__(self, name: str, options: dict[str, Any], connects: Sequence[Callable[[], Channel]], wait_s: float):
        """Opens it on the workers.

        Args:
            name: of the function, "module:function".
            options: those of `distributed_dataset`.
            connects: makes a channel to each worker.
            wait_s: how long to wait for a worker that does not answer.

        Raises:
            DatasetError: a worker cannot make it; with what the worker says.
        """
        self.number, self._wait_s = next(_numbers), wait_s
        self._connects = tuple(connects)
        self.header: Header = {
            "dataset": self.number,
            "name": name,
            "options": options,
            "pipelines": len(self._connects),
        }
        self._passes = itertools.count()
        answers = [self.ask(p, "open", {**self.header, "pipeline": p}) for p in range(len(self._connects))]
        self.steps: list[int | None] = [answer["steps"] for answer in answers]
        specs = [from_structure(answer["spec"]) for answer in answers]
        if any(spec != specs[0] for spec in specs):
            raise DatasetError(
                f"{name}: the workers' batches differ in their trees, shapes or dtypes: {specs[0]} and others"
            )
        self.element_spec: PyTree = specs[0]

    def __iter__(self) -> Iterator[RemoteBatch]:
        one_pass = DatasetPass(next(self._passes), self.header, self.element_spec, self.steps, self.ask)
        while (batch := one_pass.next()) is not None:
            yield batch
            del batch  # whether the caller still has it is of interest

    def ask(self, pipeline: int, method: str, header: Header) -> Header:
        """Asks the worker whose share it is, or another one if that does not answer.

        Raises:
            DatasetError: the function failed, with the worker's traceback; or no worker answers.
        """
        end = time.monotonic() + self._wait_s
        for attempt in itertools.count():
            channel = self._connects[(pipeline + attempt) % len(self._connects)]()
            try:
                answer, _ = channel.call(method, header, timeout_s=_CALL_S)
            except CallFailed as exc:
                if time.monotonic() > end:
                    raise DatasetError(f"no worker answers for the dataset {self.header['name']}: {exc}") from exc
                time.sleep(0.2)
                continue
            finally:
                channel.close()
            if "error" in answer:
                raise DatasetError(f"the dataset function {self.header['name']} failed on a worker:\n{answer['error']}")
            return answer
        raise AssertionError  # the loop has no end


def name_of_function(fn: Any) -> str:
    """Returns the name by which a worker finds a function.

    Args:
        fn: a function of a module, or "module:function".

    Raises:
        DatasetError: it has none; says how to give it one.
    """
    if isinstance(fn, str):
        if not all(fn.partition(":")):
            raise DatasetError(f"the dataset function is {fn!r}; a name is 'package.module:function'")
        return fn
    if not callable(fn):
        raise DatasetError(
            f"the dataset function is {fn!r}; pass a function from a `jdist.InputContext` to a source of batches, or its name "
            "'package.module:function'."
        )
    module, path = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<lambda>")
    how = "Define it at the top of a module that the workers can import, and pass it or its name 'package.module:function'."
    if module is None or "<" in path:
        raise DatasetError(
            f"the dataset function {path} cannot be found by workers: it is a lambda, or defined inside of another function. "
            f"{how}"
        )
    if module == SCRIPT and not getattr(sys.modules.get(SCRIPT), "__file__", None):
        raise DatasetError(
            f"the dataset function {path} is defined in a notebook or an interactive session, which no worker has. {how} In a "
            "notebook, `%%writefile my_data.py` makes one."
        )
    if inspect.ismethod(fn):
        raise DatasetError(f"the dataset function {path} is a method. {how}")
    return f"{module}:{path}"


def flatten(tree: PyTree) -> tuple[list[Any], Any, tuple[int, int] | None, RemoteBatch | None]:
    """Flattens a tree of arguments in which a `RemoteBatch` may stand for a part.

    Returns:
        `(leaves, treedef, (first, count) of the leaves that are its, it)`; these leaves are structs.

    Raises:
        DatasetError: there are two of them.
    """
    nodes, outer = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, RemoteBatch))
    batches = [(i, x) for i, x in enumerate(nodes) if isinstance(x, RemoteBatch)]
    if not batches:
        return nodes, outer, None, None
    if len(batches) > 1:
        raise DatasetError("a call has two batches that workers are to read; zip the two datasets in their function.")
    ((i, batch),) = batches
    nodes[i] = batch.spec
    leaves, treedef = jax.tree.flatten(jax.tree.unflatten(outer, nodes))
    return leaves, treedef, (i, len(jax.tree.leaves(batch.spec))), batch
