"""`jdist plan --suggest`: what is tried on which target, in what order it is shown, and what it says to write."""

import json
import re

import pytest

from jdist.cli.main import main
from jdist.plan import command
from jdist.plan.compile import TooLarge
from jdist.plan.target import parse_target
from tests.plan.plan_toy import config_file


@pytest.mark.parametrize(
    ("topology", "count", "first", "last"),
    [
        ("h100:8", 8, "strategy={name: mirrored}", "strategy={name: mirrored, shard: state}"),
        (
            "h100:4x8",
            32,
            "strategy={name: multi_worker}",
            "strategy={name: multi_worker, shard: {of: state, within: 8}}",
        ),
        ("v5p:4x4x4", 64, "strategy={name: tpu}", "strategy={name: tpu, shard: state}"),
        ("v5e:4x4,slices=2", 32, "strategy={name: tpu}", "strategy={name: tpu, shard: {of: state, within: 16}}"),
        ("cpu:4", 4, "strategy={name: mirrored}", "strategy={name: mirrored, shard: state}"),
    ],
)
def test_what_is_tried(topology, count, first, last):
    found = command.ways(parse_target(topology), count, rows=1)
    assert found[0] == (first,)
    assert found[-1] == (last,)
    in_microbatches = command.ways(parse_target(topology), count, rows=12)
    assert in_microbatches == [*found, *((each, "train.accumulate=4") for (each,) in found)]


def suggested(capsys, *arguments):
    code = main(["plan", *arguments, "--suggest"])
    return code, capsys.readouterr()


def test_each_way_is_planned_and_the_fastest_is_to_be_written(tmp_path, capsys):
    path = str(config_file(tmp_path))
    code, printed = suggested(capsys, path, "--topology", "cpu:4", "--json")
    values = json.loads(printed.out)
    assert code == 0
    assert len(values) >= 3
    assert all(value["fits"] for value in values)
    assert {value["overrides"][0] for value in values} == {
        "strategy={name: mirrored}",
        "strategy={name: mirrored, shard: optimizer}",
        "strategy={name: mirrored, shard: state}",
    }
    code, printed = suggested(capsys, path, "--topology", "cpu:4")
    assert printed.out.splitlines()[-1].startswith("append 'strategy={name: mirrored")
    assert printed.err.count(": fits") == len(values)


def test_a_state_that_alone_is_too_large_is_not_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jdist.plan.plan._capacity", lambda *_: 10)
    monkeypatch.setattr("jdist.plan.plan.compile_step", lambda planned: pytest.fail("compiled"))
    code, printed = suggested(capsys, str(config_file(tmp_path)), "--topology", "cpu:4")
    assert code == 1
    assert "the state alone is too large" in printed.out
    assert printed.out.splitlines()[-1].startswith("none of them fits")


@pytest.mark.parametrize(
    ("needed", "partly", "shown"),
    [(3 << 30, False, "3.00 GiB"), (3 << 30, True, "3.00 GiB of temporaries"), (None, False, "2.14 KiB of state")],
)
def test_of_a_step_that_the_compiler_refuses_it_says_what_that_needs(
    tmp_path, capsys, monkeypatch, needed, partly, shown
):
    refusal = TooLarge(message="no", needed=needed, available=1 << 30, partly=partly)
    monkeypatch.setattr("jdist.plan.plan.compile_step", lambda planned: refusal)
    code, printed = suggested(capsys, str(config_file(tmp_path)), "--topology", "cpu:4")
    assert code == 1
    assert re.search(rf"^does not fit +{re.escape(shown)}  +memory ", printed.out, re.MULTILINE)


def test_one_question_at_a_time(tmp_path, capsys):
    path = str(config_file(tmp_path))
    assert main(["plan", path, "--topology", "cpu:4", "--suggest", "--sweep", "global_batch=8"]) == 2
    assert "--suggest and --sweep exclude each other" in capsys.readouterr().err
