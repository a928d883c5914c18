"""The guide for those who come from tf.distribute: it names every symbol, what it names exists, and its programs run."""

import re
from pathlib import Path

import pytest

import jdist

HERE = Path(__file__).parent
GUIDE = (HERE.parent.parent / "docs" / "from_tf_distribute.md").read_text()
SYMBOLS = [s for s in (HERE / "tf_distribute_2_21_0.txt").read_text().splitlines() if not s.startswith("#")]
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", GUIDE, re.MULTILINE)
PROGRAMS = re.findall(r"```py\n.*?```\n\n```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
NAMED = sorted(set(re.findall(r"`(?:not )?(jdist(?:\.\w+)+)", GUIDE)))


def exists(name):
    owner = jdist
    for part in name.split(".")[1:]:
        # A dataclass field without a default is no attribute of its class.
        if part in getattr(owner, "__dataclass_fields__", {}):
            return True
        owner = getattr(owner, part, None)
    return owner is not None


def test_every_symbol_of_tf_distribute_has_one_row():
    assert len(SYMBOLS) > 180
    in_rows = [symbol for first, _ in ROWS for symbol in re.findall(r"`([\w.]+)`", first) if "tf.distribute" in symbol]
    assert sorted(in_rows) == sorted(SYMBOLS)


def test_every_row_says_what_it_is_in_jdist():
    for first, second in ROWS:
        if "`tf.distribute" in first:
            assert re.search(r"`|none|the strings", second), first


def test_keras_loop_is_the_loop_of_jdist():
    ours = {first: second for first, second in ROWS if ".fit" in first}
    assert len(ours) == 2  # among the ways to write a program, and among the names
    assert all("jdist.fit" in second and "none" not in second for second in ours.values())


def test_every_counterpart_exists():
    assert "jdist.mirrored" in NAMED
    assert not {name for name in NAMED if not exists(name)}


@pytest.mark.parametrize(("program", "output"), PROGRAMS, ids=["training loop", "values", "several workers"])
def test_the_programs_print_what_the_guide_says(program, output, capsys):
    exec(compile(program, "from_tf_distribute.md", "exec"), {})  # the repository's own text
    assert capsys.readouterr().out == output


def test_the_program_of_several_workers_runs_as_two(tmp_path, capfd):
    program, output = PROGRAMS[2]
    (script := tmp_path / "train.py").write_text(program)
    assert jdist.launch([str(script)], processes=2, devices_per_process=1, log_dir=tmp_path).exit_code == 0
    said = [line for line in capfd.readouterr().out.splitlines() if "Gloo" not in line]
    assert said == [f"[0] {line}" for line in output.splitlines()]


def test_there_are_three_programs():
    assert len(PROGRAMS) == 3
    assert GUIDE.count("```py\n") == 3
