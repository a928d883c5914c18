"""The host memory that saves share: a save keeps the values of its step, whatever is copied, written or restored meanwhile."""

import gc
import threading
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jdist.checkpoint import leaves as codec
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.checkpoint.leaves import HostMemory, to_host
from jdist.errors import CheckpointError
from tests.checkpoint.test_checkpoint import slow_writes


def sharded_over(count, *axes):
    mesh = jax.make_mesh((count,), ("x",), (AxisType.Auto,), devices=jax.devices()[:count])
    return NamedSharding(mesh, PartitionSpec(*axes))


def filled(value, sharding=None):
    """Makes a state of every kind of source, with one value in all of its elements."""
    sharding = sharding or sharded_over(1)
    on_devices = {"w": np.full((8, 300), value, np.float32), "n": np.int32(value), "empty": np.zeros((8, 0))}
    return jax.tree.map(lambda x: jax.device_put(x, sharding if x.ndim else None), on_devices) | {
        "host": np.full((5, 3), value),
        "python": value,
    }


def assert_filled(state, value):
    for leaf in jax.tree.leaves(state):
        np.testing.assert_array_equal(np.asarray(leaf), np.full(np.shape(leaf), value))


@pytest.mark.parametrize("sharding", [(1,), (8,), (8, "x"), (4, "x")])
def test_each_save_keeps_the_values_of_its_step(tmp_path, monkeypatch, sharding):
    add_one = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = filled(1, sharded_over(*sharding))
    _, go_on = slow_writes(monkeypatch)
    with Checkpointer(tmp_path, keep=4) as checkpoints:
        for step in range(1, 5):
            go_on.clear()
            checkpoints.save(step, state)
            host = state.pop("host")
            python = state.pop("python")
            donated = state
            state = add_one(donated)
            assert donated["w"].is_deleted()
            host += 1  # in place
            state |= {"host": host, "python": python + 1}
            jax.block_until_ready(state)
            go_on.set()
            checkpoints.wait()
        for step in range(1, 5):
            assert_filled(checkpoints.restore(filled(0), step=step).state, step)


def test_a_refused_save_does_not_reach_the_one_that_is_still_written(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, filled(1), wait=True)  # its memory serves the next
        started, go_on = slow_writes(monkeypatch)
        checkpoints.save(2, filled(2))
        assert started.wait(60)
        checkpoints._timeout_s = 0.05
        with pytest.raises(CheckpointError, match=r"saving step 2 .*not done after"):
            checkpoints.save(3, filled(3))
        checkpoints._timeout_s = 60.0
        go_on.set()
        checkpoints.wait()
        restored = checkpoints.restore(filled(0))
        assert restored.step == 2
        assert_filled(restored.state, 2)


def test_a_copy_that_goes_on_after_its_deadline_does_not_reach_later_saves(tmp_path, monkeypatch):
    copy_on, copied, copy = threading.Event(), threading.Event(), codec.to_host

    def slow_copy(*args, **options):
        assert copy_on.wait(60)
        copy(*args, **options)
        copied.set()

    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, filled(1), wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(codec, "to_host", slow_copy)
            checkpoints._timeout_s = 0.05
            with pytest.raises(CheckpointError, match=r"copying step 2 .*not done after"):
                checkpoints.save(2, filled(2))
            checkpoints._timeout_s = 60.0
        started, go_on = slow_writes(monkeypatch)
        checkpoints.save(3, filled(3))
        assert started.wait(60)
        copy_on.set()
        assert copied.wait(60)
        go_on.set()
        checkpoints.wait()
        restored = checkpoints.restore(filled(0))
        assert restored.step == 3
        assert_filled(restored.state, 3)


@pytest.mark.parametrize("like", [filled(0), jax.tree.map(np.asarray, filled(0))], ids=["placed", "numpy"])
def test_a_later_save_does_not_reach_restored_arrays(tmp_path, like):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, filled(1), wait=True)
        first = checkpoints.restore(like).state
        checkpoints.save(2, filled(2), wait=True)
        second = checkpoints.restore(like).state
        checkpoints.save(3, filled(3), wait=True)
        assert_filled(first, 1)
        assert_filled(second, 2)


def test_saves_of_other_sizes_in_turn(tmp_path):
    states = [{str(i): np.full(size, i, "int16") for i in range(count)} for count, size in ((3, 9), (1, 400), (3, 9))]
    with Checkpointer(tmp_path) as checkpoints:
        for step, state in enumerate(states):
            checkpoints.save(step, state)
        for step, state in enumerate(states):
            np.testing.assert_equal(checkpoints.restore(state, step=step).state, state)


def test_the_memory_is_used_again_and_released_at_the_end(tmp_path):
    memory = HostMemory()
    addresses = [
        [
            box.values.ctypes.data
            for leaf in to_host(jax.tree.leaves(filled(i)), memory, is_chief=True)
            for box in leaf.boxes
        ]
        for i in range(2)
    ]
    assert addresses[0] == addresses[1]
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, filled(1), wait=True)
        memory = weakref.ref(checkpoints._memory)
        checkpoints.save(2, filled(2), wait=True)
        assert checkpoints._memory is memory()
        checkpoints.save(3, filled(3))
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("is_whole", [True, False], ids=["one array", "shards"])
def test_of_devices_with_their_own_memory_only_shards_are_copied_twice(monkeypatch, is_whole):
    # Devices of this kind are simulated: NumPy's arrays are taken for transfers.
    as_part = codec._Part
    monkeypatch.setattr(codec, "_Part", lambda start, shape, sources, on_host: as_part(start, shape, sources, False))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(values, sharded_over(4, *(() if is_whole else ("x",))))
    memory = HostMemory()
    (local,) = to_host([array], memory, is_chief=True)
    (box,) = local.boxes
    np.testing.assert_array_equal(box.values, values)
    assert memory._bytes.size == (0 if is_whole else values.nbytes)
