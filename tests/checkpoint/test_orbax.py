"""Checkpoints of Orbax: read into a strategy's layout, and written for programs that use Orbax, of both of its interfaces."""

import os
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training import checkpoints as flax_checkpoints
from flax.training.train_state import TrainState as FlaxTrainState

import jdist
from jdist.checkpoint import orbax
from jdist.errors import CheckpointError
from jdist.train import Checkpointer, CheckpointWarning, from_orbax, to_orbax
from tests.children import run_in_two

ocp = pytest.importorskip("orbax.checkpoint")
ocp1 = pytest.importorskip("orbax.checkpoint.experimental.v1")
MODEL = nn.Dense(8)
TX = optax.chain(optax.clip(1.0), optax.adam(1e-3))  # has states without leaves


def create_flax(seed=0):
    """The state of a program of flax, after a step."""
    params = MODEL.init(jax.random.key(seed), jnp.ones((1, 16)))["params"]
    state = FlaxTrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)
    return state.apply_gradients(grads=jax.tree.map(lambda x: x + 0.5, params))


def create_jdist(seed=0):
    params = MODEL.init(jax.random.key(seed), jnp.ones((1, 16)))["params"]
    return jdist.TrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def orbax_saves(path, state, api="v0"):
    path = os.fspath(path)
    if api == "v1":
        ocp1.save(path, state)
        return
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
    """What a program of flax leaves: a manager's directory with two steps."""
    directory = tmp_path_factory.mktemp("orbax")
    with ocp.CheckpointManager(directory) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(create_flax(step)))
        manager.wait_until_finished()
    return directory


STRATEGIES = {
    "mirrored": lambda: jdist.mirrored(jax.devices()[:4]),
    "sharded": lambda: jdist.sharded(jax.devices()[:4]),
    "central_storage": lambda: jdist.central_storage(jax.devices()[:2]),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_train_state_of_flax_is_read_into_any_layout(managed, name):
    strategy = STRATEGIES[name]()
    like = strategy.shapes(jax.eval_shape(create_jdist))
    state = from_orbax(managed, like)
    expected = create_flax(2)
    whole = strategy.fetch(state)
    assert same(whole.params, expected.params)
    assert same(whole.opt_state, expected.opt_state)
    assert int(whole.step) == 1
    ours = [x.sharding for x in jax.tree.leaves(strategy.init(create_jdist))]
    assert [x.sharding for x in jax.tree.leaves(state)] == ours
    assert same(from_orbax(managed, like, step=1).params, from_orbax(managed / "1", like).params)
    assert same(strategy.fetch(from_orbax(managed, like, step=1)).params, create_flax(1).params)


@pytest.mark.parametrize("api", ["v0", "v1"])
def test_what_either_interface_saved_is_read(tmp_path, api):
    tree = {"params": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(4, jnp.bfloat16)}, "list": [jnp.int32(3), 5]}
    orbax_saves(tmp_path / "saved", tree, api)
    assert same(from_orbax(tmp_path / "saved", tree), tree)


def test_a_state_of_nnx_is_read_with_its_keys(tmp_path):
    def make(seed):
        model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(seed)), nnx.Dropout(0.5, rngs=nnx.Rngs(seed)))
        return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))

    orbax_saves(tmp_path / "saved", make(1))
    restored = from_orbax(tmp_path / "saved", make(0))
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    assert same(jax.tree.map(data, restored), jax.tree.map(data, make(1)))
    # A pure dict of the model, as nnx's guide saves one.
    pure = nnx.to_pure_dict(nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(1))))
    orbax_saves(tmp_path / "pure", pure)
    state = nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    assert same(from_orbax(tmp_path / "pure", state), pure)


def manager_of_items(directory):
    """Two trees and what is no tree, as a program with a position and an average saves them."""
    with ocp.CheckpointManager(directory) as manager:
        for step in (1, 2):
            items = {
                "state": ocp.args.StandardSave(create_flax(step)),
                "ema": ocp.args.StandardSave(create_flax(step + 5).params),
                "data": ocp.args.JsonSave({"position": step}),
            }
            manager.save(step, args=ocp.args.Composite(**items), metrics={"loss": 1.0})


def v1_checkpointables(directory):
    with ocp1.training.Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            items = {"state": create_flax(step), "ema": create_flax(step + 5).params, "data": {"position": step}}
            checkpointer.save_checkpointables(step, items)


