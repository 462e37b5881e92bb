"""Haiku: policies of module classes and paths.

The policies of Haiku's module classes stay in Haiku's own registry: `jmpx.set_policy` and the other
functions of jmpx's registry read and write it, so `hk.mixed_precision` and jmpx never disagree.
`policies` puts a policy map over `init` and `apply`.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._adapters.parameter_casts import ParameterCasts
from jmpx._adapters.sessions import (
    Args,
    Kwargs,
    Method,
    PolicyScope,
    PyTree,
    in_policy_scope,
    is_public,
    noted_carries,
    pooled,
    required_package,
    run_at_boundary,
    run_reading,
)
from jmpx._base.casts import cast_like, cast_tree
from jmpx._base.contexts import Context, entered, note_cast, opened, refuse_other_tasks
from jmpx._base.dtypes import computable
from jmpx._base.leaves import is_floating
from jmpx._jaxprs.marks import in_module
from jmpx._policies.frameworks import Adapter, ClassPolicies
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike, Rule
from jmpx._policies.policy import Policy

with required_package("haiku", "Haiku"):
    import haiku as hk

    from jmpx._adapters.haiku_matmul import (
        hooked,
        is_convolution,
        keep_intercepting,
        note_policy,
        run_method,
    )

__all__ = ("policies",)

_store: Any = hk.mixed_precision  # Any, because it is annotated with JMP's policies

_NAME = "jmpx.haiku.policies"

_params_dict = inspect.unwrap(hk.Module.params_dict)  # interceptors are not to see the call

# These modules compute in the dtype of their running statistics, unless a rule or a class policy is
# about them: in bfloat16, a decay of 0.999 would be 1. The value is the name of the state that they
# keep, empty for the modules of trees, whose state belongs to the modules in the tree.
_STATISTICS = {
    hk.ExponentialMovingAverage: "hidden",
    hk.SpectralNorm: "u0",
    hk.nets.VectorQuantizerEMA: "embeddings",
    hk.EMAParamsTree: "",
    hk.SNParamsTree: "",
}


@contextlib.contextmanager
def policies(policy_map: PolicyMapLike) -> Iterator[None]:
    """Runs Haiku modules under a policy map while the context lasts.

    Put it around `init` and `apply`, or within the function that is jitted. The map's default
    applies to each outermost module call: inputs and parameters are cast to its compute dtype, the
    result to its output dtype. A rule makes an island of every public method call of the modules
    that it matches, by class (`BatchNorm`) or by Haiku's path (`*/logits`, `mlp/~/linear_0`), so
    that it can name one instance among many. The innermost policy creates parameters in its param
    dtype, and casts the stored ones to its compute dtype. The policy of a class applies where no
    rule of the map matches; it goes before the default.

    Any other module with floating parameters of its own casts its floating arguments to the compute
    dtype around it, so that noise, a one-hot or a state of zeros that is made inside does not widen
    what follows. Within JAX's loops and branches it returns at least the dtype that came in, as a
    carry has to keep its dtype. A recurrent core (`hk.RNNCore`) returns its state in the dtype in
    which it came. `init` creates the parameters, so there it casts no arguments of such modules.

    A state keeps the dtype in which it is stored, whatever `hk.set_state` is given. A state that is
    first set in a 16-bit dtype of the policy is stored in the param dtype, or in float32 where that
    is narrower. `ExponentialMovingAverage`, `SpectralNorm`, their trees and `VectorQuantizerEMA`
    compute in the dtype of their state, unless a rule or a class policy is about them.

    The `matmul` of a policy holds for the products in its region, forward and backward, but not in
    what a `jax.custom_vjp` or `jax.custom_jvp` defines: JAX traces that later. See docs/matmul.md.

    Contexts may be nested, and may end in any order: the innermost one alone is in force. Of the
    tasks of an event loop, only one at a time can be in a context: leave it before each `await`.
    Code that is compiled already runs in every task as in the one that holds the context.

    A jitted function is traced anew under another map, and under other policies set by jmpx, but
    not under other policies set by `hk.mixed_precision` itself.

    Args:
        policy_map: all that `jmpx.get_policy_map` takes.

    Yields:
        None.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if it is not a policy map string; if another task of the thread is in a context
            of jmpx at entry, or runs a module while this context lasts.

    Warns:
        UserWarning: at the end, of each rule that matched no module; once if a convolution ran in
            float32 under a dot algorithm, which JAX ignores for it.

    Example:
        >>> import haiku as hk, jax, jax.numpy as jnp
        >>> import jmpx.haiku
        >>> network = hk.transform(lambda x: hk.nets.MLP([8, 2])(x))
        >>> with jmpx.haiku.policies("c=bf16,o=f32; */linear_1: full"):
        ...     params = network.init(jax.random.key(0), jnp.ones((4, 3)))
        ...     y = network.apply(params, None, jnp.ones((4, 3)))
        >>> y.dtype.name
        'float32'
    """
    with pooled(get_policy_map(policy_map), _NAME) as followed, _applied(followed):
        yield


@contextlib.contextmanager
def _applied(policy_map: PolicyMap) -> Iterator[None]:
    """Runs Haiku modules under a policy map while the context lasts; leaves warnings to a pool."""
    # A loop around the outermost module, as that of `hk.layer_stack` may be, is in no other call.
    with (
        in_policy_scope(_PolicyScope, _NAME, policy_map, _interception),
        noted_carries(hk.Module, None),
    ):
        yield


class _Call(NamedTuple):
    """A running method that casts.

    Args:
        module: its module.
        policy: the policy of the modules inside.
        own: the policy by which the parameters of the module itself are cast.
    """

    module: hk.Module
    policy: Policy
    own: Policy


class _PolicyScope(PolicyScope):
    """A `policies` context.

    Inside of it, jmpx casts by the policies of classes, too, and Haiku's registry is without them
    until the end: Haiku would round a parameter before a rule reads it, and an input before a rule
    of the map overrides the policy of its class.

    Attributes:
        default: the default of the policy map.
        calls: the calls that cast, the innermost last.
        casts: the casts of parameters in the outermost of these calls.
        owners: the modules that had floating parameters when that began, by their names.
        class_policies: the policies that were taken out of Haiku's registry.
        is_reading: whether state is to be read as it is stored.
    """

    def __init__(self, name: str, policy_map: PolicyMap) -> None:
        super().__init__(name, policy_map)
        self.default = policy_map.default
        self.calls: list[_Call] = []
        self.casts = ParameterCasts()
        self.owners: frozenset[str] = frozenset()
        self.class_policies: dict[type, Policy] = {}
        self.is_reading = False

    def take_over(self, cls: type) -> None:
        """Takes the policy of a class out of Haiku's registry."""
        policy = _store.get_policy(cls)
        if policy is not None:
            self.class_policies[cls] = policy
            _store.clear_policy(cls)

    def give_back(self) -> None:
        """Puts the policies of classes back into Haiku's registry."""
        for cls, policy in self.class_policies.items():
            if _store.get_policy(cls) is None:
                _store.set_policy(cls, policy)

    def intercept(
        self, method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext
    ) -> Any:
        """Runs a method, at a boundary if its call has a policy."""
        module = context.module
        self.take_over(type(module))
        is_part = any(call.module is module for call in self.calls)  # of a call that casts
        if is_part or not is_public(context.method_name) or _is_lift(module):
            return method(*args, **kwargs)
        policy = self.call_policy(module)
        outer = self.calls[-1].policy if self.calls else None
        self.record_module(type(module), module.module_name, policy, outer)
        if is_convolution(context, kwargs):
            in_force = outer if policy is None else policy
            self.note_convolution(type(module), module.module_name, in_force)
        carry = _state_of_core(args, kwargs, context)
        if policy is None:
            run = functools.partial(self.run_inside, module)
        else:
            run = functools.partial(self.run_at_boundary, _Call(module, policy, policy), carry)
        if carry is None:
            return run(method, args, kwargs)
        return _with_state_like(carry, run(_state_first(method), args, kwargs))

    def run_at_boundary(
        self, call: _Call, carry: PyTree, method: Method, args: Args, kwargs: Kwargs
    ) -> Any:
        """Runs a method at a boundary."""
        with self.called(call):
            return run_at_boundary(call.policy, method, args, kwargs, by=_NAME, carry=carry)

    def run_inside(self, module: hk.Module, method: Method, args: Args, kwargs: Kwargs) -> Any:
        """Runs a method that is no boundary, of a module that may read parameters itself."""
        policy = self.calls[-1].policy
        if hk.running_init():
            # No module has parameters yet. So they come as wide as the arguments, which are not
            # cast: an operation that refuses two dtypes, such as a convolution, gets one.
            with self.called(_Call(module, policy, _as_wide_as(policy, (args, kwargs)))):
                return method(*args, **kwargs)
        if module.module_name not in self.owners and not _owns_parameters(module):
            return method(*args, **kwargs)
        with self.called(_Call(module, policy, policy)):
            return run_reading(policy, method, args, kwargs, by=_NAME)

    def call_policy(self, module: hk.Module) -> Policy | None:
        """Returns the boundary policy of a call of a module."""
        cls, path = type(module), module.module_name
        surrounding = self.calls[-1].policy if self.calls else None
        policy = self.boundary_policy(cls, path, surrounding)
        states = [state for base, state in _STATISTICS.items() if isinstance(module, base)]
        if not states or self.explicit_policy(cls, path, surrounding) is not None:
            return policy
        stored = [leaf for leaf in jax.tree.leaves(self.stored(states[0])) if is_floating(leaf)]
        dtype = computable(stored[0].dtype if stored else _state_dtype(self.default))
        return Rule(cls.__name__, compute=dtype).resolve(self.default, surrounding)

    @contextlib.contextmanager
    def called(self, call: _Call) -> Iterator[None]:
        """Makes a call the innermost one; inside of the outermost one, parameters are cast."""
        with contextlib.ExitStack() as stack:
            if not self.calls:
                stack.enter_context(hk.custom_creator(self.create))
                stack.enter_context(hk.custom_getter(self.get))
                stack.callback(self.casts.clear)
                self.owners = _owners()
            stack.enter_context(noted_carries(type(call.module), call.policy))
            self.calls.append(call)
            stack.callback(self.calls.pop)
            yield

    def create(
        self,
        next_creator: Callable[..., jax.Array],
        shape: Sequence[int],
        dtype: Any,
        init: hk.initializers.Initializer,
        context: hk.GetterContext,
    ) -> jax.Array:
        """Creates floating parameters in the param dtype of the innermost call."""
        del context
        if jnp.issubdtype(dtype, jnp.floating):
            dtype = self.calls[-1].policy.param_dtype
        return next_creator(shape, dtype, init)

    def get(
        self,
        next_getter: Callable[[jax.Array], jax.Array],
        value: jax.Array,
        context: hk.GetterContext,
    ) -> jax.Array:
        """Casts a stored parameter to the compute dtype of the innermost call."""
        del context
        return next_getter(self.casts.to_compute(self.calls[-1].own, value))

    def stored(self, name: str) -> PyTree:
        """Returns a state of the running module as it is stored; None without one."""
        self.is_reading = True
        try:
            return hk.get_state(name)
        except ValueError:
            return None
        finally:
            self.is_reading = False

    def keep_state(self, value: PyTree, name: str) -> PyTree:
        """Returns the new value of a state in the dtypes in which the state is stored.

        The first value defines the state. If it comes in a 16-bit dtype of the innermost policy, it
        is stored in the dtype that it would have without policies.
        """
        stored = self.stored(name)
        if stored is None:
            policy = self.calls[-1].policy if self.calls else self.default
            return jax.tree.map(lambda leaf: _first_state(leaf, policy), value)
        if jax.tree.structure(value) != jax.tree.structure(stored):
            return value
        return jax.tree.map(cast_like, value, stored)


