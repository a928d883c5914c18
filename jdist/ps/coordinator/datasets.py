"""Datasets that workers read: which batches there are, and which worker reads which."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jdist.errors import ClosureCancelledError, DatasetError
from jdist.ps.coordinator.remote_value import Pending, RemoteValue
from jdist.ps.program.artifact import sent_of
from jdist.ps.transport.interface import CallFailed, Channel, Header
from jdist.ps.worker.data import SCRIPT, from_structure
from jdist.typing import PyTree

BatchName = tuple[int, int, int, int]  # dataset, pass over it, pipeline, number
AHEAD = 16  # batches that a worker of a dataset without a known end reads ahead
_POLL_S = 0.01
_CALL_S = 60.0
_numbers = itertools.count(1)


class WorkerDataset:
    """A dataset made by a function that runs on each worker, which reads its own share."""

    # Iterating gives one `RemoteBatch` for each batch of any worker, and ends when every share is
    # read. It stands for a batch of a step, or for an argument of a scheduled function. Source:
    # `tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset`.

    def __init__(self, name: str, options: dict[str, Any], connects: Sequence[Callable[[], Channel]], wait_s: float):
        """Opens "module:function" on the workers, with the options of `distributed_dataset`."""
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
        """Asks the worker that owns the share, or another one if that does not answer."""
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


class DatasetPass:
    """Hands out the batches of one pass over a dataset."""

    # Each worker reads its own share, from its first batch on; another worker reads it only while
    # that worker is lost. The number of batches in a share may be unknown. Then workers read ahead
    # to find out, and may be given a batch that turns out not to exist.

    def __init__(
        self,
        number: int,
        header: Header,
        spec: PyTree,
        steps: Sequence[int | None],
        ask: Callable[[int, str, Header], Header],
    ):
        self.header, self.spec = header, spec
        self._number, self._ask = number, ask
        self._lock = threading.Lock()
        self._known = [count or 0 for count in steps]  # batches that are there for sure
        self._ended = [count is not None for count in steps]
        self._taken = [0 for _ in steps]
        self._reserved = 0
        # Handed to the caller; no worker has had them.
        self._unnamed: weakref.WeakSet[RemoteBatch] = weakref.WeakSet()

    def next(self) -> RemoteBatch | None:
        """Returns one more batch; None at the end."""
        while True:
            with self._lock:
                if self._reserved < sum(self._known):
                    self._reserved += 1
                    batch = RemoteBatch(self)
                    self._unnamed.add(batch)
                    return batch
                if all(self._ended):
                    return None
                wanted, asked = self._to_be_read(), list(self._taken)
            for p, until in wanted.items():
                header = {**self.header, "pass": self._number, "pipeline": p, "until": until, "asked": asked[p]}
                answer = self._ask(p, "advance", header)
                with self._lock:
                    self._known[p] = max(self._known[p], answer["available"])
                    if answer["ended"]:
                        self._end(p, answer["available"])
            if not wanted:  # workers are to take some first, which needs nothing of the caller
                time.sleep(_POLL_S)

    def _to_be_read(self) -> dict[int, int]:
        """Returns how far to read each share without a known end; empty while enough is read ahead."""
        wanted = self._ahead_of(self._taken)
        if wanted or any(batch.is_wanted for batch in list(self._unnamed)):
            return wanted
        self._leave_out()
        # The caller has those, and wants more.
        return self._ahead_of(self._taken) or self._ahead_of(self._known)

    def _ahead_of(self, counts: Sequence[int]) -> dict[int, int]:
        wanted = {p: counts[p] + AHEAD for p, ended in enumerate(self._ended) if not ended}
        return {p: until for p, until in wanted.items() if self._known[p] < until}

    def _leave_out(self) -> None:
        """Counts as taken what the caller has forgotten, as nobody will read it."""
        for _ in range(self._reserved - sum(self._taken) - len(self._unnamed)):
            most = max(range(len(self._known)), key=lambda p: self._known[p] - self._taken[p])
            self._taken[most] += self._known[most] > self._taken[most]

    def use(self, batch: RemoteBatch, pending: Pending) -> None:
        """Gives a batch to a call; refuses a batch that another call has."""
        with self._lock:
            before = batch.pending
            if before is not None and not (before.done and isinstance(before.error, ClosureCancelledError)):
                raise DatasetError(
                    f"a batch of {self.header['name']} was given to a second call; a batch that a worker reads is for one. "
                    "Do all the work on it in one function, or take the next batch."
                )
            batch.pending = pending

    def take(self, batch: RemoteBatch, worker: int, lost: Collection[int]) -> BatchName | None:
        """Names a worker's batch: the one named before, or the next of its own share."""
        # None if another worker must read it. Other workers read the shares of `lost` ones.
        with self._lock:
            if batch.name is not None:
                *_, owner, number = batch.name
                if not self._ended[owner] or number < self._known[owner]:
                    return batch.name if owner in (worker, *lost) else None
            batch.name = None
            self._unnamed.add(batch)
            shares = [worker, *sorted(lost, key=self._left, reverse=True)]
            pipeline = next((p for p in shares if self._left(p) > 0), None)
            if pipeline is not None:
                self._unnamed.discard(batch)
                batch.name = self.header["dataset"], self._number, pipeline, self._taken[pipeline]
                self._taken[pipeline] += 1
            elif not any(self._left(p) > 0 for p in range(len(self._known))):
                raise DatasetError(
                    f"{self.header['name']} has {sum(self._known):,} batches on all workers together, fewer than at "
                    "first: it must give the same batches each time that it is made and read"
                )
            return batch.name

    def ended(self, pipeline: int, count: int) -> None:
        """Notes that a share has turned out to have only so many batches."""
        with self._lock:
            self._end(pipeline, count)

    def _end(self, pipeline: int, count: int) -> None:
        self._known[pipeline], self._ended[pipeline] = count, True
        self._taken[pipeline] = min(self._taken[pipeline], count)

    def _left(self, pipeline: int) -> float:
        """Counts the batches of a share that nobody has taken, as far as is known."""
        return self._known[pipeline] - self._taken[pipeline] if self._ended[pipeline] else math.inf


