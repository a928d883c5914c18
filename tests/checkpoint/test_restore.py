"""What a process reads of a checkpoint, and how much of it the host holds at a time."""

import gc
import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.checkpoint import leaves, pieces
from jdist.train import Checkpointer, CheckpointWarning
from tests.checkpoint import restore_in_processes as program
from tests.children import run_in_two

NUM_LEAVES, SHAPE = 12, (600, 513)  # more than a megabyte each, and padded on 8 devices
LEAF = 4 * 600 * 513
SLACK = 200_000


def create():
    large = {f"large {i}": jnp.arange(600.0 * 513).reshape(SHAPE) + i for i in range(NUM_LEAVES)}
    return {**large, **{f"small {i}": jnp.full(20, float(i)) for i in range(100)}}


@pytest.fixture(scope="module")
def strategy():
    return jdist.sharded(whole_below=64, most_whole=1)


@pytest.fixture(scope="module")
def folder(strategy, tmp_path_factory):
    """Two saves."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, strategy.init(create), wait=True)
    return folder


@pytest.fixture
def held(monkeypatch):
    """Lists how many bytes that were read are on the host when a leaf is placed."""
    place, sizes = leaves.place, []

    def measured(*args):
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, pieces.__file__)])
        sizes.append(sum(each.size for each in snapshot.statistics("filename")))
        return place(*args)

    monkeypatch.setattr(leaves, "place", measured)
    tracemalloc.start()
    yield sizes
    tracemalloc.stop()


def test_the_host_holds_one_leaf_at_a_time(strategy, folder, held):
    like = strategy.init(create)
    with Checkpointer(folder) as checkpoints:
        restored = checkpoints.restore(like)
    assert len(held) == NUM_LEAVES + 100
    assert max(held) <= LEAF + SLACK
    jax.tree.map(np.testing.assert_array_equal, strategy.fetch(restored.state), create())


def test_nothing_of_a_damaged_checkpoint_is_held_while_the_one_before_is_read(strategy, folder, tmp_path, held):
    shutil.copytree(folder, tmp_path / "run")
    (file,) = (tmp_path / "run").glob("step_00000002*/pieces_0.bin")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    like = jax.tree.map(np.zeros_like, create())  # NumPy's arrays, so that what is placed is counted as well
    gc.disable()
    try:
        with Checkpointer(tmp_path / "run") as checkpoints, pytest.warns(CheckpointWarning, match="checksum does not"):
            restored = checkpoints.restore(like)
    finally:
        gc.enable()
    assert restored.step == 1
    assert max(held) <= NUM_LEAVES * LEAF + 2 * SLACK
    jax.tree.map(np.testing.assert_array_equal, restored.state, create())


def test_a_save_leaves_no_copy_with_the_state(tmp_path):
    # Of four bits JAX keeps a copy on the host, as it does of every array on another device.
    state = {"w": jnp.zeros(1000, jnp.int4), "spread": strategy_of_rows(jnp.zeros((8, 10), jnp.int4))}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=True)
    shards = [shard.data for x in state.values() for shard in x.addressable_shards]
    assert [x._npy_value is None for x in [*state.values(), *shards]] == [True] * (2 + len(shards))


def strategy_of_rows(x):
    return jax.device_put(x, jdist.mirrored().batch_sharding)


@pytest.mark.parametrize("step", [-1, 1.5, "2", True])
def test_a_step_is_a_whole_number(folder, step):
    with (
        Checkpointer(folder) as checkpoints,
        pytest.raises(jdist.errors.CheckpointError, match=r"must be a whole number, 0 or more\. None takes the newest"),
    ):
        checkpoints.restore({}, step=step)


def test_which_pieces_meet_a_box():
    piece = pieces.Piece(file="", start=(2, 0), shape=(2, 3), crc32=0)
    assert piece.meets(None)
    assert piece.meets([((0, 1), (0, 3)), ((3, 9), (2, 3))])
    assert not piece.meets([((0, 2), (0, 3)), ((4, 9), (0, 3)), ((2, 4), (3, 4))])
    assert not piece.meets([])
    assert pieces.Piece(file="", start=(), shape=(), crc32=0).meets([()])


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restored")
    run_in_two(program.__file__, folder)
    return folder


@pytest.fixture(scope="module")
def met(launched):
    return [json.loads((launched / f"{i}.json").read_text()) for i in range(2)]


def test_each_process_reads_its_share(met):
    assert met[0]["files"] == ["pieces_0.bin"]
    assert met[1]["files"] == ["pieces_0.bin", "pieces_1.bin"]  # the small ones are whole, and written by process 0
    size = sum(x.nbytes for x in jax.tree.leaves(program.create()))
    for each in met:
        assert abs(each["bytes"] - size / 2) <= SLACK  # padding is not in the files


def test_each_process_holds_its_share_and_a_leaf(met):
    whole = jax.tree.leaves(program.create())
    size, largest = sum(x.nbytes for x in whole), max(x.nbytes for x in whole)
    for each in met:
        assert each["peak of a save"] <= size / 2 + largest + SLACK
        assert each["peak"] <= size / 2 + largest + SLACK


def test_each_process_reads_its_share_of_a_part(met):
    whole = program.create()
    part = sum(x.nbytes for name, x in whole.items() if name.startswith("columns"))
    for each in met:
        assert each["part is right"]
        assert each["not restored"] == [name for name in sorted(whole) if not name.startswith("columns")]
        assert abs(each["bytes of a part"] - part / 2) <= SLACK


def test_all_take_the_one_before_if_one_finds_damage(met):
    for each in met:
        assert each["fell back to"] == 1
        assert "pieces_1.bin: its checksum does not match" in each["warning"]
        assert each["old state is whole"]
    assert met[0]["warning"].startswith("process 1: ")
    assert not met[1]["warning"].startswith("process 1: ")


def test_processes_that_ask_for_different_steps_are_told(met):
    for each in met:
        assert "ask for different steps (process 0: 1, process 1: 2)" in each["different steps"]


def test_they_restore_to_the_bit(met, launched, strategy):
    assert [(each["same"], each["same within 2"]) for each in met] == [(True, True)] * 2
    like = jax.tree.map(np.zeros_like, program.create())
    for into in (
        strategy,
        jdist.mirrored(jax.devices()[:3]),
        jdist.sharded(jax.devices()[:6], within=3, whole_below=64),
    ):
        with Checkpointer(Path(launched) / "run") as checkpoints:
            restored = checkpoints.restore(into.init(lambda: like), step=1)
        jax.tree.map(np.testing.assert_array_equal, into.fetch(restored.state), program.create())
