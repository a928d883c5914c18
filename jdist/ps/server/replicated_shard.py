"""One of a shard's two copies: a keeper that leads, or follows the other.

Both run the same machine over the same messages in the same order, and the same programs, so they have the same state. What
may be said when, `standing` decides.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jdist.errors import WireError
from jdist.ps.program.shard_plan import ShardPlan, result_spec
from jdist.ps.protocol import replica_role as standings
from jdist.ps.protocol.messages import TRAVELLING, Commit, Message, Pull, Push, Refused, Restore, Snapshot
from jdist.ps.protocol.replica_role import Role
from jdist.ps.protocol.wire import Spec, from_plain, to_plain
from jdist.ps.server.replication import MOST_BEHIND_BYTES, MOST_ENTRIES, Forwarding
from jdist.ps.server.shard_server import Program, ShardServer
from jdist.ps.server.shard_transfer import State, expected, unpack_shard
from jdist.ps.transport.interface import Channel, Header, Method, check_files
from jdist.ps.transport.routed import SlotChannel, slot_of

_JOIN_S = 5.0


class _Moved(Exception):
    """Another copy leads, or will."""


class ReplicatedShard(ShardServer):
    """A shard with its arrays, which may have a backup or be one.

    As long as nobody speaks of terms it is a `ShardServer`.

    Args:
        connect: from a server's address to a channel.
        allow, wait_s: as for `ShardServer`.
    """

    def __init__(self, connect: Callable[[str], Channel], *, allow: Sequence[str] = (), wait_s: float = 60.0):
        super().__init__(allow=allow, wait_s=wait_s)
        self._connect = connect
        self._standing = Role()
        self._forwarding: Forwarding | None = None
        self._packed: Sequence[np.ndarray] = ()

    def methods(self) -> dict[str, Method]:
        """What a transport serves."""
        return {
            **super().methods(),
            "lead": Method(self._lead),
            "install": Method(self._install, expected),
            "forward": Method(self._forward, self._expects_of_forward),
            "reaches backup": Method(self._reaches_backup),
        }

    def close(self) -> None:
        """Ends its connection to the backup."""
        with self._lock:
            forwarding, self._forwarding = self._forwarding, None
            if forwarding is not None:
                forwarding.close()
        if forwarding is not None:
            forwarding.join(_JOIN_S)

    # What a leader does

    def _status(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        check_files()  # else it can do nothing, and is as good as silent
        # Without the lock: a copy that compiles is there all the same.
        shard, standing, forwarding = self._shard, self._standing, self._forwarding
        found = {"generation": shard.generation, "version": shard.version, "counts": dataclasses.asdict(shard.counts)}
        in_sync = forwarding.to if forwarding is not None and standing.backup == "in_sync" else None
        terms = {"term": standing.term, "leads": standing.role == "leads", "in_sync": in_sync}
        waiting_s = 0.0 if forwarding is None else forwarding.waiting_s
        more = {"waiting_s": waiting_s, "begun_by": self._begun_by}
        return {"incarnation": self.incarnation, **found, **terms, **more}, []

    def _reaches_backup(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Whether it reaches its backup."""
        forwarding = self._forwarding
        return {"reached": forwarding is None or forwarding.reaches()}, []

    def _lead(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """The coordinator has it lead."""
        (term,), backup = _numbers(header, "term"), _backup(header.get("backup"))
        with self._lock:
            before = self._standing
            if header.get("incarnation") == self.incarnation:
                self._standing = standings.lead(
                    before, term=term, backup=backup is not None, anew=header.get("anew") is True
                )
            if self._standing != before:
                self._follow_nobody()
                if backup is not None:
                    address, slot, incarnation = backup
                    channel = SlotChannel(self._connect(address), slot)
                    self._forwarding = Forwarding(self, self._lock, channel, term, incarnation)
                self._lock.notify_all()
        return self._status({}, [])

    def _say(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        return self._led(header, arrays, super()._say)

    def _restore(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        if not header.get("led"):  # a job without backups begins
            with self._lock:
                self._follow_nobody()
                self._standing = Role(term=self._standing.term)
        return self._led(header, arrays, super()._restore)

    def _read(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        return self._led(header, arrays, super()._read)

    def _led(self, header: Header, arrays: list[np.ndarray], run: Callable[..., Any]) -> tuple[Header, list[Any]]:
        """Returns what a call gives, once the backup holds what it tells of.

        A shard that has lost its memory meanwhile, or that another led for a while, must not answer: what the call has changed
        is not in its state any more, and nobody else may have it.
        """
        with self._lock:
            if header.get("led") and self._standing.role != "leads":
                return {"moved": self._standing.term}, []
            before = self.incarnation, self._standing.term
        try:
            answer, found = run(header, arrays)
            with self._lock:
                self._wait_for_backup(self._standing.number)
                if header.get("led") and (self.incarnation, self._standing.term) != before:
                    raise _Moved
        except _Moved:
            if not header.get("led"):
                raise WireError("this copy follows another, and the caller knows nothing of copies") from None
            return {"moved": self._standing.term}, []
        return answer, found

    def _wait_for_backup(self, number: int) -> None:
        end = time.monotonic() + self._wait_s
        while not self._may_answer(number):
            self._check()
            if not self._lock.wait(end - time.monotonic()):
                raise TimeoutError("the backup did not answer")
        self._check()

    def _may_answer(self, number: int) -> bool:
        behind = 0 if self._forwarding is None else self._forwarding.behind_bytes
        return standings.may_answer(self._standing, number) and behind <= MOST_BEHIND_BYTES

    def _check(self) -> None:
        if self._standing.role == "follows":
            raise _Moved

    def _take(self, message: Message, arrays: list[np.ndarray]) -> int:
        self._check()
        before = self._shard
        call = super()._take(message, arrays)
        if self._standing.role == "leads" and self._shard is not before and not isinstance(message, Pull | Snapshot):
            self._standing = standings.changed(self._standing)
            if self._forwarding is not None:
                # What a pull has settled here before is settled there with it.
                said = to_plain(dataclasses.replace(message, settled=self._shard.settled))
                refused = isinstance(self._answers.get(call), Refused)
                carries = isinstance(message, Push) or (isinstance(message, Commit) and message.as_one)
                given = [*arrays] if carries and not refused else []
                entry = {"say": said, "result": given[-1].size if given else None}
                self._forwarding.add(self._standing.number, entry, given)
        return call

    def _put(
        self, plan: ShardPlan | None, kept: Sequence[Any], programs: list[Program], packed: Sequence[np.ndarray]
    ) -> None:
        super()._put(plan, kept, programs, packed)
        self._packed = [np.array(x) for x in packed]  # what came is one block with the arrays, which are soon replaced
        if self._standing.role == "leads":
            self._standing = standings.changed(self._standing)
            if self._forwarding is not None:
                self._forwarding.begin_anew()

    def state(self) -> tuple[int, State] | None:
        """See `forwarding.Leader`."""
        if self._shard.waiting:
            return None
        # Views, not the arrays, as for a snapshot; the names' meanings are those of this moment.
        kept = [np.asarray(x) for x in self._kept]
        state = State(shard=self._shard, plan=self._plan, kept=kept, packed=self._packed, held=dict(self._held))
        return self._standing.number, state

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._packed = ()
        self._standing = Role(term=self._standing.term)
        self._follow_nobody()

    def backed_up(self, term: int, number: int, *, caught_up: bool) -> None:
        """See `forwarding.Leader`."""
        self._standing = standings.holds(self._standing, term=term, number=number, caught_up=caught_up)

    def deposed(self, term: int) -> None:
        """See `forwarding.Leader`."""
        self._standing = standings.depose(self._standing, term=term)
        self._follow_nobody()

    def _follow_nobody(self) -> None:
        """Ends what belongs to an earlier standing."""
        if self._forwarding is not None:
            self._forwarding.close()
        self._forwarding, self._cut = None, []
        self._lock.notify_all()

    # What a follower does

    def _install(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """A leader sends its whole state."""
        term, number = _numbers(header, "term", "number")
        if header.get("to") != self.incarnation:
            return self._took("stranger")
        state = unpack_shard(header, arrays)
        programs = [] if state.plan is None else self._unpacked(state.plan, state.packed)
        with self._lock:
            standing, took = standings.install(self._standing, term=term, number=number)
            if took == "taken":
                check_files()
                self._standing = Role(term=term, role="follows")  # incomplete until all of it is taken over
                self._follow_nobody()
                super()._put(state.plan, state.kept, programs, state.packed)
                self._packed = [np.array(x) for x in state.packed]  # as above
                self._held, self._shard = dict(state.held), state.shard
                self._next_ref = max([self._next_ref, *self._held])
                self._answers.clear()
                self._lock.notify_all()
            self._standing = standing
            return self._took(took)

    def _expects_of_forward(self, header: Header) -> list[Spec]:
        plan, entries = self._plan, header.get("entries")
        if plan is None or not isinstance(entries, list) or len(entries) > MOST_ENTRIES:
            raise WireError("entries for an empty copy, or too many of them")
        return [spec for entry in entries for spec in _arrays_of(entry, plan)]

    def _forward(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """A leader forwards what has changed its state."""
        term, first = _numbers(header, "term", "first")
        if header.get("to") != self.incarnation:
            return self._took("stranger")
        rest, took = iter(arrays), "again"
        with self._lock:
            for number, entry in zip(itertools.count(first), header["entries"], strict=False):
                message = from_plain(TRAVELLING, entry["say"])
                if not isinstance(message, Message) or isinstance(message, Restore):
                    raise WireError("no message")
                plan = self._plan
                given = [next(rest) for _ in (() if plan is None else _arrays_of(entry, plan))]
                standing, took = standings.take(self._standing, term=term, number=number)
                if took == "taken":
                    super()._take(message, given)
                    self._answers.clear()  # the callers are the leader's
                self._standing = standing  # not before: what could not be carried out was not taken
                if took in ("gap", "term"):
                    break
            return self._took(took)

    def _took(self, took: str) -> tuple[Header, list[Any]]:
        return {"took": took, "term": self._standing.term}, []


def _arrays_of(entry: Any, plan: ShardPlan) -> list[Spec]:
    """The arrays that come with an entry: of a push that was taken, its gradients and its result."""
    size = entry.get("result") if isinstance(entry, dict) else -1
    if size is None:
        return []
    view = entry["say"].get("view") if isinstance(entry, dict) and isinstance(entry.get("say"), dict) else None
    result = result_spec(size)
    if type(view) is not int or not 0 <= view < len(plan.views):
        raise WireError("a push of no step that is known")
    found = plan.views[view]
    return [*(found.scalars if entry["say"].get("is") == "Commit" else found.pushes), result]


def _backup(plain: Any) -> tuple[str, int, str] | None:
    """Where a backup is, and its incarnation."""
    if plain is None:
        return None
    if not isinstance(plain, list) or [type(x) for x in plain] != [str, int, str]:
        raise WireError("no backup")
    return plain[0], plain[1], plain[2]


def _numbers(header: Header, *names: str) -> list[int]:
    found = [header.get(name) for name in names]
    if any(type(n) is not int for n in found):
        raise WireError("a number that is none")
    return [n for n in found if isinstance(n, int)]


def slots(copies: Sequence[ReplicatedShard]) -> Mapping[str, Method]:
    """What a server with several copies serves: a call says in its header for which one it is."""
    served = [copy.methods() for copy in copies]

    def of(name: str) -> Method:
        def run(header: Header, arrays: list[np.ndarray]) -> Any:
            return served[slot_of(header, len(served))][name].run(header, arrays)

        def expects(header: Header) -> Sequence[Spec]:
            return served[slot_of(header, len(served))][name].expects(header)

        return Method(run, expects, limited=served[0][name].limited)

    return {name: of(name) for name in served[0]}
