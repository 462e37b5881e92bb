"""One policy map string means the same under autocast as in the adapters of all frameworks."""

import functools
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

# One model in four frameworks: first, block/inner, block/outer and head, of other widths each, so
# that a product tells of itself whose it is, forward and backward.
WIDTHS = {"first": (3, 4), "inner": (4, 5), "outer": (5, 6), "head": (6, 7)}
BATCH = 2


class HaikuBase(hk.Module):
    pass


class HaikuHead(hk.Linear):
    pass


class HaikuBlock(HaikuBase):
    def __call__(self, x):
        return hk.Linear(6, name="outer")(jnp.tanh(hk.Linear(5, name="inner")(x)))


class HaikuNet(hk.Module):
    def __call__(self, x):
        x = HaikuBlock(name="block")(hk.Linear(4, name="first")(x))
        return HaikuHead(7, name="head")(x)


class LinenBase(nn.Module):
    pass


class LinenHead(nn.Dense):
    pass


class LinenBlock(LinenBase):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(6, name="outer")(jnp.tanh(nn.Dense(5, name="inner")(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = LinenBlock(name="block")(nn.Dense(4, name="first")(x))
        return LinenHead(7, name="head")(x)


class NNXBase(nnx.Module):
    pass


class NNXHead(nnx.Linear):
    pass


class NNXBlock(NNXBase):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 6, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.block = nnx.Linear(3, 4, rngs=rngs), NNXBlock(rngs)
        self.head = NNXHead(6, 7, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block(self.first(x)))


class EquinoxLinear(eqx.Module):  # one's own: its calls have no scope
    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


class EquinoxBase(eqx.Module):
    pass


class EquinoxHead(EquinoxLinear):
    pass


class EquinoxBlock(EquinoxBase):
    inner: EquinoxLinear
    outer: EquinoxLinear

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


class EquinoxNet(eqx.Module):
    first: EquinoxLinear
    block: EquinoxBlock
    head: EquinoxHead

    def __call__(self, x):
        return self.head(self.block(self.first(x)))


HAIKU = hk.without_apply_rng(hk.transform(lambda x: HaikuNet(name="net")(x)))
LINEN = LinenNet()


def equinox_net():
    first, inner, outer, head = (jnp.full(shape, 0.1) for shape in WIDTHS.values())
    linears = [EquinoxLinear(w) for w in (first, inner, outer)]
    return EquinoxNet(linears[0], EquinoxBlock(*linears[1:]), EquinoxHead(head))


def call(model, x):
    return model(x)


def within(policies, apply, policy_map):
    def wrapper(*args):
        with policies(policy_map):
            return apply(*args)

    return wrapper


def viewing(with_policies, policy_map):
    return lambda model, x: with_policies(model, policy_map)(x)


X = jnp.ones((BATCH, 3))
# Framework: what is called, its parameters or model, the adapter, and the names of its layers.
FRAMEWORKS = {
    "haiku": (
        HAIKU.apply,
        HAIKU.init(jax.random.key(0), X),
        functools.partial(within, jmpx.haiku.policies, HAIKU.apply),
        {"Linear": "Linear", "module.Linear": "haiku.Linear", "net/": "net/", "Own": "Haiku"},
    ),
    "linen": (
        LINEN.apply,
        LINEN.init(jax.random.key(0), X),
        functools.partial(within, jmpx.flax.policies, LINEN.apply),
        {"Linear": "Dense", "module.Linear": "flax.linen.Dense", "net/": "", "Own": "Linen"},
    ),
    "nnx": (
        call,
        NNXNet(nnx.Rngs(0)),
        functools.partial(viewing, jmpx.flax.with_policies),
        {"Linear": "Linear", "module.Linear": "flax.nnx.Linear", "net/": "", "Own": "NNX"},
    ),
    "equinox": (
        call,
        equinox_net(),
        functools.partial(viewing, jmpx.equinox.with_policies),
        {
            "Linear": "EquinoxLinear",
            "module.Linear": f"{__name__}.EquinoxLinear",
            "net/": "",
            "Own": "Equinox",
        },
    ),
}


def in_words_of(framework, policy):
    """A policy map string with the names that a framework has for it."""
    for name, own in reversed(FRAMEWORKS[framework][3].items()):
        policy = policy.replace(f"<{name}>", own)
    return policy


def equations(jaxpr):
    """All equations of a jaxpr, those of inner ones too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def products(f, *args):
    """Whose products run in which dtypes."""
    found = {}
    for eqn in equations(jax.make_jaxpr(f)(*args)):
        if eqn.primitive.name != "dot_general":
            continue
        dims = {n for var in (*eqn.invars, *eqn.outvars) for n in var.aval.shape} - {1, BATCH}
        (name,) = [name for name, widths in WIDTHS.items() if set(widths) == dims]
        found.setdefault(name, set()).update(var.aval.dtype.name for var in eqn.invars)
    assert set(found) == set(WIDTHS)
    return found


def assert_selected(found, full):
    expected = {name: {"float32" if name in full else "bfloat16"} for name in WIDTHS}
    assert found == expected


ALL = "first inner outer head"
STRINGS = {
    "c=bf16": "",
    "c=bf16; <Linear>: full": ALL,
    "c=bf16; <module.Linear>: full": ALL,
    "c=bf16; <Own>Head: full": "head",
    "c=bf16; <Own>Block: full": "inner outer",
    "c=bf16; <Own>Base: full": "inner outer",
    "c=bf16; <Own>Net: full": ALL,
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


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("policy", STRINGS)
def test_one_string_means_the_same(framework, policy):
    apply, model, adapter, _ = FRAMEWORKS[framework]
    string = in_words_of(framework, policy)
    found = products(lambda x: jmpx.autocast(apply, string)(model, x), X)
    assert_selected(found, STRINGS[policy])
    assert products(lambda x: adapter(string)(model, x), X) == found


SELECTORS = "<Linear> <Own>Head <Own>Block <Own>Base <Own>Net */inner *outer *block/* *".split()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("seed", range(5))
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
        return jax.value_and_grad(lambda a: f(eqx.combine(a, rest), x).sum())(arrays)

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


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_selectors_under_transformations(framework, transform, place):
    apply, model, _, _ = FRAMEWORKS[framework]
    transform = TRANSFORMS[transform]
    policy = in_words_of(framework, "c=bf16; <Own>Block: full; */inner: bf16; <Own>Head: full")
    if place == "inside":
        f = jmpx.autocast(transform(apply), policy)
    else:
        f = transform(jmpx.autocast(apply, policy))
    assert_selected(products(lambda x: f(model, x), X), "outer head")


# Marks stay inside.


def stacks(jaxpr):
    return [str(eqn.source_info.name_stack) for eqn in equations(jaxpr)]


def hidden(net, differentiable=True):
    """Calls a network in all places of a function that autocast does not enter, and others."""

    @jax.custom_vjp
    def by_hand(params, x):
        return net(params, x)

    by_hand.defvjp(lambda p, x: jax.vjp(net, p, x), lambda pull, g: pull(g))

    rule = jax.custom_jvp(lambda params, x: net(params, x))
    rule.defjvp(lambda primals, tangents: jax.jvp(net, primals, tangents))
    rule = net if differentiable else rule

    def f(params, x):
        fixed = jax.tree.map(lax.stop_gradient, params)
        with jax.named_scope("mine"):
            y = net(params, x) + by_hand(params, x) + rule(params, x)
            y += jax.checkpoint(net)(params, x) + jax.jit(net)(params, x)
            y += lax.scan(lambda c, _: (c + net(params, x), None), y, None, 2)[0]
            y += lax.while_loop(lambda c: c[0, 0] > 1e9, lambda c: c + net(fixed, x), jnp.zeros((BATCH, 7)))
            y += lax.cond(x[0, 0] > 0, net, lambda p, x: -net(p, x), params, x)
        with jmpx.full_precision():  # bound as it was traced, with all that is inside
            y += jax.jit(lambda p, x: lax.map(lambda x: net(p, x[None])[0], x))(params, x)
            y += lax.cond(x[0, 0] > 0, net, lambda p, x: -net(p, x), params, x)
            y += by_hand(params, x) + rule(params, x)
        solve = functools.partial(lax.custom_linear_solve, lambda v: v, symmetric=True)
        return solve(y, lambda _, b: b + 0 * net(fixed, x))

    return f


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_mark_leaves_autocast(framework):
    apply, model, _, _ = FRAMEWORKS[framework]
    policy = in_words_of(framework, "c=bf16; <Own>Block: full; <Linear>: bf16")
    f = jmpx.autocast(hidden(apply), policy)
    both = jax.value_and_grad(lambda model, x: f(model, x).sum())
    for g in (jmpx.autocast(hidden(apply, differentiable=False), policy), both):
        found = stacks(jax.make_jaxpr(g)(model, X))
        assert any("mine" in stack for stack in found)
        assert not [stack for stack in found if "jmpx.module" in stack]
    lowered = jax.jit(both).lower(model, X)
    text = lowered.as_text(debug_info=True)
    assert "mine" in text
    assert "jmpx.module" not in text
    assert "jmpx.module" not in lowered.compile().as_text()
