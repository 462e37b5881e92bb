"""Reports as text: units, order, widths, what is left out, layers that are alike."""

import dataclasses
import re

import pytest
from helpers.reports import CLEAN, EXP, LEAK, REPORT, SAVED
from hypothesis import given, strategies as st

import jmpx
from jmpx._base.text import bytes_text, flop_text, share_text, short_names
from jmpx._inspect.audit.alike import alike_findings
from jmpx._inspect.audit.data import Cast, Scope
from jmpx._jaxprs.places import Place


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (1000, "1.00 kFLOP"),
        (12_345, "12.3 kFLOP"),
        (999_499, "999 kFLOP"),
        (999_500, "1.00 MFLOP"),
        (4_100_000_000, "4.10 GFLOP"),
        (9_996_000_000_000, "10.0 TFLOP"),
        (99_960_000_000_000, "100 TFLOP"),
        (10**24, "1000000 EFLOP"),
    ],
)
def test_flops_have_three_digits(flops, text):
    assert flop_text(flops) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (340 << 20, "340 MiB"),
        (1020 << 20, "1020 MiB"),
        (5 << 30, "5.00 GiB"),
    ],
)
def test_bytes_are_in_powers_of_1024(nbytes, text):
    assert bytes_text(nbytes) == text


UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@given(st.integers(0, 10**20))
def test_a_number_can_be_read_back(number):
    flops, unit = flop_text(number).removesuffix("FLOP").split(" ")
    assert float(flops) * 1000 ** UNITS[unit] == pytest.approx(number, rel=0.0051)
    nbytes, unit = bytes_text(number).removesuffix("B").split(" ")
    exponent = UNITS[unit.removesuffix("i").replace("K", "k")]
    assert float(nbytes) * 1024**exponent == pytest.approx(number, rel=0.0051)


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "0.0 %"),
        (0, 5, "0.0 %"),
        (1, 10**6, "<0.1 %"),
        (1, 3, "33.3 %"),
        (10**6 - 1, 10**6, ">99.9 %"),
        (7, 7, "100.0 %"),
    ],
)
def test_only_all_is_100_percent_and_only_nothing_is_0(part, whole, text):
    assert share_text(part, whole) == text


@pytest.mark.parametrize(
    "policy",
    [
        "params=float32,compute=bfloat16,output=float32",
        "params=float32,compute=bfloat16,output=bfloat16",
        "params=float32,compute=float16,output=float16,matmul=highest",
        "params=bfloat16,compute=bfloat16,output=float16",
        "params=float32,compute=float16,output=float32,matmul=highest,reduce=bfloat16",
        "params=float8_e4m3fn,compute=float16,output=float64",
    ],
)
def test_a_shortened_policy_is_the_same_policy(policy):
    short = short_names(policy)
    assert len(short) < len(policy) and jmpx.get_policy(short) == jmpx.get_policy(policy)


def test_shares_come_first_then_findings_then_scopes():
    text = str(REPORT)
    starts = ["Audit of loss_fn", "Matrix products", "Saved for", "Written by"]
    starts += ["Findings: 1 high, 1 medium, 1 low", "high ", "medium ", "low ", "scope "]
    positions = [text.index(f"\n{start}") if text.find(start) else 0 for start in starts]
    assert positions == sorted(positions) and REPORT.to_text() == text
    # the largest first
    assert re.findall(r"^  (\w+ x \w+) ", text, re.MULTILINE)[0] == "bfloat16 x bfloat16"
    for shown in (
        "75.0 %",
        "9.00 GFLOP",
        "124 x",
        "12.0 GFLOP",
        "388 MiB",
        "108 MiB",
    ):
        assert shown in text
    assert text.startswith("Audit of loss_fn and its gradient\n")
    assert "  bfloat16  87.6 %   340 MiB\n" in text  # what is saved has no number of times


def test_a_step_is_not_called_a_gradient_and_the_platform_is_named():
    step = dataclasses.replace(REPORT, is_step=True, platform="tpu", title="train_step")
    assert str(step).startswith("Audit of train_step on tpu\n")


def test_a_report_of_nothing():
    nothing = dataclasses.replace(CLEAN, products=(), saved={}, casts=(), scopes=())
    assert str(nothing).splitlines()[2:5] == [
        "Matrix products and convolutions: nothing",
        "Saved for the backward pass: nothing",
        "Written by casts: nothing",
    ]
    assert "scope" not in str(nothing)


def test_without_findings_the_text_says_so():
    assert "\n\nNo findings.\n\n" in str(CLEAN) and "Findings:" not in str(CLEAN)


