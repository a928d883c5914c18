"""The programs of examples/: each is short, and a tiny variant of it trains from its config."""

import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

import jdist
from examples import digits_as_files, gpt2, resnet50
from examples.models.vit import ViT
from jdist.cli.main import main
from jdist.experiment.load import load
from jdist.experiment.prepare import check_names
from jdist.experiment.validate import validate
from tests.by_default import some

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "examples.md"
CONFIGS = {path.stem: path for path in sorted(EXAMPLES.glob("*.yaml"))}
MOST_LINES = 150
END = 256  # behind the bytes: 50,257 tokens take seconds a step
TWO_DEVICES = {"name": "mirrored", "devices": ["cpu:0", "cpu:1"]}
TINY_VIT = {"patch": 8, "layers": 1, "width": 32, "heads": 2, "hidden": 64}
TINY = {
    "resnet50": {
        "strategy": TWO_DEVICES,
        "task.options": {
            "train": "train.arrayrecord",
            "test": "test.arrayrecord",
            "classes": 10,
            "size": 32,
            "depths": [1],
            "features": [16],
            "dtype": "float32",
            "workers": 2,
        },
        "train": {"global_batch": 32, "epochs": 4},
        "train.optimizer.learning_rate": 2.0,
        "eval.every": None,
    },
    "gpt2": {
        "strategy": TWO_DEVICES,
        "task.options": {
            "train": "texts/train.arrayrecord",
            "test": "texts/test.arrayrecord",
            "vocabulary": END + 1,
            "length": 32,
            "layers": 1,
            "width": 16,
            "heads": 2,
            "dtype": "float32",
        },
        "train": {"global_batch": 16, "accumulate": 2, "steps": 12, "verify": "off"},
        "train.optimizer.learning_rate": 1e-2,
        "eval": {"every": None, "global_batch": 8},
    },
    "vit": {
        "strategy": TWO_DEVICES,
        "task.options": {"train": "images/train", "test": "images/test", "size": 32, "dtype": "float32", **TINY_VIT},
        "train": {"global_batch": 32, "steps": 12, "verify": "off"},
        "train.optimizer.learning_rate": 1e-2,
        "eval.every": None,
        "init_from.path": "weights",
    },
    "keras_model": {
        "strategy": TWO_DEVICES,
        "task.options": {"size": 32},
        "train": {"global_batch": 32, "steps": 8, "epochs": None},
        "eval": {"every": None, "global_batch": 180},
    },
    "clicks": {
        "task.options": {"files": "day_*.tsv", "buckets": 50, "width": 4},
        "train": {"global_batch": 64, "steps": 12},
        "train.optimizer.learning_rate": 1e-2,
        "eval": {"every": None, "global_batch": 100},
        "checkpoint.every": None,
    },
}
# Keras takes 25 s to be imported, to make the model and to compile it; docs/keras.md, whose step is the same, is always run.
# Servers and workers take 10 s to start; on one device the click model always runs, and on servers tests/ps has others.
ALWAYS = TINY.keys() - {"keras_model", "clicks"}


def vit_params(**options):
    """The parameters of a ViT for the digits, 32 pixels a side."""
    return ViT(**TINY_VIT | options).init(jax.random.key(7), np.zeros((1, 32, 32, 3)))["params"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with small data for all examples, in the formats that they read."""
    folder = tmp_path_factory.mktemp("data")
    digits_as_files.write(str(folder / "images"), side=40, rows=200)
    for part in ("train", "test"):
        resnet50.write(str(folder / "images" / part), str(folder / f"{part}.arrayrecord"))
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number} " * (5 + 3 * number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2, "END", END)
        gpt2.write(str(folder / "*.txt"), str(folder / "texts"))
    jdist.weights.save(vit_params(num_classes=7), folder / "weights", jdist.weights.vit())
    rng = np.random.default_rng(0)
    for day in range(3):
        clicks = rng.integers(2, size=200)
        rows = [[str(click), *([""] * 3 + [str(click)] * 10), *[f"{click:x}"] * 25, ""] for click in clicks]
        (folder / f"day_{day}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    return folder


def overrides(name, more):
    """The overrides of a tiny variant, as they are given to `jdist run`."""
    values = {}
    for key, value in (TINY[name] | more).items():
        is_section = isinstance(value, dict) and key != "strategy"  # whose options go with its name
        values |= {f"{key}.{each}": x for each, x in value.items()} if is_section else {key: value}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@pytest.fixture
def run(data, tmp_path, monkeypatch, capfd):
    """`jdist run` of an example's tiny variant, `(example, overrides) -> (rows of metrics.jsonl, standard output)`."""
    monkeypatch.chdir(data)

    def run(example, /, **more):
        folder = {"log.folder": str(tmp_path), "log.every": 1}
        code = main(["run", str(CONFIGS[example]), *overrides(example, folder | more)])
        out, err = capfd.readouterr()
        assert code == 0, err
        rows = (tmp_path / more.get("name", example) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row) for row in rows], out

    return run


