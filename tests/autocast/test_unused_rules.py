"""Rules that matched nothing are reported, with what is near to them."""

import jax
import jax.numpy as jnp
import pytest
from helpers import normal, warns_once
from helpers.autocast import named
from helpers.four_frameworks import FRAMEWORKS, X, equinox_net, in_words_of
from helpers.jaxprs import trace
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku


@pytest.mark.parametrize(
    "policy, words",
    [
        ("c=bf16; op.expp: f32", "matched no operation; did you mean 'op.exp'"),
        ("c=bf16; op.log: f32", "matched no operation"),
        ("c=bf16; */heads/*: f32", "matched no scope; did you mean 'head'"),
        ("c=bf16; LayerNorm: f32", "matched no scope"),
    ],
)
def test_rules_that_matched_nothing(rng, policy, words):
    with warns_once(__file__, words):
        jmpx.autocast(named, policy)(normal(rng, 2, 2))


def test_used_rules_are_known_at_each_call(rng):
    x = normal(rng, 2, 2)
    for _ in range(2):  # the second one finds the inner jit retraced
        jmpx.autocast(named, "c=bf16; */head: full; op.tanh: f32")(x)


def deep(transform):
    def f(x):
        with jax.named_scope("encoder"):
            return transform(inner)(x)

    def inner(x):
        with jax.named_scope("attention"):
            return jnp.tanh(x @ x)

    return f


def custom(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.checkpoint,
        custom,
        lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
        lambda f: lambda x: lax.cond(x[0, 0] > 0, f, f, x),
        lambda f: jax.jit(jax.jit(f)),
    ],
)
def test_what_is_near_is_found_inside_of_inner_functions(transform):
    f = jmpx.autocast(deep(transform), "c=bf16; */atention: full; op.tanhh: full")
    for _ in range(2):  # the second one finds the inner function retraced
        with pytest.warns(UserWarning) as record:
            trace(f, jnp.ones((2, 2)))
        scope, operation = [str(warning.message) for warning in record]
        assert "matched no scope; did you mean 'encoder/attention'?" in scope
        assert "matched no operation; did you mean 'op.tanh'?" in operation


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "selector, near",
    [
        ("<Own>Blok", "<Own>Block"),
        ("<Own>Bas", "<Own>Base"),
        ("*/iner", "<net/>block/inner"),
    ],
)
def test_what_is_near_to_a_class_or_path(framework, selector, near):
    apply, model, _, _ = FRAMEWORKS[framework]
    f = jmpx.autocast(jax.jit(apply), in_words_of(framework, f"c=bf16; {selector}: full"))
    for _ in range(2):  # the second one finds the inner function traced
        with pytest.warns(UserWarning, match="matched no module or scope") as record:
            trace(f, model, X)
        assert f"; did you mean {in_words_of(framework, near)!r}?" in str(record[0].message)


def test_the_warning_is_about_the_call():
    with warns_once(__file__, "matched no module or scope"):
        jmpx.autocast(equinox_net(), "c=bf16; EquinoxBlok: full")(X)


def test_a_class_that_ran_inside_a_cached_function_is_no_unused_rule():
    for framework in FRAMEWORKS:
        apply, model, _, _ = FRAMEWORKS[framework]
        f = jmpx.autocast(jax.jit(apply), in_words_of(framework, "c=bf16; <Own>Base: full"))
        for _ in range(2):
            trace(f, model, X)
