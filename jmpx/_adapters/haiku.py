"""Haiku: policies of module classes and paths, and its own registry of class policies."""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._adapters.boundaries import (
    Args,
    Kwargs,
    Method,
    ParameterCasts,
    is_public,
    run_cast,
    widest,
)
from jmpx._adapters.scopes import (
    PolicyScope,
    active_creation,
    for_modules,
    in_policy_scope,
    pooled,
)
from jmpx._base.contexts import AUTOCAST, fact, is_hooked, note_cast, opened, refuse_other_tasks
from jmpx._base.dtypes import DTypeLike, computable, matmul_of
from jmpx._base.messages import user_stacklevel
from jmpx._base.trees import PyTree, cast_like, cast_tree, is_floating
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter, ClassPolicies, Creation, required_package
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike, Rule
from jmpx._policies.policy import Policy
from jmpx._policies.registry import marked_call, running

with required_package("haiku", "Haiku"):
    import haiku as hk

store: Any = hk.mixed_precision  # Any, because it is annotated with JMP's policies

_NAME = "jmpx.haiku.policies"

# These modules compute in the dtype of their running statistics, unless a rule or a class policy is
# about them: in bfloat16, a decay of 0.999 would be 1.
_WITH_STATISTICS = (
    hk.ExponentialMovingAverage,
    hk.SpectralNorm,
    hk.nets.VectorQuantizerEMA,
    hk.EMAParamsTree,
    hk.SNParamsTree,
)


@contextlib.contextmanager
def policies(policy_map: PolicyMapLike) -> Iterator[None]:
    """Runs Haiku modules under a policy map while the context lasts.

    Put it around `init` and `apply`, or within the function that is jitted. The map's default
    applies to each outermost module call: inputs and parameters are cast to its compute dtype, the
    result to its output dtype. A rule makes an island of every public method call of the modules
    that it matches. The innermost policy creates parameters in its param dtype, and casts the
    stored ones to its compute dtype. A state keeps the dtype in which it is stored. docs/haiku.md
    has the rest.

    Contexts may be nested, and may end in any order: the innermost one alone is active. Of the
    tasks of an event loop, only one at a time can be in a context: leave it before each `await`.

    Args:
        policy_map: all that `jmpx.get_policy_map` takes.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if it is not a policy map string; if another task of the thread is in a context.

    Warns:
        UserWarning: at the end, of each rule that matched no module.

    Example:
        >>> import haiku as hk, jax, jax.numpy as jnp, jmpx.haiku
        >>> network = hk.transform(lambda x: hk.nets.MLP([8, 2])(x))
        >>> with jmpx.haiku.policies("c=bf16,o=f32; */linear_1: full"):
        ...     params = network.init(jax.random.key(0), jnp.ones((4, 3)))
        ...     y = network.apply(params, None, jnp.ones((4, 3)))
        >>> y.dtype.name
        'float32'
    """
    followed = for_modules(get_policy_map(policy_map), _NAME)
    with pooled(followed, _NAME), applied(followed):
        yield


def applied(policy_map: PolicyMap) -> contextlib.AbstractContextManager["HaikuScope"]:
    """Runs Haiku modules under a policy map while the context lasts; leaves warnings to a pool."""
    return in_policy_scope(HaikuScope, _NAME, policy_map, interception)


class _Call(NamedTuple):
    """A running method that casts."""

    module: hk.Module
    policy: Policy
    own: Policy  # for the parameters of the module itself


