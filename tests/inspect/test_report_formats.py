"""Reports as JSON and as HTML, and as frozen data."""

import copy
import dataclasses
import html.parser
import json
import pickle

import numpy as np
import pytest
from helpers.reports import CLEAN, LEAK, REPORT

from jmpx._inspect.audit.data import Cast, Entry, Finding, Products, Scope
from jmpx._inspect.audit.report import Audit
from jmpx._jaxprs.places import Place

VOID = {"br", "hr", "img", "meta", "link", "input"}


def rebuilt(plain):
    """Returns the report that JSON was made of."""
    fields = {key: value for key, value in plain.items() if key != "version"}

    def placed(cls, items):
        places = [item["place"] and Place(**item["place"]) for item in items]
        return tuple(cls(**{**i, "place": p}) for i, p in zip(items, places, strict=True))

    for key, cls in (("products", Products), ("casts", Cast), ("scopes", Scope)):
        fields[key] = tuple(cls(**item) for item in fields[key])
    for key, cls in (("findings", Finding), ("entries", Entry)):
        fields[key] = placed(cls, fields[key])
    return Audit(**{**fields, "uncounted": tuple(fields["uncounted"])})


@pytest.mark.parametrize("report", [REPORT, CLEAN, dataclasses.replace(REPORT, platform="tpu")])
def test_json_holds_everything(report):
    plain = report.to_dict()
    read = json.loads(report.to_json())
    assert read == json.loads(report.to_json(indent=None))
    assert read == plain and rebuilt(read) == report
    assert json.dumps(plain) == json.dumps(copy.deepcopy(report).to_dict())


def test_the_keys_of_json():
    # Programs read these: other keys need another version.
    plain = REPORT.to_dict()
    assert plain["version"] == 2
    assert list(plain) == [
        *("version", "title", "is_step", "platform", "products", "other_flops", "saved", "casts"),
        *("scopes", "findings", "entries", "has_while", "uncounted"),
    ]
    assert {
        key: list(plain[key][0]) for key in plain if isinstance(plain[key], list) and plain[key]
    } == {
        "products": ["dtypes", "flops", "count"],
        "casts": ["source", "target", "count", "nbytes"],
        "scopes": ["path", "module", "policy", "operations", "dtypes", "flops"],
        "findings": [
            *("name", "severity", "message", "place", "scope", "rule", "count", "flops", "nbytes"),
        ],
        "entries": ["scope", "operation", "dtypes", "place"],
    }
    assert list(plain["findings"][0]["place"]) == ["file", "line", "function", "caller"]


def test_numbers_of_numpy_are_plain_in_json():
    flops = np.int64(2**40)
    report = dataclasses.replace(REPORT, other_flops=flops, saved={"float32": flops})
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["other_flops"] == plain["saved"]["float32"] == 2**40


def test_a_report_is_a_frozen_value():
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT != CLEAN
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.title = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_its_repr_is_one_line():
    assert repr(REPORT) == (
        "<Audit of loss_fn: 12.0 GFLOP of products, 75.0 % bfloat16 x bfloat16, 1 high, 1 medium, "
        "1 low>"
    )
    nothing = dataclasses.replace(CLEAN, products=())
    assert repr(nothing) == "<Audit of loss_fn: no products, no findings>"


class Page(html.parser.HTMLParser):
    """Reads HTML: its text, its tags, and whether each is closed."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_is_whole_and_says_what_the_text_says():
    page = Page(REPORT._repr_html_())
    text = " ".join(page.texts)
    for shown in ("75.0 %", "9.00 GFLOP", "388 MiB", "Findings: 1 high, 1 medium, 1 low", "12 x"):
        assert shown in text
    for finding in REPORT.findings:
        assert finding.message in page.texts and finding.rule in page.texts
    for scope in REPORT.scopes:
        assert any(scope.path in each for each in page.texts)
    assert "Audit of loss_fn and its gradient" in page.texts


@pytest.mark.parametrize("report", [REPORT, CLEAN, dataclasses.replace(CLEAN, scopes=(), saved={})])
def test_html_needs_nothing_from_elsewhere(report):
    page = Page(report._repr_html_())
    assert not {"script", "link", "img", "iframe", "style", "object"} & set(page.tags)
    assert {name for name, _ in page.attributes} <= {"style", "colspan"}
    assert not any("url(" in value for _, value in page.attributes)


def test_html_has_no_colors_that_only_fit_light_or_dark_pages():
    for declaration in ";".join(v for _, v in Page(REPORT._repr_html_()).attributes).split(";"):
        name, _, value = declaration.partition(":")
        if name in ("color", "background"):
            # White is the text of a badge, which brings its own background.
            assert (
                value in ("inherit", "none", "#fff")
                or "rgba(" in value
                or value.startswith(("#d93025", "#b06000", "#5f6368"))
            )


def test_html_is_escaped():
    evil = "<script>alert('&')</script>"
    report = dataclasses.replace(
        REPORT,
        title=evil,
        platform=evil,
        products=(Products(evil, 1, 1),),
        saved={evil: 1},
        casts=(Cast(evil, evil, 1, 1),),
        scopes=(Scope(evil, evil, evil, 1, evil, 1),),
        findings=(
            LEAK._replace(message=evil, rule=evil, scope=evil, place=Place(evil, 1, evil)),
            LEAK._replace(name=evil, severity=evil),
        ),
    )
    page = Page(report._repr_html_())
    assert "script" not in page.tags and "".join(page.texts).count(evil) >= 12


def test_many_findings_unfold():
    findings = tuple(LEAK._replace(place=Place("m.py", line, "f")) for line in range(30))
    page = Page(dataclasses.replace(REPORT, findings=findings)._repr_html_())
    assert "22 more findings" in page.texts and page.tags.count("details") == 3
    assert all(any(f"m.py:{line} (f)" in text for text in page.texts) for line in range(30))
