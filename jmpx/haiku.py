"""Haiku: policies of module classes and paths.

Class policies are kept in Haiku's own registry: `jmpx.set_policy` and its kin come here for every
Haiku module class, so `hk.mixed_precision` and jmpx never disagree. `policies` puts a policy map
over `init` and `apply`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmpx._casts import cast_like, cast_tree
from jmpx._contexts import Context, entered, opened, opened_here, refuse_other_tasks
from jmpx._dtypes import computable
from jmpx._leaves import is_floating
from jmpx._marks import in_module
from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, get_policy_map, warn_unused
from jmpx._registry import policy_for, running

try:
    import haiku as hk
except ModuleNotFoundError as error:
    if error.name != "haiku":
        raise
    raise ModuleNotFoundError(
        "jmpx.haiku needs Haiku, which is not installed: pip install 'jmpx[haiku]'.", name="haiku"
    ) from None

_store: Any = hk.mixed_precision  # Any, because it is annotated with JMP's policies

_NAME = "jmpx.haiku.policies"

# Modules that compute in the dtype of their state by default, and the name of such a state. In
# bfloat16, a decay of 0.999 would be 1. The state of a tree is that of the modules in it.
_STATISTICS = {
    hk.ExponentialMovingAverage: "hidden",
    hk.SpectralNorm: "u0",
    hk.nets.VectorQuantizerEMA: "embeddings",
    hk.EMAParamsTree: "",
    hk.SNParamsTree: "",
}


class _Call(NamedTuple):
    """A module whose method runs, and the policy that it runs under."""

    module: hk.Module
    policy: Policy


class _Run:
    """What one `policies` context knows.

    Inside of it, the policies of classes are applied here, too, and taken out of Haiku's registry
    until the end: Haiku would round a parameter before a rule sees it, and an input before a rule
    of the map overrides the policy of its class.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.policy_map = policy_map
        self.calls: list[_Call] = []
        self.class_policies: dict[type, Policy] = {}
        self.seen: dict[tuple[type, str], None] = {}
        self.is_reading = False  # whether state is to be read as it is stored

    def take_over(self, cls: type) -> None:
        policy = _store.get_policy(cls)
        if policy is not None:
            self.class_policies[cls] = policy
            _store.clear_policy(cls)

    def give_back(self) -> None:
        if self.class_policies:
            opened_here(_NAME, self)
        for cls, policy in self.class_policies.items():
            if _store.get_policy(cls) is None:
                _store.set_policy(cls, policy)

    def policy_of_call(self, module: hk.Module) -> Policy | None:
        """Returns the policy at whose boundary a call of `module` casts."""
        cls, path = type(module), module.module_name
        surrounding = self.calls[-1].policy if self.calls else None
        self.seen[cls, path] = None
        if self.policy_map.rule_for(cls, path) is None and policy_of(cls) is None:
            for base, state in _STATISTICS.items():
                if isinstance(module, base):
                    return self.policy_of_statistics(state, surrounding)
        return policy_for(self.policy_map, cls, path, surrounding)

    def policy_of_statistics(self, state: str, surrounding: Policy | None) -> Policy:
        """Returns the policy of a running module that keeps statistics, by a state of its own."""
        default = self.policy_map.default
        stored = [leaf.dtype for leaf in jax.tree.leaves(self.stored(state)) if is_floating(leaf)]
        dtype = computable(stored[0] if stored else _state_dtype(default))
        output = default.output_dtype if surrounding is None else surrounding.compute_dtype
        return Policy(default.param_dtype, dtype, output)

    def intercept(self, next_f: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        """Casts at the boundary of a call that has a policy."""
        module, method = context.module, context.method_name
        self.take_over(type(module))
        public = method == "__call__" or not method.startswith("_")
        inside = any(call.module is module for call in self.calls)
        if inside or not public:
            return next_f(*args, **kwargs)
        policy = self.policy_of_call(module)
        if policy is None:
            return next_f(*args, **kwargs)
        with self.call(_Call(module, policy)), running(policy, _NAME):
            args, kwargs = policy.cast_to_compute((args, kwargs))
            return policy.cast_to_output(next_f(*args, **kwargs))

    @contextlib.contextmanager
    def call(self, call: _Call) -> Iterator[None]:
        """Makes `call` the innermost one; around the outermost, parameters are cast."""
        with contextlib.ExitStack() as stack:
            if not self.calls:
                stack.enter_context(hk.custom_creator(self.create))
                stack.enter_context(hk.custom_getter(self.get))
            self.calls.append(call)
            stack.callback(self.calls.pop)
            yield

    def create(self, next_creator: Any, shape: Any, dtype: Any, init: Any, context: Any) -> Any:
        """Creates floating parameters in the param dtype."""
        del context
        if jnp.issubdtype(dtype, jnp.floating):
            dtype = self.calls[-1].policy.param_dtype
        return next_creator(shape, dtype, init)

    def get(self, next_getter: Any, value: Any, context: Any) -> Any:
        """Casts a stored parameter to the compute dtype of the innermost call."""
        del context
        return next_getter(self.calls[-1].policy.cast_to_compute(value))

    def stored(self, name: str) -> Any:
        """Returns a state of the running module as it is stored; None without one."""
        self.is_reading = True
        try:
            return hk.get_state(name)
        except ValueError:
            return None
        finally:
            self.is_reading = False

    def keep_state(self, value: Any, name: str) -> Any:
        """Returns what a state is set to in the dtypes in which it is stored.

        The first value defines the state: in what float32 without policies would have given, if it
        comes in the 16 bits of the policy around.
        """
        stored = self.stored(name)
        if stored is None:
            policy = self.calls[-1].policy if self.calls else self.policy_map.default
            return jax.tree.map(lambda leaf: _as_stored(leaf, policy), value)
        if jax.tree.structure(value) != jax.tree.structure(stored):
            return value
        return jax.tree.map(cast_like, value, stored)


def _state_dtype(policy: Policy) -> Any:
    """Returns the dtype of new state: that of new parameters, but at least float32."""
    stored = jnp.dtype(policy.param_dtype)
    return jnp.dtype(jnp.float32) if stored.itemsize < 4 else stored


def _as_stored(leaf: Any, policy: Policy) -> Any:
    narrow = [d for d in (policy.compute_dtype, policy.output_dtype) if jnp.dtype(d).itemsize < 4]
    is_narrow = is_floating(leaf) and leaf.dtype in [jnp.dtype(dtype) for dtype in narrow]
    return cast_tree(leaf, _state_dtype(policy)) if is_narrow else leaf


def _intercept(next_f: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
    """Intercepts each method call while a context of this thread is open."""
    refuse_other_tasks(f"run the Haiku module {type(context.module).__name__}")
    runs = opened(_NAME)
    return runs[-1].intercept(next_f, args, kwargs, context) if runs else next_f(*args, **kwargs)


def _set_state(next_setter: Any, value: Any, context: Any) -> Any:
    """Has the last word on what a state is set to; the user's setters go before."""
    value, runs = next_setter(value), opened(_NAME)
    if not runs:
        return value
    return runs[-1].keep_state(value, context.full_name.removeprefix(f"{hk.current_name()}/"))


def _get_state(next_getter: Any, value: Any, context: Any) -> Any:
    """Is asked before the user's getters, which may cast."""
    del context
    runs = opened(_NAME)
    return value if runs and runs[-1].is_reading else next_getter(value)


# Haiku makes getters and setters only inside of a transformed function, but holds to them after it.
_state_hooks: Any = hk.transform(
    lambda: (hk.custom_getter(_get_state, params=False, state=True), hk.custom_setter(_set_state))
)


@contextlib.contextmanager
def interception() -> Iterator[None]:
    """Intercepts what modules call, and what reads and sets state, in this thread."""
    getter, setter = _state_hooks.apply({}, None)
    with hk.intercept_methods(_intercept), getter, setter:
        yield


@contextlib.contextmanager
def policies(policy_map: str | Policy | PolicyMap) -> Iterator[None]:
    """Runs Haiku modules under a policy map while the context lasts.

    Put it around `init` and `apply`, or within the function that is jitted. The map's default
    applies to each outermost module call: inputs and parameters are cast to its compute dtype, the
    result to its output dtype. A rule makes an island of every public method call of the modules
    that it matches, by class (`BatchNorm`) or by Haiku's path (`*/logits`, `mlp/~/linear_0`), also
    of one instance among many. Parameters are created in the param dtype and cast from what is
    stored by the innermost policy. Policies of classes hold where no rule of the map matches; they
    go before the default.

    What `hk.set_state` sets keeps the dtype in which it is stored; a state that is first set in the
    16 bits of the policy is stored in the param dtype, or in float32 where that is narrower.
    `ExponentialMovingAverage`, `SpectralNorm`, their trees and `VectorQuantizerEMA` compute in the
    dtype of their state, if neither a rule nor a class policy is about them.

    Contexts may be nested: the innermost one alone holds; they may end in any order. Of the tasks
    of an event loop, one at a time can be in a context: leave it before each `await`. Code that is
    compiled already cannot be told apart: it runs in another task as in the one that holds the
    context. A jitted function is traced anew under another map, and under other policies set by
    jmpx, but not under others set by `hk.mixed_precision` itself.

    Args:
        policy_map: a policy map, a policy, or a string of either.

    Yields:
        None.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if it is not a policy map string; if another task of the thread is in a context
            of jmpx, at entry or, while this one lasts, when that task runs a module.

    Warns:
        UserWarning: at the end, of each rule that matched no module.

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
    run = _Run(get_policy_map(policy_map))
    with entered(Context(_NAME, run, key=run.policy_map, install=interception)):
        try:
            yield
        finally:
            run.give_back()
    warn_unused(run.policy_map, run.seen, stacklevel=3)  # past contextlib, to the with statement


def policy_of(cls: type) -> Policy | None:
    """Returns the policy of a Haiku module class; see `jmpx.policy_of`."""
    taken = (run.class_policies[cls] for run in opened(_NAME) if cls in run.class_policies)
    return _store.get_policy(cls) or next(taken, None)


current_policy = _store.current_policy
set_policy = _store.set_policy


def refuse_push(cls: type, policy: Policy) -> None:
    """Raises what Haiku raises where it cannot push a policy: inside a method of the class."""
    with _store.push_policy(cls, policy):
        pass


def clear_policy(cls: type) -> None:
    """Detaches the policy of a Haiku module class; see `jmpx.clear_policy`."""
    _store.clear_policy(cls)
    for run in opened(_NAME):
        run.class_policies.pop(cls, None)


@contextlib.contextmanager
def marked_calls() -> Iterator[None]:
    """Marks the calls of public methods while the context lasts, for `jmpx.autocast`.

    Yields:
        None.
    """

    def intercept(next_f: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        method = context.method_name
        if method != "__call__" and method.startswith("_"):
            return next_f(*args, **kwargs)
        with in_module(type(context.module), context.module.module_name):
            return next_f(*args, **kwargs)

    with hk.intercept_methods(intercept):
        yield


@contextlib.contextmanager
def refuse_creation() -> Iterator[None]:
    """Refuses to create parameters or set state while the context lasts, for `jmpx.autocast`.

    Yields:
        None.

    Raises:
        ValueError: at the first parameter that is created, or state that is set.
    """

    def refuse(next_setter: Any, *values: Any) -> Any:
        name = values[-1].full_name
        raise ValueError(
            f"Cannot create the Haiku parameter or set the state {name!r} inside jmpx.autocast, as "
            "it could not leave it: autocast the apply, jmpx.autocast(transformed.apply), not the "
            "function that is transformed."
        )

    if not _in_transform():
        yield
        return
    with hk.custom_creator(refuse, state=True), hk.custom_setter(refuse):
        yield


def _in_transform() -> bool:
    try:
        hk.running_init()
    except ValueError:
        return False
    return True
