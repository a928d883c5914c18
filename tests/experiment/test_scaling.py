"""`train.optimizer.scaling` and `gradual_warmup` in a config."""

import doctest

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import scaling
from jdist.errors import ConfigError
from jdist.experiment.load import load
from jdist.experiment.optimizer import build_optimizer, check_optimizer, fill_lengths
from jdist.experiment.validate import validate

LINEAR = {"rule": "linear", "base_batch": 32}
WARM = {"schedule": "gradual_warmup", "steps": 2, "value": {"schedule": "cosine_decay_schedule", "init_value": 0.1}}


def problems(**section):
    return [(".".join(p.key), p.text + p.remedy) for p in check_optimizer(section, global_batch=128)]


def rates(tx, steps=4):
    """What each of some updates takes from a parameter whose gradient is 1."""
    state = tx.init(jnp.zeros(()))
    taken = []
    for _ in range(steps):
        update, state = tx.update(jnp.ones(()), state, jnp.zeros(()))
        taken.append(-float(update))
    return taken


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(scaling).failed == 0


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4), ("square_root", 2)])
def test_a_rule_scales_numbers_and_schedules(rule, factor):
    for rate in (0.1, {"schedule": "exponential_decay", "init_value": 0.1, "transition_steps": 2, "decay_rate": 0.5}):
        section = {"name": "sgd", "learning_rate": rate, "scaling": {"rule": rule, "base_batch": 32}}
        assert problems(**section) == []
        plain = rates(build_optimizer(section | {"scaling": None}, global_batch=128))
        np.testing.assert_allclose(
            rates(build_optimizer(section, global_batch=128)), np.array(plain) * factor, rtol=1e-6
        )
        np.testing.assert_allclose(rates(build_optimizer(section, global_batch=32)), plain, rtol=1e-6)


def test_the_rule_of_adam_scales_what_is_given_and_the_defaults():
    section = {"name": "adamw", "learning_rate": 0.1, "b2": 0.99, "weight_decay": 0.3}
    tx = build_optimizer(section | {"scaling": {"rule": "adam", "base_batch": 64}}, global_batch=128)
    by_hand = optax.adamw(**jdist.scaling.adam(0.1, base_batch=64, global_batch=128, b2=0.99), weight_decay=0.3)
    np.testing.assert_array_equal(rates(tx), rates(by_hand))


def test_a_warm_up_stands_before_a_schedule_that_lasts_as_long_as_the_run():
    section = fill_lengths({"name": "sgd", "learning_rate": WARM, "scaling": LINEAR}, steps=8)
    assert section["learning_rate"]["value"]["decay_steps"] == 8
    assert "decay_steps" not in WARM["value"]
    assert problems(**section) == []
    schedule = jdist.scaling.gradual_warmup(optax.cosine_decay_schedule(0.4, 8), steps=2)
    np.testing.assert_allclose(
        rates(build_optimizer(section, global_batch=128)), [schedule(step) for step in range(4)], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({"name": "adafactor", "learning_rate": None, "scaling": LINEAR}, "scaling", "needs a learning_rate to"),
        (
            {"name": "sgd", "learning_rate": 0.1, "scaling": LINEAR | {"rule": "adam"}},
            "scaling.rule",
            "the rule adam is for adam and adamw, not for sgd Take linear or square_root",
        ),
        (
            {"name": "adam", "learning_rate": 0.1, "scaling": {"rule": "adam", "base_batch": 8}},
            "scaling.base_batch",
            "8: jdist.scaling.adam: a global batch of 128 is 16 times `base_batch`, 8, but with `b1`=0.9 the rule ends at 10",
        ),
        ({"name": "sgd", "learning_rate": WARM | {"step": 3}}, "learning_rate.step", "Did you mean steps?"),
        (
            {"name": "sgd", "learning_rate": WARM | {"value": "x"}},
            "learning_rate.value",
            '"x" is neither a number nor a',
        ),
        ({"name": "sgd", "learning_rate": WARM | {"steps": 0.5}}, "learning_rate.steps", "0.5 is not a whole number"),
        (
            {"name": "sgd", "learning_rate": {"schedule": "gradual_warmup", "steps": -1, "value": 0.1}},
            "learning_rate",
            "jdist.scaling.gradual_warmup refuses these arguments: jdist.scaling.gradual_warmup: `steps` is -1",
        ),
        ({"name": "sgd", "learning_rate": {"schedule": "gradual_warmup"}}, "learning_rate.steps", "missing; jdist."),
        ({"name": "sgd", "learning_rate": {"schedule": "gradual"}}, "learning_rate.schedule", "mean gradual_warmup?"),
    ],
)
def test_what_is_wrong_is_named(section, key, message):
    found = problems(**section)
    assert any(where == f"train.optimizer.{key}" and message in text for where, text in found), found


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ("{rule: linaer, base_batch: 256}", r'scaling\.rule: "linaer" is not .* Did you mean linear\?'),
        ("{rule: linear}", r"scaling\.base_batch: missing .* The global batch that the options were tuned at"),
        ("{rule: linear, base_batch: 0}", r"scaling\.base_batch: 0 is not >= 1"),
        (
            "{rule: linear, base_batsch: 8}",
            r"scaling\.base_batsch: no such key .* Did you mean .*scaling\.base_batch\?",
        ),
        ("linear", r'scaling: "linear" is not a mapping of keys to values'),
    ],
)
def test_what_the_schema_refuses(scaling, said, tmp_path):
    path = tmp_path / "config.yaml"
    optimizer = f"{{name: sgd, learning_rate: 0.1, scaling: {scaling}}}"
    path.write_text(f"name: a\ntask: {{make: 'a:b'}}\ntrain: {{global_batch: 8, steps: 1, optimizer: {optimizer}}}")
    with pytest.raises(ConfigError, match=said):
        validate(load(path))
