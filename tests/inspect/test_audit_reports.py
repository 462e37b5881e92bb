"""Reports of audits: how they print, when `check` fails, how findings merge."""

import dataclasses
import functools
import html
import json
import pickle
import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT
from helpers.findings_of import shape
from hypothesis import given, settings, strategies as st

import jmpx
from jmpx._base.messages import share_text
from jmpx._inspect.audit.api import KINDS, merged
from jmpx._inspect.audit.step import UntriedFinding

# Why private names: no program has all units, kinds of findings, and orders of them.
from jmpx._inspect.text import bytes_text, flop_text, short_names


def leaky(w, x):
    return jnp.mean(jnp.exp(x.astype(jnp.bfloat16)).astype(w.dtype) @ w)


REAL = jmpx.inspect.audit(leaky)(shape(3, 3), shape(3, 3))
Finding, Products = type(REAL.findings[0]), type(REAL.products[0])
assert REAL.findings[0].place is not None
Cast, Scope, Place = type(REAL.casts[0]), type(REAL.scopes[0]), type(REAL.findings[0].place)
SEVERITIES = ("high", "medium", "low")

# A report with each kind of row.

POLICY = "params=float32,compute=bfloat16,output=float32"
LEAK = Finding(
    "mixed-product",
    "high",
    "A matrix product multiplies float32 by bfloat16, because float32 positions were added.",
    Place("examples/equinox/vit.py", 88, "__call__"),
    "vit/blocks_0/attention",
    "*/blocks_0/attention: bf16",
    count=4,
    flops=3_210_000_000,
)
SAVED = Finding(
    "saved-float32",
    "medium",
    "A float32 value is saved for the backward pass, where bfloat16 would take half of it.",
    Place("examples/equinox/vit.py", 91, "__call__"),
    "vit/mlp",
    advice="call .astype(x.dtype) on it",
    nbytes=48 << 20,
)
EXP = Finding("low-exp", "low", "An exp in bfloat16 has 3 digits.", None, "", "op.exp: full")
REPORT = dataclasses.replace(
    REAL,
    title="loss_fn",
    products=(
        Products("bfloat16 x bfloat16", 9_000_000_000, 124),
        Products("float32 x bfloat16", 3_000_000_000, 48),
    ),
    saved={"bfloat16": 340 << 20, "float32": 48 << 20},
    casts=(Cast("float32", "bfloat16", 36, 88 << 20), Cast("bfloat16", "float32", 1, 20 << 20)),
    scopes=(
        Scope("", "", "", 12, "float32", 0),
        *(Scope(f"vit/blocks_{i}/norm", "LayerNorm", "", 9, "float32", 0) for i in range(12)),
        *(Scope(f"vit/blocks_{i}/mlp", "MLP", POLICY, 5, "bfloat16", 10**9) for i in range(12)),
    ),
    findings=(LEAK, SAVED, EXP),
)
CLEAN = dataclasses.replace(REPORT, findings=(), products=REPORT.products[:1])


def text_of(report=REPORT, **changes):
    return str(dataclasses.replace(report, **changes))


# Numbers.


def test_numbers_have_three_digits():
    flops = [0, 999, 1000, 12_345, 999_499, 999_500, 9_996 * 10**9, 10**24]
    assert ", ".join(map(flop_text, flops)) == (
        "0 FLOP, 999 FLOP, 1.00 kFLOP, 12.3 kFLOP, 999 kFLOP, 1.00 MFLOP, 10.0 TFLOP, 1000000 EFLOP"
    )
    nbytes = [0, 1023, 1024, (1 << 20) - 1, 1020 << 20, 5 << 30]
    assert ", ".join(map(bytes_text, nbytes)) == (
        "0 B, 1023 B, 1.00 KiB, 1.00 MiB, 1020 MiB, 5.00 GiB"
    )
    # Only all is 100 %, and only nothing is 0.
    shares = [(0, 0), (0, 5), (1, 10**6), (1, 3), (10**6 - 1, 10**6), (7, 7)]
    assert ", ".join(share_text(*share) for share in shares) == (
        "0.0 %, 0.0 %, <0.1 %, 33.3 %, >99.9 %, 100.0 %"
    )


UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@pytest.mark.thorough
@given(st.integers(0, 10**20))
def test_a_number_can_be_read_back(number):
    flops, unit = flop_text(number).removesuffix("FLOP").split(" ")
    assert float(flops) * 1000 ** UNITS[unit] == pytest.approx(number, rel=0.0051)
    nbytes, unit = bytes_text(number).removesuffix("B").split(" ")
    exponent = UNITS[unit.removesuffix("i").replace("K", "k")]
    assert float(nbytes) * 1024**exponent == pytest.approx(number, rel=0.0051)


