"""The gradient functions under a whole policy map: what is inside casts, in every framework."""

import contextlib
import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import warns_once
from jax.sharding import Mesh, PartitionSpec as P

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
import jmpx.mpx as mpx

NOOP = jmpx.NoOpLossScale()
RULES = "c=bf16,o=f32; Second: f32"
NO_CAST = "casts nothing by policy map .* pass the whole model as an argument"

# Each framework has a model of two layers, of which a rule keeps the second in float32.


class Second(hk.Linear):
    pass


def haiku_model(x):
    return Second(1)(jnp.tanh(hk.Linear(4)(x)))


HAIKU = hk.without_apply_rng(hk.transform(haiku_model))


def haiku_loss(params, x):
    return HAIKU.apply(params, x).sum()


def haiku_by_hand(params, x):
    with jmpx.haiku.policies(RULES):
        return haiku_loss(params, x)


class LinenSecond(nn.Dense):
    pass


LINEN = nn.Sequential([nn.Dense(4), jnp.tanh, LinenSecond(1)])
LINEN_RULES = RULES.replace("Second", "LinenSecond")


def linen_loss(params, x):
    return LINEN.apply(params, x).sum()  # pyright: ignore[reportAttributeAccessIssue]


def linen_by_hand(params, x):
    with jmpx.flax.policies(LINEN_RULES):
        return linen_loss(params, x)


