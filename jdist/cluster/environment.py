"""Values of single environment variables. A blank one counts as not set, as most launchers mean it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jdist.cluster.address import ALLOWED, host_problem, problem, refused

TOKEN = "JDIST_TOKEN"  # a job's secret: process 0 takes in nobody without it
ATTEMPT = "JDIST_LAUNCH_ATTEMPT"  # number of attempts of `jdist launch` before this one
WORLDS = "JDIST_WORLDS"  # the address of the host of a job's worlds
NUMBER = "JDIST_NUMBER"  # a process's place in the order of starts, where TF_CONFIG's index is not that
RECORD_FOLDER = "JDIST_RECORD_DIR"  # where a process writes the record of a lost one
_DIGITS = re.compile(r"[0-9]{1,18}")
# libtpu sets TPU_WORKER_ID and others of its process to this where it finds no TPU; children
# inherit it.
_LIBTPU_NOTE = "WARNING: could not determine TPU "


def text(environ: Mapping[str, str], variable: str) -> str | None:
    """Reads a variable, without the white space round it; None if it is not set, blank, or libtpu's note of no TPU."""
    value = environ.get(variable, "").strip()
    return None if not value or value.startswith(_LIBTPU_NOTE) else value


def whole_number(digits: str) -> int | None:
    """Parses a text of digits; None if it is anything else ("1.0", "-1", "1_000")."""
    return int(digits) if _DIGITS.fullmatch(digits) else None


def first_set(environ: Mapping[str, str], *variables: str) -> str | None:
    """Finds the first of these variables that is set; None if none is."""
    return next((each for each in variables if text(environ, each) is not None), None)


def number(
    environ: Mapping[str, str], variable: str, mend: str, *, least: int = 0, most: int | None = None
) -> int | None:
    """Reads the whole number in a variable; None if it is not set."""
    written = text(environ, variable)
    if written is None:
        return None
    value = whole_number(written)
    if value is None or value < least:
        raise refused(variable, written, f"a whole number of at least {least}", mend)
    if most is not None and value > most:
        raise refused(variable, value, f"at most {most}", mend)
    return value


def needed(environ: Mapping[str, str], variable: str, mend: str, *, least: int = 0, most: int | None = None) -> int:
    """Reads a whole number as `number` does, from a variable that must be set."""
    value = number(environ, variable, mend, least=least, most=most)
    if value is None:
        raise refused(variable, None, f"a whole number of at least {least}", mend)
    return value


def index(environ: Mapping[str, str], variable: str, count: int, count_from: str, mend: str) -> int:
    """Reads a number below `count`, the value of `count_from`, from a variable that must be set."""
    value = needed(environ, variable, mend)
    if value >= count:
        raise refused(variable, value, f"from 0 to {count - 1}, as {count_from} says that there are {count}", mend)
    return value


def address(environ: Mapping[str, str], variable: str) -> str | None:
    """Reads the address `host:port` in a variable; None if it is not set."""
    written = text(environ, variable)
    if written is not None and (wrong := problem(written)) is not None:
        raise refused(variable, written, ALLOWED, wrong)
    return written


def host(environ: Mapping[str, str], variable: str) -> str | None:
    """Reads the host of process 0 in a variable; None if it is not set."""
    written = text(environ, variable)
    if written is not None and (wrong := host_problem(written)) is not None:
        raise refused(variable, written, "the name or address of process 0's host", wrong)
    return written


def port(environ: Mapping[str, str], variable: str) -> int | None:
    """Reads the port in a variable; None if it is not set."""
    written = text(environ, variable)
    if written is None:
        return None
    value = whole_number(written)
    if value is None or not 1 <= value <= 65535:
        raise refused(variable, written, "a port from 1 to 65535", "Choose one that is free on the host of process 0.")
    return value