@pytest.mark.parametrize(
    "policy",
    [
        "params=float32,compute=bfloat16,output=float32",
        "params=bfloat16,compute=float16,output=float16,matmul=highest,reduce=bfloat16",
        "params=float8_e4m3fn,compute=float16,output=float64",
    ],
)
def test_a_shortened_policy_is_the_same_policy(policy):
    short = short_names(policy)
    assert len(short) < len(policy) and jmpx.get_policy(short) == jmpx.get_policy(policy)


# Text.


def test_shares_come_first_then_findings_then_scopes():
    text = str(REPORT)
    starts = ["Audit of loss_fn", "Matrix products", "Saved for", "Written by"]
    starts += ["Findings: 1 high, 1 medium, 1 low", "high ", "medium ", "low ", "scope "]
    positions = [text.index(f"\n{start}") if text.find(start) else 0 for start in starts]
    assert positions == sorted(positions) and REPORT.to_text() == text
    rows = [line.split() for line in text.splitlines()]
    assert "bfloat16 x bfloat16 75.0 % 9.00 GFLOP 124 x".split() in rows
    assert all(whole in text for whole in ("12.0 GFLOP", "388 MiB", "108 MiB"))
    assert text.startswith("Audit of loss_fn and its gradient\n")
    assert "  bfloat16  87.6 %   340 MiB\n" in text  # saved values have no number of times
    # The rule, else the advice, has a line of its own.
    assert {LEAK.rule, SAVED.advice, EXP.rule} <= {line.strip() for line in text.splitlines()}


def test_a_partial_has_the_name_of_its_function():
    def train_step(optimizer, w):
        return (w @ w).sum()

    step = functools.partial(functools.partial(train_step, "adam"))
    report = jmpx.inspect.audit(step)(shape(2, 2))
    assert report.title == "train_step"


def test_what_a_report_says_of_its_program():
    step = text_of(is_step=True, platform="tpu", title="train_step")
    assert step.startswith("Audit of train_step on tpu\n")
    loops = text_of(has_while=True)
    assert "while loop" in loops and "counted for one trip" in loops and "while" not in str(REPORT)
    hidden = text_of(uncounted=("pallas_call", "ffi_call"))
    assert "Not counted: pallas_call, ffi_call, whose" in hidden
    assert "Not counted" not in str(REPORT)
    assert "\n\nNo findings.\n\n" in str(CLEAN) and "Findings:" not in str(CLEAN)
    nothing = text_of(CLEAN, products=(), saved={}, casts=(), scopes=())
    assert nothing.splitlines()[2:5] == [
        "Matrix products and convolutions: nothing",
        "Saved for the backward pass: nothing",
        "Written by casts: nothing",
    ]
    assert "scope" not in nothing


def test_what_is_left_out_is_counted_and_shown_on_request():
    names = [chr(ord("a") + i) for i in range(20)]
    report = dataclasses.replace(
        REPORT,
        findings=tuple(LEAK._replace(place=Place("m.py", line, "f")) for line in range(30)),
        scopes=tuple(Scope(name, "", "", 1, "float32", 0) for name in names),
        casts=tuple(Cast(name, "float32", 1, 8) for name in names),
    )
    text = str(report)
    assert text.count("m.py:") == 8 and "Findings: 30 high" in text
    for number, what in ((22, "findings"), (4, "rows"), (14, "rows")):  # of scopes, of casts
        assert f"... and {number} more {what}: print(report.to_text(all=True))" in text
    full = report.to_text(all=True)
    assert full.count("m.py:") == 30 and "more" not in full.replace("to_text", "")
    assert all(re.search(rf"^{name}  ", full, re.MULTILINE) for name in names)


