import sys

import pytest

from jdist.errors import LaunchError
from jdist.launcher.launch import command_line, parse_processes


@pytest.mark.parametrize(
    ("processes", "expected"), [(2, (2, 2)), ("3", (3, 3)), ("1:4", (1, 4)), ((2, 3), (2, 3)), ("2:2", (2, 2))]
)
def test_numbers_of_processes(processes, expected):
    assert parse_processes(processes) == expected


@pytest.mark.parametrize("processes", [0, -1, "", "two", "4:1", "0:2", "1:2:3", ":", "1:", "1.5", "²", (0, 1), True])
def test_what_is_no_number_of_processes(processes):
    with pytest.raises(LaunchError, match="MIN:MAX"):
        parse_processes(processes)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yml", "c.py"):
        (tmp_path / name).touch()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["a.yaml", "x=1"], [sys.executable, "-m", "jdist", "run", "a.yaml", "x=1"]),
        (["b.yml"], [sys.executable, "-m", "jdist", "run", "b.yml"]),
        (["c.py", "--a"], [sys.executable, "c.py", "--a"]),
        (["-m", "my.train", "--a"], [sys.executable, "-m", "my.train", "--a"]),
        (["sh", "-c", "exit 3"], ["sh", "-c", "exit 3"]),
    ],
)
def test_what_each_process_runs(command, expected):
    assert command_line(command) == expected


@pytest.mark.usefixtures("here")
def test_virtual_devices_replace_those_of_a_config_unless_an_override_says_otherwise():
    line = command_line(["a.yaml", "platform.cpu_devices=2"], devices_per_process=4)
    assert line[5:] == ["platform.cpu_devices=4", "platform.cpu_devices=2"]  # the last one counts


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "nothing to launch"),
        ([""], "nothing to launch"),
        (["none.yaml"], "none.yaml: no such file"),
        (["none.py"], "none.py: no such file"),
        (["-m"], "name of a module"),
        (["no-such-program-at-all"], "no such program"),
    ],
)
def test_what_cannot_be_launched(command, message):
    with pytest.raises(LaunchError, match=message):
        command_line(command)
