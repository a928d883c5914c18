import pytest

from jdist.cli.runs.grid import parse_grid, points
from jdist.errors import ConfigError


def test_every_combination_has_a_name_that_says_what_it_tries():
    made = points(parse_grid(["train.optimizer.learning_rate=1e-3,3e-3", "strategy.name=mirrored,one_device"]))
    assert [point.name for point in made] == [
        "learning_rate-0.001_strategy-mirrored",
        "learning_rate-0.001_strategy-one_device",
        "learning_rate-0.003_strategy-mirrored",
        "learning_rate-0.003_strategy-one_device",
    ]
    assert made[1].overrides == ("train.optimizer.learning_rate=0.001", "strategy.name=one_device")
    assert made[1].values == {"learning_rate": "0.001", "strategy": "one_device"}


def test_a_value_may_be_a_mapping_and_is_then_named_by_its_number():
    made = points(parse_grid(["train.optimizer={name: sgd, learning_rate: 0.1},{name: adam, learning_rate: 1e-3}"]))
    assert [point.name for point in made] == ["optimizer-0", "optimizer-1"]
    assert made[0].overrides == ("train.optimizer={learning_rate: 0.1, name: sgd}",)


def test_keys_that_end_alike_are_told_apart():
    axes = parse_grid(["train.global_batch=8,16", "eval.global_batch=4"])
    assert [axis.label for axis in axes] == ["train.global_batch", "eval.global_batch"]


def test_names_that_would_be_alike_are_numbers():
    wide = ",".join(f"{'x' * 20}{n}" for n in range(2))
    made = points(parse_grid([f"task.options.{'k' * 140}={wide}"]))
    assert [point.name for point in made] == ["0", "1"]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ([], "needs something to try"),
        (["train.seed"], "a grid is KEY=V1,V2"),
        (["train.seed="], "a grid is KEY=V1,V2"),
        ([".seed=1"], "a grid is KEY=V1,V2"),
        (["train.seed=1,1"], "the value 1 is there twice"),
        (["train.seed=1", "train.seed=2"], "train.seed is given twice"),
        (["name=a,b"], "names its runs"),
        (["log.folder=a,b"], "names its runs"),
        (["train.seed=[1,2"], "not valid YAML"),
        ([f"train.seed={','.join(map(str, range(101)))}", f"a={','.join(map(str, range(100)))}"], "10,100 runs"),
    ],
)
def test_a_grid_that_is_wrong_is_refused(grid, said):
    with pytest.raises(ConfigError, match=said):
        parse_grid(grid)
