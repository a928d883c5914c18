"""Eight virtual CPU devices for every test, unless the caller chose a platform."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax.monitoring
import pytest

_compiled: list[str] = []


def _listen(event: str, *_, **__) -> None:
    if event.endswith("backend_compile_duration"):
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)  # JAX has no public way to take one listener out


@pytest.fixture
def compiled() -> list[str]:
    """Every compilation by XLA since it was last cleared."""
    _compiled.clear()
    return _compiled