class NnxSecond(nnx.Linear):
    pass


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(3, 4, rngs=rngs), NnxSecond(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


NNX_RULES = RULES.replace("Second", "NnxSecond")


def nnx_loss(model, x):
    return model(x).sum()


def nnx_by_hand(model, x):
    return nnx_loss(jmpx.flax.with_policies(model, NNX_RULES), x)


class EqxSecond(eqx.nn.Linear):
    pass


class EqxModel(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, key):
        self.first = eqx.nn.Linear(3, 4, key=key)
        self.second = EqxSecond(4, 1, key=key)  # pyright: ignore[reportCallIssue]

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


EQUINOX_RULES = RULES.replace("Second", "EqxSecond")


def equinox_loss(model, x):
    return jax.vmap(model)(x).sum()


def equinox_by_hand(model, x):
    return equinox_loss(jmpx.equinox.with_policies(model, EQUINOX_RULES), x)


def plain_loss(params, x):
    h = jnp.tanh(x @ params["w"])
    return jnp.exp(h).sum()


AUTOCAST_RULES = "c=bf16; op.tanh: f32"


def autocast_by_hand(params, x):
    return jmpx.autocast(plain_loss, AUTOCAST_RULES)(params, x)


X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
CASES = {
    "jmpx.haiku": (haiku_loss, functools.cache(lambda: HAIKU.init(jax.random.key(0), X))),
    "jmpx.flax, Linen": (linen_loss, functools.cache(lambda: LINEN.init(jax.random.key(0), X))),
    "jmpx.flax, NNX": (nnx_loss, lambda: NnxModel(nnx.Rngs(0))),
    "jmpx.equinox": (equinox_loss, functools.cache(lambda: EqxModel(jax.random.key(0)))),
    "jmpx.autocast": (plain_loss, lambda: {"w": jnp.linspace(-1, 1, 12).reshape(3, 4)}),
}
# The map of each case, and the loss that applies it by hand.
BY_HAND = {
    "jmpx.haiku": (RULES, haiku_by_hand),
    "jmpx.flax, Linen": (LINEN_RULES, linen_by_hand),
    "jmpx.flax, NNX": (NNX_RULES, nnx_by_hand),
    "jmpx.equinox": (EQUINOX_RULES, equinox_by_hand),
    "jmpx.autocast": (AUTOCAST_RULES, autocast_by_hand),
}
MAPS = {
    "string": RULES,
    "half": "c=half,o=f32; Second: full",
    "map": jmpx.get_policy_map(RULES),
    "map without rules": jmpx.get_policy_map("by=modules,c=bf16"),
    "rules alone": "Second: full",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_map_runs_the_program_that_applies_it_by_hand(name):
    (loss, make), (policy, by_hand) = CASES[name], BY_HAND[name]
    model = make()

    def program(loss, policy):
        def run(x):
            own = make() if isinstance(model, nnx.Module) else model
            return tuple(jmpx.filter_value_and_grad(loss, NOOP, policy=policy)(own, x))

        return jax.jit(run).lower(X).as_text()

    text = program(by_hand, "full")
    assert "bf16" in text
    for func in (loss, by_hand):
        assert program(func, policy) == text


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["jmpx.haiku", "jmpx.flax, Linen"])
def test_a_context_around_the_gradient_function(name):
    policies = jmpx.haiku.policies if name == "jmpx.haiku" else jmpx.flax.policies
    apply = HAIKU.apply if name == "jmpx.haiku" else LINEN.apply
    rules = RULES if name == "jmpx.haiku" else LINEN_RULES
    loss = lambda params, x: jnp.sum(apply(params, x))  # noqa: E731  # pyright: ignore[reportArgumentType]
    plain = jmpx.filter_grad(loss, NOOP, policy=rules)(CASES[name][1](), X)
    with policies(rules):  # it is the same map
        inside = jmpx.filter_grad(loss, NOOP, policy=rules)(CASES[name][1](), X)
    for one, other in zip(*map(jax.tree.leaves, (plain, inside)), strict=True):
        np.testing.assert_array_equal(one, other)


HK_STORE: Any = hk.mixed_precision  # Any, because it is annotated with JMP's policies
SET = {
    "set_policy": lambda: jmpx.set_policy(hk.Linear, "c=bf16"),
    "hk.mixed_precision": lambda: HK_STORE.set_policy(hk.Linear, jmpx.get_policy("c=bf16")),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [*SET, "push_policy", "hk.push_policy"])
def test_class_policies_of_haiku_cast(how):
    params = {"linear": {"w": jnp.ones((3, 1))}}
    transformed = hk.transform(lambda x: hk.Linear(1, with_bias=False)(x))

    def loss(params, x):
        y = transformed.apply(params, None, x)
        assert y.dtype == jnp.bfloat16
        return y.astype(jnp.float32).sum()

    with contextlib.ExitStack() as stack:
        if how == "push_policy":
            stack.enter_context(jmpx.push_policy(hk.Linear, "c=bf16"))
        elif how == "hk.push_policy":
            stack.enter_context(HK_STORE.push_policy(hk.Linear, jmpx.get_policy("c=bf16")))
        else:
            SET[how]()
            stack.callback(jmpx.clear_policy, hk.Linear)
        jmpx.filter_grad(loss, NOOP, policy="c=f32; Second?: f32")(params, X)
        jmpx.filter_grad(jax.jit(loss), NOOP, policy="c=f32; Second?: f32")(params, X)


# Where nothing casts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [v for k, v in MAPS.items()], ids=list(MAPS))
@pytest.mark.parametrize("make", [jmpx.filter_grad, jmpx.filter_value_and_grad])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_one_warning_where_nothing_casts(wrap, make, policy):
    grad_fn = make(plain_loss, jmpx.StaticLossScale(1), policy=policy)
    step = wrap(lambda params, x: tuple(grad_fn(params, x)))
    with warns_once(__file__, NO_CAST):
        step(CASES["jmpx.autocast"][1](), X)


def test_each_function_warns_for_itself():
    """That something cast in one function says nothing of another one under the same map."""
    jmpx.filter_grad(haiku_loss, NOOP, policy=RULES)(CASES["jmpx.haiku"][1](), X)
    for _ in range(2):
        with warns_once(__file__, NO_CAST):
            jmpx.filter_grad(plain_loss, NOOP, policy=RULES)(CASES["jmpx.autocast"][1](), X)


@pytest.mark.thorough
def test_other_casts_do_not_follow_a_map():
    policy = "c=bf16; Linear: f32"
    loss = jmpx.mpx.cast_function(plain_loss, jnp.bfloat16)
    with warns_once(__file__, NO_CAST):
        jmpx.filter_grad(lambda p, x: loss(p, x).astype(jnp.float32), NOOP, policy=policy)(
            CASES["jmpx.autocast"][1](), X
        )


@pytest.mark.parametrize("policy", ["c=bf16,o=f32", "full", None, jmpx.get_policy("c=bf16")])
def test_a_policy_casts_as_ever_and_asks_for_nothing_inside(policy):
    seen = []

    def loss(params, x):
        seen.append(params["w"].dtype)
        return plain_loss(params, x)

    jmpx.filter_grad(loss, NOOP, policy=policy)(CASES["jmpx.autocast"][1](), X)
    assert seen == [jmpx.get_policy(policy or "half").compute_dtype]


def test_without_mixed_precision_nothing_is_asked():
    grad_fn = mpx.filter_grad(plain_loss, NOOP, False, False, policy="c=bf16; Linear: full")
    grad_fn(CASES["jmpx.autocast"][1](), X)


# Functions that JAX has traced already


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_jitted_function_that_is_not_traced_again(name):
    (loss, make), (policy, _) = CASES[name], BY_HAND[name]
    model = make()
    jits = {"jmpx.equinox": eqx.filter_jit, "jmpx.flax, NNX": nnx.jit}
    jitted = jits.get(name, jax.jit)(loss)
    jitted(model, X)  # traced outside of any gradient function
    grad_fn = jmpx.filter_grad(jitted, NOOP, policy=policy)
    for _ in range(3):
        grad_fn(model, X)
    for _ in range(3):  # a new gradient function, and a new lambda, in each step
        jmpx.filter_grad(jitted, NOOP, policy=policy)(model, X)
        jmpx.filter_grad(lambda m, x: jitted(m, x), NOOP, policy=policy)(model, X)
        jmpx.filter_grad(functools.partial(jitted), NOOP, policy=policy)(model, X)


def test_a_jitted_function_is_traced_once_for_all_steps():
    traces = []

    @jax.jit
    def inner(params, x):
        traces.append(1)
        return haiku_loss(params, x)

    params = CASES["jmpx.haiku"][1]()
    for _ in range(4):
        jmpx.filter_grad(lambda p, x: inner(p, x), NOOP, policy=RULES)(params, X)
    assert len(traces) == 1


# Gradient functions inside of gradient functions


def test_an_inner_gradient_function_is_told_apart():
    params = CASES["jmpx.haiku"][1]()

    def inner(params, x, policy):
        grads = jmpx.filter_grad(haiku_loss, NOOP, policy=policy)(params, x).grads
        return grads["linear"]["w"].astype(jnp.float32).sum()

    def outer(policy, inner_policy):
        grad_fn = jmpx.filter_grad(lambda p, x: inner(p, x, inner_policy), NOOP, policy=policy)
        jax.eval_shape(lambda x: grad_fn(params, x)[1], X)

    outer(RULES, RULES)
    outer("full", RULES)
    outer(RULES, "full")
    twice = "has cast its arguments to 16 bits before jmpx.haiku.policies"
    with warns_once(__file__, twice):
        outer(RULES, "c=bf16,o=f32")
    with warns_once(__file__, twice):
        outer("c=bf16,o=f32", RULES)


def test_an_error_inside_leaves_no_mark():
    def fail(w):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        jmpx.filter_grad(fail, NOOP, policy=RULES)(jnp.ones(1))
    with warns_once(__file__, NO_CAST):
        jmpx.filter_grad(jnp.sum, NOOP, policy="c=bf16; Elsewhere: full")(jnp.ones(1))


# The reduction of the default


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reduce", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["jmpx.haiku", "jmpx.flax, Linen", "jmpx.equinox"])
def test_the_reduce_of_the_default_counts(name, reduce):
    (loss, make), (rules, _) = CASES[name], BY_HAND[name]
    text = rules if reduce is None else rules.replace("o=f32", f"o=f32,reduce={reduce}")
    grad_fn = jmpx.filter_value_and_grad(loss, NOOP, policy=text, over=jmpx.Over("data"))
    arrays, static = eqx.partition(make(), eqx.is_array)

    def run(arrays, x):
        return tuple(grad_fn(eqx.combine(arrays, static), x))[1:]

    mapped = jax.shard_map(
        run, mesh=Mesh(jax.devices()[:2], "data"), in_specs=(P(), P("data")), out_specs=P()
    )
    jaxpr = str(jax.make_jaxpr(mapped)(arrays, X))
    lowered = jax.jit(mapped).lower(arrays, X).as_text()
    assert "stablehlo.all_reduce" in lowered and "bf16" in jaxpr
    short = {None: "f32", "bfloat16": "bf16", "float16": "f16"}[reduce]
    sums = [line for line in lowered.splitlines() if "}) : (tensor<" in line and "x" in line]
    assert sums and all(f"x{short}>" in line for line in sums), sums


# Bad input


@pytest.mark.parametrize(
    "policy", ["c=bf17; Linear: full", "c=half; Linear: c=halb", "Linear: full; r=f8", "c:bf16"]
)
@pytest.mark.parametrize("make", [jmpx.filter_grad, jmpx.filter_value_and_grad])
def test_bad_maps_are_refused_when_the_function_is_made(make, policy):
    with pytest.raises(ValueError) as error:
        make(jnp.sum, NOOP, policy=policy)
    with pytest.raises(ValueError) as expected:
        jmpx.get_policy_map(policy)
    assert str(error.value) == str(expected.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("policy", [3, ["c=bf16"], {"rules": 3}])
def test_other_types_are_refused(policy):
    with pytest.raises((TypeError, ValueError)):
        jmpx.filter_grad(jnp.sum, NOOP, policy=policy)


# Mappings

MAPPINGS = {
    "policy": ({"compute": "half", "output": "f32", "reduce": "bf16"}, "c=half,o=f32,r=bf16"),
    "map": (
        {"policy": {"compute": "half"}, "rules": [{"select": "EqxSecond", "compute": "full"}]},
        "c=half; EqxSecond: full",
    ),
    "strings": ({"policy": "c=bf16", "rules": ["EqxSecond: half"]}, "c=bf16; EqxSecond: half"),
    "no rules": ({"policy": "c=half", "rules": []}, "c=half"),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_is_what_its_string_is(name):
    model = EqxModel(jax.random.key(0))

    def program(policy):
        def loss(model, x):
            return jax.vmap(model)(x).sum().astype(jnp.float32)

        def run(x):
            grad_fn = jmpx.filter_value_and_grad(loss, NOOP, policy=policy, over=jmpx.Over("data"))
            return tuple(grad_fn(model, x))[1:]

        mapped = jax.vmap(run, axis_name="data")
        return jax.jit(mapped).lower(X[None]).as_text()

    mapping, text = MAPPINGS[name]
    assert program(mapping) == program(text)


def test_bad_mappings_are_refused_when_the_function_is_made():
    endless: dict = {"policy": {}}
    endless["policy"]["policy"] = endless
    for policy in (
        {"compute": "halb"},
        {"compute": "half", "output": 3},
        {"rules": {"half": "half"}},
        endless,
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            jmpx.filter_grad(jnp.sum, NOOP, policy=policy)
        with pytest.raises((TypeError, ValueError)) as expected:
            jmpx.get_policy_map(policy)
        assert str(error.value) == str(expected.value) and "\n" not in str(error.value)
