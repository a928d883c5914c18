"""The site in a real browser, as wide as a laptop and as a phone: the only test that runs its scripts and styles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.browser import HEIGHTS, NAMES, find_chromium, open_tab, serve

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/site"
WIDER_THAN_ITS_WINDOW = """[...document.querySelectorAll("html, .md-typeset__scrollwrap")]
    .filter(element => element.scrollWidth > element.clientWidth + 1).map(element => element.innerText.slice(0, 80))"""
# Of a page: its title, what is too wide, images that are missing or too small to read, headings that skip a level.
LOOK = f"""document.fonts.ready.then(() => ({{
    title: document.querySelector("article h1")?.innerText,
    width: innerWidth,
    wide: {WIDER_THAN_ITS_WINDOW},
    images: [...document.images].filter(image => !image.naturalWidth || image.width < 600).map(image => image.src),
    headings: [...document.querySelectorAll("article :is(h1, h2, h3, h4, h5, h6)")]
        .filter((heading, i, all) => heading.tagName[1] > 1 + Number(all[i - 1]?.tagName[1] ?? 0))
        .map(heading => heading.innerText),
}}))"""
RESULTS = "[...document.activeElement.shadowRoot.querySelectorAll('a')].map(link => link.href)"

pytestmark = pytest.mark.xdist_group("site")  # one process builds it


@pytest.fixture(scope="module")
def site():
    """The address of the site, built as `make docs` builds it."""
    subprocess.run([sys.executable, "docs/site/gather.py"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=True)
    with serve(SITE) as address:
        yield address


@pytest.fixture(scope="module")
def tab():
    if (chromium := find_chromium()) is None:
        missing = f"no browser: none of {', '.join(NAMES)} is on the PATH"
        if "JDIST_BROWSER" in os.environ:  # set by .ci/run, which installs one
            pytest.fail(missing)
        pytest.skip(missing)
    with open_tab(chromium) as tab:
        yield tab


def test_every_page_fits_its_window_without_errors(tab, site):
    pages = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    faults = {}
    for page in pages:
        tab.open(f"{site}/{page}", 1280)
        for width in HEIGHTS:
            tab.resize(width)
            tab.run("new Promise(requestAnimationFrame)")  # tables.js has met the new width
            found = tab.run(LOOK) | {"errors": tab.errors()}
            assert found.pop("title")
            assert found.pop("width") == width
            faults |= {f"{page}, {width} px, {kind}": places for kind, places in found.items() if places}
    assert len(pages) > 80
    assert not faults


def test_messages_wrap_and_columns_of_output_do_not(tab, site):
    tab.open(f"{site}/plan.html", 390)
    code = "document.querySelector('.language-text code')"
    assert tab.run(f"getComputedStyle({code}).whiteSpace") == "pre"
    tab.open(f"{site}/troubleshooting/step.html", 390)
    assert tab.run(f"getComputedStyle({code}).whiteSpace") == "pre-wrap"


@pytest.mark.parametrize("width", HEIGHTS)
def test_the_search_finds_how_to_install_for_a_gpu(tab, site, width):
    tab.open(f"{site}/index.html", width)
    tab.run("document.querySelector('.md-search__button').click()")
    tab.wait_for("document.activeElement.shadowRoot?.activeElement?.matches('input')")
    tab.call("Input.insertText", text="install gpu")
    links = tab.wait_for(f"{RESULTS}.length > 0 && {RESULTS}")
    assert f"{site}/index.html?h=install+gpu#install" in links[:3]
    assert not tab.errors()


def test_a_wide_heading_and_an_error_are_noticed(tab, site):
    tab.open(f"{site}/index.html", 390)
    tab.run("document.querySelector('h1').style.width = '2000px'; console.error('broken')")
    assert tab.run(WIDER_THAN_ITS_WINDOW)
    assert tab.errors() == ["broken"]
