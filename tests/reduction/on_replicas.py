"""An algorithm on the replicas of a small mesh: its sums, its program."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist.reduction import Reduction

PyTree = Any


def mesh_of(num_replicas: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_replicas]), ("replica",), axis_types=(AxisType.Auto,))


def mapped(reduction: Reduction, mesh: Mesh) -> Any:
    """`(trees [replicas, ...], carries [replicas, ...]) -> (sums [replicas, ...], carries)`."""

    def one(tree: PyTree, carry: PyTree) -> PyTree:
        own = jax.tree.map(lambda x: x[0], (tree, carry))
        return jax.tree.map(lambda x: x[None], reduction.apply(*own, tuple(mesh.axis_names)))

    spec = PartitionSpec(tuple(mesh.axis_names))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def carries(reduction: Reduction, trees: PyTree, num_replicas: int) -> PyTree:
    """What each replica keeps before the first call, stacked."""
    one = reduction.init(jax.tree.map(lambda x: x[0], trees))
    return jax.tree.map(lambda x: np.stack([np.asarray(x)] * num_replicas), one)


def lowered(reduction: Reduction, trees: PyTree, mesh: Mesh) -> jax.stages.Lowered:
    """The program for trees of these shapes; the mesh may be of devices that are not there."""
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    arguments = (trees, carries(reduction, trees, mesh.size))
    return mapped(reduction, mesh).lower(
        *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    )


def in_stablehlo(program: jax.stages.Lowered) -> dict[str, int]:
    """How many collectives of each kind a program holds as it goes to the compiler."""
    kinds = "all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute"
    return dict(collections.Counter(re.findall(rf'stablehlo\.({kinds})"', program.as_text())))


def compiled(program: jax.stages.Lowered) -> list[tuple[str, frozenset[str]]]:
    """Each collective of the compiled program: its kind and the element types that cross the wire."""
    text = re.sub(r"/\*.*?\*/", "", program.compile().as_text() or "")
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= ([^=\n]*?) ({kinds})(?:-start)?\(", text)
    return [(kind, frozenset(re.findall(r"\b([a-z]+\d+)\[", shape))) for shape, kind in found]


def tpu_mesh(monkeypatch: Any) -> Mesh:
    """Eight TPU chips to compile for; the test is left out where libtpu is not installed."""
    import pytest

    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    devices = topologies.get_topology_desc("v5e:2x4", "tpu").devices
    return Mesh(np.array(devices), ("replica",), axis_types=(AxisType.Auto,))
