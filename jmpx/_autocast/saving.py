"""What autocast saves for the backward pass, and `jax.checkpoint` around pieces of a function."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.core
import numpy as np

from jmpx._autocast.backward import PRODUCTS, is_outer, sums
from jmpx._autocast.value import Array, Traits, Value
from jmpx._base.messages import describe, did_you_mean
from jmpx._jaxprs.core import Atom, Equation, Primitive, operation_name
from jmpx._jaxprs.types import Params

SAVED = "jmpx_saved"  # what autocast itself gives that name with `checkpoint_name` is saved

OnValues: TypeAlias = Callable[[Sequence[Value]], list[Value]]
_Cast = tuple[np.dtype, bool]  # a key of `Value.casts`


class Saving(NamedTuple):
    """What autocast saves for the backward pass: in each piece, the results of weight products."""

    turns: int = 0  # how often scans run what is evaluated; 0 outside of all
    # Which of the last operands of its jaxpr depend on a product or are carried by a loop.
    activations: tuple[bool, ...] = ()
    in_piece: bool = False  # whether a piece is evaluated, under its checkpoint


IN_PIECE = Saving(in_piece=True)


def get_saving(save: str | None) -> Saving | None:
    """Returns what the argument of `autocast` with that name means, and refuses others."""
    if save not in (None, "products"):
        near = did_you_mean(save, ["products"]) if isinstance(save, str) else "."
        raise ValueError(f"Expected None or 'products' as save=, got {describe(save)}{near}")
    return None if save is None else Saving()


def is_weight_product(primitive: Primitive, params: Params, operands: Sequence[Atom]) -> bool:
    """Whether an operation is a convolution, or a matrix product as a layer makes it of weights."""
    # A product of two activations, such as the scores of an attention, has dimensions of the batch.
    name = operation_name(primitive.name)
    if name == "dot_general":
        return not _batch(params) and sums(params, operands)
    return name in PRODUCTS


def is_batched_product(equation: Equation) -> bool:
    """Whether an equation is a matrix product with dimensions of a batch."""
    is_product = equation.primitive.name == "dot_general" and not is_outer(equation)
    return is_product and bool(_batch(equation.params))


def _batch(params: Params) -> Sequence[int]:
    """Returns the dimensions of the batch of a matrix product, on its left."""
    return params["dimension_numbers"][1][0]


def saves_products(primitive: Primitive, *avals: Atom, **params: object) -> bool:
    """Whether the backward pass keeps the results of an operation: a policy of `jax.checkpoint`."""
    if primitive.name == "name":
        return params["name"] == SAVED
    return is_weight_product(primitive, params, avals)


def checkpointed(
    run: OnValues, values: Sequence[Value], is_read: Sequence[bool], saving: Saving
) -> OnValues:
    """Returns a function under `jax.checkpoint`, for these values and others that are alike.

    Casts go in and out with the values, so that each is made once: the cotangents of one cast are
    summed in its dtype, those of two casts in the dtype of the value.
    """
    # The function is kept for other pieces, and must not keep the arrays alive.
    constants = [v.array if isinstance(v.array, np.ndarray) else None for v in values]
    known = [
        (v.traits, v.constant, () if c is not None else tuple(v.casts))
        for v, c in zip(values, constants, strict=True)
    ]
    results: list[tuple[Traits, Array | None]] = []
    made: list[tuple[int, _Cast]] = []  # of operands, then of results

    def on_arrays(*arrays: Array) -> list[Array]:
        given, operands = iter(arrays), []
        for constant, (traits, number, casts) in zip(constants, known, strict=True):
            operands.append(_value(next(given) if constant is None else constant, traits, number))
            operands[-1].casts.update((key, next(given)) for key in casts)
        outputs = run(list(operands))
        results[:] = [(output.traits, output.constant) for output in outputs]
        made[:] = [
            (i, key)
            for i, value in enumerate((*operands, *outputs))
            if i >= len(operands) or (is_read[i] and constants[i] is None)
            for key in value.casts
            if i >= len(operands) or key not in known[i][2]
        ]
        casts = [(*operands, *outputs)[i].casts[key] for i, key in made]
        return [output.array for output in outputs] + casts

    # The two passes over a scan's body are in two loops: nothing can merge their equations.
    remat = jax.checkpoint(on_arrays, policy=saves_products, prevent_cse=not saving.turns)

    def call(values: Sequence[Value]) -> list[Value]:
        pairs = zip(values, constants, strict=True)
        given = [(v.array, *v.casts.values()) for v, constant in pairs if constant is None]
        arrays = remat(*itertools.chain.from_iterable(given))
        outputs = [_value(array, *each) for array, each in zip(arrays, results, strict=False)]
        for (i, key), array in zip(made, arrays[len(outputs) :], strict=True):
            (*values, *outputs)[i].casts[key] = array
        return outputs

    return call


def _value(array: Array, traits: Traits, constant: Array | None) -> Value:
    value = Value.of(array, traits)
    value.constant = constant
    return value
