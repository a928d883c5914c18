import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist.errors import ConfigError
from jdist.experiment.optimizer import build_optimizer, check_optimizer, fill_lengths

COSINE = {"schedule": "warmup_cosine_decay_schedule", "init_value": 0.0, "peak_value": 0.1, "warmup_steps": 2}


def problems(**section):
    return [(".".join(p.key), p.text + p.remedy) for p in check_optimizer(section, global_batch=64)]


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
    ours = updates(build_optimizer({"name": name, "learning_rate": 0.1}, global_batch=64))
    np.testing.assert_array_equal(ours, updates(getattr(optax, name)(0.1)))


def test_a_schedule_without_length_lasts_as_long_as_the_run():
    section = fill_lengths({"name": "sgd", "learning_rate": COSINE}, steps=4)
    assert section["learning_rate"]["decay_steps"] == 4
    assert "decay_steps" not in COSINE
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 4)
    np.testing.assert_array_equal(updates(build_optimizer(section, global_batch=64)), updates(optax.sgd(schedule)))


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
    tx = build_optimizer({"name": "sgd", "learning_rate": rate}, global_batch=64)
    np.testing.assert_array_equal(updates(tx), updates(optax.sgd(joined)))


def test_gradients_are_clipped_before_the_optimizer_sees_them():
    ours = updates(
        build_optimizer({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}, global_batch=64, clip_norm=0.5)
    )
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
        ({"name": "adamw", "learning_rate": [1, 2]}, "learning_rate", "[1, 2] is neither a number nor a schedule"),
        ({"name": "rprop", "learning_rate": COSINE}, "learning_rate", "is not a number"),
        ({"name": "adamw", "learning_rate": 1.0, "b1": "x"}, "b1", '"x" is not a number'),
        ({"name": "adamw", "learning_rate": 1.0, "b1": True}, "b1", "true is not a number"),
        ({"name": "adamw", "learning_rate": 1.0, "b1": None}, "b1", "null is not a number"),
        ({"name": "adamw", "learning_rate": 1.0, "nesterov": 3}, "nesterov", "3 is not true or false"),
        ({"name": "adamw", "learning_rate": 1.0, "mask": 3}, "mask", "3 is not true or false"),
        ({"name": "lars", "learning_rate": 1.0, "trust_ratio_mask": "x"}, "trust_ratio_mask", "not true or false"),
        (
            {"name": "adamw", "learning_rate": 1.0, "mu_dtype": "foo"},
            "mu_dtype",
            '"foo" is not a dtype, such as float32',
        ),
        ({"name": "adamw", "learning_rate": 1.0, "mu_dtype": 3}, "mu_dtype", "3 is not a dtype"),
        ({"name": "adafactor", "min_dim_size_to_factor": 1.5}, "min_dim_size_to_factor", "1.5 is not a whole number"),
        ({"name": "sgd", "learning_rate": COSINE | {"peak_value": "x"}}, "learning_rate.peak_value", "is not a number"),
        ({"name": "sgd", "learning_rate": COSINE | {"warmup_steps": 2.0}}, "learning_rate.warmup_steps", "not a whole"),
        ({"name": "sgd", "learning_rate": {"schedule": "cosine"}}, "learning_rate.schedule", "unknown schedule"),
        ({"name": "sgd", "learning_rate": {"schedule": 3}}, "learning_rate.schedule", "unknown schedule 3"),
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


def test_an_optimizer_that_no_config_can_use_is_refused_with_its_own_words():
    ((key, text),) = problems(name="lbfgs")
    assert key == "train.optimizer"
    assert "missing 3 required keyword-only arguments" in text


def test_the_option_that_optax_itself_refuses_is_found_by_trying_each_alone():
    ((key, text),) = problems(name="adamw", learning_rate=0.1, b1=0.5, mu_dtype="S3", nesterov=True)  # S3: 3 characters
    assert key == "train.optimizer.mu_dtype"
    assert text.startswith('optax.adamw cannot use "S3": ')
    assert text.endswith(" Its default is null.")
    piecewise = {"schedule": "piecewise_interpolate_schedule", "interpolate_type": "x", "init_value": 1.0}
    ((key, text),) = problems(name="sgd", momentum=0.9, learning_rate=piecewise)
    assert key == "train.optimizer.learning_rate"
    assert text.startswith("optax.piecewise_interpolate_schedule refuses these arguments: ")


@pytest.mark.parametrize("rate", [COSINE, {"schedule": "join_schedules", "boundaries": [1], "schedules": [COSINE] * 2}])
def test_a_schedule_that_is_given_too_short_a_length_says_the_least_that_would_do(rate):
    short = COSINE | {"decay_steps": 1}
    rate = short if rate is COSINE else rate | {"schedules": [short, {"schedule": "constant_schedule", "value": 1.0}]}
    (problem,) = check_optimizer({"name": "sgd", "learning_rate": rate}, global_batch=64)
    above = ("train", "optimizer", "learning_rate", *(() if rate is short else ("schedules", "0")))
    assert problem.key == (*above, "decay_steps")
    assert problem.others == ((*above, "warmup_steps"),)
    assert problem.text.startswith("a length of 1 is too short for the schedule warmup_cosine_decay_schedule")
    assert problem.text.endswith("where warmup_steps is 2: it needs 3 or more")
    assert problem.remedy.startswith(" Raise it or lower train.optimizer.learning_rate.")


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_the_least_length_of_a_run_is_the_least_that_optax_takes(steps):
    section = fill_lengths({"name": "sgd", "learning_rate": COSINE}, steps=steps)
    filled = {("train", "optimizer", "learning_rate", "decay_steps")}
    found = list(check_optimizer(section, global_batch=64, filled=filled, length=("train", "epochs")))
    assert [problem.key for problem in found] == ([("train", "epochs")] if steps < 3 else [])
    assert all(f"a run of {steps} steps is too short" in problem.text for problem in found)
    assert all("it needs 3 or more" in problem.text for problem in found)


@pytest.mark.parametrize(
    "section",
    [
        {"name": "adafactor", "learning_rate": None, "clipping_threshold": None, "dtype_momentum": "bfloat16"},
        {
            "name": "adamw",
            "learning_rate": 1,
            "mask": False,
            "mu_dtype": "bfloat16",
            "weight_decay": COSINE | {"decay_steps": 9},
        },
        {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "accumulator_dtype": None},
        {"name": "lars", "learning_rate": 0.1, "weight_decay_mask": True},
        {"name": "noisy_sgd", "learning_rate": 0.1, "key": 3},
    ],
    ids=lambda section: section["name"],
)
def test_values_that_optax_takes_are_not_refused(section):
    assert problems(**section) == []


def test_building_what_was_not_checked_is_refused_as_well():
    with pytest.raises(ConfigError, match="Did you mean sgd"):
        build_optimizer({"name": "sdg", "learning_rate": 0.1}, global_batch=64)
