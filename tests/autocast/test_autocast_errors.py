"""Errors while `jmpx.autocast` runs a function: they name the line of the user."""

import pathlib
import re
import traceback

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmpx

HERE = pathlib.Path(__file__)
LINES = HERE.read_text().splitlines()


def log_of(h):
    return jnp.log(h)  # the culprit


def notes_of(error):
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("jmpx")]


def assert_names(error, function, operation="log"):
    """Holds an error to one note, which names the marked line of a function of this file."""
    (note,) = notes_of(error)
    match = re.fullmatch(r"jmpx's autocast was running `(\w+)` of (.*):(\d+) \((.*)\)\.", note)
    assert match, note
    assert match[1] == operation
    assert match[2] == str(HERE)
    assert match[4].rpartition(".")[2] == function
    assert "the culprit" in LINES[int(match[3]) - 1]
    assert note in "".join(traceback.format_exception(error))


def of_negative(fn):
    def loss(x):
        return fn(-(x @ x)).sum()

    return loss


def in_scan(h):
    return lax.scan(lambda c, row: (c, log_of(row)), 0, h)[1]


def in_cond(h):
    return lax.cond(h[0, 0] < 99, log_of, jnp.tanh, h)


# How autocast meets the line: the function of a product, and whether its line is known. JAX loses
# that of an operation in a loop, a branch or a checkpoint.
CASES = {
    "eager": (lambda f: jmpx.autocast(f), log_of, True),
    "jit": (lambda f: jax.jit(jax.value_and_grad(jmpx.autocast(f))), log_of, True),
    "autocast of value_and_grad": (lambda f: jmpx.autocast(jax.value_and_grad(f)), log_of, True),
    "float32": (lambda f: jmpx.autocast(f, "c=full"), log_of, True),
    "vmap": (lambda f: lambda x: jax.vmap(jmpx.autocast(f))(x[None]), log_of, True),
    "jit within": (jmpx.autocast, lambda h: jax.jit(lambda h: jax.jit(log_of)(h))(h), True),
    "scan": (jmpx.autocast, in_scan, False),
    "cond": (jmpx.autocast, in_cond, False),
    "checkpoint": (jmpx.autocast, jax.checkpoint(log_of), False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_nan_names_the_line_that_made_it(name):
    transform, inner, is_known = CASES[name]
    f = transform(of_negative(inner))
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        jax.block_until_ready(f(jnp.ones((2, 2), jnp.float32)))
    if is_known:
        assert_names(caught.value, "log_of")
    (note,) = notes_of(caught.value)
    assert str(HERE) in note


@jax.custom_jvp
def by_hand(h):
    return jnp.tanh(h)


@by_hand.defjvp
def rule_by_hand(primals, tangents):
    return by_hand(*primals), jnp.log(primals[0]) * tangents[0]


def test_a_nan_of_a_rule_set_by_hand_names_the_line_that_calls_its_function():
    def loss(x):
        return by_hand(-(x @ x)).sum()  # the culprit

    f = jax.grad(jmpx.autocast(loss))
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        f(jnp.ones((2, 2), jnp.float32))
    assert_names(caught.value, "loss")


def fail(_):
    raise RuntimeError("the user's own")


def call_back(h):
    return jax.pure_callback(fail, jax.ShapeDtypeStruct(h.shape, h.dtype), h)  # the culprit


def test_errors_of_other_kinds():
    with pytest.raises(Exception, match="the user's own") as caught:
        jmpx.autocast(call_back)(jnp.ones((2, 2), jnp.float32))
    assert_names(caught.value, "call_back", "pure_callback")


# Library code between the user and the operation is left out.


class Log(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.nn.log_softmax(nn.Dense(2)(x) * np.nan)  # the culprit


def of_linen(x):
    module = Log()
    params = module.init(jax.random.key(0), jnp.zeros_like(x))
    return lambda x: jmpx.autocast(module.apply)(params, x), "__call__"


def of_haiku(x):
    def norm(x):
        return hk.LayerNorm(-1, True, True, eps=-9.0)(x)  # the culprit

    network = hk.transform(norm)
    params = network.init(jax.random.key(0), x)
    return lambda x: jmpx.autocast(network.apply)(params, None, x), "norm"


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.parametrize("library", [of_linen, of_haiku])
def test_lines_of_libraries_are_left_out(library):
    x = jnp.asarray([[1.0, 2.0], [0.5, 0.5]], jnp.float32)
    f, function = library(x)
    jax.clear_caches()  # what another test traced first bears that test's lines
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        f(x)
    (note,) = notes_of(caught.value)
    assert_names(caught.value, function, note.split("`")[1])


def test_modules_are_joined_before_the_call_or_in_it():
    layer, x = eqx.nn.Linear(3, 4, key=jax.random.key(0)), jnp.ones(3)
    arrays, rest = eqx.partition(layer, eqx.is_array)
    joined = jmpx.autocast(lambda a, r, x: eqx.combine(a, r)(x), "c=bf16; Linear: full")
    np.testing.assert_array_equal(joined(arrays, rest, x), layer(x))
