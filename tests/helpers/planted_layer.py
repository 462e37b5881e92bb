"""One model in four frameworks, with a layer in its middle that a test gives it."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from helpers import normal, zoo
from helpers.zoo import FRAMEWORKS as FRAMEWORKS

WIDTH = 4


def _outermost_calls(layer, x):
    """A model of Haiku without a module around its layers."""

    def net(x):
        plant = zoo.HaikuInner(lambda m, x: layer(x), name="plant")
        return hk.Linear(1, name="head")(plant(hk.Linear(WIDTH, name="first")(x)))

    transformed = hk.without_apply_rng(hk.transform(net))
    params = jax.eval_shape(transformed.init, jax.random.key(0), x)
    return zoo.Net("haiku", transformed.apply, params)


def planted(framework, layer, policy, rows=2):
    """A loss of a model with a layer, and its arguments.

    Args:
        framework: the framework of the model.
        layer: a function of an array [rows, WIDTH], which returns another one.
        policy: the policy map under which the model runs; None for none.
        rows: how many rows the array has.
    """

    def body(m, x):
        x = m.inner("plant", lambda m, x: layer(x))(m.linear("first", WIDTH)(x))
        return m.linear("head", 1)(x)

    x = jnp.ones((rows, WIDTH))
    if framework == "haiku":
        net = _outermost_calls(layer, x)
    else:
        net = zoo.outlined(framework, body, x)
    if framework in ("nnx", "equinox"):
        net = net._replace(model=drawn_model(net.model, np.random.default_rng(0)))
    run = net.under(policy)

    def loss(model, x):
        return jnp.mean(jnp.asarray(run(model, x)))

    return loss, (net.model, x)


def drawn_model(model, rng):
    """A model, or its parameters, with normal numbers in place of its arrays or their shapes."""
    is_array = lambda leaf: hasattr(leaf, "shape")  # noqa: E731
    draw = lambda leaf: normal(rng, *leaf.shape)  # noqa: E731
    return jax.tree.map(lambda leaf: draw(leaf) if is_array(leaf) else leaf, model)