@pytest.mark.parametrize("save", [manager_of_items, v1_checkpointables])
def test_one_of_several_items_is_read_and_which_has_to_be_said(tmp_path, save):
    save(tmp_path)
    like = jax.eval_shape(create_jdist)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/2: holds the items .*ema, state; say which by `item`"):
        from_orbax(tmp_path, like)
    with pytest.raises(CheckpointError, match=r"holds the items .*ema, state; say which by `item`, not 'best'"):
        from_orbax(tmp_path, like, item="best")
    for step in (None, 1):
        state = from_orbax(tmp_path, like, item="state", step=step)
        assert same(state.params, create_flax(step or 2).params)
        assert same(state.opt_state, create_flax(step or 2).opt_state)
    assert same(from_orbax(tmp_path, like.params, item="ema"), create_flax(7).params)


def one_tree_and_a_position(directory):
    with ocp.CheckpointManager(directory) as manager:
        items = {"state": ocp.args.StandardSave(create_flax(2)), "data": ocp.args.JsonSave({"position": 2})}
        manager.save(2, args=ocp.args.Composite(**items))


def names_of_steps(directory):
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=8)
    with ocp.CheckpointManager(directory, options=options) as manager:
        for step in (9, 10):
            manager.save(step, args=ocp.args.StandardSave(create_flax(2 if step == 10 else 1)))


def manager_of_v1(directory):
    with ocp1.training.Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, create_flax(step))


def flax_itself(directory):
    flax_checkpoints.save_checkpoint(directory, create_flax(2), step=2)


def unfinished(directory):
    one_tree_and_a_position(directory)
    (directory / "3.orbax-checkpoint-tmp-12" / "state").mkdir(parents=True)


def stored_as(**options):
    def save(directory):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(directory / "2", create_flax(2))

    return save


WAYS = {
    "one tree and a position": one_tree_and_a_position,
    "names of steps": names_of_steps,
    "manager of v1": manager_of_v1,
    "flax.training.checkpoints": flax_itself,
    "a newer one is unfinished": unfinished,
    "a file for each leaf": stored_as(use_ocdbt=False, use_zarr3=False),
    "zarr 3": stored_as(use_ocdbt=True, use_zarr3=True),
}


@pytest.mark.filterwarnings("ignore:.*orbax:DeprecationWarning")  # flax's own call
@pytest.mark.parametrize("way", WAYS)
def test_the_ways_in_which_programs_of_flax_save(tmp_path, way):
    WAYS[way](tmp_path)
    state = from_orbax(tmp_path, jax.eval_shape(create_jdist))
    assert same(state.params, create_flax(2).params)
    assert same(state.opt_state, create_flax(2).opt_state)
    assert int(state.step) == 1


def test_parameters_of_nnx_alone_are_read_out_of_a_manager(tmp_path):
    def model(seed):
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(nnx.state(model(1)))))
    with pytest.warns(CheckpointWarning, match=r"2 leaves are not in the state and were left out: .*mean"):
        params = from_orbax(tmp_path, nnx.state(model(0), nnx.Param))
    assert same(params, nnx.state(model(1), nnx.Param))


def test_parameters_alone_are_read_and_what_is_left_is_named(managed):
    like = {"params": create_jdist().params}
    with pytest.warns(
        CheckpointWarning, match=r"leaves are not in the state and were left out: .*opt_state\.1\.0\.count"
    ):
        assert same(from_orbax(managed, like)["params"], create_flax(2).params)


def test_what_does_not_fit_is_refused_by_name(managed):
    params = create_jdist().params
    wrong = {
        "params": {**params, "bias": jnp.zeros(9), "extra": jnp.zeros(1), "kernel": params["kernel"].astype("bfloat16")}
    }
    with pytest.raises(CheckpointError) as caught:
        from_orbax(managed, wrong)
    text = str(caught.value)
    assert "leaf ['params']['bias']: saved float32[8], the state has float32[9]" in text
    assert "leaf ['params']['extra']: not in the checkpoint" in text
    assert "leaf ['params']['kernel']: saved float32[16, 8], the state has bfloat16[16, 8]" in text


