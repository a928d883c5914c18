import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist.errors import ConfigError
from jdist.experiment.optimizer import build_optimizer, check_optimizer, fill_lengths

COSINE = {"schedule": "warmup_cosine_decay_schedule", "init_value": 0.0, "peak_value": 0.1, "warmup_steps": 2}


def problems(**section):
    return [(".".join(p.key), p.text + p.remedy) for p in check_optimizer(section)]


def updates(tx, steps=4):
    params = {"w": jnp.ones((2, 2))}
    state, seen = tx.init(params), []
    for _ in range(steps):
        change, state = tx.update(jax.tree.map(lambda w: 3 * w, params), state, params)
        params = optax.apply_updates(params, change)
        seen.append(np.asarray(params["w"]))
    return np.stack(seen)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "lamb", "lars", "adafactor", "rmsprop"])
def test_optimizers_of_optax_by_name(name):
    assert problems(name=name, learning_rate=0.1) == []
    ours = updates(build_optimizer({"name": name, "learning_rate": 0.1}))
    np.testing.assert_array_equal(ours, updates(getattr(optax, name)(0.1)))


def test_a_schedule_without_length_lasts_as_long_as_the_run():
    section = fill_lengths({"name": "sgd", "learning_rate": COSINE}, steps=4)
    assert section["learning_rate"]["decay_steps"] == 4
    assert "decay_steps" not in COSINE
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 4)
    np.testing.assert_array_equal(updates(build_optimizer(section)), updates(optax.sgd(schedule)))


def test_a_length_that_is_given_or_not_needed_is_left_alone():
    given = {"name": "sgd", "learning_rate": COSINE | {"decay_steps": 9}}
    assert fill_lengths(given, steps=4) == given
    wrong = {"name": "sgd", "learning_rate": {"schedule": "nonsense"}}
    assert fill_lengths(wrong, steps=4) == wrong
    one_cycle = {"name": "sgd", "learning_rate": {"schedule": "cosine_onecycle_schedule", "peak_value": 1.0}}
    assert fill_lengths(one_cycle, steps=4)["learning_rate"]["transition_steps"] == 4


def test_schedules_can_be_joined():
    rate = {
        "schedule": "join_schedules",
        "boundaries": [2],
        "schedules": [
            {"schedule": "linear_schedule", "init_value": 0.0, "end_value": 0.1, "transition_steps": 2},
            {"schedule": "constant_schedule", "value": 0.1},
        ],
    }
    assert problems(name="sgd", learning_rate=rate) == []
    joined = optax.join_schedules([optax.linear_schedule(0.0, 0.1, 2), optax.constant_schedule(0.1)], [2])
    tx = build_optimizer({"name": "sgd", "learning_rate": rate})
    np.testing.assert_array_equal(updates(tx), updates(optax.sgd(joined)))


def test_gradients_are_clipped_before_the_optimizer_sees_them():
    ours = updates(build_optimizer({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}, clip_norm=0.5))
    theirs = updates(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({"name": "adamv", "learning_rate": 1.0}, "name", 'no optimizer "adamv" Did you mean adam'),
        ({"name": "__doc__"}, "name", "no optimizer"),
        ({"name": "inject_hyperparams"}, "name", "no optimizer"),
        ({"name": "adamw"}, "learning_rate", "missing; optax.adamw needs it"),
        ({"name": "adamw", "learning_rate": 1e-3, "weigth_decay": 0.1}, "weigth_decay", "Did you mean weight_decay?"),
        ({"name": "adamw", "learning_rate": -1e-3}, "learning_rate", "-0.001 is not >= 0"),
        ({"name": "adamw", "learning_rate": "1e-3"}, "learning_rate", "neither a number nor a schedule"),
        ({"name": "adamw", "learning_rate": True}, "learning_rate", "neither a number nor a schedule"),
        ({"name": "adamw", "learning_rate": None}, "learning_rate", "neither a number nor a schedule"),
        ({"name": "sgd", "learning_rate": {"schedule": "cosine"}}, "learning_rate.schedule", "no schedule"),
        ({"name": "sgd", "learning_rate": {"schedule": 3}}, "learning_rate.schedule", "no schedule 3"),
        ({"name": "sgd", "learning_rate": COSINE}, "learning_rate.decay_steps", "missing"),
        (
            {"name": "sgd", "learning_rate": COSINE | {"peek_value": 1}},
            "learning_rate.peek_value",
            "Did you mean peak_value?",
        ),
    ],
)
def test_what_is_wrong_is_named(section, key, message):
    found = problems(**section)
    assert any(where == f"train.optimizer.{key}" and message in text for where, text in found), found


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "lbfgs"}, "missing 3 required keyword-only arguments"),
        ({"name": "adamw", "learning_rate": 1e-3, "b1": "x"}, "unsupported operand"),
        ({"name": "adamw", "learning_rate": 1e-3, "mu_dtype": "float33"}, "float33"),
        ({"name": "sgd", "learning_rate": COSINE | {"decay_steps": 1}}, "requires positive decay_steps"),
    ],
)
def test_what_optax_itself_refuses_is_passed_on(section, message):
    ((key, text),) = problems(**section)
    assert key == "train.optimizer"
    assert message in text


def test_null_is_fine_where_it_is_the_default():
    assert problems(name="adafactor", learning_rate=None) == []


def test_building_what_was_not_checked_is_refused_as_well():
    with pytest.raises(ConfigError, match="Did you mean sgd"):
        build_optimizer({"name": "sdg", "learning_rate": 0.1})
