"""The benchmark of what a TPU's compiler makes of train steps; the compiler itself runs apart."""

import json

import compiled_step
import jax
import jax.numpy as jnp
import model_steps
import pytest
import steps
import tpu_compile
from model_steps import Point
from test_tpu import HLO, needs_libtpu

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program


def line(way, peak_mib=1.0, **fields):
    point = {"model": "vit", "way": way, "layers": 6, "batch": 64}
    point |= {"scanned": False, "chips": "one"} | fields
    costs = {"gflop": 2.0, "gb_accessed": 4.0, "compile_cpu_s": 9.0, "compile_s": 5.0}
    found = {"status": "ok", "peak_mib": peak_mib, "products": {}, "collectives": {"sum f32": 0.25}}
    return {**point, **found, **costs}


def test_the_program_is_counted():
    found = compiled_step.count(HLO)
    names = "instructions", "fusions", "converts", "copies"
    assert [found[name] for name in names] == [7, 1, 0, 0]
    found = compiled_step.count(HLO.replace("constant({...})", "convert(%p.1)"))
    assert (found["converts"], found["copies"]) == (1, 0)
    found = compiled_step.count(HLO.replace("tuple(", "copy("))
    assert (found["converts"], found["copies"]) == (0, 1)
    products = jmpx.inspect.compiled(HLO).counts()
    assert products == {"bf16 x bf16 -> bf16": 1, "bf16 x f32 -> f32, highest": 1}


def test_what_moves_between_a_chip_and_its_memory_is_counted():
    hlo = """HloModule jit_step, is_scheduled=true

%fused (p.0: f32[8,4], p.1: bf16[4]) -> f32[8,4] {
  %p.0 = f32[8,4]{1,0:T(8,128)} parameter(0)
  ROOT %add = f32[8,4]{1,0:T(8,128)} add(%p.0, %p.0)
}

ENTRY %main (a: f32[8,4], b: bf16[4]) -> (f32[8,4], pred[4]) {
  %a = f32[8,4]{1,0:T(8,128)} parameter(0)
  %b = bf16[4]{0:T(256)} parameter(1)
  %fetch = (f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %here = f32[8,4]{1,0:T(8,128)S(1)} copy-done(%fetch)
  %part = ((f32[8,4]{1,0}), f32[2,4]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:2], [0:4]}
  %sum = f32[8,4]{1,0:T(8,128)} fusion(%here, /*index=1*/%b), kind=kLoop, calls=%fused
  %is = pred[4]{0} is-finite(%b), metadata={op_name="f(x)"}
  ROOT %both = (f32[8,4]{1,0}, pred[4]{0}) tuple(%sum, %is)
}
"""
    # Fetched whole and in part; the fusion reads b alone from there, and writes; so the last one.
    assert tpu_compile.hbm_bytes(hlo) == (128 + 32) + (8 + 128) + (8 + 4)
    assert compiled_step.count(hlo)["kernels"] == 5


def test_every_point_is_there_once_and_every_way_has_a_name():
    keys = [tuple(fields.values()) for fields in tpu_compile.points()]
    assert len(keys) == len(set(keys))
    ways = {fields["way"] for fields in tpu_compile.points()}
    assert ways <= {*model_steps.TRANSFORMER_WAYS} and ways <= {*tpu_compile.WAYS}
    ways = {fields["way"] for fields in tpu_compile.points() if fields["model"] == "resnet"}
    assert ways <= {*model_steps.RESNET_WAYS}
    there = {(*(f[key] for key in tpu_compile.GROUP), f["way"]) for f in tpu_compile.points()}
    for group, _, *pair, _ in tpu_compile.BARS:
        assert {(*group, way) for way in pair} <= there, group


# Products in 8 bits are those of GPUs, in `test_gpu_compile.py`.
IN_16_BITS = [way for way in model_steps.TRANSFORMER_WAYS if "fp8" not in way]


@pytest.mark.thorough
@pytest.mark.parametrize("way", IN_16_BITS)
def test_a_step_returns_what_it_takes_and_multiplies_in_its_dtype(way):
    if way.lower() in steps.PEERS:
        pytest.importorskip(way.lower())
    scanned = "carry" in way  # the rule of the others would match nothing
    model = "language_model" if scanned or "embedding" in way else "vit"
    traced = model_steps.trace(Point(model, way, 2, 2, scanned), jax.devices(), small=True)
    (leaves, *_), _ = traced.in_avals
    types = lambda arrays: [(x.shape, x.dtype) for x in arrays]  # noqa: E731
    state, loss = traced.out_info
    assert types(state) == types(leaves)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    found = jmpx.inspect.compiled(traced.lower(lowering_platforms=("cuda",))).products
    dtype = "f32" if way.startswith("float32") else "bf16"
    assert {one.operands for one in found} == {(dtype, dtype)}


def test_integers_are_not_cast_by_hand():
    found = steps.cast({"w": jnp.ones(2), "text": jnp.ones(2, jnp.int32)}, "bfloat16")
    assert {name: str(x.dtype) for name, x in found.items()} == {"w": "bfloat16", "text": "int32"}


def test_every_point_has_a_line(tmp_path, capsys):
    tpu_compile.main(["--list"])
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(tpu_compile.points())
    assert {line.partition("\t")[0] for line in listed} == {"there  "}
    tpu_compile.main(["--list", f"--out={tmp_path / 'none'}", "--only", "vit", "by hand"])
    listed = capsys.readouterr().out.splitlines()
    assert listed and all(text.startswith("missing\tvit\t") for text in listed)
    assert all(text.endswith("\tby hand") for text in listed)


def test_bars_and_tables():
    peaks = {"by hand": 100.0, "float32": 200.0, "autocast": 90.0, "autocast, save": 55.0}
    found = [line(way, peak) for way, peak in peaks.items()]
    found += [line("float32", batch=4096), line("by hand", chips="fsdp")]
    rows = {row.measure: row.cells()[1:] for row in tpu_compile.bars(found)}
    start = "ViT of width 768, 6 layers, batch 64: peak memory, autocast, save over"
    assert rows[f"{start} by hand"] == ("0.55", "≤ 0.54", "**no**")
    assert rows[f"{start} float32"] == ("0.275", "≤ 0.44", "yes")
    text = tpu_compile.short(found)
    assert "| `c=bf16,save=products` | 55 |" in text


@pytest.mark.slow  # a compiler of its own
@needs_libtpu
def test_a_step_is_compiled(tmp_path):
    out = tmp_path / "lines.jsonl"
    only = ["--only", "vit", "gradient functions", "one"]
    tpu_compile.main([f"--out={out}", "--small", *only])
    tpu_compile.main([f"--out={out}", "--small", *only])  # nothing is left
    (found,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert found["status"] == "ok" and found["peak_mib"] > 0 and found["gflop"] > 0
    assert found["products"] and all(name.startswith("bf16 x bf16") for name in found["products"])
