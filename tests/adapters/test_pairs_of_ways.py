"""A policy inside of another one, by each pair of ways: an island or an error."""

import contextlib
import warnings
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import linen as nn, nnx
from helpers import zoo
from helpers.jaxprs import dots

import jmpx

WAYS = ("arguments", "modules", "operations")
SHORT = {"full": "float32", "c=f16": "float16", "c=bf16": "bfloat16"}


def head(m, x):
    return m.linear("head", 4)(x)


def run(net, outer, inner):
    """Returns the operand dtypes of a product under the inner policy, and of one beside it."""

    def f(model, x):
        inside = inner(model, jax.lax.stop_gradient(x))
        return inside, net.apply(model, x)

    apply, model = net.split(jmpx.apply_policy(f, outer))
    return dots(apply, model, np.ones((2, 4), np.float32))


@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
@pytest.mark.parametrize("outer", ["c=bf16", "full"])
@pytest.mark.parametrize("inner", ["full", "c=f16"])
@pytest.mark.filterwarnings("ignore:jmpx.apply_policy has cast its arguments to 16 bits")
@pytest.mark.filterwarnings("ignore:jmpx.apply_policy casts operations .* widens nothing")
@pytest.mark.sampled(3)
def test_an_inner_policy_is_an_island_or_an_error(framework, outer, inner):
    net = zoo.drawn(framework, head, 2, 4)
    for way in WAYS:
        for inner_way in WAYS:
            policies = f"by={way},{outer}", f"by={inner_way},{inner}"
            cast = jmpx.apply_policy(net.apply, policies[1])
            is_view = framework in ("nnx", "equinox") and inner_way == "modules"
            if way == "modules" and outer != inner and (inner_way != "modules" or is_view):
                with pytest.raises(ValueError, match="Cannot apply policy map"):
                    run(net, policies[0], cast)
            elif not (way == "modules" and is_view):
                dtypes = "x".join([SHORT[inner]] * 2), "x".join([SHORT[outer]] * 2)
                # What was rounded in the call of the outer function stays so for autocast.
                is_rounded = (way, inner_way, outer) == ("arguments", "operations", "c=bf16")
                found = run(net, policies[0], cast)
                assert tuple(found) == (dtypes[1:] * 2 if is_rounded else dtypes), policies


def scanned(f):
    turn = lambda model, c: (f(model, c).astype(c.dtype), None)  # noqa: E731
    return lambda model, x: jax.lax.scan(lambda c, _: turn(model, c), x, length=2)[0]


NARROW = "operations", "bf16"  # an output dtype that has no effect
TRANSFORMS = [lambda f: f, jax.jit, jax.checkpoint, scanned]


@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
def test_a_float32_policy_is_an_island_in_autocast_through_transformations(framework):
    net = zoo.drawn(framework, head, 2, 4)
    inner = {"context": net.under("full"), "gradient": in_gradient(net.apply)}
    for policy in "full", "full; <Linear>: c=f32", "c=bf16; <Linear>: full", "c=f32,o=bf16":
        policy = net.words(policy)
        for way in WAYS:
            if (";" not in policy or way != "arguments") and (way, policy[-4:]) != NARROW:
                inner[f"by={way},{policy}"] = jmpx.apply_policy(net.apply, f"by={way},{policy}")
    for name, f in inner.items():
        for transform in TRANSFORMS:
            found = run(net, "c=bf16", transform(f))
            assert (found[0], found[-1]) == ("float32xfloat32", "bfloat16xbfloat16"), name


def in_gradient(apply):
    def f(model, x):
        loss = lambda x: (apply(model, x) ** 2).sum()  # noqa: E731
        return jmpx.grad(loss, jmpx.NoOpLossScale(), policy="full")(x).grads

    return f


def test_a_gradient_function_without_casts_leaves_modules_to_the_context():
    net = zoo.drawn("haiku", head, 2, 4)
    grad_fn = jmpx.grad(
        lambda model, x: net.apply(model, x).astype(jnp.float32).sum(),
        jmpx.NoOpLossScale(),
        policy="full",
    )
    found = dots(jmpx.apply_policy(grad_fn, "by=modules,c=bf16"), net.model, np.ones((2, 4)))
    assert set(found) == {"bfloat16xbfloat16"}


