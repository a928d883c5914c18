import subprocess
import sys

import pytest

from jdist.cli.main import main


def test_the_help_says_what_a_user_needs(capsys):
    with pytest.raises(SystemExit) as left:
        main(["launch", "--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: jdist launch [-h] [OPTIONS] -- COMMAND ..." in text
    for word in ("--processes", "MIN:MAX", "--max-restarts", "--grace-s", "Exit codes", "TF_CONFIG", "--evaluator"):
        assert word in text
    for word in ("--on-loss {stop,continue}", "--spares", "--join HOST:PORT", "--host ADDRESS"):
        assert word in text


def test_what_follows_the_dashes_is_the_programs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show.py").write_text("import sys; print(sys.argv[1:])")
    assert main(["launch", "--processes", "1", "--", "show.py", "--learning_rate", "3", "--help", "--", "-x"]) == 0
    assert capfd.readouterr().out == "[0] ['--learning_rate', '3', '--help', '--', '-x']\n"


def test_a_config_is_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("")
    assert main(["launch", "--max-restarts", "3", "--", "empty.yaml", "train.steps=5"]) == 2
    said = capfd.readouterr().err
    assert "[0] jdist: empty.yaml is empty" in said
    assert "restart" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "none.py"], "jdist: none.py: no such file"),
        (["--processes", "4:1", "--", "true"], "jdist: `processes` is '4:1'"),
        ([], "nothing to launch"),
        (["--spares", "1", "--", "true"], "jdist: `spares` is 1 and `on_loss` is 'stop'; it needs on_loss="),
        (["--join", "nowhere", "--", "true"], "jdist: `join` is 'nowhere'; it must be host:port"),
    ],
)
def test_what_is_not_right_leaves_with_2(arguments, message, capsys):
    try:
        code = main(["launch", *arguments])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_the_launcher_needs_no_jax():
    heavy = "{'jax', 'numpy', 'pydantic', 'rich'}"
    code = f"import sys, jdist; jdist.launch, jdist.ray_launch; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_prefixes_have_colours_on_a_terminal(tmp_path):
    pty = pytest.importorskip("pty")  # not on every system
    script = tmp_path / "hello.py"
    script.write_text("print('hello')")
    launched = (
        f"import sys; from jdist.launcher.launch import launch; "
        f"launch([{str(script)!r}], processes=1, log_dir={str(tmp_path / 'logs')!r})"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", launched]
    with open(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, env={"TERM": "xterm"}, check=False)
        shown = terminal.read(1000)
        with open(theirs, "rb"):  # closes it
            pass
    assert done.returncode == 0
    assert shown == b"\x1b[36m[0] \x1b[0mhello\r\n"
