"""`report.check`: what fails, with which text, and which arguments are refused."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.reports import CLEAN, EXP, LEAK, REPORT, SAVED
from hypothesis import given, strategies as st

from jmpx._inspect.audit.data import Products
from jmpx._inspect.audit.findings import KINDS

ALLOWED = ("mixed-product", "saved-float32", "low-exp")


def error(report, *args, **kwargs):
    with pytest.raises(AssertionError) as caught:
        report.check(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"allow": ALLOWED},
        {"allow": list(ALLOWED)},
        {"allow": iter(ALLOWED)},
        {"allow": KINDS},
        {"compute": "bfloat16", "at_least": 0.75, "allow": ALLOWED},
        {"compute": "bfloat16", "at_least": 0, "allow": ALLOWED},
        {"severity": "high", "allow": "mixed-product"},
        {"severity": "medium", "allow": ("mixed-product", "saved-float32")},
    ],
)
def test_passes_and_returns_the_report(arguments):
    assert REPORT.check(**arguments) is REPORT


@pytest.mark.parametrize(
    "compute", ["bfloat16", "bf16", " BF16", jnp.bfloat16, np.dtype("bfloat16")]
)
def test_a_dtype_in_any_spelling(compute):
    assert CLEAN.check(compute) is CLEAN
    assert "75 % of the FLOPs" in error(REPORT, compute, allow=ALLOWED)


def test_without_arguments_any_finding_fails():
    assert CLEAN.check() is CLEAN
    text = error(REPORT)
    for finding in (LEAK, SAVED, EXP):
        assert finding.name in text and finding.message in " ".join(text.split())
        assert finding.rule in [line.strip() for line in text.splitlines()]
    assert "examples/equinox/vit.py:88 (__call__)" in text and "in vit/mlp" in text
    assert text.startswith("The audit of loss_fn failed.") and "FLOPs of" not in text


def test_what_to_allow_can_be_pasted():
    pasted = re.search(r"allow=(\(.*\))\.$", error(REPORT))
    assert pasted and REPORT.check(allow=eval(pasted[1])) is REPORT
    pasted = re.search(r"allow=(\(.*\))\.$", error(REPORT, severity="high"))
    assert pasted and eval(pasted[1]) == ("mixed-product",)


def test_allowed_and_milder_findings_are_not_named():
    text = error(REPORT, allow=("low-exp",))
    assert "low-exp" not in text and "saved-float32" in text
    text = error(REPORT, severity="high")
    assert "low-exp" not in text and "saved-float32" not in text and "mixed-product" in text


def test_too_small_a_share_names_all_shares():
    text = error(REPORT, "bfloat16", at_least=0.9, allow=ALLOWED)
    assert (
        "75 % of the FLOPs of matrix products and convolutions are bfloat16, expected at least "
        "90 %:\n  bfloat16 x bfloat16: 75.0 %\n  float32 x bfloat16: 25.0 %" in text
    )
    assert "Findings" not in text
    both = error(REPORT, "bfloat16")
    assert "expected at least 95 %" in both and LEAK.message in " ".join(both.split())


def test_a_product_of_two_dtypes_is_in_neither():
    report = dataclasses.replace(CLEAN, products=(Products("float32 x bfloat16", 8, 1),))
    assert "0 % of the FLOPs" in error(report, "bfloat16")
    assert "0 % of the FLOPs" in error(report, "float32")


def test_without_products_there_is_no_share():
    report = dataclasses.replace(CLEAN, products=())
    assert "no matrix products" in error(report, "bfloat16")
    assert report.check() is report
    assert report.check("bfloat16", at_least=0) is report


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"severity": "hihg"}, "Unknown severity 'hihg': expected the lowest one that fails"),
        ({"severity": None}, "Unknown severity None"),
        ({"compute": "bf61"}, "Unknown dtype 'bf61' at compute="),
        ({"compute": "int32"}, "Unknown dtype 'int32' at compute="),
        (
            {"compute": "bf16", "at_least": 95},
            "Expected at_least= to be a share from 0 to 1, .* got at_least=95 and compute='bf16'",
        ),
        ({"compute": "bf16", "at_least": -0.1}, "got at_least=-0.1"),
        ({"compute": "bf16", "at_least": float("nan")}, "got at_least=nan"),
        ({"at_least": 0.9}, r"got at_least=0.9 and compute=None"),
    ],
)
@pytest.mark.parametrize("report", [REPORT, CLEAN])
def test_bad_arguments(report, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        report.check(**arguments)
    assert len(str(caught.value).splitlines()) == 1


def test_bad_types():
    with pytest.raises(TypeError, match="Unknown dtype <object"):
        REPORT.check(object())  # pyright: ignore[reportArgumentType]
