"""The coordinator's record of its closures: their functions, arguments and results.

A closure is kept until a snapshot contains it. After a parameter server lost its memory, the closures that no snapshot
contains run again. The queue calls this and holds the lock.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jdist.errors import ClosureCancelledError, ClosureError, NonFiniteClosureError, NoWorkersError
from jdist.ps.coordinator.datasets import RemoteBatch
from jdist.ps.coordinator.remote_value import Pending
from jdist.ps.program.function_plan import Combine, FunctionPlan
from jdist.ps.protocol.scheduler_events import Finish
from jdist.ps.protocol.wire import Spec

MOST_QUEUED_BYTES = 512 << 20  # of the arguments of closures that are not done
SNAPSHOT_EVERY = 1000  # closures; their arguments are kept until then
MOST_LOGGED_BYTES = 256 << 20  # of kept arguments; beyond, a snapshot is due earlier


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """The state of all shards after some closures."""

    settled: int  # contains all closures below this number
    applied: frozenset[int] = frozenset()  # and these above
    version: int = 0
    kept: Sequence[Sequence[Any]]  # each shard's arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
    """A function that closures call."""

    number: int
    plan: FunctionPlan
    program: np.ndarray  # packed
    # makes the update's scalars of its closures' results (synchronous mode)
    combine: Combine | None

    def cast(self, arguments: Sequence[Any]) -> list[np.ndarray]:
        """Casts a closure's arguments to the dtypes that the function is compiled for."""
        specs = self.plan.arguments
        if len(arguments) != len(specs):
            raise ClosureError(f"the function was traced for {len(specs)} arrays, not {len(arguments)}; pass as many.")
        arrays = list[np.ndarray]()
        for i, (x, spec) in enumerate(zip(arguments, specs, strict=True)):
            try:
                arrays.append(np.asarray(x, spec.numpy))
            except (TypeError, ValueError) as exc:
                raise ClosureError(f"argument {i} cannot be taken for {spec.dtype}: {exc}") from exc
            if arrays[i].shape != spec.shape:
                raise ClosureError(
                    f"argument {i} has the shape {arrays[i].shape}; its function was traced for {spec.shape}. Pad to one shape."
                )
        return arrays

    def decide(
        self, numbers: Sequence[int], results: Sequence[list[Any]], *, failed: BaseException | None = None
    ) -> tuple[bool, list[np.ndarray], ClosureError | None]:
        """Combines the results of an update's closures: `(commit, scalars, error for the user)`."""
        # Closures that do not commit and have no error are left out of the update. `failed` is the error of one of them.
        try:
            if failed is not None:
                raise failed
            assert self.combine is not None  # only functions that have it are staged
            scalars, is_finite, _ = self.combine(results)
        except Exception as exc:  # noqa: BLE001  # the round must not wait for ever
            return False, [], ClosureError(f"the results of closures {numbers} cannot be combined: {exc}")
        if is_finite or self.plan.non_finite == "apply":
            return True, scalars, None
        return False, [], NonFiniteClosureError(numbers[0]) if self.plan.non_finite == "raise" else None


@dataclasses.dataclass(kw_only=True)
class Closure:
    """A call of a function."""

    number: int
    function: Function
    arguments: list[np.ndarray]
    pending: Pending
    reads: RemoteBatch | None = None  # the batch that the worker reads for it

    @functools.cached_property
    def size_bytes(self) -> int:
        """Of its arguments."""
        return sum(x.nbytes for x in self.arguments)


