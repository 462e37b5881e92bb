"""The adapter for NNX: turns models into views, or marks them, in place, while a function runs.

They are changed back afterwards, and keep what the function did to them: `sow`, `eval`, running
statistics, caches. So the models have to be the function's own, as the copies in a trace are.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from flax import nnx

from jmpx._adapters.boundaries import (
    dtype_field,
    is_optimizer_state,
    marking_proxy_class,
    plain_class,
    proxy_class,
)
from jmpx._adapters.nnx import objects
from jmpx._adapters.nnx.views import NnxScope, refuse_setting
from jmpx._base.made_once import made_once
from jmpx._base.stateful import is_object, objects_of, replace_objects
from jmpx._base.trees import PyTree, cast_like, is_floating
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap

T = TypeVar("T")


class _Views:
    """Turns the models in pytrees into views, and back; see `Proxies`."""

    def __init__(self, policy_map: PolicyMap) -> None:
        self.policy_map = policy_map
        self.made: dict[type, type] = {}
        self._scope: NnxScope | None = None  # of one trace: each trace has its own objects
        self._given: dict[int, nnx.Pytree] = {}  # by their identities

    def replace(self, tree: T) -> T:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=objects.is_closed)
        own = (leaf for leaf in leaves if not is_optimizer_state(leaf))
        roots = [value for leaf in own for value in objects_of(leaf)]
        models, optimizers = objects.models_in(roots)
        if not models:
            return tree
        self._given |= {id(value): value for value, _ in objects.objects_in(roots)}
        scope = self._scope = self._scope or NnxScope("jmpx.apply_policy", self.policy_map, True)
        for model in models:
            scope.view(model)
        for optimizer in optimizers:
            if scope.casts and type(optimizer) not in self.made:
                refusing = _refusing_class(type(optimizer))
                self.made[refusing] = type(optimizer)
                object.__setattr__(optimizer, "__class__", refusing)
        self.made |= scope.made
        # Bound methods become those of the views.
        return treedef.unflatten([replace_objects(leaf, objects_of(leaf)) for leaf in leaves])

    def restore(self, tree: T) -> T:
        scope, self._scope = self._scope, None
        given, self._given = self._given, {}
        if scope is None:
            return tree
        arrays = _stored_arrays(scope)

        def stored(node: PyTree, path: str = "") -> PyTree:
            return scope.casts[id(node)].stored if id(node) in scope.casts else node

        def of_result(leaf: PyTree) -> PyTree:
            is_variable = isinstance(leaf, nnx.Variable)
            return _settable(stored(leaf), arrays) if is_variable else arrays.get(id(leaf), leaf)

        for value, _ in objects.objects_in([*given.values(), *_objects(tree)]):
            if id(value) not in given and type(value) in self.made:
                raise ValueError(
                    f"Expected the function to return modules that it was given, got a copy of a "
                    f"{type(value).__name__}, whose parameters are cast by policy map "
                    f"{str(self.policy_map)!r}: return the module itself, and copy it outside."
                )
            _make_plain(value, self.made)
            for name, attribute in list(vars(value).items()):
                vars(value)[name] = objects.map_objects(attribute, (), stored)
        return jax.tree.map(of_result, tree, is_leaf=is_object)


def _stored_arrays(scope: NnxScope) -> dict[int, jax.Array]:
    """Restores the fields of models; returns stored arrays, by the identities of cast ones.

    A parameter that the function set to another dtype than the compute dtype keeps its new value.
    """
    arrays: dict[int, jax.Array] = {}
    for value, parameter, before in scope.casts.values():
        new = objects.array_in(value)
        if is_floating(new) and new.dtype != before[0].dtype:
            objects.set_value(parameter, cast_like(new, objects.array_in(parameter)))
        arrays.update(zip(map(id, before), jax.tree.leaves(parameter), strict=True))
    for attributes, written in scope.fields:
        attributes["dtype"] = written
    return arrays


@made_once
def _refusing_class(cls: type) -> type:
    """Returns the proxy class of an optimizer that refuses to update parameters which are cast."""

    def update(*args: PyTree, **kwargs: PyTree) -> None:
        raise ValueError(
            "Cannot update an nnx.Optimizer inside of a function under a policy map, where it "
            "would round parameters: return the gradients, and call update after the function."
        )

    return proxy_class(cls, {"update": update})


def _settable(variable: nnx.Variable, arrays: dict[int, PyTree]) -> nnx.Variable:
    """Returns a variable of a result, without the hook and the arrays of cast parameters."""
    metadata = variable.get_metadata()
    if metadata.get("on_set_value") is not refuse_setting:
        return variable
    new = jax.tree.map(lambda leaf: arrays.get(id(leaf), leaf), variable)
    del metadata["on_set_value"]
    new.set_metadata(metadata)
    return new


class _Marker:
    """Has modules in pytrees mark their calls, with paths from the outermost; see `Proxies`."""

    def __init__(self, matches: Callable[[type, str], bool]) -> None:
        self.matches = matches
        self.made: dict[type, type] = {}
        self.given: list[PyTree] = []

    def replace(self, tree: T) -> T:
        roots = _objects(tree)
        self.given += roots
        for value, path in objects.objects_in(roots):
            cls = type(value)
            called = Module(plain_class(cls), path)
            if not objects.is_called(value) or cls in self.made:
                continue
            if self.matches(*called) or dtype_field(value) is not None:
                marked = marking_proxy_class(cls, (called,), nnx.Module)
                self.made[marked] = cls
                object.__setattr__(value, "__class__", marked)
        return tree

    def restore(self, tree: T) -> T:
        for value, _ in objects.objects_in([*self.given, *_objects(tree)]):
            _make_plain(value, self.made)
        return tree


def _make_plain(value: nnx.Pytree, made: dict[type, type]) -> None:
    """Gives an object of a proxy class its own class back."""
    if type(value) in made:
        object.__setattr__(value, "__class__", made[type(value)])


def _objects(tree: PyTree) -> list[PyTree]:
    return list(filter(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


class _Adapter(Adapter):
    def marker(self, matches: Callable[[type, str], bool]) -> _Marker:
        return _Marker(matches)

    def views(self, policy_map: PolicyMap, objects: Sequence[PyTree]) -> _Views | None:
        return _Views(policy_map) if objects else None


adapter: Adapter = _Adapter()
