"""The closures that a coordinator has: what they compute, from what, and who waits for their results.

They are kept until they are in a snapshot: if a parameter server loses its memory, those that are not run again. Who computes
what is decided elsewhere (`dispatch`), and nothing is locked here: whoever calls has the coordinator's lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from jdist.errors import ClosureCancelledError, ClosureError, DatasetError, NonFiniteClosureError, NoWorkersError
from jdist.ps.coordinator.dataset_pass import BatchName, RemoteBatch
from jdist.ps.coordinator.remote_value import Pending
from jdist.ps.coordinator.snapshot import ClusterSnapshot
from jdist.ps.program.function_plan import Combine, FunctionPlan
from jdist.ps.protocol.scheduler_events import Finish
from jdist.ps.protocol.wire import Spec
from jdist.ps.transport.interface import Header

MOST_QUEUED = 262_144  # as in tf.distribute
MOST_QUEUED_BYTES = 512 << 20  # of the arguments of closures that are not done
WITH_OUTPUTS = ("done", "staged")
SNAPSHOT_EVERY = 1000  # closures, whose arguments are kept until then
MOST_LOGGED_BYTES = 256 << 20  # of the arguments that are kept, beyond which a snapshot is due earlier


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Closures to be sent together.

    Attributes:
        settled: closures below this number are done.
        closures: their numbers.
        functions: the number of each one's function.
        arguments: the arrays of all, one after the other.
        outputs: what each returns.
        updates: whether each changes the state.
        batches: the name of the batch that the worker reads for each; None for those that bring theirs.
        datasets: what a worker is told of the datasets that these are of, by number.
        declined: closures that are not sent, as what they read is for another worker.
        failed: closures that are not sent, as there is nothing for them to read; and why.
    """

    settled: int
    closures: list[int]
    functions: list[int]
    arguments: list[np.ndarray]
    outputs: list[tuple[Spec, ...]]
    updates: list[bool]
    batches: list[BatchName | None]
    datasets: dict[int, Header]
    declined: list[int]
    failed: dict[int, ClosureError]

    def returned(self, header: dict[str, Any]) -> list[Spec]:
        """The arrays that come with an answer: the outputs of what is done."""
        found = zip(header["outcomes"], self.outputs, strict=True)
        return [spec for outcome, outputs in found if outcome["outcome"] in WITH_OUTPUTS for spec in outputs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Installable:
    """A function as it travels to workers.

    Attributes:
        function: what it is.
        program: what it computes, packed.
        combine: from what each closure of an update returned to what the update needs besides (synchronous mode).
    """

    function: FunctionPlan
    program: np.ndarray
    combine: Combine | None

    def fitted(self, arguments: Sequence[Any]) -> list[np.ndarray]:
        """A closure's arguments, cast to the dtypes that it is compiled for.

        Raises:
            ClosureError: one has another shape, or is no array of numbers.
        """
        described = self.function.arguments
        if len(arguments) != len(described):
            raise ClosureError(
                f"the function was traced for {len(described)} arrays and is given {len(arguments)}. Pass arguments "
                "of the same structure in every call."
            )
        found = list[np.ndarray]()
        for i, (x, spec) in enumerate(zip(arguments, described, strict=True)):
            try:
                found.append(np.asarray(x, spec.numpy))
            except (TypeError, ValueError) as exc:
                raise ClosureError(f"argument {i} cannot be taken for {spec.dtype}: {exc}") from exc
            if found[i].shape != spec.shape:
                raise ClosureError(
                    f"argument {i} has the shape {found[i].shape}; its function was traced for {spec.shape}. Pass "
                    "the same shapes in every call: fill up to one size."
                )
        return found


@dataclasses.dataclass
class Closure:
    """A call of a function that is to be computed, or was.

    Attributes:
        function: the function's number.
        arguments: its arrays.
        pending: its results.
        reads: the batch that the worker reads for it.
    """

    function: int
    arguments: list[np.ndarray]
    pending: Pending
    reads: RemoteBatch | None = None

    @property
    def size_bytes(self) -> int:
        """Of its arguments."""
        return sum(x.nbytes for x in self.arguments)


class Closures:
    """All closures that may have to be computed, or computed again.

    Args:
        have_a_state: whether any of them may have to be computed again after they are done.

    Attributes:
        next_number: the next one's number.
    """

    def __init__(self, *, have_a_state: bool) -> None:
        self.next_number = 0
        self._have_a_state = have_a_state
        self._skipped: set[int] = set()  # since the snapshot: updates that were left out
        self._skipped_before = 0
        self._functions: list[Installable] = []
        self._known: dict[int, Closure] = {}
        self._void: set[int] = set()  # since the snapshot: closures that had no effect on the state and never will
        self._since = 0  # closures that have been done since the snapshot
        self._queued_bytes, self._logged_bytes = 0, 0  # of closures that are not done, and of those that are

    def add_function(self, function: FunctionPlan, program: bytes, combine: Combine | None) -> int:
        """Makes a function known; its number."""
        packed = np.frombuffer(program, np.uint8)
        self._functions.append(Installable(function=function, program=packed, combine=combine))
        return len(self._functions) - 1

    def function(self, number: int) -> Installable:
        """A function by its number."""
        return self._functions[number]

    def put(self, function: int, given: list[np.ndarray], pending: Pending, reads: RemoteBatch | None) -> None:
        """Takes in the next closure."""
        closure = Closure(function, given, pending, reads)
        pending.number = self.next_number
        self._known[self.next_number] = closure
        self.next_number += 1
        self._queued_bytes += closure.size_bytes

    @property
    def is_too_large(self) -> bool:
        """Whether their arguments are so many bytes that no further ones are taken in."""
        return self._queued_bytes > MOST_QUEUED_BYTES or self._logged_bytes > 2 * MOST_LOGGED_BYTES

    def of(self, numbers: Iterable[int]) -> list[Closure]:
        """Those out of these that are still known."""
        return [self._known[c] for c in numbers if c in self._known]

    @property
    def pending(self) -> list[Pending]:
        """Who waits for results, and who has them."""
        return [closure.pending for closure in self._known.values()]

    @property
    def arrived(self) -> frozenset[int]:
        """Those whose results are there, or were."""
        return frozenset(c for c, closure in self._known.items() if closure.pending.was_there)

    def batch(self, numbers: Sequence[int], worker: int, settled: int, lost: Collection[int]) -> Batch:
        """Those out of these that are still wanted, to be sent; those that read a batch on the worker get the name of one.

        Args:
            numbers: of the closures.
            worker: to which they are sent.
            settled: closures below this number are done.
            lost: workers that are not there, whose batches others read.
        """
        wanted, names = list[tuple[int, Closure]](), list[BatchName | None]()
        declined, failed = list[int](), dict[int, ClosureError]()
        for c in numbers:
            if (closure := self._known.get(c)) is None:
                continue
            name = None
            if closure.reads is not None:
                try:
                    name = closure.reads.reads.take(closure.reads, worker, lost)
                except DatasetError as exc:
                    failed[c] = ClosureError(f"closure {c}: {exc}")
                    continue
                if name is None:
                    declined.append(c)
                    continue
            wanted.append((c, closure))
            names.append(name)
        installed = [self._functions[closure.function] for _, closure in wanted]
        headers = [closure.reads.reads.header for _, closure in wanted if closure.reads is not None]
        return Batch(
            settled=settled,
            closures=[c for c, _ in wanted],
            functions=[closure.function for _, closure in wanted],
            arguments=[x for _, closure in wanted for x in closure.arguments],
            outputs=[each.function.outputs for each in installed],
            updates=[each.function.updates for each in installed],
            batches=names,
            datasets={header["dataset"]: header for header in headers},
            declined=declined,
            failed=failed,
        )

    @property
    def num_skipped(self) -> int:
        """How many updates were left out, as a gradient was not finite."""
        return self._skipped_before + len(self._skipped)

    def skipped(self, number: int) -> None:
        """Takes note that a closure's update was left out."""
        self._skipped.add(number)

    def finish(self, command: Finish, error: Exception | None = None) -> bool:
        """One is done; if its results did not come with a report, they are here. Its arguments stay until a snapshot.

        Args:
            command: which, and what became of it.
            error: why those that no worker had are not computed.

        Returns:
            Whether a snapshot is due.
        """
        is_kept = self._have_a_state and command.outcome == "done"
        if self._have_a_state and not is_kept:
            self._void.add(command.closure)
        closure = self._known.get(command.closure)
        self._since += 1
        if closure is not None:
            self._queued_bytes -= closure.size_bytes
            if is_kept:
                self._logged_bytes += closure.size_bytes
            else:
                del self._known[command.closure]
            if not command.arrived and command.outcome == "void":
                because = error if isinstance(error, NoWorkersError) else "another closure had failed"
                closure.pending.arrive([], ClosureCancelledError(f"it was not computed: {because}"))
            elif not command.arrived:
                closure.pending.arrive(
                    _from_bytes(command.result or b"", self._functions[closure.function].function.outputs)
                )
        return self._have_a_state and (self._since % SNAPSHOT_EVERY == 0 or self._logged_bytes > MOST_LOGGED_BYTES)

    def are_in(self, snapshot: ClusterSnapshot) -> bool:
        """What a snapshot contains never runs again: it is forgotten, once its results are there.

        Returns:
            Whether so much has come meanwhile that another one is due.
        """
        self._since = 0
        self._void = {c for c in self._void if c >= snapshot.settled}
        ended = {c for c in self._skipped if c < snapshot.settled or c in snapshot.applied}
        self._skipped, self._skipped_before = self._skipped - ended, self._skipped_before + len(ended)
        found = [c for c in self._known if c < snapshot.settled or c in snapshot.applied]
        for c in found:
            if self._known[c].pending.done:
                self._logged_bytes -= self._known.pop(c).size_bytes
        return bool(found) and self._logged_bytes > MOST_LOGGED_BYTES

    def go_back(self, snapshot: ClusterSnapshot) -> frozenset[int]:
        """After a snapshot only what it contains is done; what it does not is queued again.

        Returns:
            Those at or above `snapshot.settled` that do not run again.
        """
        done = snapshot.applied | {c for c in self._void if c >= snapshot.settled}
        again = [closure for c, closure in self._known.items() if c >= snapshot.settled and c not in done]
        for closure in again:
            closure.pending.take_back()
        self._queued_bytes = sum(closure.size_bytes for closure in again)
        self._logged_bytes = sum(closure.size_bytes for closure in self._known.values()) - self._queued_bytes
        self._skipped &= done
        return frozenset(done)

    def clear(self) -> list[Pending]:
        """Forgets all; who waited for them."""
        waiting, self._known = self.pending, {}
        return waiting

    def __len__(self) -> int:
        return len(self._known)


def _from_bytes(data: bytes, described: Sequence[Spec]) -> list[np.ndarray]:
    found, start = [], 0
    for spec in described:
        found.append(np.frombuffer(data[start : start + spec.size_bytes], spec.numpy).reshape(spec.shape))
        start += spec.size_bytes
    return found


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of closures that are staged.

    Attributes:
        commit: whether they become an update.
        scalars: what that needs besides.
        is_skipped: whether it was left out, as a gradient was not finite.
        error: what the user is to be told.
    """

    commit: bool
    scalars: list[np.ndarray] = dataclasses.field(default_factory=list)
    is_skipped: bool = False
    error: ClosureError | None = None


def decide(numbers: Sequence[int], closures: Sequence[Closure], installed: Installable) -> Decision:
    """Puts together what closures reported.

    Args:
        numbers: the closures' numbers.
        closures: the closures; all have reported.
        installed: their function.
    """
    try:
        assert installed.combine is not None  # only functions that have it are staged
        scalars, is_finite, _ = installed.combine([closure.pending.wait(0) for closure in closures])
    except Exception as exc:  # noqa: BLE001  # whatever it is, the round must not wait for this thread for ever
        return Decision(False, error=ClosureError(f"closures {numbers}: what they gave cannot be put together: {exc}"))
    policy = installed.function.non_finite
    if is_finite or policy == "apply":
        return Decision(True, scalars)
    error = NonFiniteClosureError(numbers[0]) if policy == "raise" else None
    return Decision(False, is_skipped=policy == "skip", error=error)
