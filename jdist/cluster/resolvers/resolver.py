"""What a resolver is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jdist.cluster.spec import ClusterSpec

Resolver = Callable[[Mapping[str, str]], ClusterSpec | None]
"""A pure function of an environment: the cluster that it describes, None if it describes none of this kind."""
