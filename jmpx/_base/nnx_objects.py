"""Objects of Flax's NNX: where pytrees and functions hold them, and which of their state is cast.

An object is an `nnx.Module`, `nnx.Rngs`, `nnx.Optimizer`, `nnx.Metric` or `nnx.Variable`. Flax is
never imported: a program that holds an object has imported it, so that `sys.modules` knows it.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax

from jmpx._base.leaves import PyTree

Object: TypeAlias = Any  # Flax may be missing, and its types with it.


def nnx() -> Object:
    """Returns the module `flax.nnx`, or None if the program has not imported it."""
    return sys.modules.get("flax.nnx")


def module_base() -> type:
    """Returns `nnx.Module`, for a program that has imported it."""
    return nnx().Module


def is_object(value: object) -> bool:
    """Whether `value` is an object of NNX, which has an identity and may change."""
    return nnx() is not None and isinstance(value, (nnx().Pytree, nnx().Variable))


def is_whole(value: object) -> bool:
    """Whether `value` is an object or an `nnx.State`, in which no other objects are searched."""
    return is_object(value) or (nnx() is not None and isinstance(value, nnx().State))


def holds_objects(tree: PyTree) -> bool:
    """Whether a pytree holds an object, other than in an `nnx.State`."""
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_whole)))


def _opened(leaf: PyTree) -> tuple[list[PyTree], Callable[[list[PyTree]], PyTree]]:
    """Returns what a bound method, a partial or another callable holds, and how to put it back."""
    if isinstance(leaf, types.MethodType):
        return [leaf.__self__], lambda parts: types.MethodType(leaf.__func__, *parts)
    if isinstance(leaf, functools.partial):
        tree = leaf.func, leaf.args, leaf.keywords
        parts, treedef = jax.tree.flatten(tree, is_leaf=is_whole)

        def rebuild(parts: list[PyTree]) -> PyTree:
            func, args, kwargs = treedef.unflatten(parts)
            return functools.partial(func, *args, **kwargs)

        return parts, rebuild
    if callable(leaf) and not jax.tree_util.all_leaves([leaf], is_leaf=is_whole):
        parts, treedef = jax.tree.flatten(leaf, is_leaf=is_whole)
        return parts, treedef.unflatten
    return [], lambda _: leaf


def objects_of(leaf: PyTree) -> Iterator[Object]:
    """Yields `leaf` if it is an object, and those that it is a bound method or a partial of."""
    if is_object(leaf):
        yield leaf
    else:
        for part in _opened(leaf)[0]:
            yield from objects_of(part)


def has_objects(leaf: PyTree) -> bool:
    """Whether `objects_of` yields any object."""
    return next(objects_of(leaf), None) is not None


def replace_objects(leaf: PyTree, copies: Iterator[Object]) -> PyTree:
    """Returns `leaf` with copies in place of its objects, in the order of `objects_of`."""
    if is_object(leaf):
        return next(copies)
    if not has_objects(leaf):
        return leaf
    parts, rebuild = _opened(leaf)
    return rebuild([replace_objects(part, copies) for part in parts])


def skip_kept(cast: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """Makes a cast leave variables of NNX as they are, except for each `nnx.Param`.

    They are state: running statistics, caches, counters. A rounded average would lose digits at
    every step. Layers cast what they read of it to 16 bits themselves.
    """

    def spared(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_kept)
        if not any(map(is_kept, leaves)):
            return cast(tree)
        hollow = treedef.unflatten([None if is_kept(leaf) else leaf for leaf in leaves])
        pairs = zip(leaves, treedef.flatten_up_to(cast(hollow)), strict=True)
        # Copies may change in a trace in which the caller's own variables may not.
        copied = functools.partial(jax.tree.map, lambda leaf: leaf)
        return treedef.unflatten([copied(leaf) if is_kept(leaf) else new for leaf, new in pairs])

    return spared


def is_kept(value: object) -> bool:
    """Whether `value` is a variable other than an `nnx.Param`: state, which is never cast."""
    is_variable = nnx() is not None and isinstance(value, nnx().Variable)
    return is_variable and not isinstance(value, nnx().Param)
