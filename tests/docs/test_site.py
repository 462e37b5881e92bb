"""The manual as a site: it builds without a warning, and its pages work in a browser, offline."""

import functools
import html.parser
import http.server
import os
import re
import threading
import urllib.parse

import pytest
from helpers import ROOT
from helpers.browser import build_site, chromium

pytestmark = pytest.mark.slow

DESKTOP, PHONE = 1280, 375  # pixels
GENERATED = {"search.html"}  # without a text of its own; no page needs to lead to it
# What attributes load into a page, besides images and scripts; an `a` only leads elsewhere.
LOADING = {"stylesheet", "preload", "prefetch", "preconnect", "dns-prefetch", "icon"}
OUTSIDE = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")  # in a style sheet
WIDER = """
    Array.from(document.querySelectorAll("article.bd-article *"))
        .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
        .filter(each => !each.closest("pre, .pst-scrollable-table-container, .cell_output, table"))
        .map(each => each.tagName + "." + each.className + " " + each.textContent.slice(0, 40))
"""


class Page(html.parser.HTMLParser):
    """The ids and the links of a page, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values.get("id"), values.get("name")} - {None}
        if tag == "a" and values.get("href"):
            self.links.add(values["href"])
        if tag == "link" and LOADING & set((values.get("rel") or "").split()):
            self.loaded.add(values["href"])
        if tag != "a":
            self.loaded |= {values.get("src"), values.get("data-src")} - {None, ""}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    build_site(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """The pages of the site by their paths in it, without those that show sources."""
    others = {"_static", "_modules"}
    files = [file for file in site.rglob("*.html") if not others & set(file.parts)]
    return {str(file.relative_to(site)): Page(file.read_text()) for file in files}


def is_elsewhere(address):
    return bool(urllib.parse.urlsplit(address).netloc)


def inside(pages):
    """Yields each link to a place of the site: the page that has it, its path and its fragment."""
    for name, page in pages.items():
        for link in page.links | page.loaded:
            parts = urllib.parse.urlsplit(link)
            if not parts.scheme and not parts.netloc:
                path = os.path.normpath(os.path.join(os.path.dirname(name), parts.path))
                target = path if parts.path else name
                yield name, urllib.parse.unquote(target), urllib.parse.unquote(parts.fragment)


def test_every_page_of_the_manual_is_there(pages):
    sources = {
        str(source.relative_to(ROOT / "docs").with_suffix(".html"))
        for suffix in ("md", "ipynb")
        for source in (ROOT / "docs").rglob(f"*.{suffix}")
    }
    assert sources - {"description.html"} == pages.keys() - GENERATED


def test_every_link_of_the_site_leads_to_a_place_that_exists(site, pages):
    broken = []
    for name, target, fragment in inside(pages):
        there = (site / target).is_file()
        if there and fragment and target in pages:
            there = fragment in pages[target].ids
        if not there:
            broken.append(f"{name}: {target}#{fragment}")
    assert broken == []


def test_every_page_can_be_reached_from_the_first(pages):
    links = {name: set() for name in pages}
    for name, target, _ in inside(pages):
        links[name].add(target)
    reached, new = set(), {"index.html"}
    while new:
        reached |= new
        new = {each for name in new for each in links[name] & pages.keys()} - reached
    assert pages.keys() - reached <= GENERATED


def test_no_page_loads_anything_from_elsewhere(site, pages):
    loaded = {address for page in pages.values() for address in page.loaded}
    assert loaded and not [address for address in loaded if is_elsewhere(address)]
    for file in site.rglob("*.css"):
        assert not OUTSIDE.search(file.read_text()), file


def test_the_pages_are_one_text_too(site):
    index, text = ((site / f"llms{kind}.txt").read_text() for kind in ("", "-full"))
    assert "loss_scaling" in index and "jmpx.apply_policy(loss_fn," in text


def test_names_of_jmpx_lead_to_the_reference(pages):
    assert "reference/debugging.html#jmpx.inspect.audit" in pages["audit.html"].links
    assert "jmpx.inspect.audit" in pages["reference/debugging.html"].ids


def test_the_reference_shows_types_and_leads_to_the_source(site, pages):
    sources = {link for link in pages["reference/gradients.html"].links if "_modules/" in link}
    assert any("optimizer_update" in link for link in sources)
    assert "types.html#MixedPrecisionLike" in pages["reference/gradients.html"].links
    text = (site / "reference" / "storage.html").read_text()
    assert re.search(r"debias.{0,200}bool", text, re.DOTALL)


def test_the_first_page_has_the_contents_once_and_four_cards(site):
    text = (site / "index.html").read_text()
    assert len(re.findall(r'href="loss_scaling.html">Loss scaling</a>', text)) == 1
    cards = re.findall(r'class="sd-card-title[^>]*>\s*([^<]*?)\s*<', text)
    assert cards == ["Get started", "Choose a policy", "Find a NaN", "Coming from …"]


@pytest.fixture(scope="module")
def server(site):
    """The address of the site, served by this machine."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}/"
        served.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium."""
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


def test_pages_work_in_a_browser(server, browser, pages):
    """No page writes an error to the console, asks another host, or is wider than a phone."""
    wrong = []
    for name in sorted(pages):
        for width in (DESKTOP, PHONE):
            browser.open_page(server + name, width)
            at = f"{name} at {width} pixels"
            wrong += [f"{at}: {text}" for text in browser.complaints()]
            asked = browser.requests()
            assert asked[0] == server + name
            wrong += [f"{at}: asks {u}" for u in asked if not u.startswith((server, "data:"))]
            if browser.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wrong.append(f"{at}: is wider than the window")
            wrong += [f"{at}: is cut off: {text}" for text in browser.evaluate(WIDER)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("loss scale", "loss_scaling.html"),
        ("GradScaler", "loss_scaling.html"),
        ("autocast", "autocast.html"),
        ("NaN", "nonfinite.html"),
        ("telemetry", "production.html"),
        ("license", "production.html"),
        ("pickle", "production.html"),
        ("production", "production.html"),
        ("first_nonfinite", "reference/debugging.html"),
        ("optimizer_update", "reference/gradients.html"),
    ],
)
def test_the_search_finds_guides_and_names_first(server, browser, query, first):
    browser.open_page(server + "search.html?q=" + urllib.parse.quote(query))
    found = 'Array.from(document.querySelectorAll("#search-results li a")).map(each => each.href)'
    # Results come one after the other, in their order.
    browser.wait_for(f"{found}.length > 0 && !document.querySelector('.search-summary .dots')")
    assert urllib.parse.urlsplit(browser.evaluate(found)[0]).path == f"/{first}"
    assert browser.complaints() == []


def test_a_copied_program_has_no_prompts_and_no_output(server, browser):
    browser.open_page(server + "start.html")
    copied = browser.evaluate(
        """(() => {
            const copied = [];
            document.addEventListener(
                "copy", () => copied.push(document.activeElement.value), true);
            for (const button of document.querySelectorAll("div.highlight-python .copybtn"))
                button.click();
            return copied.join("\\n");
        })()"""
    )
    assert "import jmpx" in copied and "(True, 'float32'" not in copied
    assert not re.search(r"^(>>>|\.\.\.)", copied, re.MULTILINE)
    compile(copied, "start.md", "exec")


def test_a_tab_is_remembered_on_the_next_page(server, browser):
    shown = """Array.from(document.querySelectorAll(".sd-tab-set > input:checked + label"))
        .map(each => each.textContent.trim())"""
    browser.open_page(server + "train_step.html")
    assert set(browser.evaluate(shown)) == {"Haiku"}
    browser.evaluate("document.querySelector('label[data-sync-id=equinox]').click()")
    for page in ("train_step.html", "recurrent.html"):
        browser.open_page(server + page, PHONE)
        assert set(browser.evaluate(shown)) == {"Equinox"}


def test_a_phone_shows_the_first_programs_whole(server, browser):
    browser.open_page(server + "index.html", PHONE)
    widths = """Array.from(document.querySelectorAll(".jmpx-first pre"))
        .map(each => [each.scrollWidth, each.clientWidth])"""
    found = browser.evaluate(widths)
    assert len(found) == 2
    assert all(whole <= shown for whole, shown in found)


def test_the_theme_can_be_dark(server, browser):
    browser.open_page(server + "index.html")
    color = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(color)
    browser.evaluate("document.documentElement.dataset.theme = 'dark'")
    assert browser.evaluate(color) != light
