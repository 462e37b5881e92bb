"""A model that is written once, in each of the four frameworks.

A body is a function of `m` and of inputs. It asks `m` for layers by their names:

    def two_layers(m, x):
        x = m.linear("first", 4)(x)
        x = m.inner("block", one_layer)(x)  # a module of its own, with another body
        return m.linear("head", 7)(x)

    net = zoo.build("linen", two_layers, x)
    net.apply(net.model, x)
    net.under("c=bf16")(net.model, x)  # in the framework's context, or on a view
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from helpers import normal

Body = Callable[..., Any]


class Net(NamedTuple):
    """A model of one framework.

    `model` is what a user differentiates: parameters (Haiku, Linen) or the module (NNX, Equinox),
    and `apply(model, *args)` calls it.
    """

    framework: str
    apply: Callable[..., Any]
    model: Any

    def under(self, policy: Any) -> Callable[..., Any]:
        """Returns `apply` inside of the framework's context, or on its view, of a policy map."""
        return self.apply if policy is None else self.within(policy)

    def within(self, *policy: Any) -> Callable[..., Any]:
        """As `under`; without a policy map, under the policies of classes alone."""
        if self.framework == "haiku" and not policy:
            return self.apply  # Haiku itself follows them
        if self.framework in ("haiku", "linen"):
            policies = getattr(jmpx, "haiku" if self.framework == "haiku" else "flax").policies

            def apply(model, *args):
                with policies(*policy):
                    return self.apply(model, *args)

            return apply
        view = getattr(jmpx, "flax" if self.framework == "nnx" else "equinox").with_policies
        return lambda model, *args: view(model, *policy)(*args)

    def split(self, apply: Callable[..., Any] | None = None) -> tuple[Callable[..., Any], Any]:
        """Returns `apply`, or another function of a model, as one of a pytree, and that pytree."""
        apply = self.apply if apply is None else apply
        if self.framework != "nnx":
            return apply, self.model
        graph, state = nnx.split(self.model)
        return lambda state, *args: apply(nnx.merge(graph, state), *args), state

    def words(self, text: str) -> str:
        """Spells `<Linear>` and the other classes of layers as the framework does."""
        return functools.reduce(lambda t, n: t.replace(f"<{n[0]}>", n[1]), self._names(), text)

    def _names(self):
        name = "NNX" if self.framework == "nnx" else self.framework.title()
        linear = "Dense" if self.framework == "linen" else "Linear"
        root = f"{name.lower()}_net/" if self.framework == "haiku" else ""
        return {
            "Linear": linear,
            "module.Linear": f"{_MODULES[self.framework]}.{linear}",
            "Net": f"{name}Net",
            "Inner": f"{name}Inner",
            "net/": root,
        }.items()


# Haiku


class HaikuNet(hk.Module):
    def __init__(self, body, name=None):
        super().__init__(name)
        self.body = body

    def __call__(self, *args):
        return self.body(_Haiku, *args)


class HaikuInner(HaikuNet):
    pass


class _Haiku:
    @staticmethod
    def linear(name, width):
        return hk.Linear(width, name=name)

    @staticmethod
    def norm(name):
        return hk.LayerNorm(-1, True, True, name=name)

    @staticmethod
    def conv(name, features, size=3):
        return hk.Conv2D(features, size, name=name)

    @staticmethod
    def embed(name, rows, width):
        return hk.Embed(rows, width, name=name)

    @staticmethod
    def param(name, *shape):
        return hk.get_parameter(name, shape, init=hk.initializers.RandomNormal())

    @staticmethod
    def inner(name, body):
        return HaikuInner(body, name=name)


def _haiku(body, key, args):
    net = hk.without_apply_rng(hk.transform(lambda *args: HaikuNet(body)(*args)))
    return net.apply, net.init(key, *args)


# Linen


class LinenNet(nn.Module):
    body: Body

    @nn.compact
    def __call__(self, *args):
        return self.body(_Linen(self), *args)


class LinenInner(LinenNet):
    pass


