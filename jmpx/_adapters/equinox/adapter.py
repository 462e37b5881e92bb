"""The adapter for Equinox: replaces models by views, or by marked ones, while a function runs."""

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import equinox as eqx
import jax
import numpy as np

from jmpx._adapters.boundaries import (
    is_optimizer_state,
    marking_proxy_class,
    plain_class,
    widest,
)
from jmpx._adapters.equinox import nodes
from jmpx._adapters.equinox.views import EquinoxScope, proxy_mixin
from jmpx._base.dtypes import dtype_name
from jmpx._base.messages import user_stacklevel
from jmpx._base.trees import PyTree, cast_tree, is_floating
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap

T = TypeVar("T")


class _Marker:
    """Has modules in pytrees mark their calls, with paths from the outermost; see `Proxies`."""

    def __init__(self, matches: Callable[[type, str], bool]) -> None:
        self.matches = matches
        self.made: dict[type, type] = {}

    def replace(self, tree: T) -> T:
        return nodes.map_nodes(lambda node: self._mark(node, "", ()), tree, nodes.is_model)

    def _mark(self, node: PyTree, path: str, containers: tuple[Module, ...]) -> PyTree:
        """Marks a node; it also stands for containers around it, which are never called."""
        if nodes.keeps_dtype(node) or jax.tree_util.all_leaves([node]):
            return node
        own = Module(plain_class(type(node)), path)
        is_module = nodes.is_module(node)
        # In a part of a model, as `equinox.partition` makes it, a field of this name may be None.
        is_matched = is_module and (self.matches(*own) or "dtype" in nodes.fields_of(node))
        modules = (*containers, own) if is_matched else containers
        is_marked = is_module and bool(modules) and nodes.is_called(own.cls)
        inner = () if is_marked else modules
        built = nodes.map_children(node, path, lambda child, at: self._mark(child, at, inner))
        if not is_marked:
            return built
        modules = (*containers, own)
        marked = marking_proxy_class(type(node), modules, eqx.Module, proxy_mixin(type(node)))
        self.made[marked] = type(node)
        return nodes.as_instance(built, marked)

    def restore(self, tree: T) -> T:
        return _plain(tree, self.made)


def _plain(tree: T, made: dict[type, type]) -> T:
    """Returns a pytree with the modules of proxy classes as instances of their own classes."""

    def plain(node: PyTree) -> PyTree:
        module = nodes.as_instance(node, made[type(node)])
        written = vars(type(node)).get("__jmpx_written__")
        if written is not None:
            nodes.fields_of(module)["dtype"] = written
        return nodes.map_children(module, "", lambda child, _: _plain(child, made))

    return nodes.map_nodes(plain, tree, lambda node: type(node) in made)


class _Views:
    """Replaces the models in pytrees by views under one policy map; see `Proxies`.

    A train state, a module that holds the state of an optimizer, is no model, but may hold some.
    Data is none either: neither it nor any module in it has public methods.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.scope = EquinoxScope(policy_map)
        self.made = self.scope.made

    def replace(self, tree: T) -> T:
        return nodes.map_nodes(
            self._view, tree, lambda node: is_optimizer_state(node) or nodes.is_model(node)
        )

    def _view(self, node: PyTree) -> PyTree:
        if is_optimizer_state(node) or nodes.is_data(node):
            return node
        if nodes.holds(node, is_optimizer_state):
            return nodes.map_children(node, "", lambda child, _: self.replace(child))
        return self.scope.view(node)

    def restore(self, tree: T) -> T:
        replaced, rounded = self.scope.replaced, dict[str, np.dtype]()

        def stored(node: PyTree) -> PyTree:
            if id(node) in replaced:
                return replaced[id(node)][1]
            dtypes = self._dtypes(type(node))

            def of_leaf(key: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
                path = jax.tree_util.keystr(key, simple=True, separator="/")
                if id(leaf) in replaced or not is_floating(leaf) or path not in dtypes:
                    return replaced.get(id(leaf), (None, leaf))[1]
                if leaf.dtype.itemsize < dtypes[path].itemsize:
                    rounded[path] = leaf.dtype
                return cast_tree(leaf, dtypes[path])

            return jax.tree_util.tree_map_with_path(
                of_leaf, node, is_leaf=lambda part: id(part) in replaced or nodes.keeps_dtype(part)
            )

        def is_ours(node: object) -> bool:
            return id(node) in replaced or type(node) in self.made

        result = _plain(nodes.map_nodes(stored, tree, is_ours), self.made)
        for path, dtype in list(rounded.items())[:1]:
            warnings.warn(
                f"A function under a policy map hands back arrays of its model rounded to "
                f"{dtype_name(dtype)}, such as {path!r}: they went through an inner transformation "
                "such as jax.jit, or were computed from rounded ones; return the model from "
                "outside of that, or give the module that changes a rule.",
                stacklevel=user_stacklevel("jax", "equinox"),
            )
        return result

    def _dtypes(self, cls: type) -> dict[str, np.dtype]:
        """Returns the stored dtypes, by path, of the arrays in models whose views have a class."""
        dtypes: dict[str, np.dtype] = {}
        for _, stored in (pair for pair in self.scope.replaced.values() if type(pair[0]) is cls):
            for key, leaf in jax.tree_util.tree_leaves_with_path(stored):
                if is_floating(leaf):
                    path = jax.tree_util.keystr(key, simple=True, separator="/")
                    dtype: np.dtype = leaf.dtype
                    dtypes[path] = widest([dtype, dtypes.get(path, dtype)])
        return dtypes


class _Adapter(Adapter):
    def marker(self, matches: Callable[[type, str], bool]) -> _Marker:
        return _Marker(matches)

    def views(self, policy_map: PolicyMap, objects: Sequence[PyTree]) -> _Views:
        return _Views(policy_map)


adapter: Adapter = _Adapter()
