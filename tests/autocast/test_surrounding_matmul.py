"""Autocast inside of what sets an algorithm of products: jmpx's own regions, and JAX's context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.products import products_of

import jmpx

# Other tests are about these warnings.
pytestmark = pytest.mark.filterwarnings(
    "ignore:JAX cannot trace", "ignore:No product runs in 16 bits"
)

X3 = "BF16_BF16_F32_X3"
HOW = {"high": "HIGH", "highest": "HIGHEST", X3: "bf16 f32 x3"}


@pytest.fixture
def pair(rng):
    x, w = rng.normal(size=(4, 8)), rng.normal(size=(8, 8))
    return w.astype(np.float32), x.astype(np.float32)


def loss(w, x):
    h = x @ w
    with jmpx.full_precision():
        h = h @ w
    return (h @ w).sum()


def in_gradient_function(f, matmul):
    grad_fn = jmpx.filter_value_and_grad(f, jmpx.NoOpLossScale(), policy=f"p=f32,m={matmul}")
    return lambda w, x: grad_fn(w, x).grads


def in_full_precision(f, matmul):
    def run(w, x):
        with jmpx.full_precision(matmul=matmul):
            return jax.grad(f)(w, x)

    return run


def in_forced_full_precision(f, matmul):
    return jmpx.full_precision(jmpx.force_full_precision(jax.grad(f)), matmul=matmul)


ROADS = [in_gradient_function, in_full_precision, in_forced_full_precision]


def how_by_dtype(f, *args):
    """How the products of a program multiply: the number and the ways, by their dtype."""
    products = products_of(f, *args)
    ways = {dtype: [p.how for p in products if p.dtypes == {dtype}] for dtype in ("f32", "bf16")}
    assert sum(map(len, ways.values())) == len(products)
    return ways


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("matmul", ["highest", X3])
def test_a_setting_of_jmpx_around_the_call_is_for_float32_alone(road, matmul, pair):
    ways = how_by_dtype(road(jmpx.autocast(loss, "c=bf16"), matmul), *pair)
    assert ways["f32"] == [HOW[matmul]] * 3
    assert len(ways["bf16"]) == 4 and HOW[X3] not in ways["bf16"]  # nor where it is transposed


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("policy", ["c=bf16,m=high", "c=bf16; op.dot_general: m=high"])
def test_the_policy_of_autocast_goes_first(road, policy, pair):
    ways = how_by_dtype(road(jmpx.autocast(loss, policy), X3), *pair)
    assert ways["f32"] == ["HIGH"] * 3 and len(ways["bf16"]) == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("road", ROADS)
def test_inner_functions_are_traced_anew_under_another_setting(road, pair):
    inner = jax.jit(jax.checkpoint(loss))
    cast = jmpx.autocast(lambda w, x: inner(w, x), "c=bf16")
    for matmul in ("high", "highest", "high"):
        assert set(how_by_dtype(road(cast, matmul), *pair)["f32"]) == {HOW[matmul]}
    assert set(how_by_dtype(jax.grad(cast), *pair)["f32"]) == {"DEFAULT"}


def test_the_users_own_setting_of_jax_keeps_products_in_float32(pair):
    with jax.default_matmul_precision("highest"):
        ways = how_by_dtype(jax.grad(jmpx.autocast(loss, "c=bf16")), *pair)
        assert ways == {"f32": ["HIGHEST"] * 7, "bf16": []}
    with jmpx.full_precision(matmul="high"), jax.default_matmul_precision("highest"):
        ways = how_by_dtype(jax.grad(jmpx.autocast(loss, "c=bf16")), *pair)
        assert ways == {"f32": ["HIGHEST"] * 7, "bf16": []}


@pytest.mark.parametrize("road", ROADS)
def test_a_precision_of_ones_own_keeps_a_product_in_float32(road, pair):
    def precise(w, x):
        return (jnp.dot(x, w, precision="high") @ w).sum()

    ways = how_by_dtype(road(jmpx.autocast(precise, "c=bf16"), "highest"), *pair)
    assert ways["f32"] == ["HIGH"] * 2 and len(ways["bf16"]) == 2


@jax.custom_vjp
def by_hand(w, x):
    return x @ w


by_hand.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda kept, slope: (kept[1].T @ slope, slope @ kept[0].T)
)


@pytest.mark.parametrize("road", ROADS)
def test_a_backward_pass_by_hand(road, pair):
    cast = jmpx.autocast(lambda w, x: (by_hand(w, x) @ w).sum(), "c=bf16")
    ways = how_by_dtype(road(cast, "highest"), *pair)
    assert set(ways["f32"]) == {"HIGHEST"} and len(ways["bf16"]) == 2
