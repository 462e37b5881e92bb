"""The benchmarks, each at its smallest size: what they print, and what they say of correctness."""

import json
import os
import subprocess
from pathlib import Path

import compiled_step
import fsdp
import gpu_vit
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import records
import report
import steps
import tpu_matmul
from helpers import ROOT
from models import MODELS, Zeros

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
TINY = MODELS["tiny"]
DTYPES = (*steps.DTYPES, "bfloat16_scaled")


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# The model and the steps.


def test_vit_base_has_the_papers_size():
    params = jax.eval_shape(lambda: MODELS["base"].init(Zeros(np.random.PCG64())))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 86_567_656


@pytest.mark.thorough
@pytest.mark.parametrize("point", steps.points(steps.IMPLEMENTATIONS, DTYPES), ids=" ".join)
def test_every_step_returns_what_it_takes(point):
    traced = steps.trace(point, TINY, 2)
    state, loss = traced.step.out_info
    types = lambda leaves: [(x.shape, x.dtype) for x in leaves]  # noqa: E731
    assert types(state) == types(map(jnp.asarray, traced.leaves))
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    cond = point.dtype in steps.SCALED and point.implementation in (
        *("handwritten_cond", "handwritten_cond_divide", "jmpx", "jmpx_cond", "jmpx_counting"),
        *("autocast", "autocast_saved"),
    )
    assert ("stablehlo.case" in traced.step.lower().as_text()) == cond


# gpu_vit.py


@pytest.mark.thorough
def test_a_step_is_timed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PLATFORM", "cpu")
    monkeypatch.setattr(gpu_vit, "ROUNDS", 3)
    out = tmp_path / "results.jsonl"
    gpu_vit.main([f"--out={out}", "--only", "tiny", "handwritten", "float16", "8"])
    (record,) = printed(capsys)
    assert records.read(out) == [record]
    fields = {"benchmark": "gpu_vit", "model": "tiny", "batch": 8}
    fields |= {"implementation": "handwritten", "dtype": "float16", "status": "ok"}
    assert record.items() >= {**fields, "platform": "cpu", "cuda": None}.items()
    assert record["versions"]["jax"] == jax.__version__
    low, high = record["step_ms_quartiles"]
    assert 0 < low <= record["step_ms"] <= high and record["loss"] > 0
    leaves = jax.tree.leaves(TINY.init(Zeros(np.random.PCG64())))
    assert record["compiled_bytes"] >= 4 * 3 * sum(leaf.size for leaf in leaves)


def test_a_step_that_fails_is_a_line(monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 byte")

    monkeypatch.setenv("PLATFORM", "cpu")
    monkeypatch.setattr(steps, "trace", full)
    found = gpu_vit.measure("tiny", 2, "jmpx", "bfloat16")
    assert found == {"status": "oom", "message": "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"}


PYTHON = """#!/usr/bin/env bash
case "$*" in
  *--list*) printf '%s\\t%s\\tfloat32\\n' 'there  ' 0 missing 1 missing 2 missing 3 missing 4 ;;
  *" 2 float32") kill -9 $$ ;;
  *" 4 float32") exit {status} ;;
  *) echo "measured: $*" >> "$OUT" ;;
esac
"""


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 0), (2, 2)])
def test_a_point_whose_process_dies_ends_nothing(status, code, tmp_path):
    python, out = tmp_path / "python", tmp_path / "results.jsonl"
    python.write_text(PYTHON.format(status=status))
    python.chmod(0o755)
    script = Path(gpu_vit.__file__).with_suffix(".sh")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out)}
    run = subprocess.run(
        ["bash", script, out, "tiny"], env=environment, capture_output=True, text=True
    )
    assert run.returncode == code
    rest = f"{Path(gpu_vit.__file__)} --out={out} --only"
    lines = (f"measured: {rest} 1 float32", f"measured: {rest} 3 float32")
    assert out.read_text().splitlines() == [*lines]
    assert "2 float32: the process ended with status 137" in run.stderr


def test_a_missing_gpu_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("PLATFORM", "abacus")
    with pytest.raises(SystemExit, match="2"):
        gpu_vit.measure("tiny", 2, "jmpx", "bfloat16")
    assert capsys.readouterr().err == "JAX finds no abacus but a cpu\n"


def test_results_as_a_table(tmp_path, capsys):
    def result(implementation, dtype, batch=8, **fields):
        record = {"implementation": implementation, "dtype": dtype, "batch": batch}
        return {**record, "status": "ok", **fields}

    found = [
        result("handwritten", "float32", step_ms=6.0, compiled_bytes=3 * 2**20),
        result("jmpx", "bfloat16", batch=16, status="oom", message="too much"),
        result("jmpx", "bfloat16", step_ms=4.0, compiled_bytes=2 * 2**20),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in found))
    gpu_vit.main(["--table", str(path)])
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[2:] == [
        ["8", "float32", "handwritten", "6", "1.00", "3", "1.00"],
        ["8", "bfloat16", "jmpx", "4", "1.50", "2", "1.50"],
        ["16", "bfloat16", "jmpx", "oom", "", "oom", ""],
    ]


def test_the_results_that_are_kept_can_be_read():
    for path in records.RESULTS.glob("vit_*.jsonl"):
        assert gpu_vit.table(records.read(path)).count("\n") > 10


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


# The pages.


def test_the_pages_are_made_of_the_results():
    pages = report.pages()
    assert pages.keys() >= {ROOT / "README.md", ROOT / "docs" / "cost.md"}
    for path, text in pages.items():
        assert path.read_text() == text, path
    bars = [*report.bars(records.read(records.CPU))]
    assert sum(map(bool, (report.HEADLINE.search(row.measure) for row in bars))) == 23
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
