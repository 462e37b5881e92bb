"""The benchmark of what the compiler of NVIDIA's GPUs makes of train steps; it needs no GPU."""

import collections
import importlib
import json
import sys
from functools import partial

import compiled_step
import fsdp
import gpu
import gpu_compile
import haiku as hk
import jax
import jax.numpy as jnp
import model_steps
import pytest
import records
from compiled_step import BANDWIDTH, Program
from helpers import heads
from helpers.compilers import MISSING

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
needs_compiler = pytest.mark.skipif(MISSING["h100"] != "", reason=MISSING["h100"])
LOW = jnp.bfloat16
HLO = """HloModule jit_step, is_scheduled=true

%fused (p.0: f32[8,4]) -> bf16[8,4] {
  %p.0 = f32[8,4]{1,0} parameter(0)
  ROOT %convert = bf16[8,4]{1,0} convert(%p.0)
}

%body (p.1: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %p.1 = (s32[], bf16[8,8]{1,0}) parameter(0)
  %w.1 = bf16[8,8]{1,0} get-tuple-element(%p.1), index=1
  %gemm.1 = (f16[8,8]{1,0}, s8[64]{0}) custom-call(%w.1, %w.1), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}},\
"reification_cost":[{"exec_time_us":16.0,"name":"sol"}]}
  ROOT %both.1 = (s32[], bf16[8,8]{1,0}) tuple(%w.1, %w.1)
}

%skip (p.2: f32[8]) -> f32[8] {
  ROOT %p.2 = f32[8]{0} parameter(0)
}

%update (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  %copy.3 = f32[8]{0} copy(%p.3)
  ROOT %copy.4 = f32[8]{0} copy(%copy.3)
}

ENTRY %main (a: f32[8,4]) -> f32[8,8] {
  %a = f32[8,4]{1,0} parameter(0)
  %low = bf16[8,4]{1,0} fusion(%a), kind=kLoop, calls=%fused, \
backend_config={"reification_cost":[{"exec_time_us":9.0,"name":""},{"exec_time_us":3.0,"name":"sol"}]}
  %loop = (s32[], bf16[8,8]{1,0}) while(%low), condition=%skip, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %kept = f32[8]{0} conditional(%a, %a, %a), branch_computations={%skip, %update}
  %sum = f32[8]{0} all-reduce(%kept), to_apply=%skip
  %attention = (bf16[8,4]{1,0}, u8[0]{0}) custom-call(%low, %low), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":\
{"intermediate_tensor_shape":{"dimensions":["8","8"]}}}
  ROOT %gemm = f32[8,8]{1,0} custom-call(%a, %a), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"precision_config":{"operand_precision":\
["HIGHEST","HIGHEST"]}},"reification_cost":[{"exec_time_us":7.0,"name":"sol"}]}
}
"""


def test_what_runs_is_read_from_the_program():
    assert jmpx.inspect.compiled(HLO).counts() == {
        "bf16 x bf16 -> bf16": 1,
        "bf16 x bf16 -> f16": 5,
        "f32 x f32 -> f32, highest": 1,
    }
    assert sum(times for _, times in Program(HLO).kernels()) == 1 + 5 + 2 + 1 + 1 + 1


def test_a_step_is_estimated_as_the_sum_of_what_runs():
    milliseconds, untimed = Program(HLO).estimate()
    # A float16 product's 16 us are eight times bfloat16's, as which it counts; copies, their bytes.
    copies = 2 * 2 * 32 / BANDWIDTH * 1e6
    assert milliseconds == pytest.approx((3 + 5 * 2 + 7 + copies) / 1e3)
    assert untimed == {"all-reduce": 1, "__cudnn$fmhaSoftmax": 1}


def test_every_point_is_there_once_can_be_made_and_has_a_line(capsys):
    points = [point for found, _ in gpu_compile.BENCHMARKS.values() for point in found]
    keys = [tuple(fields.values()) for fields in points]
    assert len(keys) == len(set(keys))
    assert {fields["way"] for fields in points} <= {*model_steps.TRANSFORMER_WAYS}
    gpu_compile.main(["--list"])
    listed = capsys.readouterr().out.splitlines()
    assert {line.partition("\t")[0] for line in listed} == {"there  "}


