import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jdist.errors import ConfigError
from jdist.experiment.config import Config
from jdist.experiment.load import describe, flow, load
from jdist.experiment.validate import validate

GOOD = """\
name: toy
task: {make: "toy_regression:make"}
train:
  global_batch: 16
  steps: 40
  optimizer: {name: adamw, learning_rate: 1e-3}
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check_text(*overrides, text=GOOD):
        (tmp_path / "a.yaml").write_text(text)
        return validate(load("a.yaml", overrides))

    return check_text


def test_defaults_are_filled_in(check):
    config = check()
    assert config.strategy.name == "mirrored"
    assert config.train.seed == 0
    assert config.log.folder == "runs"
    assert config.checkpoint.mode is None
    assert config.model_dump()["train"]["optimizer"] == {"name": "adamw", "learning_rate": 1e-3, "scaling": None}


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        (["checkpoint.best=eval/loss"], "min"),
        (["checkpoint.best=eval/mean_absolute_error"], "min"),
        (["checkpoint.best=eval/accuracy"], "max"),
        (["checkpoint.best=eval/loss", "checkpoint.mode=max"], "max"),
    ],
)
def test_which_checkpoint_is_the_best_its_metrics_name_says(check, overrides, mode):
    assert check(*overrides).checkpoint.mode == mode


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "checkpoint.best=eval/close",
            'checkpoint.best: cannot tell from the name "eval/close" whether higher is better (override '
            "checkpoint.best=eval/close). Set checkpoint.mode=max or min.",
        ),
        (
            "checkpoint.best=eval/acuracy",
            'checkpoint.best: cannot tell from the name "eval/acuracy" whether higher is better (override '
            "checkpoint.best=eval/acuracy). Did you mean eval/accuracy? Else set checkpoint.mode=max or min.",
        ),
        ("checkpoint.best=loss", '"loss" is not of the right form (override checkpoint.best=loss). Evaluation metric'),
        ("train.step=3", "train.step: no such key (override train.step=3). Did you mean train.steps?"),
        ("steps=3", "steps: no such key (override steps=3). Did you mean train.steps?"),
        ("trian.steps=3", "trian: no such key (override trian.steps=3). Did you mean train?"),
        ("log.zzz=3", "log.zzz: no such key (override log.zzz=3). Keys of log: every, folder."),
        ("train.global_batch=0", "train.global_batch: 0 is not >= 1 (override train.global_batch=0)."),
        ("train.global_batch=1.0", "1.0 is not a whole number"),
        ("train.global_batch=true", "true is not a whole number"),
        ("train.global_batch=many", '"many" is not a whole number'),
        ("train.global_batch=null", "null is not a whole number"),
        ("train.seed=-1", "-1 is not >= 0"),
        ("train.seed=4294967296", "4294967296 is not < 4294967296"),
        ("train.clip_norm=0", "0 is not > 0"),
        ("train.clip_norm=.inf", "Infinity is not a finite number"),
        ("train.clip_norm=x", '"x" is not a number'),
        ("train.non_finite=rais", "'raise', 'skip' or 'apply' (override train.non_finite=rais). Did you mean raise?"),
        ("train.non_finite=3", "3 is not 'raise', 'skip' or 'apply'"),
        ("train.epochs=3", "both train.epochs=3 and train.steps=40 are given (override train.epochs=3)"),
        ("train.steps=null", "train.steps: missing; say train.steps or train.epochs"),
        ("train.optimizer=sgd", '"sgd" is not a mapping of keys to values'),
        ("train.optimizer={}", "train.optimizer.name: missing (override train.optimizer={})."),
        ("platform.deterministic=1", "1 is not true or false"),
        ("platform.cpu_devices=9999", "9999 is not <= 2048"),
        ("name=a/../b", '"a/../b" is not of the right form (override name=a/../b). Name of the run'),
        (
            "name=no",
            "false is not text (override name=no). If it is meant as text, quote it, such as 'no'.",
        ),
        ("name=3", "3 is not text (override name=3). If it is meant as text, quote it: '3'."),
        ("log.folder=''", "at least 1 visible character"),
        ("task.make=jdist.tasks.digits", "Import path `module:function`"),
        ("task.make=os:system()", "Import path `module:function`"),
        ("task.options=3", "3 is not a mapping"),
        ("task={}", "task.make: missing (override task={}). Import path"),
        ("eval=null", "eval: null is not a mapping"),
    ],
)
def test_what_is_wrong_is_named_with_value_origin_and_remedy(check, override, message):
    with pytest.raises(ConfigError) as caught:
        check(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_come_at_once_with_their_lines(check):
    text = GOOD.replace("steps: 40", "steps: 0\n  sede: 1\n  steps: 3")
    with pytest.raises(ConfigError) as caught:
        check("log.evry=1", "train", text=text)
    assert str(caught.value).splitlines() == [
        "4 problems with a.yaml:",
        "  train.steps: given twice (a.yaml:5 and a.yaml:7). Keep one.",
        "  override train: an override is KEY=VALUE with a dotted key, as in train.steps=500.",
        "  train.sede: no such key (a.yaml:6). Did you mean train.seed?",
        "  log.evry: no such key (override log.evry=1). Did you mean log.every?",
    ]


def test_options_of_strategy_and_optimizer_are_left_for_later(check):
    config = check("strategy.transform=pmap", "train.optimizer.b1=0.5")
    assert config.strategy.model_dump() == {"name": "mirrored", "transform": "pmap"}


def test_every_key_is_described():
    def fields(model):
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                assert inner.__doc__, name
                yield from fields(inner)
            else:
                yield name, field

    assert all(field.description for _, field in fields(Config))


def test_the_description_loads_as_the_config_and_shows_each_origin(check, tmp_path):
    check()
    document = load("a.yaml", ["train.seed=3", "task.options={a: [1, {b: 2}], c: {d: 'on'}}"])
    values = validate(document).model_dump()
    text = describe(values, document, derived={("eval", "global_batch"): "worked out"})
    (tmp_path / "b.yaml").write_text(text)
    assert load("b.yaml").values == values
    lines = dict(line.split(":", 1) for line in text.splitlines() if "#" in line)
    assert lines["  steps"].split() == ["40", "#", "a.yaml:5"]
    assert lines["  seed"].endswith("# override train.seed=3")
    assert lines["  clip_norm"].split() == ["null", "#", "default"]
    assert lines["  global_batch"].endswith("# worked out")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.recursive(scalars, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8))
def test_any_value_survives_being_written_on_one_line(value):
    assert "\n" not in flow(value)
    assert yaml.safe_load(flow(value)) == value


def test_schema_and_help_need_no_jax():
    code = (
        "import sys, jdist.cli.main, jdist.experiment.validate, jdist.experiment.platform\n"
        "assert 'jax' not in sys.modules and 'pydantic' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
