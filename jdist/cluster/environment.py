"""Reading single environment variables. One that is blank counts as not set, as most launchers mean it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jdist.cluster.address import ALLOWED, problem, refused

TOKEN = "JDIST_TOKEN"  # shared by the processes of a job: process 0 takes in nobody without it
ATTEMPT = "JDIST_LAUNCH_ATTEMPT"  # how often `jdist launch` has started this job before
RECORD_FOLDER = "JDIST_RECORD_DIR"  # where a process leaves a record of the loss of another
_DIGITS = re.compile(r"[0-9]{1,18}")


def text(environ: Mapping[str, str], variable: str) -> str | None:
    """The variable without the white space round it; None if it is not set or blank."""
    return environ.get(variable, "").strip() or None


def whole_number(found: str) -> int | None:
    """The number that a text of digits holds; None if it is anything else ("1.0", "-1", "1_000").

    Example:
        >>> whole_number("07"), whole_number("-1")
        (7, None)
    """
    return int(found) if _DIGITS.fullmatch(found) else None


def number(environ: Mapping[str, str], variable: str, mend: str, *, least: int = 0) -> int | None:
    """The whole number in a variable; None if it is not set.

    Raises:
        ClusterConfigError: it holds something else, or a number below `least`.
    """
    found = text(environ, variable)
    if found is None:
        return None
    value = whole_number(found)
    if value is None or value < least:
        raise refused(variable, found, f"a whole number of at least {least}", mend)
    return value


def needed(environ: Mapping[str, str], variable: str, mend: str, *, least: int = 0) -> int:
    """As `number`, but the variable must be set."""
    value = number(environ, variable, mend, least=least)
    if value is None:
        raise refused(variable, None, f"a whole number of at least {least}", mend)
    return value


def index(environ: Mapping[str, str], variable: str, count: int, count_from: str, mend: str) -> int:
    """A number from 0 to `count` - 1 in a variable that must be set.

    Args:
        environ: the environment.
        variable: which variable.
        count: how many there are.
        count_from: where that number is from, for the message.
        mend: what to do when it is wrong.
    """
    value = needed(environ, variable, mend)
    if value >= count:
        raise refused(variable, value, f"from 0 to {count - 1}, as {count_from} says that there are {count}", mend)
    return value


def address(environ: Mapping[str, str], variable: str) -> str | None:
    """The address `host:port` in a variable; None if it is not set."""
    found = text(environ, variable)
    if found is not None and (wrong := problem(found)) is not None:
        raise refused(variable, found, ALLOWED, wrong)
    return found


def port(environ: Mapping[str, str], variable: str) -> int | None:
    """The port in a variable; None if it is not set."""
    found = text(environ, variable)
    if found is None:
        return None
    value = whole_number(found)
    if value is None or not 1 <= value <= 65535:
        raise refused(variable, found, "a port from 1 to 65535", "Choose one that is free on the host of process 0.")
    return value
