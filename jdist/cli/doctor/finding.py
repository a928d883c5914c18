"""`Finding`: the result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    status: Status  # "warn": a job runs, but perhaps not as wished; "fail": it does not run
    check: str  # the name of the check, "ports"
    text: str  # the result
    remedy: str = ""  # what to do; "" for nothing


def passed(check: str, text: str) -> Finding:
    return Finding(status="pass", check=check, text=text)


def warned(check: str, text: str, remedy: str) -> Finding:
    return Finding(status="warn", check=check, text=text, remedy=remedy)


def failed(check: str, text: str, remedy: str) -> Finding:
    return Finding(status="fail", check=check, text=text, remedy=remedy)
