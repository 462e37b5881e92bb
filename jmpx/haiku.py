"""Haiku: policies of module classes and paths.

Class policies are kept in Haiku's own registry: `jmpx.set_policy` and its kin come here for every
Haiku module class, so `hk.mixed_precision` and jmpx never disagree. `policies` puts a policy map
over `init` and `apply`.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, get_policy_map, traced_under, warn_unused
from jmpx._registry import policy_for
from jmpx._scopes import in_module

try:
    import haiku as hk
except ModuleNotFoundError as error:
    if error.name != "haiku":
        raise
    raise ModuleNotFoundError(
        "jmpx.haiku needs Haiku, which is not installed: pip install 'jmpx[haiku]'.", name="haiku"
    ) from None

_store: Any = hk.mixed_precision  # Any, because it is annotated with JMP's policies


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

    def take_over(self, cls: type) -> None:
        policy = _store.get_policy(cls)
        if policy is not None:
            self.class_policies[cls] = policy
            _store.clear_policy(cls)

    def give_back(self) -> None:
        for cls, policy in self.class_policies.items():
            if _store.get_policy(cls) is None:
                _store.set_policy(cls, policy)

    def policy_of_call(self, module: hk.Module) -> Policy | None:
        """Returns the policy at whose boundary a call of `module` casts."""
        surrounding = self.calls[-1].policy if self.calls else None
        self.seen[type(module), module.module_name] = None
        policy = policy_for(self.policy_map, type(module), module.module_name, surrounding)
        if policy is None and isinstance(module, hk.ExponentialMovingAverage):
            # A running statistic keeps its dtype: in bfloat16, a decay of 0.999 would be 1.
            stored = self.policy_map.default.param_dtype
            return Policy(stored, stored, self.calls[-1].policy.compute_dtype)
        return policy

    def intercept(self, next_f: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        """Casts at the boundary of a call that has a policy."""
        module, method = context.module, context.method_name
        self.take_over(type(module))
        public = method == "__call__" or not method.startswith("_")
        inside = any(call.module is module for call in self.calls)
        if self is not _thread.runs[-1] or inside or not public:
            return next_f(*args, **kwargs)
        policy = self.policy_of_call(module)
        if policy is None:
            return next_f(*args, **kwargs)
        with self.call(_Call(module, policy)):
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


class _Thread(threading.local):
    """The contexts that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []


_thread = _Thread()


@contextlib.contextmanager
def policies(policy_map: str | Policy | PolicyMap) -> Iterator[None]:
    """Runs Haiku modules under a policy map while the context lasts.

    Put it around `init` and `apply`, or within the function that is jitted. The map's default
    applies to each outermost module call: inputs and parameters are cast to its compute dtype, the
    result to its output dtype. A rule makes an island of every public method call of the modules
    that it matches, by class (`BatchNorm`) or by Haiku's path (`*/logits`, `mlp/~/linear_0`), also
    of one instance among many. Parameters are created in the param dtype and cast from what is
    stored by the innermost policy. Policies of classes hold where no rule of the map matches; they
    go before the default. State keeps its dtype, and moving averages are taken in the param dtype.

    Contexts may be nested: the innermost one alone holds.

    Args:
        policy_map: a policy map, a policy, or a string of either.

    Yields:
        None.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if it is not a policy map string.

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
    _thread.runs.append(run)
    try:
        with traced_under(run.policy_map), hk.intercept_methods(run.intercept):
            yield
    finally:
        _thread.runs.remove(run)
        run.give_back()
    warn_unused(run.policy_map, run.seen, stacklevel=3)  # past contextlib, to the with statement


def policy_of(cls: type) -> Policy | None:
    """Returns the policy of a Haiku module class; see `jmpx.policy_of`."""
    taken = (run.class_policies[cls] for run in _thread.runs if cls in run.class_policies)
    return _store.get_policy(cls) or next(taken, None)


def current_policy() -> Policy | None:
    """Returns the policy of the running module; see `jmpx.current_policy`."""
    if _thread.runs and _thread.runs[-1].calls:
        return _thread.runs[-1].calls[-1].policy
    return _store.current_policy()


set_policy = _store.set_policy
push_policy = _store.push_policy


def clear_policy(cls: type) -> None:
    """Detaches the policy of a Haiku module class; see `jmpx.clear_policy`."""
    _store.clear_policy(cls)
    for run in _thread.runs:
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
