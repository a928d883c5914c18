"""What the site is built from: `docs/site/gather.py`, whose result `make docs` gives to Zensical."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gather(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gather", ROOT / "docs/site/gather.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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


def test_a_page_that_the_navigation_lacks_is_named(gather):
    (gather.ROOT / "docs/guides/b.md").write_text("alone")
    with pytest.raises(SystemExit, match=r"not in the navigation of mkdocs\.yml: guides/b\.md"):
        gather.main()
