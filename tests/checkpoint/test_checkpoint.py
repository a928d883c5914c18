"""Checkpoints that nothing disturbs: what is saved comes back to the bit, laid out as asked."""

import asyncio
import contextlib
import errno
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import flax.struct
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jdist
from jdist.callbacks import checkpoint as checkpoint_callback
from jdist.checkpoint import from_orbax, to_orbax
from jdist.checkpoint import together as checkpoint_together
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.checkpoint.locks import is_claimed
from jdist.errors import CheckpointError, DonatedStateError, ReplicaDivergenceError

ROOT = pathlib.Path(__file__).parents[2]


class Pair(NamedTuple):
    first: jax.Array
    second: object


@flax.struct.dataclass
class Node:
    rng: jax.Array
    inner: dict
    function: object = flax.struct.field(pytree_node=False, default=None)


def bits(leaf):
    """What a leaf is, to the bit, by a way that shares nothing with the code under test."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    if isinstance(leaf, jax.Array):
        return str(leaf.dtype), leaf.shape, leaf.weak_type, np.asarray(leaf).tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), str(leaf.dtype), leaf.shape, leaf.tobytes()
    return type(leaf), repr(leaf)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert [bits(x) for x in jax.tree.leaves(actual)] == [bits(x) for x in jax.tree.leaves(expected)]


def mesh(num_devices):
    return jax.make_mesh((num_devices,), ("replica",), (AxisType.Auto,), devices=jax.devices()[:num_devices])


def every_kind():
    odd = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32).reshape(2, 2)
    return {
        "node": Node(rng=jax.random.key(3), inner={"w": jnp.asarray(odd), "1": jnp.ones((3, 0))}, function=len),
        "pair": Pair(jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), None),
        "keys": (jax.random.split(jax.random.key(1, impl="rbg"), 4), jax.random.key(0, impl="unsafe_rbg")),
        "small": [jnp.array([1, 2], d) for d in ("int4", "uint4", "float8_e4m3fn", "int8", "bool", "float16")],
        "wide": [jnp.array([1 + 2j], "complex64"), jnp.uint32(2**32 - 1), jnp.int16(-1)],
        "weak": [jnp.asarray(7), jnp.asarray(0.1)],
        "numpy": [np.arange(3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.float64(0.1), np.zeros((0, 2))],
        "python": [3, 0.1, True, 1 - 1j, -(2**63)],
        "nothing": [None, (), {}],
        "a/b.c": {"it's": jnp.float32(1)},
    }


def test_every_kind_of_leaf_comes_back_to_the_bit(tmp_path):
    state = every_kind()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, state, data={"position": 3, "order": [1, 2]}, metrics={"loss": np.float32(0.5)})
        restored = checkpoints.restore(state)
    assert_same(restored.state, state)
    assert (restored.step, restored.data, restored.metrics) == (5, {"position": 3, "order": [1, 2]}, {"loss": 0.5})
    assert restored.state["node"].function is len


def test_another_process_with_only_shapes_reads_it(tmp_path):
    state = {"w": jnp.arange(4.0), "rng": jax.random.key(3), "step": jnp.int32(4)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, state, metadata={"jax": "0.10"})
    with Checkpointer(tmp_path) as checkpoints:
        restored = checkpoints.restore(jax.eval_shape(lambda: state))
    assert_same(restored.state, state)
    assert restored.data is None
    assert restored.metadata == {"jax": "0.10"}


@pytest.mark.parametrize("make", [jdist.TrainState.create, flax.training.train_state.TrainState.create])
def test_train_states_with_their_static_parts(tmp_path, make):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = {"dense": {"kernel": jnp.full((3, 2), 0.5), "bias": jnp.zeros(2)}}
    state = make(apply_fn=len, params=params, tx=tx)
    grads = jax.tree.map(jnp.ones_like, params)
    state = jax.jit(lambda state: state.apply_gradients(grads=grads))(state)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        fresh = make(apply_fn=len, params=params, tx=tx)  # flax's step is a Python 0, the saved one an array
        restored = checkpoints.restore(fresh).state
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for actual, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert type(restored.step) is type(fresh.step)
    assert restored.apply_fn is len


def test_saved_on_eight_devices_read_on_one_four_and_eight(tmp_path):
    values = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "rng": jax.random.key(2), "n": np.int32(3)}
    eight = {"w": PartitionSpec("replica"), "rng": PartitionSpec(), "n": PartitionSpec()}
    lay_out = lambda specs, m: jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(m, s)), values, specs)  # noqa: E731
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(7, lay_out(eight, mesh(8)), data={"position": 7})
    for num_devices, w_spec in [(1, PartitionSpec()), (4, PartitionSpec(None, "replica")), (8, PartitionSpec())]:
        like = lay_out({**eight, "w": w_spec}, mesh(num_devices))
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        with Checkpointer(tmp_path) as checkpoints:
            restored = checkpoints.restore(abstract)
        assert restored.data == {"position": 7}
        assert_same(restored.state, like)
        for actual, expected in zip(jax.tree.leaves(restored.state), jax.tree.leaves(like), strict=True):
            assert actual.sharding == expected.sharding
            shapes = [[shard.data.shape for shard in x.addressable_shards] for x in (actual, expected)]
            assert shapes[0] == shapes[1]


def slow_writes(monkeypatch):
    """Lets each write wait; returns the events that it has begun, and that it may go on."""
    started, go_on, write = threading.Event(), threading.Event(), checkpoint_together.write_pieces

    def slow_write(file, leaves):
        started.set()
        assert go_on.wait(60)
        return write(file, leaves)

    monkeypatch.setattr(checkpoint_together, "write_pieces", slow_write)
    return started, go_on


@pytest.mark.parametrize("num_devices", [1, 8])
def test_steps_that_take_over_the_buffers_do_not_reach_the_save(tmp_path, num_devices, monkeypatch):
    replicated = NamedSharding(mesh(num_devices), PartitionSpec())
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0, out_shardings=replicated)
    started, go_on = slow_writes(monkeypatch)
    state = step(
        {"w": jax.device_put(jnp.arange(100_000.0), replicated), "n": jax.device_put(jnp.int32(0), replicated)}
    )
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    with Checkpointer(tmp_path) as checkpoints:
        before = state
        pointers = [shard.data.unsafe_buffer_pointer() for shard in state["w"].addressable_shards]
        checkpoints.save(1, state)
        state = step(state)
        assert before["w"].is_deleted()  # donated for good: the save holds no view that would force a copy
        assert pointers == [shard.data.unsafe_buffer_pointer() for shard in state["w"].addressable_shards]
        assert started.wait(60)
        for _ in range(20):
            state = step(state)
        jax.block_until_ready(state)
        go_on.set()
        restored = checkpoints.restore(state).state
        for _ in range(3):  # and the restored state may be donated: its replicas share no memory
            restored = step(restored)
    np.testing.assert_array_equal(restored["w"], expected["w"] + 3)
    for shard in restored["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, expected["w"] + 3)
    assert int(restored["n"]) == expected["n"] + 3


def test_a_resumed_step_does_not_compile_again(tmp_path):
    traces = []

    @jax.jit
    def step(state):
        traces.append(None)
        return jax.tree.map(lambda x: x + 1, state)

    state = step({"weak": jnp.asarray(1), "w": jnp.arange(3.0)})
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        step(checkpoints.restore(state).state)
    assert len(traces) == 1


@pytest.mark.parametrize("strategy", ["default", "one_device", "mirrored"])
def test_a_resumed_step_of_a_strategy_compiles_once(tmp_path, strategy, compiled):
    strategy = jdist.make_strategy(strategy)

    @jdist.distribute(strategy)
    def step(state, batch):
        return {"w": state["w"] + batch["x"].mean(), "key": state["key"]}, {}

    state = strategy.init(lambda: {"w": jnp.zeros(3), "key": jax.random.key(0)})
    batch = {"x": np.ones(8, np.float32)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=True)
        state = checkpoints.restore(state).state
    state, _ = step(state, batch)
    compiled.clear()
    for _ in range(2):
        state, _ = step(state, batch)
    assert compiled == []


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"w": jnp.zeros((2, 3)), "n": jnp.int32(0)}, ["['w']", "float32[3, 2]", "float32[2, 3]"]),
        ({"w": jnp.zeros((3, 2), jnp.bfloat16), "n": jnp.int32(0)}, ["['w']", "float32[3, 2]", "bfloat16[3, 2]"]),
        ({"w": jnp.zeros((3, 2)), "n": jnp.int32(0), "v": jnp.zeros(1)}, ["['v']", "not in the checkpoint"]),
        ({"w": jnp.zeros((3, 2))}, ["['n']", "not in the state"]),
        ({"w": jnp.zeros((3, 2)), "n": jax.random.key(0)}, ["['n']", "int32[]", "key<fry>[]"]),
        ({"w": jnp.zeros((3, 2)), "n": "four"}, ["['n']", "str"]),
    ],
)
def test_a_tree_that_does_not_fit_is_refused_by_leaf(tmp_path, like, words):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros((3, 2)), "n": jnp.int32(0)})
        checkpoints.save(2, {"w": jnp.zeros((3, 2)), "n": jnp.int32(0)})
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(like)
    assert all(word in str(caught.value) for word in words)


def test_a_number_that_would_change_is_refused(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"n": 2**40})
        with pytest.raises(CheckpointError, match=r"\['n'\].*1099511627776.*int32"):
            checkpoints.restore({"n": jnp.int32(0)})
        assert checkpoints.restore({"n": 0}).state == {"n": 2**40}


NO_JSON = [{"a": (1, 2)}, {1: 2}, {"a": float("nan")}, {"a": np.int64(1)}, {"a": object()}]
NO_MAPPING = (3, "x", [None], np.arange(2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({"step": step}, f"`step` is {step!r}; it must be a whole number, 0 or more")
            for step in ("1", 1.0, True, -1, None)
        ),
        *(
            ({"state": {"x": leaf}}, rf"\['x'\].*{word}")
            for leaf, word in (
                ("text", "str"),
                (np.array(["text"]), "<U4"),
                (2**63, "64 bits"),
                (jax.ShapeDtypeStruct((), "int32"), "no value"),
            )
        ),
        *(({"data": data}, "`data`") for data in NO_JSON),
        *(
            ({name: value}, rf"^`{name}`.*: it must be a mapping from names")
            for name in ("data", "metrics", "metadata")
            for value in NO_MAPPING
        ),
        *(
            ({"metrics": {"loss": value}}, "^`metrics`.*: it must be one number")
            for value in (None, "x", np.arange(2), 10**400)
        ),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, options, says):
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=says):
            checkpoints.save(**{"step": 1, "state": {"n": 1}} | options)
        assert checkpoints.steps() == []


def test_a_donated_state_is_refused(tmp_path):
    state = {"w": jnp.arange(3.0)}
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(jnp.sin, s), donate_argnums=0)(state))
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(DonatedStateError, match=r"\['w'\]"):
        checkpoints.save(1, state)


def save_all(checkpoints, scores):
    for step, score in scores.items():
        checkpoints.save(step, {"n": np.int64(step)}, metrics={} if score is None else {"accuracy": score})
    checkpoints.wait()


@pytest.mark.parametrize(
    ("mode", "scores", "best", "steps"),
    [
        ("max", {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4}, 2, [2, 4, 5]),
        ("min", {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4}, 1, [1, 4, 5]),
        ("max", {1: 0.9, 2: 0.9, 3: float("nan"), 4: None, 5: 0.1}, 1, [1, 4, 5]),
        ("max", {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5}, 5, [4, 5]),
        ("max", {1: None, 2: None, 3: None}, None, [2, 3]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, mode, scores, best, steps):
    with Checkpointer(tmp_path, keep=2, best_metric="accuracy", best_mode=mode) as checkpoints:
        save_all(checkpoints, scores)
        assert (checkpoints.best_step, checkpoints.steps()) == (best, steps)
        if best is not None:
            assert checkpoints.restore({"n": np.int64(0)}, step=best).state == {"n": best}
    with Checkpointer(tmp_path, keep=1, best_metric="accuracy", best_mode=mode) as resumed:
        assert resumed.best_step == best  # read from the disk, not remembered
        resumed.save(6, {"n": np.int64(6)}, wait=True)
        assert resumed.steps() == sorted({6, *([] if best is None else [best])})
    assert len([name for name in os.listdir(tmp_path) if name not in (".lock", ".job")]) == len({6, best} - {None})


def test_without_a_best_metric_only_the_last_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        save_all(checkpoints, {1: 0.9, 2: 0.1})
        assert (checkpoints.best_step, checkpoints.steps()) == (None, [2])


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"n": np.int64(1)})
        checkpoints.save(1, {"n": np.int64(2)}, wait=True)
        assert checkpoints.steps() == [1]
        assert checkpoints.restore({"n": np.int64(0)}).state == {"n": 2}
    assert len([p for p in tmp_path.iterdir() if p.name not in (".lock", ".job")]) == 1


def test_after_going_back_the_newest_is_what_was_saved_last(tmp_path):
    like = {"n": np.int64(0)}
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        save_all(checkpoints, {10: None, 20: None})
        assert checkpoints.restore(like, step=10).step == 10
        checkpoints.save(15, {"n": np.int64(15)}, wait=True)
        assert checkpoints.steps() == [15, 20]
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore(like).step == 15


def test_nothing_saved_and_a_step_not_saved(tmp_path):
    with Checkpointer(tmp_path / "new" / "folder") as checkpoints:
        assert (checkpoints.restore({"n": 0}), checkpoints.steps(), checkpoints.best_step) == (None, [], None)
        assert list(tmp_path.iterdir()) == []  # reading makes no folder
        checkpoints.save(4, {"n": 0})
        with pytest.raises(CheckpointError, match=r"step 5 is not saved here; there are \[4\]"):
            checkpoints.restore({"n": 0}, step=5)


def test_check_runs_before_anything_is_written(tmp_path):
    strategy = jdist.mirrored(devices=jax.devices()[:2])
    good = strategy.init(lambda: {"w": jnp.zeros(3)})
    copies = [jax.device_put(jnp.full(3, float(i)), device) for i, device in enumerate(strategy.devices)]
    diverged = {"w": jax.make_array_from_single_device_arrays((3,), good["w"].sharding, copies)}
    with Checkpointer(tmp_path, check=strategy.check) as checkpoints:
        checkpoints.save(1, good)
        with pytest.raises(ReplicaDivergenceError):
            checkpoints.save(2, diverged)
        assert checkpoints.steps() == [1]


def test_inside_a_running_event_loop_which_is_left_as_it_was(tmp_path):
    state = {"w": jnp.arange(3.0)}
    run, run_until_complete = asyncio.run, asyncio.BaseEventLoop.run_until_complete

    async def cell():
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, state)
            return checkpoints.restore(state)

    assert_same(asyncio.run(cell()).state, state)
    assert (asyncio.run, asyncio.BaseEventLoop.run_until_complete) == (run, run_until_complete)


# A process of its own: in the tests' own one, others begin and end threads and open files meanwhile.
LEAVES_NOTHING = """
import os, sys, threading
import jax.numpy as jnp
from jdist.checkpoint.checkpointer import Checkpointer
def held():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0, threading.enumerate()
state, found = {"w": jnp.arange(3.0)}, []
for step in range(3):
    with Checkpointer(sys.argv[1]) as checkpoints:
        checkpoints.save(step, state)
        checkpoints.restore(state)
    found.append(held())