def test_layers_that_are_alike_are_one_row_and_one_finding_and_others_are_not():
    alike = tuple(
        LEAK._replace(scope=f"vit/blocks_{i}/attention", rule=f"*/blocks_{i}/attention: bf16")
        for i in range(12)
    )
    other = LEAK._replace(scope="vit/blocks_3/attention", place=Place("m.py", 3, "f"))
    *rows, last = REPORT.scopes
    rows = (*rows, last._replace(dtypes="float32"))
    report = dataclasses.replace(REPORT, findings=(*alike, other), scopes=rows)
    text = str(report)
    assert "in vit/blocks_*/attention, 48 x, 38.5 GFLOP" in " ".join(text.split())
    assert "in vit/blocks_3/attention, 4 x, 3.21 GFLOP" in " ".join(text.split())
    assert "Findings: 2 high" in text
    (rule,) = re.findall(r"^ +(\S+/blocks_\*\S+: bf16)$", text, re.MULTILINE)
    rule = jmpx.get_policy_map(f"f32; {rule}").rules[0]
    assert all(rule.matches(int, finding.scope) for finding in alike)
    row = next(line for line in text.splitlines() if line.startswith("vit/blocks_*/mlp (MLP)"))
    assert row.split()[2:] == ["11", "x", "c=bf16,o=f32", "bf16", "55", "11.0", "GFLOP"]
    assert re.search(r"^vit/blocks_11/mlp \(MLP\) .* f32 ", text, re.MULTILINE)
    assert "vit/blocks_10/mlp (MLP)" in report.to_text(all=True)


def test_numbers_of_a_message_that_differ_are_a_range():
    text = text_of(
        findings=tuple(
            LEAK._replace(scope=f"blocks/{i}", message=f"It is {share}% of bfloat16, beyond 1,000.")
            for i, share in enumerate(("9.5", "12", "10.25"))
        )
    )
    assert "It is 9.5 to 12% of bfloat16, beyond 1,000." in text and "1 high" in text
    words = [LEAK._replace(message="It is 1 value."), LEAK._replace(message="It is 2 values.")]
    assert "2 high" in text_of(findings=tuple(words))


def test_a_long_rule_is_not_broken():
    rule = "*/" + "/".join(f"layer{i}" for i in range(20)) + ": compute=float32, matmul=highest"
    lines = text_of(findings=(LEAK._replace(rule=rule, message="word " * 99),)).splitlines()
    assert rule in [line.strip() for line in lines]
    assert 95 < max(len(line) for line in lines if "word" in line) <= 100


# Other forms.


def test_json_holds_everything_by_name():
    # Programs read these: other keys need another version.
    plain = REPORT.to_dict()
    assert plain["version"] == 7
    assert " ".join(plain) == (
        "version title is_step platform products saved casts scopes findings has_while uncounted "
        "eight_bits untried"
    )
    rows = {key: " ".join(rows[0]) for key, rows in plain.items() if rows and type(rows) is list}
    assert rows == {
        "products": "dtypes flops count",
        "casts": "source target count nbytes",
        "scopes": "path module policy operations dtypes flops",
        "findings": "name severity message place scope rule advice count flops nbytes before after",
    }
    for key in ("products", "casts", "scopes"):
        assert plain[key] == [row._asdict() for row in getattr(REPORT, key)]
    first, *_, last = plain["findings"]
    place = {"file": "examples/equinox/vit.py", "line": 88, "function": "__call__", "caller": None}
    assert first == LEAK._asdict() | {"place": place} and last == EXP._asdict()
    assert (plain["title"], plain["saved"], plain["uncounted"]) == ("loss_fn", REPORT.saved, [])
    assert plain == json.loads(REPORT.to_json()) == json.loads(REPORT.to_json(indent=None))
    # Numbers of NumPy are plain.
    report = dataclasses.replace(REPORT, saved={"float32": np.int64(2**40)})
    assert json.loads(json.dumps(report.to_dict()))["saved"]["float32"] == 2**40


def test_a_report_is_a_frozen_value_with_a_repr_of_one_line():
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT != CLEAN
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.title = "other"  # pyright: ignore[reportAttributeAccessIssue]
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
    assert shown == report.to_html() and evil not in shown
    texts = map(html.unescape, re.findall("<pre>(.*?)</pre>", shown, re.DOTALL))
    cells = [*map(html.unescape, re.findall("<t[hd]>(.*?)</t[hd]>", shown))]
    *blocks, table = report.to_text().split("\n\n")
    assert list(texts) == blocks and len(cells) == 2 * 6
    assert all(cell in table for cell in cells)


# `check`.

ALLOWED = ("mixed-product", "saved-float32", "low-exp")


def error(report, *args, **kwargs):
    with pytest.raises(AssertionError) as caught:
        report.check(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"allow": iter(ALLOWED)},
        {"allow": KINDS},
        {"compute": " BF16", "at_least": 0.75, "allow": ALLOWED},
        {"severity": "high", "allow": "mixed-product"},
        {"severity": "medium", "allow": ("mixed-product", "saved-float32")},
    ],
)
def test_passes_and_returns_the_report(arguments):
    assert REPORT.check(**arguments) is REPORT


