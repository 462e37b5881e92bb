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

from jmpx._autocast.rules import Operation, is_precise
from jmpx._autocast.value import BFLOAT16, FLOAT32, LOW, Used, Value
from jmpx._base.axes import tracked_axes, varying_axes
from jmpx._base.contexts import INSPECTED, fact
from jmpx._base.dtypes import eight_bits
from jmpx._base.formats import E4M3, E5M2, default_device, formats_of, lacking, rounded_to
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import is_backward, is_outer
from jmpx._policies.maps import PolicyMap

# Products of fewer multiplications take less time than the scales of their operands.
FEWEST = 2**18
_BLOCK = 32
# The exponents of the largest numbers, 1.75 * 2**8 and 1.75 * 2**15.
_LARGEST = {E4M3: 8, E5M2: 15}

Axes = tuple[int, ...]


# Which products run in 8 bits.


def why_not(operation: Operation) -> str | None:
    """Returns why a product does not run in 8 bits, "" if it does; None if no rule says so."""
    algorithm = operation.interpreter.regions.algorithm(operation.name, operation.region)
    bits = None if algorithm is None else eight_bits(algorithm.name)
    if bits is None or operation.region.is_full:
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
    is_batched = bool(numbers[1][0])
    if is_batched and not bits.attention and not any(value.is_weak for value in values):
        return f"it is of two activations, so write matmul={algorithm.name}+attention if it is meant"
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
        if size % multiple:
            return f"an axis of {size} is no multiple of {multiple}"
    return f"it has fewer than {FEWEST} multiplications" if math.prod(sizes) < FEWEST else ""


def _others(count: int, *given: Axes) -> Axes:
    """Returns the axes of an array that are not among the given ones."""
    return tuple(i for i in range(count) if not any(i in axes for axes in given))


def is_chosen(operation: Operation) -> bool:
    """Whether a product runs in 8 bits."""
    return why_not(operation) == ""


def check_units(policy_map: PolicyMap, used: Used) -> None:
    """Refuses products that run in 8 bits where the default device has no units for them."""
    for rank, why in used.eight_bits:
        bits = eight_bits(rule.matmul) if (rule := policy_map.rules[rank]) else None
        if not why and bits is not None and not bits.emulate:
            device = default_device()
            if reason := lacking(bits, device.device_kind, formats_of(device)):
                raise ValueError(f"Cannot follow rule {str(rule)!r}: {reason}.")


def product(operation: Operation) -> list[Value]:
    """Runs a product in 8 bits, which hands out the compute dtype."""
    regions, params = operation.interpreter.regions, operation.equation.params
    algorithm = regions.algorithm(operation.name, operation.region)
    bits, dtype = eight_bits(algorithm and algorithm.name), operation.region.dtype
    assert bits is not None  # see `why_not`
    numbers = params["dimension_numbers"]
    # Units take one scale for an array. The others multiply the sums, which keeps the operands.
    after = bool(numbers[1][0]) or core.in_vmap()
    # A tool runs the operations one by one, and rounds by itself.
    rounds = bits.emulate and not fact(INSPECTED)
    config = _Config(numbers, dtype, bits.blocks, rounds, after, params.get("out_sharding"))
    operands = [value.to(dtype) for value in operation.values]
    if bits.blocks and not bits.emulate:
        configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
        result = jax.nn.scaled_dot_general(*operands, numbers, dtype, configs)
    else:
        result = _product(config, *operands)
    return [Value(result, is_weak=False, tangent=operation.is_tangent)]


# A product and its derivatives.


