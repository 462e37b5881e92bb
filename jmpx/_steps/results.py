"""What the gradient functions return: named tuples, which are pytrees."""

from typing import Generic, NamedTuple, TypeVar

import jax

from jmpx._base.exported import serialized
from jmpx._base.leaves import PyTree
from jmpx._scales.kinds import LossScale

ValueT = TypeVar("ValueT")
AuxT = TypeVar("AuxT")
ScalingT = TypeVar("ScalingT", bound=LossScale)


@serialized
class ValueAndGradients(NamedTuple, Generic[ValueT, ScalingT]):
    """The result of a function that `value_and_grad` made; it unpacks as a tuple does.

    As a pytree it matches its own class alone: a prefix of it, such as `out_specs` of
    `jax.shard_map`, is a `ValueAndGradients` too.

    Attributes:
        value: the unscaled loss, in float32 of shape (); with `has_aux` the pair `(loss, aux)`.
        scaling: the loss scale of the next step.
        grads_finite: whether all gradients are finite: a bool array of shape ().
        grads: gradients of the structure, shapes and dtypes of the first argument, with None for
            what cannot be differentiated; for an NNX module, an `nnx.State` of its parameters.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> grad_fn = jmpx.value_and_grad(jnp.sum, jmpx.NoOpLossScale(), policy="c=bf16")
        >>> result = grad_fn(jnp.ones(2))
        >>> result.value, result.grads
        (Array(2., dtype=float32), Array([1., 1.], dtype=float32))
    """

    __module__ = "jmpx.types"

    value: ValueT
    scaling: ScalingT
    grads_finite: jax.Array
    grads: PyTree


@serialized
class Gradients(NamedTuple, Generic[ScalingT]):
    """The result of a function that `grad` made: `ValueAndGradients` without a value."""

    __module__ = "jmpx.types"

    scaling: ScalingT
    grads_finite: jax.Array
    grads: PyTree


@serialized
class GradientsAndAux(NamedTuple, Generic[ScalingT, AuxT]):
    """The result of a function that `grad` made with `has_aux`: `Gradients`, and aux."""

    __module__ = "jmpx.types"

    scaling: ScalingT
    grads_finite: jax.Array
    grads: PyTree
    aux: AuxT