def _owners() -> frozenset[str]:
    """Returns the names of the modules that have floating parameters."""
    own = {} if hk.running_init() else hk.get_params()
    return frozenset(name for name, each in own.items() if any(map(is_floating, each.values())))


def _owns_parameters(module: hk.Module) -> bool:
    """Whether a module itself has floating parameters, which a transform inside may hold."""
    inside = _params_dict(module)
    names = (name for name in inside if name.rpartition("/")[0] == module.module_name)
    return any(is_floating(leaf) for name in names for leaf in jax.tree.leaves(inside[name]))


def _is_lift(module: hk.Module) -> bool:
    """Whether `hk.lift` or `hk.layer_stack` made it: it takes and returns stored parameters."""
    return hasattr(module, "prefix_name")  # its class is not public


def _as_wide_as(policy: Policy, args: PyTree) -> Policy:
    """Returns a policy that computes in the widest floating dtype of its own and of arguments."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(args) if is_floating(leaf)]
    own = jnp.dtype(policy.compute_dtype)
    widest = max([own, *dtypes], key=lambda dtype: dtype.itemsize)
    return dataclasses.replace(policy, compute_dtype=widest)


def _state_of_core(args: Args, kwargs: Kwargs, context: hk.MethodContext) -> PyTree:
    """Returns the state in the arguments of a step of a recurrent core; None for other calls."""
    if not isinstance(context.module, hk.RNNCore) or context.method_name != "__call__":
        return None
    named = (kwargs[name] for name in ("prev_state", "state") if name in kwargs)
    return next(itertools.chain(args[1:2], named), None)


def _state_first(method: Method) -> Method:
    """Returns the step of a core with its new state before its output, as loops have a carry."""
    return lambda *args, **kwargs: _reversed_pair(method(*args, **kwargs))


def _with_state_like(old: PyTree, result: Any) -> Any:
    """Returns the output of a step of a core and its new state, in the dtypes of the old one."""
    pair = _reversed_pair(result)
    if pair is result or jax.tree.structure(pair[1]) != jax.tree.structure(old):
        return pair
    return pair[0], jax.tree.map(cast_like, pair[1], old)


def _reversed_pair(result: Any) -> Any:
    return result[::-1] if isinstance(result, tuple) and len(result) == 2 else result


def _state_dtype(policy: Policy) -> np.dtype:
    """Returns the dtype of new state: that of new parameters, but at least float32."""
    stored = jnp.dtype(policy.param_dtype)
    return jnp.dtype(jnp.float32) if stored.itemsize < 4 else stored


def _first_state(leaf: Any, policy: Policy) -> Any:
    """Casts a leaf to the dtype of new state, if it is in a 16-bit dtype of the policy."""
    dtypes = [jnp.dtype(dtype) for dtype in (policy.compute_dtype, policy.output_dtype)]
    is_cast = is_floating(leaf) and leaf.dtype.itemsize < 4 and leaf.dtype in dtypes
    return cast_tree(leaf, _state_dtype(policy)) if is_cast else leaf


def _intercept(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> Any:
    """Intercepts each method call while a context of this thread is open."""
    refuse_other_tasks(f"run the Haiku module {type(context.module).__name__}")
    sessions = opened(_PolicyScope)
    if not sessions:
        return run_method(method, args, kwargs, context)
    return sessions[-1].intercept(method, args, kwargs, context)


def _set_state(next_setter: Callable[..., Any], value: PyTree, context: Any) -> PyTree:
    """Decides last about the new value of a state, after the user's setters."""
    value, sessions = next_setter(value), opened(_PolicyScope)
    if not sessions:
        return value
    return sessions[-1].keep_state(value, context.full_name.removeprefix(f"{hk.current_name()}/"))


