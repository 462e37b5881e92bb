"""Each weight is cast once in each body that is traced, however often the model uses it."""

import contextlib
import functools

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import zoo
from helpers.jaxprs import trace
from jax import lax

import jmpx

WIDTH, ROWS = 4, 7
IDS = jnp.arange(3)
X = jnp.ones((3, WIDTH))


def shared(linear, x):
    return linear(jnp.tanh(linear(x)))


def looped(linear, x):
    step = lambda linear, x, _=None: (shared(linear, x).astype(x.dtype), None)  # noqa: E731
    if isinstance(linear, nn.Module):
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, length=2)
        return scan(linear, x, None)[0]
    return lax.scan(functools.partial(step, linear), x, length=2)[0]


def rematerialized(linear, x):
    if isinstance(linear, nn.Module):
        return nn.remat(shared)(linear, x)
    return jax.checkpoint(lambda x: shared(linear, x))(x)


def table_of(m, embed):
    """Returns the parameter of a layer, read from outside of it."""
    if isinstance(embed, hk.Module):
        return embed.embeddings  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(embed, nn.Module):
        return embed.embedding
    layer = m.get("embed", None)
    return layer.embedding[...] if hasattr(layer, "embedding") else layer.weight


def scaled(m, x):
    return x * m.param("scale", WIDTH)


def without_checkpoint(m, x, around=shared):
    linear, scale = m.linear("linear", WIDTH), m.inner("scale", scaled)
    x = around(linear, shared(linear, x))
    weight, product = m.param("weight", WIDTH, WIDTH), jax.jit(lambda w, x: x @ w)
    # Linen has a parameter read once.
    again = weight if isinstance(linear, nn.Module) else m.param("weight", WIDTH, WIDTH)
    x = product(weight, product(again, x))
    x = lax.cond(x.sum() > 0, lambda x: x @ weight @ weight, lambda x: x @ weight, x) @ weight
    x = scale(shared(linear, scale(looped(linear, x))))
    embed = m.embed("embed", ROWS, WIDTH)
    return (embed(IDS) + linear(x)) @ table_of(m, embed).T


def everything(m, x):
    return without_checkpoint(m, x, rematerialized)


# The casts of parameters in a jaxpr, and in those that its equations carry.

# If its size is that of its operand, the result is that operand in another shape.
SHAPES = {"transpose", "reshape", "squeeze", "broadcast_in_dim"}


class Casts:
    """Counts the casts of each parameter in each body that is read, to and fro."""

    def __init__(self):
        self.counts = []

    def read(self, jaxpr, names):
        """Reads a body, of whose inputs some have names; returns the names of its results."""
        body = getattr(jaxpr, "jaxpr", jaxpr)
        found = dict(zip(body.invars, names, strict=True))
        counts = {name: 0 for name in names if name is not None}
        self.counts.append(counts)
        for eqn in live_equations(body):
            inputs = [None if hasattr(atom, "val") else found.get(atom) for atom in eqn.invars]
            same_size = eqn.invars and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
            if eqn.primitive.name == "convert_element_type" and inputs[0] in counts:
                counts[inputs[0]] += not is_for_lookup(eqn, body)
                results = inputs
            elif eqn.primitive.name in SHAPES and same_size:
                results = inputs[:1]
            else:
                results = self.read_inner(eqn, inputs)
            found |= zip(eqn.outvars, results, strict=False)
        return [None if hasattr(atom, "val") else found.get(atom) for atom in body.outvars]

    def read_inner(self, eqn, inputs):
        """Reads the jaxprs of an equation; returns the names of its results if it is a call."""
        results = []
        values = (v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values())
        inner = [jaxpr for value in values for jaxpr in value if hasattr(jaxpr, "eqns")]
        for jaxpr in inner:  # branches read all operands but the first, which chooses one
            taken = len(getattr(jaxpr, "jaxpr", jaxpr).invars)
            results = self.read(jaxpr, inputs[len(inputs) - taken :])
        return results if len(inner) == 1 else []


def is_for_lookup(eqn, body):
    """Whether a cast is for a lookup alone, which sums its gradient in float32."""
    readers = [each for each in body.eqns if eqn.outvars[0] in each.invars]
    return [each.primitive.name for each in readers] == ["gather"]


def live_equations(body):
    """Returns the equations on which the results of a body depend."""
    live = {atom for atom in body.outvars if not hasattr(atom, "val")}
    found = []
    for eqn in reversed(body.eqns):
        if eqn.effects or live.intersection(eqn.outvars):
            live.update(atom for atom in eqn.invars if not hasattr(atom, "val"))
            found.append(eqn)
    return found[::-1]


def assert_cast_once(net, apply):
    """Holds a function to cast no parameter twice in one body, and some parameter at all."""
    apply, model = net.split(apply)
    leaves, structure = jax.tree.flatten(model)
    jaxpr = trace(lambda leaves: apply(structure.unflatten(leaves), X), leaves)
    # A cast of another trace would be a constant of this one.
    tracer = jax.core.Tracer  # pyright: ignore[reportAttributeAccessIssue]
    assert not any(isinstance(const, tracer) for const in jaxpr.consts)
    casts = Casts()
    casts.read(
        jaxpr,
        [i if np.issubdtype(leaf.dtype, np.floating) else None for i, leaf in enumerate(leaves)],
    )
    assert max(max(counts.values()) for counts in casts.counts if counts) == 1


every_framework = pytest.mark.parametrize("framework", zoo.FRAMEWORKS)


@every_framework
def test_adapters_cast_a_weight_once(framework):
    """Also beside an island, and under a parent that casts."""
    net = zoo.drawn(framework, everything, *X.shape)
    for policy_map in (
        "c=bf16,o=f32",
        "c=bf16,o=f32; <Inner>: full",
        "c=f32; <Net>: c=f16; <Linear>: c=bf16; <Inner>: c=bf16",
    ):
        assert_cast_once(net, net.under(net.words(policy_map)))


@pytest.mark.parametrize(
    ("framework", "body", "save"),
    [
        ("haiku", everything, None),
        ("linen", without_checkpoint, "products"),
        ("nnx", everything, "products"),
        ("equinox", without_checkpoint, None),
    ],
)
def test_autocast_casts_a_weight_once(framework, body, save):
    net, said = zoo.drawn(framework, body, *X.shape), contextlib.nullcontext()
    if save and body is everything:  # which is left as the user wrote it
        said = pytest.warns(UserWarning, match="checkpoint")
    with said:
        assert_cast_once(net, jmpx.autocast(net.apply, "c=bf16", save=save))


@pytest.mark.parametrize("framework", ["haiku", "equinox"])  # NNX promotes to the stored dtype
def test_gradient_functions_cast_a_weight_once(framework):
    net = zoo.drawn(framework, everything, *X.shape)

    def loss_fn(params, x):
        return net.apply(params, x).astype(jnp.float32).sum()

    assert_cast_once(net, jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy="by=arguments,c=bf16"))


@pytest.mark.thorough
@pytest.mark.versions
@every_framework
def test_a_cast_does_not_leak_into_another_trace(framework):
    net = zoo.drawn(framework, everything, *X.shape)
    apply, model = net.split(net.under("c=bf16,o=f32"))
    gradient = jax.grad(lambda model: apply(model, X).sum())
    jax.eval_shape(jax.jit(gradient), model)
    with jax.checking_leaks():
        jax.eval_shape(gradient, model)
