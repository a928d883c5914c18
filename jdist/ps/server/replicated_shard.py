"""A copy of a shard: a shard server that leads, alone or with a backup, or follows the other copy as its backup.

Both run the same machine over the same messages in the same order, and the same programs, so they have the same state.
What a copy may do in its role, `replica_role` decides, by docs/parameter_server_replicas.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jdist.errors import WireError
from jdist.ps.program.shard_plan import ShardPlan, result_spec
from jdist.ps.protocol import replica_role
from jdist.ps.protocol.messages import TRAVELLING, Answer, Commit, Message, Push, Refused, Restore, changed
from jdist.ps.protocol.replica_role import BackupAnswer, Role
from jdist.ps.protocol.wire import Spec, from_plain, to_plain
from jdist.ps.server.backup_link import MOST_BEHIND_BYTES, MOST_ENTRIES, BackupLink
from jdist.ps.server.shard_server import ShardServer
from jdist.ps.server.shard_transfer import ShardState, expected, unpack_shard
from jdist.ps.transport.interface import Arrays, Channel, Header, Method, check_files, integers
from jdist.ps.transport.routed import SlotChannel, slot_of

_JOIN_S = 5.0
_WAIT_S = 60.0  # of an answer for the backup, before its call fails


class _NotLeader(Exception):
    """Another copy leads, or will."""


class ReplicatedShard(ShardServer):
    """A shard server that leads, with a backup or alone, or is the backup."""

    def __init__(self, connect: Callable[[str], Channel], *, allow: Sequence[str] = ()):
        super().__init__(allow=allow)
        self._connect = connect
        self._role = Role()
        self._backup: BackupLink | None = None

    def methods(self) -> dict[str, Method]:
        """Returns what a transport serves."""
        plain = super().methods()
        led = {name: self._led(plain[name]) for name in ("restore", "say", "read")}
        return {
            **plain,
            **led,
            "lead": Method(self._lead),
            "install": Method(self._install, expected),
            "forward": Method(self._forward, self._expects_of_forward),
            "reaches backup": Method(self._reaches_backup),
        }

    def close(self) -> None:
        """Ends the connection to the backup."""
        with self.lock:
            backup, self._backup = self._backup, None
            if backup is not None:
                backup.close()
        if backup is not None:
            backup.join(_JOIN_S)

    # As leader

    def status(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Adds the role to a shard's status."""
        role, backup = self._role, self._backup
        status, _ = super().status(header, arrays)
        status |= {"term": role.term, "leads": role.name == "leads"}
        status["backup"] = None if backup is None else backup.incarnation
        status["in_sync"] = status["backup"] if role.backup == "in_sync" else None
        status["waiting_s"] = 0.0 if backup is None else backup.waiting_s
        return status, []

    def _reaches_backup(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        backup = self._backup
        return {"reached": backup is None or backup.reaches()}, []

    def _lead(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Takes the lead, as the coordinator says; the status tells whether it does."""
        (term,), backup = integers(header, "term"), _address_of_backup(header)
        with self.lock:
            role = self._role
            if header.get("incarnation") == self.incarnation:
                new_job = header.get("new_job") is True
                role = replica_role.lead(role, term=term, backup=backup is not None, new_job=new_job)
            if self._role != role:
                self._end_backup()
                if backup is not None:
                    address, slot, incarnation = backup
                    self._backup = BackupLink(
                        SlotChannel(self._connect(address), slot),
                        term=term,
                        incarnation=incarnation,
                        lock=self.lock,
                        state=self._state,
                        acknowledged=functools.partial(self._acknowledge, term),
                        deposed=self._depose,
                    )
                self._role = role  # last: `status` reads without the lock
        return self.status({}, [])

    def _led(self, method: Method) -> Method:
        """Has a method answer only while this copy leads, and only once the backup holds the reported state."""

        # A shard that has lost its memory meanwhile, or that another copy led for a while, must not
        # answer: its state lacks the effect of the call, and perhaps every copy does.
        def run(header: Header, arrays: list[np.ndarray]) -> tuple[Header, Arrays]:
            try:
                with self.lock:
                    self._check()
                    before = self.incarnation, self._role.term
                answer, sent = method.run(header, arrays)
                with self.lock:
                    self._wait_for_backup(self._role.number)
                    if (self.incarnation, self._role.term) != before:
                        raise _NotLeader
            except _NotLeader:
                return {"moved": self._role.term}, []
            return answer, sent

        return dataclasses.replace(method, run=run)

    def _wait_for_backup(self, number: int) -> None:
        end = time.monotonic() + _WAIT_S
        while True:
            self._check()
            behind = 0 if self._backup is None else self._backup.behind_bytes
            if replica_role.may_answer(self._role, number) and behind <= MOST_BEHIND_BYTES:
                return
            if not self.lock.wait(end - time.monotonic()):
                raise TimeoutError("the backup did not answer")

    # What the shard server calls

    def _check(self) -> None:
        if self._role.name != "leads":
            raise _NotLeader

    def _changed(self, message: Message, arrays: list[np.ndarray], answer: Answer | None) -> None:
        """Forwards a message that has changed the leader's state."""
        self._role = replica_role.add_entry(self._role)
        if self._backup is None:
            return
        # What a pull has settled here before is settled there with it.
        message = changed(message, settled=self.shard.settled)
        brings = isinstance(message, Push) or (isinstance(message, Commit) and message.as_one)
        payload = [*arrays] if brings and not isinstance(answer, Refused) else []
        entry = {"say": to_plain(message), "result": payload[-1].size if payload else None}
        self._backup.add(self._role.number, entry, payload)

    def _restored(self) -> None:
        self._role = replica_role.add_entry(self._role)
        if self._backup is not None:
            self._backup.copy_again()

    def _reset(self) -> None:
        super()._reset()
        self._role = Role(term=self._role.term)
        self._end_backup()

    # What the link to the backup calls

    def _state(self) -> tuple[int, ShardState] | None:
        state = self.state()
        return None if state is None else (self._role.number, state)

    def _acknowledge(self, term: int, number: int, caught_up: bool) -> None:
        self._role = replica_role.acknowledge(self._role, term=term, number=number, caught_up=caught_up)

    def _depose(self, term: int) -> None:
        self._role = replica_role.depose(self._role, term=term)
        self._end_backup()

    def _end_backup(self) -> None:
        """Ends what belongs to an earlier role."""
        if self._backup is not None:
            self._backup.close()
        self._backup = None
        self.drop_snapshot()
        self.lock.notify_all()

    # As backup

    def _install(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Takes over a leader's whole state."""
        term, number = integers(header, "term", "number")
        if header.get("to") != self.incarnation:
            return self._answer_leader(BackupAnswer.OTHER_PROCESS)
        state = unpack_shard(header, arrays)
        programs = [] if state.plan is None else self.unpack_programs(state.plan, state.packed)
        with self.lock:
            role, answer = replica_role.install(self._role, term=term, number=number)
            if answer == BackupAnswer.TAKEN:
                check_files()
                self._role = Role(term=term, name="follows")  # incomplete until all of it is taken over
                self._end_backup()
                self.replace(state, programs)
            self._role = role
            return self._answer_leader(answer)

    def _expects_of_forward(self, header: Header) -> list[Spec]:
        plan, entries = self.plan, header.get("entries")
        if plan is None or not isinstance(entries, list) or len(entries) > MOST_ENTRIES:
            raise WireError(f"`entries` must be a list of at most {MOST_ENTRIES}, for a copy that has a state")
        return [spec for entry in entries for spec in _arrays_of(entry, plan)]

    def _forward(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Carries out the entries that a leader forwards."""
        term, first = integers(header, "term", "first")
        if header.get("to") != self.incarnation:
            return self._answer_leader(BackupAnswer.OTHER_PROCESS)
        rest, answer = iter(arrays), BackupAnswer.REPEATED
        with self.lock:
            for number, entry in zip(itertools.count(first), header["entries"], strict=False):
                message = from_plain(TRAVELLING, entry["say"])
                if not isinstance(message, Message) or isinstance(message, Restore):
                    raise WireError("an entry must be a message to a shard, and no restore")
                plan = self.plan
                payload = [next(rest) for _ in (() if plan is None else _arrays_of(entry, plan))]
                role, answer = replica_role.take(self._role, term=term, number=number)
                if answer == BackupAnswer.TAKEN:
                    self.apply_entry(message, payload)
                self._role = role  # not before: what could not be carried out was not taken
                if answer in (BackupAnswer.GAP, BackupAnswer.LOWER_TERM):
                    break
            return self._answer_leader(answer)

    def _answer_leader(self, answer: BackupAnswer) -> tuple[Header, list[Any]]:
        return {"took": answer.value, "term": self._role.term}, []


def _arrays_of(entry: Any, plan: ShardPlan) -> list[Spec]:
    """Returns the specs of an entry's arrays: of a push that was taken, its gradients and its result."""
    size = entry.get("result") if isinstance(entry, dict) else -1
    if size is None:
        return []
    result = result_spec(size)  # which refuses -1
    message = entry["say"] if isinstance(entry.get("say"), dict) else {}
    number = message.get("view", 0)
    if type(number) is not int or not 0 <= number < len(plan.views):
        raise WireError(f"the `view` of an entry with arrays must be one of the plan's {len(plan.views)}")
    view = plan.views[number]
    return [*(view.scalars if message.get("is") == "Commit" else view.pushes), result]


def _address_of_backup(header: Header) -> tuple[str, int, str] | None:
    """Returns the address, slot and incarnation of the backup that a leader is to have."""
    plain = header.get("backup")
    if plain is None:
        return None
    if not isinstance(plain, list) or [type(x) for x in plain] != [str, int, str]:
        raise WireError("`backup` must be [address, slot, incarnation]")
    return plain[0], plain[1], plain[2]


def slots(copies: Sequence[ReplicatedShard]) -> Mapping[str, Method]:
    """Returns what a server with several copies serves: the header of a call has the number of its copy."""
    served = [copy.methods() for copy in copies]

    def by_slot(name: str) -> Method:
        def run(header: Header, arrays: list[np.ndarray]) -> Any:
            return served[slot_of(header, len(served))][name].run(header, arrays)

        def expects(header: Header) -> Sequence[Spec]:
            return served[slot_of(header, len(served))][name].expects(header)

        return Method(run, expects, limited=served[0][name].limited)

    return {name: by_slot(name) for name in served[0]}
