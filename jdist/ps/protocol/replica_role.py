"""What one copy of a shard may do, as pure functions: answer callers, or follow another copy.

The other half of docs/parameter_server_protocol.md's two copies: `replicas` decides who leads, this file what a copy makes of
it. A *leader* numbers what changes its state and forwards it; a *follower* takes the entries in their order. A term names one
leader; a lower one is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """Where a copy stands; immutable.

    Attributes:
        term: the highest that it has heard of; 0 before any.
        role: "free" while nobody has spoken of terms: it answers everybody, as the only copy. "leads", or "follows".
        number: of the last entry that is in its state.
        complete: of a follower, whether its state is the leader's; not before it was given a copy.
        backup: of a leader, what it has: "none", one that is "copying", or one "in_sync": then it acknowledges nothing that
            the backup does not hold.
        held: of a leader, the last entry that the backup holds.
    """

    term: int = 0
    role: Literal["free", "leads", "follows"] = "free"
    number: int = 0
    complete: bool = False
    backup: Literal["none", "copying", "in_sync"] = "none"
    held: int = 0


Taken = Literal["taken", "again", "gap", "term"]


def lead(standing: Role, *, term: int, backup: bool, anew: bool = False) -> Role:
    """The coordinator has it lead under a term, with or without a backup; unchanged if that may not be.

    Args:
        standing: before.
        term: the term.
        backup: whether a backup is to be brought into step.
        anew: whether a job begins, whose state replaces the one that is here.
    """
    follows_in_part = standing.role == "follows" and not standing.complete and not anew
    if term <= standing.term or follows_in_part:  # what comes again, or late
        return standing
    return Role(term=term, role="leads", number=standing.number, backup="copying" if backup else "none")


def changed(standing: Role) -> Role:
    """An entry more has changed the state."""
    return dataclasses.replace(standing, number=standing.number + 1)


def may_answer(standing: Role, number: int) -> bool:
    """Whether a caller may be told of a state: at once by a leader alone, else once the backup holds it.

    Args:
        standing: of the copy that was asked.
        number: of the last entry that is in the state told of.
    """
    return standing.role != "follows" and (standing.backup != "in_sync" or standing.held >= number)


def holds(standing: Role, *, term: int, number: int, caught_up: bool) -> Role:
    """The leader hears that its backup holds all entries up to a number.

    Args:
        standing: the leader's.
        term: under which that was sent.
        number: of the last entry.
        caught_up: whether little enough is left, so that callers may wait for it from now on.
    """
    if (standing.term, standing.role) != (term, "leads") or standing.backup == "none":
        return standing
    in_step = caught_up or standing.backup == "in_sync"
    return dataclasses.replace(
        standing, held=max(standing.held, number), backup="in_sync" if in_step else standing.backup
    )


def depose(standing: Role, *, term: int) -> Role:
    """A leader hears of a higher term: it answers nobody any more, and what it has is not the shard's state."""
    return Role(term=term, role="follows") if term > standing.term else standing


def install(standing: Role, *, term: int, number: int) -> tuple[Role, Taken]:
    """A leader sends a copy of its whole state.

    Args:
        standing: before.
        term: the leader's.
        number: of the last entry in that state.

    Returns:
        `(standing, what)`; the state is to be replaced if that is "taken".
    """
    if term < standing.term or (term == standing.term and standing.role == "leads"):
        return standing, "term"
    if term == standing.term and standing.complete and number <= standing.number:
        return standing, "again"  # it comes late: what is here is newer, and the leader relies on it
    return Role(term=term, role="follows", number=number, complete=True), "taken"


def take(standing: Role, *, term: int, number: int) -> tuple[Role, Taken]:
    """A leader forwards an entry.

    Returns:
        `(standing, what)`; the entry is to be carried out if that is "taken".
    """
    if term < standing.term or (term == standing.term and standing.role == "leads"):
        return standing, "term"
    if term > standing.term or not standing.complete or number > standing.number + 1:
        return standing, "gap"
    if number <= standing.number:
        return standing, "again"
    return changed(standing), "taken"
