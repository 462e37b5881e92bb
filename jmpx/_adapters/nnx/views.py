"""`jmpx.flax.with_policies`: the view of a model of NNX."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from jmpx._adapters.boundaries import (
    Method,
    Selected,
    are_same,
    check_view,
    field_in_call,
    plain_class,
    proxy_class,
    public_methods,
    reading_policy,
    run_cast,
    spelled_as,
)
from jmpx._adapters.nnx import objects
from jmpx._adapters.scopes import PolicyScope, for_modules, inherited_policy
from jmpx._base.contexts import note_cast
from jmpx._base.made_once import made_once
from jmpx._base.stateful import is_object
from jmpx._base.trees import PyTree, cast_like, is_floating, is_view
from jmpx._jaxprs.marks import Module
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy

M = TypeVar("M", bound=nnx.Module)

_NAME = "jmpx.flax.with_policies"

# The module of a view whose method runs in this thread.
_running = contextvars.ContextVar[nnx.Module | None]("_running", default=None)


def with_policies(module: M, policy_map: PolicyMapLike | None = None) -> M:
    """Returns the view of an NNX model that computes under a policy map.

    Make the view inside the loss function, so that gradients are those of the model outside, in the
    structure and the dtypes of its parameters. In the view each `nnx.Param` is the stored one, cast
    to the compute dtype of the innermost policy; all other variables are the model's own. Its
    modules cast what they are called with, and those with a policy what they return.
    docs/flax_nnx.md has the details.

    Args:
        module: the model; it is not changed.
        policy_map: all that `jmpx.get_policy_map` takes, or None for the policies of classes
            alone (`jmpx.set_policy`). Paths are attribute names and indices joined by slashes.

    Returns:
        The view, whose modules are instances of their classes in the model, or of subclasses. It
        serves one computation: neither keep it nor return it from a transform.

    Raises:
        TypeError: if `module` is not an `nnx.Module` or `policy_map` is of another type.
        ValueError: if the string is not of the grammar, or if `module` is a view under another
            policy map. A view under the same one is returned as it is.

    Warns:
        UserWarning: of each rule that matched no module; if the `dtype` of layers keeps most of the
            parameters from the compute dtype of the map's default.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, jmpx.flax
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
    followed = None if policy_map is None else for_modules(policy_map, _NAME)
    scope = NnxScope(_NAME, followed)
    view = scope.view(_copied(module, {}))
    scope.pool.warn(stacklevel=2)
    return view


def _copied(value: PyTree, copies: dict[int, PyTree]) -> PyTree:
    """Returns a copy of an object with the same variables; views in it stay as they are."""
    if not isinstance(value, nnx.Pytree) or is_view(value):
        return value
    if id(value) not in copies:
        copy = copies[id(value)] = object.__new__(type(value))
        for name, attribute in vars(value).items():
            # Not by setattr: Flax 0.11 keeps items of a list under integers.
            vars(copy)[name] = objects.map_objects(
                attribute, (), lambda node, _: _copied(node, copies)
            )
    return copies[id(value)]


class _Around(NamedTuple):
    """The surroundings of a value of the model."""

    module: Module | None = None  # reads the parameters in the value
    surrounding: Policy | None = None  # of calls of the modules in the value
    reading: Policy | None = None  # under which parameters in the value are read
    selected: Selected | None = None  # by a rule, for `dtype` fields in the value


_OUTSIDE = _Around()


class Cast(NamedTuple):
    """A parameter in a view."""

    value: nnx.Param
    stored: nnx.Param
    arrays: list[jax.Array]  # of `value` at first


