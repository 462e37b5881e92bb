"""The benchmarks, each at its smallest size: what they print, and what they say of correctness."""

import json
import os
import subprocess
from pathlib import Path

import cuda_lowering
import gpu_vit
import growth_steps
import jax
import jax.numpy as jnp
import numpy as np
import plot_layers
import plot_results
import pytest
import records
import report
import steps
import underflow
from helpers import ROOT
from models import MODELS
from steps import Point

TINY = MODELS["tiny"]
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def promotion():
    """As in a user's program: JMP, MPX and optax promote dtypes in their own code."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# The model and the steps.


def test_vit_base_has_the_papers_size():
    params = jax.eval_shape(lambda: MODELS["base"].init(Zeros(np.random.PCG64())))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 86_567_656


class Zeros(np.random.Generator):
    """Draws zeros."""

    def normal(self, *, size):
        return jnp.zeros(size)


@pytest.mark.thorough
def test_the_model_computes_in_the_dtype_of_its_parameters_but_for_its_islands(rng):
    params, (images, _) = TINY.init(rng), TINY.batch(rng, 2)
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    logits = jax.eval_shape(TINY.apply, half, images.astype(jnp.bfloat16))
    assert (logits.shape, logits.dtype) == ((2, 10), jnp.bfloat16)
    x = np.full((1, 4), 300, np.float16) + np.arange(4, dtype=np.float16)  # squares overflow
    norm = {"scale": np.ones(4, np.float16), "bias": np.zeros(4, np.float16)}
    normal = TINY.normalized(norm, jnp.asarray(x))
    assert normal.dtype == jnp.float16
    np.testing.assert_allclose(normal[0], (np.arange(4) - 1.5) / 1.25**0.5, atol=1e-3)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("point", steps.points(steps.IMPLEMENTATIONS, steps.DTYPES), ids=" ".join)
def test_every_step_returns_what_it_takes(point):
    traced = steps.trace(point, TINY, 2)
    state, loss = traced.step.out_info
    types = lambda leaves: [(x.shape, x.dtype) for x in leaves]  # noqa: E731
    assert types(state) == types(map(jnp.asarray, traced.leaves))
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    cond = point.dtype == "float16" and point.implementation in (
        *("handwritten_cond", "jmpx", "jmpx_counting", "jmpx_wrapped_cond"),
        *("autocast", "autocast_saved"),
    )
    assert ("stablehlo.case" in traced.step.lower().as_text()) == cond


# gpu_vit.py


@pytest.mark.thorough
def test_a_step_is_timed(capsys):
    gpu_vit.main(["--platform=cpu", "--batch=2", "--rounds=3", "--implementation=handwritten"])
    (record,) = printed(capsys)
    fields = {"benchmark": "gpu_vit", "measure": "time", "model": "tiny", "batch": 2}
    fields |= {"implementation": "handwritten", "dtype": "float16", "status": "ok"}
    assert record.items() >= {**fields, "platform": "cpu", "cuda": None}.items()
    assert record["versions"]["jax"] == jax.__version__
    low, high = record["step_ms_quartiles"]
    assert 0 < low <= record["step_ms"] <= high
    assert len(record["step_ms_rounds"]) == 3
    assert record["images_per_s"] == pytest.approx(2000 / record["step_ms"])
    parts = [record[f"compiled_{k}_bytes"] for k in ("temp", "argument", "output", "alias")]
    assert parts[-1] >= 4 * 3 * sum(
        leaf.size for leaf in jax.tree.leaves(TINY.init(Zeros(np.random.PCG64())))
    )
    assert record["compiled_bytes"] == sum(parts) - 2 * parts[-1] > parts[1]


@pytest.mark.thorough
def test_memory_is_measured():
    found = gpu_vit.measure("memory", "tiny", 2, Point("jmpx", "bfloat16"), 1)
    assert found["status"] == "ok" and found["peak_bytes"] is None  # CPUs report none


def test_a_step_that_fails_is_a_line(monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 byte")

    monkeypatch.setattr(steps, "trace", full)
    found = gpu_vit.measure("time", "tiny", 2, Point("jmpx", "bfloat16"), 1)
    assert found == {"status": "oom", "message": "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"}


PYTHON = """#!/usr/bin/env bash
case "$*" in
  *tqdm*) cat ;;
  *--missing*) printf '%s\\n' --batch=1 --batch=2 --batch=3 --batch=4 ;;
  *--died*) echo "died: $*" ;;
  *--batch=2*) kill -9 $$ ;;
  *--batch=4*) exit {status} ;;
  *) echo "measured: $*" ;;
