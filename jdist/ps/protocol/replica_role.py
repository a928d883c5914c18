"""The role of one copy of a shard, as pure functions: answer callers, or follow the other copy.

`leadership` decides which copy leads; this file has the copies' half of docs/parameter_server_replicas.md. A
*leader* numbers the log entries that change its state and forwards them; a *follower* takes them in their order. A term names
one leader; messages of a lower term are refused.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

from jdist.ps.protocol.messages import changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """The role of a copy; immutable.

    Attributes:
        term: the highest that it knows; 0 before any.
        name: "free": it has had no role since its start, or has lost its memory; "leads"; or "follows". Only a leader answers.
        number: of the last entry in its state.
        complete: of a follower, whether it has the leader's state; not before it was sent a copy.
        backup: of a leader, its backup: "none", one that is "copying", or one "in_sync": then the leader acknowledges nothing
            that the backup does not hold.
        acknowledged: of a leader, the last entry that the backup holds.
    """

    term: int = 0
    name: Literal["free", "leads", "follows"] = "free"
    number: int = 0
    complete: bool = False
    backup: Literal["none", "copying", "in_sync"] = "none"
    acknowledged: int = 0


class BackupAnswer(enum.StrEnum):
    """A copy's answers to a leader's state or entry; the strings travel."""

    TAKEN = "taken"
    REPEATED = "again"
    GAP = "gap"
    LOWER_TERM = "term"
    OTHER_PROCESS = "stranger"


def lead(role: Role, *, term: int, backup: bool, new_job: bool = False) -> Role:
    """Takes the lead under a term, with or without a backup; unchanged if it may not."""
    # `new_job`: a job begins, and its state replaces the one that is here.
    is_partial = role.name == "follows" and not role.complete and not new_job
    if term <= role.term or is_partial:  # a message that comes again, or late
        return role
    return Role(term=term, name="leads", number=role.number, backup="copying" if backup else "none")


def add_entry(role: Role) -> Role:
    """Counts one more entry that has changed the state."""
    return changed(role, number=role.number + 1)


def may_answer(role: Role, number: int) -> bool:
    """Returns whether a caller may see a state up to entry `number`: if the leader is alone, or its backup holds that."""
    return role.name == "leads" and (role.backup != "in_sync" or role.acknowledged >= number)


def acknowledge(role: Role, *, term: int, number: int, caught_up: bool) -> Role:
    """Notes that the leader's backup holds all entries up to a number, sent under `term`."""
    # `caught_up`: little enough is left for callers to wait for it from now on.
    if (role.term, role.name) != (term, "leads") or role.backup == "none":
        return role
    is_in_sync = caught_up or role.backup == "in_sync"
    backup = "in_sync" if is_in_sync else role.backup
    return changed(role, acknowledged=max(role.acknowledged, number), backup=backup)


def depose(role: Role, *, term: int) -> Role:
    """Gives way to a higher term: it answers nobody any more, and what it has is not the shard's state."""
    return Role(term=term, name="follows") if term > role.term else role


def install(role: Role, *, term: int, number: int) -> tuple[Role, BackupAnswer]:
    """Takes a copy of a leader's whole state up to entry `number`; the state must be replaced if the answer is TAKEN."""
    if term < role.term or (term == role.term and role.name == "leads"):
        return role, BackupAnswer.LOWER_TERM
    if term == role.term and role.complete and number <= role.number:
        return role, BackupAnswer.REPEATED  # it comes late: what is here is newer, and the leader relies on it
    return Role(term=term, name="follows", number=number, complete=True), BackupAnswer.TAKEN


def take(role: Role, *, term: int, number: int) -> tuple[Role, BackupAnswer]:
    """Takes an entry that a leader forwards; the entry must be carried out if the answer is TAKEN."""
    if term < role.term or (term == role.term and role.name == "leads"):
        return role, BackupAnswer.LOWER_TERM
    if term > role.term or not role.complete or number > role.number + 1:
        return role, BackupAnswer.GAP
    if number <= role.number:
        return role, BackupAnswer.REPEATED
    return add_entry(role), BackupAnswer.TAKEN
