"""The files in configs/ and examples/: each is valid and says how it is run; configs are tried out as far as can be here."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from jdist.cli.main import COMMANDS, flags_last, main
from jdist.experiment.dry_run import without_servers
from jdist.experiment.load import load
from jdist.experiment.prepare import prepare
from jdist.experiment.validate import validate

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))  # tests/examples runs them
# What a dry run needs that is not here: a TPU, or data of one's own.
INSTEAD = {
    "arrays": ["task.options.path=made.npz"],
    "digits_tpu": ["strategy.topology=v5e:2x4"],
    "text": ['task.options.files="*.txt"', "task.options.layers=1", "task.options.length=16"],
    "text_sharded": ['task.options.files="*.txt"', "task.options.layers=1", "task.options.length=16"],
    "text_7b": [
        'task.options.files="*.txt"',
        *(f"task.options.{option}" for option in ("layers=1", "width=64", "heads=2", "length=16")),
    ],
}
HERE = [path for path in CONFIGS if path.stem != "mnist_idx"]  # whose images are not here
COMPILED_ALWAYS = {"arrays", "digits_lars"}  # the others take 5 to 10 s each
HEADERS = ("Shows", "Command", "Time", "Result")


def header(path):
    """The comment at the top, its lines by the word that they begin with."""
    lines, parts, name = path.read_text().splitlines(), {}, None
    for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]:
        word = re.match(r"# (\w[\w ]*):", line)
        name = word[1] if word else name
        parts.setdefault(name, []).append(line[2:].partition(":")[2] if word else line[2:])
    return {name: [line.strip() for line in lines] for name, lines in parts.items()}


def commands(path):
    """The commands of a header, a line that ends in a backslash joined with the next."""
    text = "\n".join(header(path)["Command"]).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.parametrize("path", [*CONFIGS, *EXAMPLES], ids=lambda path: path.stem)
def test_a_config_is_valid_and_named_after_its_file(path):
    assert validate(load(path)).name == path.stem


@pytest.mark.parametrize("path", [*CONFIGS, *EXAMPLES], ids=lambda path: path.stem)
def test_a_header_says_what_it_shows_and_how_to_run_it(path):
    said = header(path)
    assert [word for word in said if word in HEADERS] == list(HEADERS)
    assert all("".join(said[word]) for word in HEADERS)
    assert "TODO" not in path.read_text()
    for program, name, *rest in commands(path):
        if program == "python":  # makes an example's data
            assert name == "-m"
            assert (ROOT / f"{rest[0].replace('.', '/')}.py").is_file()
            continue
        assert program == "jdist"
        if name == "launch":
            rest = rest[rest.index("--") + 1 :]
        config, *others = flags_last(rest, COMMANDS["run"])
        assert config == f"{path.parent.name}/{path.name}"
        flags = [other for other in others if other.startswith("-")]
        assert set(flags) <= {"--dry-run", "--fresh"}
        validate(load(path, [other for other in others if other not in flags]))


@pytest.fixture
def made_up_data(tmp_path, monkeypatch):
    """A folder with what stands for data of one's own."""
    monkeypatch.chdir(tmp_path)
    np.savez("made.npz", x=np.ones((80, 4), np.float32), y=np.arange(80, dtype=np.float32))
    for number in range(20):
        Path(f"{number}.txt").write_text(f"{number} " * 200)


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_all_that_a_config_names_is_there(path, made_up_data):
    document = load(path, INSTEAD.get(path.stem, []))
    parts = prepare(validate(document), document, make=without_servers)
    assert parts.total_steps > 0


@pytest.mark.parametrize(
    "path",
    [path if path.stem in COMPILED_ALWAYS else pytest.param(path, marks=pytest.mark.soak) for path in HERE],
    ids=lambda path: path.stem,
)
def test_a_config_can_be_tried_out(path, made_up_data, capfd):
    code = main(["run", str(path), "--dry-run", *INSTEAD.get(path.stem, [])])
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out.endswith("dry run: all is well; nothing was trained or written\n")
    assert not Path("runs").exists()


def test_on_a_machine_without_a_tpu_its_config_is_refused(capfd):
    assert main(["run", str(ROOT / "configs" / "digits_tpu.yaml"), "--dry-run"]) == 2
    assert "TPU" in capfd.readouterr().err
