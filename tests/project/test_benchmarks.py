"""The benchmarks, each at its smallest size: what they print, and what they say of correctness."""

import argparse
import json
import sys

import accuracy
import cuda_lowering
import gpu_vit
import growth_steps
import jax
import jax.numpy as jnp
import numpy as np
import plot_results
import pytest
import report
import step_time
import underflow
from gpu_vit import MODELS, QUICK, Bench, Implementation, Job, Point, Program

TINY = MODELS["tiny"]
INSTALLED = gpu_vit.choose(gpu_vit.IMPLEMENTATIONS, gpu_vit.DTYPES)


@pytest.fixture(autouse=True)
def promotion():
    """As in a user's program: JMP, MPX and optax promote dtypes in their own code."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def bench():
    return Bench(TINY, 2, QUICK)


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# gpu_vit.py


def test_vit_base_has_the_papers_size(monkeypatch):
    monkeypatch.setattr(gpu_vit, "_normal", lambda rng, *shape: np.broadcast_to(0.0, shape))
    assert sum(leaf.size for leaf in jax.tree.leaves(MODELS["base"].init())) == 86_567_656


def test_the_model_computes_in_the_dtype_of_its_parameters_but_for_its_islands():
    params, (images, _) = TINY.init(), TINY.batch(2)
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    logits = jax.eval_shape(TINY.logits, half, images.astype(jnp.bfloat16))
    assert (logits.shape, logits.dtype) == ((2, 10), jnp.bfloat16)
    x = np.full((1, 4), 300, np.float16) + np.arange(4, dtype=np.float16)  # squares overflow
    norm = {"scale": np.ones(4, np.float16), "bias": np.zeros(4, np.float16)}
    normal = gpu_vit.layer_norm(norm, jnp.asarray(x))
    assert normal.dtype == jnp.float16
    np.testing.assert_allclose(normal[0], (np.arange(4) - 1.5) / 1.25**0.5, atol=1e-3)


@pytest.mark.parametrize("point", INSTALLED, ids=" ".join)
def test_every_step_returns_what_it_takes(point, bench):
    traced, extra = gpu_vit.trace(TINY, point, bench.state, bench.batch)
    state, new_extra, loss = traced.out_info
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert types((state, new_extra)) == types((bench.state, extra))
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    if point.implementation.endswith(("handwritten", "_where", "_cond")):
        branches = "stablehlo.case" in traced.lower().as_text()
        assert branches == point.implementation.endswith("_cond")


def full(model, dtype):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 byte")


def broken(model, dtype):
    raise ValueError("no such thing")


@pytest.fixture(scope="module")
def timed():
    """The records of two steps that work and of two that do not, and what was said meanwhile."""
    names, said = ("handwritten", "jmpx", "full", "broken"), []
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        for make in (full, broken):
            entry = Implementation(make, ("float16",), "jax")
            patch.setitem(gpu_vit.IMPLEMENTATIONS, make.__name__, entry)
        points = [Point(name, "float16") for name in names]
        records = gpu_vit.time_points(TINY, 2, points, 3, 2, QUICK, said.append)
    return dict(zip(names, records, strict=True)), said


def test_steps_are_timed_in_turns_and_train_alike(timed):
    records, said = timed
    assert said[0] == "compiling" and said[-1] == "round 3 of 3"
    for name in ("handwritten", "jmpx"):
        record = records[name]
        fields = {"implementation": name, "dtype": "float16", "status": "ok"}
        assert record.items() >= fields.items()
        low, high = record["step_ms_quartiles"]
        assert 0 < low <= record["step_ms"] <= high
        assert len(record["step_ms_rounds"]) == 3
        assert record["images_per_s"] == pytest.approx(2000 / record["step_ms"])
        assert 0 < record["loss"] < 2.4  # that of guessing is log(10), and the batch is one
    assert records["jmpx"]["loss"] == pytest.approx(records["handwritten"]["loss"], rel=0.1)


def test_a_step_that_fails_ends_no_other(timed):
    records, _ = timed
    fields = {"status": "oom", "message": "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"}
    assert records["full"].items() >= fields.items()
    fields = {"status": "error", "message": "ValueError: no such thing"}
    assert records["broken"].items() >= fields.items()


def test_a_step_that_fails_leaves_a_training_state_to_the_next(bench):
    def run(state, *_):
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # as a donated one is
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    failure = bench.try_run(Program(run, (), {}), 1)
    assert failure.fields["status"] == "oom"
    params, _ = bench.state
    np.testing.assert_array_equal(params["embed"]["w"], bench.params["embed"]["w"])


def arguments(*given):
    args = gpu_vit.parse(["--implementations", "handwritten", "jmpx", *given])
    return argparse.Namespace(**{**vars(args), "cache": "somewhere"})


def test_points_that_are_there_are_not_measured_again():
    args = arguments("--model=desktop", "--batches", "8", "--dtypes", "bfloat16")
    jobs = gpu_vit.plan(args, [])
    points = Point("handwritten", "bfloat16"), Point("jmpx", "bfloat16")
    assert [(job.measure, job.batch, job.points) for job in jobs] == [
        ("time", 8, points),
        ("memory", 8, points),
    ]
    assert jobs[1].without(jobs[1].failed("dead")).points == points[1:]
    where = {"model": "desktop", "batch": 8}
    time = {"measure": "time", **where}
    records = [
        {**time, **points[0]._asdict(), "status": "oom"},
        {**time, **points[1]._asdict(), "status": "error"},
        {**time, **points[1]._asdict(), "batch": 16, "status": "ok"},
    ]
    assert gpu_vit.plan(args, records)[0].points == points[1:]


def test_a_run_writes_lines_and_goes_on_where_it_stopped(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    given = ["--implementations=handwritten", "--measure=memory", f"--out={out}", "--batches=2"]
    gpu_vit.main([*given, "--dtypes=float32", "--budget=0"])
    assert out.read_text() == ""
    for _ in range(2):
        gpu_vit.main([*given, "--dtypes=float32"])
    (record,) = gpu_vit.read(out)
    assert len(out.read_text().splitlines()) == 1
    fields = {"benchmark": "gpu_vit", "measure": "memory", "model": "tiny", "batch": 2}
    assert record.items() >= {**fields, "status": "ok", "platform": "cpu", "cuda": None}.items()
    assert record["date"] and record["device_kind"]
    assert record["versions"].keys() >= {"jax", "jaxlib", "jmp", "mpx", "jmpx"}
    assert record["versions"]["jax"] == jax.__version__
    assert record["peak_bytes"] is None  # CPUs report none
    parts = [record[f"compiled_{k}_bytes"] for k in ("temp", "argument", "output", "alias")]
    state = gpu_vit.new_state(TINY.init())  # donated, so it counts once
    assert parts[-1] >= 4 * sum(leaf.size for leaf in jax.tree.leaves(state))
    assert record["compiled_bytes"] == sum(parts) - 2 * parts[-1] > parts[1]
    assert "nothing left to measure" in capsys.readouterr().err


def test_a_process_that_dies_leaves_a_record(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (record,) = gpu_vit.in_child(Job("memory", "tiny", 2, (Point("jmpx", "bfloat16"),)), print)
    assert record["status"] == "error" and record["message"].startswith("exit status 1")


# plot_results.py


def result(implementation, dtype, measure, batch=8, **fields):
    record = {"measure": measure, "implementation": implementation, "dtype": dtype, "batch": batch}
    where = {"model": "desktop", "device_kind": "some chip", "versions": {"jax": "1.2"}}
    return {**record, **where, "status": "ok", **fields}


def write_results(path):
    records = [
        result("handwritten", "float32", "time", step_ms=3.0, compiled_bytes=2**20),
        result("handwritten", "float32", "time", step_ms=6.0, compiled_bytes=2**20),
        result("jmpx", "bfloat16", "time", step_ms=4.0, compiled_bytes=2**20),
        result("jmpx", "bfloat16", "time", batch=16, status="oom", message="too much"),
        result("mpx", "float16", "time", status="error", message="broken"),
        result("handwritten", "float32", "memory", peak_bytes=3 * 2**20),
        result("jmpx", "bfloat16", "memory", peak_bytes=2 * 2**20, peak_is_upper_bound=True),
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_results_as_a_table(tmp_path, capsys):
    write_results(tmp_path / "results.jsonl")
    plot_results.main([str(tmp_path / "results.jsonl"), "--table"])
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    assert rows[2:5] == [
        ["8", "float32", "handwritten", "6", "1.00", "3", "1.00"],
        ["8", "bfloat16", "jmpx", "4", "1.50", "≤ 2", "1.50"],
        ["16", "bfloat16", "jmpx", "out of memory", "", "", ""],
    ]
    assert "some chip" in printed and "jax 1.2" in printed and "peak memory" in printed


def test_results_as_a_picture(tmp_path):
    write_results(tmp_path / "results.jsonl")
    plot_results.main([str(tmp_path / "results.jsonl"), f"--out={tmp_path / 'results.png'}"])
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="choose other flags"):
        plot_results.main([str(tmp_path / "results.jsonl"), "--model=base"])


def test_every_implementation_and_dtype_has_a_look():
    assert plot_results.STYLES.keys() == gpu_vit.IMPLEMENTATIONS.keys()
    assert plot_results.LINES.keys() == gpu_vit.DTYPES.keys()


# The others.


def test_step_time(timed, monkeypatch, capsys):
    records = list(timed[0].values())[:3]
    monkeypatch.setattr(gpu_vit, "time_points", lambda *_, **__: records)
    step_time.main(["--dtypes=float16"])
    found = {record["implementation"]: record for record in lines(capsys)}
    for record in found.values():
        assert record["benchmark"] == "step_time" and record["versions"]["jax"] == jax.__version__
        assert record["handwritten_ms"] == pytest.approx(records[0]["step_ms"], abs=1e-4)
    assert found.keys() == {"jmpx", "full"} and found["full"]["failed"]
    expected = step_time.ratio(records[1]["step_ms_rounds"], records[0]["step_ms_rounds"])
    assert found["jmpx"].items() >= expected.items()


def test_a_ratio_is_the_median_over_the_rounds():
    ratio = step_time.ratio([2.0, 3.0, 40.0], [1.0, 2.0, 10.0])
    assert ratio == {"ratio": 2.0, "quartiles": [1.75, 3.0]}


def test_underflow(capsys):
    underflow.main(["--model=tiny", "--batch=4", "--steps=200"])
    (record,) = lines(capsys)
    assert record["benchmark"] == "underflow" and record["scale"] == 2**15
    assert 0 < record["loss"] < np.log(10)
    assert 3000 < record["nonzero_entries"] < 3500
    assert record["lost_without_scaling"] > 0.005
    assert record["lost_without_scaling"] > 2 * record["lost_with_scaling"]


RATIOS = {  # of steps that grow the scale, shrink it, leave it
    "jmpx": (1, 1, 1),
    "jmp": (1, 1, 1),
    "mpx": (0.5, 2, 1),  # it divides by the scale of the next step
}


@pytest.mark.parametrize("name", RATIOS)
def test_gradients_on_steps_that_change_the_scale(name):
    pytest.importorskip(name)
    found = growth_steps.measure(name)
    assert found.keys() == {"growth", "shrink", "steady"}
    for kind, ratio in zip(("growth", "shrink", "steady"), RATIOS[name], strict=True):
        assert found[kind]["steps"] >= 4
        assert (found[kind]["smallest_ratio"], found[kind]["largest_ratio"]) == (ratio, ratio)


def test_growth_steps_prints_a_line_for_each(capsys):
    growth_steps.main(["--steps=2"])
    records = lines(capsys)
    assert [r["implementation"] for r in records][:2] == ["jmpx", "jmp"]
    for record in records:
        assert record["benchmark"] == "growth_steps"
        assert record["growth"] == {"steps": 0, "smallest_ratio": None, "largest_ratio": None}


def test_accuracy_of_16_bits(capsys):
    accuracy.main(["--seeds=1", "--epochs=4", "--dtypes", "float16", "autocast_bfloat16"])
    records = lines(capsys)
    assert [record["dtype"] for record in records] == ["float16", "autocast_bfloat16"]
    for record in records:
        assert record["benchmark"] == "accuracy" and record["skipped_steps"] == 0
        assert record["accuracies"] == [record["accuracy_mean"]]
        assert record["accuracy_spread"] == 0
        assert record["accuracy_mean"] > 90


def test_products_lowered_for_cuda_have_16_bit_operands(capsys):
    cuda_lowering.main(["--model=tiny", "--batch=2"])
    records = lines(capsys)
    assert [Point(r["implementation"], r["dtype"]) for r in records] == [*cuda_lowering.POINTS]
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    # Forwards six products a block and two more, backwards twice as many but the images' own.
    products = 3 * (6 * TINY.blocks + 2) - 1
    for record in records:
        dtype = short[record["dtype"]]
        assert record["benchmark"] == "cuda_lowering" and record["jax"] == jax.__version__
        assert record["dots"] == {f"{dtype} x {dtype}": products}


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


def test_the_tables_of_the_page_are_made_of_the_results():
    found = report.tables(report.read())
    assert f"\n\n{found}\n\n<!-- end -->" in report.PAGE.read_text()
    assert {record["benchmark"] for record in report.read()} == set(report.COMMANDS)
    rows = list(report.bars(report.read()))
    assert len(rows) > 50 and all(row.bar > 0 for row in rows)
    late = report.Row("bytes", value=1.02, bar=1.01)
    assert late.cells() == ("bytes", "1.02", "≤ 1.01", "no, by 0.01")
    assert report.Row("compile", value=7, bar=6, least=True).cells()[-1] == "yes"
