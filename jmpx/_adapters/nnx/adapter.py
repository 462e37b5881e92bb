"""What jmpx offers for NNX besides `with_policies`: models that are changed while a function runs.

All that a function does to a view, as `sow`, `eval`, running statistics and caches do, it does to
the model, which has its classes, `dtype` attributes and parameters back afterwards. So the models
have to be the function's own, as the copies in a trace are.
"""

import functools
import types
from collections.abc import Callable
from typing import NamedTuple, TypeVar

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
from jmpx._adapters.nnx.views import NnxScope
from jmpx._adapters.proxies import (
    is_optimizer_state,
    marking_proxy_class,
    plain_class,
    proxy_class,
)
from jmpx._base.casts import cast_like
from jmpx._base.leaves import PyTree, is_floating
from jmpx._base.made_once import made_once
from jmpx._base.nnx_objects import is_object, objects_of
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap

T = TypeVar("T")


class _Cast(NamedTuple):
    """A parameter in a view.

    Args:
        value: the cast parameter.
        stored: the one of the model.
        arrays: the arrays that `value` had at first.
    """

    value: nnx.Param
    stored: nnx.Param
    arrays: list[PyTree]


class _Changed(NamedTuple):
    """An object that was changed.

    Args:
        value: the object.
        cls: its own class.
        attributes: its own attributes and those that the view has in their place, by their names;
            without parameters.
    """

    value: PyTree
    cls: type
    attributes: dict[str, tuple[PyTree, PyTree]]


class _Views:
    """Turns the modules in pytrees into views, in place; see `Proxies` and `Changes`.

    Attributes:
        changed: the objects of models and the optimizers, by their identities.
        casts: the parameters, by the identities of the cast ones.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.policy_map = policy_map
        self.made: dict[type, type] = {}
        self.scope: NnxScope | None = None
        self.changed: dict[int, _Changed] = {}
        self.casts: dict[int, _Cast] = {}

    def replace(self, tree: T) -> T:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_closed)
        found = Models()
        for leaf in leaves:
            if not is_optimizer_state(leaf):
                for value in objects_of(leaf):
                    found.add(value)
        for model in found.outermost():
            scope = NnxScope("jmpx.apply_policy", self.policy_map, self)
            if self.scope is not None:
                scope.objects, scope.casts = self.scope.objects, self.scope.casts
            self.scope = scope
            scope.view(model)
            scope.pool.warn(stacklevel=2)
        for optimizer in found.optimizers if self.casts else ():
            self.change(optimizer, _refusing_class(type(optimizer)))
        return treedef.unflatten(map(self._rebound, leaves))

    def change(self, value: PyTree, cls: type) -> None:
        self.changed[id(value)] = _Changed(value, type(value), {})
        if cls is not type(value):
            self.made[cls] = type(value)
            object.__setattr__(value, "__class__", cls)

    def set(self, value: PyTree, name: str, old: PyTree, new: PyTree) -> None:
        self.changed[id(value)].attributes[name] = old, new

    def cast(self, stored: nnx.Param, new: nnx.Param) -> nnx.Param:
        if are_same(stored, new):
            return stored
        new.set_metadata({**new.get_metadata(), "on_set_value": _refuse_setting})
        self.casts[id(new)] = _Cast(new, stored, jax.tree.leaves(new))
        return new

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
        for value, stored, before in self.casts.values():
            new, old = array_in(value), array_in(stored)
            if is_floating(new) and new.dtype != before[0].dtype:
                set_value(stored, cast_like(new, old))
            arrays.update(zip(map(id, before), jax.tree.leaves(stored), strict=True))
        for value, cls, attributes in self.changed.values():
            object.__setattr__(value, "__class__", cls)
            self._give_back(vars(value), attributes)

        def restored(leaf: PyTree) -> PyTree:
            if isinstance(leaf, nnx.Pytree):
                self._refuse_copy(leaf)
            leaf = self._uncast(leaf)
            is_variable = isinstance(leaf, nnx.Variable)
            return _settable(leaf, arrays) if is_variable else arrays.get(id(leaf), leaf)

        result = jax.tree.map(restored, tree, is_leaf=is_object)
        self.scope = None  # another trace has other objects
        self.changed.clear()
        self.casts.clear()
        return result

    def _uncast(self, value: PyTree, path: str = "") -> PyTree:
        """Returns the stored parameter in place of one that was cast, and all else as it is."""
        return self.casts[id(value)].stored if id(value) in self.casts else value

    def _give_back(
        self, attributes: dict[str, PyTree], changed: dict[str, tuple[PyTree, PyTree]]
    ) -> None:
        """Gives an object its attributes back, except for those that the function has set."""
        for name, value in attributes.items():
            old, new = changed.get(name, (None, _UNCHANGED))
            if value is new and not isinstance(value, list | dict):  # which may have changed
                attributes[name] = old
            elif isinstance(value, nnx.Param) or name in changed:
                attributes[name] = map_objects(value, (), self._uncast)

    def _refuse_copy(self, value: nnx.Pytree) -> None:
        """Raises if an object that a function returns is a copy that it made of a view."""
        for module, _ in modules_in([value]):
            if type(module) in self.made:
                cls = self.made[type(module)]
                raise ValueError(
                    f"Expected the function to return modules that it was given, got a copy of a "
                    f"{cls.__name__}, whose parameters are cast by policy map "
                    f"{str(self.policy_map)!r}: return the module itself, and copy it outside."
                )


_UNCHANGED = object()


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


def _refuse_setting(variable: nnx.Variable, value: PyTree) -> None:
    """Refuses to set a parameter that is cast; the hook of NNX for that."""
    raise ValueError(
        f"Cannot set a parameter of shape {variable.shape} inside of a function under a policy "
        f"map, where it is a copy in {variable.dtype} of the stored one: set it outside of the "
        "function, or give its module a rule that computes in the stored dtype, such as "
        "'WeightNorm: full'."
    )


def _settable(variable: nnx.Variable, arrays: dict[int, PyTree]) -> nnx.Variable:
    """Returns a variable of a result without the hook of cast parameters, and their arrays."""
    metadata = variable.get_metadata()
    if metadata.get("on_set_value") is not _refuse_setting:
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
