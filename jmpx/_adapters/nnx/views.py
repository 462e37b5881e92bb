"""`jmpx.flax.with_policies`: the view of a model of NNX."""

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from jmpx._adapters.boundaries import Method, are_same, run_cast
from jmpx._adapters.dtype_fields import (
    FieldInCall,
    Selected,
    field_in_call,
    reading_policy,
    spelled_as,
)
from jmpx._adapters.nnx import objects
from jmpx._adapters.proxies import plain_class, proxy_class, public_methods
from jmpx._adapters.scopes import PolicyScope, inherited_policy, wrapping
from jmpx._base.casts import cast_like
from jmpx._base.contexts import note_cast
from jmpx._base.leaves import PyTree, is_floating, is_view
from jmpx._base.made_once import made_once
from jmpx._base.nnx_objects import is_object
from jmpx._jaxprs.marks import Module
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy

M = TypeVar("M", bound=nnx.Module)

_NAME = "jmpx.flax.with_policies"
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
    to the compute dtype of the innermost policy. All other variables are the model's own, and keep
    their dtype. Attributes that are set on the view, as `sow` and `eval` do, are set on it alone.

    Public methods cast where a rule, a class policy or the map's default gives the module a policy.
    Those of other modules that read an `nnx.Param` themselves cast their floating arguments to the
    compute dtype, and those of modules with running statistics their result, too. In a loop or a
    branch of JAX, a result that no rule casts stays as wide as the arguments were. A rule or a
    class policy sets the `dtype` attribute of a layer in the view; without one a layer computes in
    its `dtype`. docs/flax_nnx.md has the rest.

    A view serves one computation: neither keep it nor return it from a transform.

    Args:
        module: the model; it is not changed.
        policy_map: all that `jmpx.get_policy_map` takes, or None for the policies of classes
            alone (`jmpx.set_policy`). Paths are attribute names and indices joined by slashes.

    Returns:
        The view, whose modules are instances of their classes in the model, or of subclasses.

    Raises:
        TypeError: if `module` is not an `nnx.Module` or `policy_map` is of another type.
        ValueError: if the string is not of the grammar, or if `module` is a view under another
            policy map. A view under the same one is returned as it is.

    Warns:
        UserWarning: of each rule that matched no module; if the `dtype` of layers keeps most of the
            parameters from the compute dtype of the map's default.

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

    See Also:
        `jmpx.apply_policy`, under which a function changes the models themselves.
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"Expected an nnx.Module, got a {type(module).__name__}: for Linen use "
            "jmpx.flax.policies, for Equinox jmpx.equinox.with_policies."
        )
    scope = NnxScope(_NAME, policy_map)
    view = scope.view(copied(module, {}))
    scope.pool.warn(stacklevel=2)
    return view


def copied(value: PyTree, copies: dict[int, tuple[PyTree, PyTree]]) -> PyTree:
    """Returns a copy of an object with the same variables; views in it stay as they are.

    `copies` takes the objects and their copies, by the identities of the objects.
    """
    if not isinstance(value, nnx.Pytree) or is_view(value):
        return value
    if id(value) not in copies:
        copy = object.__new__(type(value))
        copies[id(value)] = value, copy
        for name, attribute in vars(value).items():
            # Not by setattr: Flax 0.11 keeps items of a list under integers.
            vars(copy)[name] = objects.map_objects(
                attribute, (), lambda node, _: copied(node, copies)
            )
    return copies[id(value)][1]


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
    hands_back: bool


class Cast(NamedTuple):
    """A parameter in a view: the cast one, the stored one, and the arrays of the first at first."""

    value: nnx.Param
    stored: nnx.Param
    arrays: list[jax.Array]


