"""What jmpx offers for Equinox besides `with_policies`: other models while a function runs."""

import functools
import warnings
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import equinox as eqx
import jax
import numpy as np

from jmpx._adapters.boundaries import widest
from jmpx._adapters.equinox import nodes
from jmpx._adapters.equinox.views import EquinoxScope, proxy_mixin
from jmpx._adapters.proxies import is_optimizer_state, marking_proxy_class, plain_class
from jmpx._base.casts import cast_tree
from jmpx._base.dtypes import dtype_name
from jmpx._base.leaves import PyTree, is_floating
from jmpx._base.messages import user_stacklevel
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap

T = TypeVar("T")
_Dtypes: TypeAlias = dict[str, np.dtype]  # of the arrays in a module, by their paths


class _Marker:
    """Has the modules in pytrees mark their calls, for `jmpx.autocast`; see `Proxies`.

    Paths begin at the outermost modules.
    """

    def __init__(self, matches: Callable[[type, str], bool]) -> None:
        self.matches = matches
        self.made: dict[type, type] = {}

    def replace(self, tree: T) -> T:
        return nodes.map_nodes(self._mark_model, tree, nodes.is_model)

    def restore(self, tree: T) -> T:
        return nodes.map_nodes(self._unmark, tree, lambda node: type(node) in self.made)

    def _mark_model(self, node: PyTree) -> PyTree:
        method = nodes.bound(node)
        if method is None:
            return self._mark(node, "", ())
        # It holds the function of its class, not of the proxy class.
        return nodes.bind_to(self._mark(method[0], "", ()), node)

    def _mark(self, node: PyTree, path: str, containers: tuple[Module, ...]) -> PyTree:
        """Marks a node, for containers around it, too, which are never called themselves."""
        if nodes.keeps_dtype(node) or nodes.is_leaf(node):
            return node
        cls = plain_class(type(node))
        is_matched = nodes.is_module(node) and self.matches(cls, path)
        modules = (*containers, Module(cls, path)) if is_matched else containers
        is_marked = nodes.is_module(node) and bool(modules) and nodes.is_called(cls)
        inner = () if is_marked else modules
        built = nodes.map_children(node, path, lambda child, at: self._mark(child, at, inner))
        if not is_marked:
            return built
        marked = marking_proxy_class(type(node), modules, eqx.Module, proxy_mixin(type(node)))
        self.made[marked] = type(node)
        return nodes.as_instance(built, marked)

    def _unmark(self, node: PyTree) -> PyTree:
        plain = nodes.as_instance(node, self.made[type(node)])
        return nodes.map_children(plain, "", lambda child, _: self.restore(child))


class _Views:
    """Replaces the models in pytrees by views under one policy map; see `Proxies`.

    Each outermost module is a model, and paths begin there. Two kinds of modules are not: a train
    state, which holds the state of an optimizer or the like, and in which models are looked for;
    and data, which has no public methods, nor has any module in it.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.made: dict[type, type] = {}
        self._policy_map = policy_map
        self._replaced: dict[int, tuple[PyTree, PyTree]] = {}  # see `EquinoxScope`

    def replace(self, tree: T) -> T:
        return nodes.map_nodes(
            self._view, tree, lambda node: is_optimizer_state(node) or nodes.is_model(node)
        )

    def _view(self, node: PyTree) -> PyTree:
        if is_optimizer_state(node) or nodes.is_data(node):
            return node
        method = nodes.bound(node)
        if method is not None:
            return nodes.bind_to(self.replace(method[0]), node)
        if nodes.holds(node, is_optimizer_state):
            return nodes.map_children(node, "", lambda child, _: self.replace(child))
        scope = EquinoxScope(self._policy_map)
        view = scope.outermost(node)
        self.made |= scope.made
        self._replaced |= scope.replaced
        return view

    def restore(self, tree: T) -> T:
        rounded: dict[str, np.dtype] = {}
        result = self._stored(tree, "", {}, rounded)
        if rounded:
            _warn_of_rounded(rounded)
        return result

    def _stored(
        self, node: PyTree, path: str, dtypes: _Dtypes, rounded: dict[str, np.dtype]
    ) -> PyTree:
        """Returns a node of the result as the model stores it.

        Args:
            node: the node.
            path: its path in the outermost model of a class that is known.
            dtypes: the dtypes in which the arrays of that model are stored.
            rounded: takes the paths of arrays that were rounded, and their dtypes.
        """
        if id(node) in self._replaced:
            return self._replaced[id(node)][1]
        if nodes.keeps_dtype(node):
            return node
        if nodes.is_leaf(node):
            if not is_floating(node) or path not in dtypes:
                return node
            if node.dtype.itemsize < dtypes[path].itemsize:
                rounded[path] = node.dtype
            return cast_tree(node, dtypes[path])
        if not dtypes:
            path, dtypes = "", self._dtypes.get(type(node), {})
        plain = nodes.map_children(
            node, path, lambda child, at: self._stored(child, at, dtypes, rounded)
        )
        method = nodes.bound(node)
        if method is not None and plain is not node:
            return nodes.bind_to(self._stored(method[0], "", {}, rounded), node)
        return _plain(plain, self.made[type(node)]) if type(node) in self.made else plain

    @functools.cached_property
    def _dtypes(self) -> dict[type, _Dtypes]:
        """The dtypes in which modules store their arrays, by the classes of their views."""
        known: dict[type, _Dtypes] = {}
        for view, stored in self._replaced.values():
            dtypes = known.setdefault(type(view), {}) if nodes.is_module(view) else {}
            for key, leaf in jax.tree_util.tree_leaves_with_path(stored):
                if is_floating(leaf):
                    path = jax.tree_util.keystr(key, simple=True, separator="/")
                    dtype: np.dtype = leaf.dtype
                    dtypes[path] = widest([dtype, dtypes.get(path, dtype)])
        return known


def _plain(view: eqx.Module, cls: type) -> eqx.Module:
    """Returns a module in a view as an instance of the class in whose place its own is."""
    module, written = nodes.as_instance(view, cls), vars(type(view))["__jmpx_written__"]
    if written is not None:
        nodes.fields_of(module)["dtype"] = written
    return module


def _warn_of_rounded(rounded: dict[str, np.dtype]) -> None:
    """Warns of arrays of models that a function hands back in fewer bits than they have."""
    path, dtype = next(iter(rounded.items()))
    warnings.warn(
        f"A function under a policy map hands back arrays of its model that are rounded to "
        f"{dtype_name(dtype)} ({len(rounded)}, such as {path!r}): they went through an inner "
        "transformation such as jax.jit, or were computed from rounded ones; return the model "
        f"from outside of that, or write a rule for what changes, such as '*/{path}: full'.",
        stacklevel=user_stacklevel("jax", "equinox"),
    )


class _Adapter(Adapter):
    def marker(self, matches: Callable[[type, str], bool]) -> _Marker:
        return _Marker(matches)

    def views(self, policy_map: PolicyMap) -> _Views:
        return _Views(policy_map)


adapter: Adapter = _Adapter()
