"""One version everywhere, a changelog by kind, and a release workflow that publishes only what it has checked."""

import re
import tomllib
from pathlib import Path

import yaml

import jdist

ROOT = Path(__file__).parent.parent
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def workflow(name: str) -> dict:
    text = (ROOT / ".github/workflows" / f"{name}.yml").read_text()
    return yaml.load(text, yaml.BaseLoader)  # which keeps `on` a word


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", CHANGELOG, re.MULTILINE)[0]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert {jdist.__version__, newest, cited} == {project["version"]}


def test_the_changelog_lists_changes_by_kind():
    for section in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds], section.splitlines()[0]


def test_the_first_version_is_read_on_one_page():
    (first,) = re.findall(r"^## \[0\.1\.0\].*", CHANGELOG, re.MULTILINE | re.DOTALL)
    assert len(first.splitlines()) <= 60


def test_a_version_is_published_after_all_checks_and_on_a_tag_alone():
    release = workflow("release")
    jobs = release["jobs"]
    assert release["on"]["push"] == {"tags": ["v*"]}
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    assert "workflow_call" in workflow("test")["on"]
    publish = jobs["publish"]
    assert (publish["if"], sorted(publish["needs"])) == ("github.ref_type == 'tag'", ["install", "test"])
    writes = [name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()]
    assert (release["permissions"], writes) == ({"contents": "read"}, ["publish"])
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["install"]["strategy"]["matrix"]["python"] == supported
