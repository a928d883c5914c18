"""What the site is built from, `docs/site/gather.py`, and the public address, `docs/site/set_address.py`."""

import functools
import importlib.util
import re
import shutil
import tomllib
from pathlib import Path

import griffe
import nbformat
import pytest
import yaml

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs/site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gather(tmp_path, monkeypatch):
    module = script("gather")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "SITE", tmp_path / "build/docs")
    (tmp_path / "docs/guides").mkdir(parents=True)
    (tmp_path / "docs/index.md").write_text("[why](../NOTES.md#then), [a](guides/a.md), [there](https://x.org/a.md)")
    (tmp_path / "docs/guides/a.md").write_text("[the code](../../code/a.py)")
    (tmp_path / "NOTES.md").write_text("[a](docs/guides/a.md), [the code](code/a.py)")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("1")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nnav:\n  - First: index.md\n  - guides/a.md\n")
    return module


def test_files_outside_of_docs_come_along_and_links_lead_to_them(gather):
    gather.main()
    texts = {str(path.relative_to(gather.SITE)): path.read_text() for path in gather.SITE.rglob("*.*")}
    assert texts == {
        "index.md": "[why](outside/NOTES.md#then), [a](guides/a.md), [there](https://x.org/a.md)",
        "guides/a.md": "[the code](../outside/code/a.py)",
        "outside/NOTES.md": "[a](../guides/a.md), [the code](code/a.py)",
        "outside/code/a.py": "1",
    }


def test_a_page_may_hold_a_file_and_the_keys_of_configs(gather):
    (gather.ROOT / "docs/index.md").write_text("<!-- file code/a.py -->\n\n<!-- config keys -->\n")
    gather.main()
    text = (gather.SITE / "index.md").read_text()
    assert text.startswith("```py\n1\n```")
    assert "| `train.clip_norm` | `float > 0 or null` | `null` | Scale gradients" in text
    assert "| `strategy.communication.start_timeout_s` | `float` | `300.0` |" in text


def test_a_page_that_the_navigation_lacks_is_named(gather):
    (gather.ROOT / "docs/guides/b.md").write_text("alone")
    with pytest.raises(SystemExit, match=r"not in the navigation of mkdocs\.yml: guides/b\.md"):
        gather.main()


@pytest.fixture
def set_address(tmp_path):
    for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, tmp_path / "notebooks")
    return functools.partial(script("set_address").main, root=tmp_path)


def test_a_public_address_comes_to_wherever_it_belongs(set_address, tmp_path):
    before = (tmp_path / "README.md").read_text()
    set_address("https://github.com/someone/jdist.git")
    address = "https://github.com/someone/jdist"
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Source"] == address
    assert project["scripts"] == {"jdist": "jdist.cli.main:main"}
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["repository-code"] == address
    assert yaml.safe_load((tmp_path / "mkdocs.yml").read_text())["repo_url"] == address
    readme = (tmp_path / "README.md").read_text()
    assert f'pip install "jdist @ git+{address}"' in readme
    assert f"]({address}/raw/main/docs/drawings/overview.svg)" in readme
    links = re.findall(rf"\]\({address}/(?:raw|blob)/main/([^)]+)\)", readme)
    assert len(links) == len(re.findall(r"\]\((?!https?:)", before)) > 30
    assert all((ROOT / link).exists() for link in links)
    assert not re.search(r"\]\((?!https?:)", readme)
    for path in (tmp_path / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert (
            f"(https://colab.research.google.com/github/someone/jdist/blob/main/notebooks/{path.name})"
            in notebook.cells[0].source
        )
        assert notebook.cells[1].source.count(f'SOURCE = "git+{address}"') == 1
        assert "# elsewhere" not in notebook.cells[1].source
        assert (
            notebook.metadata["sources_sha256"]
            != nbformat.read(ROOT / "notebooks" / path.name, 4).metadata["sources_sha256"]
        )


@pytest.mark.parametrize("address", ["jdist", "https://gitlab.com/someone/jdist", "https://github.com/someone"])
def test_an_address_that_colab_cannot_open_is_refused(address, set_address, tmp_path):
    with pytest.raises(SystemExit, match="not an address such as"):
        set_address(address)
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_an_address_is_set_once(set_address):
    set_address("https://github.com/someone/jdist")
    with pytest.raises(SystemExit, match="an address is set already"):
        set_address("https://github.com/else/jdist")


@pytest.fixture(scope="module")
def api():
    """Every name of the API pages, as the site reads it."""
    extensions = griffe.load_extensions(str(ROOT / "docs/site/griffe_extensions.py"))
    package = griffe.load("jdist", search_paths=[ROOT], extensions=extensions, resolve_aliases=True)
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    return {name: package[name.removeprefix("jdist.")] for name in re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)}


