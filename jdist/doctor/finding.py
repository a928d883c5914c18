"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        status: "pass", "warn" (a job runs, but perhaps not as wished) or "fail" (it does not run).
        check: what was looked at, "ports".
        text: what was found.
        remedy: what to do; "" where nothing is to be done.
    """

    status: Status
    check: str
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def passed(check: str, text: str) -> Finding:
    """A finding that is as it should be."""
    return Finding(status="pass", check=check, text=text)


def warned(check: str, text: str, remedy: str) -> Finding:
    """A finding to know of."""
    return Finding(status="warn", check=check, text=text, remedy=remedy)


def failed(check: str, text: str, remedy: str) -> Finding:
    """A finding that keeps a job from running."""
    return Finding(status="fail", check=check, text=text, remedy=remedy)
