import re
import sys

import pytest

from jdist.errors import LaunchError
from jdist.launcher.launch import command_line, launch, make_settings, parse_processes


@pytest.mark.parametrize(
    ("processes", "expected"), [(2, (2, 2)), ("3", (3, 3)), ("1:4", (1, 4)), ((2, 3), (2, 3)), ("2:2", (2, 2))]
)
def test_numbers_of_processes(processes, expected):
    assert parse_processes(processes) == expected


@pytest.mark.parametrize("processes", [0, -1, "", "two", "4:1", "0:2", "1:2:3", ":", "1:", "1.5", "²", (0, 1), True])
def test_what_is_no_number_of_processes(processes):
    with pytest.raises(LaunchError, match="MIN:MAX"):
        parse_processes(processes)


@pytest.mark.parametrize(
    ("processes", "options", "expected"),
    [
        (4, {}, (4, 4, 0)),
        (4, {"on_loss": "continue"}, (1, 4, 3)),
        ("2:8", {"on_loss": "continue", "spares": 1}, (2, 8, 3)),
        ((4, 4), {"on_loss": "continue"}, (4, 4, 3)),
    ],
)
def test_the_fewest_the_most_and_the_restarts(processes, options, expected):
    settings = make_settings(processes, None, **options)
    assert (settings.smallest, settings.largest, settings.max_restarts) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_loss": "ignore"}, "`on_loss` is 'ignore'; it must be 'stop' or 'continue'"),
        ({"spares": 1}, "`spares` is 1 and `on_loss` is 'stop'; it needs on_loss="),
        ({"spares": -1, "on_loss": "continue"}, "`spares` is -1; it must be a whole number, 0 or more"),
        ({"host": "node1"}, "`host` is 'node1' and `on_loss` is 'stop'; it needs on_loss="),
        ({"host": "a b", "on_loss": "continue"}, "`host` is 'a b'; it must be this machine's name or address"),
        ({"workers": 1, "ps": 1, "on_loss": "continue"}, "`workers` is 1 and `on_loss` is 'continue'; leave it out"),
        ({"join": "node1"}, "`join` is 'node1'; it must be host:port"),
        ({"join": "a:1", "spares": 1}, "`spares` is 1 and `join` is 'a:1'; leave one of them out, or give it"),
        ({"join": "a:1", "processes": "1:2"}, "`processes` is '1:2' and `join` is 'a:1'; it must be one number"),
        ({"join": "a:1", "evaluator": True}, "`evaluator` is True and `join` is 'a:1'; leave one"),
        ({"join": "a:1"}, "`join` is 'a:1', but JDIST_TOKEN is not set. Set it for both launches"),
    ],
)
def test_options_of_a_job_that_goes_on(options, message, monkeypatch):
    monkeypatch.delenv("JDIST_TOKEN", raising=False)
    with pytest.raises(LaunchError, match=re.escape(message)):
        launch(["true"], **options)


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
