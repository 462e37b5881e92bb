"""Flax's Linen: a context around `init` and `apply` in which each module has its policy."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import jax
import numpy as np
from flax import linen as nn

from jmpx._adapters.boundaries import (
    Args,
    FieldInCall,
    Kwargs,
    Method,
    ParameterCasts,
    at_least,
    cast_result,
    field_in_autocast,
    field_in_call,
    field_set,
    is_public,
    reading_policy,
    run_cast,
    widest,
)
from jmpx._adapters.scopes import (
    PolicyScope,
    active_creation,
    for_modules,
    in_policy_scope,
    inherited_policy,
    pooled,
)
from jmpx._base.contexts import is_held, opened, refuse_other_tasks
from jmpx._base.messages import user_stacklevel
from jmpx._base.trees import PyTree, cast_like, is_floating
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy
from jmpx._policies.registry import marked_call, running


def module_of(module: nn.Module) -> Module:
    """Returns a module as the class that the user wrote, and its path."""
    cls = type(module)
    while cls.__module__ == nn.remat.__module__:  # made by `nn.scan`, `nn.remat` or the like
        cls = cls.__bases__[0]
    return Module(cls, "/".join(module.path))


def is_public_method(cls: type, name: str) -> bool:
    """Whether a method is public. Bodies of lifted functions run as methods of no class."""
    return name != "setup" and is_public(name) and hasattr(cls, name)


def own(module: nn.Module, collection: str) -> list[jax.Array]:
    """Returns the floating arrays of a collection that a module itself holds."""
    variables = {} if module.scope is None else module.scope.variables().get(collection, {})
    held = [value for value in variables.values() if not isinstance(value, Mapping)]
    return list(filter(is_floating, jax.tree.leaves(held)))


def reads(module: nn.Module) -> bool:
    """Whether a module itself reads parameters or running statistics."""
    return bool(own(module, "params") or own(module, "batch_stats"))


def state_dtype(module: nn.Module, policy: Policy | None) -> np.dtype | None:
    """Returns the dtype of state, such as a cache, if it is wider than the compute dtype."""
    if policy is None or module.scope is None:
        return None
    others = ("params", "batch_stats", "intermediates")  # may be written in any dtype
    names = [name for name in module.scope.variables() if name not in others]
    compute = np.dtype(policy.compute_dtype)
    dtype = widest([compute, *(leaf.dtype for name in names for leaf in own(module, name))])
    return dtype if dtype.itemsize > compute.itemsize else None


def lifted_by(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a module and those around it, with lifted transforms: `scan(block)`."""
    return () if module.scope is None else tuple(module.scope.debug_path)


# `jmpx.flax.policies`: Linen's modules under a policy map.


_NAME = "jmpx.flax.policies"
_ended: set[PolicyMap] = set()  # the policy maps of contexts that have ended


@contextlib.contextmanager
def policies(policy_map: PolicyMapLike | None = None) -> Iterator[None]:
    """Runs Linen modules under a policy map while the context lasts; also a decorator.

    Put it around `init` and `apply`, in a jitted function or around its call. Calls of public
    methods cast where a rule, a class policy or the map's default gives them a policy. A module
    that reads a parameter itself casts its floating inputs to its compute dtype in any case. A rule
    or class policy sets the `dtype` field of the layer that it selects for the call; without one
    the field is the layer's compute dtype.

    `self.param` returns the stored parameter cast to the compute dtype of the innermost policy.
    `init` creates parameters in its param dtype. Other collections, such as `batch_stats`, are left
    alone. docs/flax_linen.md has the rest.

    Contexts may be nested, and may end in any order: the innermost one alone is active. Of the
    tasks of an event loop, only one at a time can be in a context: leave it before each `await`.

    Args:
        policy_map: all that `jmpx.get_policy_map` takes, or None for the policies of classes
            alone (`jmpx.set_policy`). Paths are those of the parameters, joined by slashes.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if it is not a policy map string; if another task of the thread is in a context.

    Warns:
        UserWarning: at the end, of each rule that matched no module; if `dtype` fields keep most
            parameters from the map's compute dtype; if no Linen module ran in the first context of
            a map, as with a model of NNX, which it does not change.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jmpx.flax
        >>> model, x = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)]), jnp.ones((4, 3))
        >>> with jmpx.flax.policies("c=bf16; */layers_2: full"):
        ...     params = model.init(jax.random.key(0), x)
        ...     y = model.apply(params, x)
        >>> params["params"]["layers_0"]["kernel"].dtype.name, y.dtype.name
        ('float32', 'bfloat16')
    """
    followed = None if policy_map is None else for_modules(policy_map, _NAME)
    with pooled(followed, _NAME), applied(followed) as scope:
        yield
    scope.warn_without_linen()


