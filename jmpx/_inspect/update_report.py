"""Which updates round to nothing in the dtype of the parameters."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.trees import PyTree, at_least_float32, is_array, is_floating, serialized, spell

_NAMED_LEAVES = 5  # in a printed report
_WORTH_A_REMEDY = 0.01  # of the entries
_INF = 0x7F800000  # the bits of float32's infinity


@serialized
class LostUpdates(NamedTuple):
    """How many entries of a parameter change, and how many of these changes round to nothing.

    A field is a float32 array, exact up to 2**24. Its shape is (), unless reports were stacked.

    Attributes:
        entries: how many changes are not 0.
        stored: how many of them round to nothing in the dtype in which the parameter is stored.
        bfloat16: how many would if it were stored in bfloat16.
        float16: how many would if it were stored in float16.
    """

    __module__ = "jmpx.inspect"

    entries: jax.Array
    stored: jax.Array
    bfloat16: jax.Array
    float16: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdateReport:
    """What `update_report` counts: a pytree of counts, and text for `print`.

    Of reports that were stacked, as `jax.lax.scan` does, or added, `print` tells the sum.

    Attributes:
        updates: the counts of updates by the path of the parameter, such as `"['layer']['w']"`.
        dtypes: the path and the name of the dtype of each parameter.
    """

    __module__ = "jmpx.inspect"

    updates: dict[str, LostUpdates]
    dtypes: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})

    def __str__(self) -> str:
        """Returns the shares of all parameters and of the worst ones, and a remedy."""
        counts, dtypes = jax.device_get(self.updates), dict(self.dtypes)
        shares = {name: _shares([lost]) for name, lost in counts.items()}
        worst = sorted(shares, key=lambda name: shares[name], reverse=True)[:_NAMED_LEAVES]
        rows = [(_shares(counts.values()), f"all of {len(counts)}")]
        rows += [(shares[name], f"{name or 'params'}, {dtypes[name]}") for name in worst]
        return "\n".join(
            [
                "Updates that round to nothing, in % of those that are not 0:",
                " as stored   bfloat16    float16",
                *(
                    "".join(f"{100 * each:10.1f} " for each in row) + f" {name}"
                    for row, name in rows
                ),
                _remedy({dtypes[name] for name in shares if shares[name][0] >= _WORTH_A_REMEDY}),
            ]
        )


def _as_configuration(value: list[list[list[str]]]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    return tuple(tuple(map(tuple, dtypes)) for dtypes in value)


serialized(UpdateReport, read=_as_configuration)


def update_report(params: PyTree, updates: PyTree) -> UpdateReport:
    """Counts the updates that round to nothing in the parameters' dtype.

    Near 1, neighbors in bfloat16 are 0.4 to 0.8 % apart, and adding less than half of that changes
    nothing. It may be called under `jax.jit` and `jax.lax.scan`; under `jax.shard_map` each device
    counts what it has, and `jax.lax.psum(report, axis)` adds the reports up.

    Args:
        params: the parameters before the step, in the dtype in which they are stored.
        updates: what `optimizer.update` returns for them: the same tree. Leaves without an array
            here, such as None, and parameters that are not floating are left out.

    Returns:
        The counts, by the path of the parameter; print them outside of `jax.jit`. Entries that are
        not finite, and changes of 0, are not counted.

    Raises:
        ValueError: if the two trees do not fit, or have no floating leaf in common.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> params = {"norm": jnp.ones(8, jnp.bfloat16), "w": jnp.full((4, 4), 0.01)}
        >>> updates = jax.tree.map(lambda p: jnp.full(p.shape, -1e-3), params)
        >>> print(jax.jit(jmpx.inspect.update_report)(params, updates))
        Updates that round to nothing, in % of those that are not 0:
         as stored   bfloat16    float16
              33.3       33.3        0.0  all of 2
             100.0      100.0        0.0  ['norm'], bfloat16
               0.0        0.0        0.0  ['w'], float32
        Remedy for bfloat16: float32 parameters, or jmpx.optim.low_precision_params.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    found: dict[str, LostUpdates] = {}
    dtypes: list[tuple[str, str]] = []
    for (path, leaf), change in zip(leaves, structure.flatten_up_to(updates), strict=True):
        if not (is_floating(leaf) and is_array(leaf) and is_floating(change)):
            continue
        name = jax.tree_util.keystr(path)
        if leaf.shape != change.shape:
            raise ValueError(
                f"Expected an update of the shape of {spell(leaf)} at params{name}, got "
                f"{spell(change)}: pass what the optimizer returns for these parameters."
            )
        leaf = jnp.asarray(leaf)
        found[name] = _lost(leaf, change)
        dtypes.append((name, leaf.dtype.name))
    if not found:
        raise ValueError(
            "Expected an update of a floating parameter for jmpx.inspect.update_report, got none: "
            "pass the parameters that the optimizer updates, such as nnx.state(model, nnx.Param)."
        )
    return UpdateReport(found, tuple(dtypes))


