"""Flax's Linen: the policy of each module, under a context around `init` and `apply`."""

import contextlib
import dataclasses
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from jmpx._adapters.dtype_fields import FieldInCall, field_in_call, reading_policy
from jmpx._adapters.linen_modules import (
    field_set,
    lifted_by,
    own,
    reads,
    state_dtype,
    written_class,
)
from jmpx._adapters.parameter_casts import ParameterCasts
from jmpx._adapters.sessions import (
    Args,
    Kwargs,
    Method,
    PolicyScope,
    PyTree,
    at_least,
    cast_result,
    in_policy_scope,
    inherited_policy,
    is_public,
    noted_carries,
    pooled,
    run_at_boundary,
    run_reading,
    wrapper_policy,
)
from jmpx._base.casts import cast_like
from jmpx._base.contexts import Context, entered, is_held, opened, refuse_other_tasks
from jmpx._jaxprs.marks import Module, in_module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy
from jmpx._policies.registry import running

_NAME = "jmpx.flax.policies"

_CONVOLUTIONS = (nn.Conv, nn.ConvLocal, nn.ConvTranspose)


@contextlib.contextmanager
def policies(policy_map: PolicyMapLike | None = None) -> Iterator[None]:
    """Runs Linen modules under a policy map while the context lasts; also a decorator.

    Put it around `init` and `apply`, in a jitted function or around its call. Calls of public
    methods cast where a rule, a class policy or the map's default gives them a policy; `setup` and
    private methods run as part of the call around them. A module that reads a parameter itself
    casts its floating inputs to its compute dtype in any case; one with running statistics returns
    what its surroundings compute in.

    A rule or class policy sets the `dtype` field of the layer that it selects for the call, and of
    layers inside that have the same value. Without a rule the field is the layer's compute dtype.

    Where a module asks for a parameter by `self.param`, it gets the stored one cast to the compute
    dtype of the innermost policy; in `setup`, that is the policy of the module's first call. `init`
    creates parameters in the param dtype of that policy. `self.variables` holds the stored
    parameters. Other collections, such as `batch_stats`, are left alone. Recurrent cells and the
    bodies of `nn.scan` and `nn.while_loop` return their carry in the dtype in which it came. Inside
    of loops, branches and derivatives of JAX other results are as wide as what came in.

    The `matmul` of a policy holds for the products in its region, forward and backward, but not in
    what a `jax.custom_vjp` or `jax.custom_jvp` defines: JAX traces that later. See docs/matmul.md.

    Contexts may be nested, and may end in any order: the innermost one alone is in force. Of the
    tasks of an event loop, only one at a time can be in a context: leave it before each `await`.
    Code that is compiled already runs in every task as in the one that holds the context.

    Args:
        policy_map: all that `jmpx.get_policy_map` takes, or None for the policies of classes
            alone (`jmpx.set_policy`). Paths are those of the parameters, joined by slashes.

    Yields:
        None.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if the string is not of the grammar; if another task of the thread is in a
            context of jmpx at entry, or runs a module while this context lasts.

    Warns:
        UserWarning: at the end, of each rule that matched none of the modules that ran; if `dtype`
            fields keep most parameters from the map's compute dtype, with the rule; once if a
            convolution ran in float32 under a dot algorithm, which JAX ignores for it. And once
            for a map under which no Linen module ran while an NNX module exists, which needs
            `with_policies`. A Linen module that was compiled ahead of time counts as one that did
            not run: a program with such modules may ignore this warning.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> import jmpx.flax
        >>> model, x = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)]), jnp.ones((4, 3))
        >>> with jmpx.flax.policies("c=bf16; */layers_2: full"):
        ...     params = model.init(jax.random.key(0), x)
        ...     y = model.apply(params, x)
        >>> params["params"]["layers_0"]["kernel"].dtype.name, y.dtype.name
        ('float32', 'bfloat16')
    """
    with pooled(policy_map, _NAME) as followed, _applied(followed) as session:
        yield
    if not is_held(session):
        session.warn_without_linen(stacklevel=3)  # past contextlib, to the with statement


