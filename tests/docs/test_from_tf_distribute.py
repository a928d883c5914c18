"""From tf.distribute: the table names every symbol, the counterparts exist, and the guide's programs run."""

import re
from pathlib import Path

import pytest

import jdist

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
GUIDE = (DOCS / "from_tf_distribute.md").read_text()
BOTH = GUIDE + (DOCS / "tf_symbols.md").read_text()
SYMBOLS = [s for s in (HERE / "tf_distribute_2_21_0.txt").read_text().splitlines() if not s.startswith("#")]
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", BOTH, re.MULTILINE)
PROGRAMS = re.findall(r"```py\n.*?```\n\n```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
NAMED = sorted(set(re.findall(r"`(?:not )?(jdist(?:\.\w+)+)", BOTH)))
DIFF = re.compile(r"```diff\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def several_workers():
    """The program of the training loop after the last diff of the guide, and its output."""
    program, (diff, output) = PROGRAMS[0][0], DIFF.findall(GUIDE)[-1]
    for hunk in diff.split("@@\n"):
        before, after = ("".join(line[1:] for line in hunk.splitlines(True) if line[0] == sign) for sign in "-+")
        assert program.count(before) == 1
        program = program.replace(before, after)
    return program, output


PROGRAMS.append(several_workers())


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


@pytest.mark.parametrize(
    ("tf", "counterpart"),
    [
        ("tf.keras.callbacks.BackupAndRestore", "jdist.callbacks.checkpoint"),
        ("tf.keras.utils.SidecarEvaluator", "jdist.train_and_evaluate"),
        ("tf.config.LogicalDeviceConfiguration", "xla_force_host_platform_device_count"),
        ("tf.tpu.experimental.DeviceAssignment", "strategy.devices"),
        ("tf.summary.scalar", "jdist.callbacks.tensorboard"),
        ("tf.distribute.Server", "jdist serve"),
        ("tf.estimator.FinalExporter", "jdist.export"),
        ("DistributedIterator.get_next`", "next(iterator)"),
        ("merge_call", "collectives"),
        ("batch_reduce", "jdist."),
        ("experimental_assign_to_logical_device", "jax.device_put"),
    ],
)
def test_what_a_user_of_tf_would_look_for_has_a_row(tf, counterpart):
    assert [second for first, second in ROWS if tf in first and counterpart in second]


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
    assert GUIDE.count("```py\n") == GUIDE.count("```diff\n") == 2


def test_the_diff_for_tensorflow_fits_its_program():
    program = re.findall(r"```py\n(.*?)```", GUIDE, re.DOTALL)[0]
    removed = "".join(line[1:] for line in DIFF.findall(GUIDE)[0][0].splitlines(True) if line[0] in "-@")
    assert all(block in program for block in removed.split("@\n"))