class _Linen:
    def __init__(self, module):
        self.module = module

    def linear(self, name, width):
        return nn.Dense(width, name=name)

    def norm(self, name):
        return nn.LayerNorm(name=name)

    def conv(self, name, features, size=3):
        return nn.Conv(features, (size, size), name=name)

    def embed(self, name, rows, width):
        return nn.Embed(rows, width, name=name)

    def param(self, name, *shape):
        return self.module.param(name, nn.initializers.normal(1.0), shape)

    def inner(self, name, body):
        return LinenInner(body, name=name)


def _linen(body, key, args):
    net = LinenNet(body)
    return net.apply, net.init(key, *args)


# NNX and Equinox make their layers in a first call


class _Made:
    """Gets the layers of a module; the first call makes them."""

    def __init__(self, get: Callable[[str, Callable[[], Any]], Any], key=None):
        self.get, self.keys = get, iter(jax.random.split(key, 64)) if key is not None else None

    @property
    def key(self):
        return next(self.keys)  # pyright: ignore[reportArgumentType]


class NNXNet(nnx.Module):
    def __init__(self, body, key, args):
        self.body = body
        body(_NNX(self, key), *args)

    def __call__(self, *args):
        return self.body(_NNX(self), *args)


class NNXInner(NNXNet):
    pass


class _NNX(_Made):
    def __init__(self, module, key=None):
        def get(name, make):
            if not hasattr(module, name):
                setattr(module, name, make())
            return getattr(module, name)

        super().__init__(get, key)

    @property
    def rngs(self):
        return nnx.Rngs(self.key)

    def linear(self, name, width):
        make = lambda x: nnx.Linear(x.shape[-1], width, rngs=self.rngs)  # noqa: E731
        return lambda x: self.get(name, lambda: make(x))(x)

    def norm(self, name):
        return lambda x: self.get(name, lambda: nnx.LayerNorm(x.shape[-1], rngs=self.rngs))(x)

    def conv(self, name, features, size=3):
        make = lambda x: nnx.Conv(x.shape[-1], features, (size, size), rngs=self.rngs)  # noqa: E731
        return lambda x: self.get(name, lambda: make(x))(x)

    def embed(self, name, rows, width):
        return self.get(name, lambda: nnx.Embed(rows, width, rngs=self.rngs))

    def param(self, name, *shape):
        return self.get(name, lambda: nnx.Param(jax.random.normal(self.key, shape)))[...]

    def inner(self, name, body):
        return lambda *args: self.get(name, lambda: NNXInner(body, self.key, args))(*args)


def _nnx(body, key, args):
    return lambda model, *args: model(*args), NNXNet(body, key, args)


class EquinoxNet(eqx.Module):
    """Its subclasses have a field for each layer."""

    body: Body = eqx.field(static=True)

    def __call__(self, *args):
        return self.body(_Equinox(lambda name, make: getattr(self, name)), *args)


class EquinoxInner(EquinoxNet):
    pass


@functools.cache
def _with_fields(base, names):
    return type(base)(base.__name__, (base,), {"__annotations__": dict.fromkeys(names, Any)})


def _equinox_module(base, body, key, args):
    layers: dict[str, Any] = {}

    def get(name, make):
        if name not in layers:
            layers[name] = make()
        return layers[name]

    body(_Equinox(get, key), *args)
    return _with_fields(base, tuple(layers))(body, **layers)


def _over_rows(layer, ndim=1):
    """Maps a layer of one example over the other axes of its input."""

    def apply(x):
        call = layer()
        for _ in range(x.ndim - ndim):
            call = jax.vmap(call)
        return call(x)

    return apply


