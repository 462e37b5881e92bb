"""What jmpx offers for NNX besides `with_policies`: other models while a function runs.

All that a function does to a view, as `sow`, `eval`, running statistics and caches do, is done to
the model afterwards. So the models have to be the function's own, as the copies in a trace are.
"""

import functools
import types
from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

from jmpx._adapters.boundaries import are_same
from jmpx._adapters.nnx import objects
from jmpx._adapters.nnx.views import NnxScope, copied, refuse_setting
from jmpx._adapters.proxies import (
    is_optimizer_state,
    marking_proxy_class,
    plain_class,
    proxy_class,
)
from jmpx._base.casts import cast_like
from jmpx._base.leaves import PyTree, is_floating
from jmpx._base.made_once import made_once
from jmpx._base.nnx_objects import is_object, objects_of, replace_objects
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap

T = TypeVar("T")


class _Views:
    """Replaces the models in pytrees by views of copies; see `Proxies`."""

    def __init__(self, policy_map: PolicyMap) -> None:
        self.policy_map = policy_map
        self.made: dict[type, type] = {}
        self._forget()

    def _forget(self) -> None:
        """Forgets all objects: another trace has others."""
        self._scope: NnxScope | None = None
        # By the identities of the objects: them, and their copies.
        self._copies: dict[int, tuple[PyTree, PyTree]] = {}
        # By the identities of the copies: the objects, and the attributes of the copies at first.
        self._given: dict[int, tuple[PyTree, dict[str, PyTree]]] = {}
        self._made_inside: dict[int, PyTree] = {}

    def replace(self, tree: T) -> T:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=objects.is_closed)
        found = objects.Models()
        for leaf in leaves:
            for value in () if is_optimizer_state(leaf) else objects_of(leaf):
                found.add(value)
        if not found.models:
            return tree
        for index, leaf in enumerate(leaves):
            if not is_optimizer_state(leaf):
                copies = [copied(value, self._copies) for value in objects_of(leaf)]
                leaves[index] = replace_objects(leaf, iter(copies))
        scope = self._scope or NnxScope("jmpx.apply_policy", self.policy_map, hands_back=True)
        for model in found.outermost():
            scope.view(copied(model, self._copies))
        for optimizer in found.optimizers if scope.casts else ():
            refusing = _refusing_class(type(optimizer))
            object.__setattr__(copied(optimizer, self._copies), "__class__", refusing)
        for value, copy in self._copies.values():
            self._given.setdefault(id(copy), (value, dict(vars(copy))))
        self._scope, self.made = scope, self.made | scope.made
        return treedef.unflatten(map(self._rebound, leaves))

    def _rebound(self, leaf: PyTree) -> PyTree:
        """Returns a bound method of a module as that of its view, a partial of it likewise."""
        if isinstance(leaf, functools.partial):
            parts = (leaf.func, leaf.args, leaf.keywords)
            func, args, kwargs = jax.tree.map(self._rebound, parts, is_leaf=objects.is_closed)
            return functools.partial(func, *args, **kwargs)
        if not isinstance(leaf, types.MethodType):
            return leaf
        owner, name = leaf.__self__, leaf.__func__.__name__
        plain = self.made.get(type(owner))
        is_own = plain is not None and getattr(plain, name, None) is leaf.__func__
        return getattr(owner, name) if is_own else leaf

    def restore(self, tree: T) -> T:
        if self._scope is None:
            return tree
        arrays: dict[int, PyTree] = {}
        for value, stored, before in self._scope.casts.values():
            new, old = objects.array_in(value), objects.array_in(stored)
            if is_floating(new) and new.dtype != before[0].dtype:
                objects.set_value(stored, cast_like(new, old))
            arrays.update(zip(map(id, before), jax.tree.leaves(stored), strict=True))
        for value, copy in self._copies.values():
            self._give_back(vars(value), vars(copy), self._given[id(copy)][1])

        def restored(leaf: PyTree) -> PyTree:
            leaf = self._stored(leaf)
            is_variable = isinstance(leaf, nnx.Variable)
            return _settable(leaf, arrays) if is_variable else arrays.get(id(leaf), leaf)

        result = jax.tree.map(restored, tree, is_leaf=is_object)
        self._forget()
        return result

    def _stored(self, value: PyTree, path: str = "") -> PyTree:
        """Returns the object in place of its copy, the stored parameter in place of a cast one.

        An object that the function has made stays, with such values in place of its own.
        """
        if id(value) in self._given:
            return self._given[id(value)][0]
        if self._scope is not None and id(value) in self._scope.casts:
            return self._scope.casts[id(value)].stored
        known = id(value) in self._copies or id(value) in self._made_inside
        if isinstance(value, nnx.Pytree) and not known:
            self._refuse_copy(type(value))
            self._made_inside[id(value)] = value
            for name, attribute in list(vars(value).items()):
                vars(value)[name] = objects.map_objects(attribute, (), self._stored)
        return value

    def _give_back(
        self, own: dict[str, PyTree], new: dict[str, PyTree], before: dict[str, PyTree]
    ) -> None:
        """Gives an object the attributes that the function has set in its copy, or deleted."""
        for name in [name for name in own if name not in new]:
            del own[name]
        for name, value in new.items():
            is_kept = name in before and value is before[name]
            if not is_kept or isinstance(value, list | dict):  # which may have changed
                stored = objects.map_objects(value, (), self._stored)
                if not is_kept or not are_same(own[name], stored, is_object):
                    own[name] = stored

    def _refuse_copy(self, cls: type) -> None:
        """Raises if an object is a copy that the function made of a view."""
        if cls in self.made:
            raise ValueError(
                f"Expected the function to return modules that it was given, got a copy of a "
                f"{self.made[cls].__name__}, whose parameters are cast by policy map "
                f"{str(self.policy_map)!r}: return the module itself, and copy it outside."
            )


