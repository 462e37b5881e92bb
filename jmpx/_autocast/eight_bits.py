"""Matrix products of operands that are rounded to 8 bits, where a rule says `matmul=fp8`.

The operands of a product in 16 bits are divided by a power of two, so that their largest magnitude
is just below the largest number of the format, and rounded: to e4m3, which has 4 bits of exponent
and 3 of mantissa, and cotangents to e5m2. There is no state: each array has the scale of its own
largest magnitude at that moment ("current scaling" in the terms of NVIDIA's TransformerEngine). As
powers of two divide without rounding, gradients are the same to the bit under each loss scale that
is a power of two, unless they leave the range of their dtype.

`mxfp8` has a scale for each 32 numbers along the summed axis (OCP Microscaling Formats, version
1.0), and e4m3 in both directions.
"""

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmpx._autocast.rules import Operation, is_precise
from jmpx._autocast.value import BFLOAT16, FLOAT32, LOW, Value
from jmpx._base.axes import tracked_axes, varying_axes
from jmpx._base.contexts import INSPECTED, MEASURED, RUN, fact
from jmpx._base.dtypes import eight_bits
from jmpx._base.formats import E4M3, E5M2, default_device, formats_of, lacking_for, rounded_to
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import PRODUCTS, is_backward, is_outer
from jmpx._jaxprs.marks import SCALED
from jmpx._remat.saving import SAVED

# Products of fewer multiplications take less time than the scales of their operands.
FEWEST = 2**18
_BLOCK = 32
# The exponents of the largest numbers, 1.75 * 2**8 and 1.75 * 2**15.
_LARGEST = {E4M3: 8, E5M2: 15}

Axes = tuple[int, ...]


# Which products run in 8 bits.


def why_not(operation: Operation) -> str | None:
    """Returns why a product does not run in 8 bits, "" if it does; None if no rule says so."""
    asked = operation.region.eight_bits
    if asked is None or operation.region.is_full or operation.name not in PRODUCTS:
        return None
    equation, values = operation.equation, operation.values
    dtypes = {value.dtype for value in values[:2]} - {*LOW, FLOAT32}
    if operation.name != "dot_general":
        return f"it is a {operation.name}"
    if operation.override is not None:
        return "a rule for op.dot_general is for it"
    if dtypes:
        return f"an operand is {dtypes.pop()}"
    if is_precise(equation):
        return "its precision= asks for more digits"
    if is_outer(equation):
        return "it sums nothing"
    if is_backward(equation):
        return "it is of a gradient that is taken inside of the policy"
    if core.in_vmap_around():
        return "a jax.vmap is around the policy, so move it inside"
    numbers = equation.params["dimension_numbers"]
    is_batched, (bits, _) = bool(numbers[1][0]), asked
    if is_batched and not bits.attention and not any(value.is_weak for value in values):
        named = eight_bits(f"{bits.name}+attention")
        return f"it is of two activations, which take matmul={named and named.name}"
    return _too_odd(numbers, [value.array.shape for value in values], _BLOCK if bits.blocks else 16)


def _too_odd(numbers: Any, shapes: Sequence[Axes], multiple: int) -> str:
    """Returns why sizes do not suit; each axis that is not batched is summed in some direction."""
    summed, batched = numbers
    lhs, rhs = (
        math.prod(shape[i] for i in _others(len(shape), *axes))
        for shape, axes in zip(shapes, zip(summed, batched, strict=True), strict=True)
    )
    sizes = math.prod(shapes[0][i] for i in summed[0]), lhs, rhs
    for size in sizes:
        if not isinstance(size, int) or size % multiple:  # `jax.export` may leave sizes open
            return f"an axis of {size} is no multiple of {multiple}"
    return f"it has fewer than {FEWEST} multiplications" if math.prod(sizes) < FEWEST else ""


def _others(count: int, *given: Axes) -> Axes:
    """Returns the axes of an array that are not among the given ones."""
    return tuple(i for i in range(count) if not any(i in axes for axes in given))


