"""Versions of the site side by side, and the address of the repository in it."""

import contextlib
import importlib
import re
import shutil
import sys
import time

import pytest
from helpers import ROOT
from helpers.browser import build_site, chromium

sys.path.append(str(ROOT / "docs" / "_ext"))
versions = importlib.import_module("versions")

URL = "https://example.org/someone/jmpx"
PAGES = {
    "index": "# First\n\n[more](more.md)\n",
    "more": "# More\n\nSee [the training](../examples/train.py) and [examples](../examples/).\n",
    "project/contributing": "# Contributing\n\n[first](../index.md)\n",
}


def make_versions(folder, names):
    for name in names:
        (folder / name / "_static").mkdir(parents=True)
        (folder / name / "index.html").touch()
    (folder / "unrelated").mkdir()


def test_the_first_page_leads_to_the_newest_version(tmp_path):
    make_versions(tmp_path, ("0.3", "0.10", "0.9"))
    (tmp_path / "0.10" / "more.html").touch()
    assert versions.join(tmp_path) == ["0.10", "0.9", "0.3"]
    assert 'url=0.10/index.html"' in (tmp_path / "index.html").read_text()
    text = (tmp_path / "0.3" / "_static" / "versions.js").read_text()
    assert '"0.10": ["index.html", "more.html"], "0.9": ["index.html"]' in text
    assert versions.join(tmp_path) == ["0.10", "0.9", "0.3"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A few pages, built as the manual is, with the address of a repository in setup.cfg."""
    root = tmp_path_factory.mktemp("repository")
    setup = (ROOT / "setup.cfg").read_text()
    (root / "setup.cfg").write_text(setup.replace("[metadata]\n", f"[metadata]\nurl = {URL}\n"))
    (root / "examples").mkdir()
    (root / "examples" / "train.py").touch()
    for part in ("conf.py", "_ext", "_static"):
        whole = ROOT / "docs" / part
        copy = shutil.copytree if whole.is_dir() else shutil.copy
        (root / "docs").mkdir(exist_ok=True)
        copy(whole, root / "docs" / part)
    for page, text in PAGES.items():
        file = root / "docs" / f"{page}.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    build_site(root, root / "site")
    return root / "site"


@pytest.mark.slow
def test_files_and_a_button_lead_to_the_repository(site):
    text = (site / "more.html").read_text()
    links = set(re.findall(rf'href="({URL}[^"]*)"', text))
    assert links == {URL, f"{URL}/blob/main/examples/train.py", f"{URL}/tree/main/examples"}


def wait_for_page(browser, end):
    """Waits until a page has followed another one; in between there is none to ask."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(RuntimeError):
            shown = browser.evaluate("[location.href, document.readyState]")
            if shown[0].endswith(end) and shown[1] == "complete":
                return
        time.sleep(0.05)
    raise TimeoutError(f"The browser did not arrive at {end}.")


@pytest.mark.slow
def test_a_reader_switches_between_versions(site, tmp_path):
    for name in ("0.3", "0.4"):
        shutil.copytree(site, tmp_path / "sites" / name)
    (tmp_path / "sites" / "0.4" / "more.html").unlink()
    shown = """Array.from(document.querySelectorAll(".version-switcher option"))
        .map(each => each.text + (each.selected ? "*" : ""))"""
    switch = """(() => {
        const select = document.querySelector(".version-switcher");
        select.value = "0.4";
        setTimeout(() => select.dispatchEvent(new Event("change")), 50);
    })()"""
    at = (tmp_path / "sites" / "0.3").as_uri()
    with chromium(tmp_path / "profile") as browser:
        browser.open_page(f"{at}/index.html")
        assert browser.evaluate(shown) == [] and browser.complaints() == []
        versions.join(tmp_path / "sites")
        for page, target in (("project/contributing", "project/contributing"), ("more", "index")):
            browser.open_page(f"{at}/{page}.html")
            assert browser.evaluate(shown) == ["0.4 (latest)", "0.3*"]
            browser.evaluate(switch)
            wait_for_page(browser, f"/0.4/{target}.html")
            assert browser.complaints() == []