@pytest.mark.parametrize("version", ["0.1", *gpu.GPU_VERSIONS])
def test_without_the_compiler_a_line_says_what_to_do(version, monkeypatch, capsys):
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setitem(sys.modules, "jax_cuda12_plugin", None)
    gpu.devices.cache_clear()
    with pytest.raises(SystemExit, match="2"):
        gpu.devices()
    told = "JAX 0.1 cannot compile" if version == "0.1" else "is missing: pip install"
    printed = capsys.readouterr().err
    assert told in printed and printed.count("\n") == 1


def test_the_tables_compare_what_was_measured():
    found = records.read(gpu_compile.RESULTS)
    assert "| 1.000 |" in gpu_compile.costs(found)
    assert "| `c=bf16; */mlp: m=fp8` | 24 | 0 |" in gpu_compile.eight_bits(found)
    assert "| `c=bf16; */mlp: m=mxfp8` | 0 | 24 |" in gpu_compile.eight_bits(found)


# Compiled.

TINY = [("float32", "bfloat16", "f32"), ("autocast, save", "bfloat16", "bf16")]
TINY += [("gradient functions", "float16", "f16")]


@pytest.mark.slow  # a compiler of its own
@needs_compiler
@pytest.mark.parametrize(("way", "dtype", "multiplied"), TINY)
def test_a_step_multiplies_in_its_dtype(way, dtype, multiplied, tmp_path):
    out = tmp_path / "lines.jsonl"
    only = ["--only", "H100", "vit", "64", "4", "False", way, dtype]
    gpu_compile.main([f"--out={out}", "--small", *only])
    (found,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert found["status"] == "ok" and found["peak_mib"] > 0 and found["estimate_ms"] > 0
    assert found["products"]
    assert all(name.startswith(f"{multiplied} x {multiplied}") for name in found["products"])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("chip", gpu.OPTIONS)
def test_float8_is_multiplied_as_float8_by_chips_with_units_for_it(chip):
    on = gpu.on(chip)
    x = jax.ShapeDtypeStruct((256, 256), "float8_e4m3fn", sharding=on)
    product = jax.jit(lambda x: jax.lax.dot(x, x, preferred_element_type="bfloat16"))
    (found,) = gpu_compile.compiled(lambda: product.trace(x), chip)["products"]
    assert found.startswith("f8e4m3fn x f8e4m3fn" if chip != "A100" else "bf16 x bf16")


def plain(x, first, second):
    return jax.nn.gelu(x @ first) @ second


def of_experts(x, first, second):
    hidden = jax.nn.gelu(jnp.einsum("ebd,edf->ebf", x, first))
    return jnp.einsum("ebf,efd->ebd", hidden, second)


FORMS = [("H100", "c=bf16; */mlp: m=fp8"), ("H100", "c=f16; */mlp: m=fp8")]
FORMS += [("B200", "c=bf16; */mlp: m=fp8"), ("B200", "c=bf16; */mlp: m=mxfp8")]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("chip", "policy"), FORMS)
@pytest.mark.parametrize("mlp", [plain, of_experts])
def test_all_products_of_a_rule_for_eight_bits_are_kernels_for_them(mlp, chip, policy):
    @jmpx.autocast(policy=policy)
    def loss_fn(layers, x):
        for layer in layers:
            with jax.named_scope("mlp"):
                x = x + mlp(x, *layer)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    on, batch = gpu.on(chip), () if mlp is plain else (4,)
    shape = lambda *sizes: jax.ShapeDtypeStruct((*batch, *sizes), "float32", sharding=on)  # noqa: E731
    layers, x = [(shape(128, 256), shape(256, 128))] * 2, shape(256, 128)
    grads = jax.jit(jax.grad(loss_fn, argnums=(0, 1)))
    with jax.default_device(gpu.devices(chip)[0]):
        found = gpu_compile.compiled(lambda: grads.trace(layers, x), chip)
    kernel = "__cudnn$blockScaledDot" if "mxfp8" in policy else "__cublas$lt$matmul$f8"
    assert found["calls"] == {kernel: 12}  # three for each of two products of two layers
    assert gpu_compile.in_eight_bits(found) == 12 and "estimate_ms" not in found