def _get_state(next_getter: Callable[..., Any], value: PyTree, context: Any) -> PyTree:
    """Reads a state before the user's getters do, which may cast it."""
    del context
    sessions = opened(_PolicyScope)
    return value if sessions and sessions[-1].is_reading else next_getter(value)


# Haiku makes getters and setters only inside of a transformed function, but they work after it.
_state_hooks: Any = hk.transform(
    lambda: (hk.custom_getter(_get_state, params=False, state=True), hk.custom_setter(_set_state))
)


@contextlib.contextmanager
def _interception() -> Iterator[None]:
    """Intercepts method calls, and reads and writes of state, in this thread."""
    getter, setter = _state_hooks.apply({}, None)
    try:
        with hooked(), hk.intercept_methods(_intercept), getter, setter:
            yield
    finally:
        keep_intercepting()


class _Creation(NamedTuple):
    """How parameters are created where no module has a policy; see `Adapter.created`."""

    policy: Policy
    are_cast: bool


def _creation_in_force() -> _Creation | None:
    """Returns the innermost `_Creation`; None without one, or where a module has a policy."""
    has_policy = opened(_PolicyScope) or _store.current_policy() is not None
    return None if has_policy else next(reversed(opened(_Creation)), None)


def _create(
    next_creator: Callable[..., jax.Array],
    shape: Sequence[int],
    dtype: Any,
    init: hk.initializers.Initializer,
    context: hk.GetterContext,
) -> jax.Array:
    """Creates floating parameters in the param dtype."""
    del context
    creation = _creation_in_force()
    if creation is not None and jnp.issubdtype(dtype, jnp.floating):
        dtype = creation.policy.param_dtype
    return next_creator(shape, dtype, init)