def product(operation: Operation) -> list[Value] | None:
    """Runs a product in 8 bits, which hands out the compute dtype; None if it is not to run so.

    Raises:
        ValueError: if the default device has no units for it, unless a tool traces.
    """
    asked, dtype, purpose = operation.region.eight_bits, operation.region.dtype, fact(INSPECTED)
    if asked is None or why_not(operation) != "" or purpose == MEASURED:
        return None
    (bits, rank), params, is_run = asked, operation.equation.params, purpose == RUN
    device, rule = default_device(), operation.interpreter.regions.policy_map.rules[rank]
    reasons = lacking_for([rule], device.device_kind, formats_of(device))
    if reasons and purpose is None:
        raise ValueError(reasons[0])
    numbers = params["dimension_numbers"]
    config = _Config(
        numbers,
        dtype,
        bits.blocks,
        bits.emulate,
        is_run,
        # GPUs take one scale for an array. Several multiply the sums instead, and so they do for
        # TPUs, whose compiler multiplies in 8 bits what has no scale (seen for a TPU7x).
        after=bool(numbers[1][0]) or core.in_vmap() or device.platform == "tpu",
        sharding=params.get("out_sharding"),
    )
    lhs, rhs = (value.to(dtype) for value in operation.values)
    if bits.blocks and not (bits.emulate or is_run):
        configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
        result = jax.nn.scaled_dot_general(lhs, rhs, numbers, dtype, configs)
    else:
        result = _product(config, lhs, rhs)
    return [Value(result, is_weak=False, tangent=operation.is_tangent)]


# A product and its derivatives.


class _Config(NamedTuple):
    """What is known of a product while JAX traces."""

    numbers: Any  # the `dimension_numbers` of `lax.dot_general`
    dtype: np.dtype  # of the operands and the result: 16 bits
    blocks: bool
    emulate: bool  # whether to round before the casts to 8 bits, which compilers may leave out
    is_run: bool  # whether a tool runs operations one by one, and rounds the casts by itself
    after: bool  # whether the scales multiply the result instead of the operands
    sharding: Hashable  # the `out_sharding` of `lax.dot_general`

    @property
    def carrier(self) -> np.dtype:
        """The dtype that the 8 bits are widened to, and in which products hand out their sums."""
        # Where there are units, XLA multiplies numbers that were widened in 8 bits. What it sums in
        # float32 may leave the product in bfloat16; for float16, that has too few digits.
        return BFLOAT16 if self.dtype == BFLOAT16 else FLOAT32

    def multiply(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.dot_general(
            lhs,
            rhs,
            self.numbers,
            precision=lax.Precision.DEFAULT,
            preferred_element_type=lhs.dtype,
            out_sharding=self.sharding,
        )


class _Rounded(NamedTuple):
    """An array in 8 bits, widened."""

    numbers: jax.Array  # in the carrier
    scale: jax.Array  # float32, with the batched axes; the numbers have it already, or not


def _forward(config: _Config, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the product, and what its backward pass keeps: no array in 8 bits."""
    summed, batched = config.numbers
    a = _rounded(config, E4M3, summed[0], batched[0], lhs, None)
    b = _rounded(config, E4M3, summed[1], batched[1], rhs, None)
    result = config.multiply(a.numbers, b.numbers)
    result = _scaled(config, result, a, b, tuple(range(len(batched[0]))))
    # A pass that runs the forward pass again, as `save` has it, reads no array for its scale.
    scales = (checkpoint_name(each.scale, SAVED) for each in (a, b))
    return result.astype(config.dtype), (lhs, rhs, *scales)


def _backward(config: _Config, kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of both operands, which are products in 8 bits, too."""
    (lhs, rhs, *scales), (summed, batched) = kept, config.numbers
    to, batch = E4M3 if config.blocks else E5M2, tuple(range(len(batched[0])))
    free = [_others(x.ndim, *axes) for x, *axes in zip((lhs, rhs), summed, batched, strict=True)]
    in_result = batch[-1] + 1 if batch else 0
    of_lhs = tuple(range(in_result, in_result + len(free[0])))
    of_rhs = _others(cotangent.ndim, batch, of_lhs)

    def pulled_back(i: int, operand: jax.Array, other: jax.Array, axes: Axes) -> jax.Array:
        a = _rounded(config, to, axes, batch, cotangent, None)
        b = _rounded(config, E4M3, free[1 - i], batched[1 - i], other, scales[1 - i])

        def multiply(x: jax.Array) -> jax.Array:
            return config.multiply(*((x, b.numbers) if i == 0 else (b.numbers, x)))

        # JAX knows the axes of the transposed product, and how a mesh splits it.
        (result,) = jax.linear_transpose(multiply, operand.astype(config.carrier))(a.numbers)
        return _scaled(config, result, a, b, batched[i]).astype(operand.dtype)

    return pulled_back(0, lhs, rhs, of_rhs), pulled_back(1, rhs, lhs, of_lhs)


_product: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))(
    lambda *args: _forward(*args)[0]
)
_product.defvjp(_forward, _backward)


