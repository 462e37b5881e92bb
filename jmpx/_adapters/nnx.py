"""Flax's NNX: the view of a model, in which each part has the policy that a map gives it."""

import contextlib
import dataclasses
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import numpy as np
from flax import nnx

from jmpx._adapters.dtype_fields import (
    FieldInCall,
    Selected,
    field_in_call,
    reading_policy,
    spelled_as,
)
from jmpx._adapters.sessions import (
    Method,
    PolicyScope,
    PyTree,
    inherited_policy,
    is_optimizer_state,
    marking_proxy_class,
    noted_carries,
    plain_class,
    proxy_class,
    public_methods,
    run_at_boundary,
    run_reading,
    wrapping,
)
from jmpx._base.casts import cast_like
from jmpx._base.contexts import note_cast
from jmpx._base.leaves import is_floating, is_view
from jmpx._base.made_once import made_once
from jmpx._base.nnx_objects import is_whole, objects_of
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy

M = TypeVar("M", bound=nnx.Module)
T = TypeVar("T")

_NAME = "jmpx.flax.with_policies"
_APPLY = "jmpx.apply_policy"

_CONVOLUTIONS = (nnx.Conv, nnx.ConvTranspose)
_OBJECTS = (nnx.Pytree, nnx.Variable)
_NO_CONTAINERS = (int, float, str, type(None), type, types.FunctionType)
_NO_FIELD = types.SimpleNamespace()


class _Thread(threading.local):
    """The modules of views whose methods run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[nnx.Module] = []


_thread = _Thread()


def with_policies(module: M, policy_map: PolicyMapLike | None = None) -> M:
    """Returns the view of an NNX model that computes under a policy map.

    Make the view inside the loss function, so that gradients are those of the model outside, in the
    structure and the dtypes of its parameters. In the view each `nnx.Param` is the stored one, cast
    to the compute dtype of the innermost policy. All other variables are the model's own: where the
    view updates running statistics, caches or random streams, the model's change, and keep their
    dtype. Attributes that are set on the view, as `sow` and `eval` do, are set on the view alone.

    Public methods cast where a rule, a class policy or the map's default gives the module a policy.
    Those of other modules that read an `nnx.Param` themselves cast their floating arguments to the
    compute dtype, and those of modules with running statistics their result, too. In a loop or a
    branch of JAX, a result that no rule casts stays as wide as the arguments were. A recurrent cell
    returns its carry in the dtype in which it came. An `nnx.MultiHeadAttention` with a cache in a
    wider dtype computes in that dtype.

    A rule or a class policy sets the `dtype` attribute of a layer, and of the layers inside that
    were given the same one, in the view alone. Without a rule a layer computes in its `dtype`. A
    `dtype` that an `nnx.Embed` has from its table does not count.

    The `matmul` of a policy holds for the products in its region, forward and backward, but not in
    what a `jax.custom_vjp` or `jax.custom_jvp` defines: JAX traces that later. See docs/matmul.md.

    A module of the view is an instance of its class in the model, or of a subclass of it if its
    public methods cast. A view serves one computation: neither keep it nor return it from a
    transform.

    Args:
        module: the model; it is not changed.
        policy_map: all that `jmpx.get_policy_map` takes, or None for the policies of classes
            alone (`jmpx.set_policy`). Paths are attribute names and indices joined by slashes.

    Returns:
        The view.

    Raises:
        TypeError: if `module` is not an `nnx.Module` or `policy_map` is of another type.
        ValueError: if the string is not of the grammar, or if `module` is a view under another
            policy map. A view under the same one is returned as it is.

    Warns:
        UserWarning: of each rule that matched no module; if the `dtype` of layers keeps most of the
            parameters from the compute dtype of the map's default; once if a convolution computes
            in float32 under a dot algorithm, which JAX ignores for it.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jmpx.flax
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, x):
        ...     view = jmpx.flax.with_policies(model, "c=bf16,o=f32")
        ...     return (view(x) ** 2).mean()
        >>> loss, grads = nnx.value_and_grad(loss_fn)(model, jnp.ones((4, 3)))
        >>> loss.dtype.name, grads["kernel"][...].dtype.name
        ('float32', 'float32')
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"Expected an nnx.Module, got a {type(module).__name__}: for Linen use "
            "jmpx.flax.policies, for Equinox jmpx.equinox.with_policies."
        )
    session = _PolicyScope(_NAME, policy_map)
    view = session.view(module, "", _Around())
    session.warn(stacklevel=2)
    return view