assert found[1:] == found[:1] * 2, found
assert found[0][1] == [threading.main_thread()], found
"""


def test_no_thread_and_no_open_file_is_left(tmp_path):
    subprocess.run([sys.executable, "-c", LEAVES_NOTHING, str(tmp_path)], cwd=ROOT, check=True, timeout=120)


def test_every_wait_ends(tmp_path, monkeypatch):
    _, go_on = slow_writes(monkeypatch)
    checkpoints = Checkpointer(tmp_path, timeout_s=0.05)
    checkpoints.save(1, {"n": 1})
    for call in (checkpoints.wait, lambda: checkpoints.save(2, {"n": 2}), lambda: checkpoints.restore({"n": 1})):
        with pytest.raises(CheckpointError, match=rf"step 1 in {tmp_path}: not done after 0.05 s"):
            call()
    go_on.set()
    checkpoints._timeout_s = 60.0
    checkpoints.close()
    assert checkpoints.steps() == [1]


def test_what_was_waited_for_in_vain_is_not_waited_for_again_at_the_end(tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(checkpoint_together, "write_pieces", lambda *_: go_on.wait(60))
    says = rf"step 1 in {tmp_path}: not done after 3 s"
    checkpoints = Checkpointer(tmp_path, timeout_s=3.0)
    checkpoints.save(1, {"n": 1})
    with pytest.raises(CheckpointError, match=says):
        checkpoints.wait()
    begun_s = time.monotonic()
    with pytest.raises(CheckpointError, match=says):
        checkpoints.close()
    assert time.monotonic() - begun_s < 1.5
    go_on.set()


def test_a_live_save_is_not_taken_for_debris_and_a_second_writer_waits(tmp_path, monkeypatch):
    started, go_on = slow_writes(monkeypatch)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"n": 1})
        assert started.wait(60)
        with Checkpointer(tmp_path, timeout_s=0.05) as other:  # an evaluator, or a notebook cell that ran twice
            assert other.steps() == []
            with pytest.raises(CheckpointError, match="another process saves here"):
                checkpoint_together.save_together(
                    tmp_path, {"step": 2, "leaves": []}, [], **other._shared, prune=lambda: None
                )
        go_on.set()
    with Checkpointer(tmp_path) as other:
        assert other.steps() == [1]


def test_a_closed_one_refuses_and_closing_again_is_nothing(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        pass
    checkpoints.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoints.save(1, {"n": 1})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"directory": "gs://bucket/run"}, "gs://bucket/run"),
        ({"directory": "nix://bucket/run"}, "fsspec does not know nix://"),
        ({"directory": "file:///tmp/run"}, "give a local path, or PROTOCOL://BUCKET/FOLDER"),
        ({"directory": "s3://"}, "give a local path"),
        ({"best_mode": "most"}, "`best_mode` is 'most'"),
        *(({"keep": x}, f"`keep` is {x!r}; it must be a") for x in (0, "3", 2.5, True, float("nan"), None)),
        *(
            ({"timeout_s": x}, f"`timeout_s` is {x!r}; it must be a")
            for x in (0, 0.0, "1", True, float("nan"), float("inf"), None)
        ),
    ],
)
def test_arguments_are_checked_before_anything_is_made(tmp_path, options, says):
    with pytest.raises(CheckpointError, match=says):
        Checkpointer(**{"directory": tmp_path / "new", **options})
    assert not (tmp_path / "new").exists()


def test_a_relative_directory_is_where_it_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer("here") as checkpoints:
        monkeypatch.chdir("/")
        checkpoints.save(1, {"n": 1})
    assert any(path.name.startswith("step_00000001") for path in (tmp_path / "here").iterdir())


def test_one_module_imports_orbax():
    package = pathlib.Path(jdist.__file__).parent
    importers = {p.relative_to(package).as_posix() for p in package.rglob("*.py") if "import orbax" in p.read_text()}
    assert importers == {"checkpoint/orbax.py"}


SAVES = """
import sys
import jax.numpy as jnp
from jdist.errors import CheckpointError
from jdist.checkpoint import checkpointer
checkpointer._CLAIM_S = 0.2
checkpoints = checkpointer.Checkpointer(sys.argv[1])
try:
    checkpoints.save(int(sys.argv[2]), {"w": jnp.ones(2)}, wait=True)
