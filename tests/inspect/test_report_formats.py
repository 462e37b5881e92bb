"""Reports as JSON, in notebooks, and as frozen data."""

import copy
import dataclasses
import html
import json
import pickle

import numpy as np
import pytest
from helpers.reports import CLEAN, REPORT

from jmpx._inspect.audit.data import Cast, Finding, Products, Scope
from jmpx._inspect.audit.report import Audit
from jmpx._jaxprs.places import Place


def rebuilt(plain):
    """Returns the report that JSON was made of."""
    fields = {key: value for key, value in plain.items() if key != "version"}

    for key, cls in (("products", Products), ("casts", Cast), ("scopes", Scope)):
        fields[key] = tuple(cls(**item) for item in fields[key])
    places = [item["place"] and Place(**item["place"]) for item in fields["findings"]]
    fields["findings"] = tuple(
        Finding(**{**item, "place": place})
        for item, place in zip(fields["findings"], places, strict=True)
    )
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
    assert plain["version"] == 4
    assert list(plain) == [
        *("version", "title", "is_step", "platform", "products", "saved", "casts"),
        *("scopes", "findings", "has_while", "uncounted"),
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
    }
    assert list(plain["findings"][0]["place"]) == ["file", "line", "function", "caller"]


def test_numbers_of_numpy_are_plain_in_json():
    flops = np.int64(2**40)
    report = dataclasses.replace(REPORT, saved={"float32": flops})
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["saved"]["float32"] == 2**40


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


def test_a_notebook_shows_the_text():
    evil = "<script>alert('&')</script>"
    report = dataclasses.replace(REPORT, title=evil, scopes=(Scope(evil, evil, "", 1, evil, 1),))
    shown = report._repr_html_()
    assert shown.startswith("<pre>") and shown.endswith("</pre>") and evil not in shown
    assert html.unescape(shown[5:-6]) == report.to_text()