@pytest.mark.slow
@needs_compiler
def test_the_default_compiles_to_what_where_compiles_to():
    def measure(way):
        point = {"model": "vit", "layers": 1, "batch": 2, "scanned": False, "dtype": "float16"}
        found = gpu_compile.measure("H100", small=True, way=way, **point)
        return {key: value for key, value in found.items() if "_cpu_s" not in key} | {
            "compile_s": 0,
            "load": 0,
        }

    ways = "gradient functions", "gradient functions, where", "gradient functions, cond"
    default, where, cond = map(measure, ways)
    assert default == where
    assert default["estimate_ms"] < cond["estimate_ms"]


# What `jmpx.inspect.compiled` reads.


def loss_fn(params, x):
    def layer(h, w):
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, h))
        return jnp.tanh(jnp.einsum("bqk,bkd->bqd", scores, h @ w.astype(h.dtype))), None

    h, _ = jax.lax.scan(layer, x.astype(LOW), params["layers"])
    return jnp.sum((h.astype(jnp.float32) @ params["head"]) ** 2)


SHORT = {"bfloat16": "bf16", "float32": "f32"}


def compiled_loss(chip, **options):
    on = gpu.on(chip)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on)  # noqa: E731
    params, x = {"layers": f32(3, 256, 256), "head": f32(256, 128)}, f32(4, 128, 256)
    lowered = jax.jit(jax.grad(loss_fn)).trace(params, x).lower(lowering_platforms=("cuda",))
    audited = jmpx.inspect.audit(loss_fn)(params, x).products
    return lowered, lowered.compile({**gpu.OPTIONS[chip], **options}), audited


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("chip", gpu.OPTIONS)
@pytest.mark.parametrize("kernel", ["__cublas$lt$matmul", "__triton_nested_gemm_fusion"])
def test_a_compiled_step_has_the_products_that_the_audit_counts(chip, kernel):
    triton = "triton" in kernel
    lowered, compiled, audited = compiled_loss(chip, xla_gpu_enable_triton_gemm=triton)
    report = jmpx.inspect.compiled(compiled)
    assert report.platform == "gpu" and report.notes == ()
    for products in (report, jmpx.inspect.compiled(lowered)):
        flops = collections.Counter[str]()
        for one in products.products:
            flops[one.operands[0]] += one.flops
        assert flops == {SHORT[each.dtypes.split()[0]]: each.flops for each in audited}
    assert {one.kernel for one in report.products} == {kernel}
    heads = [one for one in report.products if one.operands == ("f32", "f32")]
    assert len(heads) == 3 and {one.place and one.place.function for one in heads} == {"loss_fn"}
    assert sum(one.times for one in report.products) == 3 * 9 + 3


# cuDNN's attention, on the compiler.


def attention(w, x, dtype=None, **options):
    q, k, v = ((x @ w[i]).reshape(*x.shape[:2], 4, 64) for i in range(3))
    q, k, v = (each.astype(dtype or each.dtype) for each in (q, k, v))
    attended = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)
    return attended.reshape(x.shape).astype(x.dtype) @ w[3]


def masked(w, x):
    bias, mask = jnp.zeros((1, 4, 256, 256), LOW), jnp.ones((1, 1, 256, 256), bool)
    return attention(w, x, LOW, bias=bias, mask=mask)


def in_haiku(policy, w, x):
    class Attention(hk.Module):
        def __call__(self, x):
            return attention(hk.get_parameter("w", (4, 256, 256), init=jnp.zeros), x)

    net = hk.transform(lambda x: Attention()(x))
    return jmpx.apply_policy(net.apply, policy)({"attention": {"w": w}}, None, x)


CAST, CAUSAL = partial(attention, dtype=LOW), partial(attention, dtype=LOW, is_causal=True)
FUSED = {
    "arguments": jmpx.apply_policy(attention, "by=arguments,c=bf16"),
    "modules": partial(in_haiku, "by=modules,c=bf16,o=f32"),
    "operations": jmpx.apply_policy(CAST, "by=operations,c=bf16"),
    "autocast": jmpx.autocast(CAUSAL, "c=bf16"),
    "save": jmpx.autocast(CAUSAL, "c=bf16", save="products"),
    "save, with attention": jmpx.autocast(CAUSAL, "c=bf16", save="products+attention"),
    "mask and bias": jmpx.autocast(masked, "c=bf16", save="products"),
}


