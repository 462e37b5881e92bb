"""`benchmarks/language_model.py`, at its smallest size."""

import language_model
import numpy as np
import pytest
import records

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
TINY = language_model.Size(width=8, layers=1, heads=2, context=8, batch=4, steps=4)


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    text = language_model.read_text()
    short = text._replace(train=text.train[:2000], validation=text.validation[:200])
    monkeypatch.setattr(language_model, "read_text", lambda: short)
    return short


def test_the_validation_text_is_cut_in_order(little_text):
    pieces = language_model.pieces(little_text.validation, TINY)
    assert pieces.shape == (200 // (4 * 8), 4, 9)
    inputs = pieces[..., :-1].reshape(-1)
    np.testing.assert_array_equal(inputs, little_text.validation[: len(inputs)])


@pytest.mark.slow  # trainings
def test_runs_are_made_once_and_compared_by_seed(tmp_path, monkeypatch):
    out, texts = tmp_path / "results.jsonl", []
    precisions = {n: language_model.PRECISIONS[n] for n in ("float32", "float16")}
    monkeypatch.setattr(language_model, "PRECISIONS", precisions)
    monkeypatch.setattr(language_model, "SIZE", TINY._replace(validate_every=2))
    for seeds in (1, 2):
        monkeypatch.setattr(language_model, "SEEDS", seeds)
        language_model.main([f"--out={out}"])
        texts.append(out.read_text())
    assert texts[1].startswith(texts[0]) and len(texts[1].splitlines()) == 4
    found = records.read(out)
    final = {}
    for record in found:
        assert [step for step, _ in record["losses"]] == [2, 4]
        final[record["precision"], record["seed"]] = record["losses"][-1][1]
        assert record["skipped_steps"] == 0 and len(record["text_sha256"]) == 64
    assert final["float32", 0] != final["float32", 1]
    for seed in range(2):
        assert abs(final["float16", seed] - final["float32", seed]) < 0.01
    rows = [line.split(" | ") for line in language_model.table(found).splitlines()]
    ours = np.array([final["float16", seed] for seed in range(2)])
    theirs = np.array([final["float32", seed] for seed in range(2)])
    (row,) = [row for row in rows if row[0] == "| float16"]
    assert row[1:5] == [
        *("2", f"{ours.mean():.4f}", f"{np.ptp(ours):.4f}", f"{(ours - theirs).mean():+.5f}")
    ]
