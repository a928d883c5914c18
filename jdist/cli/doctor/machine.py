"""Checks of this machine alone, by files and variables: no device is started, as that could hang."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from jdist.cli.doctor.finding import Finding, failed, passed, warned
from jdist.strategies import absent_plugins
from jdist.support.xla import COMPILED_VARIABLE

_NEEDED = ("jax", "jaxlib", "flax", "optax", "chex", "numpy")
_NO_FREE_BYTES = 50 * 10**6  # less than one checkpoint of a small model
_LEAST_FREE_BYTES = 2 * 10**9  # some checkpoints of a small model
# The oldest drivers that JAX's plugins start with, on Linux: https://docs.jax.dev/en/latest/installation.html.
_LEAST_DRIVER = {"jax_plugins.xla_cuda12": (525,), "jax_plugins.xla_cuda13": (580,)}
_BY_NAME = ("GPU-", "MIG-")  # what CUDA_VISIBLE_DEVICES may name as well as numbers
# Interfaces that lead to no other host.
_LOCAL = ("lo", "docker", "veth", "virbr", "br-")


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


def compiled(environ: Mapping[str, str]) -> list[Finding]:
    """Says where compiled programs are kept for the next start."""
    if environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() in ("0", "false", "n", "no", "off", "f"):
        return [passed("compiled", "none are kept, by JAX_ENABLE_COMPILATION_CACHE")]
    if folder := environ.get(COMPILED_VARIABLE):
        return [passed("compiled", f"kept in {folder}, by {COMPILED_VARIABLE}")]
    places = "jdist run and fit keep them with the checkpoints, jdist launch in runs/compiled"
    return [passed("compiled", f"{COMPILED_VARIABLE} is not set: {places}; other programs keep none")]


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


# ---- NVIDIA GPUs, their driver and NCCL


def gpus(
    environ: Mapping[str, str], *, root: Path = Path("/"), loads: Callable[[str], bool] | None = None
) -> list[Finding]:
    """Checks that JAX can use this machine's GPUs; silent without GPUs and JAX's CUDA plugin."""
    # `root` has dev/ and proc/. `loads`: whether a shared library can be loaded; None: asks the
    # loader.
    plugin, driver = absent_plugins.installed_plugin(), absent_plugins.has_driver(root / "dev")
    if not driver:
        if plugin is None:
            return []
        text = f"JAX's CUDA plugin {absent_plugins.plugin_version(plugin)} without a driver: JAX goes on without GPUs"
        return _versions(plugin) or [passed("gpus", f"{text}; `jdist plan --topology h100:8` compiles for them")]
    if plugin is None:
        return [
            warned("gpus", "there is an NVIDIA GPU here, but not JAX's CUDA plugin", "pip install 'jdist[cuda]'"),
            *_visible(environ, root),
        ]
    findings = [*_versions(plugin), *_driver(plugin, root)]
    if not (loads or _loads)("libcuda.so.1"):
        findings.append(
            failed(
                "driver",
                "libcuda.so.1, the driver's library, cannot be loaded, although the driver's devices are here",
                "In a container, start it with the NVIDIA container toolkit (Docker: --gpus all); else reinstall the driver, "
                "or add the folder of libcuda.so.1 to LD_LIBRARY_PATH.",
            )
        )
    return [*findings, *_visible(environ, root), _flags(environ)]


def _flags(environ: Mapping[str, str]) -> Finding:
    """Shows the flag of XLA that changes how gradients are sent; docs/performance.md has what it changes."""
    name = "--xla_gpu_all_reduce_combine_threshold_bytes"
    values = re.findall(rf"(?<!\S){name}=(\S+)", environ.get("XLA_FLAGS", ""))
    if values:  # of several XLA takes the last
        return passed("xla flags", f"gradients are joined up to {values[-1]} bytes for an all-reduce ({name})")
    earlier = f"{name}=4000000, or all_reduce: bucketed, sends them earlier"
    return passed("xla flags", f"gradients are joined up to XLA's 30 MB for an all-reduce; {earlier}")


def nccl(environ: Mapping[str, str], *, hosts: int, root: Path = Path("/")) -> list[Finding]:
    """Checks the path between GPUs: peer access in a host, an interface between hosts."""
    # `root` has dev/ and sys/.
    if not absent_plugins.has_driver(root / "dev"):
        return []
    findings = []
    for name, off in {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}.items():
        value = environ.get(name)
        if value in off:
            text = f"{name}={value} turns peer access off: GPUs of a host exchange gradients through its memory"
            findings.append(warned("nccl", text, f"Unset {name}, unless it works round a fault of this machine."))
    if hosts > 1:
        findings += _interfaces(environ, root)
    return findings or [passed("nccl", "no variable stands in NCCL's way")]


def _versions(plugin: str) -> list[Finding]:
    try:
        jaxlib = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return []  # `versions` says so
    version = absent_plugins.plugin_version(plugin)
    if version in (None, jaxlib):
        return []
    return [
        failed(
            "gpus",
            f"JAX's CUDA plugin is {version}, but jaxlib is {jaxlib}: they must be of one version",
            f"pip install --upgrade 'jax[{plugin.rpartition('_')[2]}]=={jaxlib}'",
        )
    ]


def _driver(plugin: str, root: Path) -> list[Finding]:
    """Compares the driver's version with the one that the plugin needs."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []  # within Windows, and on Jetson, the file is missing
    match = re.search(r"Kernel Module.*?\b(\d+(?:\.\d+)+)", text)
    if match is None:
        return []
    least = _LEAST_DRIVER[plugin]
    if tuple(map(int, match[1].split("."))) < least:
        wanted = ".".join(map(str, least))
        older = (
            ""
            if plugin.endswith("12")
            else ", or take JAX for CUDA 12, which older drivers serve: pip install 'jax[cuda12]'"
        )
        text = f"NVIDIA's driver is {match[1]}, older than {wanted}, which JAX's CUDA plugin needs"
        return [failed("driver", text, f"Update the driver to {wanted} or newer{older}.")]
    return [passed("driver", f"NVIDIA's driver {match[1]}")]