class NnxScope(PolicyScope):
    """Turns copies of models into views; an object that they share is turned once.

    Args:
        name: see `PolicyScope`.
        policy_map: see `PolicyScope`.
        hands_back: whether the function hands the models back, so that no cast parameter may be
            set, and the open context for Linen casts those of Linen's modules.

    Attributes:
        made: the proxy classes, and the classes in whose place they are.
        casts: the parameters, by the identities of the cast ones.
    """

    def __init__(
        self, name: str, policy_map: PolicyMapLike | None, hands_back: bool = False
    ) -> None:
        super().__init__(name, policy_map)
        self.maker = _Maker(name, self.policy_map, hands_back)
        self.made: dict[type, type] = {}
        self.casts: dict[int, Cast] = {}
        self._objects: dict[int, PyTree] = {}
        # Modules that share a parameter may have different policies.
        self._parameters: dict[tuple[int, np.dtype], nnx.Param] = {}

    def view(self, value: PyTree, path: str = "", around: _Around = _Around()) -> PyTree:
        """Returns a value of the model as it is in the view: a module, a variable or another."""
        if isinstance(value, nnx.Param):
            return self.parameter(value, path, around)
        if not isinstance(value, nnx.Pytree) or id(value) in self._objects:
            return value
        if is_view(value):
            self.check_view(value)
            return value
        self._objects[id(value)] = value
        attributes = vars(value)
        if objects.is_called(value):
            cls, around, field = self.module(value, path, around)
            if objects.notes_dtype(value):
                attributes["dtype"] = None
            elif field.is_ruled and field.value is not None:
                attributes["dtype"] = spelled_as(attributes["dtype"], field.value)
            if cls is not type(value):
                self.made[cls] = type(value)
                object.__setattr__(value, "__class__", cls)
        for name, old in list(attributes.items()):
            attributes[name] = objects.map_objects(
                old, (path, str(name)), lambda node, at: self.view(node, at, around)
            )
        return value

    def check_view(self, value: nnx.Pytree) -> None:
        """Raises if a module is of a view under another policy map."""
        cls: PyTree = type(value)
        maker: _Maker = cls.__jmpx_view__
        if self.policy_map not in (None, maker.policy_map):
            raise ValueError(
                f"Cannot apply policy map {str(self.policy_map)!r} by {self.name} to a "
                f"{type(value).__name__} that is a view already, made by {maker.name} under "
                f"{str(maker.policy_map or '')!r}, because its parameters are cast: give the part "
                "a rule in that policy map, or pass the model itself."
            )

    def parameter(self, value: nnx.Param, path: str, around: _Around) -> nnx.Param:
        """Returns a parameter, cast to the dtype in which the module around it reads it.

        A rule for this parameter alone takes precedence.
        """
        is_cast = any(map(is_floating, jax.tree.leaves(value)))
        policy = self.array_policy(path, around.surrounding) if is_cast else None
        policy = around.reading if policy is None else policy
        if policy is None or around.module is None:
            return value
        if self.maker.hands_back and issubclass(around.module.cls, nnx.bridge.ToNNX):
            return value  # cast by the context for Linen, whose rules may keep it
        self.census.note_parameter(around.module, id(value), value)
        key = id(value), np.dtype(policy.compute_dtype)
        if key not in self._parameters:
            self._parameters[key] = self.cast(value, policy)
        return self._parameters[key]

    def cast(self, stored: nnx.Param, policy: Policy) -> nnx.Param:
        """Returns a parameter of the view in place of a stored one."""
        new = policy.cast_to_compute(stored)
        if not self.maker.hands_back:
            return new
        if are_same(stored, new):
            return stored
        new.set_metadata({**new.get_metadata(), "on_set_value": refuse_setting})
        self.casts[id(new)] = Cast(new, stored, jax.tree.leaves(new))
        return new

    def module(
        self, value: nnx.Module, path: str, around: _Around
    ) -> tuple[type, _Around, FieldInCall]:
        """Returns its class in the view, what surrounds its attributes, and its `dtype` field."""
        module, surrounding = Module(plain_class(type(value)), path), around.surrounding
        rule, policy = self.policies_of(*module, surrounding)
        layer = _NO_FIELD if objects.notes_dtype(value) else value
        field = field_in_call(layer, rule, around.selected)
        self.census.note_layer(module, field)
        if policy is None and surrounding is not None and objects.has_statistics(value):
            policy = inherited_policy(surrounding)
        if rule is None:
            policy = None if surrounding is None and objects.is_holder(value) else policy
            policy = _wide_enough(policy, surrounding, value)
        self.record_module(*module, policy, surrounding)
        in_force = surrounding if policy is None else policy
        if in_force is None:
            return type(value), _Around(module, selected=field.selected), field
        reading, cls = reading_policy(in_force, field.value), type(value)
        if policy is not None or objects.reads(value):
            policy_in_call = reading if objects.reads(value) else in_force
            note_cast(self.name, policy_in_call.compute_dtype)
            cls = _view_class(cls, policy_in_call, policy is not None, self.maker)
        return cls, _Around(module, in_force, reading, field.selected), field


def refuse_setting(variable: nnx.Variable, value: PyTree) -> None:
    """Refuses to set a parameter that is cast; the hook of NNX for that."""
    raise ValueError(
        f"Cannot set a parameter of shape {variable.shape} inside of a function under a policy "
        f"map, where it is a copy in {variable.dtype} of the stored one: set it outside of the "
        "function, or give its module a rule that computes in the stored dtype, such as "
        "'WeightNorm: full'."
    )


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


@made_once  # so that views of one model have one graph definition, and jit's cache is hit
def _view_class(cls: type, policy: Policy, is_boundary: bool, maker: _Maker) -> type:
    """Returns the proxy class whose public methods cast, at boundaries their results, too."""
    run = functools.partial(run_cast, by=maker.name, is_boundary=is_boundary)
    if issubclass(cls, nnx.bridge.ToNNX) and maker.hands_back:
        run = functools.partial(_run_wrapped, run, maker.policy_map)
    names = public_methods(cls, nnx.Module)
    methods = {name: _casting(getattr(cls, name), name, policy, run) for name in names}
    return proxy_class(cls, {**methods, "__jmpx_view__": maker})


def _run_wrapped(
    run: Callable[..., PyTree],
    policy_map: PolicyMap | None,
    policy: Policy,
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    """Runs a call of a Linen module in NNX; the context for Linen, which is open, casts inside."""
    with wrapping(policy, policy_map):
        return run(policy, *args, **kwargs)


def _casting(method: Method, name: str, policy: Policy, run: Callable[..., PyTree]) -> Method:
    """Returns a public method that casts."""

    @functools.wraps(method)
    def wrapper(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        stack = _thread.running
        if stack and stack[-1] is self:
            return method(self, *args, **kwargs)  # part of the call that casts already
        is_step = isinstance(self, nnx.RNNCellBase) and name == "__call__"
        stack.append(self)
        try:
            with _kept_state(self):
                return run(
                    policy,
                    functools.partial(method, self),
                    args,
                    kwargs,
                    carry=args[0] if args and is_step else None,
                    passes=is_object,  # a copied `nnx.Rngs` would not advance the original's count
                )
        finally:
            stack.pop()

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