def test_a_while_loop_is_marked():
    marked = str(dataclasses.replace(REPORT, has_while=True))
    assert "while loop" in marked and "counted for one trip" in marked
    assert "while" not in str(REPORT)


def test_operations_of_unknown_cost_are_named():
    marked = dataclasses.replace(REPORT, uncounted=("pallas_call", "ffi_call"))
    assert "Not counted: pallas_call, ffi_call, whose" in str(marked)
    assert "Not counted" not in str(REPORT)


def test_a_rule_has_a_line_of_its_own():
    lines = [line.strip() for line in str(REPORT).splitlines()]
    assert {LEAK.rule, SAVED.rule, EXP.rule} <= set(lines)


def test_what_is_left_out_is_counted_and_shown_on_request():
    places = [Place("m.py", line, "f") for line in range(30)]
    findings = tuple(LEAK._replace(place=place) for place in places)
    names = [chr(ord("a") + i) for i in range(20)]
    scopes = tuple(Scope(name, "", "", 1, "float32", 0) for name in names)
    casts = tuple(Cast(name, "float32", 1, 8) for name in names)
    report = dataclasses.replace(REPORT, findings=findings, scopes=scopes, casts=casts)
    text = str(report)
    assert text.count("m.py:") == 8 and "Findings: 30 high" in text
    for number, what in ((22, "findings"), (4, "rows"), (14, "rows")):
        assert f"... and {number} more {what}: print(report.to_text(all=True))" in text
    full = report.to_text(all=True)
    assert full.count("m.py:") == 30 and "more" not in full.replace("to_text", "")
    assert all(re.search(rf"^{name}  ", full, re.MULTILINE) for name in names)


def test_layers_that_are_alike_are_one_row_and_one_finding():
    findings = tuple(
        LEAK._replace(scope=f"vit/blocks_{i}/attention", rule=f"*/blocks_{i}/attention: bf16")
        for i in range(12)
    )
    other = LEAK._replace(scope="vit/blocks_3/attention", place=Place("m.py", 3, "f"))
    report = dataclasses.replace(REPORT, findings=(*findings, other))
    merged = alike_findings(report.findings)
    assert [f.scope for f in merged] == ["vit/blocks_*/attention", other.scope]
    assert merged[0].count == 48 and merged[0].flops == 12 * LEAK.flops
    rule = jmpx.get_policy_map(f"f32; {merged[0].rule}").rules[0]
    assert all(rule.matches(int, finding.scope) for finding in findings)
    text = str(report)
    assert "in vit/blocks_*/attention, 48 x, 38.5 GFLOP" in " ".join(text.split())
    assert "Findings: 2 high" in text
    row = next(line for line in text.splitlines() if line.startswith("vit/blocks_*/mlp (MLP)"))
    assert row.split()[2:] == ["12", "x", "c=bf16,o=f32", "bf16", "60", "12.0", "GFLOP"]
    assert "vit/blocks_11/mlp (MLP)" in report.to_text(all=True)


def test_numbers_of_a_message_that_differ_are_a_range():
    findings = [
        LEAK._replace(scope=f"blocks/{i}", message=f"It is {share}% of bfloat16, beyond 1,000.")
        for i, share in enumerate(("9.5", "12", "10.25"))
    ]
    (merged,) = alike_findings(findings)
    assert merged.message == "It is 9.5 to 12% of bfloat16, beyond 1,000."
    others = [LEAK._replace(message="It is 1 value."), LEAK._replace(message="It is 2 values.")]
    assert alike_findings(others) == tuple(others)


def test_a_layer_that_differs_has_a_row_of_its_own():
    scopes = list(REPORT.scopes)
    leaky = next(i for i, scope in enumerate(scopes) if scope.path == "vit/blocks_7/mlp")
    scopes[leaky] = scopes[leaky]._replace(dtypes="float32")
    text = str(dataclasses.replace(REPORT, scopes=tuple(scopes)))
    assert re.search(r"^vit/blocks_7/mlp \(MLP\) .* f32 ", text, re.MULTILINE)
    assert re.search(r"^vit/blocks_\*/mlp \(MLP\) +11 x", text, re.MULTILINE)


def test_a_long_rule_is_not_broken():
    rule = "*/" + "/".join(f"layer{i}" for i in range(20)) + ": compute=float32, matmul=highest"
    finding = LEAK._replace(rule=rule, message="word " * 99)
    lines = str(dataclasses.replace(REPORT, findings=(finding,))).splitlines()
    assert rule in [line.strip() for line in lines]
    assert 95 < max(len(line) for line in lines if "word" in line) <= 100
