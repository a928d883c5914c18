"""Addresses `host:port`."""

from __future__ import annotations

import ipaddress
import re
import reprlib
from typing import Any

from jdist.errors import ClusterConfigError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_PORT = re.compile(r"[0-9]{1,5}")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
ALLOWED = "host:port, with a port from 1 to 65535"


def join(host: str, port: int) -> str:
    """Joins host and port as `host:port`, an IPv6 address in brackets: `[fe80::1]:2222`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Splits a valid address into its host (an IPv6 address without brackets) and its port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def normalized(address: str) -> tuple[str, int]:
    """Normalises a valid address, so that two spellings of it are equal; names are not looked up."""
    host, port = split(address)
    return (ipaddress.IPv6Address(host).compressed if ":" in host else host.lower()), port


def problem(address: str) -> str | None:
    """Finds the remedy for a text that is not an address `host:port`; None if it is one."""
    scheme, marked, _ = address.partition("://")
    if marked:
        return f"Leave out what comes before the host ({scheme[:20]}://)."
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        return "Write both the host and the port, as in node1:2222."
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "Write an IPv6 address in brackets, as in [fe80::1]:2222."
    if _PORT.fullmatch(port) is None or not 1 <= int(port) <= 65535:
        return "Give a port from 1 to 65535."
    return host_problem(host.removeprefix("[").removesuffix("]"))


def host_problem(host: str) -> str | None:
    """Finds what is wrong with a host: a name, an IPv4 address, or an IPv6 address without brackets."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return "The brackets must hold an IPv6 address."
        return None
    if _NAME.fullmatch(host) is None:
        return "A host's name is made of letters, digits, dots and hyphens."
    return None


def check_hosts(variable: str, hosts: list[Any], mend: str) -> None:
    """Refuses a list in which an entry is not a host, or is there twice."""
    for i, host in enumerate(hosts):
        wrong = host_problem(host) if isinstance(host, str) else mend
        if wrong is not None or host in hosts[:i]:
            allowed = "there once only" if wrong is None else "the name or address of a host"
            raise refused(variable, host, allowed, wrong or mend, field=f"[{i}]")


def refused(variable: str, value: object, allowed: str, mend: str, *, field: str | None = None) -> ClusterConfigError:
    """Makes the error for a value that is not allowed."""
    # `allowed` ends a sentence, `mend` is one. `value` None: not set. `field` is the part of the
    # variable that holds the value.
    where = variable if field is None else f"{variable}: `{field}`"
    state = "is not set" if value is None else f"is {_SHORT.repr(value)}"
    return ClusterConfigError(
        f"{where} {state}; it must be {allowed}. {mend}",
        variable=variable,
        field=variable if field is None else field,
        value=value,
    )
