"""Sums by `psum_scatter` through gloo, between devices of this one process, until a sum is wrong; prints whether one was."""

import socket

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist.support import xla

PART = (8 << 20) // 4  # elements; with parts of 4 MiB wrong sums are rare

with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
mesh = jax.make_mesh((4, 2), ("group", "replica"))


def num_wrong(number):
    me, places = jax.lax.axis_index("replica"), jax.lax.iota(jnp.int32, 2 * PART)
    values = [((places * (i + 1) + number) % 23).astype(jnp.float32) for i in range(2)]
    want = jax.lax.dynamic_slice_in_dim(values[0] + values[1], me * PART, PART)
    got = jax.lax.psum_scatter(jnp.where(me == 0, *values), "replica", tiled=True)
    return jnp.sum(got != want)[None]


step = jax.jit(
    jax.shard_map(
        num_wrong, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(mesh.axis_names), check_vma=False
    )
)
taken = xla.gloo_scatters_wrongly()
tries = 200 if taken else 12  # a loaded machine can sum rightly a dozen times
found = any(np.asarray(step(jnp.int32(i))).any() for i in range(tries))
print(f"wrong: {found}, taken for wrong: {taken}")
