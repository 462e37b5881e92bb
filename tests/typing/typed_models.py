"""What the tests of types share: a model, and arrays whose type is known."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape)  # pyright: ignore[reportUnknownMemberType]  # JAX's own


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array


def make_params() -> Params:
    return Params(ones(2, 3), ones(3))


def predict(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
    return {"y": (x @ params.w + params.b) * scale}
