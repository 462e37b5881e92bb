"""Each weight is cast once in each body that is traced, however often the model uses it."""

import contextlib
import functools
from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal, zoo
from helpers.autocast import assert_near
from helpers.jaxprs import trace
from jax import lax

import jmpx
import jmpx.flax

WIDTH, ROWS = 4, 7
IDS = jnp.arange(3)
X = jnp.ones((3, WIDTH))

# What the models do. They call the layers `linear`, `scale` and `embed` and read the arrays
# `weight()` and `table()`; `loop` and `remat` are what the framework offers in place of
# `jax.lax.scan` and `jax.checkpoint`.


def shared(model, x):
    return model.linear(jnp.tanh(model.linear(x)))


def without_checkpoint(model, x):
    weight, product = model.weight(), jax.jit(lambda w, x: x @ w)
    x = product(weight, product(model.weight(), x))
    x = lax.cond(x.sum() > 0, lambda x: x @ weight @ weight, lambda x: x @ weight, x) @ weight
    x = model.loop(lambda model, x: shared(model, x).astype(x.dtype), shared(model, x))
    x = model.scale(shared(model, model.scale(x)))
    return (model.embed(IDS) + model.linear(x)) @ model.table().T


def everything(model, x):
    return without_checkpoint(model, shared(model, model.remat(shared, x)))


# The models


def lax_loop(model, body, x):
    return lax.scan(lambda x, _: (body(model, x), None), x, length=2)[0]


def lax_remat(model, body, x):
    return jax.checkpoint(lambda x: body(model, x))(x)


class HaikuScale(hk.Module):
    def __call__(self, x):
        return x * hk.get_parameter("scale", [WIDTH], init=jnp.ones)


class HaikuModel(hk.Module):
    loop, remat = lax_loop, lax_remat

    def __init__(self, body):
        super().__init__(name="model")
        self.body = body

    def __call__(self, x):
        self.linear = hk.Linear(WIDTH, name="linear")
        self.scale, self.embed = HaikuScale(name="scale"), hk.Embed(ROWS, WIDTH, name="embed")
        return self.body(self, x)

    def weight(self):
        return hk.get_parameter("weight", [WIDTH, WIDTH], init=jnp.ones)

    def table(self):
        return self.embed.embeddings


class LinenScale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (WIDTH,))


class LinenModel(nn.Module):
    body: Callable

    def setup(self):
        self.linear, self.scale, self.embed = nn.Dense(WIDTH), LinenScale(), nn.Embed(ROWS, WIDTH)
        self.array = self.param("array", nn.initializers.ones, (WIDTH, WIDTH))

    def __call__(self, x):
        return self.body(self, x)

    def weight(self):
        return self.array

    def table(self):
        return self.embed.embedding

    def loop(self, body, x):
        def step(model, x, _):
            return body(model, x), None

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, length=2)
        return scan(self, x, None)[0]

    def remat(self, body, x):
        return nn.remat(body)(self, x)


class NNXScale(nnx.Module):
    def __init__(self):
        self.array = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return x * self.array[...]


class NNXModel(nnx.Module):
    loop, remat = lax_loop, lax_remat

    def __init__(self, body):
        self.body, rngs = body, nnx.Rngs(0)
        self.linear, self.scale = nnx.Linear(WIDTH, WIDTH, rngs=rngs), NNXScale()
        self.embed = nnx.Embed(ROWS, WIDTH, rngs=rngs)
        self.array = nnx.Param(jnp.ones((WIDTH, WIDTH)))

    def __call__(self, x):
        return self.body(self, x)

    def weight(self):
        return self.array[...]

    def table(self):
        return self.embed.embedding[...]


class EquinoxScale(eqx.Module):
    array: jax.Array

    def __call__(self, x):
        return x * self.array


class EquinoxLinear(EquinoxScale):
    def __call__(self, x):
        return x @ self.array


