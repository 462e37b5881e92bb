"""Models of the zoo of which only the shapes of the parameters are made."""

import jax
from flax import nnx

from helpers import zoo


def shapes_of(framework, body, *args):
    """Returns a model's parameters as shapes, the `Net`, and what makes its model of arrays."""
    made = []

    def make():
        net = zoo.build(framework, body, *args)
        graph, arrays = nnx.split(net.model) if framework == "nnx" else (None, net.model)
        made.extend([net, lambda model: model if graph is None else nnx.merge(graph, model)])
        return arrays

    return jax.eval_shape(make), *made
