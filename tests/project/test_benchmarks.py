"""The benchmarks, each at its smallest size: what they print, and what they say of correctness."""

import importlib.util
import json

import compiled_step
import eight_bits
import fsdp
import gpu_clock
import jax
import jax.numpy as jnp
import known_models
import numpy as np
import pytest
import records
import report
import steps
import tpu_matmul
from helpers import ROOT
from model_steps import Point, transformer
from models import ViT, Zeros

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
TINY = ViT(1, 16, 2, 32, 10, image=8)
POINTS = [
    steps.Point(name, dtype)
    for name, (_, dtypes) in steps.IMPLEMENTATIONS.items()
    for dtype in dtypes
    if name not in steps.PEERS or importlib.util.find_spec(name)
]


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# The model and the steps.


def test_vit_base_has_the_papers_size():
    base = transformer(Point("vit", "by hand", layers=12, batch=64), small=False)
    params = jax.eval_shape(lambda: base.init(Zeros(np.random.PCG64())))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 86_567_656


@pytest.mark.thorough
@pytest.mark.parametrize("point", POINTS, ids=" ".join)
def test_every_step_returns_what_it_takes(point):
    traced = steps.trace(point, TINY, 2)
    (leaves, *_), _ = traced.in_avals
    state, loss = traced.out_info
    types = lambda leaves: [(x.shape, x.dtype) for x in leaves]  # noqa: E731
    assert types(state) == types(leaves)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    cond = point.dtype in steps.SCALED and point.implementation in (
        *("handwritten_cond", "handwritten_cond_divide", "jmpx", "jmpx_cond", "jmpx_counting"),
        *("autocast", "autocast_saved"),
    )
    assert ("stablehlo.case" in traced.lower().as_text()) == cond


# gpu_clock.py


@pytest.mark.thorough
def test_a_step_is_timed_once_and_resumed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_clock, "ROUNDS", 3)
    out = tmp_path / "results.jsonl"
    for _ in range(2):  # nothing is left for the second
        gpu_clock.main(["--small", f"--out={out}", "--only", "long_byte_model", "autocast"])
    (record,) = printed(capsys)
    assert records.read(out) == [record]
    fields = {"benchmark": "gpu_clock", "model": "long_byte_model", "way": "autocast"}
    assert record.items() >= {**fields, "status": "ok", "platform": "cpu", "cuda": None}.items()
    low, high = record["step_ms_quartiles"]
    assert 0 < low <= record["step_ms"] <= high and record["peak_mib"] > 0
    assert 0 < record["loss"] < np.log(256)  # it has learned tokens of 256, from the same batch


def test_a_step_that_fails_is_a_line(monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 byte")

    monkeypatch.setattr(steps, "traced", full)
    point = {"model": "vit", "way": "autocast", "dtype": "bfloat16", "small": True}
    gpu_clock.prepare([point])
    found = gpu_clock.measure(**point)
    assert found == {"status": "oom", "message": "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"}


def test_a_missing_gpu_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_clock.prepare(gpu_clock.POINTS)
    assert capsys.readouterr().err == "JAX finds no gpu but a cpu\n"


@pytest.mark.thorough
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="its reader of profiles aborts on CPUs")
def test_a_profile_names_what_the_embeddings_gradient_takes(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_clock, "PROFILED", ["by hand, embedding summed in float32"])
    monkeypatch.setattr(gpu_clock, "LONGEST", 99)
    text = gpu_clock.profile(tmp_path, small=True)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert any("scatter-add" in scope and float(ms) >= 0 for _, ms, _, scope in rows)


def test_results_as_a_table():
    line = {"model": "vit", "way": "JMP", "dtype": "float16", "step_ms": 6.04, "peak_mib": 3000.2}
    other = {"model": "long_byte_model", "way": "autocast", "dtype": "bfloat16", "step_ms": 4.0}
    text = gpu_clock.table([line, line | other])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[2:] == [
        ["`c=bf16`", "bfloat16", "", "", "4.0", "3,000"],
        ["JMP", "float16", "6.0", "3,000", "", ""],
    ]
    failed = {"model": "vit", "way": "float32", "dtype": "bfloat16", "status": "oom"}
    (row,) = gpu_clock.table([failed]).splitlines()[2:]
    assert row == "| float32 | bfloat16 | oom |  |  |  |"


# eight_bits.py


@pytest.mark.thorough
def test_eight_bits_change_what_is_learned(capsys):
    eight_bits.main(["--small", "--only", "MLP", "0"])
    loss = {record["policy"]: record["loss"] for record in printed(capsys)}
    assert [*loss] == [*eight_bits.POLICIES]
    _, low, fp8, mxfp8 = (abs(each / loss["float32"] - 1) for each in loss.values())
    assert low < min(fp8, mxfp8) and max(fp8, mxfp8) < 0.002


