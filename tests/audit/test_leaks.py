"""Planted leaks are found: each once, at its line, with what mends it."""

import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.leaky import PLANTED, WIDTH, X

from jmpx._audit.findings import Options, find
from jmpx._audit.graph import build
from jmpx._programs import traced_program

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
POSITIONS = np.linspace(0, 1, WIDTH)
THREE = jnp.array(np.float32(3))
MASK = jnp.tri(WIDTH, dtype=bool)[3]


def findings(fn, *args):
    return find(build(traced_program(fn, args)), Options())


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
    wide = x.astype(F32)  # <-
    return jax.nn.gelu(wide).astype(x.dtype)


def carried_in_float32(x, w):
    def body(x, _):
        return x + jnp.tanh(x.astype(BF16) @ w.astype(BF16)), None

    return jax.lax.scan(body, x.astype(F32), None, length=3)[0].astype(x.dtype)  # <-


def down_and_up(x, w):
    y = jnp.tanh(x.astype(F32)).astype(x.dtype)
    return jax.nn.softmax(y.astype(F32)).astype(x.dtype)  # <-


def up_and_down(x, w):
    return x.astype(F32).astype(x.dtype)  # <-


def rounded_twice(x, w):
    return x @ w.astype(F16).astype(BF16)  # <-


def rounded_by_way_of_float32(x, w):
    y = x @ w.astype(BF16)
    y = y.astype(F32).astype(F16)  # <-
    return jnp.tanh(y).astype(F32) @ w


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
LEAKS = {
    **dict.fromkeys(PROMOTIONS, "promotion"),
    carried_in_float32: "promotion",
    float32_product: "float32-product",
    product_of_arguments: "float32-product",
    **dict.fromkeys(MIXED, "mixed-product"),
    saved_gelu: "saved-float32",
    down_and_up: "cast-to-and-fro",
    up_and_down: "cast-to-and-fro",
    rounded_twice: "double-rounding",
    **dict.fromkeys(RANGES, "constant-range"),
}


def line_of(leak):
    lines, start = inspect.getsourcelines(leak)
    (line,) = [start + i for i, text in enumerate(lines) if text.rstrip().endswith("# <-")]
    return line


def assert_found(found, leak, name):
    assert [finding.name for finding in found] == [name], found
    place = found[0].place
    assert place is not None
    assert os.path.samefile(place.file, __file__)
    assert place.line == line_of(leak)


def by_name(value):
    return getattr(value, "__name__", value)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("framework", PLANTED)
@pytest.mark.parametrize(("leak", "name"), LEAKS.items(), ids=by_name)
def test_planted_leak(framework, leak, name):
    dtype = F16 if leak in RANGES else BF16
    loss, params = PLANTED[framework](leak, dtype)
    x = X.astype(dtype)
    found = findings(loss, params, x)
    assert_found(found, leak, name)
    (finding,) = found
    assert finding.scope.lower().endswith("planted")
    if ": c=" in finding.rule:  # a rule of a policy map
        mended = findings(lambda params, x: loss(params, x, finding.rule), params, x)
        assert mended == (), mended