class _Equinox(_Made):
    def linear(self, name, width):
        make = lambda x: eqx.nn.Linear(x.shape[-1], width, key=self.key)  # noqa: E731
        return lambda x: _over_rows(lambda: self.get(name, lambda: make(x)))(x)

    def norm(self, name):
        make = lambda x: eqx.nn.LayerNorm(x.shape[-1])  # noqa: E731
        return lambda x: _over_rows(lambda: self.get(name, lambda: make(x)))(x)

    def conv(self, name, features, size=3):
        def apply(x):  # channels last, as in the other frameworks
            make = lambda: eqx.nn.Conv2d(  # noqa: E731
                x.shape[-1], features, size, padding="SAME", key=self.key
            )
            y = _over_rows(lambda: self.get(name, make), 3)(jnp.moveaxis(x, -1, -3))
            return jnp.moveaxis(y, -3, -1)

        return apply

    def embed(self, name, rows, width):
        layer = self.get(name, lambda: eqx.nn.Embedding(rows, width, key=self.key))
        return lambda ids: _over_rows(lambda: layer, 0)(ids)

    def param(self, name, *shape):
        return self.get(name, lambda: jax.random.normal(self.key, shape))

    def inner(self, name, body):
        make = lambda args: _equinox_module(EquinoxInner, body, self.key, args)  # noqa: E731
        return lambda *args: self.get(name, lambda: make(args))(*args)


def _equinox(body, key, args):
    return lambda model, *args: model(*args), _equinox_module(EquinoxNet, body, key, args)


INNER = {"haiku": HaikuInner, "linen": LinenInner, "nnx": NNXInner}  # Equinox: one for each body
_MAKERS = {"haiku": _haiku, "linen": _linen, "nnx": _nnx, "equinox": _equinox}
FRAMEWORKS = tuple(_MAKERS)


def outlined(framework: str, body: Body, *args: Any) -> Net:
    """Makes a model that has shapes in place of its arrays, so that nothing is computed."""
    applies = []

    def init():
        apply, model = _MAKERS[framework](body, jax.random.key(0), args)
        applies.append(apply)
        return model

    model = (nnx.eval_shape if framework == "nnx" else jax.eval_shape)(init)
    return Net(framework, applies[0], model)


def build(framework: str, body: Body, *args: Any, rng: Any = None) -> Net:
    """Makes a model for inputs as `args`.

    Args:
        framework: one of `FRAMEWORKS`.
        body: what the model does.
        *args: arrays.
        rng: a NumPy generator, from which all floating leaves are drawn, biases and scales too, as
            float32 numbers that 16 bits would round; by default they are as the framework
            initializes them.
    """
    if rng is None:
        return Net(framework, *_MAKERS[framework](body, jax.random.key(0), args))
    draw = lambda leaf: normal(rng, *leaf.shape)  # noqa: E731
    # Traced, as an initializer that runs has each of its operations compiled.
    net = outlined(framework, body, *args)
    if framework == "nnx":
        graph, state = nnx.split(net.model)
        return net._replace(model=nnx.merge(graph, jax.tree.map(draw, state)))
    return net._replace(model=jax.tree.map(draw, net.model))


@functools.cache
def drawn(framework: str, body: Body, *shape: int) -> Net:
    """Makes a model for an array of this shape, which tests share: it has drawn leaves."""
    return build(framework, body, np.ones(shape, np.float32), rng=np.random.default_rng(0))


_MODULES = {  # as rules name them
    "haiku": "haiku",
    "linen": "flax.linen",
    "nnx": "flax.nnx",
    "equinox": "equinox.nn",
}

# Bodies


def mlp(m, x):
    return m.linear("head", 7)(jnp.tanh(m.linear("first", 5)(x)))


def block(m, x):
    return m.linear("outer", 6)(jnp.tanh(m.linear("inner", 5)(x)))


def nested(m, x):
    """Layers first, block/inner, block/outer and head, each of another width."""
    x = m.inner("block", block)(m.linear("first", 4)(x))
    return m.linear("head", 7)(x)


def normed(m, x):
    """A residual block whose norm is a layer of its own."""
    x = m.linear("first", 4)(x)
    x = x + m.linear("down", 4)(jax.nn.gelu(m.linear("up", 8)(m.norm("norm")(x))))
    return m.linear("head", 7)(x)
