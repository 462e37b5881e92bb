"""What autocast saves for the backward pass, and `jax.checkpoint` around pieces of a function."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._autocast.backward import PRODUCTS, is_outer, sums
from jmpx._autocast.value import Array, Traits, Value
from jmpx._base.leaves import PyTree
from jmpx._base.messages import describe, did_you_mean
from jmpx._jaxprs.core import Atom, Equation, Primitive, operation_name
from jmpx._jaxprs.types import Params
from jmpx._policies.maps import HOW

SAVED = "jmpx_saved"  # what autocast itself gives that name with `checkpoint_name` is saved

OnValues: TypeAlias = Callable[[Sequence[Value]], list[Value]]
Transformation: TypeAlias = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]
_Cast = tuple[np.dtype, bool]  # a key of `Value.casts`
_Known = tuple[Traits, tuple[_Cast, ...]]  # the traits and the casts


class Saving(NamedTuple):
    """What autocast saves for the backward pass: in each piece, the results of weight products."""

    attention: bool = False  # whether the products of two activations are saved, too
    turns: int = 0  # how often scans run what is evaluated; 0 outside of all
    # Which of the last operands of its jaxpr depend on a product or are carried by a loop.
    activations: tuple[bool, ...] = ()
    in_piece: bool = False  # whether a piece is evaluated, under its checkpoint


IN_PIECE = Saving(in_piece=True)


def get_saving(save: object) -> Saving | None:
    """Returns what the argument of `autocast` with that name means, and refuses others."""
    if save is None:
        return None
    if not isinstance(save, str) or save not in HOW["save"]:
        near = did_you_mean(save, [*HOW["save"]]) if isinstance(save, str) else "."
        words = " or ".join(map(repr, HOW["save"]))
        raise ValueError(f"Expected None, {words} as save=, got {describe(save)}{near}")
    return Saving(attention=save == "products+attention")


def is_weight_product(primitive: Primitive, params: Params, operands: Sequence[Atom]) -> bool:
    """Whether an operation is a convolution, or a matrix product as a layer makes it of weights."""
    if _is_complex(operands):
        return False
    # A product of two activations, such as the scores of an attention, has dimensions of the batch.
    name = operation_name(primitive.name)
    if name == "dot_general":
        return not _batch(params) and sums(params, operands)
    return name in PRODUCTS


def _is_complex(operands: Sequence[Atom]) -> bool:
    """Whether a product is of complex numbers: JAX fails to save one under a checkpoint."""
    dtypes = [getattr(operand, "aval", operand).dtype for operand in operands]
    return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)


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


def _saves_all_products(primitive: Primitive, *avals: Atom, **params: Any) -> bool:
    """The same, of the products of two activations, too."""
    is_product = primitive.name == "dot_general" and sums(params, avals) and not _is_complex(avals)
    return is_product or saves_products(primitive, *avals, **params)


def checkpoint(saving: Saving) -> Transformation:
    """Returns `jax.checkpoint` with the policy that saves what it should."""
    # The two passes over a scan's body are in two loops: nothing can merge their equations.
    policy = _saves_all_products if saving.attention else saves_products
    return functools.partial(jax.checkpoint, policy=policy, prevent_cse=not saving.turns)


def shared(
    run: OnValues, values: Sequence[Value], is_read: Sequence[bool], transform: Transformation
) -> OnValues:
    """Returns a function of these values and others that are alike, transformed by JAX.

    Casts go in and out with the values, so that each is made once: the cotangents of one cast are
    summed in its dtype, those of two casts in the dtype of the value.
    """
    # The function is kept for other pieces, and must not keep the arrays alive.
    constants: list[Any] = [v.array if isinstance(v.array, np.ndarray) else None for v in values]
    known = [
        (v.traits, () if constant is not None else tuple(v.casts))
        for v, constant in zip(values, constants, strict=True)
    ]
    gives_casts = [flag and c is None for flag, c in zip(is_read, constants, strict=True)]
    results: list[_Known] = []
    made: list[list[_Cast]] = []  # of each operand

    def piece(given: Sequence[Sequence[Array]]) -> PyTree:
        arrays = [each or (c,) for each, c in zip(given, constants, strict=True)]
        operands = list(map(_value, arrays, known))
        outputs = run(list(operands))
        results[:] = [(v.traits, tuple(v.casts)) for v in outputs]
        triples = zip(operands, known, gives_casts, strict=True)
        made[:] = [
            [key for key in v.casts if gives and key not in casts]
            for v, (_, casts), gives in triples
        ]
        new = [[v.casts[key] for key in keys] for v, keys in zip(operands, made, strict=True)]
        return [(v.array, *v.casts.values()) for v in outputs], new

    transformed = transform(piece)

    def call(values: Sequence[Value]) -> list[Value]:
        pairs = zip(values, constants, strict=True)
        given = [(v.array, *v.casts.values()) if c is None else () for v, c in pairs]
        outputs, new = transformed(given)
        for value, keys, each in zip(values, made, new, strict=True):
            value.casts.update(zip(keys, each, strict=True))
        return list(map(_value, outputs, results))

    return call


def _value(arrays: Sequence[Array], known: _Known) -> Value:
    """Returns the value of an array and its casts."""
    traits, casts = known
    value = Value.of(arrays[0], traits)
    value.casts.update(zip(casts, arrays[1:], strict=True))
    return value