class RemoteBatch:
    """A batch that a worker will read; stands for its full tree."""

    def __init__(self, of_pass: DatasetPass):
        self.of_pass, self.spec = of_pass, of_pass.spec  # a tree of `jax.ShapeDtypeStruct`
        # Set once a worker had it; stays the same if another worker computes it again.
        self.name: BatchName | None = None
        self.pending: Pending | None = None

    @property
    def is_wanted(self) -> bool:
        """Returns whether a worker is to take it: it was given to a call that was not cancelled, and none has it."""
        return self.name is None and self.pending is not None and not self.pending.done

    def __repr__(self) -> str:
        return f"RemoteBatch({self.of_pass.header['name']})"


def name_of_function(fn: Any) -> str:
    """Returns the "module:function" by which a worker finds a function."""
    if isinstance(fn, str) and all(fn.partition(":")):
        return fn
    if not callable(fn):
        raise DatasetError(
            f"the dataset function is {fn!r}; pass a function from a `jdist.InputContext` to a source of batches, or its name "
            "'package.module:function'."
        )
    module, path = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<lambda>")
    why, more = "", ""
    if module is None or "<" in path:
        why = "it is a lambda, or defined inside of another function"
    elif module == SCRIPT and not getattr(sys.modules.get(SCRIPT), "__file__", None):
        why = "it is defined in a notebook or an interactive session, which no worker has"
        more = " In a notebook, `%%writefile my_data.py` makes one."
    elif inspect.ismethod(fn):
        why = "it is a method"
    if why:
        raise DatasetError(
            f"the dataset function {path} cannot be found by workers: {why}. Define it at the top of a module that the workers "
            f"can import, and pass it or its name 'package.module:function'.{more}"
        )
    return f"{module}:{path}"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call, flat; the leaves of a batch that a worker reads are structs."""

    leaves: list[Any]
    treedef: Any
    place: tuple[int, int] | None  # those that the worker reads itself: the first, and how many
    reads: RemoteBatch | None  # the batch that these are

    @property
    def forms(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Shape and dtype of each: a key of every call, as a `ShapeDtypeStruct` is slow to hash."""
        given = (x.struct if isinstance(x, RemoteValue) else x for x in self.leaves)
        quick, slow = jax.dtypes.canonicalize_dtype, jax.dtypes.result_type  # of NumPy's arrays both say the same
        return tuple((np.shape(x), quick(x.dtype) if type(x) is np.ndarray else slow(x)) for x in given)

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(*form) for form in self.forms]

    @property
    def sent(self) -> list[Any]:
        """The arrays that travel with the closure."""
        return sent_of(self.leaves, self.place)


def flatten(tree: PyTree) -> Arguments:
    """Flattens a tree of arguments in which a `RemoteBatch` may stand for a part, and waits for values of unknown form."""
    nodes, outer = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, RemoteBatch))
    nodes = [x.result() if isinstance(x, RemoteValue) and x.struct is None else x for x in nodes]
    batches = [(i, x) for i, x in enumerate(nodes) if isinstance(x, RemoteBatch)]
    if not batches:
        return Arguments(nodes, outer, None, None)
    if len(batches) > 1:
        raise DatasetError("a call has two batches for workers to read; zip the two datasets in their function.")
    ((i, batch),) = batches
    nodes[i] = batch.spec
    leaves, treedef = jax.tree.flatten(jax.tree.unflatten(outer, nodes))
    return Arguments(leaves, treedef, (i, len(jax.tree.leaves(batch.spec))), batch)