def applied(policy_map: PolicyMap | None) -> contextlib.AbstractContextManager["LinenScope"]:
    """Runs Linen modules under a policy map while the context lasts; leaves warnings to a pool."""
    return in_policy_scope(LinenScope, _NAME, policy_map, _interception)


class _Call(NamedTuple):
    """A running method of a module.

    Methods that a module calls on itself, those of its base class and the body of a lifted
    transform run as part of the call that casts.
    """

    module: Module
    boundary: Policy | None  # None if the module's calls do not cast
    surrounding: Policy | None
    field: FieldInCall
    is_cast: bool = False  # whether a public method is running, whose inputs are cast already
    lifted: tuple[str, ...] = ()  # the lifted transforms in whose body the method runs
    keeps: bool = False  # whether calls inside widen their results back; see `run_cast`

    @property
    def policy(self) -> Policy | None:
        """The policy under which the method runs."""
        return self.surrounding if self.boundary is None else self.boundary

    @property
    def reading(self) -> Policy | None:
        """The policy under which the module reads its own parameters."""
        return None if self.policy is None else reading_policy(self.policy, self.field.value)


class LinenScope(PolicyScope):
    """A `policies` context."""

    def __init__(self, name: str, policy_map: PolicyMap | None) -> None:
        super().__init__(name, policy_map)
        self.calls: list[_Call] = []  # the innermost last
        self.casts = ParameterCasts()  # in the outermost of these calls
        self.has_run = False  # whether a Linen module has, in this context or in one inside

    def warn_without_linen(self) -> None:
        """Warns if no Linen module ran in the first context of a policy map.

        In later ones, functions that are compiled already run no modules.
        """
        if self.policy_map is None or self.policy_map in _ended or is_held(self.pool):
            return
        _ended.add(self.policy_map)
        if not self.has_run and not self.pool.seen:
            warnings.warn(
                f"No Linen module ran under {_NAME}({str(self.policy_map)!r}), which casts those "
                "alone: give the map to jmpx.apply_policy, or as policy= to the gradient function, "
                "which cast NNX models among the arguments.",
                stacklevel=user_stacklevel("jax", "flax"),
            )

    def intercept(
        self, module: nn.Module, method_name: str, method: Method, args: Args, kwargs: Kwargs
    ) -> PyTree:
        """Runs a method, at a boundary if it is public and its call has a policy."""
        # Interceptors do not see methods of `nn.Module` itself: this attribute hides `param`.
        object.__setattr__(module, "param", functools.partial(self.param, module))
        call = self.find_call(module)
        casts = not call.is_cast and is_public_method(type(module), method_name)
        carry = args[0] if args and self.is_step(module, method_name) else None
        state = state_dtype(module, call.reading) if casts else None
        if state is not None and own(module, "cache"):
            args, kwargs = jax.tree.map(at_least(state), (args, kwargs))
        is_cast, keeps = call.is_cast or casts, call.keeps or state is not None
        lifted, dtype = lifted_by(module), call.field.value
        if isinstance(module, nn.OptimizedLSTMCell) and call.reading is not None:
            dtype = np.dtype(call.reading.compute_dtype)  # it multiplies weights of inner modules
        self.calls.append(call._replace(is_cast=is_cast, lifted=lifted, keeps=keeps))
        try:
            with field_set(module, dtype):
                if casts:
                    self.census.note_layer(call.module, call.field)
                    return self.run_public(call, module, method, args, kwargs, carry)
                with running(call.policy, _NAME):
                    return cast_result(method(*args, **kwargs), carry)
        finally:
            self.calls.pop()
            if not self.calls:
                self.casts.clear()

    def run_public(
        self,
        call: _Call,
        module: nn.Module,
        method: Method,
        args: Args,
        kwargs: Kwargs,
        carry: PyTree,
    ) -> PyTree:
        """Runs a public method, whose inputs are cast at a boundary or if it reads parameters."""
        has_own = reads(module)
        policy = call.reading if has_own else call.policy
        if policy is not None and call.boundary is not None:
            cast = functools.partial(run_cast, policy, method, args, kwargs, is_boundary=True)
            return cast(by=_NAME, module=call.module, carry=carry)
        if call.reading is not None and (has_own or module.is_initializing()):
            result = _run_reading(call.reading, call.keeps, module, method, args, kwargs)
        else:
            with running(policy, _NAME):
                result = method(*args, **kwargs)
        return cast_result(result, carry)

    def find_call(self, module: nn.Module) -> _Call:
        """Returns the call that a method of a module begins, or the call that it is part of."""
        called = module_of(module)
        outer = self.calls[-1] if self.calls else None
        if outer is not None and outer.module == called:
            return outer
        surrounding = None if outer is None else outer.policy
        rule, boundary = self.policies_of(*called, surrounding)
        around = None if outer is None else outer.field.selected
        field = field_in_call(module, rule and rule.compute_dtype, around)
        self.record_module(*called, boundary, surrounding)
        keeps = outer is not None and outer.keeps
        return _Call(called, boundary, surrounding, field, keeps=keeps)

    def is_step(self, module: nn.Module, method_name: str) -> bool:
        """Whether a method begins a step of a loop: of a recurrent cell, or lifted by Linen."""
        lifted, outer = lifted_by(module), self.calls[-1:]
        if isinstance(module, nn.RNNCellBase) and method_name == "__call__":
            return True
        is_body = any(f"{name}(" in "".join(lifted[-1:]) for name in ("scan", "while_loop"))
        return is_body and [call.lifted for call in outer] != [lifted]

    def param(
        self, module: nn.Module, name: str, init: Method, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Replaces `module.param`: creates in the param dtype, reads in the compute dtype."""
        policy = self.calls[-1].reading if self.calls else None
        if policy is None:
            return type(module).param(module, name, init, *args, **kwargs)

        def create(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return policy.cast_to_param(init(*args, **kwargs))

        stored = type(module).param(module, name, create, *args, **kwargs)
        self.census.note_parameter(self.calls[-1].module, name, stored)
        return self.casts.to_compute(policy, stored)


def _intercept(
    method: Method, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
    """Intercepts each method call while a context of this thread is open."""
    module, scopes = context.module, opened(LinenScope)
    if module.scope is None or not scopes:
        return method(*args, **kwargs)  # without parameters, or after a context that ended early
    for scope in scopes:
        scope.has_run = True
    refuse_other_tasks(f"run the Linen module {type(module).__name__}")
    return scopes[-1].intercept(module, context.method_name, method, args, kwargs)


_interception = functools.partial(nn.intercept_methods, _intercept)  # one hook, for all contexts


def _run_reading(
    policy: Policy, keeps: bool, module: nn.Module, method: Method, args: Args, kwargs: Kwargs
) -> PyTree:
    """Runs a call that is not a boundary, of a module that reads parameters or statistics itself.

    Statistics are in float32, and would widen the results. In `init`, a module is not yet known to
    read parameters, so its result is cast in place of its inputs: a cache that is made of it gets
    the dtype that it has in later calls.
    """
    to_compute = inherited_policy(policy).cast_to_output
    called = module_of(module)
    run_reading = functools.partial(
        run_cast, policy, by=_NAME, module=called, is_boundary=False, keeps=keeps
    )

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        result = method(*args, **kwargs)
        return to_compute(result) if own(module, "batch_stats") else result

    if reads(module):
        return run_reading(run, args, kwargs)
    with running(policy, _NAME):
        result = run(*args, **kwargs)
    if not reads(module):
        return result
    inputs = jax.tree.leaves((args, kwargs))

    def created(*cast: PyTree) -> PyTree:
        is_cast = any(new is not old for new, old in zip(cast, inputs, strict=True))
        return to_compute(result) if is_cast else result

    return run_reading(created, tuple(inputs), {})


# The adapter: marks for autocast, and the dtypes of `init`.


def _create(
    method: Method, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
    """Intercepts each method call, so that new parameters get the dtypes of a `Creation`."""
    module = context.module
    if module.scope is not None and module.is_initializing() and not opened(LinenScope):
        object.__setattr__(module, "param", functools.partial(_param, module))
    return method(*args, **kwargs)


def _param(module: nn.Module, name: str, init: Method, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Replaces `module.param` in `init`."""
    creation = active_creation(LinenScope)
    if creation is None:
        return type(module).param(module, name, init, *args, **kwargs)
    asked: PyTree = None

    def create(*args: PyTree, **kwargs: PyTree) -> PyTree:
        nonlocal asked
        asked = init(*args, **kwargs)
        return creation.policy.cast_to_param(asked)

    stored = type(module).param(module, name, create, *args, **kwargs)
    if creation.are_cast:
        return creation.policy.cast_to_compute(stored)
    return stored if asked is None else jax.tree.map(cast_like, stored, asked)


def _mark(
    method: Method, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
    """Intercepts each method call under autocast, and marks those of public methods."""
    module = context.module
    if module.scope is None:
        return method(*args, **kwargs)
    called = module_of(module)
    is_public = is_public_method(type(module), context.method_name)
    with field_in_autocast(module, called), marked_call(*called) if is_public else nullcontext():
        return method(*args, **kwargs)


class _Adapter(Adapter):
    creation = staticmethod(functools.partial(nn.intercept_methods, _create))

    def marked_calls(self) -> AbstractContextManager[None]:
        return nn.intercept_methods(_mark)

    def applied(self, policy_map: PolicyMap) -> AbstractContextManager[object]:
        return applied(policy_map)


adapter: Adapter = _Adapter()