class HaikuScope(PolicyScope):
    """A `policies` context.

    Inside of it, jmpx casts by the policies of classes, too, and takes them out of Haiku's registry
    until the end: Haiku would round a parameter before a rule reads it, and an input before a rule
    overrides the policy of its class.
    """

    def __init__(self, name: str, policy_map: PolicyMap) -> None:
        super().__init__(name, policy_map)
        self.default = policy_map.default
        self.calls: list[_Call] = []  # those that cast, the innermost last
        self.casts = ParameterCasts()  # in the outermost of these calls
        self.class_policies: dict[type, Policy] = {}  # that were taken out of Haiku's registry

    @property
    def policy(self) -> Policy | None:
        """The policy of the innermost call; None outside of all calls."""
        return self.calls[-1].policy if self.calls else None

    def take_over(self, cls: type[hk.Module]) -> None:
        """Takes the policy of a class out of Haiku's registry."""
        policy = store.get_policy(cls)
        if policy is not None:
            self.class_policies[cls] = policy
            store.clear_policy(cls)

    def give_back(self) -> None:
        """Puts the policies of classes back into Haiku's registry."""
        for cls, policy in self.class_policies.items():
            if store.get_policy(cls) is None:
                store.set_policy(cls, policy)

    def intercept(
        self, method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext
    ) -> PyTree:
        """Runs a method, at a boundary if its call has a policy."""
        module = context.module
        self.take_over(type(module))
        is_part = any(call.module is module for call in self.calls)  # of a call that casts
        is_lift = hasattr(
            module, "prefix_name"
        )  # of `hk.lift`: takes and returns stored parameters
        if is_part or is_lift or not is_public(context.method_name):
            return method(*args, **kwargs)
        policy = self.call_policy(module)
        self.record_module(type(module), module.module_name, policy, self.policy)
        old = _state_of_core(args, kwargs, context)
        if old is None:
            return self.run(module, policy, method, args, kwargs)
        new: list[PyTree] = []

        def output(*args: PyTree, **kwargs: PyTree) -> PyTree:
            result, state = method(*args, **kwargs)
            new.append(state)
            return result

        return self.run(module, policy, output, args, kwargs), _like(new[0], old)

    def run(
        self, module: hk.Module, boundary: Policy | None, method: Method, args: Args, kwargs: Kwargs
    ) -> PyTree:
        """Runs a method at a boundary, or, without a boundary policy, as one that may read."""
        policy = boundary or self.calls[-1].policy
        call, called = _Call(module, policy, policy), Module(type(module), module.module_name)
        cast = functools.partial(run_cast, policy, method, args, kwargs, by=_NAME, module=called)
        if boundary is not None:
            with self.called(call):
                return cast(is_boundary=True)
        if hk.running_init():
            # Whether it will have parameters is not known yet. The arguments are not cast, and
            # parameters are read as wide as these: a convolution refuses two dtypes.
            with self.called(call._replace(own=_as_wide_as(policy, (args, kwargs)))):
                return method(*args, **kwargs)
        if not _owns_parameters(module):
            return method(*args, **kwargs)
        with self.called(call):
            return cast(is_boundary=False)

    def call_policy(self, module: hk.Module) -> Policy | None:
        """Returns the boundary policy of a call of a module."""
        cls = type(module)
        own, policy = self.policies_of(cls, module.module_name, self.policy)
        if own is not None or not isinstance(module, _WITH_STATISTICS):
            return policy
        states = filter(is_floating, jax.tree.leaves(_stored_states(module)))
        stored = [state.dtype for state in states] or [_state_dtype(self.default)]
        dtype = computable(widest(stored))
        return Rule(cls.__name__, compute=dtype).resolve(self.default, self.policy)

    @contextlib.contextmanager
    def called(self, call: _Call) -> Iterator[None]:
        """Makes a call the innermost one; inside of the outermost one, parameters are cast."""
        with contextlib.ExitStack() as stack:
            if not self.calls:
                creator, getter = parameter_hooks(
                    lambda: self.calls[-1].policy.param_dtype,
                    lambda value, _: self.casts.to_compute(self.calls[-1].own, value),
                )
                stack.enter_context(creator)
                stack.enter_context(getter)
                stack.callback(self.casts.clear)
            self.calls.append(call)
            stack.callback(self.calls.pop)
            yield

    def keep_state(self, value: PyTree, context: hk.SetterContext) -> PyTree:
        """Returns the new value of a state in the dtypes in which the state is stored.

        A first value in a 16-bit dtype of the innermost policy gets the dtype of new state.
        """
        stored = _stored_states(context.module).get(context.full_name)
        if stored is not None:
            return _like(value, stored)
        policy = self.policy or self.default
        own = [np.dtype(dtype) for dtype in (policy.compute_dtype, policy.output_dtype)]

        def widened(leaf: PyTree) -> PyTree:
            is_cast = is_floating(leaf) and leaf.dtype.itemsize < 4 and leaf.dtype in own
            return cast_tree(leaf, _state_dtype(policy)) if is_cast else leaf

        return jax.tree.map(widened, value)


