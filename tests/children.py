"""What processes that tests start find in their environment."""

import os


def without_devices() -> dict[str, str]:
    """This process's variables, but for the eight devices of its own: a child compiles as quickly, on one device."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count")]
    return {**os.environ, "XLA_FLAGS": " ".join(kept)}