def _read_created(
    next_getter: Callable[[jax.Array], jax.Array], value: jax.Array, context: hk.GetterContext
) -> jax.Array:
    """Reads parameters that are created in the dtype in which they are read later."""
    creation = _creation_in_force() if hk.running_init() else None
    if creation is not None and is_floating(value):
        compute = creation.policy.compute_dtype
        value = value.astype(compute if creation.are_cast else context.original_dtype)
    return next_getter(value)


# As for state: Haiku makes getters and creators only inside of a transformed function.
_creation_hooks: Any = hk.transform(
    lambda: (hk.custom_creator(_create), hk.custom_getter(_read_created))
)


@contextlib.contextmanager
def _creation() -> Iterator[None]:
    """Creates the parameters of this thread."""
    creator, getter = _creation_hooks.apply({}, None)
    with creator, getter:
        yield


class _ClassPolicies:
    """Haiku's own registry of class policies, and what sessions have taken out of it."""

    def get(self, cls: type) -> Policy | None:
        sessions = opened(_PolicyScope)
        taken = (s.class_policies[cls] for s in sessions if cls in s.class_policies)
        return _store.get_policy(cls) or next(taken, None)

    def set(self, cls: type, policy: Policy) -> None:
        _store.set_policy(cls, policy)
        note_policy(cls, policy)

    def clear(self, cls: type) -> None:
        _store.clear_policy(cls)
        note_policy(cls, None)
        for session in opened(_PolicyScope):
            session.class_policies.pop(cls, None)

    def check_push(self, cls: type, policy: Policy) -> None:
        """Raises Haiku's error inside of a method of the class."""
        with _store.push_policy(cls, policy):
            pass

    interception = staticmethod(_interception)  # the hook of `policies`, so that they share it