esac
"""


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 123), (255, 124)])
def test_a_point_whose_process_dies_is_a_line_and_ends_nothing(status, code, tmp_path):
    python, out = tmp_path / "python", tmp_path / "results.jsonl"
    python.write_text(PYTHON.format(status=status))
    python.chmod(0o755)
    script = Path(gpu_vit.__file__).with_suffix(".sh")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PLATFORM": "cpu"}
    run = subprocess.run(["bash", script, out, "tiny"], env=environment, capture_output=True)
    assert run.returncode == code
    rest = f"{Path(gpu_vit.__file__)} --platform=cpu --batch="
    lines = (f"measured: {rest}1", f"died: {rest}2 --died=137", f"measured: {rest}3")
    assert out.read_text().splitlines() == [*lines]


def test_a_process_that_died_is_an_error(capsys):
    gpu_vit.main(["--platform=cpu", "--batch=2", "--measure=memory", "--died=134"])
    (record,) = printed(capsys)
    assert record["status"] == "error" and record["implementation"] == "jmpx"
    assert record["message"] == "the process ended with status 134"


def test_a_missing_gpu_is_one_line(capsys):
    with pytest.raises(SystemExit, match="255"):
        gpu_vit.main(["--platform=abacus"])
    assert capsys.readouterr().err == "JAX finds no abacus but a cpu\n"


def test_points_that_are_there_are_not_measured_again(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    gpu_vit.main([f"--missing={out}", "--batch=2", "--batch=4"])
    lines = capsys.readouterr().out.splitlines()
    points = steps.points(gpu_vit.IMPLEMENTATIONS, steps.DTYPES)
    assert len(lines) == len(set(lines)) == 4 * len(points)
    key = {"measure": "time", "model": "tiny", "batch": 2}
    found = [
        {**key, **point._asdict(), "status": status}
        for point, status in zip(points, ("ok", "oom", "error"), strict=False)
    ]
    left = list(gpu_vit.missing("tiny", (2, 4), found))
    assert [line for line in lines if line not in left] == [lines[0], lines[2]]


# plot_results.py


def write_results(path):
    def result(implementation, dtype, measure, batch=8, **fields):
        record = {"implementation": implementation, "dtype": dtype, "measure": measure}
        record |= {"batch": batch, "model": "desktop", "device_kind": "some chip"}
        return {**record, "versions": {"jax": "1.2"}, "status": "ok", **fields}

    found = [
        result("handwritten", "float32", "time", step_ms=3.0, compiled_bytes=2**20),
        result("handwritten", "float32", "time", step_ms=6.0, compiled_bytes=2**20),
        result("jmpx", "bfloat16", "time", step_ms=4.0, compiled_bytes=2**20),
        result("jmpx", "bfloat16", "time", batch=16, status="oom", message="too much"),
        result("mpx", "float16", "time", status="error", message="broken"),
        result("handwritten", "float32", "memory", peak_bytes=3 * 2**20),
        result("jmpx", "bfloat16", "memory", peak_bytes=2 * 2**20, peak_is_upper_bound=True),
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in found))


def test_results_as_a_table_and_as_a_picture(tmp_path, capsys):
    path, out = tmp_path / "results.jsonl", tmp_path / "results.png"
    write_results(path)
    plot_results.main([str(path), "--table"])
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[2:5] == [
        ["8", "float32", "handwritten", "6", "1.00", "3", "1.00"],
        ["8", "bfloat16", "jmpx", "4", "1.50", "≤ 2", "1.50"],
        ["16", "bfloat16", "jmpx", "out of memory", "", "", ""],
    ]
    assert "some chip" in text and "jax 1.2" in text and "peak memory" in text
    plot_results.main([str(path), f"--out={out}"])
    assert out.read_bytes().startswith(PNG)
    with pytest.raises(SystemExit, match="no results of this model"):
        plot_results.main([str(path), "--model=base"])


def test_the_results_that_are_kept_can_be_read(capsys):
    for path in report.RESULTS.parent.glob("vit_*.jsonl"):
        plot_results.main([str(path), "--table"])
        assert "planned memory" in capsys.readouterr().out


def test_every_implementation_and_dtype_has_a_look():
    assert plot_results.STYLES.keys() == set(gpu_vit.IMPLEMENTATIONS)
    assert plot_results.LINES.keys() == set(steps.DTYPES)


# The others.


@pytest.mark.thorough
def test_underflow(capsys):
    # Gradients shrink with the loss: one image is learned soonest, and float16 then loses most.
    underflow.main(["--model=tiny", "--batch=1", "--steps=1600"])
    (record,) = printed(capsys)
    assert record["benchmark"] == "underflow" and record["scale"] == 2**15
    assert 0 < record["loss"] < np.log(10) / 10
    assert 3000 < record["nonzero_entries"] < 3500
    assert record["lost_without_scaling"] > 0.005
    assert record["lost_without_scaling"] > 5 * record["lost_with_scaling"]


RATIOS = {  # of steps that grow the scale, shrink it, leave it
    "jmpx": (1, 1, 1),
    "jmp": (1, 1, 1),
    "mpx": (0.5, 2, 1),  # it divides by the scale of the next step
}


@pytest.mark.parametrize("name", RATIOS)
def test_gradients_on_steps_that_change_the_scale(name):
    pytest.importorskip(name)
    found = growth_steps.measure(name)
    for kind, ratio in zip(("growth", "shrink", "steady"), RATIOS[name], strict=True):
        assert found[kind]["steps"] >= 4
        assert (found[kind]["smallest_ratio"], found[kind]["largest_ratio"]) == (ratio, ratio)


@pytest.mark.thorough
def test_products_lowered_for_cuda_have_16_bit_operands(capsys):
    cuda_lowering.main(["--batch=2"])
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    # Forwards six products a block and two more, backwards twice as many but the images' own.
    products = 3 * (6 * TINY.layers + 2) - 1
    found = printed(capsys)
    assert len(found) == 9
    for record in found:
        dtype = short[record["dtype"]]
        # Those of attention, which are no weight's, are not saved but computed again.
        again = 2 * TINY.layers if record["implementation"] == "autocast_saved" else 0
        assert record["dots"] == {f"{dtype} x {dtype}": products + again}


def test_products_of_a_function_count_as_often_as_it_is_called():
    dot = "    %1 = stablehlo.dot_general %0, %0 : (tensor<2x3xbf16>, tensor<f32>) -> tensor<2xf32>"
    text = f"""
  func.func public @main(%arg0: tensor<f32>) {{
{dot}
    %2 = call @twice(%1) : () -> ()
    %3 = call @twice(%1) : () -> ()
  }}
  func.func private @twice(%arg0: tensor<f32>) {{
{dot}
{dot.replace("bf16", "f32")}
  }}
"""
    assert cuda_lowering.count_dots(text) == {"bf16 x f32": 3, "f32 x f32": 2}


def test_the_pages_are_made_of_the_results():
    found = records.read(report.RESULTS)
    text = report.PAGE.read_text()
    assert report.page(found, text) == text
    assert report.details(found) == report.DETAILS.read_text()
    assert {record["benchmark"] for record in found} == set(report.COMMANDS)
    assert {row.measure for row in report.bars(found)} >= set(report.HEADLINES)
    for path in (ROOT / "README.md", ROOT / "docs" / "cost.md"):
        text = path.read_text()
        assert path in report.VISITED and report.visited(found, text) == text
        assert report.programs(found) in text and report.peaks() in text
    late = report.Row("bytes", value=1.02, bar=1.01)
    assert late.cells() == ("bytes", "1.02", "≤ 1.01", "**no**")
    assert report.Row("compile", value=7, bar=6, least=True).cells()[-1] == "yes"


def test_the_picture_of_the_layers(tmp_path):
    plot_layers.main([f"--out={tmp_path / 'layers.png'}"])
    assert (tmp_path / "layers.png").read_bytes().startswith(PNG)