def test_any_finding_fails_that_is_not_allowed_or_milder():
    assert CLEAN.check() is CLEAN
    text = error(REPORT)
    for finding in (LEAK, SAVED, EXP):
        assert finding.name in text and finding.message in " ".join(text.split())
        assert (finding.rule or finding.advice) in [line.strip() for line in text.splitlines()]
    assert "examples/equinox/vit.py:88 (__call__)" in text and "in vit/mlp" in text
    assert text.startswith("The audit of loss_fn failed.") and "FLOPs of" not in text
    text = error(REPORT, allow=("low-exp",))
    assert "low-exp" not in text and "saved-float32" in text
    text = error(REPORT, severity="high")
    assert "low-exp" not in text and "saved-float32" not in text
    assert text.endswith("allow=('mixed-product',).")


def test_too_small_a_share_names_all_shares():
    text = error(REPORT, "bfloat16", at_least=0.9, allow=ALLOWED)
    assert (
        "75 % of the FLOPs of matrix products and convolutions are bfloat16, expected at least "
        "90 %:\n  bfloat16 x bfloat16: 75.0 %\n  float32 x bfloat16: 25.0 %" in text
    )
    assert "Findings" not in text
    both = error(REPORT, "bfloat16")
    assert "expected at least 95 %" in both and LEAK.message in " ".join(both.split())
    # A product of two dtypes counts for neither.
    mixed = dataclasses.replace(CLEAN, products=(Products("float32 x bfloat16", 8, 1),))
    assert all("0 % of the FLOPs" in error(mixed, dtype) for dtype in ("bfloat16", "float32"))
    nothing = dataclasses.replace(CLEAN, products=())
    assert nothing.check() is nothing.check("bfloat16", at_least=0) is nothing


@given(st.integers(1, 10**15), st.integers(0, 10**15), st.floats(0, 1))
def test_fails_if_the_share_is_smaller(bfloat16, float32, at_least):
    products = (
        Products("bfloat16 x bfloat16", bfloat16, 1),
        Products("float32 x float32", float32, 1),
    )
    report = dataclasses.replace(CLEAN, products=products)
    if bfloat16 >= at_least * (bfloat16 + float32):
        assert report.check("bfloat16", at_least=at_least) is report
    else:
        text = error(report, "bfloat16", at_least=at_least)
        shown = re.search(r"([\d.]+) % of the FLOPs", text)
        assert shown and float(shown[1]) / 100 <= bfloat16 / (bfloat16 + float32)


# Kinds of findings, and how findings merge.


def test_the_page_of_audits_has_every_kind_of_finding():
    page = (ROOT / "docs" / "findings.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == list(KINDS)
    assert all(len(what) > 10 and len(advice) > 20 for _, what, advice in rows)


FINDINGS = st.builds(
    Finding,
    name=st.sampled_from(["promotion", "low-exp"]),
    severity=st.sampled_from(SEVERITIES),
    message=st.sampled_from(["one", "other"]),
    place=st.sampled_from([None, Place("a.py", 1, "f"), Place("a.py", 2, "f")]),
    scope=st.sampled_from(["", "net/head"]),
    rule=st.just("*/head: f32"),
    count=st.integers(1, 3),
    flops=st.integers(0, 3),
    nbytes=st.integers(0, 3),
)


@settings(max_examples=50)
@given(st.lists(FINDINGS))
def test_findings_are_merged_by_name_place_and_scope_and_sorted_by_severity_and_size(findings):
    key = lambda each: (each.name, each.place, each.scope)  # noqa: E731
    found = [UntriedFinding(each, [], ()) for each in findings]
    result = [each.finding for each in merged(found)]
    assert {key(each) for each in result} == {key(each) for each in findings}
    assert len(result) == len({key(each) for each in result})
    for each in result:
        group = [finding for finding in findings if key(finding) == key(each)]
        worst = min(SEVERITIES.index(finding.severity) for finding in group)
        assert SEVERITIES.index(each.severity) == worst
        for field in ("count", "flops", "nbytes"):
            assert getattr(each, field) == sum(getattr(finding, field) for finding in group)
    ranks = [(SEVERITIES.index(each.severity), -each.flops, -each.nbytes) for each in result]
    assert ranks == sorted(ranks)