def _applied(policy_map: PolicyMapLike | None) -> contextlib.AbstractContextManager["_PolicyScope"]:
    """Runs Linen modules under a policy map while the context lasts; leaves warnings to a pool."""
    return in_policy_scope(_PolicyScope, _NAME, policy_map, _interception)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A running method of a module.

    Attributes:
        module: the module. Methods that a module calls on itself, those of its base class and the
            body of a lifted transform run as part of the call that casts.
        boundary_policy: the boundary policy of the module's calls, None if they do not cast.
        surrounding: the surrounding policy.
        field: the `dtype` field of the module.
        is_cast: whether a public method is running, so that its inputs are cast already.
        lifted: the names of the lifted transforms in whose body the method runs.
        keeps: whether calls inside return what is as wide as their arguments, for a wide state.
    """

    module: Module
    boundary_policy: Policy | None
    surrounding: Policy | None
    field: FieldInCall
    is_cast: bool = False
    lifted: tuple[str, ...] = ()
    keeps: bool = False

    @property
    def policy(self) -> Policy | None:
        """The policy under which the method runs."""
        return self.surrounding if self.boundary_policy is None else self.boundary_policy

    @property
    def reading(self) -> Policy | None:
        """The policy under which the module reads its own parameters."""
        return None if self.policy is None else reading_policy(self.policy, self.field.value)


# The maps of the sessions that have ended: a Linen module ran under each, or a warning said that
# none did. In later sessions a module may run compiled, which cannot be noticed.
_ended: set[PolicyMap] = set()


class _PolicyScope(PolicyScope):
    """A `policies` context.

    Attributes:
        has_run: whether a Linen module has run in it.
        calls: the running methods, the innermost last.
        casts: the casts of parameters in the outermost of these calls.
    """

    def __init__(self, name: str, policy_map: PolicyMapLike | None) -> None:
        super().__init__(name, policy_map)
        self.has_run = False
        self.calls: list[_Call] = []
        self.casts = ParameterCasts()

    def intercept(
        self,
        method: Method,
        args: Args,
        kwargs: Kwargs,
        context: nn.module.InterceptorContext,
    ) -> Any:
        """Runs a method, at a boundary if it is public and its call has a policy."""
        module = context.module
        # Interceptors do not see the methods of `nn.Module` itself; an attribute hides `param`.
        object.__setattr__(module, "param", functools.partial(self.param, module))
        call = self.find_call(module)
        casts = not call.is_cast and _is_public(type(module), context.method_name)
        carry = args[0] if args and self.is_step(module, context.method_name) else None
        state = state_dtype(module, call.reading) if casts else None
        self.calls.append(
            dataclasses.replace(
                call,
                is_cast=call.is_cast or casts,
                lifted=lifted_by(module),
                keeps=call.keeps or state is not None,
            )
        )
        try:
            with field_set(module, call.field.value):
                if casts:
                    self.census.note_layer(call.module, call.field)
                    if state is not None and own(module, "cache"):
                        args, kwargs = jax.tree.map(at_least(state), (args, kwargs))
                    with noted_carries(call.module.cls, call.reading):
                        return self.run_public(call, module, method, args, kwargs, carry)
                with running(call.policy, _NAME):
                    return cast_result(_as_it_is, method(*args, **kwargs), carry)
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
    ) -> Any:
        """Runs a public method, whose inputs are cast at a boundary or if it reads parameters."""
        has_own = reads(module)
        policy = call.reading if has_own else call.policy
        if policy is not None and call.boundary_policy is not None:
            return run_at_boundary(policy, method, args, kwargs, by=_NAME, carry=carry)
        if policy is not None and isinstance(module, nn.OptimizedLSTMCell):
            args = _cast_hidden(policy, args)
        if call.reading is not None and (has_own or module.is_initializing()):
            run = functools.partial(run_reading, by=_NAME, keeps=call.keeps)
            result = _run_reading(run, call.reading, module, method, args, kwargs)
        else:
            with running(policy, _NAME):
                result = method(*args, **kwargs)
        return cast_result(_as_it_is, result, carry)

    def find_call(self, module: nn.Module) -> _Call:
        """Returns the call that a method of a module begins, or the call that it is part of."""
        called = Module(written_class(type(module)), "/".join(module.path))
        outer = self.calls[-1] if self.calls else None
        if outer is not None and outer.module == called:
            return outer
        surrounding = wrapper_policy(self.policy_map) if outer is None else outer.policy
        rule = self.explicit_policy(*called, surrounding)
        field = field_in_call(module, rule, None if outer is None else outer.field.selected)
        keeps = outer is not None and outer.keeps
        boundary = self.boundary_policy(*called, surrounding)
        call = _Call(called, boundary, surrounding, field, keeps=keeps)
        self.record_module(*called, call.boundary_policy, surrounding)
        if isinstance(module, _CONVOLUTIONS) and module.precision is None:
            self.note_convolution(*called, call.policy)
        return call

    def is_step(self, module: nn.Module, method_name: str) -> bool:
        """Whether a method begins a step of a loop: of a recurrent cell, or lifted by Linen."""
        lifted, outer = lifted_by(module), self.calls[-1:]
        if isinstance(module, nn.RNNCellBase) and method_name == "__call__":
            return True
        is_body = any(f"{name}(" in "".join(lifted[-1:]) for name in ("scan", "while_loop"))
        return is_body and [call.lifted for call in outer] != [lifted]

    def param(
        self, module: nn.Module, name: str, init: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Stands in for `module.param`: creates in the param dtype, reads in the compute dtype."""
        policy = self.calls[-1].reading if self.calls else None
        if policy is None:
            return type(module).param(module, name, init, *args, **kwargs)

        def create(*args: Any, **kwargs: Any) -> Any:
            return policy.cast_to_param(init(*args, **kwargs))

        stored = type(module).param(module, name, create, *args, **kwargs)
        self.census.note_parameter(self.calls[-1].module, name, stored)
        return self.casts.to_compute(policy, stored)

    def warn_without_linen(self, stacklevel: int) -> None:
        """Warns once of a map under which no Linen module ran, while there are NNX modules."""
        if self.policy_map is None or self.policy_map in _ended:
            return
        _ended.add(self.policy_map)
        if not self.has_run and not self.pool.seen and _has_nnx_modules():
            warnings.warn(
                f"No Linen module ran under jmpx.flax.policies({str(self.policy_map)!r}), which "
                "casts those alone: give the map to the gradient function as policy=, or to "
                "jmpx.apply_policy, which cast NNX models among the arguments, too.",
                stacklevel=stacklevel + 1,
            )