@pytest.fixture
def with_cudnn(monkeypatch):
    """Has JAX find a cuDNN of a certain version; the compiler needs none."""
    versions = importlib.import_module("jax_cuda12_plugin._versions")
    monkeypatch.setattr(versions, "cudnn_get_version", lambda: 91000)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize("name", FUSED)
def test_an_attention_is_one_kernel_forward_and_one_backward(name):
    def grads(w, x):
        return jax.grad(lambda w: jnp.square(FUSED[name](w, x).astype(jnp.float32)).sum())(w)

    on = gpu.on()
    w, x = (jax.ShapeDtypeStruct((n, 256, 256), "float32", sharding=on) for n in (4, 2))
    lowered = jax.jit(grads).trace(w, x).lower(lowering_platforms=("cuda",))
    for step in lowered, lowered.compile(gpu.OPTIONS["H100"]):
        found = [one for one in jmpx.inspect.compiled(step).products if one.kind == "attention"]
        assert [(one.kernel.endswith("Backward"), one.times) for one in found] == [
            (False, 1),
            (True, 1),
        ]


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("with_cudnn")
def test_an_attention_in_float32_is_refused_with_the_edit():
    w, x = (jax.ShapeDtypeStruct((n, 256, 256), "float32") for n in (4, 2))
    with pytest.raises(NotImplementedError, match="float32") as error:
        jax.eval_shape(jmpx.autocast(attention, "c=bf16"), w, x)
    assert any("q.astype(jnp.bfloat16)" in note for note in error.value.__notes__)


# How they multiply float32.


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("chip", gpu.OPTIONS)
@pytest.mark.parametrize("matmul", ["", ",m=highest"])
def test_float32_is_multiplied_in_tf32_unless_the_policy_says_highest(matmul, chip):
    on = gpu.on(chip)
    x = jax.ShapeDtypeStruct((256, 256), "float32", sharding=on)
    product = jax.jit(jmpx.apply_policy(lambda x: x @ x, f"c=f32{matmul}"))
    (found,) = gpu_compile.compiled(lambda: product.trace(x), chip)["products"]
    assert found == "f32 x f32 -> f32" + (", highest" if matmul else "")
    audited = jmpx.inspect.audit(lambda x: jnp.sum(product(x)), platform="cuda")(x)
    assert ["TF32" in finding.message for finding in audited.findings] == [True] * (not matmul)


# Collectives, which eight GPUs begin and end apart.


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("way", ["c=bf16", "c=bf16,r=f32"])
def test_what_gpus_send_is_read_as_the_benchmark_reads_it(way):
    step = fsdp.prepare(way, fsdp.problem(), gpu.devices("H100", fsdp.DEVICES)).traced
    program = step.lower(lowering_platforms=("cuda",)).compile(gpu.OPTIONS["H100"])
    report = jmpx.inspect.compiled(program)
    assert (report.platform, report.devices) == ("gpu", fsdp.DEVICES)
    sent = collections.defaultdict[str, float](float)
    for one in report.collectives:
        sent[f"{one.kind} {one.dtype}"] += one.sent / 2**20
    counted = compiled_step.mib_by_kind(compiled_step.sends(program.as_text()))
    assert {kind: sent[kind] for kind in counted} == pytest.approx(counted, rel=1e-3)
    sums = "f32" if "r=f32" in way else "bf16"
    assert sent[f"reduce-scatter {sums}"] > 1 and sent["all-gather bf16"] > 1
    assert sent["all-gather f32"] == 0


@pytest.mark.slow
@needs_compiler
def test_a_head_that_hands_out_float32_multiplies_in_bfloat16():
    """None of its operands is converted to float32, and the logits are not rounded."""
    on = gpu.on()
    rounded, kept, full = (
        gpu_compile.compiled(lambda policy=policy: heads.traced(policy, on), "H100")
        for policy in (heads.ROUNDED, heads.KEPT, f"{heads.ROUNDED}; head: c=f32,o=f32")
    )
    assert {*rounded["products"]} == {"bf16 x bf16 -> bf16"}
    assert {*kept["products"]} == {"bf16 x bf16 -> bf16", "bf16 x bf16 -> f32"}
    assert kept["products"]["bf16 x bf16 -> f32"] == full["products"]["f32 x f32 -> f32"] == 3
    assert kept["estimate_ms"] < 1.05 * rounded["estimate_ms"] < 1.2 * full["estimate_ms"]