class NnxScope(PolicyScope):
    """Turns models into views, in place; an object that they share is turned once.

    With `hands_back`, models are restored afterwards: no cast parameter may be set, and the context
    for Linen, which is open then, casts in Linen's modules.
    """

    def __init__(self, name: str, policy_map: PolicyMap | None, hands_back: bool = False) -> None:
        super().__init__(name, policy_map)
        self.hands_back = hands_back
        self.made: dict[type, type] = {}  # proxy classes, and the classes that they replace
        self.casts: dict[int, Cast] = {}  # by the identities of the cast parameters
        # The attributes of modules whose `dtype` was set, and its value before.
        self.fields: list[tuple[dict[str, PyTree], PyTree]] = []
        self._objects: dict[int, PyTree] = {}
        # Modules that share a parameter may have different policies.
        self._parameters: dict[tuple[int, np.dtype], nnx.Param] = {}

    def view(self, value: PyTree, path: str = "", around: _Around = _OUTSIDE) -> PyTree:
        """Returns a value of the model as it is in the view: a module, a variable or another."""
        if isinstance(value, nnx.Param):
            return self.parameter(value, around)
        if not isinstance(value, nnx.Pytree) or id(value) in self._objects:
            return value
        if is_view(value):
            check_view(value, self.policy_map)
            return value
        if self.hands_back and isinstance(value, nnx.bridge.ToNNX):
            return value
        self._objects[id(value)] = value
        if objects.is_called(value):
            around = self.module(value, path, around)
        for name, old in list(vars(value).items()):
            vars(value)[name] = objects.map_objects(
                old, (path, str(name)), lambda node, at: self.view(node, at, around)
            )
        return value

    def parameter(self, value: nnx.Param, around: _Around) -> nnx.Param:
        """Returns a parameter, cast to the dtype in which the module around it reads it."""
        if around.module is None or around.reading is None:
            return value
        self.census.note_parameter(around.module, id(value), value)
        key = id(value), np.dtype(around.reading.compute_dtype)
        if key not in self._parameters:
            self._parameters[key] = self.cast(value, around.reading)
        return self._parameters[key]

    def cast(self, stored: nnx.Param, policy: Policy) -> nnx.Param:
        """Returns a parameter of the view in place of a stored one."""
        new = policy.cast_to_compute(stored)
        if not self.hands_back:
            return new
        if are_same(stored, new):
            return stored
        new.set_metadata({**new.get_metadata(), "on_set_value": refuse_setting})
        self.casts[id(new)] = Cast(new, stored, jax.tree.leaves(new))
        return new

    def module(self, value: nnx.Module, path: str, around: _Around) -> _Around:
        """Sets the class and `dtype` field of a module; returns the surroundings of its values."""
        module, surrounding = Module(plain_class(type(value)), path), around.surrounding
        rule, policy = self.policies_of(*module, surrounding)
        if objects.notes_dtype(value):
            self.set_field(value, None)
        field = field_in_call(value, rule and rule.compute_dtype, around.selected)
        self.census.note_layer(module, field)
        if field.is_ruled and field.value is not None:
            self.set_field(value, spelled_as(vars(value)["dtype"], field.value))
        if policy is None and surrounding is not None and objects.has_statistics(value):
            policy = inherited_policy(surrounding)
        if rule is None and surrounding is None and objects.is_holder(value):
            policy = None
        self.record_module(*module, policy, surrounding)
        active = surrounding if policy is None else policy
        if active is None:
            return _Around(module, selected=field.selected)
        reading, reads = reading_policy(active, field.value), objects.reads(value)
        if policy is not None or reads:
            in_call = reading if reads else active
            note_cast(self.name, in_call.compute_dtype)
            cls = type(value)
            made = _view_class(cls, in_call, policy is not None, self.name, self.policy_map)
            self.made[made] = cls
            object.__setattr__(value, "__class__", made)
        return _Around(module, active, reading, field.selected)

    def set_field(self, module: nnx.Module, dtype: PyTree) -> None:
        """Sets the `dtype` field of a module, and notes its value before."""
        self.fields.append((vars(module), vars(module)["dtype"]))
        vars(module)["dtype"] = dtype


def refuse_setting(variable: nnx.Variable, value: PyTree) -> None:
    """Refuses to set a parameter that is cast; the hook of NNX for that."""
    raise ValueError(
        f"Cannot set a parameter of shape {variable.shape} inside of a function under a policy "
        f"map, where it is a copy in {variable.dtype} of the stored one: set it outside of the "
        "function, or give its module a rule that computes in the stored dtype, such as "
        "'WeightNorm: full'."
    )


@made_once  # so that views of one model have one graph definition, and jit's cache is hit
def _view_class(
    cls: type, policy: Policy, is_boundary: bool, by: str, policy_map: PolicyMap | None
) -> type:
    """Returns the proxy class whose public methods cast, at boundaries their results, too."""
    called = Module(cls, "")  # one class for all paths
    run = functools.partial(run_cast, by=by, module=called, is_boundary=is_boundary)
    names = public_methods(cls, nnx.Module)
    methods = {name: _casting(getattr(cls, name), name, policy, run) for name in names}
    return proxy_class(cls, {**methods, "__jmpx_view__": policy_map})


def _casting(method: Method, name: str, policy: Policy, run: Callable[..., PyTree]) -> Method:
    """Returns a public method that casts."""

    @functools.wraps(method)
    def wrapper(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if _running.get() is self:
            return method(self, *args, **kwargs)  # part of the call that casts already
        is_step = isinstance(self, nnx.RNNCellBase) and name == "__call__"
        carry, bound = args[0] if args and is_step else None, functools.partial(method, self)
        token = _running.set(self)
        try:
            with _kept_state(self):
                # Objects pass, as a copied `nnx.Rngs` would not advance the original's count.
                return run(policy, bound, args, kwargs, carry=carry, passes=is_object)
        finally:
            _running.reset(token)

    return wrapper


@contextlib.contextmanager
def _kept_state(module: nnx.Module) -> Iterator[None]:
    """Gives the variables of a module, except for parameters, their dtypes back after a call."""
    own = [value for value in vars(module).values() if isinstance(value, nnx.Variable)]
    before = [(v, objects.array_in(v)) for v in own if not isinstance(v, nnx.Param)]
    yield
    for variable, old in before:
        new = objects.array_in(variable)
        if is_floating(old) and is_floating(new) and new.dtype != old.dtype:
            objects.set_value(variable, cast_like(new, old))
