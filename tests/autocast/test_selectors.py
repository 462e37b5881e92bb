"""One policy map string means the same under autocast as in the adapters of all frameworks."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers.four_frameworks import (
    FRAMEWORKS,
    EquinoxLinear,
    X,
    assert_selected,
    in_words_of,
    products,
)
from helpers.jaxprs import equations, stacks
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

ALL = "first inner outer head"
STRINGS = {
    "c=bf16": "",
    "c=bf16; <Linear>: full": ALL,
    "c=bf16; <module.Linear>: full": ALL,
    "c=bf16; <Own>Head: full": "head",
    "c=bf16; <Own>Block: full": "inner outer",
    "c=bf16; <Own>Base: full": "inner outer",
    "c=bf16; *first: full; <net/>block/outer: full": "first outer",
    "c=bf16; */inner: full": "inner",
    "c=bf16; *block/*: full": "inner outer",
    "c=bf16; *: full": ALL,
    "c=bf16; <Own>Block: full; */inner: bf16": "outer",
    "c=bf16; */inner: bf16; <Own>Block: full": "outer",
    "c=bf16; <Own>Net: full; <Own>Block: bf16; */inner: full": "first inner head",
    "c=bf16; <Linear>: full; <Own>Head: bf16": "first inner outer",
    "c=bf16; <Own>Head: bf16; <Linear>: full": ALL,
    "c=bf16; <Linear>: full; */inner: bf16": "first outer head",
    "c=bf16; */inner: bf16; <Linear>: full": ALL,
    "c=full; <Own>Block: bf16": "first head",
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("policy", STRINGS)
def test_one_string_means_the_same(framework, policy):
    apply, model, adapter, _ = FRAMEWORKS[framework]
    string = in_words_of(framework, policy)
    found = products(lambda x: jmpx.autocast(apply, string)(model, x), X)
    assert_selected(found, STRINGS[policy])
    assert products(lambda x: adapter(string)(model, x), X) == found


SELECTORS = "<Linear> <Own>Head <Own>Block <Own>Base <Own>Net */inner *outer *block/* *".split()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_any_string_means_the_same(framework, seed, rng):
    apply, model, adapter, _ = FRAMEWORKS[framework]
    rules = [f"{rng.choice(SELECTORS)}: {rng.choice(['full', 'bf16'])}" for _ in range(seed + 2)]
    policy = in_words_of(framework, "; ".join([str(rng.choice(["c=bf16", "c=full"])), *rules]))
    found = products(lambda x: jmpx.autocast(apply, policy)(model, x), X)
    assert found == products(lambda x: adapter(policy)(model, x), X)


def scanned(f):
    return lambda model, x: lax.scan(lambda c, _: (c, f(model, x + c)), 0.0, None, 3)[1]


def differentiated(f):
    def value_and_grads(model, x):
        arrays, rest = eqx.partition(model, eqx.is_array)
        loss, grads = jax.value_and_grad(lambda a: f(eqx.combine(a, rest), x).sum())(arrays)
        return loss, jax.tree.leaves(grads)

    return value_and_grads


TRANSFORMS = {
    "jit": jax.jit,
    "grad": differentiated,
    "remat": jax.checkpoint,
    "scan": scanned,
    "vmap": lambda f: lambda model, x: jax.vmap(lambda x: f(model, x[None]))(x),
    "jit of grad of remat": lambda f: jax.jit(differentiated(jax.checkpoint(f))),
    "scan of vmap": lambda f: scanned(TRANSFORMS["vmap"](f)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "transform, place",
    [*((name, "inside") for name in TRANSFORMS), ("grad", "outside"), ("scan of vmap", "outside")],
)
def test_selectors_under_transformations(framework, transform, place):
    apply, model, _, _ = FRAMEWORKS[framework]
    transform = TRANSFORMS[transform]
    policy = in_words_of(framework, "c=bf16; <Own>Block: full; */inner: bf16; <Own>Head: full")
    if place == "inside":
        f = jmpx.autocast(transform(apply), policy)
    else:
        f = transform(jmpx.autocast(apply, policy))
    assert_selected(products(lambda x: f(model, x), X), "outer head")


class Methods(eqx.Module):
    linear: EquinoxLinear

    def encode(self, x):
        return self.linear(x)

    @eqx.filter_jit
    def jitted(self, x):
        return self.encode(x)


@pytest.mark.parametrize(
    "of",
    [
        lambda m: m.encode,
        lambda m: m.jitted,
        lambda m: functools.partial(m.encode),
        lambda m: jax.tree_util.Partial(m.encode),
        lambda m: eqx.filter_vmap(m.encode),
    ],
)
@pytest.mark.parametrize("policy", ["c=bf16; Methods: full", "c=bf16; linear*: full"])
def test_methods_and_wrappers_of_equinox(of, policy):
    method = of(Methods(EquinoxLinear(jnp.ones((3, 4)))))
    jaxpr = jax.make_jaxpr(lambda x: jmpx.autocast(method, policy)(x))(X)
    (dot,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert dot.invars[0].aval.dtype == jnp.float32


class Store(eqx.Module):  # a container: its modules are called, it is not
    a: EquinoxLinear
    b: EquinoxLinear


class Holder(eqx.Module):
    store: Store
    last: EquinoxLinear

    def __call__(self, x):
        return self.last(self.store.b(self.store.a(x)))


@pytest.mark.parametrize("policy", ["c=bf16; Store: full", "c=bf16; store*: full; last*: bf16"])
def test_the_policy_of_a_container_is_that_of_its_modules(policy):
    w = jnp.ones((3, 3))
    model = Holder(Store(EquinoxLinear(w), EquinoxLinear(w)), EquinoxLinear(w))
    jaxpr = jax.make_jaxpr(lambda x: jmpx.autocast(model, policy)(x))(X)
    dots = [e.invars[0].aval.dtype for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert dots == [jnp.float32, jnp.float32, jnp.bfloat16]
    view = jax.make_jaxpr(lambda x: jmpx.equinox.with_policies(model, policy)(x))(X)
    assert dots == [
        e.invars[0].aval.dtype for e in equations(view) if e.primitive.name == "dot_general"
    ]


def test_a_view_within_autocast():
    class Local(eqx.Module):  # whose policy is kept by the class itself
        linear: EquinoxLinear

        def __call__(self, x):
            return self.linear(x)

    model = Local(EquinoxLinear(jnp.ones((3, 4))))
    with jmpx.push_policy(Local, "full"):
        f = jmpx.autocast(lambda m, x: jmpx.equinox.with_policies(m)(x), "c=bf16; Local: bf16")
        jaxpr = jax.make_jaxpr(lambda x: f(model, x))(X)
    assert "f32[2,4] = dot_general" not in str(jaxpr)  # autocast decides about products
    assert not [stack for stack in stacks(jaxpr) if "jmpx.module" in stack]


def test_full_precision_goes_before_classes():
    apply, params, _, _ = FRAMEWORKS["haiku"]
    f = jmpx.autocast(jmpx.full_precision(apply), "c=bf16; Linear: bf16; *: bf16")  # pyright: ignore[reportArgumentType, reportCallIssue]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rules match nothing
        assert_selected(products(f, params, X), ALL)


def test_modules_that_are_closed_over_match_by_their_scopes_alone():
    linear = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    own = EquinoxLinear(jnp.ones((3, 4)))
    for f, policy in ((linear, "c=bf16; Linear: full"), (own, "c=bf16; EquinoxLinear: full")):
        called = jmpx.autocast(lambda x, f=f: f(x), policy)
        if f is linear:
            assert "bf16" not in str(jax.make_jaxpr(called)(X[0]))
        else:
            with pytest.warns(UserWarning, match="'EquinoxLinear: .* matched no scope"):
                called(X)
