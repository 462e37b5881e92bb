"""`benchmarks/storage.py`, at its smallest size, its table and its picture."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plot_storage
import pytest
import records
import storage
from helpers import ROOT


@pytest.fixture(autouse=True)
def promotion():
    """As in a user's program: optax promotes dtypes in its own code."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_counting_stalls_in_bfloat16_alone(capsys):
    storage.main(["--small", "--part", "counting", "averages"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(r["benchmark"], r["versions"]["jax"]) for r in lines} == {("storage", jax.__version__)}
    mean = {r["way"]: r["mean"] for r in lines if r["part"] == "counting"}
    bytes_each = {r["way"]: r["bytes"] for r in lines if r["part"] == "counting"}
    exact = 1 + 1000 * 2.0**-10
    assert abs(mean.pop("bfloat16, stochastic") - exact) < 4 * 0.083 / 64**0.5
    assert mean.pop("bfloat16") == 1 and set(mean.values()) == {exact}
    assert list(bytes_each.values()) == [4, 2, 2, 4, 4]
    error = {r["way"]: r["error"] for r in lines if r["part"] == "averages"}
    assert error["optax, bfloat16"] == pytest.approx(0.5 - 0.5 * 0.999**100)  # it has not moved
    assert error["jmpx.optim.ema of bfloat16"] < 1e-6


def test_kahan_keeps_what_an_update_loses(rng):
    masters = {"w": jnp.asarray(rng.normal(size=64), jnp.float32)}
    target = jnp.asarray(rng.normal(size=64), jnp.float32)
    loss_fn = lambda params, _: 0.5 * ((params["w"].astype(jnp.float32) - target) ** 2).sum()  # noqa: E731
    sgd = optax.sgd(2.0**-8)
    error = {}
    for way in ("bfloat16", "bfloat16, Kahan"):
        trained = storage.train(way, sgd, masters, loss_fn, jnp.zeros(3000))
        reached = np.asarray(trained.params["w"], np.float64)
        error[way] = np.abs(reached / np.asarray(target) - 1).max()
    assert error["bfloat16, Kahan"] < 2**-7 < 0.1 < error["bfloat16"]


@pytest.mark.thorough
def test_moments_and_roundings():
    for fields in storage.moments(small=True):
        apart = abs(fields["nu_over_exact"] - 1)
        if fields["way"] == "bfloat16":
            assert apart > 0.02
        else:
            assert apart < 1e-5 + 4 * fields["nu_sd"] / 16**0.5 < 0.02
    rounded, split = storage.rounding(small=True)
    assert abs(rounded["mean_error_ulp"]) < 4 * rounded["standard_error_ulp"] < 0.1
    assert split["rebuilt"] == 1 and split["high_is_the_cast"] > 0.99


@pytest.mark.slow  # trainings, each compiled
@pytest.mark.parametrize("part", ["regression", "transformer"])
def test_every_way_trains(part):
    loss = {fields["way"]: fields["loss"] for fields in storage.PARTS[part](small=True)}
    assert loss.keys() >= {*storage.OF_PARAMS}
    apart = {way: abs(each / loss["float32"] - 1) for way, each in loss.items()}
    for way in ("bfloat16, stochastic", "bfloat16, Kahan", "split master"):
        assert apart[way] < apart["bfloat16"]


def test_the_page_shows_the_lines_that_are_kept(tmp_path):
    found = records.read(plot_storage.RESULTS)
    page = (ROOT / "docs" / "storage.md").read_text()
    of_jax = [record for record in found if record["versions"]["jax"] == "0.10.2"]
    assert plot_storage.table(of_jax) in page
    assert {record["part"] for record in of_jax} == {*storage.PARTS}
    plot_storage.main([f"--out={tmp_path / 'storage.png'}"])
    assert (tmp_path / "storage.png").read_bytes().startswith(b"\x89PNG")
