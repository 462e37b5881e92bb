"""Compiles for a TPU v5e, without the chip, and reads the precisions in the compiled programs.

    pip install -e '.[bench,haiku,tpu]'
    python benchmarks/tpu_matmul.py --again --only tpu_steps       # products of train steps
    python benchmarks/tpu_matmul.py --again --only tpu_products    # one product in each precision
    python benchmarks/tpu_matmul.py --again --only tpu_reductions  # gradients of eight devices

A program compiled for a CPU does not show them: XLA computes 16-bit products and sums in float32
there. The package libtpu contains the compiler of TPUs, which needs no TPU.

A TPU multiplies in bfloat16. A float32 product takes one pass over operands rounded to bfloat16, as
a bfloat16 product does, unless its precision asks for more: `high` and `highest` split the operands
into parts and take several passes. So a line counts the products of the optimized program by their
operands' dtypes and their precision (`convolution` is what TPUs call a product). `cycles` is the
compiler's own estimate of the operations that contain them. The steps train experts that a router
mixes, written in Haiku, and count the router's products, forward and backward, apart.
"""

import collections
import re
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import records
import tpu
from records import PyTree, Record

import jmpx
from jmpx._inspect.hlo.found import kind_of
from jmpx._inspect.hlo.module import Module

# --- Reading what came out ---

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
ALL_REDUCE = re.compile(r" = \(?(\w+)\[([\d,]+)\]\S* all-reduce(?:-start)?\(")
Products = Sequence[Any]  # of `jmpx.inspect.Compiled`


def count(products: Products) -> dict[str, int]:
    """Counts products by their dtypes; those of a loop count once."""
    return dict(sorted(collections.Counter(one.dtypes for one in products).items()))


def cycles(hlo: str, products: Products) -> int:
    """Returns the estimated cycles of the fusions that contain these products."""
    every, scopes = Module(hlo).instructions.values(), {product.scope for product in products}
    inside = {one.computation for one in every if kind_of(one) and one.scope in scopes}
    fusions = [one for one in every if one.kind == "fusion" and inside & {*one.called}]
    return sum(int(found[1]) for one in fusions if (found := CYCLES.search(one.rest)))


def without_precision(hlo: str) -> str:
    """Returns HLO as text without what names precisions or the lines of Python it comes from."""
    body = re.sub(r", (?:operand_precision|metadata)=\{[^}]*\}", "", hlo)
    return body[body.index("\n%") :]


# --- Train steps of a model with a router ---


class Experts(hk.Module):
    """Experts that read all tokens, and a router that says how to mix what they return."""

    def __call__(self, x: jax.Array, width: int, experts: int) -> jax.Array:
        gates = jax.nn.softmax(hk.Linear(experts, name="router")(x))
        hidden = jax.nn.gelu(hk.Linear(experts * width, name="up")(x))
        mixed = hidden.reshape(*x.shape[:-1], experts, width) * gates[..., None]
        return x + hk.Linear(width, name="down")(mixed.reshape(hidden.shape))


@hk.transform
def network(x: jax.Array) -> jax.Array:
    for _ in range(2):
        x = Experts()(x, x.shape[-1], experts=8)
    return hk.Linear(128, name="head")(x)


def apply(params: PyTree, x: jax.Array) -> jax.Array:
    return network.apply(params, None, x)


WAYS = {
    "none": lambda policy_map: apply,
    "adapter": lambda policy_map: jmpx.apply_policy(apply, f"by=modules,{policy_map}"),
    "autocast": lambda policy_map: jmpx.autocast(apply, policy_map),
}


