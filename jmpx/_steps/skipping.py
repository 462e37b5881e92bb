"""A step that is taken or skipped by a flag."""

from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp

from jmpx._base.axes import varying_axes
from jmpx._base.leaves import PyTree, is_array, is_traceable
from jmpx._base.trees import Flag, as_flag, select_tree

T = TypeVar("T")
SkipBy: TypeAlias = Literal["cond", "where"]


def take_or_keep(
    grads_finite: Flag, take: Callable[[], T], keep: Callable[[PyTree], T], skip_by: SkipBy | None
) -> T:
    """Returns `take()` if the gradients are finite, and `keep(take())` if the step is skipped.

    `keep` reads only shapes and dtypes of its argument. A `lax.cond` needs branches of one type:
    "where" is taken if their types differ, because the state holds a Python number or because the
    flag varies over the devices of a `jax.shard_map`. Some optimizers widen their state at the
    first step: a skipped step widens it, too.

    Where `skip_by` is None, both ways are in the jaxpr, with one trace of `take`, and JAX lowers
    the one of the platform that the program is compiled for.
    """
    if grads_finite is True:
        return take()
    finite = as_flag(grads_finite, "grads_finite")
    kept = lambda new: jax.tree.map(_in_dtype_of, keep(new), new)  # noqa: E731

    def by_where(take: Callable[[], T]) -> T:
        new = take()
        return select_tree(finite, new, kept(new))

    if skip_by == "where" or not isinstance(finite, jax.core.Tracer):
        return by_where(take)
    once = _traced_once(take)
    shapes = _common_shapes(finite, once, kept)
    if shapes is None:
        return by_where(take)
    by_cond = lambda: jax.lax.cond(finite, once, lambda: kept(shapes))  # noqa: E731
    if skip_by == "cond":
        return by_cond()
    return jax.lax.platform_dependent(tpu=lambda: by_where(once), default=by_cond)


def _traced_once(take: Callable[[], T]) -> jax.stages.Wrapped:
    """Returns a function that JAX traces once for all its calls; it returns None if not arrays."""

    @jax.jit
    def optimizer_update() -> T | None:
        new = take()
        return new if all(map(is_traceable, jax.tree.leaves(new))) else None

    return optimizer_update


def _in_dtype_of(old: PyTree, new: PyTree) -> PyTree:
    has_dtype = is_array(new) or isinstance(new, jax.ShapeDtypeStruct)
    differ = is_array(old) and has_dtype and old.dtype != new.dtype
    return jnp.asarray(old, new.dtype) if differ else old


def _common_shapes(
    finite: jax.Array, take: jax.stages.Wrapped, keep: Callable[[PyTree], PyTree]
) -> PyTree | None:
    """Returns the shapes of `take()` if it and `keep` return arrays of the same types, or None."""
    traced = take.trace()
    shapes, types = traced.out_info, list(map(_strong, traced.jaxpr.out_avals))
    if shapes is None or not all(varying_axes(finite) <= varying_axes(each) for each in types):
        return None
    found: list[bool] = []

    def compare() -> None:  # in a trace of its own, because `keep` may make arrays
        olds = jax.tree.leaves(keep(shapes))
        found.append(all(map(is_array, olds)) and types == [_strong(jax.typeof(x)) for x in olds])

    jax.eval_shape(compare)
    return shapes if found[0] else None


def _strong(aval: jax.core.ShapedArray) -> jax.core.ShapedArray:
    """Returns JAX's type of an array, with strong types for weak ones, as `lax.cond` makes them."""
    return aval.update(weak_type=False) if aval.weak_type else aval
