"""Planted leaks are found: each once, at its line, with what mends it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.leaky import LINEAR, PLANTED, WIDTH, W, X, findings, line_of, loss_of, seen, shape

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
POSITIONS = np.linspace(0, 1, WIDTH)
THREE = jnp.array(np.float32(3))
MASK = jnp.tri(WIDTH, dtype=bool)[3]


# Each takes activations in 16 bits and a float32 parameter; its leak is at the line with a mark.


def numpy_scalar(x, w):
    return x * np.sqrt(8)  # <-


def numpy_constant(x, w):
    return x + POSITIONS  # <-


def array_of_number(x, w):
    return x * THREE  # <-


def float32_parameter(x, w):
    x = jnp.tanh(x)
    return x + w[0]  # <-


def number_in_a_helper(x, w):
    scale = jax.jit(lambda x: x * np.float32(3))  # <-
    return scale(x)


def float32_select(x, w):
    return jnp.where(MASK, x, np.float32(0.5))  # <-


def float32_product(x, w):
    wide = x.astype(F32)
    wide = jnp.tanh(wide)
    y = wide @ w  # <-
    return y.astype(x.dtype)


def product_of_arguments(x, w):
    folded = w @ w  # <-
    return x @ folded.astype(x.dtype)


def mixed_product(x, w):
    return (x @ w).astype(x.dtype)  # <-


def mixed_einsum(x, w):
    y = jnp.einsum("btd,de->bte", x, w)  # <-
    return y.astype(x.dtype)


def cast_product(x, w):
    y = jax.lax.dot_general(x.astype(F32), w, (((2,), (0,)), ((), ())))  # <-
    return y.astype(x.dtype)


def wide_result(x, w):
    y = jnp.einsum("btd,bsd->bts", x, x, preferred_element_type=F32)  # <-
    return x + y.astype(x.dtype).mean(axis=-1, keepdims=True)


def saved_gelu(x, w):
    wide = jnp.tile(x, 2 * WIDTH).astype(F32)  # <-
    return jax.nn.gelu(wide)[..., :WIDTH].astype(x.dtype)


def down_and_up(x, w):
    y = jax.nn.softmax(x.astype(F32)).astype(x.dtype)
    return jax.nn.softmax(y.astype(F32)).astype(x.dtype)  # <-


def rounded_twice(x, w):
    return x @ w.astype(F16).astype(BF16)  # <-


def rounded_by_way_of_float32(x, w):
    y = (x @ w.astype(x.dtype)).astype(F32)
    return y.astype(F16).astype(x.dtype)  # <-


def mask_in_where(x, w):
    return jnp.where(MASK, x, -1e9)  # <-


def mask_of_floats(x, w):
    bias = jnp.where(MASK, 0.0, -1e9)
    return x + bias  # <-


def constant_mask(x, w):
    return x + jnp.asarray(np.where(MASK, 0, -1e9).astype(np.float32)).astype(x.dtype)  # <-


def filled_mask(x, w):
    return x + -1e9 * MASK.astype(x.dtype)  # <-


def small_epsilon(x, w):
    return x / (jnp.abs(x) + 1e-9)  # <-


def epsilon_in_a_root(x, w):
    return x * jnp.sqrt(jnp.mean(x.astype(F32)).astype(x.dtype) + 1e-8)  # <-


def mask_times_number(x, w):
    return x - 1e9 * MASK  # <-


def inverted_mask(x, w):
    mask = MASK.astype(jnp.int32)
    return x + (1.0 - mask) * -1e9  # <-


def float_mask(x, w):
    mask = jax.lax.stop_gradient(w[0])
    return x + ((1 - mask) * -1e9).astype(x.dtype)  # <-


PROMOTIONS = [
    numpy_scalar,
    numpy_constant,
    array_of_number,
    float32_parameter,
    number_in_a_helper,
    float32_select,
]
MIXED = [mixed_product, mixed_einsum, cast_product, wide_result]
RANGES = [mask_in_where, mask_of_floats, constant_mask, filled_mask, small_epsilon]
RANGES += [epsilon_in_a_root, mask_times_number, inverted_mask, float_mask]
LEAKS = {
    **dict.fromkeys(PROMOTIONS, "promotion"),
    float32_product: "float32-product",
    product_of_arguments: "float32-product",
    **dict.fromkeys(MIXED, "mixed-product"),
    saved_gelu: "saved-float32",
    down_and_up: "cast-to-and-fro",
    rounded_twice: "double-rounding",
    rounded_by_way_of_float32: "double-rounding",
    **dict.fromkeys(RANGES, "constant-range"),
}


IN_BFLOAT16 = [leak for leak in LEAKS if leak not in RANGES]
# Overflow in a cast is what some of these plant.
overflows = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
both_dtypes = pytest.mark.parametrize(
    ("leaks", "dtype"), [(IN_BFLOAT16, BF16), (RANGES, F16)], ids=["bfloat16", "float16"]
)


def planted(leaks):
    return sorted((line_of(leak), LEAKS[leak]) for leak in leaks)


@pytest.mark.sampled(7)
@overflows
@both_dtypes
@pytest.mark.parametrize("framework", PLANTED)
def test_each_leak_is_found_once_at_its_line(framework, leaks, dtype):
    loss, params = PLANTED[framework](leaks, dtype)
    found = findings(loss, params, shape(X, dtype))
    assert seen(__file__, found) == planted(leaks)
    for finding in found:
        assert finding.scope.rpartition("/")[2] in {leak.__name__ for leak in leaks}
        assert finding.rule


def in_scan(block, x, *weights):
    return jax.lax.scan(lambda x, w: (block(x, *w), None), x, [w[None] for w in weights])[0]


WAYS = {
    "jit": lambda block, *args: jax.jit(block)(*args),
    "scan": in_scan,
    "vmap": lambda block, x, *w: jax.vmap(lambda x: block(x[None], *w)[0])(x),
    "cond": lambda block, x, *w: jax.lax.cond(x.sum() > 0, block, lambda x, *w: x, x, *w),
    "jit in scan": lambda block, *args: in_scan(jax.jit(block), *args),
    "checkpoint": lambda block, *args: jax.checkpoint(block)(*args),
}


@pytest.mark.sampled(5)
@overflows
@both_dtypes
@pytest.mark.parametrize("way", WAYS)
def test_lines_under_transformations(way, leaks, dtype):
    def loss(linear, w, x):
        for leak in leaks:
            block = lambda x, linear, w: (leak(x @ linear, w) @ linear).astype(x.dtype)  # noqa: B023, E731
            x = x + WAYS[way](block, x, linear, w)
        return loss_of(x)

    if way == "checkpoint":
        leaks = [leak for leak in leaks if leak is not saved_gelu]  # It is not saved then.
    found = findings(loss, shape(W, dtype), W, shape(X, dtype))
    assert seen(__file__, [each for each in found if each.name in LEAKS.values()]) == planted(leaks)


# What the advice makes of a leak.


def python_scalar(x, w):
    return x * math.sqrt(8)


def cast_constant(x, w):
    return x + POSITIONS.astype(x.dtype)


def cast_parameter(x, w):
    x = jnp.tanh(x)
    return x + w[0].astype(x.dtype)


def half_product(x, w):
    return x @ w.astype(x.dtype)


def cast_result(x, w):
    y = jnp.einsum("btd,bsd->bts", x, x).astype(F32)
    return x + jax.nn.softmax(y).astype(x.dtype).mean(axis=-1, keepdims=True)


def half_gelu(x, w):
    return jax.nn.gelu(jnp.tile(x, 2 * WIDTH))[..., :WIDTH]


def smallest_mask(x, w):
    return jnp.where(MASK, x, jnp.finfo(x.dtype).min)


def minus_infinity(x, w):
    return jnp.where(MASK, x, -jnp.inf)


def larger_epsilon(x, w):
    return x / (jnp.abs(x) + 1e-4)


def mask_times_float16(x, w):
    return x - 6e4 * MASK


def scaled_argument(x, w):
    return x + (w[0] * 1e-9 * 1e9).astype(x.dtype)


def plain_bounds(x, w):
    return jnp.clip(jnp.clip(x, -1, 1), 0.01, 0.99)


def zero_of_jax(x, w):
    return jax.nn.softplus(x) + jax.nn.mish(x)  # which add a 0 to x


def times_zero(x, w):
    return x * 0 + x / sum([x])


def sum_of_list(x, w):
    return sum([x, x])


MENDED = [
    python_scalar,
    cast_constant,
    cast_parameter,
    half_product,
    cast_result,
    half_gelu,
    smallest_mask,
    minus_infinity,
    larger_epsilon,
    mask_times_float16,
    scaled_argument,
    plain_bounds,
    zero_of_jax,
    times_zero,
    sum_of_list,
]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_mended_leaks(dtype):
    loss, params = PLANTED["equinox"](MENDED, dtype)
    assert findings(loss, params, shape(X, dtype)) == ()


# Products in a module that a policy map leaves in float32.
PRODUCTS = [mixed_product, mixed_einsum, product_of_arguments]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", PLANTED)
def test_rules_mend_products(framework):
    loss, params = PLANTED[framework](PRODUCTS, F32)
    policy_map = f"{LINEAR[framework]}: c=bf16,o=bf16"
    found = findings(lambda *args: loss(*args, policy_map), params, X)
    assert seen(__file__, found) == planted(PRODUCTS)
    for finding in found:
        policy_map += f"; {finding.rule}"
    assert findings(lambda *args: loss(*args, policy_map), params, X) == ()
