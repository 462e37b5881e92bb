"""Compiles for a TPU v5e that is not there, and reads the precisions from what its compiler made.

    pip install -e '.[bench,haiku,tpu]'
    python benchmarks/tpu_matmul.py --part=steps       # matrix products of train steps
    python benchmarks/tpu_matmul.py --part=products    # one product in each precision
    python benchmarks/tpu_matmul.py --part=reductions  # gradients, summed over eight devices

A CPU's program could not tell: XLA computes 16-bit products and sums in float32 there. The package
libtpu brings the compiler of TPUs, which needs no TPU.

A TPU multiplies in bfloat16. A float32 product takes one pass over operands rounded to bfloat16, as
a bfloat16 product does, unless its precision asks for more: `high` and `highest` split the operands
into parts and take several passes. So a line counts the products of the optimized program by their
operands' dtypes and their precision (`convolution` is what TPUs call a product). `cycles` is the
compiler's own estimate of the operations that contain them. The steps train experts that a router
mixes, written in Haiku, and count the router's products, forward and backward, apart.
"""

import collections
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import records
from tpu import compiled, devices
from tqdm import tqdm

import jmpx

PyTree = Any


# Reading what came out.

RESULT = re.compile(r"^ +(?:ROOT )?(%\S+) = \(?(\w+)\[")
COMPUTATION = re.compile(r"^(?:ENTRY )?(%\S+) \(.*\{$")
PRODUCT = re.compile(r" (?:convolution|dot)\((%[^,)]+), (%[^,)]+)\)")
PRECISION = re.compile(r"operand_precision=\{(\w+),(\w+)\}")
NAME = re.compile(r'op_name="([^"]*)"')
CALLS = re.compile(r" fusion\(.*calls=(%[^,\s]+)")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class Product(NamedTuple):
    """A matrix product or convolution of optimized HLO."""

    dtypes: str  # of its operands and its result
    precision: str
    scope: str  # the name that JAX gave the operation
    computation: str  # the fusion that it is in

    def __str__(self) -> str:
        return self.dtypes if self.precision == "default" else f"{self.dtypes}, {self.precision}"


def read_products(hlo: str) -> Iterator[Product]:
    """Yields the products of an HLO module, given as text, also those inside fusions."""
    lines = hlo.splitlines()
    types = {found[1]: found[2] for line in lines if (found := RESULT.match(line))}
    computation = ""
    for line in lines:
        if found := COMPUTATION.match(line):
            computation = found[1]
        if found := PRODUCT.search(line):
            result = RESULT.match(line)
            words = PRECISION.search(line)
            name = NAME.search(line)
            yield Product(
                f"{types[found[1]]} x {types[found[2]]} -> {result[2] if result else '?'}",
                ", ".join(sorted({*words.groups()})) if words else "default",
                name[1] if name else "",
                computation,
            )


def count(products: list[Product]) -> dict[str, int]:
    return dict(sorted(collections.Counter(map(str, products)).items()))


def cycles(hlo: str, products: list[Product]) -> int:
    """Returns the estimated cycles of the fusions that contain these products."""
    inside = {product.computation for product in products}
    total = 0
    for line in hlo.splitlines():
        called = CALLS.search(line)
        estimate = CYCLES.search(line)
        if estimate and called and called[1] in inside:
            total += int(estimate[1])
    return total


def without_precision(hlo: str) -> str:
    """Returns HLO as text without what names precisions or the lines of Python it comes from."""
    body = re.sub(r", (?:operand_precision|metadata)=\{[^}]*\}", "", hlo)
    return body[body.index("\n%") :]


# Train steps of a model with a router.


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


def with_adapter(policy_map: str) -> Callable[..., jax.Array]:
    return jmpx.apply_policy(apply, f"by=modules,{policy_map}")


def with_autocast(policy_map: str) -> Callable[..., jax.Array]:
    return jmpx.autocast(apply, policy_map)


ROUTER = "c=bf16,o=f32; */router: c=f32"
STEPS = [
    ("none", "c=f32"),
    ("adapter", "c=f32,m=highest"),
    ("autocast", "c=f32,m=highest"),
    ("adapter", "c=bf16,o=f32"),
    ("adapter", "c=bf16,o=f32,m=highest"),
    ("adapter", "c=bf16,o=f32,m=BF16_BF16_F32_X3"),
    ("adapter", ROUTER),
    ("adapter", f"{ROUTER},m=high"),
    ("adapter", f"{ROUTER},m=highest"),
    ("autocast", "c=bf16,o=f32"),
    ("autocast", ROUTER),
    ("autocast", f"{ROUTER},m=highest"),
]
WAYS = {"none": lambda _: apply, "adapter": with_adapter, "autocast": with_autocast}


