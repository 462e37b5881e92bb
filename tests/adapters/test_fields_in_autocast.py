"""Flax's `dtype` fields by operations: a rule sets them as by modules, through each lift."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import enable_x64
from helpers.jaxprs import dots

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = np.ones((2, 4), np.float32)
POLICY = "c=bf16,o=f32"


class Block(nn.Module):
    """A layer that is handed the field, one without a field, one with a field of its own."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, dtype=self.dtype, name="handed")(x)
        x = nn.Dense(4, name="none")(x)
        return nn.Dense(4, dtype="float16", name="own")(x)


class SetupBlock(nn.Module):
    dtype: Any

    def setup(self):
        self.handed = nn.Dense(4, dtype=self.dtype)
        self.own = nn.Dense(4, dtype="float16")
        self.none = nn.Dense(4)

    def encode(self, x):
        return self.own(self.none(self.handed(x)))

    def __call__(self, x):
        return self.encode(x)


class Step(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x, _):
        return Block(self.dtype, name="block")(x).astype(x.dtype), None


class Lifted(nn.Module):
    lift: str
    dtype: Any

    @nn.compact
    def __call__(self, x):
        each = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        if self.lift == "while_loop":
            block = Block(self.dtype)
            turn = lambda m, c: (c[0] + 1, m(c[1]).astype(x.dtype))  # noqa: E731
            if self.is_initializing():
                return block(x)
            return nn.while_loop(lambda m, c: c[0] < 2, turn, block, (0, x))[1]
        if self.lift == "scan":
            return nn.scan(Step, **each, length=2)(self.dtype)(x, None)[0]
        if self.lift == "vmap":
            return nn.vmap(Block, **each)(self.dtype)(jnp.stack([x] * 2))
        return {"remat": nn.remat, "jit": nn.jit}[self.lift](Block)(self.dtype)(x)


def linen(model, method=None):
    apply = lambda v, x: model.apply(v, x, method=method)  # noqa: E731
    return apply, model.init(jax.random.key(0), X)


class NnxBlock(nnx.Module):
    def __init__(self, dtype, rngs):
        self.dtype = dtype
        self.handed = nnx.Linear(4, 4, dtype=dtype, rngs=rngs)
        self.own = nnx.Linear(4, 4, dtype="float16", rngs=rngs)
        self.none = nnx.Linear(4, 4, rngs=rngs)

    def encode(self, x):
        return self.own(self.none(self.handed(x)))

    def __call__(self, x):
        return self.encode(x)


def turn(block, x):
    return block(x).astype(x.dtype)


NNX = {
    "call": lambda block, x: block(x),
    "method": lambda block, x: block.encode(x),
    "remat": nnx.remat(turn),
    "jit": nnx.jit(turn),
    "vmap": nnx.vmap(turn, in_axes=(None, 0)),
    "scan": nnx.scan(turn, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2),
    "while_loop": lambda block, x: nnx.while_loop(
        lambda c: c[1].sum() > 9, lambda c: (c[0], turn(*c)), (block, x)
    )[1],
}


def nnx_net(call, dtype):
    return call, NnxBlock(dtype, nnx.Rngs(0))


def products(policy, apply, model):
    """The dtypes of products under a policy, after which the fields of NNX are as before."""
    cast = jmpx.apply_policy(apply, policy)
    if not isinstance(model, nnx.Module):
        return dots(cast, model, X)
    graph, state = nnx.split(model)

    def merged(state, x):
        model = nnx.merge(graph, state)
        result = cast(model, x)
        assert nnx.graphdef(model) == graph
        return result

    return dots(merged, state, X)


CALLS = {
    "linen-call": lambda d: linen(Block(d)),
    "linen-setup": lambda d: linen(SetupBlock(d)),
    "linen-method": lambda d: linen(SetupBlock(d), "encode"),
    **{
        f"linen-{lift}": lambda d, lift=lift: linen(Lifted(lift, d))
        for lift in ("remat", "jit", "vmap", "scan", "while_loop")
    },
    **{f"nnx-{name}": lambda d, call=call: nnx_net(call, d) for name, call in NNX.items()},
}

# Rules, and in which dtypes the layers run: handed, none, own.
RULES = {
    "": ("bfloat16", "bfloat16", "float16"),
    "<Layer>: full": ("float32", "float32", "float32"),
    "<Layer>: c=f16": ("float16", "float16", "float16"),
    "<Block>: full": ("float32", "float32", "float16"),
    "<Block>: full; */handed: c=bf16": ("bfloat16", "float32", "float16"),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("field", ["bfloat16", jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("call", CALLS)
def test_a_rule_sets_the_fields_that_it_sets_by_modules(call, field):
    words = {"<Layer>": "Dense", "<Block>": "SetupBlock" if call in SETUP else "Block"}
    if call.startswith("nnx"):
        words = {"<Layer>": "Linear", "<Block>": "NnxBlock"}
    apply, model = CALLS[call](field)
    for rules, expected in RULES.items():
        for word, name in words.items():
            rules = rules.replace(word, name)
        found = ["x".join([dtype] * 2) for dtype in expected]
        # By modules, a float32 field without a rule keeps the layer in float32.
        ways = ("operations", "modules") if field == "bfloat16" or rules else ("operations",)
        for way in ways:
            assert products(f"by={way},{POLICY}; {rules}", apply, model) == found, (way, rules)


SETUP = ("linen-setup", "linen-method")


def test_the_policy_of_a_class_sets_the_field_too():
    for cls, (apply, model) in {
        nn.Dense: linen(nn.Dense(4, dtype="bfloat16")),
        nnx.Linear: nnx_net(lambda block, x: block.handed(x), jnp.bfloat16),
    }.items():
        with jmpx.push_policy(cls, "full"):
            assert products(POLICY, apply, model) == ["float32xfloat32"]


def test_an_inner_autocast_is_not_in_the_rules_around_it():
    apply, model = linen(nn.Dense(4, dtype="bfloat16"))
    inner = jmpx.apply_policy(apply, "c=f16")
    assert products(f"{POLICY}; Dense?: full", inner, model) == ["bfloat16xbfloat16"]


def test_a_rule_sets_a_field_of_float64():
    with enable_x64():
        apply, model = linen(nn.Dense(4, dtype="float64"))
        for rule, dtype in {"full": "float32", "c=f16": "float16"}.items():
            for way in ("modules", "operations"):
                found = products(f"by={way},{POLICY}; Dense: {rule}", apply, model)
                assert found == ["x".join([dtype] * 2)], (way, rule)
