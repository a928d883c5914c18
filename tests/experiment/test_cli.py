import errno
import importlib.metadata
import os
import subprocess
import sys
import warnings

import pytest
import tyro

from jdist import errors
from jdist.cli import main as cli
from jdist.cli.main import COMMANDS, flags_last, main


def help_text(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_help_lists_every_command_in_one_line(capsys):
    text = help_text(capsys)
    for name, command in COMMANDS.items():
        assert name in text
        assert command.__doc__.splitlines()[0] in text
    assert "exit code" not in text


def test_the_help_of_run_shows_how_it_is_used(capsys):
    text = " ".join(help_text(capsys, "run").split())
    assert "usage: jdist run [-h] CONFIG [KEY=VALUE ...] [--dry-run] [--replay] [--fresh]" in text
    assert "jdist run configs/digits.yaml train.steps=500 strategy.name=one_device" in text
    for word in ("metrics.jsonl", "Ctrl-C", "130", "143", "JDIST_TRACEBACK"):
        assert word in text


def test_a_misspelt_command_is_told_the_nearest_one(capsys):
    assert main(["rum", "configs/digits.yaml"]) == 2
    assert capsys.readouterr().err.startswith("jdist: unknown command 'rum'. Did you mean 'run'? Commands: run, sweep,")


def test_it_says_its_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jdist {importlib.metadata.version('jdist')}\n"


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "a.yaml", "--frsh"]])
def test_a_command_line_that_is_wrong_leaves_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "given", "taken"),
    [
        (
            "plan",
            "a.yaml --topology cpu:8 train.steps=5 --json b=1",
            "a.yaml train.steps=5 b=1 --topology cpu:8 --json",
        ),
        ("plan", "--topology=cpu:8 a.yaml", "a.yaml --topology=cpu:8"),
        ("run", "--replay runs/digits", "runs/digits --replay"),
        ("sweep", "a.yaml --grid x=1,2 y=3 --grid z=4", "a.yaml y=3 --grid x=1,2 --grid z=4"),
        ("plan", "a.yaml --topology", "a.yaml --topology"),
    ],
)
def test_flags_may_stand_anywhere(command, given, taken):
    assert flags_last(given.split(), COMMANDS[command]) == taken.split()


def test_a_plan_takes_overrides_after_its_flags(tmp_path, capsys):
    command = ["plan", str(tmp_path / "none.yaml"), "--topology", "cpu:8", "train.steps=8"]
    assert main(command) == 2
    assert capsys.readouterr().err == f"jdist: {tmp_path}/none.yaml: no such config file.\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["run --help", "runs ."])
def test_where_nobody_reads_on_it_ends_without_a_word(arguments, unbuffered, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "jdist", *arguments.split()]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path, env=environ)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_broken_pipe_of_something_else_is_no_reader_that_is_gone(monkeypatch):
    def fails() -> int:
        raise BrokenPipeError(errno.EPIPE, "a socket")

    monkeypatch.setitem(COMMANDS, "doctor", fails)
    with pytest.raises(BrokenPipeError, match="a socket"):
        main(["doctor"])


def test_the_module_is_the_command(tmp_path):
    command = [sys.executable, "-m", "jdist", "run", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"jdist: {tmp_path}/none.yaml: no such config file.\n"


def because(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("a typo"), 2),
        (errors.ClusterError("JAX was used already"), 2),
        (errors.CheckpointError("a part of it is missing"), 1),
        (
            because(
                errors.CheckpointError("step 7: cannot be written"), OSError(errno.ENOSPC, "No space left on device")
            ),
            74,
        ),
        (errors.PeerFailedError("process 1: No space left on device", exit_code=74), 74),
        (errors.NonFiniteError("a NaN", "w", 1), 1),
        (errors.ClusterTimeoutError("not all came in time"), 75),
        (errors.PeerFailedError("process 1: disk gone", exit_code=1), 75),
        (errors.PeerFailedError("process 1: a typo", exit_code=2), 2),
        (errors.PeerLostError(1, "a:1", 7, "it stands still"), 75),
    ],
)
def test_exit_codes_say_whether_to_start_again(error, code, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["run"]) == code
    assert capsys.readouterr().err == f"jdist: {error}\n"


def test_notes_of_an_error_are_printed_below_it(monkeypatch, capsys):
    def fail(arguments):
        error = errors.BatchError("a batch differs from the first one")
        error.add_note("in batch 3 (from 0) of the pass")
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["run"]) != 0
    assert capsys.readouterr().err == "jdist: a batch differs from the first one\nin batch 3 (from 0) of the pass\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "a.yaml", "--train.epochs", "3"], "--train.epochs: an override has no dashes: `train.epochs=3`."),
        (["sweep", "a.yaml", "--train.seed=1"], "--train.seed=1: an override has no dashes: `train.seed=1`."),
        (["launch", "-np", "2", "train.py"], "-np: jdist launch takes the number of processes as `--processes 2`."),
    ],
)
def test_what_other_commands_would_take_is_told_in_this_ones_words(capsys, arguments, said):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"jdist: {said}\n"


def test_a_warning_of_the_command_line_itself_names_no_library_as_its_place(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # taken back behind the test
    help_text(capsys)
    library = tyro.cli.__code__.co_filename
    assert warnings.formatwarning("too long", UserWarning, library, 1) == "jdist: warning: too long\n"
    assert warnings.formatwarning("yours", UserWarning, "own.py", 7).startswith("own.py:7: UserWarning: yours")