@pytest.mark.parametrize("name", ["jdist.distribute", "jdist.nnx.distribute"])
def test_the_options_of_a_decorator_are_shown_one_by_one(api, name):
    shown = {p.name: (str(p.annotation), p.default) for p in api[name].parameters}
    assert shown["accumulate"] == ("int", "1")
    assert "options" not in shown
    described = [line.split(":")[0].strip() for line in api[name].docstring.value.splitlines()]
    assert set(shown) <= set(described)


def test_types_are_written_as_in_code(api):
    shown = {p.name: str(p.annotation) for p in api["jdist.parameter_server"].parameters}
    assert (shown["insecure"], shown["mode"]) == ("bool", "Literal['async', 'sync']")
    assert not [name for name, annotation in shown.items() if "<" in annotation or "typing." in annotation]


def test_examples_in_a_module_behind_its_function_are_examples(api):
    assert "Examples:" in api["jdist.reduction.to_one_device"].docstring.value


def test_a_function_is_shown_rather_than_its_module(api):
    assert [name for name, shown in api.items() if shown.is_module] == ["jdist.errors"]
    assert api["jdist.reduction.bucketed"].is_function


def test_every_parameter_has_its_type(api):
    functions = {name: shown for name, shown in api.items() if shown.is_function or shown.is_class}
    bare = [(name, p.name) for name, shown in functions.items() for p in shown.parameters if not p.annotation]
    assert {parameter for _, parameter in bare} <= {"self", "cls"}
    assert len(functions) > 150


def shown_members(path, shown, options):
    """Yields an object and the members that its page shows, by path: those with a docstring."""
    shown = shown.final_target if shown.is_alias else shown
    yield path, shown
    members = shown.all_members if options.get("inherited_members") else shown.members
    hidden = [each.removeprefix("!") for each in options.get("filters", ["!^_[^_]"])]
    for name, member in members.items() if shown.is_class or shown.is_module else ():
        is_own = not member.is_alias or member.inherited
        if is_own and member.has_docstring and not any(re.search(each, name) for each in hidden):
            yield from shown_members(f"{path}.{name}", member, options)


def described_parameters(shown):
    sections = shown.docstring.parse("google", warnings=False) if shown.docstring else []
    listed = [section.value for section in sections if section.kind.value in ("parameters", "attributes")]
    if shown.is_class:
        listed.append([attribute for attribute in shown.attributes.values() if attribute.docstring])
    names = {e.name.lstrip("*") for entries in listed for e in entries if getattr(e, "description", True)}
    if shown.parent.is_class and sections:  # the first paragraph of a method may name its arguments
        names |= set(re.findall(r"`\**(\w+)`", shown.docstring.value.partition("\n\n")[0]))
    return names


def test_every_parameter_has_its_description(api):
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    options = dict(re.findall(r"^::: ([\w.]+)\n    options:\n((?:      .+\n?)+)", pages, re.MULTILINE))
    assert len(options) > 3
    bare, count = [], 0
    for name, shown in api.items():
        for path, each in shown_members(name, shown, yaml.safe_load(options.get(name, "{}"))):
            if each.is_function or each.is_class:
                wanted = {p.name.lstrip("*") for p in each.parameters} - {"self", "cls"}
                bare += [f"{path}: {p}" for p in wanted - described_parameters(each)]
                count += len(wanted)
    assert not bare, "write an `Args` entry for " + ", ".join(sorted(bare))
    assert count > 400