def _has_nnx_modules() -> bool:
    """Whether an NNX module exists. `jmpx.flax` imports NNX, so that its import says nothing."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and any(nnx.Module in type(thing).__mro__ for thing in gc.get_objects())


def _interception() -> contextlib.AbstractContextManager[None]:
    """Intercepts the method calls of this thread."""
    return nn.intercept_methods(_intercept)


def _intercept(
    method: Method, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> Any:
    """Intercepts each method call while a context of this thread is open."""
    sessions = opened(_PolicyScope)
    if context.module.scope is None or not sessions:
        return method(*args, **kwargs)  # it has no parameters; or a context ended out of order
    refuse_other_tasks(f"run the Linen module {type(context.module).__name__}")
    for session in sessions:  # an outer one casts nothing, but has not missed its modules either
        session.has_run = True
    return sessions[-1].intercept(method, args, kwargs, context)


class _Creation(NamedTuple):
    """How parameters are created where no module has a policy; see `Adapter.created`."""

    policy: Policy
    are_cast: bool


def _creation() -> contextlib.AbstractContextManager[None]:
    """Creates the parameters of this thread."""
    return nn.intercept_methods(_create)


def _create(
    method: Method, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> Any:
    """Intercepts each method call, so that new parameters are in the dtype of a `_Creation`."""
    module = context.module
    if module.scope is not None and module.is_initializing() and not opened(_PolicyScope):
        object.__setattr__(module, "param", functools.partial(_param, module))
    return method(*args, **kwargs)


def _param(
    module: nn.Module, name: str, init: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `module.param` while parameters are created."""
    creations = opened(_Creation)
    if not creations or opened(_PolicyScope):
        return type(module).param(module, name, init, *args, **kwargs)
    policy, are_cast = creations[-1]
    asked: PyTree = None

    def create(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked = init(*args, **kwargs)
        return policy.cast_to_param(asked)

    stored = type(module).param(module, name, create, *args, **kwargs)
    if are_cast:
        return policy.cast_to_compute(stored)
    return stored if asked is None else jax.tree.map(cast_like, stored, asked)


def _as_it_is(tree: PyTree) -> PyTree:
    return tree


def _run_reading(
    run_reading: Callable[..., Any],
    policy: Policy,
    module: nn.Module,
    method: Method,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Runs a call that is no boundary, of a module that reads parameters or statistics itself.

    Statistics are in float32, and would make the results of the module so. While a module creates
    its parameters nobody knows that it reads any, so its result is cast in place of its inputs:
    what is made of it, such as a cache, gets the dtype that it has in later calls.
    """
    to_compute = inherited_policy(policy).cast_to_output

    def run(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return to_compute(result) if own(module, "batch_stats") else result

    if reads(module):
        return run_reading(policy, run, args, kwargs)
    with running(policy, _NAME):
        result = run(*args, **kwargs)
    if not reads(module):
        return result
    inputs = jax.tree.leaves((args, kwargs))

    def created(*cast: Any) -> Any:
        is_cast = any(new is not old for new, old in zip(cast, inputs, strict=True))
        return to_compute(result) if is_cast else result

    return run_reading(policy, created, tuple(inputs), {})


def _cast_hidden(policy: Policy, args: Args) -> Args:
    """Casts what an `OptimizedLSTMCell` multiplies itself: not the sum that its carry begins with.

    It owns no parameters: modules inside of it hand them to it.
    """
    if len(args) != 2 or not isinstance(args[0], tuple) or len(args[0]) != 2:
        return args  # of a subclass, or of another method
    (cell, hidden), inputs = args
    return (cell, policy.cast_to_compute(hidden)), policy.cast_to_compute(inputs)


def _is_public(cls: type, name: str) -> bool:
    """Whether a method is public. Bodies of lifted functions run as methods, but are none."""
    return name != "setup" and is_public(name) and hasattr(cls, name)


def _mark(method: Method, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext) -> Any:
    """Intercepts each method call under autocast, and marks those of public methods."""
    module = context.module
    if module.scope is None or not _is_public(type(module), context.method_name):
        return method(*args, **kwargs)
    with in_module(written_class(type(module)), "/".join(module.path)):
        return method(*args, **kwargs)


class _Adapter(Adapter):
    def marked_calls(self) -> contextlib.AbstractContextManager[None]:
        return nn.intercept_methods(_mark)

    def applied(self, policy_map: PolicyMap) -> contextlib.AbstractContextManager[object]:
        return _applied(policy_map)

    def created(self, policy: Policy, are_cast: bool) -> contextlib.AbstractContextManager[None]:
        creation = _Creation(policy, are_cast)
        return entered(Context("jmpx.apply_policy in Linen", creation, creation, _creation))


adapter: Adapter = _Adapter()
