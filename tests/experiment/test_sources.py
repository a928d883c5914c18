import importlib
import os
import sys
from types import ModuleType

from jdist.experiment.record import changed_sources, digest, folder_sources, task_sources


def test_a_task_of_a_package_is_all_that_was_loaded_of_it(tmp_path, monkeypatch):
    inner = tmp_path / "a_package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("")
    (inner / "task.py").write_text("def make(): ...\n")
    (inner / "not_loaded.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import a_package.inner.task  # noqa: F401

    found = task_sources("a_package.inner.task:make")
    assert list(found) == ["a_package/__init__.py", "a_package/inner/__init__.py", "a_package/inner/task.py"]
    for name in [name for name in sys.modules if name.startswith("a_package")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_module_beside_the_task_is_of_its_source_and_what_is_installed_there_is_not(tmp_path, monkeypatch):
    files = ["c_task", "c_helper", "lib/c_below", "c_not_loaded", ".venv/site-packages/c_installed", "c_main"]
    for file in files:
        path = tmp_path / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for folder in (tmp_path / ".venv/site-packages", tmp_path / "lib", tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    for name in ("c_task", "c_helper", "c_below", "c_installed"):
        importlib.import_module(name)
    program = ModuleType("__main__")
    program.__file__ = str(tmp_path / "c_main.py")
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert list(task_sources("c_task:make")) == ["c_helper.py", "c_task.py", "lib/c_below.py"]
    assert list(task_sources("c_installed:make")) == ["c_installed.py"]  # with nothing of the other packages there

    copies = tmp_path / "copies"
    (copies / "lib").mkdir(parents=True)
    for name in ("c_helper.py", "c_task.py", "lib/c_below.py"):
        (copies / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert changed_sources("c_task:make", copies) == []
    (tmp_path / "c_helper.py").write_text("SCALE = 2\n")
    (tmp_path / "lib/c_below.py").unlink()
    assert changed_sources("c_task:make", copies) == ["c_helper.py", "lib/c_below.py"]
    for name in ("c_task", "c_helper", "c_below", "c_installed"):
        monkeypatch.delitem(sys.modules, name)


def test_a_task_above_jdist_and_python_does_not_take_them_along(monkeypatch):
    task = ModuleType("d_task")
    task.__file__ = os.path.join(os.path.sep, "d_task.py")
    task.__spec__ = importlib.machinery.ModuleSpec("d_task", None, origin=task.__file__)
    monkeypatch.setitem(sys.modules, "d_task", task)
    found = [path.parts for path in task_sources("d_task:make").values()]
    assert not [parts for parts in found if "jdist" in parts[:-1] or "site-packages" in parts or "json" in parts]


def test_a_file_that_was_changed_or_is_gone_is_named(tmp_path, monkeypatch):
    for root in ("there", "copies"):
        folder = tmp_path / root / "b_package"
        folder.mkdir(parents=True)
        for name in ("__init__", "same", "changed", "gone"):
            (folder / f"{name}.py").write_text("")
    (tmp_path / "there/b_package/changed.py").write_text("raise SystemExit  # it is not imported\n")
    (tmp_path / "there/b_package/gone.py").unlink()
    (tmp_path / "there/b_package/new.py").write_text("")
    monkeypatch.chdir(tmp_path / "there")
    copies = tmp_path / "copies"
    assert changed_sources("b_package.changed:make", copies) == ["b_package/changed.py", "b_package/gone.py"]
    assert changed_sources("no_such_package:make", tmp_path / "none") == []
    (copies / "alone.py").write_text("1")
    (tmp_path / "there/alone.py").write_text("2")
    assert "alone.py" in changed_sources("alone:make", copies)


def test_what_comes_with_jdist_is_in_its_own_digest():
    assert task_sources("jdist.tasks.digits:make") == {}
    assert digest({}) == ""


def test_a_digest_changes_with_content_and_names_and_not_with_the_place(tmp_path):
    for folder, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(text)
    a, b, c = (folder_sources(tmp_path / folder) for folder in "abc")
    assert digest(a) == digest(b) != digest(c)
    assert digest(a) != digest({"y.py": a["x.py"]})