@made_once
def _refusing_class(cls: type) -> type:
    """Returns the proxy class of an optimizer that refuses to update parameters which are cast."""

    def update(*args: PyTree, **kwargs: PyTree) -> None:
        raise ValueError(
            "Cannot update an nnx.Optimizer inside of a function under a policy map, where the "
            "parameters are cast and updates of them would be rounded: return the gradients, and "
            "call update after the function."
        )

    return proxy_class(cls, {"update": update})


def _settable(variable: nnx.Variable, arrays: dict[int, PyTree]) -> nnx.Variable:
    """Returns a variable of a result without the hook of cast parameters, and their arrays."""
    metadata = variable.get_metadata()
    if metadata.get("on_set_value") is not refuse_setting:
        return variable
    new = jax.tree.map(lambda leaf: arrays.get(id(leaf), leaf), variable)
    del metadata["on_set_value"]
    new.set_metadata(metadata)
    return new


class _Marker:
    """Has the modules in pytrees mark their calls, for `jmpx.autocast`; see `Proxies`.

    Paths begin at the outermost modules.
    """

    def __init__(self, matches: Callable[[type, str], bool]) -> None:
        self.matches = matches
        self.made: dict[type, type] = {}
        self.given: list[PyTree] = []

    def replace(self, tree: T) -> T:
        roots = _objects(tree)
        self.given += roots
        for module, path in objects.modules_in(roots):
            cls = type(module)
            called = Module(plain_class(cls), path)
            if cls not in self.made and self.matches(*called):
                marked = marking_proxy_class(cls, (called,), nnx.Module)
                self.made[marked] = cls
                object.__setattr__(module, "__class__", marked)
        return tree

    def restore(self, tree: T) -> T:
        for module, _ in objects.modules_in([*self.given, *_objects(tree)]):
            if type(module) in self.made:
                object.__setattr__(module, "__class__", self.made[type(module)])
        return tree


def _objects(tree: PyTree) -> list[PyTree]:
    return list(filter(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


class _Adapter(Adapter):
    def marker(self, matches: Callable[[type, str], bool]) -> _Marker:
        return _Marker(matches)

    def views(self, policy_map: PolicyMap) -> _Views:
        return _Views(policy_map)


adapter: Adapter = _Adapter()
