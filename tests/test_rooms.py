"""The rooms of jdist/: imports point downwards, and go round in no circle."""

import ast
import re
from pathlib import Path

import jdist

ROOT = Path(jdist.__file__).parent
# From the lowest to the highest; a room imports those before it.
ORDER = [
    "typing",
    "errors",
    "support",
    "scaling",
    "reduction",
    "cluster",
    "launcher",
    "data",
    "core",
    "replica",
    "jaxpr",
    "step",
    "sharded_state",
    "nnx",
    "ps.protocol",
    "ps.program",
    "ps.transport",
    "ps.server",
    "ps.worker",
    "ps.coordinator",
    "ps",
    "metrics",
    "loop.report",
    "checkpoint",
    "weights",
    "callbacks",
    "strategies",
    "loop",
    "tasks",
    "experiment",
    "plan",
    "cli.runs",
    "launcher.notebook",
    "cli.doctor",
    "train",
    "cli",
    "jdist",
]
# Files that stand for a user's own, and import what users import.
AS_USERS = ("jdist.tasks.", "jdist.cli.doctor.report")
LOOSE = {"__init__", "__main__", "errors", "scaling", "train", "typing"}


def modules():
    """Each module's name and file."""
    return {
        ".".join(("jdist", *f.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): f
        for f in ROOT.rglob("*.py")
    }


def imported(name, file, known):
    """The modules of jdist that one imports, wherever in the file, also for type checkers alone."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def graph():
    known = modules()
    return {
        name: sorted({to for to in imported(name, file, known) if to in known and to != name})
        for name, file in known.items()
    }


def room(module):
    """The room that a module is in: the innermost folder that ORDER names, or itself if it is in none."""
    parts = module.split(".")[1:]
    if ".".join(parts[:2]) in ORDER:
        return ".".join(parts[:2])
    return parts[0] if parts and parts[0] != "__main__" else "jdist"


def test_a_room_in_a_room_is_a_folder():
    assert all((ROOT / name.replace(".", "/")).is_dir() for name in ORDER if "." in name)


def test_every_module_is_in_a_room():
    assert {room(module) for module in modules()} == set(ORDER)
    assert {f"ps.{f.parent.name}" for f in (ROOT / "ps").glob("*/__init__.py")} <= set(ORDER)
    assert {f.stem for f in ROOT.glob("*.py")} == LOOSE


def test_imports_point_downwards():
    assert not {
        (module, to)
        for module, others in graph().items()
        for to in others
        if room(module) != room(to) and ORDER.index(room(module)) < ORDER.index(room(to))
        if not (to == "jdist" and module.startswith(AS_USERS))
    }


def test_no_module_imports_itself():
    known = modules()
    assert not [
        name for name, file in known.items() if file.name != "__init__.py" and name in imported(name, file, known)
    ]


def test_imports_go_round_in_no_circle():
    left = {m: set(others) - {"jdist"} for m, others in graph().items()}
    while ends := [m for m, others in left.items() if not others & left.keys()]:
        for module in ends:
            del left[module]
    assert not left, f"a circle among {sorted(left)}"


def test_each_room_says_what_lives_there_and_what_it_may_import():
    for folder in sorted({f.parent for f in ROOT.rglob("*.py")} - {ROOT}):
        doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert 4 <= len(doc.splitlines()) <= 20, folder
        assert "May import" in doc, folder


def test_none_draws_from_the_programs_own_random_numbers():
    """A program that has seeded `random` or `np.random` is to get the same numbers, whatever threads wait how often."""
    # An import, the number of files that have it (else the search has gone blind), and uses of the shared generator.
    shared = {
        r"^import random$": (5, r"(?<![\w.])random\.(?!SystemRandom\b|Random\b)\w+"),
        r"np\.random": (2, r"np\.random\.(?!default_rng\b)[a-z]\w*"),
    }
    texts = {file: file.read_text() for file in ROOT.rglob("*.py")}
    for imports, (count, drawn) in shared.items():
        files = [file for file, text in texts.items() if re.search(imports, text, re.MULTILINE)]
        assert len(files) >= count
        assert not [file for file in files if re.search(drawn, texts[file])]