@dataclasses.dataclass(frozen=True)
class _Around:
    """What surrounds a value of the model.

    Args:
        module: the module that reads the parameters in the value; None outside of all modules.
        surrounding: the surrounding policy of calls of the modules in the value.
        reading: the policy under which parameters in the value are read.
        selected: what a rule makes of the `dtype` fields of the layers in the value.
    """

    module: Module | None = None
    surrounding: Policy | None = None
    reading: Policy | None = None
    selected: Selected | None = None


class _Maker(NamedTuple):
    """What made a view: a function, as the user calls it, and the policy map that it was given."""

    name: str
    policy_map: PolicyMap | None


class _PolicyScope(PolicyScope):
    """Makes the view of one model; an object that the model shares is shared in the view, too.

    Attributes:
        views: the objects of the view, by the identity of those of the model and, for parameters,
            the compute dtype: modules that share one may have different policies.
    """

    def __init__(self, name: str, policy_map: PolicyMapLike | None) -> None:
        super().__init__(name, policy_map)
        self.views: dict[tuple[int, Any], Any] = {}
        self.maker = _Maker(name, self.policy_map)

    def view(self, value: Any, path: str, around: _Around) -> Any:
        """Returns a value of the model as it is in the view: a module, a variable or another."""
        if isinstance(value, nnx.Param):
            return self.parameter(value, path, around)
        if not isinstance(value, nnx.Pytree):
            return value
        key = id(value), None
        if key in self.views:
            return self.views[key]
        if is_view(value):
            self.check_view(value)
            return value
        cls, attributes = type(value), dict(vars(value))
        if _is_called(value):
            cls, around, field = self.module(value, path, around)
            if _notes_dtype(value):
                attributes["dtype"] = None
            elif field.is_ruled and field.value is not None:
                attributes["dtype"] = spelled_as(attributes["dtype"], field.value)
        view = self.views[key] = self.begin(value, cls)
        for name, attribute in attributes.items():
            new = _map_objects(
                attribute, (path, str(name)), lambda node, at: self.view(node, at, around)
            )
            self.set(view, name, new)
        return view

    def begin(self, value: nnx.Pytree, cls: type) -> Any:
        """Returns the object of the view in place of one of the model, still without attributes."""
        return object.__new__(cls)

    def set(self, view: Any, name: Any, value: Any) -> None:
        """Sets an attribute of an object of the view."""
        vars(view)[name] = value  # not by setattr: Flax 0.11 keeps items of a list under integers

    def check_view(self, value: Any) -> None:
        """Raises if a module is of a view under another policy map."""
        maker: _Maker = type(value).__jmpx_view__
        if self.policy_map not in (None, maker.policy_map):
            raise ValueError(
                f"Cannot apply policy map {str(self.policy_map)!r} by {self.name} to a "
                f"{type(value).__name__} that is a view already, made by {maker.name} under "
                f"{str(maker.policy_map or '')!r}, because its parameters are cast: give the part "
                "a rule in that policy map, or pass the model itself."
            )

    def parameter(self, value: nnx.Param, path: str, around: _Around) -> nnx.Param:
        """Returns a parameter, cast to the dtype in which the module around it reads it.

        A rule for this parameter alone goes before.
        """
        is_cast = any(map(is_floating, jax.tree.leaves(value)))
        policy = self.array_policy(path, around.surrounding) if is_cast else None
        policy = around.reading if policy is None else policy
        if policy is None or around.module is None:
            return value
        self.census.note_parameter(around.module, id(value), value)
        key = id(value), np.dtype(policy.compute_dtype)
        if key not in self.views:
            self.views[key] = self.cast(value, policy)
        return self.views[key]

    def cast(self, value: nnx.Param, policy: Policy) -> nnx.Param:
        """Returns a parameter of the view in place of one of the model."""
        return policy.cast_to_compute(value)

    def module(
        self, value: nnx.Module, path: str, around: _Around
    ) -> tuple[type, _Around, FieldInCall]:
        """Returns what a module is in the view.

        Args:
            value: the module.
            path: its path.
            around: what surrounds it.

        Returns:
            Its class, what surrounds the values of its attributes, and its `dtype` field.
        """
        module, surrounding = Module(plain_class(type(value)), path), around.surrounding
        policy = self.boundary_policy(*module, surrounding)
        rule = self.explicit_policy(*module, surrounding)
        layer = _NO_FIELD if _notes_dtype(value) else value
        field = field_in_call(layer, rule, around.selected)
        self.census.note_layer(module, field)
        if policy is None and surrounding is not None and _has_statistics(value):
            policy = inherited_policy(surrounding)
        if rule is None:
            policy = None if surrounding is None and _is_holder(value) else policy
            policy = _wide_enough(policy, surrounding, value)
        self.record_module(*module, policy, surrounding)
        in_force = surrounding if policy is None else policy
        if isinstance(value, _CONVOLUTIONS) and value.precision is None:
            self.note_convolution(*module, in_force)
        if in_force is None:
            return type(value), _Around(module, selected=field.selected), field
        reading = reading_policy(in_force, field.value)
        cls, reads = type(value), _reads(value)
        if policy is not None or reads:
            note_cast(self.name)
            is_boundary = policy is not None
            cls = _view_class(cls, reading if reads else in_force, is_boundary, self.maker)
        inside = _Around(module, in_force, reading, field.selected)
        return cls, inside, field