def _visible(environ: Mapping[str, str], root: Path) -> list[Finding]:
    """Checks CUDA_VISIBLE_DEVICES against the GPUs that the driver lists."""
    count = len(list((root / "proc/driver/nvidia/gpus").glob("*"))) or None
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [passed("gpus", f"{count} GPUs")] if count else []
    named = [part.strip() for part in value.rstrip(", ").split(",")]
    if named[0] in ("", "-1", "NoDevFiles"):
        text = f"CUDA_VISIBLE_DEVICES is {value!r}, which hides every GPU"
        return [failed("gpus", text, "Unset it, or name GPUs by number: CUDA_VISIBLE_DEVICES=0,1.")]
    # CUDA takes GPUs up to the first invalid entry, or one named in another way, and drops the rest without a word.
    kind = next((prefix for prefix in _BY_NAME if named[0].startswith(prefix)), None)
    wrong = [part for part in named if not (part.startswith(kind) if kind else _is_index(part, count))]
    there = "0" if count == 1 else f"0 to {count - 1}" if count else "whole numbers"
    if wrong:
        fault = (
            f"{wrong[0]!r} does not begin with {kind!r} as the first does"
            if kind
            else f"this machine has no GPU {wrong[0]!r}"
        )
        text = f"CUDA_VISIBLE_DEVICES is {value!r}, but {fault}; CUDA stops reading there"
        return [failed("gpus", text, f"Name GPUs that are here ({there}), all in one way, or unset it.")]
    if len(set(named if kind else map(int, named))) < len(named):
        text = f"CUDA_VISIBLE_DEVICES is {value!r}, which names a GPU twice, and CUDA then shows none"
        return [failed("gpus", text, f"Name each GPU once ({there}), or unset it.")]
    return [passed("gpus", f"{len(named)}{f' of {count}' if count else ''} GPUs, by CUDA_VISIBLE_DEVICES={value}")]


def _is_index(text: str, count: int | None) -> bool:
    return re.fullmatch("[0-9]+", text) is not None and (count is None or int(text) < count)


def _interfaces(environ: Mapping[str, str], root: Path) -> list[Finding]:
    """Checks that NCCL finds a network interface that leads to the other hosts."""
    there = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    usable = [name for name in there if not name.startswith(_LOCAL)]
    wanted = environ.get("NCCL_SOCKET_IFNAME")
    if wanted:
        return _named_interfaces(wanted, there, usable)
    if usable:
        return []
    text = f"NCCL finds no network interface to other hosts; there are: {', '.join(there) or 'none'}"
    return [failed("nccl", text, "In a container, give it the host's network (Docker: --network=host).")]


def _named_interfaces(wanted: str, there: list[str], usable: list[str]) -> list[Finding]:
    """Checks the interfaces that NCCL_SOCKET_IFNAME chooses: prefixes, or after `=` whole names, or after `^` all others."""
    names, exact = wanted.lstrip("^=").split(","), "=" in wanted[:2]
    matches = [name for name in there if (name in names if exact else name.startswith(tuple(names)))]
    chosen = [name for name in usable if name not in matches] if wanted.startswith("^") else matches
    if any(not name.startswith(_LOCAL) for name in chosen):
        return []
    reached = (
        f"has NCCL use {', '.join(chosen)}, which leads to no other host" if chosen else "names no network interface"
    )
    remedy = (
        f"Set it to one of: {', '.join(usable)}; or unset it." if usable else "Give this host a network, and unset it."
    )
    return [failed("nccl", f"NCCL_SOCKET_IFNAME={wanted} {reached}; there are: {', '.join(there) or 'none'}", remedy)]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
