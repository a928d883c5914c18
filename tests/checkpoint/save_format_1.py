"""Saves a checkpoint of format 1, whose whole leaves Orbax wrote; `format_1.tar.gz` holds what it left.

To make that file again, with a checkout of jdist at f021c05, the last to write this format, in OLD:

    PYTHONPATH=OLD python -m jdist launch --processes 2 --devices-per-process 2 tests/checkpoint/save_format_1.py FOLDER
    tar -C FOLDER --sort=name --owner=0 --group=0 --mtime=@0 -cf format_1.tar step_00000003_save_00001
    gzip -9n format_1.tar
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np


def spread_values():
    """The leaf of which each process wrote a half, in two pieces."""
    return np.arange(24.0, dtype=np.float32).reshape(8, 3)


def whole_leaves():
    """A leaf of each kind."""
    small = ("bfloat16", "float8_e4m3fn", "int4", "uint4", "int8", "bool", "float16", "complex64")
    return {
        "small": {name: jnp.array([1, 0], name) for name in small},
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "0-d": jnp.int32(7),
        "empty": jnp.ones((3, 0)),
        "numpy": [np.arange(3), np.float64(0.1), np.zeros((0, 2))],
        "python": [3, 0.1, True, 1 - 1j, None],
    }


def main() -> None:
    import jdist

    strategy = jdist.multi_worker()

    from jdist.support.arrays import put
    from jdist.train import Checkpointer

    state = {"spread": put(spread_values(), strategy.batch_sharding), **whole_leaves()}
    with Checkpointer(sys.argv[1], cluster=strategy.cluster) as checkpoints:
        checkpoints.save(3, state, data={"position": 3}, metrics={"loss": 0.5})


if __name__ == "__main__":
    main()