CLASSES = {"haiku": hk.Linear, "linen": nn.Dense, "nnx": nnx.Linear, "equinox": eqx.nn.Linear}


STORE: Any = hk.mixed_precision  # annotated with JMP's policies
PUSHES = {
    "jmpx": jmpx.push_policy,
    "haiku": lambda cls, policy: STORE.push_policy(cls, jmpx.get_policy(policy)),
    "jmp": lambda cls, policy: STORE.push_policy(
        cls, jmp.get_policy("full" if policy == "full" else f"p=f32,{policy}")
    ),
}


@pytest.mark.parametrize(
    ("framework", "push"),
    [*((name, "jmpx") for name in zoo.FRAMEWORKS), ("haiku", "haiku"), ("haiku", "jmp")],
)
@pytest.mark.parametrize("policy", SHORT)
def test_autocast_follows_the_policies_of_classes_and_rules_before_them(framework, push, policy):
    net = zoo.drawn(framework, head, 2, 4)
    rules = {"": SHORT[policy], "; */head: c=f32,o=f32": "float32", "; */head: c=f16": "float16"}
    for rule, expected in rules.items():
        if framework == "haiku" and policy != "full" and rule:
            continue  # Haiku itself casts to 16 bits by the policy of the class
        for transform in (lambda f: f), scanned:
            cast = jmpx.apply_policy(transform(net.apply), f"c=bf16{rule}")
            apply, model = net.split(cast)
            is_told = framework == "haiku" and policy == "c=f16"
            told = (
                pytest.warns(match="Linear in float16 in place of bf")
                if is_told
                else contextlib.nullcontext()
            )
            with PUSHES[push](CLASSES[framework], policy), told:
                found = dots(apply, model, np.ones((2, 4), np.float32))
            assert found == ["x".join([expected] * 2)], rule


# The class policy of hk.Linear, a policy map, and what the map says in place of the class policy.
OVERRIDDEN = [
    *((own, "c=bf16", "bfloat16") for own in ("c=f16", "c=f16,o=f32")),
    ("c=bf16,o=f32", "c=f16", "float16"),
    *((own, "f32", None) for own in ("c=f16", "c=bf16")),  # it leaves the casts to the classes
    *(
        (own, f"{own}; {rule}: full", "float32")
        for own in ("c=f16", "c=bf16")
        for rule in ("Linear", "*/head")
    ),
    ("c=bf16", "c=bf16; head: c=f16", "float16"),
    *((own, own, None) for own in ("c=f16", "c=bf16")),
    ("c=f16", "c=bf16; Linear: c=f16", None),  # the same dtype
    *(("full", string, None) for string in ("c=bf16", "f32", "c=bf16; Linear: f16")),  # an island
    ("c=f16", "by=modules,c=bf16; Linear: full", None),
    ("c=f16", "c=bf16; op.dot_general: f32", "bfloat16"),
]
RUNS = {
    "apply_policy": lambda f, policy: jmpx.apply_policy(f, policy),
    "grad": lambda f, policy: jmpx.grad(f, jmpx.NoOpLossScale(), policy=policy),
    "value_and_grad": lambda f, policy: jmpx.value_and_grad(f, jmpx.NoOpLossScale(), policy=policy),
    "jit": lambda f, policy: jax.jit(jmpx.apply_policy(f, policy)),
    "autocast": lambda f, policy: jmpx.autocast(f, policy),
}


@pytest.mark.parametrize("push", PUSHES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("own", "policy", "said"), OVERRIDDEN)
@pytest.mark.sampled(11)
def test_a_class_policy_that_haiku_casts_by_is_told_where_the_string_says_another(
    push, run, own, policy, said
):
    if run == "autocast" and policy.startswith("by="):
        return  # it applies maps by operations alone
    net = zoo.drawn("haiku", head, 2, 4)
    apply, model = net.split(net.apply)
    loss = RUNS[run](lambda model, x: apply(model, x).astype(jnp.float32).sum(), policy)
    with PUSHES[push](hk.Linear, own), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(loss, model, jnp.ones((2, 4)))
    told = [str(each.message) for each in caught if "override" in str(each.message)]
    if said is None:
        assert not told
        return
    dtype = SHORT[own.removesuffix(",o=f32")]
    (message,) = told
    assert (
        f"casts by them: Linear in {dtype} in place of {said}: remove jmpx.set_policy(" in message
    )