@jax.jit
def _lost(param: jax.Array, change: jax.Array) -> LostUpdates:
    change = change.astype(jnp.float32)
    size = jax.lax.bitcast_convert_type(change, jnp.uint32) & 0x7FFFFFFF
    changes = (size > 0) & (size < _INF) & jnp.isfinite(at_least_float32(param))
    formats = (param.dtype, jnp.bfloat16, jnp.float16)
    lost = [changes & _rounds_to_nothing(param.astype(each), change) for each in formats]
    return LostUpdates(*map(_sum, (changes, *lost)))


def _rounds_to_nothing(param: jax.Array, change: jax.Array) -> jax.Array:
    """Whether each of `param + change`, rounded to the nearest, is `param`: for changes but 0."""
    if param.dtype.itemsize > 4:  # float64, the widest that XLA has
        return param + change.astype(param.dtype) == param
    format_ = jnp.finfo(param.dtype)
    code = jax.lax.bitcast_convert_type(param, jnp.dtype(f"uint{format_.bits}")).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(change, jnp.uint32)
    magnitude, size = code & (2 ** (format_.bits - 1) - 1), bits & 0x7FFFFFFF
    stored = (magnitude >> format_.nmant).astype(jnp.int32)
    is_power = (stored > 1) & (magnitude & (2**format_.nmant - 1) == 0)
    to_zero = code >> (format_.bits - 1) != bits >> 31
    # Numbers from half of the distance to the neighbor on do not round to `param`, and half itself
    # does if `param` is even. Below a power of two, neighbors are half as far apart.
    half = jnp.maximum(stored, 1) - 2 + (format_.minexp - format_.nmant)
    half = _power_of_two(half - (is_power & to_zero).astype(jnp.int32))
    largest = np.asarray(format_.max, param.dtype).view(f"uint{format_.bits}").astype(np.uint32)
    is_inf = magnitude > largest[()]  # which float16 makes of larger numbers; it stays
    return is_inf | (size < half) | ((size == half) & (code & 1 == 0))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns the bits of 2**exponent in float32; 0 if it is less than all numbers but 0."""
    normal = (exponent + 127) << 23
    subnormal = jnp.where(exponent >= -149, 1 << jnp.clip(exponent + 149, 0, 22), 0)
    return jnp.where(exponent >= -126, normal, subnormal).astype(jnp.uint32)


def _sum(flags: jax.Array) -> jax.Array:
    """Returns how many flags are set: rows in int32, which is exact, and all in float32."""
    rows = flags.sum(axis=-1, dtype=jnp.int32) if flags.ndim else flags
    return rows.astype(jnp.float32).sum()


def _shares(counts: Iterable[LostUpdates]) -> tuple[float, ...]:
    """Returns the lost parts of the changes: as stored, in bfloat16 and in float16."""
    sums = np.sum([[np.float64(field).sum() for field in lost] for lost in counts], axis=0)
    return tuple(float(count) for count in sums[1:] / max(sums[0], 1))


def _remedy(losing: set[str]) -> str:
    """Returns what helps parameters of some dtypes, which lose updates."""
    if narrow := sorted(losing - {"float32", "float64"}):
        names = " and ".join(narrow)
        return f"Remedy for {names}: float32 parameters, or jmpx.optim.low_precision_params."
    return "Remedy for float32: a larger learning rate." if losing else "Little is lost as stored."