# An array in 8 bits.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _rounded(
    config: _Config, to: np.dtype, summed: Axes, batch: Axes, x: jax.Array, scale: Any
) -> Any:
    """Rounds an operand of a product that sums some axes; its scale may be known."""
    if config.blocks:
        order = (*_others(x.ndim, summed), *summed)
        moved = lax.transpose(x, order)
        blocks = moved.reshape(*moved.shape[: x.ndim - len(summed)], -1, _BLOCK)
        scale = jnp.max(_scale(jnp.abs(blocks), to), axis=-1, keepdims=True)
        numbers = _cast(config, blocks, scale, to) * scale.astype(config.carrier)
        numbers = lax.transpose(numbers.reshape(moved.shape), np.argsort(order).tolist())
        return _Rounded(numbers, jnp.float32(1))
    if scale is None:
        # The largest scale is that of the largest number; a GPU would compute one in a kernel.
        scale = jnp.max(_scale(jnp.abs(x), to), axis=_others(x.ndim, batch))
        scale = lax.transpose(scale, [sorted(batch).index(axis) for axis in batch])
        scale = scale if batch else _over_shards(scale, x)
    spread = _spread(scale, x.ndim, batch)
    numbers = _cast(config, x, spread, to)
    return _Rounded(numbers if config.after else numbers * spread.astype(config.carrier), scale)


@_rounded.defjvp
def _rounded_twice(*args: Any) -> Any:
    """Refuses the derivative of a product in 8 bits, forward or backward, by JAX's own rules."""
    del args
    raise ValueError(
        "Cannot differentiate the gradient of a product in 8 bits, whose operands and cotangents "
        "are rounded: leave the layers of which that is taken out of the rules with matmul=fp8, or "
        "mark them with jmpx.full_precision."
    )


def _over_shards(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the largest scale of all shards of an array that `jax.shard_map` splits."""
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    axes = varying_axes(x) if tracked_axes() else mapped
    names = tuple(name for name in mapped if name in axes)
    return lax.pmax(scale, names) if names else scale


def _scale(magnitude: jax.Array, to: np.dtype) -> jax.Array:
    """Returns the least powers of two that bring magnitudes into the range of a format.

    That of a magnitude which is not finite is infinite: numbers become 0 and, multiplied by it,
    NaN, so that the step is skipped. NaN itself could get lost: XLA's maxima drop it on CPUs.
    """
    bits = lax.bitcast_convert_type(magnitude.astype(FLOAT32), np.int32)
    # One more if the mantissa is larger than 1.75, that of the largest number.
    exponent = ((bits + 0x1FFFFF) >> 23) - _LARGEST[to]
    power = lax.bitcast_convert_type(jnp.clip(exponent, 1, 253) << 23, FLOAT32)
    return jnp.where(bits < 0x7F800000, power, jnp.float32(np.inf))


def _cast(config: _Config, x: jax.Array, scale: jax.Array, to: np.dtype) -> jax.Array:
    """Divides by a scale, rounds to a format, and widens to the carrier."""
    divided = x.astype(FLOAT32) / scale
    if not config.is_run:
        # GPUs divide float32 with an error of two units; exact quotients have 11 bits at most. To
        # multiply by an inverse, they would compute that in a kernel of its own.
        divided = lax.reduce_precision(divided, exponent_bits=8, mantissa_bits=15)
        divided = rounded_to(divided, to) if config.emulate else divided
    return divided.astype(to).astype(config.carrier)


def _spread(scale: jax.Array, count: int, batch: Axes) -> jax.Array:
    """Returns a scale in the shape of an array of `count` axes, whose batched axes it has."""
    shape = [1] * count
    for axis, size in zip(batch, scale.shape, strict=True):
        shape[axis] = size
    return lax.transpose(scale, np.argsort(batch).tolist()).reshape(shape)


def _scaled(config: _Config, result: jax.Array, a: _Rounded, b: _Rounded, batch: Axes) -> jax.Array:
    """Returns a product, multiplied by the scales of its operands unless these have them."""
    if config.blocks or not config.after:
        return result
    with jax.named_scope(SCALED):
        return result.astype(FLOAT32) * _spread(a.scale * b.scale, result.ndim, batch)
