"""All reports: HTML for notebooks, JSON, and text."""

import functools
import html
import json

import jax
import jax.numpy as jnp
import pytest

import jmpx
from jmpx import inspect

X = jnp.linspace(-1, 1, 16).reshape(4, 4)
BATCHES = [(X / n, X) for n in (1, 2)]


def loss_fn(w, x):
    with jax.named_scope("distance"):
        return jnp.mean(jnp.square((x @ w + 64) - 64))


def nonfinite(w, x):
    return jnp.mean(jnp.log(0 * x) @ w)


# A report of each public class, and words that it shows.
REPORTS = {
    "Audit": (lambda: inspect.audit(jmpx.apply_policy(loss_fn, "c=bf16"))(X, X), "loss_fn"),
    "Blame": (lambda: inspect.blame(loss_fn, "c=bf16")(*BATCHES), "under c=bf16"),
    "Choice": (lambda: inspect.choose(loss_fn, error=0.5)(*BATCHES), "saved"),
    "Compiled": (lambda: inspect.compiled(jax.jit(loss_fn).lower(X, X)), "1 product"),
    "Comparison": (lambda: inspect.compare(loss_fn, loss_fn)(X, X), "loss_fn and loss_fn"),
    "FirstNonfinite": (lambda: inspect.first_nonfinite(nonfinite)(X, X), "log makes an infinity"),
    "Plan": (lambda: inspect.plan(lambda policy: (loss_fn, (X, X)), ["c=bf16"]), "c=bf16"),
    "Ranges": (lambda: inspect.ranges(loss_fn)(X, X), "Ranges of loss_fn and its gradient"),
    "UpdateReport": (lambda: inspect.update_report({"w": X}, {"w": X / 99}), "['w'], float32"),
}


@functools.cache
def report_of(name):
    report = REPORTS[name][0]()
    assert type(report) is getattr(inspect, name)
    return report


def test_each_public_report_is_in_the_table():
    classes = [getattr(inspect, name) for name in inspect.__all__]
    assert {each.__name__ for each in classes if hasattr(each, "_repr_html_")} == set(REPORTS)


@pytest.mark.parametrize("name", REPORTS)
def test_html_holds_the_words_of_the_report(name):
    report, words = report_of(name), REPORTS[name][1]
    assert words in str(report)
    shown = report._repr_html_()
    assert shown == report.to_html() and "<pre>" in shown
    assert words in html.unescape(shown) and str(report).split("\n")[0] in html.unescape(shown)


@pytest.mark.parametrize("name", REPORTS)
def test_json_holds_the_fields_of_the_report(name):
    report = report_of(name)
    data = json.loads(report.to_json(), parse_constant=pytest.fail)  # no NaN or Infinity
    assert data == json.loads(json.dumps(report.to_dict())) and data["version"] >= 1
    assert len(data) > 1


def test_counts_of_updates_are_plain_numbers_also_if_they_are_stacked():
    report = report_of("UpdateReport")
    counts = {"entries": 16.0, "stored": 0.0, "bfloat16": 0.0, "float16": 0.0}
    expected = {"version": 1, "updates": {"['w']": counts}, "dtypes": {"['w']": "float32"}}
    assert report.to_dict() == expected
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), report)
    assert stacked.to_dict()["updates"]["['w']"]["entries"] == [16.0, 16.0]
    assert str(stacked) == str(report)
