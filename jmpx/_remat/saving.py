"""The ways to keep less for the backward pass, and the residuals that are kept."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jmpx._base.mappings import SAVES
from jmpx._base.messages import describe, did_you_mean
from jmpx._base.trees import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Atom, Equation, Primitive, operation_name
from jmpx._jaxprs.equations import HIDING
from jmpx._jaxprs.inner import PRODUCTS, any_holds, holds, sums, variables
from jmpx._jaxprs.marks import Params

SAVED = "jmpx_saved"  # what gets that name from `checkpoint_name` is saved
# As the names of kernels begin: the last two are of cuDNN and of Triton.
_KERNELS = (*HIDING, "dot_product_attention", "triton_kernel_call")


def keeps_residuals(equation: Equation) -> bool:
    """Whether a piece keeps the residuals of an equation: of a custom_vjp that holds much work."""
    # With symbolic zeros the forward pass is told which operands vary, which a second `jax.vjp`
    # around it does not know.
    params = equation.params
    is_rule = equation.primitive.name == "custom_vjp_call" and not params["symbolic_zeros"]
    return is_rule and any_holds(params["call_jaxpr"], _is_costly)


def _is_costly(equation: Equation) -> bool:
    """Whether an equation is a product or a kernel: of Pallas, a foreign function, cuDNN's."""
    name = operation_name(equation.primitive.name)
    is_kernel = name.startswith(_KERNELS) and any(map(core.is_floating, equation.outvars))
    return is_kernel or name in PRODUCTS


def with_residuals(equation: Equation) -> Equation:
    """Returns a custom_vjp that does the same; a checkpoint saves its results and residuals."""

    # JAX calls the two passes later: they must not keep the arrays alive.
    @jax.custom_vjp
    def call(*arrays: Array) -> list[Array]:
        return core.bind(equation, arrays)

    def forward(*arrays: Array) -> PyTree:
        known = {id(array): array for array in arrays}  # what is read is computed again

        def named(leaf: Array) -> Array:  # once, as a result that is a residual is saved once
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


# What is saved for the backward pass: the results of some products, by names and by shapes.


class Saving(NamedTuple):
    """What the backward pass keeps of a jaxpr."""

    mixed: bool = False  # whether products of two activations are saved that are small
    attention: bool = False  # whether all of them are
    is_cast_later: bool = False  # whether autocast evaluates the jaxpr, which makes 16 bits of 32
    turns: int = 0  # how often scans run the jaxpr; 0 outside of all
    # Which of its last operands depend on a product or are carried by a loop.
    activations: tuple[bool, ...] = ()

    @property
    def policy(self) -> Callable[..., bool]:
        """What `jax.checkpoint` takes as its policy."""
        if self.attention:
            return _saves_all_products
        return _saves_small_products if self.mixed else _saves_products


def get_saving(save: object, is_cast_later: bool = False) -> Saving | None:
    """Returns what the argument `save` of a function means, and refuses other words."""
    if save is None:
        return None
    if not isinstance(save, str) or save not in SAVES:
        near = did_you_mean(save, [*SAVES]) if isinstance(save, str) else "."
        words = ", ".join(map(repr, SAVES[:-1])) + f" or {SAVES[-1]!r}"
        raise ValueError(f"Expected None, {words} as save=, got {describe(save)}{near}")
    return Saving(save == "products+mixed", save == "products+attention", is_cast_later)


def holds_saved(equation: Equation, saving: Saving) -> bool:
    """Whether something in an equation is saved, if what it reads are activations."""
    if saving.attention:
        return holds(equation, _holds_any)
    return holds(equation, _holds_small if saving.mixed else _is_saved)


def holds_product(equation: Equation) -> bool:
    """Whether an equation is a weight product or keeps residuals, or a jaxpr in it has one."""
    return holds(equation, _is_saved)


def is_named(equation: Equation, saving: Saving, active: Collection[Atom]) -> bool:
    """Whether the result of an equation is saved, given the activations of its jaxpr.

    Of matrix products with dimensions of a batch, that are those of one activation and a batch of
    weights, and of those of two activations what `save` says.
    """
    primitive, params, atoms = equation.primitive, equation.params, equation.invars
    if is_batched_product(equation):
        count = sum(atom in active for atom in variables(equation))
        is_chosen = saving.attention or (saving.mixed and _is_small(params, atoms))
        return _can_be_saved(atoms) and (count == 1 or (count == 2 and is_chosen))
    return _is_weight_product(primitive, params, atoms)


def is_batched_product(equation: Equation) -> bool:
    """Whether an equation is a matrix product with dimensions of a batch."""
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
    """Whether an operation is a convolution, or a matrix product as a layer makes it of weights."""
    if operation_name(primitive.name) not in PRODUCTS or not _can_be_saved(operands):
        return False
    # A product of two activations, such as the scores of an attention, has dimensions of the batch.
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

    Of an attention, that are the weighted values, and not the scores.
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
    """Returns the length of an axis or of a loop, and a guess where `jax.export` leaves it open."""
    return size if isinstance(size, int) else 128


def _saves_products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """Whether a checkpoint saves the results of an operation: its policy."""
    if primitive.name == "name":
        return params["name"] == SAVED
    return _is_weight_product(primitive, params, avals)


def _saves_small_products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """The same, of small products of two activations, too."""
    if primitive.name == "dot_general" and _is_batched(params, avals):
        return _can_be_saved(avals) and _is_small(params, avals)
    return _saves_products(primitive, *avals, **params)


def _saves_all_products(primitive: Primitive, *avals: Any, **params: Any) -> bool:
    """The same, of all products of two activations, too."""
    if primitive.name == "dot_general" and _is_batched(params, avals):
        return _can_be_saved(avals)
    return _saves_products(primitive, *avals, **params)