def measure_step(way: str, policy: str, width: int = 256, tokens: int = 1024, **_: Any) -> Record:
    """Compiles a train step and counts the products of its routers and of the rest."""
    forward, optimizer = WAYS[way](policy), optax.sgd(1e-3)

    def loss_fn(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = forward(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: PyTree, x: jax.Array, labels: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
        updates, _ = optimizer.update(grads, optimizer.init(params))
        return optax.apply_updates(params, updates), loss

    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    params = jax.eval_shape(network.init, jax.random.key(0), x)
    hlo = tpu.compiled(step, (params, x, labels)).as_text()
    products = jmpx.inspect.compiled(hlo).products
    routers = [product for product in products if "/router/" in product.scope]
    rest = [product for product in products if product not in routers]
    return {
        "router": count(routers),
        "rest": count(rest),
        "cycles_router": cycles(hlo, routers),
        "cycles_rest": cycles(hlo, rest),
    }


# --- One product ---


def compile_product(dtype: str, precision: str, size: int) -> str:
    product = jax.lax.dot
    if precision != "unset":
        product = jax.default_matmul_precision(precision)(product)
    return tpu.compiled(product, [jax.ShapeDtypeStruct((size, size), dtype)] * 2).as_text()


def measure_product(dtype: str, precision: str, size: int = 2048, **_: Any) -> Record:
    """Compiles the product of two square matrices; one that is refused is a line, too."""
    try:
        hlo = compile_product(dtype, precision, size)
    except jax.errors.JaxRuntimeError as error:
        return {"status": str(error).splitlines()[0]}
    unset, products = compile_product(dtype, "unset", size), jmpx.inspect.compiled(hlo).products
    return {
        "status": "ok",
        "products": count(products),
        "cycles": cycles(hlo, products),
        "as_if_unset": without_precision(hlo) == without_precision(unset),
    }


# --- The sum of gradients over devices ---


def measure_reduction(policy: str, size: int = 512, **_: Any) -> Record:
    """Compiles gradients of one weight, averaged over eight chips."""
    mesh = jax.sharding.Mesh(np.array(tpu.devices()), ("data",))
    everywhere, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x @ w).astype(jnp.float32))

    def grads(w: jax.Array, x: jax.Array) -> jax.Array:
        way = f"by=arguments,{policy}"
        return jmpx.grad(loss_fn, jmpx.NoOpLossScale(), over="data", policy=way)(w, x).grads

    mapped = jax.shard_map(
        grads, mesh=mesh, in_specs=(everywhere, rows), out_specs=everywhere, check_vma=False
    )
    shardings = [jax.sharding.NamedSharding(mesh, spec) for spec in (everywhere, rows)]
    array = jax.ShapeDtypeStruct((size, size), jnp.float32)
    hlo = tpu.compiled(mapped, [array, array], shardings).as_text()
    return {"all_reduce": [f"{dtype}[{shape}]" for dtype, shape in ALL_REDUCE.findall(hlo)]}


# --- The points ---

ROUTER = "c=bf16,o=f32; */router: c=f32"
STEPS = [
    ("none", "c=f32"),
    ("adapter", "c=f32,m=highest"),
    ("adapter", "c=bf16,o=f32"),
    ("adapter", "c=bf16,o=f32,m=highest"),
    ("adapter", ROUTER),
    ("adapter", f"{ROUTER},m=highest"),
    ("autocast", f"{ROUTER},m=highest"),
]
PRECISIONS = (
    *("unset", "default", "high", "highest"),
    *("BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_BF16", "F32_F32_F32"),
)
POLICIES = tuple(f"c=bf16,o=f32{reduce}" for reduce in ("", ",r=f32", ",r=bf16", ",r=f16"))
PRODUCTS = [(dtype, name) for dtype in ("float32", "bfloat16") for name in PRECISIONS]
BENCHMARKS: records.Benchmarks = {
    "tpu_steps": ([{"way": way, "policy": policy} for way, policy in STEPS], measure_step),
    "tpu_products": (
        [{"dtype": dtype, "precision": name, "size": 2048} for dtype, name in PRODUCTS],
        measure_product,
    ),
    "tpu_reductions": ([{"policy": p, "size": 512} for p in POLICIES], measure_reduction),
}

if __name__ == "__main__":
    records.main(__doc__, BENCHMARKS)
