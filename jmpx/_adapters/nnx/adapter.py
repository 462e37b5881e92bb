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
from jmpx._adapters.nnx.objects import (
    Models,
    array_in,
    is_closed,
    map_objects,
    modules_in,
    set_value,
)
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
        self._begin()

    def _begin(self) -> None:
        """Forgets all objects: another trace has others."""
        self.scope = NnxScope("jmpx.apply_policy", self.policy_map, hands_back=True)
        # By the identities of the objects: them, and their copies.
        self._copies: dict[int, tuple[PyTree, PyTree]] = {}
        # By the identities of the copies: the objects, and the attributes of the copies at first.
        self._given: dict[int, tuple[PyTree, dict[str, PyTree]]] = {}

    @property
    def made(self) -> dict[type, type]:
        return self.scope.made

    def replace(self, tree: T) -> T:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_closed)
        found = Models()
        for index, leaf in enumerate(leaves):
            if not is_optimizer_state(leaf):
                copies = [copied(value, self._copies) for value in objects_of(leaf)]
                leaves[index] = replace_objects(leaf, iter(copies))
                for copy in copies:
                    found.add(copy)
        for model in found.outermost():
            self.scope.view(model)
        for optimizer in found.optimizers if self.scope.casts else ():
            object.__setattr__(optimizer, "__class__", _refusing_class(type(optimizer)))
        for value, copy in self._copies.values():
            self._given.setdefault(id(copy), (value, dict(vars(copy))))
        return treedef.unflatten(map(self._rebound, leaves))

    def _rebound(self, leaf: PyTree) -> PyTree:
        """Returns a bound method of a module as that of its view, a partial of it likewise."""
        if isinstance(leaf, functools.partial):
            parts = (leaf.func, leaf.args, leaf.keywords)
            func, args, kwargs = jax.tree.map(self._rebound, parts, is_leaf=is_closed)
            return functools.partial(func, *args, **kwargs)
        if not isinstance(leaf, types.MethodType):
            return leaf
        owner, name = leaf.__self__, leaf.__func__.__name__
        plain = self.made.get(type(owner))
        is_own = plain is not None and getattr(plain, name, None) is leaf.__func__
        return getattr(owner, name) if is_own else leaf

    def restore(self, tree: T) -> T:
        arrays: dict[int, PyTree] = {}
        for value, stored, before in self.scope.casts.values():
            new, old = array_in(value), array_in(stored)
            if is_floating(new) and new.dtype != before[0].dtype:
                set_value(stored, cast_like(new, old))
            arrays.update(zip(map(id, before), jax.tree.leaves(stored), strict=True))
        for value, copy in self._copies.values():
            self._give_back(vars(value), vars(copy), self._given[id(copy)][1])

        def restored(leaf: PyTree) -> PyTree:
            own = self._stored(leaf)
            if own is leaf and isinstance(leaf, nnx.Pytree):
                self._refuse_copy(leaf)
            is_variable = isinstance(own, nnx.Variable)
            return _settable(own, arrays) if is_variable else arrays.get(id(own), own)

        result = jax.tree.map(restored, tree, is_leaf=is_object)
        self._begin()
        return result

    def _stored(self, value: PyTree, path: str = "") -> PyTree:
        """Returns the object in place of its copy, the stored parameter in place of a cast one."""
        if id(value) in self._given:
            return self._given[id(value)][0]
        return self.scope.casts[id(value)].stored if id(value) in self.scope.casts else value

    def _give_back(
        self, own: dict[str, PyTree], new: dict[str, PyTree], before: dict[str, PyTree]
    ) -> None:
        """Gives an object the attributes that the function has set in its copy, or deleted."""
        for name in [name for name in own if name not in new]:
            del own[name]
        for name, value in new.items():
            is_kept = name in before and value is before[name]
            if not is_kept or isinstance(value, list | dict):  # which may have changed
                stored = map_objects(value, (), self._stored)
                if not is_kept or not are_same(own[name], stored, is_object):
                    own[name] = stored

    def _refuse_copy(self, value: nnx.Pytree) -> None:
        """Raises if an object that a function returns is a copy that it made of a view."""
        for module, _ in modules_in([value]):
            if type(module) in self.made and id(module) not in self._given:
                raise ValueError(
                    f"Expected the function to return modules that it was given, got a copy of a "
                    f"{self.made[type(module)].__name__}, whose parameters are cast by policy map "
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
        objects = _objects(tree)
        self.given += objects
        for module, path in modules_in(objects):
            cls = type(module)
            called = Module(plain_class(cls), path)
            if cls not in self.made and self.matches(*called):
                marked = marking_proxy_class(cls, (called,), nnx.Module)
                self.made[marked] = cls
                object.__setattr__(module, "__class__", marked)
        return tree

    def restore(self, tree: T) -> T:
        for module, _ in modules_in([*self.given, *_objects(tree)]):
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
