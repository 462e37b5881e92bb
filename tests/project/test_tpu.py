"""What a TPU's compiler makes of precisions and of sharded steps, where libtpu is there."""

import functools
import importlib.util
from typing import Any

import fsdp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import report
import tpu
import tpu_matmul
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import Transformer

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
HLO = """HloModule jit_step, is_scheduled=true

%inner (p.1: bf16[8,4]) -> f32[8,2] {
  %p.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %w.1 = f32[4,2]{1,0:T(8,128)} constant({...})
  ROOT %dot.1 = f32[8,2]{1,0} convolution(%p.1, %w.1), dim_labels=bf_io->bf, \
operand_precision={highest,highest}, metadata={op_name="jit(step)/net/router/dot_general"}
}

ENTRY %main (a: bf16[8,4]) -> (f32[8,2], bf16[8,8]) {
  %a = bf16[8,4]{1,0} parameter(0)
  %dot.2 = bf16[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
metadata={op_name="jit(step)/net/up/dot_general"}
  %fusion = f32[8,2]{1,0} fusion(%a), kind=kOutput, calls=%inner, \
backend_config={"estimated_cycles":"77"}
  ROOT %pair = (f32[8,2]{1,0}, bf16[8,8]{1,0}) tuple(%fusion, %dot.2)
}
"""


def test_cycles_are_those_of_the_fusions_of_products():
    up, router = jmpx.inspect.compiled(HLO).products
    assert router.scope.split("/")[2] == "router" and router.dtypes == "bf16 x f32 -> f32, highest"
    assert tpu_matmul.cycles(HLO, [router]) == 77 and tpu_matmul.cycles(HLO, [up]) == 0
    for word, same in (("highest,highest", True), ("/up/", True), ("77", False), ("dot(", False)):
        changed = tpu_matmul.without_precision(HLO.replace(word, "high"))
        assert (changed == tpu_matmul.without_precision(HLO)) is same


def test_every_policy_of_the_steps_can_be_read():
    for way, policy_map in tpu_matmul.STEPS:
        jmpx.get_policy_map(policy_map)
        assert way in tpu_matmul.WAYS
    assert f"{tpu_matmul.ROUTER},m=highest".endswith(report.ROUTER)


@pytest.mark.slow  # a compiler of its own
@needs_libtpu
@pytest.mark.parametrize("way", ["adapter", "autocast"])
def test_the_products_of_the_router_are_float32_and_the_rest_bfloat16(way):
    policy_map = f"{tpu_matmul.ROUTER},m=highest"
    found = tpu_matmul.measure_step(way, policy_map, width=128, tokens=256)
    # Two routers: two forward, two for their weights, and one for the tokens, which are the input
    # of the first. The operand that is not float32 is exact in bfloat16.
    assert sum(found["router"].values()) == 5
    assert all(key.endswith("-> f32, highest") for key in found["router"])
    assert sum(n for key, n in found["router"].items() if "f32 " in key.split("->")[0]) >= 3
    # Two layers of experts and the head, likewise.
    assert sum(found["rest"].values()) == 14
    assert all(key.startswith("bf16 x bf16 ->") for key in found["rest"])


@pytest.mark.slow
@needs_libtpu
def test_a_float32_product_takes_one_pass_unless_its_precision_asks_for_more():
    precisions = "unset", "high", "highest"
    full = [tpu_matmul.measure_product("float32", name) for name in precisions]
    low = [tpu_matmul.measure_product("bfloat16", name) for name in precisions]
    one, three, six = (record["cycles"] for record in full)
    assert three > 2 * one and six > 4 * one
    assert [record["as_if_unset"] for record in full] == [True, False, False]
    assert [record["cycles"] for record in low] == 3 * [one]  # the attribute changes nothing
    assert all(record["as_if_unset"] for record in low)
    assert [*low[2]["products"]] == ["bf16 x bf16 -> bf16, highest"]