class _Config(NamedTuple):
    """What is known of a product while JAX traces."""

    numbers: Any  # the `dimension_numbers` of `lax.dot_general`
    dtype: np.dtype  # of the operands and the result: 16 bits
    blocks: bool
    rounds: bool  # whether to round before the casts to 8 bits, which compilers may leave out
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
    scale: jax.Array  # float32, with the batched axes: by it the numbers were divided
    left: jax.Array | None  # the scale, if the result is still to be multiplied by it


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(config: _Config, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _forward(config, lhs, rhs)[0]


def _forward(config: _Config, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the product, and what its backward pass keeps: no array in 8 bits."""
    summed, batched = config.numbers
    a = _rounded(config, lhs, E4M3, summed[0], batched[0])
    b = _rounded(config, rhs, E4M3, summed[1], batched[1])
    result = config.multiply(a.numbers, b.numbers)
    result = _scaled(result, (a, b), tuple(range(len(batched[0]))))
    return result.astype(config.dtype), (lhs, rhs, a.scale, b.scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pullback(config: _Config, kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of both operands, which are products in 8 bits, too."""
    (lhs, rhs, *scales), (summed, batched) = kept, config.numbers
    to, batch = E4M3 if config.blocks else E5M2, tuple(range(len(batched[0])))
    free = [_others(x.ndim, *axes) for x, *axes in zip((lhs, rhs), summed, batched, strict=True)]
    in_result = batch[-1] + 1 if batch else 0
    of_lhs = tuple(range(in_result, in_result + len(free[0])))
    of_rhs = _others(cotangent.ndim, batch, of_lhs)

    def pulled_back(i: int, operand: jax.Array, other: jax.Array, axes: Axes) -> jax.Array:
        a = _rounded(config, cotangent, to, axes, batch)
        b = _rounded(config, other, E4M3, free[1 - i], batched[1 - i], scales[1 - i])

        def multiply(x: jax.Array) -> jax.Array:
            return config.multiply(*((x, b.numbers) if i == 0 else (b.numbers, x)))

        # JAX knows the axes of the transposed product, and how a mesh splits it.
        (result,) = jax.linear_transpose(multiply, operand.astype(config.carrier))(a.numbers)
        return _scaled(result, (a, b), batched[i]).astype(operand.dtype)

    return pulled_back(0, lhs, rhs, of_rhs), pulled_back(1, rhs, lhs, of_lhs)


def _wide_pullback(config: _Config, kept: Any, cotangent: jax.Array) -> Any:
    """Returns the cotangents of both operands by products in float32."""

    def wide(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        result = config.multiply(lhs.astype(FLOAT32), rhs.astype(FLOAT32))
        return result.astype(config.dtype)

    return jax.vjp(wide, *kept[:2])[1](cotangent)


def _second(config: _Config, given: Any, cotangents: Any) -> Any:
    """Returns the cotangents of what `_pullback` takes, as if it had multiplied in float32."""
    return jax.vjp(functools.partial(_wide_pullback, config), *given)[1](cotangents)


_product.defvjp(_forward, lambda *args: _pullback(*args))
_pullback.defvjp(lambda config, *given: (_pullback(config, *given), given), _second)


# An array in 8 bits.


def _rounded(
    config: _Config, x: jax.Array, to: np.dtype, summed: Axes, batch: Axes, scale: Any = None
) -> _Rounded:
    """Rounds an operand of a product that sums some axes; the scale may be known."""
    if config.blocks:
        order = (*_others(x.ndim, summed), *summed)
        moved = lax.transpose(x, order)
        blocks = moved.reshape(*moved.shape[: x.ndim - len(summed)], -1, _BLOCK)
        scale = _scale(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), to)
        numbers = _cast(config, blocks, scale, to) * scale.astype(config.carrier)
        numbers = lax.transpose(numbers.reshape(moved.shape), tuple(np.argsort(order).tolist()))
        return _Rounded(numbers, jnp.float32(1), None)
    if scale is None:
        largest = jnp.max(jnp.abs(x), axis=_others(x.ndim, batch), initial=0)
        largest = lax.transpose(largest, [sorted(batch).index(axis) for axis in batch])
        scale = _scale(largest if batch else _over_shards(largest, x), to)
    spread = _spread(scale, x.ndim, batch)
    numbers = _cast(config, x, spread, to)
    if config.after:
        return _Rounded(numbers, scale, scale)
    return _Rounded(numbers * spread.astype(config.carrier), scale, None)


def _over_shards(largest: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the largest magnitude in all shards of an array that `jax.shard_map` splits."""
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    axes = varying_axes(x) if tracked_axes() else mapped
    names = tuple(name for name in mapped if name in axes)
    return lax.pmax(largest, names) if names else largest


def _scale(largest: jax.Array, to: np.dtype) -> jax.Array:
    """Returns the least power of two that brings a magnitude into the range of a format.

    It is 1 for zero, and NaN if the magnitude is not finite, so that the loss scale skips the step.
    """
    bits = lax.bitcast_convert_type(largest.astype(FLOAT32), np.int32)
    # One more if the mantissa is larger than 1.75, that of the largest number.
    exponent = ((bits + 0x1FFFFF) >> 23) - _LARGEST[to]
    power = lax.bitcast_convert_type(jnp.clip(exponent, 1, 253) << 23, FLOAT32)
    power = jnp.where(bits > 0, power, jnp.float32(1))
    return jnp.where(bits < 0x7F800000, power, jnp.float32(np.nan))


def _cast(config: _Config, x: jax.Array, scale: jax.Array, to: np.dtype) -> jax.Array:
    """Divides by a scale, rounds to a format, and widens to the carrier."""
    divided = x.astype(FLOAT32) * (1 / scale)
    if config.rounds:
        divided = rounded_to(divided, to)
    return divided.astype(to).astype(config.carrier)


def _spread(scale: jax.Array, count: int, batch: Axes) -> jax.Array:
    """Returns a scale in the shape of an array of `count` axes, whose batched axes it has."""
    shape = [1] * count
    for axis, size in zip(batch, scale.shape, strict=True):
        shape[axis] = size
    return lax.transpose(scale, np.argsort(batch).tolist()).reshape(shape)


def _scaled(result: jax.Array, operands: Sequence[_Rounded], batch: Axes) -> jax.Array:
    """Returns a result, multiplied by what is left of the scales of its operands."""
    for each in operands:  # one after the other, as the product of both may leave the range
        if each.left is not None:
            result = result * _spread(each.left, result.ndim, batch).astype(result.dtype)
    return result
