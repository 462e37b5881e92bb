"""Nodes of a model: their kinds (a called module, a container, a bound method), and maps."""

import functools
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax

from jmpx._adapters.boundaries import public_methods
from jmpx._base.trees import PyTree

T = TypeVar("T")

_JITTED: type = type(eqx.filter_jit(lambda: None))  # this class is not public

# A view is made in each trace, and these checks are slow: they run Python code of Equinox.
_is_subclass = functools.lru_cache(maxsize=4096)(issubclass)


def map_children(node: T, path: str, func: Callable[[PyTree, str], PyTree]) -> T:
    """Maps the children of a node; `func` gets each with its path.

    A node whose children stay the same objects stays the same object: NNX needs that.
    """
    children, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    prefix = f"{path}/" if path else ""
    names = [prefix + jax.tree_util.keystr(key, simple=True) for key, _ in children]
    mapped = [func(child, name) for name, (_, child) in zip(names, children, strict=True)]
    changed = any(new is not old for new, (_, old) in zip(mapped, children, strict=True))
    return treedef.unflatten(mapped) if changed else node


def map_nodes(
    func: Callable[[PyTree], PyTree], tree: PyTree, is_node: Callable[[object], bool]
) -> PyTree:
    """Maps nodes of a tree. A tree without such nodes stays the same object."""
    if is_node(tree):
        return func(tree)
    if keeps_dtype(tree) or jax.tree_util.all_leaves([tree]):
        return tree
    if isinstance(tree, _JITTED):  # it hides the module as arrays and a tree definition
        wrapped = tree.__wrapped__
        mapped = map_nodes(func, wrapped, is_node)
        return tree if mapped is wrapped else eqx.filter_jit(mapped)
    owner, name = _method(tree)
    if name is not None:  # a bound method, whose function is of the class
        mapped = map_nodes(func, owner, is_node)
        return tree if mapped is owner else getattr(mapped, name)
    return map_children(tree, "", lambda child, _: map_nodes(func, child, is_node))


def _method(node: PyTree) -> tuple[PyTree, str | None]:
    """Returns the module of a bound method and the public name of the method, None without one."""
    owner, func = getattr(node, "__self__", None), getattr(node, "__func__", None)
    if isinstance(node, eqx.Partial) and len(node.args) == 1 and not node.keywords:
        owner, func = node.args[0], node.func  # a bound method of `equinox.filter_jit`
    names = public_methods(type(owner), eqx.Module) if is_module(owner) else ()
    for name in names:
        method = getattr(owner, name)
        if any(getattr(method, place, None) is func for place in ("__func__", "func")):
            return owner, name
    return None, None


def holds(tree: PyTree, test: Callable[[object], bool]) -> bool:
    """Whether a pytree has a node of a kind."""
    return any(map(test, jax.tree.leaves(tree, is_leaf=test)))


def is_module(node: object) -> bool:
    """Whether a node is a module."""
    return _is_subclass(type(node), eqx.Module)


def keeps_dtype(node: object) -> bool:
    """Whether a node is state, which is never cast."""
    return _is_subclass(type(node), eqx.nn.State | eqx.nn.StateIndex)


def is_internal(cls: type) -> bool:
    """Whether a class is one of Equinox itself, such as a wrapper, but no layer."""
    package, _, file = cls.__module__.partition(".")
    return package == "equinox" and not file.startswith("nn")


@functools.lru_cache(maxsize=4096)
def is_called(cls: type) -> bool:
    """Whether modules of a class have boundaries; those in a `Shared` are called outside of it."""
    return any(public_methods(cls, eqx.Module)) and not issubclass(cls, eqx.nn.Shared)


def is_model(node: object) -> bool:
    """Whether a node is a module, and no wrapper such as `equinox.filter_vmap` makes."""
    return is_module(node) and not is_internal(type(node))


def is_data(node: object) -> bool:
    """Whether a module is a mere container of arrays, such as a batch."""
    return not holds(node, lambda child: is_module(child) and is_called(type(child)))


def fields_of(module: eqx.Module) -> dict[str, PyTree]:
    """Returns the fields of a module, which may be written."""
    return object.__getattribute__(module, "__dict__")


def as_instance(module: eqx.Module, cls: type[T]) -> T:
    """Returns a module with the same fields as an instance of another class, without `__init__`."""
    other = object.__new__(cls)
    object.__getattribute__(other, "__dict__").update(fields_of(module))
    return other