def _map_objects(tree: PyTree, parts: tuple[str, ...], func: Callable[[Any, str], Any]) -> PyTree:
    """Maps the value of an attribute: an object of NNX, or a container of them, with its path."""
    if isinstance(tree, _NO_CONTAINERS):
        return tree
    if _is_object(tree):  # most are, and JAX takes long for a tree
        return func(tree, "/".join(filter(None, parts)))

    def at_path(key_path: Any, leaf: Any) -> Any:
        keys = jax.tree_util.keystr(key_path, simple=True, separator="/")
        return func(leaf, "/".join(filter(None, (*parts, keys))))

    return jax.tree_util.tree_map_with_path(at_path, tree, is_leaf=_is_object)


def _is_container(module: nnx.Module) -> bool:
    """Whether it is a list or a dict: nobody calls it, so a policy of its own would not cast."""
    kinds = tuple(getattr(nnx, name) for name in ("List", "Dict") if hasattr(nnx, name))
    return isinstance(module, kinds) and not callable(module)


def _is_holder(module: nnx.Module) -> bool:
    """Whether it only holds modules: without public methods, nobody calls it."""
    return not any(public_methods(type(module), nnx.Module)) and not _holds_parameter(module, set())


def _has_statistics(module: nnx.Module) -> bool:
    """Whether it keeps running statistics. They stay in float32, and would make its results so."""
    return any(isinstance(value, nnx.BatchStat) for value in vars(module).values())


def _wide_enough(
    policy: Policy | None, surrounding: Policy | None, module: nnx.Module
) -> Policy | None:
    """Returns the boundary policy of a module, whose attention computes in the dtype of its cache.

    Flax writes keys and values into the cache as they are, which JAX refuses in another dtype.
    """
    cache = getattr(module, "cached_key", None)
    in_force = surrounding if policy is None else policy
    if not isinstance(module, nnx.MultiHeadAttention) or cache is None or in_force is None:
        return policy
    dtype, compute = np.dtype(cache[...].dtype), np.dtype(in_force.compute_dtype)
    if dtype.itemsize <= compute.itemsize:
        return policy
    policy = inherited_policy(in_force) if policy is None else policy
    return dataclasses.replace(policy, compute_dtype=dtype)