except CheckpointError as error:
    print(error, flush=True)
else:
    print("saved", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_one_jobs_from_its_first_save_to_its_end(tmp_path):
    def job(step):
        return subprocess.Popen([sys.executable, "-c", SAVES, tmp_path, str(step)], stdin=-1, stdout=-1, text=True)

    with job(1) as first:
        assert first.stdout.readline() == "saved\n"
        done = subprocess.run(
            [sys.executable, "-c", SAVES, tmp_path, "2"], input="", stdout=-1, text=True, timeout=120, check=True
        )
        assert f"{tmp_path}: process {first.pid} on " in done.stdout
        assert "a folder of checkpoints belongs to one job at a time" in done.stdout
        assert is_claimed(tmp_path)
        with Checkpointer(tmp_path) as reader:  # and anybody's to read
            assert reader.steps() == [1]
        first.kill()
    # Of one process, as in a cell that is run again.
    with Checkpointer(tmp_path) as one, Checkpointer(tmp_path) as another:
        one.save(3, {"w": jnp.ones(2)}, wait=True)
        another.save(4, {"w": jnp.ones(2)}, wait=True)
        assert is_claimed(tmp_path)
    assert not is_claimed(tmp_path)
    subprocess.run([sys.executable, "-c", SAVES, tmp_path, "5"], input="", timeout=120, check=True)
    with Checkpointer(tmp_path) as reader:
        assert reader.steps() == [3, 4, 5]


@pytest.mark.parametrize("kind", ["orbax", "flax", "keras"])
def test_a_folder_of_somebody_elses_checkpoints_is_no_empty_one(tmp_path, kind):
    name = {"orbax": "7", "flax": "checkpoint_300", "keras": "model.keras"}[kind]
    if kind == "orbax":
        import orbax.checkpoint as ocp  # the test of jdist's own imports looks at the package alone

        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(7, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
            manager.wait_until_finished()
    else:
        (tmp_path / name).write_bytes(b"1")
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=rf"holds {name}, checkpoints that jdist did not write"):
            checkpoints.restore({"w": jnp.ones(2)})
        (tmp_path / "notes.txt").write_text("mine")
        for path in tmp_path.iterdir():
            if path.name == name:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert checkpoints.restore({"w": jnp.ones(2)}) is None


@pytest.mark.parametrize("directory", [None, 3, b"here", ["here"], np.zeros(2)], ids=repr)
def test_what_is_no_directory_is_named(directory):
    state = {"n": jnp.ones(2)}
    for take in (Checkpointer, checkpoint_callback, lambda it: from_orbax(it, state), lambda it: to_orbax(it, "there")):
        with pytest.raises(CheckpointError, match=r"is not a directory: give a path, or a bucket's URL"):
            take(directory)


def test_numpys_numbers_are_numbers(tmp_path):
    with Checkpointer(tmp_path, keep=np.int64(2), timeout_s=np.float32(60)) as checkpoints:
        checkpoints.save(np.int32(3), {"w": 1.0})
    assert checkpoints.steps() == [3]


def test_several_processes_read_a_folder_that_may_only_be_read(tmp_path, monkeypatch):
    state = {"w": jnp.ones(2)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)

    def refuse(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(pathlib.Path, "touch", refuse)
    two = SimpleNamespace(
        num_processes=2,
        process_index=0,
        is_chief=True,
        blocked=contextlib.nullcontext,
        exchange=lambda what, value, timeout_s: [value, value],
        next_number=lambda what: 1,
    )
    with Checkpointer(tmp_path, cluster=two) as checkpoints:
        assert checkpoints.restore(state).step == 1
        with pytest.raises(CheckpointError, match="cannot be made: Read-only file system"):
            checkpoints.save(2, state)