def test_what_is_no_checkpoint_of_orbax_is_refused(managed, tmp_path):
    like = create_jdist()
    (tmp_path / "checkpoint_4").write_bytes(serialization.to_bytes(create_flax()))
    for path, more, match in [
        (tmp_path / "none", {}, "the folder does not exist"),
        (tmp_path / "checkpoint_4", {}, "is a file, .* Read flax's msgpack by flax"),
        (tmp_path, {}, "this folder has no checkpoint of a tree by Orbax"),
        (managed, {"step": 7}, r"has no step 7; there are \[1, 2\]"),
        (managed / "1", {"item": "params"}, "holds the items default; say which by `item`, not 'params'"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            from_orbax(path, like, **more)


def test_a_damaged_checkpoint_of_orbax_is_refused(tmp_path):
    # Of one leaf: what Orbax reads beside the one that fails would end in an event loop that it has closed.
    orbax_saves(tmp_path / "saved", {"w": jnp.arange(5000.0)})
    for file in (tmp_path / "saved").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/saved: Orbax cannot read"):
        from_orbax(tmp_path / "saved", {"w": jnp.zeros(5000)})


def test_a_restore_of_the_wrong_kind_says_how_to_read_it(managed):
    with Checkpointer(managed) as checkpoints, pytest.raises(CheckpointError, match=r"jdist\.train\.from_orbax"):
        checkpoints.restore(create_jdist())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run of jdist under `sharded`, saved and written for Orbax; the state, and the manager's directory."""
    folder = tmp_path_factory.mktemp("jdist")
    strategy = jdist.sharded(jax.devices()[:4])
    state = strategy.init(create_jdist)
    with Checkpointer(folder / "run") as checkpoints:
        checkpoints.save(3, state, data={"position": 3}, metrics={"eval/loss": 0.5}, metadata={"by": "jdist"})
    assert to_orbax(folder / "run", folder / "names") == 3
    assert to_orbax(folder / "run", folder / "state", like=create_jdist()) == 3
    return strategy.fetch(state), folder


def test_programs_of_v0_open_a_checkpoint_of_jdist(written):
    state, folder = written
    for place in ("names", "state"):
        with ocp.CheckpointManager(folder / place) as manager:
            assert manager.latest_step() == 3
            restored = manager.restore(3, args=ocp.args.StandardRestore())
            assert same(restored["params"], state.params)
            notes = {"data": {"position": 3}, "metrics": {"eval/loss": 0.5}, "metadata": {"by": "jdist"}}
            assert manager.metadata(3).custom_metadata == notes
        with ocp.StandardCheckpointer() as checkpointer:
            assert same(checkpointer.restore(folder / place / "3" / "default")["params"], state.params)


def test_programs_of_v1_open_a_checkpoint_of_jdist(written):
    state, folder = written
    for place in ("names", "state"):
        assert same(ocp1.load(folder / place / "3", checkpointable_name="default")["params"], state.params)
        assert set(ocp1.load_checkpointables(folder / place / "3")) >= {"default"}
        with ocp1.training.Checkpointer(folder / place) as checkpointer:
            assert checkpointer.latest.step == 3
            assert same(checkpointer.load(3, checkpointable_name="default")["params"], state.params)


@pytest.mark.parametrize("create", [create_flax, create_jdist])
def test_a_program_restores_into_its_own_train_state(tmp_path, create):
    state = create(1)
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(3, state)
    to_orbax(tmp_path / "run", tmp_path / "to", like=create(0))
    with ocp.CheckpointManager(tmp_path / "to") as manager:
        restored = manager.restore(3, args=ocp.args.StandardRestore(create(0)))
    assert type(restored) is type(state)
    assert same(restored, state)


def test_what_went_to_orbax_comes_back(written):
    state, folder = written
    strategy = jdist.mirrored(jax.devices()[:2])
    for place in ("names", "state"):
        assert same(strategy.fetch(from_orbax(folder / place, strategy.shapes(jax.eval_shape(create_jdist)))), state)


def test_keys_numbers_and_empty_arrays_are_written_or_named(tmp_path):
    state = {"key": jax.random.key(3), "n": 5, "x": jnp.ones(2, jnp.bfloat16), "none": jnp.zeros((0, 2))}
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state)
    with pytest.warns(CheckpointWarning, match=r"no arrays without elements; left out: \['none'\]"):
        to_orbax(tmp_path / "run", tmp_path / "to")
    with ocp.CheckpointManager(tmp_path / "to") as manager:
        restored = manager.restore(1, args=ocp.args.StandardRestore())
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(state["key"]).tolist()
    assert (restored["n"], restored["x"].dtype, sorted(restored)) == (5, jnp.bfloat16, ["key", "n", "x"])
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="Orbax has step 1 here"):
        to_orbax(tmp_path / "run", tmp_path / "to")
    with pytest.raises(CheckpointError, match="found no checkpoint of step 9"):
        to_orbax(tmp_path / "run", tmp_path / "to", step=9)


