"""A part of a checkpoint, under other names: what is restored, what keeps its value, and what is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import CheckpointError
from jdist.train import Checkpointer, CheckpointWarning
from tests.toys import LAYOUTS

WIDTH = 12


def create(key, *, classes=10, backbone="backbone", tx=None):
    keys = iter(jax.random.split(key, 4))
    params = {
        backbone: {"dense": {"kernel": jax.random.normal(next(keys), (WIDTH, 40)), "bias": jnp.ones(40)}},
        "head": {"kernel": jax.random.normal(next(keys), (40, classes))},
    }
    return jdist.TrainState.create(apply_fn=None, params=params, tx=tx or optax.adam(1e-3), rng=next(keys))


OLD = create(jax.random.key(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(7, OLD)
    return folder


@pytest.fixture
def saved(folder):
    with Checkpointer(folder) as checkpoints:
        yield checkpoints


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_new_head_on_old_weights(saved, name):
    """Of every strategy: the backbone is the old one to the bit, the rest is as it was made, and is listed."""
    strategy = LAYOUTS[name]()
    new = strategy.init(lambda key: create(key, classes=3), jax.random.key(1))
    want = strategy.fetch(new)
    restored = saved.restore(new, only="params/backbone/.*")
    got = strategy.fetch(restored.state)
    assert_same(got.params["backbone"], OLD.params["backbone"])
    assert_same(got.params["head"], want.params["head"])
    assert_same(got.opt_state, want.opt_state)
    assert int(got.step) == 0
    taken = {"params/backbone/dense/bias", "params/backbone/dense/kernel"}
    assert len(restored.not_restored) == len(jax.tree.leaves(new, is_leaf=_is_part)) - 2
    assert not taken & set(restored.not_restored)
    assert "params/head/kernel" in restored.not_restored
    assert "params/head/kernel" in restored.unused


def _is_part(x):
    return type(x).__name__ == "ShardedLeaf"


def test_parameters_alone_into_shapes_of_another_kind_of_tree(saved):
    """Paths are names: fields, keys and indices of any kind of tree; no state has to be made first."""
    strategy = jdist.sharded(jax.devices()[:5], whole_below=8)
    like = strategy.shapes(jax.eval_shape(lambda: {"params": OLD.params}))
    restored = saved.restore(like, only="params/.*")
    assert_same(strategy.fetch(restored.state), {"params": OLD.params})
    assert restored.not_restored == ()
    assert "step" in restored.unused


def test_a_mismatch_is_passed_over_when_asked_for_and_listed(saved):
    like = create(jax.random.key(1), classes=3)
    with pytest.warns(CheckpointWarning, match="of the state's 12 leaves keep their values, and") as warned:
        restored = saved.restore(like, skip_mismatch=True)
    assert_same(restored.state.params["backbone"], OLD.params["backbone"])
    assert_same(restored.state.params["head"], like.params["head"])
    assert restored.not_restored == tuple(
        f"{path}/head/kernel" for path in ("params", "opt_state/0/mu", "opt_state/0/nu")
    )
    assert restored.unused == restored.not_restored
    assert len(warned) == 1
    assert "leaf params/head/kernel: saved float32[40, 10], the state has float32[40, 3]" in str(warned[0].message)
    with pytest.raises(CheckpointError, match=r"params.*saved float32\[40, 10\], the state has float32\[40, 3\]"):
        saved.restore(like)
    with pytest.raises(CheckpointError, match="Take a part that fits"):
        saved.restore(like, only="params/.*")


@pytest.mark.parametrize(
    "rename",
    [
        {"params/backbone": "params/encoder"},
        {"params/backbone/dense": "params/encoder/dense"},
        lambda path: path.replace("params/backbone", "params/encoder"),
    ],
)
def test_other_names(saved, rename):
    like = create(jax.random.key(1), backbone="encoder")
    restored = saved.restore(like, only="params/.*", rename=rename)
    assert_same(restored.state.params["encoder"], OLD.params["backbone"])
    assert_same(restored.state.params["head"], OLD.params["head"])


def test_what_is_missing_is_named_with_what_is_there(saved, folder):
    like = create(jax.random.key(1), backbone="body")
    path = next(folder.glob("step_*"))
    says = (
        "leaf params/body/dense/bias: not in the checkpoint; nearest there is params/backbone/dense/bias(.|\n)*"
        f"`jdist checkpoint {path}` lists its 12 leaves"
    )
    with pytest.raises(CheckpointError, match=says):
        saved.restore(like, only="params/.*")
    says = r"leaf .params\['body'\]\['dense'\]\['bias'\]: not in the checkpoint; nearest there is "
    with pytest.raises(CheckpointError, match=says + r".params\['backbone'\]\['dense'\]\['bias'\]\n"):
        saved.restore(like)


def test_a_predicate_takes_paths(saved):
    like = create(jax.random.key(1))
    restored = saved.restore(like, only=lambda path: path.startswith("params/"))
    assert_same(restored.state.params, OLD.params)
    assert set(restored.not_restored) == set(restored.unused)


def test_an_average_takes_the_place_of_the_parameters(tmp_path):
    """What callbacks keep beside a state has a name, too: training begins with the average that `ema` kept."""
    state = {"params": {"w": jnp.ones(2)}}
    average = {"params": {"w": jnp.full(2, 3.0)}}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, jdist.StepState(state, kept={"ema": average}))
        restored = checkpoints.restore(state, rename={"params": None, "kept ema": ""}, only="params/w")
    assert restored.state["params"]["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"only": "params"}, r"For all below it say 'params/\.\*'"),
        ({"only": "params/hed/.*"}, "matches no leaf of the state. The nearest path is 'params/head/kernel'"),
        ({"only": "("}, "not a regular expression"),
        ({"only": []}, "must be a regular expression"),
        ({"only": 5}, "must be a regular expression"),
        ({"rename": {"params": 5}}, "`rename`: 'params': 5: paths are texts"),
        ({"rename": {5: "params"}}, "`rename`: 5: 'params': paths are texts"),
        ({"rename": lambda path: 5}, "`rename` returned 5 for '.*': it must be a path or None"),
        ({"only": lambda path: False}, "accepts no leaf"),
        (
            {"rename": {"params/bakbone": "x"}},
            "'params/bakbone' is neither a leaf nor a node of the checkpoint.* 12 leaves, or nodes: 'params/backbone', 'p",
        ),
        (
            {"rename": {"params/backbone": "params/hed"}, "only": "params/head/.*"},
            "`rename`: 'params/backbone': 'params/hed': the state has no such leaf or node.*leaves, or nodes: 'params/head',",
        ),
        (
            {"rename": {"params/head": "params/head/dense"}},
            "`rename`: 'params/head': 'params/head/dense': the state has no.* leaves, or nodes: 'params/head/kernel'",
        ),
        ({"rename": {"params/backbone": "params/head", "params/backbone/dense/bias": None}}, "does not fit"),
        (
            {"rename": {"params/backbone/dense": "params/head"}, "only": "params/head/.*"},
            "two leaves of the checkpoint",
        ),
        ({"rename": 3}, "mapping from old paths"),
        ({"skip_mismatch": 1}, "must be True or False"),
    ],
)
def test_what_is_refused(saved, options, says):
    with pytest.raises(CheckpointError, match=says):
        saved.restore(create(jax.random.key(1)), **options)


def test_what_only_has_a_shape_cannot_keep_a_value(saved):
    like = jdist.mirrored().shapes(jax.eval_shape(create, jax.random.key(1)))
    with pytest.raises(CheckpointError, match="leaf step is not restored, and `like` has only its shape"):
        saved.restore(like, only="params/.*")


def test_nothing_that_fits_is_an_error(saved):
    with pytest.raises(CheckpointError, match="nothing to restore"):
        saved.restore({"other": jnp.ones(3)}, skip_mismatch=True)


def test_whole_restores_name_what_began_anew(tmp_path):
    state = {"w": jnp.ones(2)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        like = jdist.StepState(state, residuals={"step": [jnp.zeros((8, 2))]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            restored = checkpoints.restore(like)
    assert restored.not_restored == ("residuals of step/0",)
