"""Processes that tests start."""

import os
from pathlib import Path

import jdist


def without_devices() -> dict[str, str]:
    """This process's variables, but for the eight devices of its own: a child compiles as quickly, on one device."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count")]
    return {**os.environ, "XLA_FLAGS": " ".join(kept)}


def run_in_two(program: str | Path, folder: Path) -> None:
    """Runs a program in two processes of two devices each; it is given the folder, in which their logs are too."""
    launched = jdist.launch([str(program), str(folder)], processes=2, devices_per_process=2, log_dir=folder / "logs")
    assert launched.exit_code == 0, launched
