"""Which arrays a piece saves for the backward pass: residuals, and results of products."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jmpx._base.messages import SAVES, describe, did_you_mean
from jmpx._base.trees import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Atom, Equation, Primitive, operation_name
from jmpx._jaxprs.equations import KERNELS
from jmpx._jaxprs.inner import PRODUCTS, any_holds, holds, sums, variables
from jmpx._jaxprs.marks import Params

SAVED = "jmpx_saved"  # the `checkpoint_name` of saved arrays


def keeps_residuals(equation: Equation) -> bool:
    """Whether a piece keeps the residuals of an equation: a custom_vjp with products or kernels."""
    # With symbolic zeros, the forward pass gets told which operands vary, which a second `jax.vjp`
    # around it does not know.
    params = equation.params
    is_rule = equation.primitive.name == "custom_vjp_call" and not params["symbolic_zeros"]
    return is_rule and any_holds(params["call_jaxpr"], _is_costly)


def _is_costly(equation: Equation) -> bool:
    """Whether an equation is a product, or a kernel of Pallas, of cuDNN or of foreign code."""
    name = operation_name(equation.primitive.name)
    is_kernel = name.startswith(KERNELS) and any(map(core.is_floating, equation.outvars))
    return is_kernel or name in PRODUCTS


def with_residuals(equation: Equation) -> Equation:
    """Returns an equal custom_vjp whose results and residuals a checkpoint saves."""

    # JAX calls the two passes later: they must not keep the arrays alive.
    @jax.custom_vjp
    def call(*arrays: Array) -> list[Array]:
        return core.bind(equation, arrays)

    def forward(*arrays: Array) -> PyTree:
        known = {id(array): array for array in arrays}  # operands are not saved

        def named(leaf: Array) -> Array:  # once, also if a result is a residual
            if isinstance(leaf, jax.core.Tracer) and id(leaf) not in known:
                known[id(leaf)] = checkpoint_name(leaf, SAVED)
            return known.get(id(leaf), leaf)

        bound = jax.vjp(lambda *arrays: core.bind(equation, arrays), *arrays)
        return jax.tree.map(named, bound)

    call.defvjp(forward, lambda pullback, cotangents: pullback(cotangents))
    traced = jax.make_jaxpr(lambda *arrays: call(*arrays))(*(a.aval for a in equation.invars))
    (made,) = traced.eqns
    given = dict(zip(traced.invars, equation.invars, strict=True))
    return made.replace(
        invars=[given[atom] for atom in made.invars],
        outvars=equation.outvars,
        source_info=equation.source_info,
    )


# Results of products, which are saved by names and by shapes.


class Saving(NamedTuple):
    """Which arrays the backward pass keeps of a jaxpr."""

    mixed: bool = False  # whether small products of two activations are saved
    attention: bool = False  # whether all products of two activations are saved
    is_cast_later: bool = False  # whether autocast will cast the jaxpr from 32 to 16 bits
    trips: int = 0  # how often scans run the jaxpr; 0 outside of scans
    # Whether each of its last operands depends on a product or is carried by a loop.
    activations: tuple[bool, ...] = ()

    @property
    def policy(self) -> Callable[..., bool]:
        """The policy for `jax.checkpoint`."""
        if self.attention:
            return _saves_all_products
        return _saves_small_products if self.mixed else _saves_products


def get_saving(save: object, is_cast_later: bool = False) -> Saving | None:
    """Returns the meaning of the argument `save` of a function; refuses unknown words."""
    if save is None:
        return None
    if not isinstance(save, str) or save not in SAVES:
        near = did_you_mean(save, [*SAVES]) if isinstance(save, str) else "."
        words = ", ".join(map(repr, SAVES[:-1])) + f" or {SAVES[-1]!r}"
        raise ValueError(f"Expected None, {words} as save=, got {describe(save)}{near}")
    return Saving(save == "products+mixed", save == "products+attention", is_cast_later)


def holds_saved(equation: Equation, saving: Saving) -> bool:
    """Whether something in an equation is saved, if its operands are activations."""
    if saving.attention:
        return holds(equation, _holds_any)
    return holds(equation, _holds_small if saving.mixed else _is_saved)


def holds_product(equation: Equation) -> bool:
    """Whether an equation is a weight product or keeps residuals, or a jaxpr in it has one."""
    return holds(equation, _is_saved)


def is_named(equation: Equation, saving: Saving, active: Collection[Atom]) -> bool:
    """Whether the result of an equation is saved, given the activations of its jaxpr.

    A matrix product with batch axes is saved if one operand is a batch of weights; for two
    activations, `save` decides.
    """
    primitive, params, atoms = equation.primitive, equation.params, equation.invars
    if is_batched_product(equation):
        count = sum(atom in active for atom in variables(equation))
        is_chosen = saving.attention or (saving.mixed and _is_small(params, atoms))
        return _can_be_saved(atoms) and (count == 1 or (count == 2 and is_chosen))
    return _is_weight_product(primitive, params, atoms)


def is_batched_product(equation: Equation) -> bool:
    """Whether an equation is a matrix product with batch axes."""
    return equation.primitive.name == "dot_general" and _is_batched(
        equation.params, equation.invars
    )


def _holds_any(equation: Equation) -> bool:
    return _is_saved(equation) or is_batched_product(equation)


def _holds_small(equation: Equation) -> bool:
    if is_batched_product(equation):
        return _is_small(equation.params, equation.invars)
    return _is_saved(equation)


def _is_saved(equation: Equation) -> bool:
    is_product = _is_weight_product(equation.primitive, equation.params, equation.invars)
    return is_product or keeps_residuals(equation)


def _is_weight_product(primitive: Primitive, params: Params, operands: Sequence[Atom]) -> bool:
    """Whether an operation is a convolution, or a matrix product like those with weights."""
    if operation_name(primitive.name) not in PRODUCTS or not _can_be_saved(operands):
        return False
    # A product of two activations, such as the scores of an attention, has batch axes.
    is_dot = primitive.name == "dot_general"
    return not is_dot or (not params["dimension_numbers"][1][0] and sums(params, operands))


def _can_be_saved(operands: Sequence[Atom]) -> bool:
    """Whether a product is not of complex numbers: JAX fails to save one under a checkpoint."""
    dtypes = [getattr(operand, "aval", operand).dtype for operand in operands]
    return not any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)


def _is_batched(params: Params, operands: Sequence[Atom]) -> bool:
    return bool(params["dimension_numbers"][1][0]) and sums(params, operands)


def _is_small(params: Params, operands: Sequence[Atom]) -> bool:
    """Whether the result of a matrix product is no larger than its larger operand.

    In an attention, this holds for the weighted values, but not for the scores.
    """
    contracted, batch = params["dimension_numbers"]
    shapes = [getattr(operand, "aval", operand).shape for operand in operands[:2]]
    free = [
        math.prod(length(size) for i, size in enumerate(shape) if i not in (*axes, *shared))
        for shape, axes, shared in zip(shapes, contracted, batch, strict=True)
    ]
    result = math.prod(free) * math.prod(length(shapes[0][i]) for i in batch[0])
    return result <= max(math.prod(map(length, shape)) for shape in shapes)


def length(size: object) -> int:
    """Returns the length of an axis or of a loop; a guess where `jax.export` leaves it open."""
    return size if isinstance(size, int) else 128


def _saves_products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """A policy of a checkpoint: whether it saves the results of an operation."""
    if primitive.name == "name":
        return params["name"] == SAVED
    return _is_weight_product(primitive, params, avals)


def _saves_small_products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """The same, with small products of two activations."""
    if primitive.name == "dot_general" and _is_batched(params, avals):
        return _can_be_saved(avals) and _is_small(params, avals)
    return _saves_products(primitive, *avals, **params)


def _saves_all_products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """The same, with all products of two activations."""
    if primitive.name == "dot_general" and _is_batched(params, avals):
        return _can_be_saved(avals)
    return _saves_products(primitive, *avals, **params)
