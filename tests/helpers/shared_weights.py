"""Models that use their weights in several places, in each framework.

A body is a function of a model and an input. It calls the layers `linear`, `scale` and `embed` and
reads the arrays `weight()` and `table()` of the model; `loop` and `remat` are what the framework
offers in place of `jax.lax.scan` and `jax.checkpoint`.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jmpx.equinox
import jmpx.flax
import jmpx.haiku

WIDTH, ROWS = 4, 7
IDS = jnp.arange(3)
X = jnp.ones((3, WIDTH))


# What the models do.


def everything(model, x):
    return model.scale(model.linear(x) @ model.weight()) + model.embed(IDS)


def shared(model, x):
    return model.linear(jnp.tanh(model.linear(x)))


def tied(model, x):
    return (model.embed(IDS) + model.linear(x)) @ model.table().T


def jitted(model, x):
    product = jax.jit(lambda w, x: x @ w)
    return product(model.weight(), product(model.weight(), x))


def in_a_loop(model, x):
    return model.loop(lambda model, x: shared(model, x).astype(x.dtype), shared(model, x))


def in_a_checkpoint(model, x):
    return shared(model, model.remat(shared, x))


def in_a_branch(model, x):
    weight = model.weight()
    return lax.cond(x.sum() > 0, lambda x: x @ weight @ weight, lambda x: x @ weight, x) @ weight


def beside_an_island(model, x):
    return model.scale(shared(model, model.scale(x)))


BODIES = (shared, tied, jitted, in_a_loop, in_a_checkpoint, in_a_branch, beside_an_island)


def lax_loop(model, body, x):
    return lax.scan(lambda x, _: (body(model, x), None), x, length=2)[0]


def lax_remat(model, body, x):
    return jax.checkpoint(lambda x: body(model, x))(x)


# The models. Each framework returns the parameters, a function of them and an input, and what makes
# that function run under a policy map.


def within(policies, policy_map, apply):
    def wrapper(*args):
        with policies(policy_map):
            return apply(*args)

    return wrapper


def as_it_is(model, policy_map):
    del policy_map
    return model


class HaikuScale(hk.Module):
    def __call__(self, x):
        return x * hk.get_parameter("scale", [WIDTH], init=jnp.ones)


class HaikuModel(hk.Module):
    loop, remat = lax_loop, lax_remat

    def __call__(self, body, x):
        self.linear = hk.Linear(WIDTH, name="linear")
        self.scale, self.embed = HaikuScale(name="scale"), hk.Embed(ROWS, WIDTH, name="embed")
        return body(self, x)

    def weight(self):
        return hk.get_parameter("weight", [WIDTH, WIDTH], init=jnp.ones)

    def table(self):
        return self.embed.embeddings


def haiku(body):
    def transformed(body):
        return hk.without_apply_rng(hk.transform(lambda x: HaikuModel(name="model")(body, x)))

    apply = transformed(body).apply

    def under(policy_map):
        return within(jmpx.haiku.policies, policy_map, apply)

    return transformed(everything).init(jax.random.key(0), X), apply, under


class LinenScale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (WIDTH,))


class LinenModel(nn.Module):
    def setup(self):
        self.linear, self.scale, self.embed = nn.Dense(WIDTH), LinenScale(), nn.Embed(ROWS, WIDTH)
        self.array = self.param("array", nn.initializers.ones, (WIDTH, WIDTH))

    def __call__(self, body, x):
        return body(self, x)

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


def linen(body):
    model = LinenModel()
    params = model.init(jax.random.key(0), everything, X)

    def apply(params, x):
        return model.apply(params, body, x)

    return params, apply, lambda policy_map: within(jmpx.flax.policies, policy_map, apply)


class NNXScale(nnx.Module):
    def __init__(self):
        self.array = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return x * self.array[...]


class NNXModel(nnx.Module):
    loop, remat = lax_loop, lax_remat

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.scale = nnx.Linear(WIDTH, WIDTH, rngs=rngs), NNXScale()
        self.embed = nnx.Embed(ROWS, WIDTH, rngs=rngs)
        self.array = nnx.Param(jnp.ones((WIDTH, WIDTH)))

    def __call__(self, body, x):
        return body(self, x)

    def weight(self):
        return self.array[...]

    def table(self):
        return self.embed.embedding[...]


def flax_nnx(body):
    graph, params = nnx.split(NNXModel())

    def under(policy_map, with_policies=jmpx.flax.with_policies):
        return lambda params, x: with_policies(nnx.merge(graph, params), policy_map)(body, x)

    return params, under(None, as_it_is), under


class EquinoxScale(eqx.Module):
    array: jax.Array

    def __call__(self, x):
        return x * self.array


class EquinoxLinear(eqx.Module):
    array: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.array + self.bias


class EquinoxModel(eqx.Module):
    linear: EquinoxLinear
    scale: EquinoxScale
    vocabulary: eqx.nn.Embedding
    array: jax.Array
    loop, remat = lax_loop, lax_remat

    def __init__(self):
        key = jax.random.key(0)
        self.array = jax.random.normal(key, (WIDTH, WIDTH))
        self.linear = EquinoxLinear(self.array, jnp.ones(WIDTH))
        self.scale = EquinoxScale(jnp.ones(WIDTH))
        self.vocabulary = eqx.nn.Embedding(ROWS, WIDTH, key=key)

    def __call__(self, body, x):
        return body(self, x)

    def embed(self, ids):
        return jax.vmap(self.vocabulary)(ids)

    def weight(self):
        return self.array

    def table(self):
        return self.vocabulary.weight


def equinox(body):
    params, static = eqx.partition(EquinoxModel(), eqx.is_array)

    def under(policy_map, with_policies=jmpx.equinox.with_policies):
        return lambda params, x: with_policies(eqx.combine(params, static), policy_map)(body, x)

    return params, under(None, as_it_is), under


FRAMEWORKS = {"haiku": haiku, "linen": linen, "nnx": flax_nnx, "equinox": equinox}
