"""The programs of examples/: each is short, and a tiny variant of it trains from its config."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jdist
from examples import digits_as_files, gpt2, resnet50
from jdist.cli.main import main
from jdist.tasks.vit import ViT
from tests.by_default import some

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = {path.stem: path for path in sorted(EXAMPLES.glob("*.yaml"))}
MOST_LINES = 150
TINY_VIT = {"patch": 8, "layers": 1, "width": 32, "heads": 2, "hidden": 64}
TINY = {
    "resnet50": {
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
        "task.options": {
            "train": "texts/train.arrayrecord",
            "test": "texts/test.arrayrecord",
            "vocabulary": gpt2.END + 1,
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
        "task.options": {"train": "images/train", "test": "images/test", "size": 32, "dtype": "float32", **TINY_VIT},
        "train": {"global_batch": 32, "steps": 12, "verify": "off"},
        "train.optimizer.learning_rate": 1e-2,
        "eval.every": None,
        "init_from.path": "weights",
    },
    "keras_model": {
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
ALWAYS = TINY.keys() - {"keras_model"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with small data for all examples, in the formats that they read."""
    folder = tmp_path_factory.mktemp("data")
    digits_as_files.write(str(folder / "images"), side=40, rows=200)
    for part in ("train", "test"):
        resnet50.write(str(folder / "images" / part), str(folder / f"{part}.arrayrecord"))
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number} " * (5 + 3 * number))
    gpt2.write(str(folder / "*.txt"), str(folder / "texts"))
    variables = ViT(num_classes=7, **TINY_VIT).init(jax.random.key(7), np.zeros((1, 32, 32, 3)))
    jdist.weights.save(variables["params"], folder / "weights", jdist.weights.vit())
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
        values |= {f"{key}.{each}": x for each, x in value.items()} if isinstance(value, dict) else {key: value}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@pytest.fixture
def run(data, tmp_path, monkeypatch, capfd):
    """`jdist run` of an example's tiny variant, `(name, overrides) -> (rows of metrics.jsonl, standard output)`."""
    monkeypatch.chdir(data)

    def run(name, **more):
        folder = {"log.folder": str(tmp_path), "log.every": 1}
        code = main(["run", str(CONFIGS[name]), *overrides(name, folder | more)])
        out, err = capfd.readouterr()
        assert code == 0, err
        rows = (tmp_path / more.get("name", name) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row) for row in rows], out

    return run


def test_each_example_has_a_config_and_a_tiny_variant():
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - {"digits_as_files"}
    assert programs == CONFIGS.keys() == TINY.keys()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", some(TINY, ALWAYS))
def test_a_tiny_variant_learns(name, run):
    rows, out = run(name)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert "\nevaluation\n" in out
