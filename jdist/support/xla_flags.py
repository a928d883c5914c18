"""Edits of XLA_FLAGS, which XLA reads once, when it starts. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping

CPU_DEVICES = "--xla_force_host_platform_device_count"


def with_flags(existing: str, flags: Mapping[str, str]) -> str:
    """Sets some flags (dashes included) in XLA_FLAGS; the other flags stay.

    Example:
        >>> with_flags("--xla_a=1 --xla_b=2", {"--xla_a": "3"})
        '--xla_b=2 --xla_a=3'
    """
    kept = [flag for flag in existing.split() if flag.partition("=")[0] not in flags]
    return " ".join(kept + [f"{name}={value}" for name, value in flags.items()])
