"""What a node of a model is: a module that is called, a container, a bound method, an array."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax

from jmpx._adapters.proxies import public_methods
from jmpx._base.leaves import PyTree, is_floating
from jmpx._policies.frameworks import required_package

with required_package("equinox", "Equinox"):
    import equinox as eqx

T = TypeVar("T")


class _Example(eqx.Module):
    def method(self) -> None:
        """Has the class of bound methods."""


# Classes of Equinox that are not public.
_BOUND = type(_Example().method)
_JITTED: type = type(eqx.filter_jit(lambda: None))


def map_children(node: T, path: str, func: Callable[[PyTree, str], PyTree]) -> T:
    """Returns a node with the results of `func` for each child and its path as the children.

    A node whose children stay the same objects stays the same object: NNX needs that.
    """
    children, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    names = [jax.tree_util.keystr(key, simple=True) for key, _ in children]
    mapped = [
        func(child, f"{path}/{name}" if path else name)
        for name, (_, child) in zip(names, children, strict=True)
    ]
    changed = any(new is not old for new, (_, old) in zip(mapped, children, strict=True))
    return treedef.unflatten(mapped) if changed else node


def map_nodes(
    func: Callable[[PyTree], PyTree], tree: PyTree, is_node: Callable[[object], bool]
) -> PyTree:
    """Maps nodes of a tree. A tree without such nodes stays the same object."""
    if is_node(tree):
        return func(tree)
    if keeps_dtype(tree) or is_leaf(tree):
        return tree
    if isinstance(tree, _JITTED):  # it hides the module as arrays and a tree definition
        wrapped = tree.__wrapped__
        mapped = map_nodes(func, wrapped, is_node)
        return tree if mapped is wrapped else eqx.filter_jit(mapped)
    return map_children(tree, "", lambda child, _: map_nodes(func, child, is_node))


def holds(tree: PyTree, test: Callable[[object], bool]) -> bool:
    """Whether a pytree has a node of a kind."""
    return any(map(test, jax.tree.leaves(tree, is_leaf=test)))


def is_leaf(node: PyTree) -> bool:
    """Whether a node is a leaf of pytrees."""
    return jax.tree_util.all_leaves([node])


# A view is made in each trace, and `isinstance`, `issubclass` and `vars` of modules are slow: they
# run Python code of Equinox and of `abc`.


@functools.lru_cache(maxsize=4096)
def _is_module_class(cls: type) -> bool:
    return issubclass(cls, eqx.Module)


@functools.lru_cache(maxsize=4096)
def _is_state_class(cls: type) -> bool:
    return issubclass(cls, eqx.nn.State | eqx.nn.StateIndex)


@functools.lru_cache(maxsize=4096)
def is_called(cls: type) -> bool:
    """Whether modules of a class have boundaries; those in a `Shared` are called outside of it."""
    return any(public_methods(cls, eqx.Module)) and not issubclass(cls, eqx.nn.Shared)


def is_module(node: object) -> bool:
    """Whether a node is a module."""
    return _is_module_class(type(node))


def keeps_dtype(node: object) -> bool:
    """Whether a node is state, which is never cast."""
    return _is_state_class(type(node))


def _is_part(node: object) -> bool:
    """Whether the arrays in a node are not those of the module around it."""
    return is_module(node) or keeps_dtype(node)


def fields_of(module: eqx.Module) -> dict[str, PyTree]:
    """Returns the fields of a module, which may be written."""
    return object.__getattribute__(module, "__dict__")


def as_instance(module: eqx.Module, cls: type[T]) -> T:
    """Returns a module with the same fields as an instance of another class, without `__init__`."""
    other = object.__new__(cls)
    object.__getattribute__(other, "__dict__").update(fields_of(module))
    return other


def may_read(module: eqx.Module) -> bool:
    """Whether a module has leaves of its own, of which its public methods may read floating arrays.

    Or it has None in their place, as in one part of a model after `equinox.partition`. The other
    part gets the same class, so that `equinox.combine` joins the two.
    """
    if _is_internal(module) or not is_called(type(module)):
        return False
    own = jax.tree.leaves(
        module, is_leaf=lambda child: child is None or (child is not module and _is_part(child))
    )
    return not all(map(_is_part, own))


def reads(module: eqx.Module) -> bool:
    """Whether a module has floating arrays of its own."""
    own = jax.tree.leaves(module, is_leaf=lambda child: child is not module and _is_part(child))
    return any(map(is_floating, own))


def is_model(node: object) -> bool:
    """Whether it is a model or a method of one, and no wrapper such as `equinox.filter_vmap`'s."""
    is_wrapper = _is_internal(node) and bound(node) is None
    return isinstance(node, eqx.Module) and not is_wrapper


def is_data(node: object) -> bool:
    """Whether a module is a mere container of arrays, such as a batch."""
    return not is_called(type(node)) and not holds(
        node, lambda child: is_module(child) and is_called(type(child))
    )


def _is_internal(node: object) -> bool:
    """Whether its class is one of Equinox itself, but no layer."""
    package, _, file = type(node).__module__.partition(".")
    return package == "equinox" and not file.startswith("nn")


def bound(node: PyTree) -> tuple[PyTree, Callable[..., PyTree]] | None:
    """Returns the module of a bound method, and the function; None for any other node."""
    if isinstance(node, _BOUND):
        return node.__self__, node.__func__
    if isinstance(node, eqx.Partial) and len(node.args) == 1 and not node.keywords:
        owner, func = node.args[0], node.func  # as that of a method under `equinox.filter_jit`
        if isinstance(owner, eqx.Module) and _name_of_method(owner, func) is not None:
            return owner, func
    return None


def _name_of_method(owner: PyTree, func: Callable[..., PyTree]) -> str | None:
    """Returns the name under which a module has a function as a method."""
    for name in (getattr(func, "__name__", ""), *public_methods(type(owner), eqx.Module)):
        method = getattr(owner, name, None)
        if any(getattr(method, place, None) is func for place in ("__func__", "func")):
            return name
    return None


def bind_to(module: PyTree, method: PyTree) -> PyTree:
    """Returns a bound method of another module; its function is that of the class."""
    owner, func = bound(method) or (None, None)
    name = None if func is None else _name_of_method(owner, func)
    if name is None:
        return map_children(method, "", lambda child, _: module if child is owner else child)
    return getattr(module, name)