def _reads(module: nnx.Module) -> bool:
    """Whether its calls cast their arguments: it reads variables, or is a step of a loop."""
    is_cell = isinstance(module, nnx.RNNCellBase)
    return is_cell or _has_statistics(module) or _holds_parameter(module, set())


def _holds_parameter(value: nnx.Pytree, seen: set[int]) -> bool:
    """Whether there is a parameter in an object, other than in modules that are called."""
    seen.add(id(value))
    nodes = filter(_is_object, jax.tree.leaves(list(vars(value).values()), is_leaf=_is_object))
    return any(
        isinstance(node, nnx.Param)
        or (
            isinstance(node, nnx.Pytree)
            and not _is_called(node)
            and id(node) not in seen
            and _holds_parameter(node, seen)
        )
        for node in nodes
    )


def _is_called(value: Any) -> TypeGuard[nnx.Module]:
    return isinstance(value, nnx.Module) and not _is_container(value)


def _notes_dtype(module: nnx.Module) -> bool:
    """Whether it is an `nnx.Embed` without a dtype of its own: it has noted that of its table.

    It would promote to that dtype.
    """
    return isinstance(module, nnx.Embed) and module.dtype == module.embedding[...].dtype


def _is_object(value: Any) -> bool:
    return isinstance(value, _OBJECTS)


@made_once  # so that views of one model have one graph definition, and jit's cache is hit
def _view_class(cls: type, policy: Policy, is_boundary: bool, maker: _Maker) -> type:
    """Returns the proxy class whose public methods cast, at boundaries their results, too."""
    run = functools.partial(run_at_boundary if is_boundary else run_reading, by=maker.name)
    if issubclass(cls, nnx.bridge.ToNNX) and maker.name == _APPLY:
        run = functools.partial(_run_wrapped, run, maker.policy_map)
    names = public_methods(cls, nnx.Module)
    methods = {name: _casting(getattr(cls, name), name, policy, run) for name in names}
    return proxy_class(cls, {**methods, "__jmpx_view__": maker})


def _run_wrapped(
    run: Callable[..., Any], policy_map: PolicyMap | None, policy: Policy, *args: Any, **kwargs: Any
) -> Any:
    """Runs a call of a Linen module in NNX; the context for Linen, which is open, casts inside."""
    with wrapping(policy, policy_map):
        return run(policy, *args, **kwargs)


