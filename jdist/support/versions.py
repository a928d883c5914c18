"""The versions that processes send in their first messages, and the sentence about versions that do not fit."""

from __future__ import annotations

import functools
import platform
import re
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

PROTOCOL = 1  # raised by each change of jdist's messages that an older jdist would misread
_NAMES = {"protocol": "jdist's wire protocol", "jdist": "jdist", "jax": "jax", "jaxlib": "jaxlib", "python": "Python"}


class Difference(NamedTuple):
    """The versions in which two processes differ."""

    text: str  # each with both values and hosts
    is_fatal: bool  # whether the two cannot work together


def installed(package: str) -> str:
    """Returns the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # put on the path without being installed
        return "unknown"


@functools.cache
def versions() -> Mapping[str, Any]:
    """Returns this process's host and versions, as they travel."""
    import jax
    from jax import export

    least, most = (
        export.minimum_supported_calling_convention_version,
        export.maximum_supported_calling_convention_version,
    )
    return {
        "host": socket.gethostname(),
        "protocol": PROTOCOL,
        **{package: installed(package) for package in ("jdist", "jax", "jaxlib")},
        "python": platform.python_version(),
        "reads": [least, most],  # calling conventions of exported programs
        "writes": jax.config.jax_export_calling_convention_version,  # type: ignore[attr-defined]  # made at import
    }


def difference(ours: Mapping[str, Any], theirs: object, *, same_step: bool) -> Difference | None:
    """Compares this process's versions with a peer's; None if only Python differs, or nothing."""
    # With `same_step` both trace and compile one step, and its collectives must match: all versions
    # must be equal. Otherwise the peer receives programs from here, and must read their calling
    # convention.
    theirs = theirs if isinstance(theirs, Mapping) else {}
    differ = [name for name in _NAMES if theirs.get(name) != ours[name]]
    if differ in ([], ["python"]):
        return None
    here, there = ours["host"], _shown(theirs.get("host", "the other host"))
    clauses = [
        f"{_NAMES[name]} is {_shown(theirs.get(name, 'unknown'))} on {there} and {ours[name]} on {here}"
        for name in differ
    ]
    reads = theirs.get("reads")
    match reads:
        case [int(least), int(most)] if least <= ours["writes"] <= most:
            is_readable = True
        case _:
            is_readable = same_step
    if not is_readable:
        clauses.append(
            f"{there} reads exported programs of calling conventions {_shown(reads)}, and {here} writes {ours['writes']}"
        )
    return Difference("; ".join(clauses), same_step or not is_readable or "protocol" in differ)


def _shown(value: object) -> str:
    """Returns what a peer sent, fit for a log."""
    return re.sub(r"[^\w.+\-, \[\]]", "?", str(value))[:60]