@pytest.mark.parametrize("like", [None, {"w": jnp.zeros(3)}], ids=["names", "state"])
def test_a_damaged_checkpoint_is_not_written_nor_the_one_before_it(tmp_path, like):
    with Checkpointer(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.ones(3)})
    (file,) = (tmp_path / "run").glob("step_00000002_*/pieces_0.bin")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="checksum does not match"):
        to_orbax(tmp_path / "run", tmp_path / "to", like=like)
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        to_orbax(tmp_path / "none", tmp_path / "to", like=like)
    assert not (tmp_path / "none").exists()


def test_a_state_with_keys_is_written_with_its_own_nodes(tmp_path):
    state = {"key": jax.random.key(3), "w": jnp.ones(2)}
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state)
    to_orbax(tmp_path / "run", tmp_path / "to", like=state)
    read = from_orbax(tmp_path / "to", {"key": jax.random.key(0), "w": jnp.zeros(2)})
    assert jax.random.key_data(read["key"]).tolist() == jax.random.key_data(state["key"]).tolist()


def test_a_key_of_another_kind_is_refused_by_name(tmp_path):
    orbax_saves(tmp_path / "saved", {"key": jnp.zeros(4, jnp.uint32)})
    with pytest.raises(CheckpointError, match=r"leaf \['key'\]: saved uint32\[4\], the state has uint32\[2\]"):
        from_orbax(tmp_path / "saved", {"key": jax.random.key(0)})


def test_what_a_step_keeps_beside_the_state_needs_a_value(tmp_path):
    orbax_saves(tmp_path / "saved", {"w": jnp.ones(4)})
    strategy = jdist.mirrored(jax.devices()[:2])

    @jdist.distribute(strategy, precision=jdist.precision("fp16"))
    def step(state, batch):
        grads = jdist.grad(lambda w: jdist.mean(batch["x"] * w.sum(), batch["mask"]))(state["w"])
        return {"w": state["w"] - 0.1 * grads}, {}

    batches = list(strategy.distribute_dataset([{"x": np.ones(4, np.float32)}] * 2))
    state, _ = step(strategy.init(lambda: {"w": jnp.zeros(4)}), batches[0])
    shapes = strategy.shapes(state)
    with pytest.raises(CheckpointError, match="leaf loss scale/scale is not restored, and `like` has only its shape"):
        from_orbax(tmp_path / "saved", shapes)
    step(from_orbax(tmp_path / "saved", state), batches[1])


def test_a_host_holds_one_large_leaf_at_a_time(managed, monkeypatch):
    sizes = []
    read = orbax._read

    def measured(*args):
        arrays = read(*args)
        sizes.append(len(arrays))
        return arrays

    monkeypatch.setattr(orbax, "_TOGETHER_BYTES", 1)
    monkeypatch.setattr(orbax, "_read", measured)
    state = from_orbax(managed, jdist.mirrored(jax.devices()[:2]).shapes(jax.eval_shape(create_jdist)))
    assert sizes == [1] * len(jax.tree.leaves(state))


@pytest.mark.full
@pytest.mark.xdist_group("processes")
def test_each_process_reads_into_its_parts(tmp_path):
    orbax_saves(tmp_path / "saved", {"w": jnp.arange(257257.0).reshape(1001, 257), "n": jnp.int32(3)})
    run_in_two(Path(__file__).with_name("orbax_in_processes.py"), tmp_path)


def test_what_is_no_checkpoint_of_orbax_is_said_with_what_to_do(tmp_path):
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(3, {"w": jnp.ones(2)})
    saved = tmp_path / "run" / "checkpoints"
    for path in (saved.parent, saved, saved / "step_00000003_save_00001"):
        with pytest.raises(CheckpointError, match=rf"{path}: jdist wrote it, not Orbax.*Checkpointer\('{saved}'\)"):
            from_orbax(path, {"w": jnp.ones(2)})
    with pytest.raises(
        CheckpointError, match=r"/rum: the folder does not exist. Did you mean 'run'\? Give a checkpoint's"
    ):
        from_orbax(tmp_path / "rum", {"w": jnp.ones(2)})
