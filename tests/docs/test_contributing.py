"""CONTRIBUTING.md: its files run as they stand, and its entries go where it says."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jdist
from tests.reduction import test_exact
from tests.toys import step_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
FILES = dict(re.findall(r'^```\w+ title="([\w./]+)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE))


def function(name: str):
    """The function of the file of that name."""
    (path,) = (path for path in FILES if Path(path).stem == name)
    names: dict = {"__name__": name}
    exec(compile(FILES[path], path, "exec"), names)  # the repository's own text
    return names[name if name in names else "make"]


def trained(strategy: jdist.Strategy) -> tuple[float, float]:
    @jdist.distribute(strategy)
    @step_of
    def step(w, batch):
        return jdist.mean((w * batch["x"] - 2.0) ** 2)

    w, metrics = step(0.0, {"x": np.ones(8, np.float32)})
    return float(w), float(metrics["loss"])


def test_a_strategy():
    strategy = function("two_halves")()
    assert strategy.num_replicas == 8
    assert trained(strategy) == pytest.approx((0.4, 4.0))


def test_a_reduction(monkeypatch: pytest.MonkeyPatch):
    gathered = function("gathered")
    assert trained(jdist.mirrored(all_reduce=gathered())) == pytest.approx((0.4, 4.0))
    monkeypatch.setitem(test_exact.ALGORITHMS, "gathered", lambda n: gathered())
    for n in (1, 8):  # the test that the page's table names
        test_exact.test_sums_every_leaf_and_gives_all_replicas_the_same_bits("gathered", n)


def test_a_resolver():
    toy = function("toy")
    spec = jdist.cluster.resolve({"TOY_HOSTS": "a,b", "TOY_INDEX": "1"}, [toy])
    assert (spec.num_processes, spec.process_index, spec.resolver) == (2, 1, "toy")
    assert toy({}) is None
    with pytest.raises(jdist.errors.ClusterConfigError, match="TOY_INDEX is 2; it must be from 0 to 1"):
        toy({"TOY_HOSTS": "a,b", "TOY_INDEX": "2"})
    with pytest.raises(jdist.errors.ClusterConfigError, match="TOY_HOSTS is not set; it must be the hosts of the job"):
        toy({"TOY_INDEX": "1"})


def test_a_callback():
    time_limit = function("time_limit")

    step = step_of(lambda w, batch: jdist.mean((w * batch["x"]) ** 2, batch["mask"]))

    data = {"x": np.ones(64, np.float32)}
    _, history = jdist.fit(
        step, 1.0, data, epochs=10**6, global_batch=8, strategy=jdist.one_device(), callbacks=[time_limit(0.1)]
    )
    assert "0.1 s are over" in history.stopped


def test_a_task(tmp_path: Path):
    for name in ("my_task.py", "my.yaml"):
        (tmp_path / name).write_text(FILES[name])
    command = [sys.executable, "-m", "jdist", "run", "my.yaml"]
    ended = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert "finished: 50 steps" in ended.stdout


def test_an_entry_has_its_place():
    for table, path in re.findall(r"`([A-Z]+)` in `([\w./]+)`", PAGE):
        assert re.search(rf"^{table}\b", (ROOT / path).read_text(), re.MULTILINE), (table, path)
