"""One model in four frameworks, and which of its products run in which dtype."""

import dataclasses

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jmpx
from helpers.jaxprs import equations, trace

# One model in four frameworks, with layers first, block/inner, block/outer and head. Each layer has
# other widths, so that the shapes of a product name its layer, forward and backward.
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


def initialized(init):
    """Returns parameters of the shapes that a model creates; only their shapes matter."""
    shapes = jax.eval_shape(init, jax.random.key(0), X)
    return jax.tree.map(lambda leaf: np.full(leaf.shape, 0.1, leaf.dtype), shapes)


def call(model, x):
    return model(x)


def by_modules(apply):
    """Returns a function from a policy to `apply` with its modules under it, whatever its rules."""

    def under(policy):
        policy_map = dataclasses.replace(jmpx.get_policy_map(policy), by="modules")
        return jmpx.apply_policy(apply, policy_map)

    return under


X = np.ones((BATCH, 3), np.float32)
# By framework: a function to call, its parameters or model, what puts it under a policy, the names
# of the layers.
FRAMEWORKS = {
    "haiku": (
        HAIKU.apply,
        initialized(HAIKU.init),
        by_modules(HAIKU.apply),
        {"Linear": "Linear", "module.Linear": "haiku.Linear", "net/": "net/", "Own": "Haiku"},
    ),
    "linen": (
        LINEN.apply,
        initialized(LINEN.init),
        by_modules(LINEN.apply),
        {"Linear": "Dense", "module.Linear": "flax.linen.Dense", "net/": "", "Own": "Linen"},
    ),
    "nnx": (
        call,
        NNXNet(nnx.Rngs(0)),
        by_modules(call),
        {"Linear": "Linear", "module.Linear": "flax.nnx.Linear", "net/": "", "Own": "NNX"},
    ),
    "equinox": (
        call,
        equinox_net(),
        by_modules(call),
        {
            "Linear": "EquinoxLinear",
            "module.Linear": f"{__name__}.EquinoxLinear",
            "net/": "",
            "Own": "Equinox",
        },
    ),
}


def in_words_of(framework, policy):
    """Spells a policy map string with the names of a framework: `<Linear>` is `Dense` in Linen."""
    for name, own in reversed(FRAMEWORKS[framework][3].items()):
        policy = policy.replace(f"<{name}>", own)
    return policy


def products(f, *args):
    """Returns, for each layer, the dtypes in which its products run."""
    found = {}
    for eqn in equations(trace(f, *args)):
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