class EquinoxModel(eqx.Module):
    linear: EquinoxLinear
    scale: EquinoxScale
    vocabulary: eqx.nn.Embedding
    array: jax.Array
    body: Callable = eqx.field(static=True)
    loop, remat = lax_loop, lax_remat

    def __init__(self, body):
        self.body = body
        self.array = jnp.ones((WIDTH, WIDTH))
        self.linear, self.scale = EquinoxLinear(self.array), EquinoxScale(jnp.ones(WIDTH))
        self.vocabulary = eqx.nn.Embedding(weight=jnp.ones((ROWS, WIDTH)))

    def __call__(self, x):
        return self.body(self, x)

    def embed(self, ids):
        return jax.vmap(self.vocabulary)(ids)

    def weight(self):
        return self.array

    def table(self):
        return self.vocabulary.weight


@functools.cache
def net_of(framework, body):
    if framework == "haiku":
        net, whole = (
            hk.without_apply_rng(hk.transform(lambda x, body=body: HaikuModel(body)(x)))
            for body in (body, everything)
        )
        return zoo.Net(framework, net.apply, jax.eval_shape(whole.init, jax.random.key(0), X))
    if framework == "linen":
        params = jax.eval_shape(LinenModel(everything).init, jax.random.key(0), X)
        return zoo.Net(framework, LinenModel(body).apply, params)
    model = NNXModel(body) if framework == "nnx" else EquinoxModel(body)
    return zoo.Net(framework, lambda model, x: model(x), model)


CLASSES = {
    "haiku": ("HaikuModel", "Linear", "HaikuScale"),
    "linen": ("LinenModel", "Dense", "LinenScale"),
    "nnx": ("NNXModel", "Linear", "NNXScale"),
    "equinox": ("EquinoxModel", "EquinoxLinear", "EquinoxScale"),
}


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
                counts[inputs[0]] += 1
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
    assert not any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts)
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
    net = net_of(framework, everything)
    model, linear, scale = CLASSES[framework]
    for policy_map in (
        "c=bf16,o=f32",
        f"c=bf16,o=f32; {scale}: full",
        f"c=f32; {model}: c=f16; {linear}: c=bf16; {scale}: c=bf16",
    ):
        assert_cast_once(net, net.under(policy_map))


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
    net, said = net_of(framework, body), contextlib.nullcontext()
    if save and body is everything:  # which is left as the user wrote it
        said = pytest.warns(UserWarning, match="checkpoint")
    with said:
        assert_cast_once(net, jmpx.autocast(net.apply, "c=bf16", save=save))


@pytest.mark.parametrize("framework", ["haiku", "equinox"])  # NNX promotes to the stored dtype
def test_gradient_functions_cast_a_weight_once(framework):
    net = net_of(framework, everything)

    def loss_fn(params, x):
        return net.apply(params, x).astype(jnp.float32).sum()

    assert_cast_once(net, jmpx.filter_grad(loss_fn, jmpx.NoOpLossScale(), policy="c=bf16"))


@pytest.mark.thorough
@pytest.mark.versions
@every_framework
def test_a_cast_does_not_leak_into_another_trace(framework, rng):
    def body(model, x):
        x = model.loop(lambda model, x: shared(model, x).astype(x.dtype), shared(model, x))
        return shared(model, model.remat(shared, x))

    net, x = net_of(framework, body), normal(rng, *X.shape)
    policy, params = net.split(net.under("c=bf16,o=f32"))
    params = jax.tree.map(lambda leaf: normal(rng, *leaf.shape) / 2, params)

    def grads_of(apply):
        return jax.grad(lambda params: (apply(params, x) ** 2).sum())(params)

    expected = grads_of(net.split()[0])
    assert_near(grads_of(policy), expected, 0.1)  # eight products in a row
    assert_near(jax.jit(lambda: grads_of(policy))(), expected, 0.1)
    with jax.checking_leaks():
        jax.eval_shape(lambda x: policy(params, x), x)


def test_modules_of_two_policies_share_a_parameter_that_each_casts_itself():
    class Shared(nnx.Module):
        def __init__(self):
            self.first, self.second = (nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2))
            self.second.kernel = self.first.kernel
            self.third = self.first

    view = jmpx.flax.with_policies(Shared(), "c=bf16; */second: full")
    assert view.first.kernel[...].dtype == jnp.bfloat16
    assert view.second.kernel[...].dtype == jnp.float32
    assert view.third is view.first
