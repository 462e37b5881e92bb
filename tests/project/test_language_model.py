"""`benchmarks/language_model.py`, at its smallest size."""

import json

import jax
import jax.numpy as jnp
import language_model
import numpy as np
import pytest

import jmpx

TINY = language_model.Size(width=8, layers=1, heads=2, context=8, batch=4, steps=4)


@pytest.fixture(autouse=True)
def promotion():
    """As in a user's program: optax promotes dtypes in its own code."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    text = language_model.read_text()
    short = text._replace(train=text.train[:2000], validation=text.validation[:200])
    monkeypatch.setattr(language_model, "read_text", lambda: short)
    return short


@pytest.mark.thorough
def test_a_prediction_sees_no_later_character(little_text, rng):
    params = language_model.init(TINY, little_text.characters, seed=0)
    text = rng.integers(little_text.characters, size=(1, TINY.context), dtype=np.int32)
    other = text.copy()
    other[:, 5:] = (other[:, 5:] + 1) % little_text.characters
    scores = [language_model.predict(params, jnp.asarray(t), TINY.heads) for t in (text, other)]
    np.testing.assert_array_equal(scores[0][:, :5], scores[1][:, :5])
    assert (scores[0][:, 5:] != scores[1][:, 5:]).any(axis=-1).all()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bfloat16", "autocast bfloat16"])
def test_sixteen_bits_round_the_loss(name, little_text):
    precision = language_model.PRECISIONS[name]
    params = language_model.init(TINY, little_text.characters, seed=0)
    text = jnp.asarray(little_text.validation[: TINY.context + 1][None])
    full = language_model.make_loss(language_model.Precision(), TINY.heads)(params, text)
    cast = jmpx.get_policy(precision.policy).cast_to_compute(params)
    rounded = language_model.make_loss(precision, TINY.heads)(cast, text)
    assert rounded.dtype == full.dtype == jnp.float32
    assert 0 < abs(rounded - full) < 0.05


def test_the_validation_text_is_cut_in_order(little_text):
    pieces = language_model.pieces(little_text.validation, TINY)
    assert pieces.shape == (200 // (4 * 8), 4, 9)
    inputs = pieces[..., :-1].reshape(-1)
    np.testing.assert_array_equal(inputs, little_text.validation[: len(inputs)])


@pytest.mark.slow  # trainings
def test_runs_are_made_once_and_compared_by_seed(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    size = [
        f"--{name}={value}" for name, value in TINY._replace(validate_every=2)._asdict().items()
    ]
    names = ["float32", "float16"]
    arguments = [*size, f"--out={out}", "--precisions", *names]
    language_model.main([*arguments, "--seeds=1"])
    first = out.read_text()
    language_model.main([*arguments, "--seeds=2"])
    assert out.read_text().startswith(first) and len(out.read_text().splitlines()) == 4
    records = [json.loads(line) for line in out.read_text().splitlines()]
    final = {}
    for record in records:
        assert [step for step, _ in record["losses"]] == [2, 4]
        final[record["precision"], record["seed"]] = record["losses"][-1][1]
        assert record["skipped_steps"] == 0 and len(record["text_sha256"]) == 64
    assert final["float32", 0] != final["float32", 1]
    for seed in range(2):
        assert abs(final["float16", seed] - final["float32", seed]) < 0.01
    capsys.readouterr()
    language_model.main([f"--out={out}", "--report"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    ours = np.array([final["float16", seed] for seed in range(2)])
    theirs = np.array([final["float32", seed] for seed in range(2)])
    (row,) = [row for row in rows if row[0] == "| float16"]
    assert row[1:5] == [
        *("2", f"{ours.mean():.4f}", f"{np.ptp(ours):.4f}", f"{(ours - theirs).mean():+.5f}")
    ]


def test_the_differences_are_drawn(little_text, tmp_path):
    common = language_model.setting(TINY, little_text) | {"skipped_steps": 0}
    records = [
        {**common, "precision": precision, "seed": seed, "losses": [[4, loss + seed]]}
        for precision, loss in {"float32": 2.0, "float16": 2.1}.items()
        for seed in range(2)
    ]
    out = tmp_path / "results.jsonl"
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    language_model.main([f"--out={out}", f"--plot={tmp_path / 'plot.png'}"])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
