"""`jmpx.inspect.compiled`: the products of lowered and compiled programs, and their memory."""

import functools
import json
import math
import types
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.findings_of import shape as f32
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
HAS_FRAMES = jax.__version_info__ >= (0, 9)  # older programs name a line alone, of the call


def lowered(fn, *args, platform="cuda") -> Any:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,))


def read(fn, *args, platform="cuda"):
    return jmpx.inspect.compiled(lowered(fn, *args, platform=platform))


# Programs lowered for a platform, without its compiler.


def loss_fn(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w.astype(h.dtype)), None

    h, _ = lax.scan(layer, x.astype(jnp.bfloat16), params["layers"])
    return jnp.sum((h.astype(jnp.float32) @ params["head"]) ** 2)  # the head's line


PARAMS, X = {"layers": f32(3, 16, 16), "head": f32(16, 24)}, f32(8, 16)
LAYERS, HEADS = 9 * 2 * 8 * 16 * 16, 3 * 2 * 8 * 16 * 24  # FLOPs


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_lowered_step_has_the_products_of_the_program(platform):
    report = read(jax.grad(loss_fn), PARAMS, X, platform=platform)
    assert (report.program, report.devices, report.platform) == ("jit_loss_fn", 1, None)
    assert report.counts() == {"bf16 x bf16 -> bf16": 9, "f32 x f32 -> f32": 3}
    assert report.flops == LAYERS + HEADS and report.notes == ()
    assert {(one.kind, one.kernel, one.algorithm) for one in report.products} == {("dot", "", "")}
    assert sorted((one.is_backward, one.parameters, one.results) for one in report.products) == [
        (False, ("params['head']",), ()),
        (False, ("params['layers']",), ()),
        (True, (), ("result['head']",)),
        (True, (), ("result['layers']",)),
        (True, ("params['head']",), ()),
        (True, ("params['layers']",), ()),
    ]
    for one in report.products:  # the place is the user's
        if one.result == "f32":
            assert one.place is not None and one.place.file.endswith("test_products.py")
            assert one.place.line == loss_fn.__code__.co_firstlineno + 5
            assert one.scope.endswith("dot_general")
            assert not HAS_FRAMES or one.place.function == "loss_fn"


def test_a_step_compiled_for_a_cpu_has_the_flops_of_the_program_and_a_note():
    report = jmpx.inspect.compiled(lowered(jax.grad(loss_fn), PARAMS, X, platform="cpu").compile())
    assert report.platform == "cpu" and report.flops == LAYERS + HEADS
    assert sum(report.counts().values()) == 12
    (note,) = report.notes
    assert note.startswith("Compiled for a CPU") and note in str(report).replace("\n", " ")


