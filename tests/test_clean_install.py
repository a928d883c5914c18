"""What an installation without extras holds is enough for every command, doctor and the README's example."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.xdist_group(__name__)  # they share the installation

ROOT = Path(__file__).parent.parent
COMMANDS = ("run", "sweep", "runs", "checkpoint", "plan", "launch", "serve", "doctor")


def closure(requires):
    """The distributions that requirements bring along, without extras that nobody asked for."""
    found, waiting = {}, [r for r in map(Requirement, requires) if r.marker is None or r.marker.evaluate({"extra": ""})]
    while waiting:
        wanted = waiting.pop()
        key = (wanted.name.lower(), frozenset(wanted.extras))
        if key in found:
            continue
        found[key] = distribution = importlib.metadata.distribution(wanted.name)
        for text in distribution.requires or []:
            below = Requirement(text)
            extras = [{"extra": extra} for extra in wanted.extras] or [{"extra": ""}]
            if below.marker is None or any(below.marker.evaluate(extra) for extra in extras):
                waiting.append(below)
    return list(dict.fromkeys(found.values()))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with jdist as its wheel holds it, and links to all that it declares, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    wheels = tmp_path_factory.mktemp("wheels")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(wheels),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = wheels.glob("jdist-*.whl")
    shutil.unpack_archive(wheel, folder, "zip")
    (installed,) = folder.glob("jdist-*.dist-info")
    for distribution in closure(importlib.metadata.Distribution.at(installed).requires):
        for file in distribution.files or []:
            top = file.parts[0]
            place = folder / top
            if top not in ("..", "__pycache__") and not place.exists():
                place.symlink_to(distribution.locate_file(top))
    return folder


def python(site, *arguments, folder):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JAX_COMPILATION_CACHE_DIR")
    }
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(site)!r})\n" + arguments[0],
            *arguments[1:],
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_command_and_doctor(site, tmp_path):
    program = """
import contextlib, io, jdist.cli.main
assert jdist.cli.main.__file__.startswith(sys.path[0])
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            jdist.cli.main.main([command, "--help"])
        except SystemExit as left:
            assert left.code == 0, command
    assert f"usage: jdist {command}" in said.getvalue(), command
sys.exit(jdist.cli.main.main(["doctor"]))
"""
    assert "packages" in python(site, program, *COMMANDS, folder=tmp_path)


def test_the_readmes_example(site, tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "step 320/320  epoch 20: loss 0.0" in python(site, example, folder=tmp_path)


def test_nothing_else_is_there(site, tmp_path):
    program = "import importlib.util; print([n for n in ('sklearn', 'pytest', 'tensorboardX') if importlib.util.find_spec(n)])"
    assert python(site, program, folder=tmp_path) == "[]\n"
    assert sysconfig.get_path("purelib") != str(site)
