"""JAX lets jdist host its coordination service by a private call; where it does not, that is said."""

import jax._src.lib
import pytest

from jdist.cluster.worlds.host import coordination_service
from jdist.errors import ClusterError


def test_the_service_starts_and_ends():
    address, service = coordination_service("127.0.0.1", 1)
    assert address.startswith("127.0.0.1:")
    service.shutdown()


def test_another_jax_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(jax._src.lib._jax, "get_distributed_runtime_service")
    with pytest.raises(ClusterError, match=r'JAX \d.* so `on_loss="continue"` is not possible'):
        coordination_service("127.0.0.1", 1)