def convolved(x, w, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


IMAGE, KERNEL = (2, 9, 7, 6), (3, 3, 6, 4)
CONVOLUTIONS = {
    "strides": (IMAGE, (3, 2, 6, 4), {"window_strides": (2, 3), "padding": "VALID"}),
    "cut": (IMAGE, KERNEL, {"window_strides": (1, 2), "padding": [(-1, 2), (0, -2)]}),
    "input with holes": (
        *((2, 5, 4, 6), KERNEL),
        {"window_strides": (1, 1), "padding": [(2, 1), (0, 3)], "lhs_dilation": (2, 3)},
    ),
    "kernel with holes": (
        *((2, 9, 8, 6), (3, 2, 6, 4)),
        {"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 3)},
    ),
    "groups": (
        *(IMAGE, (3, 3, 2, 12)),
        {"window_strides": (2, 2), "padding": "SAME", "feature_group_count": 3},
    ),
}
PRODUCTS = {
    name: (functools.partial(convolved, **options), f32(*x), f32(*w))
    for name, (x, w, options) in CONVOLUTIONS.items()
} | {
    "batched": (lambda x, y: jnp.einsum("bqd,bkd->bqk", x, y), f32(3, 5, 7), f32(3, 4, 7)),
    "two axes": (lambda x, y: jnp.tensordot(x, y, 2), f32(3, 5, 7), f32(5, 7, 4)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_of_the_audit(name):
    fn, *args = PRODUCTS[name]
    loss = lambda *args: jnp.sum(fn(*args) ** 2)  # noqa: E731
    grads = jax.grad(loss, argnums=(0, 1))
    audited = sum(each.flops for each in jmpx.inspect.audit(grads)(*args).products)
    assert read(grads, *args).flops == audited > 0
    kind = "convolution" if name in CONVOLUTIONS else "dot"
    assert {one.kind for one in read(loss, *args).products} == {kind}


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_of_scaled_blocks_has_the_flops_of_the_audit(batch):
    axes = tuple(range(len(batch)))
    numbers = ((len(batch) + 1,), (len(batch),)), (axes, axes)
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    product = lambda x, w: jax.nn.scaled_dot_general(x, w, numbers, jnp.bfloat16, configs)  # noqa: E731
    grads = jax.value_and_grad(lambda x, w: jnp.sum(product(x, w)), argnums=(0, 1))
    x, w = (jax.ShapeDtypeStruct((*batch, *shape), jnp.bfloat16) for shape in ((64, 96), (96, 32)))
    (audited,) = jmpx.inspect.audit(grads)(x, w).products
    assert (audited.dtypes, audited.count) == ("float8_e4m3fn x float8_e4m3fn", 3)
    assert audited.flops == 3 * 2 * math.prod((*batch, 64, 96, 32))
    report = read(grads, x, w, platform="cuda")
    assert {(one.kind, one.kernel) for one in report.products} == {
        ("scaled-dot", "__op$block_scaled_dot")
    }
    assert report.flops == audited.flops


def test_a_ragged_product_multiplies_no_zeros():
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    fn = lambda x, w, sizes: lax.ragged_dot(x, w, sizes)  # noqa: E731
    (one,) = read(fn, f32(12, 5), f32(3, 5, 7), sizes, platform="tpu").products
    assert (one.kind, one.dtypes) == ("ragged-dot", "f32 x f32 -> f32")
    assert one.flops == 2 * 12 * 5 * 7 and one.parameters == ("x", "w")


@pytest.mark.parametrize("algorithm", ["", "highest", "BF16_BF16_F32_X3"])
def test_the_algorithm_of_a_product_is_told(algorithm):
    fn = lambda x, y: lax.dot(x, y, precision=algorithm or None)  # noqa: E731
    counts = read(fn, f32(4, 4), f32(4, 4)).counts()
    assert counts == {f"f32 x f32 -> f32{', ' * bool(algorithm)}{algorithm.lower()}": 1}


def test_products_in_functions_loops_and_branches_count_as_often_as_they_run():
    twice = jax.jit(lambda x: x @ x @ x.astype(jnp.bfloat16))
    report = read(lambda x: twice(twice(x)) @ x, f32(4, 4))
    assert report.counts() == {"f32 x f32 -> f32": 5}

    def fn(x, n):
        loop = lambda n, x: lax.fori_loop(0, n, lambda i, x: x @ x, x)  # noqa: E731
        x = lax.while_loop(lambda x: x[0, 0] < 1, lambda x: loop(2, x), loop(5, x))
        return lax.cond(n > 0, lambda x: x @ x, lambda x: x, x)

    report = read(fn, f32(4, 4), jax.ShapeDtypeStruct((), jnp.int32))
    found = {(one.times, one.in_while, one.in_branch) for one in report.products}
    assert found == {(5, False, False), (2, True, False), (1, False, True)}
    assert len(report.notes) == 2 and "  2+  " in str(report)


def test_kernels_of_pallas_are_told():
    from jax.experimental import pallas as pl

    def kernel(x, out):
        out[...] = x[...] * 2

    call = pl.pallas_call(kernel, out_shape=f32(128, 128))
    report = read(lambda x: call(x) @ x, f32(128, 128), platform="tpu")
    assert report.counts() == {"f32 x f32 -> f32": 1}
    assert report.notes[0].startswith("1 call of kernels (tpu_custom_call)")


# The report.


def test_text_has_shares_by_dtypes_then_the_largest_products_and_json_every_field():
    report = read(jax.grad(loss_fn), PARAMS, X)
    title, _, sums, _, *rows = str(report).splitlines()
    assert title == "jit_loss_fn on 1 device" and sums == "12 products, 55.3 kFLOP"
    assert rows[-2:] == ["", "no collectives"]
    assert [row.split() for row in rows[1:3]] == [
        "66.7 % 36.9 kFLOP dot bf16 x bf16 -> bf16 9".split(),
        "33.3 % 18.4 kFLOP dot f32 x f32 -> f32 3".split(),
    ]
    first = "24.6 kFLOP dot bf16 x bf16 -> bf16 6 params['layers']"
    assert rows[5].split()[:10] == first.split()
    assert rows[5].split()[10].startswith("test_products.py:")
    found = json.loads(report.to_json())
    assert (found["program"], found["devices"], found["platform"]) == ("jit_loss_fn", 1, None)
    assert found["flops"] == report.flops == sum(row["flops"] for row in found["products"])
    for row, one in zip(found["products"], report.products, strict=True):
        assert {*row} == {*one._fields, "flops"} and row["operands"] == [*one.operands]
        assert one.place is not None and row["place"]["line"] == one.place.line
    report = read(lambda x: x + 1, f32(4))
    assert str(report) == "jit__lambda on 1 device\n\nno products\n\nno collectives"
    assert report.counts() == {} and report.memory is None


@pytest.mark.thorough
def test_steps_of_equinox_and_nnx_are_read():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, P("data")))
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    grad_fn = eqx.filter_grad(lambda model, x: jnp.sum(jax.vmap(model)(x)))
    module = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    for step in (
        eqx.filter_jit(grad_fn).lower(linear, x),
        nnx.jit(lambda model, x: nnx.grad(lambda model: model(x).sum())(model)).lower(module, x),
    ):
        report = jmpx.inspect.compiled(step)
        assert set(report.counts()) == {"f32 x f32 -> f32"} and report.memory is None
        assert "no collectives\n\nOutside of shard_map" in str(report)
        report = jmpx.inspect.compiled(step.compile())
        assert set(report.counts()) == {"f32 x f32 -> f32"} and report.memory is not None
        found = [one for one in report.collectives if one.bytes == 256]
        kinds = [(one.kind, one.is_backward, len(one.results)) for one in found]
        assert kinds == [("all-reduce", True, 1)]


# The memory of compiled programs.


def test_memory_is_that_of_one_device():
    def step(state, x):
        return state + jnp.sum(x), x[:2]

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    shardings: Any = {"in_shardings": (whole, rows), "out_shardings": (whole, whole)}
    lowered = jax.jit(step, donate_argnums=0, **shardings).lower(f32(256), f32(64, 4))
    report = jmpx.inspect.compiled(lowered.compile())
    memory = report.memory
    assert memory is not None
    assert memory.arguments == 4 * (256 + 64 * 4 // 8)
    # An output is a tuple, whose pointers XLA:CPU counts.
    assert 0 <= memory.outputs - 4 * (256 + 2 * 4) <= 2 * 8
    assert memory.aliases == 4 * 256 and memory.temporaries >= 0
    assert memory.peak >= memory.arguments
    told = f"memory of a device: arguments {4 * 288 / 1024:.2f} KiB, outputs "
    assert told in str(report) and str(report).count("memory of a device") == 1
    assert report.to_dict()["memory"] == memory._asdict()
    assert jmpx.inspect.compiled(lowered).memory is None


@pytest.mark.parametrize("said", [None, types.SimpleNamespace(temp_size_in_bytes=1)])
def test_a_backend_that_says_nothing_of_memory(monkeypatch, said):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: said)
    report = jmpx.inspect.compiled(jax.jit(jnp.sin).lower(1.0).compile())
    assert report.memory is None and str(report).endswith("no products\n\nno collectives")


# Texts that compilers for GPUs and TPUs wrote.

FOLDER = Path(__file__).parent
GPU = (FOLDER / "gpu.hlo").read_text()
TAPS = (8 * 3 - 1) ** 2  # the first of each row and column meets one line of padding
E4M3 = "f8e4m3fn"
SCORES = 2 * 4 * 128 * 2 * 64 * 256


def test_products_of_cublas_cudnn_and_triton_are_read():
    found = jmpx.inspect.compiled(GPU).products
    half = "f16 x f16 -> f16"
    assert [(one.kernel, one.kind, one.dtypes, one.flops) for one in found] == [
        ("__triton_gemm", "dot", "bf16 x bf16 -> f32", 2 * 2 * 8 * 64 * 32),
        ("__cublas$lt$matmul$f8", "dot", "f8e4m3fn x f8e5m2 -> bf16", 2 * 16 * 32 * 8),
        ("__cublas$gemm", "dot", "f32 x f32 -> f32, highest", 2 * 2 * 64 * 32 * 32),
        ("__cudnn$fmhaSoftmax", "attention", half, 2 * SCORES),
        ("__cudnn$fmhaSoftmaxBackward", "attention", half, 5 * SCORES),
        ("__cudnn$convForward", "convolution", half, 2 * 2 * 8 * 32 * TAPS),
        ("__cudnn$convBackwardInput", "convolution", half, 2 * 2 * 8 * 32 * TAPS),
        ("__cudnn$convBackwardFilter", "convolution", half, 2 * 2 * 8 * 32 * TAPS),
        ("__cudnn$blockScaledDot", "scaled-dot", f"{E4M3} x {E4M3} -> bf16", 2 * 2 * 16 * 8 * 64),
    ]
    assert found[0].parameters == ("params['a']", "params['b']")
    assert found[0].scope == "jit(step)/net/dot_general" and found[0].results == ("output 0",)
    assert found[0].place is not None and found[0].place[:2] == ("/home/me/net.py", 7)


def test_kernels_that_cannot_be_read_are_told():
    hlo = GPU.replace("__cudnn$fmhaSoftmaxBackward", "tpu_custom_call")
    hlo = hlo.replace("__cudnn$convForward", "__gpu$xla.gpu.triton")
    report = jmpx.inspect.compiled(hlo)
    assert [one for one in report.products if one.kernel in ("", "tpu_custom_call")] == []
    told = "2 calls of kernels (__gpu$xla.gpu.triton, tpu_custom_call) cannot be read"
    assert len(report.products) == 7 and report.notes[0].startswith(told)


def test_a_product_of_a_tpu_counts_no_holes():
    """A batched product of a TPU is a convolution whose kernel meets one part of its input."""
    (one,) = jmpx.inspect.compiled((FOLDER / "tpu_product.hlo").read_text()).products
    assert one.dtypes == "bf16 x bf16 -> bf16" and one.flops == 3 * 2 * 16 * 32 * 8


TPU = (FOLDER / "tpu.hlo").read_text()


def test_what_the_compiler_of_tpus_writes():
    # One gather in the fusions that overlap with it, a reduce-scatter as an all-reduce and a
    # slice, asynchronous collectives, and several arrays in one collective.
    found = jmpx.inspect.compiled(TPU).collectives
    assert sorted((*one[:4], one.results) for one in found) == [
        ("all-gather", "bf16", 256, 8, ()),
        ("all-gather", "f32", 32, 4, ()),
        ("all-reduce", "f32", 4, 8, ()),
        ("all-reduce", "f32", 256, 8, ()),
        ("all-reduce", "pred", 1, 8, ()),
        ("collective-permute", "f32", 16, 8, ()),
        ("reduce-scatter", "f32", 512, 4, ("output 0",)),
    ]
    assert [one.dtype for one in found if one.is_scalar] == ["pred", "f32"]
    assert {(one.times, one.in_while, one.in_branch, one.parameter) for one in found} == {
        (1, False, False, "")
    }
