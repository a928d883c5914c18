"""Run by `jdist launch`: two processes read a checkpoint of Orbax into their parts of a state.

Usage: orbax_in_processes.py FOLDER, which holds the checkpoint, `saved`.
"""

import sys

import jdist

strategy = jdist.multi_worker(shard="state")

import jax  # noqa: E402 # not before the processes have joined
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

state = jdist.train.from_orbax(
    f"{sys.argv[1]}/saved", strategy.shapes({"w": jnp.zeros((1001, 257)), "n": jnp.int32(0)})
)
assert not state["w"].stored.is_fully_addressable
whole = strategy.fetch(state)
np.testing.assert_array_equal(whole["w"], np.arange(257257.0, dtype=np.float32).reshape(1001, 257))
assert int(whole["n"]) == 3
print(f"process {jax.process_index()} has read its parts")
