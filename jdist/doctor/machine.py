"""Checks of this machine alone, which do not start JAX's devices."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

from jdist.doctor.finding import Finding, failed, passed, warned

_NEEDED = ("jax", "jaxlib", "flax", "optax", "chex", "numpy")
_NO_FREE_BYTES = 50 * 10**6  # less than one checkpoint of a small model
_LEAST_FREE_BYTES = 2 * 10**9  # some checkpoints of a small model


def versions() -> list[Finding]:
    """Checks Python, jdist and the packages that it needs."""
    from packaging.requirements import Requirement

    python = passed("python", f"{platform.python_version()} at {sys.executable}")
    installed, wrong = [], []
    wanted = {r.name: r for r in map(Requirement, importlib.metadata.requires("jdist") or []) if r.marker is None}
    for name in ("jdist", *_NEEDED):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(failed("packages", f"{name} is not installed", f"pip install '{wanted.get(name, name)}'"))
            continue
        installed.append(f"{name} {version}")
        if name in wanted and not wanted[name].specifier.contains(version, prereleases=True):
            text = f"{name} {version} is not what jdist is made for ({wanted[name].specifier})"
            wrong.append(warned("packages", text, f"pip install '{wanted[name]}'"))
    return [python, passed("packages", ", ".join(installed)), *wrong]


def disk(folder: Path) -> list[Finding]:
    """Checks that a run can write its folder, which need not exist, and that there is room."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        return [failed("disk", f"{folder} cannot be written: {there} is read-only for this user", "Run elsewhere.")]
    free = shutil.disk_usage(there).free
    text = f"{folder.absolute()}: {free / 1e9:.1f} GB free"
    if free < _NO_FREE_BYTES:
        return [failed("disk", text, "The disk is full: make room, or run elsewhere (`log.folder`).")]
    if free < _LEAST_FREE_BYTES:
        return [warned("disk", text, "A run writes checkpoints: make room, or set `checkpoint.keep` to 1.")]
    return [passed("disk", text)]


def memory() -> list[Finding]:
    """Checks the size of shared memory, /dev/shm on Linux, which NCCL needs."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return []
    size = shutil.disk_usage(shared).total
    text = f"/dev/shm has {size / 1e6:,.0f} MB"
    if size < 256 * 10**6:
        remedy = (
            "Only GPUs need more: with Docker, `--shm-size=1g`; in Kubernetes an emptyDir of medium Memory at /dev/shm."
        )
        return [warned("shared memory", text, remedy)]
    return [passed("shared memory", text)]