def _casting(method: Method, name: str, policy: Policy, run: Callable[..., Any]) -> Method:
    """Returns a public method that casts."""

    @functools.wraps(method)
    def wrapper(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        stack = _thread.running
        if stack and stack[-1] is self:
            return method(self, *args, **kwargs)  # part of the call that casts already
        is_step = isinstance(self, nnx.RNNCellBase) and name == "__call__"
        stack.append(self)
        try:
            with noted_carries(plain_class(type(self)), policy), _kept_state(self):
                return run(
                    policy,
                    functools.partial(method, self),
                    args,
                    kwargs,
                    carry=args[0] if args and is_step else None,
                    passes=_is_object,  # a copied `nnx.Rngs` would not advance the original's count
                )
        finally:
            stack.pop()

    return wrapper


@contextlib.contextmanager
def _kept_state(module: nnx.Module) -> Iterator[None]:
    """Gives the variables of a module that are no parameters their dtypes back after a call."""
    own = [value for value in vars(module).values() if isinstance(value, nnx.Variable)]
    before = [(v, _array_in(v)) for v in own if not isinstance(v, nnx.Param)]
    yield
    for variable, old in before:
        new = _array_in(variable)
        if is_floating(old) and is_floating(new) and new.dtype != old.dtype:
            _set_value(variable, cast_like(new, old))


def _array_in(variable: nnx.Variable) -> Any:
    leaves = jax.tree.leaves(variable)
    return leaves[0] if len(leaves) == 1 else None


def _set_value(variable: Any, value: jax.Array) -> None:
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:  # Flax 0.12.0
        variable.value = value


# Under apply_policy


class _Cast(NamedTuple):
    """A parameter in a view.

    Args:
        value: the cast parameter.
        stored: the one of the model.
        arrays: the arrays that `value` had at first.
    """

    value: nnx.Param
    stored: nnx.Param
    arrays: list[Any]


class _Changed(NamedTuple):
    """An object that became part of a view.

    Args:
        value: the object.
        cls: its own class.
        attributes: its own attributes and those that the view has in their place, by their names;
            without parameters.
    """

    value: Any
    cls: type
    attributes: dict[Any, tuple[Any, Any]]


class _InPlace(_PolicyScope):
    """Turns a model itself into a view, and notes what it changes."""

    def __init__(self, views: "_Views") -> None:
        super().__init__(_APPLY, views.policy_map)
        self.noted, self.views = views, views.views

    def begin(self, value: nnx.Pytree, cls: type) -> Any:
        self.noted.change(value, cls)
        return value

    def parameter(self, value: nnx.Param, path: str, around: _Around) -> nnx.Param:
        if around.module is not None and issubclass(around.module.cls, nnx.bridge.ToNNX):
            return value  # cast by the context for Linen, whose rules may keep it
        return super().parameter(value, path, around)

    def set(self, view: Any, name: Any, value: Any) -> None:
        old = vars(view)[name]
        if value is old:
            return
        if not isinstance(value, nnx.Param):
            if _are_same(old, value, _is_object):
                return
            self.noted.changed[id(view)].attributes[name] = old, value
        vars(view)[name] = value

    def cast(self, value: nnx.Param, policy: Policy) -> nnx.Param:
        new = policy.cast_to_compute(value)
        if _are_same(value, new):
            return value
        new.set_metadata({**new.get_metadata(), "on_set_value": _refuse_setting})
        self.noted.casts[id(new)] = _Cast(new, value, jax.tree.leaves(new))
        return new


class _Views:
    """Turns the modules in pytrees into views, in place.

    All that a function does to a view, as `sow`, `eval`, running statistics and caches do, it does
    to the model. `stored` gives the models their classes, `dtype` attributes and parameters back.
    So the models have to be the function's own, as the copies in a trace are.

    Args:
        policy_map: the policy map.

    Attributes:
        made: the classes of modules in views, and the classes in whose place they are.
        views: see `_PolicyScope`.
        changed: the objects of models and the optimizers, by their identities.
        casts: the parameters, by the identities of the cast ones.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.policy_map = policy_map
        self.made: dict[type, type] = {}
        self.views: dict[tuple[int, Any], Any] = {}
        self.changed: dict[int, _Changed] = {}
        self.casts: dict[int, _Cast] = {}

    def view(self, tree: T) -> T:
        """Turns the outermost modules in a pytree into views, and returns it."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_closed)
        found = _Found()
        for leaf in leaves:
            if not is_optimizer_state(leaf):
                for value in objects_of(leaf):
                    found.add(value)
        for model in found.outermost():
            session = _InPlace(self)
            session.view(model, "", _Around())
            session.warn(stacklevel=2)
        for optimizer in found.optimizers if self.casts else ():
            self.change(optimizer, _refusing_class(type(optimizer)))
        return treedef.unflatten(map(self.rebound, leaves))

    def change(self, value: Any, cls: type) -> None:
        """Gives an object another class until `stored`."""
        self.changed[id(value)] = _Changed(value, type(value), {})
        if cls is not type(value):
            self.made[cls] = type(value)
            object.__setattr__(value, "__class__", cls)

    def rebound(self, leaf: Any) -> Any:
        """Returns a bound method of a module as that of its view, a partial of it likewise."""
        if isinstance(leaf, functools.partial):
            parts = (leaf.func, leaf.args, leaf.keywords)
            func, args, kwargs = jax.tree.map(self.rebound, parts, is_leaf=_is_closed)
            return functools.partial(func, *args, **kwargs)
        if not isinstance(leaf, types.MethodType):
            return leaf
        owner, name = leaf.__self__, leaf.__func__.__name__
        plain = self.made.get(type(owner))
        is_own = plain is not None and getattr(plain, name, None) is leaf.__func__
        return getattr(owner, name) if is_own else leaf

    def stored(self, tree: T) -> T:
        """Gives the models back what they had, and returns a result without what was cast."""
        arrays: dict[int, Any] = {}
        for value, stored, before in self.casts.values():
            new, old = _array_in(value), _array_in(stored)
            if is_floating(new) and new.dtype != before[0].dtype:
                _set_value(stored, cast_like(new, old))
            arrays.update(zip(map(id, before), jax.tree.leaves(stored), strict=True))
        for value, cls, attributes in self.changed.values():
            object.__setattr__(value, "__class__", cls)
            self.give_back(vars(value), attributes)

        def restored(leaf: Any) -> Any:
            if isinstance(leaf, nnx.Pytree):
                self.refuse_copy(leaf)
            leaf = self.uncast(leaf)
            is_variable = isinstance(leaf, nnx.Variable)
            return _settable(leaf, arrays) if is_variable else arrays.get(id(leaf), leaf)

        result = jax.tree.map(restored, tree, is_leaf=_is_object)
        for memory in (self.views, self.changed, self.casts):  # another trace has other objects
            memory.clear()
        return result

    def uncast(self, value: Any, path: str = "") -> Any:
        """Returns the stored parameter in place of one that was cast, and all else as it is."""
        return self.casts[id(value)].stored if id(value) in self.casts else value

    def give_back(self, attributes: dict[Any, Any], changed: dict[Any, tuple[Any, Any]]) -> None:
        """Gives an object its attributes back, except for those that the function has set."""
        for name, value in attributes.items():
            old, new = changed.get(name, (None, _NO_FIELD))
            if value is new and not isinstance(value, list | dict):  # which may have changed
                attributes[name] = old
            elif isinstance(value, nnx.Param) or name in changed:
                attributes[name] = _map_objects(value, (), self.uncast)

    def refuse_copy(self, value: nnx.Pytree) -> None:
        """Raises if an object that a function returns is a copy that it made of a view."""
        for module, _ in _modules([value]):
            if type(module) in self.made:
                cls = self.made[type(module)]
                raise ValueError(
                    f"Expected the function to return modules that it was given, got a copy of a "
                    f"{cls.__name__}, whose parameters are cast by policy map "
                    f"{str(self.policy_map)!r}: return the module itself, and copy it outside."
                )


class _Found:
    """The models and the optimizers in objects.

    Attributes:
        models: the outermost modules. Those in a list or dict of NNX count, and those in a train
            state, a module that holds them beside an optimizer, or beside metrics if it is not
            callable itself.
        optimizers: the optimizers.
    """

    def __init__(self) -> None:
        self.models: dict[int, nnx.Module] = {}
        self.optimizers: list[nnx.Optimizer] = []
        self.seen: set[int] = set()

    def add(self, value: Any) -> None:
        """Adds an object and what it holds."""
        if id(value) in self.seen or not isinstance(value, nnx.Pytree):
            return
        self.seen.add(id(value))
        if isinstance(value, nnx.Optimizer):
            self.optimizers.append(value)
        if _is_called(value) and not _is_train_state(value):
            self.models[id(value)] = value
        elif not isinstance(value, nnx.Metric):
            for part in _parts(value):
                self.add(part)

    def outermost(self) -> list[nnx.Module]:
        """Returns the models that are no parts of others."""
        models = list(self.models.values())
        if len(models) == 1:
            return models
        parts = {id(part) for model in models for part, _ in _modules([model]) if part is not model}
        return [model for model in models if id(model) not in parts]


def _parts(value: nnx.Pytree) -> list[Any]:
    """Returns the objects in the attributes of an object, without those in optimizer states."""
    leaves = jax.tree.leaves(list(vars(value).values()), is_leaf=_is_closed)
    return [leaf for leaf in leaves if _is_object(leaf)]


def _is_train_state(module: nnx.Module) -> bool:
    kinds = (nnx.Optimizer,) if callable(module) else (nnx.Optimizer, nnx.Metric)
    return any(isinstance(part, kinds) for part in _parts(module))


def _is_closed(node: Any) -> bool:
    """Whether no models are searched inside of a node of a pytree by `jax.tree`."""
    return is_whole(node) or is_optimizer_state(node)


def _are_same(tree: PyTree, other: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> bool:
    """Whether two pytrees have the same objects as leaves."""
    leaves, others = (jax.tree.leaves(each, is_leaf=is_leaf) for each in (tree, other))
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


@made_once
def _refusing_class(cls: type) -> type:
    """Returns the proxy class of an optimizer that refuses to update parameters which are cast."""

    def update(*args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "Cannot update an nnx.Optimizer inside of a function under a policy map, where the "
            "parameters are cast and updates of them would be rounded: return the gradients, and "
            "call update after the function."
        )

    return proxy_class(cls, {"update": update})


def _refuse_setting(variable: nnx.Variable, value: Any) -> None:
    """Refuses to set a parameter that is cast; the hook of NNX for that."""
    raise ValueError(
        f"Cannot set a parameter of shape {variable.shape} inside of a function under a policy "
        f"map, where it is a copy in {variable.dtype} of the stored one: set it outside of the "
        "function, or give its module a rule that computes in the stored dtype, such as "
        "'WeightNorm: full'."
    )


def _settable(variable: nnx.Variable, arrays: dict[int, Any]) -> nnx.Variable:
    """Returns a variable of a result without the hook of cast parameters, and their arrays."""
    metadata = variable.get_metadata()
    if metadata.get("on_set_value") is not _refuse_setting:
        return variable
    new = jax.tree.map(lambda leaf: arrays.get(id(leaf), leaf), variable)
    del metadata["on_set_value"]
    new.set_metadata(metadata)
    return new


# Under autocast


class _Marker:
    """Has the modules in a pytree mark the calls of their methods, for `jmpx.autocast`.

    The classes of those modules become proxy classes until `unmark`. Paths begin at the outermost
    modules.

    Args:
        matches: whether the calls of a module of this class and path are to be marked.
    """

    def __init__(self, matches: Callable[[type, str], bool]) -> None:
        self.matches = matches
        self.made: dict[
            type, type
        ] = {}  # the proxy classes, and the classes in whose place they are
        self.given: list[Any] = []

    def mark(self, tree: T) -> T:
        """Marks the modules in a pytree, and returns it."""
        self.given = _objects(tree)
        for module, path in _modules(self.given):
            cls = type(module)
            called = Module(plain_class(cls), path)
            if self.matches(*called):
                marked = marking_proxy_class(cls, (called,), nnx.Module)
                self.made[marked] = cls
                object.__setattr__(module, "__class__", marked)
        return tree

    def unmark(self, tree: T) -> T:
        """Gives modules their classes back, those in a pytree too, which it returns."""
        for module, _ in _modules([*self.given, *_objects(tree)]):
            if type(module) in self.made:
                object.__setattr__(module, "__class__", self.made[type(module)])
        return tree


def _objects(tree: PyTree) -> list[Any]:
    return list(filter(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))


def _modules(roots: list[Any]) -> list[tuple[nnx.Module, str]]:
    """Returns the modules in objects that can be called, each once, with their paths."""
    found: dict[int, tuple[Any, str]] = {}

    def visit(value: Any, path: str) -> None:
        if id(value) in found or not isinstance(value, nnx.Pytree):
            return
        found[id(value)] = value, path
        for name, attribute in vars(value).items():
            _map_objects(attribute, (path, str(name)), visit)

    for root in roots:
        visit(root, "")
    return [(value, path) for value, path in found.values() if _is_called(value)]


class _Adapter(Adapter):
    def marker(self, matches: Callable[[type, str], bool]) -> _Marker:
        return _Marker(matches)

    def views(self, policy_map: PolicyMap) -> _Views:
        return _Views(policy_map)


adapter: Adapter = _Adapter()