@pytest.mark.slow  # trainings
@pytest.mark.parametrize("model", ["ViT", "language model"])
def test_a_rule_puts_the_mlps_of_a_model_in_eight_bits(model):
    policy = eight_bits.POLICIES[2]  # without effect, it would be an error
    assert eight_bits.measure(model, policy=policy, seed=0, small=True)["loss"] < 5


def test_a_rule_for_eight_bits_without_effect_is_an_error(monkeypatch):
    monkeypatch.setattr(eight_bits, "BATCH", 24)
    with pytest.raises(
        UserWarning, match="no effect on the products there .an axis of 24 is no multiple of 16"
    ):
        eight_bits.measure("MLP", policy=eight_bits.POLICIES[2], seed=0, small=True)


def test_losses_in_eight_bits_are_compared_by_seed():
    found = [
        {"model": "a", "policy": policy, "seed": seed, "loss": loss + 3 * seed}
        for policy, losses in (("c=bf16", (1, 1)), ("8", (1.25, 1.75)))
        for seed, loss in enumerate(losses)
    ]
    found = [found[1], *found[2:], found[0]]  # in whichever order
    *_, base, eight = eight_bits.table(found).splitlines()
    assert base == "| a | `c=bf16` | 2.5000 (sd 2.1213) |  |  |  |"
    assert eight == "| a | `8` | 3.0000 (sd 2.4749) | +0.50000 ± 0.25000 |  |  |"


# The runner.


def test_points_are_measured_once_and_printed(tmp_path, capsys):
    points = [{"way": way, "size": size} for way in ("a", "b") for size in (1, 2)]
    status = {"a": "ok", "b": "error"}
    calls = []

    def measure(way, size, small=False):
        calls.append((way, size, small))
        return [{"part": part, "status": status[way]} for part in range(2)]

    def main(*arguments, out=tmp_path / "lines.jsonl"):
        calls.clear()
        records.main("", {"name": (points, measure)}, [*arguments], out)
        return calls, printed(capsys)

    found, lines = main()
    assert found == [("a", 1, False), ("a", 2, False), ("b", 1, False), ("b", 2, False)]
    assert records.read(tmp_path / "lines.jsonl") == lines and len(lines) == 8
    assert lines[0].items() >= {"benchmark": "name", "way": "a", "size": 1, "part": 0}.items()
    status["b"] = "ok"
    found, lines = main("--only", "2")
    assert found == [("b", 2, False)] and {line["size"] for line in lines} == {2}
    out = tmp_path / "lines.jsonl"
    records.main("", {"name": (points, measure)}, ["--list"], out)
    listed = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["there  ", "there  ", "missing", "there  "]
    found, _ = main("--again", "--only", "a", "1")
    assert found == [("a", 1, False)]
    kept = [(line["way"], line["size"]) for line in records.read(tmp_path / "lines.jsonl")]
    assert kept == [(way, size) for way in ("a", "b") for size in (1, 2) for _ in range(2)]
    main("--small")
    assert all(small for *_, small in calls) and len(calls) == 4
    assert len(records.read(tmp_path / "lines.jsonl")) == 8  # these are kept nowhere


# The strings for known models.


@pytest.mark.thorough
def test_a_string_is_measured_against_float32_with_and_without_compilers():
    lines = [
        known_models.measure("Gaussian process", policy, small=True)
        for policy in ("f32", "c=bf16", known_models.MODELS["Gaussian process"].policy)
    ]
    exact, base, better = (line["error"] for line in lines)
    assert 0 == exact < better < base / 4
    assert [line["low"] > 0 for line in lines] == [False, True, True]
    assert {*known_models.CHIPS} < lines[0].keys()


# The pages.


def test_the_pages_are_made_of_the_results():
    pages = report.pages()
    assert pages.keys() >= {ROOT / "benchmarks" / "README.md", ROOT / "docs" / "cost.md"}
    for path, text in pages.items():
        assert path.read_text() == text, path
    assert len([*report.bars(records.read(records.CPU))]) == 35
    with pytest.raises(ValueError, match="Found 0 tables with the header"):
        report.replaced("# A page", "| a | b |\n| --- | --- |")
    late = records.Row("bytes", value=1.02, bar=1.01)
    assert late.cells() == ("bytes", "1.02", "≤ 1.01", "**no**")
    assert records.Row("compile", value=7, bar=6, least=True).cells()[-1] == "yes"


def test_each_line_is_that_of_a_point():
    """What the pages show can be measured again."""
    found = records.read(records.CPU)
    for module in (compiled_step, fsdp, tpu_matmul):
        for name, (points, _) in module.BENCHMARKS.items():
            lines = [line for line in found if line["benchmark"] == name]
            for point in points:
                assert sum(records.is_of(line, name, point) for line in lines) == 1, point
    ((points, _),) = eight_bits.BENCHMARKS.values()
    in_eight_bits = records.read(eight_bits.RESULTS)
    assert len(in_eight_bits) == len(points)
    assert all(any(records.is_of(line, "eight_bits", p) for line in in_eight_bits) for p in points)
