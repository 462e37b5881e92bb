"""A step that is taken or skipped by a flag."""

from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jmpx._base.axes import varying_axes
from jmpx._base.leaves import PyTree, is_array, is_traceable
from jmpx._base.trees import Flag, as_flag, select_tree

T = TypeVar("T")
SkipBy: TypeAlias = Literal["cond", "where"]


class _TypesDiffer(Exception):
    """A `lax.cond` cannot take or skip this step: its branches would have different types."""


def take_or_keep(
    grads_finite: Flag, take: Callable[[], T], keep: Callable[[PyTree], T], skip_by: SkipBy | None
) -> T:
    """Returns `take()` if the gradients are finite, and `keep(take())` if the step is skipped.

    `keep` reads only shapes and dtypes of its argument. A `lax.cond` needs branches of one type:
    "where" is taken if their types differ, because the state holds a Python number or because the
    flag varies over the devices of a `jax.shard_map`. Some optimizers widen their state at the
    first step: a skipped step widens it, too.

    Where `skip_by` is None, a `lax.cond` selects inside of the branch that takes the step, and the
    platform that the program is compiled for makes one of the two flags a constant: that of the
    selection on a CPU, and that of the `lax.cond` on any other, whose compilers then remove it.
    """
    if grads_finite is True:
        return take()
    finite = as_flag(grads_finite, "grads_finite")

    def by_where(flag: jax.Array = finite) -> T:
        new = take()
        return select_tree(flag, new, _kept(keep, new))

    if skip_by == "where" or not isinstance(finite, jax.core.Tracer):
        return by_where()
    try:
        if skip_by == "cond":
            return _by_cond(finite, take, keep)
        enters = lax.platform_dependent(finite, cpu=_as_it_is, default=_always)
        return _by_cond(
            enters,
            lambda: by_where(lax.platform_dependent(finite, cpu=_always, default=_as_it_is)),
            keep,
        )
    except _TypesDiffer:
        return by_where()


def _as_it_is(flag: jax.Array) -> jax.Array:
    return flag


def _always(flag: jax.Array) -> jax.Array:
    """Returns True, of the type that the flag has in a `jax.shard_map`; compilers fold it."""
    return flag | True


def _by_cond(finite: jax.Array, take: Callable[[], T], keep: Callable[[PyTree], T]) -> T:
    """Takes or skips a step by a `lax.cond`, whose branches compare their types as JAX traces them.

    A trace of the step before, for its types alone, would take as long as the step itself.
    """
    news: list[tuple[PyTree, list[jax.core.ShapedArray | None]]] = []

    def taken() -> T:
        new = take()
        if not all(map(is_traceable, jax.tree.leaves(new))):
            raise _TypesDiffer
        types = list(map(_type_of, jax.tree.leaves(new)))
        axes = varying_axes(finite)
        if axes and not all(axes <= varying_axes(each) for each in types):
            raise _TypesDiffer
        news.append((jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), new), types))
        return new

    def skipped() -> T:
        if not news:  # JAX traces the branch of True first; otherwise the types are not known
            raise _TypesDiffer
        old = _kept(keep, news[0][0])
        if list(map(_type_of, jax.tree.leaves(old))) != news[0][1]:
            raise _TypesDiffer
        return old

    return lax.cond(finite, taken, skipped)


def _kept(keep: Callable[[PyTree], T], new: PyTree) -> T:
    """Returns what a skipped step keeps, in the dtypes of the new arrays."""
    return jax.tree.map(_in_dtype_of, keep(new), new)


def _in_dtype_of(old: PyTree, new: PyTree) -> PyTree:
    has_dtype = is_array(new) or isinstance(new, jax.ShapeDtypeStruct)
    differ = is_array(old) and has_dtype and old.dtype != new.dtype
    return jnp.asarray(old, new.dtype) if differ else old


def _type_of(leaf: PyTree) -> jax.core.ShapedArray | None:
    """Returns JAX's type of an array, with strong types for weak ones, as `lax.cond` makes them."""
    aval = jax.typeof(leaf) if is_array(leaf) else None
    return aval.update(weak_type=False) if aval is not None and aval.weak_type else aval