@pytest.mark.slow
@needs_libtpu
def test_a_compiled_step_has_the_products_that_the_audit_counts():
    def loss_fn(params, x):
        def layer(h, w):
            values = h @ w.astype(h.dtype)
            scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, values))
            return jnp.tanh(jnp.einsum("bqk,bkd->bqd", scores, values)), None

        h, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), params["layers"])
        return jnp.sum((h.astype(jnp.float32) @ params["head"]) ** 2)

    params = {"layers": jnp.ones((3, 256, 256)), "head": jnp.ones((256, 128))}
    program = tpu.compiled(jax.grad(loss_fn), (params, x := jnp.ones((4, 128, 256))))
    report = jmpx.inspect.compiled(program)
    audited = jmpx.inspect.audit(loss_fn)(params, x).products
    # The scores meet the values in the compiler's own kernel, once in each of the layers.
    (note,) = report.notes
    assert note.startswith("3 calls of kernels (tpu_custom_call) cannot be read")
    inside = 3 * 2 * 4 * 128 * 128 * 256
    assert report.flops == sum(each.flops for each in audited) - inside
    assert report.platform == "tpu" and {one.kind for one in report.products} == {"convolution"}


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(("reduce", "dtype"), [("", "f32"), (",r=bf16", "bf16")])
def test_gradients_are_summed_in_the_dtype_of_the_policy(reduce, dtype):
    found = tpu_matmul.measure_reduction(f"c=bf16,o=f32{reduce}", 256)
    assert found["all_reduce"] == [f"{dtype}[256,256]"]


@pytest.fixture(scope="module")
def problem():
    with jax.numpy_dtype_promotion("standard"):
        # Wide enough that the compiler gathers the weights by themselves.
        model = Transformer(layers=1, width=256, hidden=512, classes=248, islands=True)
        return fsdp.problem(model, sequences=64, length=16)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("c=bf16", "bf16"),
        ("c=bf16,r=f32", "f32"),
        (f"{fsdp.GATHER}, c=bf16", "f32"),
        (f"{fsdp.GATHER}, c=bf16,r=bf16", "bf16"),
    ],
)
def test_sharded_weights_are_gathered_in_bfloat16_and_reduced_in_the_policys_dtype(
    way, dtype, problem
):
    found = fsdp.measure(way, "tpu", problem, tpu.devices())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.params)) * 7 / 8 / 2**20
    gathers = {key: sent for key, sent in found["by_kind"].items() if key.startswith("all-gather")}
    sums = {key: sent for key, sent in found["by_kind"].items() if key.startswith("reduce-scatter")}
    assert [*gathers] == ["all-gather bf16"] and [*sums] == [f"reduce-scatter {dtype}"]
    # Small arrays, biases and scales, are all-reduced. Weights may be gathered once more, backward.
    assert 0.9 * size / 2 < sum(gathers.values()) < 2.1 * size / 2
    assert 0.9 * size < sum(sums.values()) * (2 if dtype == "bf16" else 1) < 1.1 * size


@pytest.mark.slow
@needs_libtpu
def test_stacked_layers_are_reduced_inside_of_the_loop():
    mesh, (layers, size) = Mesh(np.array(tpu.devices()), ("data",)), (4, 256)
    split, rows = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P("data"))

    def step(policy, weights, x):
        def loss(weights, x):
            layer = jax.checkpoint(lambda h, w: (h + jax.nn.gelu(h @ w), None))
            return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

        grads = jmpx.grad(loss, jmpx.NoOpLossScale(), policy=policy)(weights, x).grads
        return weights - 0.1 * grads

    shapes = (layers, size, size), (32768, size)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for shape, sharding in zip(shapes, (split, rows), strict=True)
    ]
    peaks, sums = [], []
    for policy in ("c=bf16", "c=bf16,r=f32"):
        jitted = jax.jit(functools.partial(step, policy), out_shardings=split, donate_argnums=0)
        program: Any = jitted.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
        peaks.append(program.memory_analysis().peak_memory_in_bytes)
        found = jmpx.inspect.compiled(program.as_text()).collectives
        sums.append([one for one in found if one.dtype == "f32" and one.bytes > 1024])
    # Each turn sums a gradient while its product runs: parts of it go around, by permutes.
    assert not sums[0] and {one.bytes for one in sums[1]} == {4 * size**2 // mesh.size}
    assert {one.kind for one in sums[1]} == {"collective-permute"}
    assert all(one.times % layers == 0 for one in sums[1]) and peaks[1] <= peaks[0]
