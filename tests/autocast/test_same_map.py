"""Autocast inside of autocast: the same policies change nothing, others make an island."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same_bits, warns_once
from helpers.autocast import assert_ran, dtypes_of
from helpers.jaxprs import equations_of
from jax import lax

import jmpx


def model(x, w):
    return jnp.tanh(x @ w)


def loss_of(model):
    def loss_fn(x, w):
        return (model(x, w) @ w).sum()

    return loss_fn


THROUGH = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: x, x, w),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w)[0],
    "checkpoint": jax.checkpoint,
}
SAME = {
    "a dtype": ("c=bf16", {}),
    "rules": ("c=bf16; op.tanh: f32", {}),
    "an algorithm": ("c=bf16,m=highest; op.dot_general: f32", {}),
    "saving": ("c=bf16", {"save": "products"}),
}


@pytest.mark.filterwarnings("ignore:save='products' leaves")  # what the test checkpoints
@pytest.mark.sampled(5)
@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("same", SAME)
def test_the_same_map_inside_changes_nothing(pair, same, through):
    policy, more = SAME[same]
    inner = THROUGH[through](jmpx.autocast(model, policy, **more))
    outer = jmpx.autocast(loss_of(inner), policy, **more)
    plain = jmpx.autocast(loss_of(THROUGH[through](model)), policy, **more)
    assert dtypes_of(outer, *pair) == dtypes_of(plain, *pair)
    assert dtypes_of(jax.grad(outer), *pair) == dtypes_of(jax.grad(plain), *pair)
    assert_same_bits(outer(*pair), plain(*pair))


def test_rules_are_counted_once(pair):
    """No warning of the inner call: its rule is met outside of it."""

    def loss_fn(x, w):
        with jax.named_scope("head"):
            return jmpx.autocast(model, "c=bf16; head: f32; op.sin: f32")(x, jnp.sin(w))

    jmpx.autocast(loss_fn, "c=bf16; head: f32; op.sin: f32")(*pair)
    with warns_once(__file__, "'op.cos: compute=float32'"):
        inner = jmpx.autocast(model, "c=bf16; op.cos: f32")
        jmpx.autocast(loss_of(inner), "c=bf16; op.cos: f32")(*pair)


def test_other_maps_are_islands(pair):
    """Another map, another save= or an output of its own is no plain call."""
    islands = {
        "bfloat16 float16": jmpx.autocast(model, "c=f16"),
        "bfloat16 float32": jmpx.autocast(model, "full"),
    }
    for dtypes, island in islands.items():
        assert_ran(jmpx.autocast(loss_of(island), "c=bf16"), *pair, dot_general=dtypes)
    narrow = jmpx.autocast(
        lambda x, w: jmpx.autocast(model, "c=bf16", output="f16")(x, w), "c=bf16"
    )
    assert jax.eval_shape(narrow, *pair).dtype == jnp.float16
    saving = jmpx.autocast(lambda x, w: jnp.sin(model(x, w) @ w), "c=bf16", save="products")
    names = {eqn.primitive.name for eqn in equations_of(jmpx.autocast(saving, "c=bf16"), *pair)}
    assert names & {"checkpoint", "remat2"}


def test_the_same_map_inside_of_an_island_is_another_one(pair):
    inner = jmpx.autocast(model, "c=bf16")
    island = jmpx.autocast(lambda x, w: inner(x, w) @ w, "c=f16")
    assert_ran(jmpx.autocast(island, "c=bf16"), *pair, dot_general="bfloat16 float16")


@pytest.mark.parametrize("through", [lambda f: f, jax.jit])
def test_in_full_precision_it_runs_as_it_says(pair, through):
    inner = through(jmpx.autocast(model, "c=bf16"))

    def loss_fn(x, w):
        with jmpx.full_precision():
            return inner(x, w) @ w

    assert_ran(jmpx.autocast(loss_fn, "c=bf16"), *pair, dot_general="bfloat16 float32")


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_jitted_functions_are_not_shared_with_the_outside(pair, first):
    jitted = jax.jit(jmpx.autocast(model, "c=bf16", output="traced"))
    outer = jmpx.autocast(loss_of(jitted), "c=bf16")
    calls = {"inside": (outer, "bfloat16"), "outside": (loss_of(jitted), "bfloat16 float32")}
    for name in sorted(calls, key=lambda name: name != first):
        assert_ran(calls[name][0], *pair, dot_general=calls[name][1])


def test_other_threads_are_outside(pair):
    found = []
    inner = jmpx.autocast(model, "c=bf16")

    def loss_fn(x, w):
        other = threading.Thread(target=lambda: found.append(dtypes_of(inner, *pair)))
        other.start()
        other.join()
        return inner(x, w)

    jmpx.autocast(loss_fn, "c=bf16")(*pair)
    assert found[0]["dot_general"] == {"bfloat16"}


def test_after_an_error_it_is_over(pair):
    def broken(x, w):
        raise KeyError

    with pytest.raises(KeyError):
        jmpx.autocast(broken, "c=bf16")(*pair)
    assert_ran(jmpx.autocast(model, "c=bf16"), *pair, dot_general="bfloat16")


def test_a_part_of_a_model_under_the_same_map(pair):
    """The wrapped part of a model that is an argument has the marks of the outer call."""
    mlp = eqx.nn.MLP(4, 4, 4, 2, key=jax.random.key(0))
    policy = "c=bf16; Linear: f32"
    part = eqx.tree_at(lambda m: m.layers[1], mlp, jmpx.autocast(mlp.layers[1], policy))
    run = jmpx.autocast(lambda model, x: jax.vmap(model)(x), policy)
    assert_ran(lambda x: run(part, x), pair[0], dot_general="float32")
