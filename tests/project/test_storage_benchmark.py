"""`benchmarks/storage.py`, at its smallest size, its table and its picture."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pictures
import pytest
import records
import storage
from helpers import ROOT

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program


@pytest.mark.thorough
def test_counting_stalls_in_bfloat16_alone(capsys):
    storage.main(["--small", "--only", "counting"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(r["benchmark"], r["versions"]["jax"]) for r in lines} == {("storage", jax.__version__)}
    mean = {r["way"]: r["mean"] for r in lines}
    bytes_each = {r["way"]: r["bytes"] for r in lines}
    exact = 1 + 1000 * 2.0**-10
    assert abs(mean.pop("bfloat16, stochastic") - exact) < 4 * 0.083 / 64**0.5
    assert mean.pop("bfloat16") == 1 and set(mean.values()) == {exact}
    assert list(bytes_each.values()) == [4, 2, 2, 4, 4]


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


@pytest.mark.slow  # trainings, each compiled
@pytest.mark.parametrize("part", ["regression", "transformer"])
def test_every_way_trains(part):
    ways = storage.OF_PARAMS if part == "regression" else storage.WAYS
    loss = {way: storage.measure(part, way=way, seed=0, small=True)["loss"] for way in ways}
    apart = {way: abs(each / loss["float32"] - 1) for way, each in loss.items()}
    for way in ("bfloat16, stochastic", "bfloat16, Kahan", "split master"):
        assert apart[way] < apart["bfloat16"]


def test_the_page_shows_the_lines_that_are_kept():
    found = records.read(storage.RESULTS)
    page = (ROOT / "docs" / "storage.md").read_text()
    of_jax = [record for record in found if record["versions"]["jax"] == "0.10.2"]
    assert storage.table(of_jax) in page
    assert {record["part"] for record in of_jax} >= {*storage.PARTS}
    for point in storage.POINTS:
        assert any(records.is_of(line, "storage", point) for line in of_jax), point


@pytest.mark.thorough
def test_every_picture_is_drawn_twice(tmp_path):
    pictures.main(["--out", str(tmp_path)])
    names = {f"{path.stem}{end}.png" for path in pictures.DRAWN for end in ("", "-dark")}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