def train_step(way: str, policy_map: str) -> Callable[..., Any]:
    forward, optimizer = WAYS[way](policy_map), optax.sgd(1e-3)

    def loss_fn(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = forward(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: PyTree, x: jax.Array, labels: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
        updates, _ = optimizer.update(grads, optimizer.init(params))
        return optax.apply_updates(params, updates), loss

    return step


def measure_step(way: str, policy_map: str, width: int = 256, tokens: int = 1024) -> records.Record:
    """Compiles a train step and counts the products of its routers and of the rest."""
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    params = jax.eval_shape(network.init, jax.random.key(0), x)
    program = compiled(train_step(way, policy_map), (params, x, labels))
    hlo = program.as_text()
    products = list(read_products(hlo))
    routers = [product for product in products if "/router/" in product.scope]
    rest = [product for product in products if product not in routers]
    return {
        "way": way,
        "policy": policy_map,
        "router": count(routers),
        "rest": count(rest),
        "cycles_router": cycles(hlo, routers),
        "cycles_rest": cycles(hlo, rest),
        "gflop": program.cost_analysis()["flops"] / 1e9,
    }


def measure_steps() -> Iterator[records.Record]:
    for way, policy_map in tqdm(STEPS, unit="step"):
        yield measure_step(way, policy_map)


# One product.

PRECISIONS = (
    *("unset", "default", "high", "highest"),
    *("BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_BF16", "F32_F32_F32"),
)


def compile_product(dtype: str, precision: str, size: int) -> Any:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        unset = precision == "unset"
        with contextlib.nullcontext() if unset else jax.default_matmul_precision(precision):
            return a @ b

    return compiled(product, [jax.ShapeDtypeStruct((size, size), dtype)] * 2)


def measure_product(dtype: str, precision: str, size: int = 2048) -> records.Record:
    """Compiles the product of two square matrices; one that the compiler refuses is a line, too."""
    found = {"dtype": dtype, "precision": precision, "size": size}
    try:
        program = compile_product(dtype, precision, size)
    except jax.errors.JaxRuntimeError as error:
        return {**found, "status": str(error).splitlines()[0]}
    hlo, unset = program.as_text(), compile_product(dtype, "unset", size).as_text()
    products = list(read_products(hlo))
    return {
        **found,
        "status": "ok",
        "products": count(products),
        "cycles": cycles(hlo, products),
        "gflop": program.cost_analysis()["flops"] / 1e9,
        "as_if_unset": without_precision(hlo) == without_precision(unset),
    }


def measure_products() -> Iterator[records.Record]:
    points = [(dtype, name) for dtype in ("float32", "bfloat16") for name in PRECISIONS]
    for dtype, precision in tqdm(points, unit="product"):
        yield measure_product(dtype, precision)


# The sum of gradients over devices.

ALL_REDUCE = re.compile(r" = \(?(\w+)\[([\d,]+)\]\S* all-reduce(?:-start)?\(")
POLICIES = tuple(f"c=bf16,o=f32{reduce}" for reduce in ("", ",r=f32", ",r=bf16", ",r=f16"))


def measure_reduction(policy: str, size: int = 512) -> records.Record:
    """Compiles gradients of one weight, averaged over eight chips."""
    mesh = jax.sharding.Mesh(np.array(devices()), ("data",))
    everywhere, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x @ w).astype(jnp.float32))

    def grads(w: jax.Array, x: jax.Array) -> jax.Array:
        grad_fn = jmpx.filter_grad(
            loss_fn, jmpx.NoOpLossScale(), over=jmpx.Over("data"), policy=policy
        )
        return grad_fn(w, x).grads

    mapped = jax.shard_map(
        grads, mesh=mesh, in_specs=(everywhere, rows), out_specs=everywhere, check_vma=False
    )
    shardings = [jax.sharding.NamedSharding(mesh, spec) for spec in (everywhere, rows)]
    program = compiled(mapped, [jax.ShapeDtypeStruct((size, size), jnp.float32)] * 2, shardings)
    sums = [f"{dtype}[{shape}]" for dtype, shape in ALL_REDUCE.findall(program.as_text())]
    return {
        "policy": policy,
        "size": size,
        "all_reduce": sums,
        "mb_accessed": program.cost_analysis()["bytes accessed"] / 1e6,
    }


def measure_reductions() -> Iterator[records.Record]:
    for policy in tqdm(POLICIES, unit="policy"):
        yield measure_reduction(policy)


PARTS: dict[str, Callable[[], Iterator[records.Record]]] = {
    "steps": measure_steps,
    "products": measure_products,
    "reductions": measure_reductions,
}


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--part", choices=PARTS, default="steps")
    part = parser.parse_args(arguments).part
    target = {"target": devices()[0].device_kind, "libtpu": records.version("libtpu")}
    for record in PARTS[part]():
        records.emit(f"tpu_{part}", **record, **target)


if __name__ == "__main__":
    main()
