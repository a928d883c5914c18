"""Memory that is used again."""

import gc
import platform

import jax
import numpy as np

from jdist.ps.memory import keep_freed_memory
from jdist.ps.wire import ALIGNED, Buffers, Pool, Spec

SPECS = [Spec((1 << 19,), "float32"), Spec((5,), "int32")]


def received(pool):
    return Buffers(SPECS, most_bytes=1 << 30, pool=pool).filled()


def test_a_block_is_used_again_once_its_last_array_is_gone():
    pool = Pool()
    arrays = received(pool)
    first = arrays[0].ctypes.data
    assert first % ALIGNED == 0
    on_device, view = jax.device_put(arrays[0]), arrays[1].data
    assert type(arrays[0]) is np.ndarray
    del arrays
    assert received(pool)[0].ctypes.data != first
    del view
    assert received(pool)[0].ctypes.data != first
    del on_device
    gc.collect()
    assert first in [block.ctypes.data for block in pool._free]


def test_a_pool_keeps_few_blocks_and_those_of_the_size_that_is_asked_for():
    pool = Pool(most_free=2)
    held = [received(pool) for _ in range(4)]
    assert len(pool._free) == 0
    held.clear()
    assert len(pool._free) == 2
    other = pool.take(3 << 20)
    assert (other.size, len(pool._free)) == (3 << 20, 0)
    small = pool.take(100)
    assert small.size == 100
    del small
    assert len(pool._free) == 0


def test_the_c_library_is_told_where_it_listens():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