def parameter_hooks(
    param_dtype: Callable[[], DTypeLike | None],
    read: Callable[[jax.Array, hk.GetterContext], jax.Array],
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Returns the creator of floating parameters, and the getter of parameters.

    `param_dtype` may return None, for the dtype that is asked for.
    """

    def create(
        next_creator: Callable[..., jax.Array],
        shape: Sequence[int],
        dtype: DTypeLike,
        init: hk.initializers.Initializer,
        context: hk.GetterContext,
    ) -> jax.Array:
        del context
        own = param_dtype() if jnp.issubdtype(dtype, jnp.floating) else None
        return next_creator(shape, dtype if own is None else own, init)

    def get(
        next_getter: Callable[[jax.Array], jax.Array], value: jax.Array, context: hk.GetterContext
    ) -> jax.Array:
        return next_getter(read(value, context))

    return hk.custom_creator(create), hk.custom_getter(get)


_params_dict = inspect.unwrap(hk.Module.params_dict)  # unwrapped: interceptors see no call
_state_dict = inspect.unwrap(hk.Module.state_dict)


def _owns_parameters(module: hk.Module) -> bool:
    """Whether a module itself has floating parameters."""
    inside = _params_dict(module)
    names = (name for name in inside if name.rpartition("/")[0] == module.module_name)
    return any(is_floating(leaf) for name in names for leaf in jax.tree.leaves(inside[name]))


def _as_wide_as(policy: Policy, args: PyTree) -> Policy:
    """Returns a policy that computes in the widest floating dtype of its own and of arguments."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(args) if is_floating(leaf)]
    own = np.dtype(policy.compute_dtype)
    return dataclasses.replace(policy, compute_dtype=widest([own, *dtypes]))


def _state_of_core(args: Args, kwargs: Kwargs, context: hk.MethodContext) -> PyTree:
    """Returns the state in the arguments of a step of a recurrent core; None for other calls."""
    if not isinstance(context.module, hk.RNNCore) or context.method_name != "__call__":
        return None
    return args[1] if len(args) > 1 else kwargs.get("prev_state", kwargs.get("state"))


def _like(new: PyTree, old: PyTree) -> PyTree:
    """Returns a pytree in the dtypes of an old one if their structures are equal."""
    is_same = jax.tree.structure(new) == jax.tree.structure(old)
    return jax.tree.map(cast_like, new, old) if is_same else new


def _stored_states(module: hk.Module | None) -> Mapping[str, PyTree]:
    """Returns the states in a module by their full names, past the getters of the user."""
    if module is not None:
        return _state_dict(module)
    return {f"~/{name}": state for name, state in hk.get_current_state().get("~", {}).items()}


def _state_dtype(policy: Policy) -> np.dtype:
    """Returns the dtype of new state: the param dtype, but at least float32."""
    return widest([np.dtype(np.float32), np.dtype(policy.param_dtype)])


def _intercept(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> PyTree:
    """Intercepts each method call while a context of this thread is open."""
    cls, scopes = type(context.module), opened(HaikuScope)
    refuse_other_tasks(f"run the Haiku module {cls.__name__}")
    if scopes:
        return scopes[-1].intercept(method, args, kwargs, context)
    policy = store.get_policy(cls)
    if policy is None or fact(AUTOCAST) is not None:  # the call's mark tells autocast of it
        return method(*args, **kwargs)
    # Haiku casts by it, but does not know `matmul`.
    with running(policy, "hk.mixed_precision"):
        return method(*args, **kwargs)


def _set_state(next_setter: Method, value: PyTree, context: hk.SetterContext) -> PyTree:
    """Decides last about the new value of a state, after the user's setters."""
    value, scopes = next_setter(value), opened(HaikuScope)
    return scopes[-1].keep_state(value, context) if scopes else value


# Haiku makes setters only inside of a transformed function, but they work outside of it, too.
_state_hook = hk.transform(lambda: hk.custom_setter(_set_state))


@contextlib.contextmanager
def interception() -> Iterator[None]:
    """Intercepts method calls, and writes of state, in this thread."""
    with hk.intercept_methods(_intercept), _state_hook.apply({}, None):
        yield


# The adapter: Haiku's registry of class policies, marks for autocast, and the dtypes of `init`.


class _ClassPolicies:
    """Haiku's own registry of class policies, and the policies that scopes took out of it."""

    def get(self, cls: type) -> Policy | None:
        taken = (scope.class_policies.get(cls) for scope in opened(HaikuScope))
        kept = (policy for policy in taken if policy is not None)
        return store.get_policy(cls) or next(kept, None)

    def set(self, cls: type, policy: Policy) -> None:
        store.set_policy(cls, policy)
        if matmul_of(policy) is not None and not is_hooked(interception):
            warnings.warn(
                f"matmul={matmul_of(policy)} of the policy of {cls.__name__} holds in jmpx's "
                "contexts alone, because Haiku itself does not know of it: attach the policy by "
                "jmpx.push_policy, or write a rule for the class into a policy map.",
                stacklevel=user_stacklevel(),
            )

    def clear(self, cls: type) -> None:
        store.clear_policy(cls)
        for scope in opened(HaikuScope):
            scope.class_policies.pop(cls, None)

    def check_push(self, cls: type, policy: Policy) -> None:
        """Raises Haiku's error inside of a method of the class."""
        with store.push_policy(cls, policy):
            pass

    interception = staticmethod(interception)  # the hook of `policies`, so that they share it


def _active_creation() -> Creation | None:
    """Returns the active `Creation`; None where a module has a policy."""
    has_policy = store.current_policy() is not None
    return None if has_policy else active_creation(HaikuScope)


def _read_created(value: jax.Array, context: hk.GetterContext) -> jax.Array:
    """Returns a new parameter in the dtype in which it will be read."""
    creation = _active_creation() if hk.running_init() else None
    if creation is None or not is_floating(value):
        return value
    compute = creation.policy.compute_dtype
    return value.astype(compute if creation.are_cast else context.original_dtype)


def _param_dtype() -> DTypeLike | None:
    creation = _active_creation()
    return None if creation is None else creation.policy.param_dtype


# As `_state_hook`: Haiku makes getters and creators only inside of a transformed function.
_creation_hooks = hk.transform(lambda: parameter_hooks(_param_dtype, _read_created))


@contextlib.contextmanager
def _creation() -> Iterator[None]:
    """Has parameters in this thread created by the active `Creation`."""
    creator, getter = _creation_hooks.apply({}, None)
    with creator, getter:
        yield


def _note(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> PyTree:
    """Notes each call that Haiku itself casts by the policy of its class."""
    policy = store.get_policy(type(context.module))
    if policy is not None:
        note_cast("hk.mixed_precision", policy.compute_dtype)
    return method(*args, **kwargs)


def _mark(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> PyTree:
    """Intercepts each method call under autocast, and marks those of public methods."""
    if not is_public(context.method_name):
        return method(*args, **kwargs)
    with marked_call(type(context.module), context.module.module_name):
        return method(*args, **kwargs)


class _Adapter(Adapter):
    class_policies: ClassPolicies | None = _ClassPolicies()
    creation = staticmethod(_creation)

    def current_policy(self) -> Policy | None:
        return store.current_policy()

    def held(self) -> list[PyTree]:
        try:
            return jax.tree.leaves((hk.get_params(), hk.get_current_state()))
        except ValueError:  # outside of a transformed function
            return []

    def noted_casts(self) -> AbstractContextManager[None]:
        return hk.intercept_methods(_note)

    def marked_calls(self) -> AbstractContextManager[None]:
        return hk.intercept_methods(_mark)

    def applied(self, policy_map: PolicyMap) -> AbstractContextManager[object]:
        return applied(policy_map)


adapter: Adapter = _Adapter()