class Closures:
    """All closures that may need computing, or computing again."""

    def __init__(self, *, have_a_state: bool) -> None:
        self.next_number = 0
        self._have_a_state = have_a_state
        self.skipped: set[int] = set()  # since the snapshot: updates that were left out
        self._skipped_before = 0
        self.known: dict[int, Closure] = {}
        self._void: set[int] = set()  # since the snapshot: closures that never take effect
        self._since = 0  # closures that have been done since the snapshot
        self._queued_bytes, self._logged_bytes = 0, 0  # of closures that are not done; that are

    def put(
        self, function: Function, arguments: list[np.ndarray], pending: Pending, reads: RemoteBatch | None = None
    ) -> None:
        """Takes in the next closure."""
        closure = Closure(number=self.next_number, function=function, arguments=arguments, pending=pending, reads=reads)
        pending.number = closure.number
        self.known[closure.number] = closure
        self.next_number += 1
        self._queued_bytes += closure.size_bytes

    @property
    def is_too_large(self) -> bool:
        """Returns whether their arguments are so many bytes that no further ones are taken in."""
        return self._queued_bytes > MOST_QUEUED_BYTES or self._logged_bytes > 2 * MOST_LOGGED_BYTES

    def of(self, numbers: Iterable[int]) -> list[Closure]:
        """Returns those of these numbers that are still known."""
        return [self.known[c] for c in numbers if c in self.known]

    @property
    def pending(self) -> list[Pending]:
        """The results of all."""
        return [closure.pending for closure in self.known.values()]

    @property
    def num_skipped(self) -> int:
        """Counts the updates that were left out, as a gradient was not finite."""
        return self._skipped_before + len(self.skipped)

    def finish(self, command: Finish, error: Exception | None = None) -> bool:
        """Marks a closure as done; delivers unreported results; says whether a snapshot is due."""
        # The arguments stay until a snapshot contains the closure.
        is_kept = self._have_a_state and command.outcome == "done"
        if self._have_a_state and not is_kept:
            self._void.add(command.closure)
        closure = self.known.get(command.closure)
        self._since += 1
        if closure is not None:
            self._queued_bytes -= closure.size_bytes
            if is_kept:
                self._logged_bytes += closure.size_bytes
            else:
                del self.known[command.closure]
            if not command.arrived and command.outcome == "void":
                because = error if isinstance(error, NoWorkersError) else "another closure had failed"
                closure.pending.arrive([], ClosureCancelledError(f"it was not computed: {because}"))
            elif not command.arrived:
                closure.pending.arrive(_from_bytes(command.result or b"", closure.function.plan.outputs))
        return self._have_a_state and (self._since % SNAPSHOT_EVERY == 0 or self._logged_bytes > MOST_LOGGED_BYTES)

    def forget(self, snapshot: ClusterSnapshot) -> bool:
        """Forgets closures that a snapshot contains and that have results; another may be due."""
        self._since = 0
        self._void = {c for c in self._void if c >= snapshot.settled}
        skipped = {c for c in self.skipped if c < snapshot.settled or c in snapshot.applied}
        self.skipped, self._skipped_before = self.skipped - skipped, self._skipped_before + len(skipped)
        contained = [c for c in self.known if c < snapshot.settled or c in snapshot.applied]
        for c in contained:
            if self.known[c].pending.done:
                self._logged_bytes -= self.known.pop(c).size_bytes
        return bool(contained) and self._logged_bytes > MOST_LOGGED_BYTES

    def go_back(self, snapshot: ClusterSnapshot) -> frozenset[int]:
        """Queues closures again that a snapshot lacks; returns later ones that do not run again."""
        done = snapshot.applied | {c for c in self._void if c >= snapshot.settled}
        again = [closure for c, closure in self.known.items() if c >= snapshot.settled and c not in done]
        for closure in again:
            closure.pending.take_back()
        self._queued_bytes = sum(closure.size_bytes for closure in again)
        self._logged_bytes = sum(closure.size_bytes for closure in self.known.values()) - self._queued_bytes
        self.skipped &= done
        return frozenset(done)

    def clear(self) -> list[Pending]:
        """Forgets all, and returns their results, which others may wait for."""
        waiting, self.known = self.pending, {}
        return waiting


def _from_bytes(data: bytes, specs: Sequence[Spec]) -> list[np.ndarray]:
    arrays, start = [], 0
    for spec in specs:
        arrays.append(np.frombuffer(data[start : start + spec.size_bytes], spec.numpy).reshape(spec.shape))
        start += spec.size_bytes
    return arrays