def _note(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> Any:
    """Notes the calls that Haiku itself runs under the policy of their class."""
    if _store.get_policy(type(context.module)) is not None:
        note_cast("hk.mixed_precision")
    return method(*args, **kwargs)


def _mark(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> Any:
    """Intercepts each method call under autocast, and marks those of public methods."""
    if not is_public(context.method_name):
        return method(*args, **kwargs)
    with in_module(type(context.module), context.module.module_name):
        return method(*args, **kwargs)


def _refuse(next_setter: Callable[..., Any], *values: Any) -> Any:
    """Refuses to create a parameter or to set a state under autocast."""
    name = values[-1].full_name
    raise ValueError(
        f"Cannot create the Haiku parameter or set the state {name!r} under autocast, which it "
        "could not leave: give transformed.apply to jmpx.autocast or jmpx.apply_policy, not the "
        "function that is transformed."
    )


def _is_in_transform() -> bool:
    try:
        hk.running_init()
    except ValueError:
        return False
    return True


class _Adapter(Adapter):
    class_policies: ClassPolicies | None = _ClassPolicies()

    def current_policy(self) -> Policy | None:
        return _store.current_policy()

    def noted_casts(self) -> contextlib.AbstractContextManager[None]:
        return hk.intercept_methods(_note)

    def marked_calls(self) -> contextlib.AbstractContextManager[None]:
        return hk.intercept_methods(_mark)

    def applied(self, policy_map: PolicyMap) -> contextlib.AbstractContextManager[None]:
        return _applied(policy_map)

    def created(self, policy: Policy, are_cast: bool) -> contextlib.AbstractContextManager[None]:
        creation = _Creation(policy, are_cast)
        return entered(Context("jmpx.apply_policy in Haiku", creation, creation, _creation))

    @contextlib.contextmanager
    def refuse_creation(self) -> Iterator[None]:
        if not _is_in_transform():
            yield
            return
        with hk.custom_creator(_refuse, state=True), hk.custom_setter(_refuse):
            yield


adapter: Adapter = _Adapter()