def test_each_example_has_a_config_a_tiny_variant_and_a_row_in_its_page():
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__", "digits_as_files"}
    rows = re.findall(r"^\| \[`(\w+)`\].*`jdist run examples/\1\.yaml`", PAGE.read_text(), re.MULTILINE)
    assert programs == CONFIGS.keys() == TINY.keys() == set(rows)


def test_the_commands_of_the_page_name_what_there_is():
    commands = [
        shlex.split(line)
        for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("jdist run ")
    ]
    assert len(commands) >= 3
    for _, _, config, *more in commands:
        check_names(validate(document := load(EXAMPLES.parent / config, more)), document)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("example", some(TINY, ALWAYS))
def test_a_tiny_variant_learns(example, run):
    rows, out = run(example)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert "\nevaluation\n" in out
    if example == "vit":  # all is from the file but the head, the optimizer's state and the step
        body = len(jax.tree.leaves(vit_params(num_classes=7))) - 2
        assert f"begins with {body} of " in out
        assert "from weights; new are step, params/head/bias, params/head/kernel, opt_state/" in out


def test_the_click_model_learns_on_one_device(run):
    rows, _ = run("clicks", strategy={"name": "one_device"})
    assert rows[-1]["eval/auc"] > 0.9  # the rows are made so that each column tells


@pytest.mark.parametrize("example", some(["gpt2", "resnet50", "vit"], ["gpt2"]))
def test_a_run_that_was_stopped_ends_with_the_same_parameters(example, run, tmp_path):
    """To the bit; that of GPT-2 goes on in the middle of a text."""
    same = {"train.steps": 9, "train.epochs": None}
    run(example, name="whole", **same)
    run(example, name="parts", **same | {"train.steps": 5})
    _, out = run(example, name="parts", **same)
    assert "going on from step 5" in out
    whole, parts = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts"))
    assert whole["state"] == parts["state"]


@pytest.mark.full
def test_weights_of_other_digits_are_a_better_beginning_than_none(tmp_path, monkeypatch, capfd):
    """A ViT learns the digits 0 to 4, its weights go through a file, and it learns the others sooner than a new one."""
    monkeypatch.chdir(tmp_path)
    digits_as_files.write("digits", side=32)
    for part in ("train", "test"):
        Path("others", part).mkdir(parents=True)
        for digit in "56789":
            Path("digits", part, digit).rename(Path("others", part, digit))
    model = {"patch": 4, "layers": 3, "width": 48, "heads": 4, "hidden": 96}

    def accuracy(name, folder, steps, *more):
        options = model | {"size": 32, "dtype": "float32", "train": f"{folder}/train", "test": f"{folder}/test"}
        given = [f"task.options.{option}={value}" for option, value in options.items()]
        given += [f"name={name}", "train.global_batch=32", f"train.steps={steps}", "train.optimizer.learning_rate=1e-3"]
        code = main(["run", str(CONFIGS["vit"]), *given, "train.verify='off'", "eval.every=null", *more])
        assert code == 0, capfd.readouterr().err
        return json.loads(Path("runs", name, "metrics.jsonl").read_text().splitlines()[-1])["eval/accuracy"]

    assert accuracy("first", "digits", 400, "init_from=null") > 0.8
    shapes = jax.eval_shape(lambda: {"params": vit_params(num_classes=5, **model)})
    with jdist.train.Checkpointer("runs/first/checkpoints") as checkpoints:
        restored = checkpoints.restore(jdist.one_device().shapes(shapes), only="params/.*")
    jdist.weights.save(restored.state["params"], "weights", jdist.weights.vit())
    tuned = accuracy("tuned", "others", 60, "init_from.path=weights")
    assert tuned > accuracy("new", "others", 60, "init_from=null") + 0.1
