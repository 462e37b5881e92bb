"""Pieces under `jax.checkpoint`: the backward pass keeps what weight products made in them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from jmpx._autocast.value import Array, Traits, Value
from jmpx._jaxpr import Primitive, operation_name


class Saving(NamedTuple):
    """What autocast saves for the backward pass.

    Args:
        in_loop: whether it evaluates the body of a scan.
    """

    in_loop: bool = False


def get_saving(save: Any, pieces: Any) -> Saving | None:
    """Returns what the arguments of `autocast` with these names mean.

    Raises:
        ValueError: if it is nothing that autocast can save.
    """
    if save is None:
        return None
    return Saving()


def is_weight_product(
    primitive: Primitive, params: dict[str, Any], operands: Sequence[Any]
) -> bool:
    """Whether an operation is a convolution, or a matrix product as a layer makes it of weights.

    A product of two activations, such as the scores of an attention, has dimensions of the batch.

    Args:
        primitive: the operation.
        params: its parameters.
        operands: its operands, or their shapes and dtypes.
    """
    name = operation_name(primitive.name)
    if name == "dot_general":
        (contracted, _), (batch, _) = params["dimension_numbers"]
        shape = getattr(operands[0], "aval", operands[0]).shape
        return not batch and any(shape[axis] != 1 for axis in contracted)
    return name in ("conv_general_dilated", "ragged_dot_general")


def saves_products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """Whether the backward pass keeps the results of an operation: a policy of `jax.checkpoint`."""
    return is_weight_product(primitive, params, avals)


def checkpointed(
    run: Callable[[list[Value]], list[Value]], values: Sequence[Value], saving: Saving
) -> list[Value]:
    """Runs a function of values under `jax.checkpoint`.

    Args:
        run: the function.
        values: its operands.
        saving: what is saved.
    """
    # JAX may keep the function, which must not keep the arrays alive.
    is_given = [not isinstance(value.array, np.ndarray) for value in values]
    constants = [None if g else value.array for value, g in zip(values, is_given, strict=True)]
    known = [(value.traits, value.constant) for value in values]
    results: list[tuple[Traits, Any]] = []

    def on_arrays(*arrays: Array) -> list[Array]:
        given = iter(arrays)
        filled = [next(given) if g else c for g, c in zip(is_given, constants, strict=True)]
        outputs = run([_value(a, *each) for a, each in zip(filled, known, strict=True)])
        results[:] = [(output.traits, output.constant) for output in outputs]
        return [output.array for output in outputs]

    # The two passes over a scan's body are in two loops: nothing can merge their equations.
    cached = jax.checkpoint(on_arrays, policy=saves_products, prevent_cse=not saving.in_loop)
    arrays = cached(*(value.array for value, g in zip(values, is_given, strict=True) if g))
    return [_value(array, *each) for array, each in zip(arrays, results, strict=True)]


def _value(array: Any, traits: Traits, constant: Any) -> Value:
    value = Value.of(array, traits)
    value.constant = constant
    return value
