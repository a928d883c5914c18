"""A seed, a hyperparameter or a program that one process has otherwise: told before the step is compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdist
from jdist.step.same_program import check_same_program

pytestmark = pytest.mark.xdist_group("differing_processes")
PROGRAM = Path(__file__).with_name("differing_processes.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("differing")
    launched = jdist.launch([str(PROGRAM), str(folder)], processes=2, devices_per_process=2, log_dir=folder / "logs")
    assert launched.exit_code == 0
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize(
    ("name", "error", "says", "most_compiled"),
    [
        ("seed", "ReplicaDivergenceError", "\n  .params['w']: process 1 has another value than process 0\n", 2),
        ("hyperparameter", "ReplicaDivergenceError", "['learning_rate']: 0.10000000149011612 on process 0, 0.00999", 1),
        ("constant", "ClusterError", "a constant is 0.25 there and 0.5 on process 0, in `mul`", 0),
        ("another equation", "ClusterError", "where process 0 has `", 0),
        ("a closed-over array", "ClusterError", "float32[3]", 0),
    ],
)
def test_what_differs_is_named_on_all_before_the_step_is_compiled(found, name, error, says, most_compiled):
    for process in found:
        assert process[name][0] == error
        assert says in process[name][1]
        assert process[name][2] <= most_compiled  # to compare the states
    assert found[0][name][:2] == found[1][name][:2]


@pytest.mark.parametrize("name", ["the same", "one prints"])
def test_what_is_the_same_runs(found, name):
    assert [process[name][0] for process in found] == ["nothing", "nothing"]


def test_comparing_traces_the_step_no_further_time(found):
    assert [process["traces"] for process in found] == [1, 1]


def test_a_place_of_the_users_is_named(found):
    assert "computed at differing_processes.py:" in found[1]["constant"][1]


def test_equal_programs_cost_one_exchange_and_names_in_memory_play_no_part():
    def traced() -> Any:
        def relu(x: Any) -> Any:  # another function each time, at another address
            return jax.nn.relu(x) * jnp.arange(3.0)

        return jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (relu(c), c.sum()), x, None, length=3))(jnp.ones(3))

    said: list[Any] = []

    class Recorder:
        def exchange(self, what: str, value: Any, timeout_s: float) -> list[Any]:
            said.append(value)
            return [value, said[0]]

    for _ in range(2):
        check_same_program(traced(), "step", Recorder().exchange)
    assert len(said) == 2
    assert said[0] == said[1]
