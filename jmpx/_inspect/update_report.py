"""Which updates round to nothing in the dtype of the parameters."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.trees import PyTree, at_least_float32, is_array, is_floating, serialized, spell
from jmpx._inspect.reports import Report

_NAMED_LEAVES = 5  # in a printed report
_WORTH_A_REMEDY = 0.01  # the least share of lost changes
_INF = 0x7F800000  # the bits of float32's infinity


@serialized
class LostUpdates(NamedTuple):
    """How many entries of a parameter change, and how many of these changes round to nothing.

    A field is a float32 array, exact up to 2**24. Its shape is (), unless reports were stacked.

    Attributes:
        entries: how many changes are not 0.
        stored: how many of them round to nothing in the dtype in which the parameter is stored.
        bfloat16: how many would round to nothing if it were stored in bfloat16.
        float16: how many would round to nothing if it were stored in float16.
    """

    __module__ = "jmpx.inspect"

    entries: jax.Array
    stored: jax.Array
    bfloat16: jax.Array
    float16: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdateReport(Report):
    """The counts of `update_report`: a pytree, which prints itself outside of `jax.jit`.

    Reports can be added, or stacked as by `jax.lax.scan`: text and HTML then show the sum.

    Attributes:
        updates: the counts of updates by the path of the parameter, such as `"['layer']['w']"`.
        dtypes: the path and the name of the dtype of each parameter.
    """

    __module__ = "jmpx.inspect"

    updates: dict[str, LostUpdates]
    dtypes: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts as Python's numbers, or lists of them if reports were stacked."""
        return {**super().to_dict(), "dtypes": dict(self.dtypes)}

    def _blocks(self) -> Iterator[str]:
        """Yields the shares of all parameters and of the worst ones, and a remedy."""
        counts, dtypes = jax.device_get(self.updates), dict(self.dtypes)
        shares = {name: _shares([lost]) for name, lost in counts.items()}
        worst = sorted(shares, key=lambda name: shares[name], reverse=True)[:_NAMED_LEAVES]
        rows = [(_shares(counts.values()), f"all of {len(counts)}")]
        rows += [(shares[name], f"{name or 'params'}, {dtypes[name]}") for name in worst]
        lines = ["Updates that round to nothing, in % of those that are not 0:"]
        lines.append(" as stored   bfloat16    float16")
        for row, name in rows:
            lines.append("".join(f"{100 * each:10.1f} " for each in row) + f" {name}")
        lines.append(_remedy({dtypes[n] for n in shares if shares[n][0] >= _WORTH_A_REMEDY}))
        yield "\n".join(lines)


def _as_tuples(value: PyTree) -> PyTree:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


serialized(UpdateReport, read=_as_tuples)


def update_report(params: PyTree, updates: PyTree) -> UpdateReport:
    """Counts the updates that round to nothing in the parameters' dtype.

    Near 1, neighbors in bfloat16 are 0.4 to 0.8 % apart, and adding less than half of that changes
    nothing. It may be called under `jax.jit` and `jax.lax.scan`; under `jax.shard_map` each device
    counts what it has, and `jax.lax.psum(report, axis)` adds the reports up.

    Args:
        params: the parameters before the step, in the dtype in which they are stored.
        updates: the updates that `optimizer.update` returns: the same tree. Leaves without an array
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
    """Whether each `param + change` rounds to `param`, if the change is not 0."""
    if param.dtype.itemsize > 4:  # float64, the widest that XLA has
        return param + change.astype(param.dtype) == param
    format_ = jnp.finfo(param.dtype)
    code = jax.lax.bitcast_convert_type(param, jnp.dtype(f"uint{format_.bits}")).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(change, jnp.uint32)
    magnitude, size = code & (2 ** (format_.bits - 1) - 1), bits & 0x7FFFFFFF
    stored = (magnitude >> format_.nmant).astype(jnp.int32)
    is_power = (stored > 1) & (magnitude & (2**format_.nmant - 1) == 0)
    to_zero = code >> (format_.bits - 1) != bits >> 31
    # A change by more than half of the distance to the neighbor is kept; one by exactly half rounds
    # to `param` if that is even. Below a power of two, neighbors are half as far apart.
    half = jnp.maximum(stored, 1) - 2 + (format_.minexp - format_.nmant)
    half -= (is_power & to_zero).astype(jnp.int32)
    # The bits of 2**half in float32; 0 if it is less than the smallest number.
    normal = (half + 127) << 23
    subnormal = jnp.where(half >= -149, 1 << jnp.clip(half + 149, 0, 22), 0)
    half = jnp.where(half >= -126, normal, subnormal).astype(jnp.uint32)
    largest = np.asarray(format_.max, param.dtype).view(f"uint{format_.bits}").astype(np.uint32)
    is_inf = magnitude > largest[()]  # larger numbers in float16; they stay infinite
    return is_inf | (size < half) | ((size == half) & (code & 1 == 0))


def _sum(flags: jax.Array) -> jax.Array:
    """Returns how many flags are set: rows in int32, which is exact, and all in float32."""
    rows = flags.sum(axis=-1, dtype=jnp.int32) if flags.ndim else flags
    return rows.astype(jnp.float32).sum()


def _shares(counts: Iterable[LostUpdates]) -> tuple[float, ...]:
    """Returns the parts of the changes that are lost as stored, in bfloat16 and in float16."""
    sums = np.sum([[np.float64(field).sum() for field in lost] for lost in counts], axis=0)
    return tuple(float(count) for count in sums[1:] / max(sums[0], 1))


def _remedy(losing: set[str]) -> str:
    """Returns the line that advises parameters of some dtypes, which lose updates."""
    if narrow := sorted(losing - {"float32", "float64"}):
        names = " and ".join(narrow)
        return f"Remedy for {names}: float32 parameters, or jmpx.optim.low_precision_params."
    return "Remedy for float32: a larger learning rate." if losing else "Little is lost as stored."
