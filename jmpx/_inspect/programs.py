"""The program that `audit`, `ranges` and `first_nonfinite` look at: a train step, as a jaxpr.

They take a loss, and differentiate it in its first argument, or a step that computes its gradients
itself, which the names that JAX gives to a backward pass tell.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmpx._adapters.scopes import ModuleRecord, PolicyScope, inherited_policy, listening
from jmpx._base.leaves import is_floating, is_traceable
from jmpx._base.stateful import PureFunction, split
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Jaxpr
from jmpx._policies.added_rules import rules_added
from jmpx._policies.maps import Rule
from jmpx._policies.modules import call_marked


class _Call(NamedTuple):
    """What is traced, and how.

    Attributes:
        fn: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        marks_objects: whether modules in the arguments mark their calls.
        rules: what is added to each policy map.
        is_loss: whether the gradient is added; None to find out.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    marks_objects: bool = True
    rules: tuple[Rule, ...] = ()
    is_loss: bool | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function as what JAX runs of it.

    Attributes:
        name: the name of the function.
        jaxpr: the closed jaxpr, in whose scopes modules have marks.
        arrays: the arrays among the arguments, in the order of the jaxpr's inputs; abstract where
            only shapes were given.
        names: the names of these inputs, such as `params['w']`.
        is_differentiated: whether the gradient in the first argument was added to a loss.
        has_backward: whether there is a backward pass at all.
        policies: the policies that held in the modules that an adapter ran, by the modules' paths.
        chosen: the paths of the modules among them to which a rule or their class gives the policy.
        takers: the functions that took a policy map, as the user calls them; rules can go there.
        call: what was traced.
    """

    name: str
    jaxpr: Jaxpr
    arrays: Sequence[Any]
    names: Sequence[str]
    is_differentiated: bool
    has_backward: bool
    policies: dict[str, str]
    chosen: frozenset[str]
    takers: frozenset[str]
    call: _Call

    def with_rules(self, *rules: Rule) -> "Program":
        """Traces the program again, with rules at the end of its policy maps.

        Raises:
            Exception: if the program cannot be traced so, such as a loop whose carry would change.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The first trace has given each warning.
            return _traced_program(self.call._replace(rules=rules, is_loss=self.is_differentiated))


def traced_program(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Program:
    """Traces a function, and its gradient if it is a loss. No array is computed.

    Args:
        fn: a loss: it returns a floating scalar, or a tuple whose first element is one. Or a step
            that computes its gradients itself. Any other function is looked at as it is.
        args: its arguments: pytrees with arrays or `jax.ShapeDtypeStruct`s, modules among them.
        kwargs: its keyword arguments.

    Raises:
        TypeError: if `fn` is not callable.
        ValueError: if `fn` is a loss without a floating array in its first argument.
    """
    if not callable(fn):
        raise TypeError(
            f"Expected a loss or a train step to look at, got {fn!r}: pass the function itself, "
            "and its arguments to what comes back."
        )
    call = _Call(fn, args, kwargs or {})
    try:
        return _traced_program(call)
    except Exception:
        # A module in an argument that marks its calls is of another class, so that the function
        # cannot join it with a part of the module that it closes over, as by `eqx.combine`.
        pass
    return _traced_program(call._replace(marks_objects=False))


def _traced_program(call: _Call) -> Program:
    """Traces a function, see `traced_program`."""
    marked = functools.partial(_marked, call.marks_objects)
    arguments = (call.fn, *call.args), call.kwargs
    with (
        listening() as sessions,
        rules_added(call.rules) as takers,
        split(marked, *arguments) as (pure, state, args, kwargs),
    ):
        run = functools.partial(_run, pure, state)
        traced, is_loss = _traced(call, run, args, kwargs)
        met = [met for session in sessions for met in session.met]
        chosen = {each.module.path for s in sessions for each in s.met if _is_chosen(s, each)}
    return Program(
        _name(call.fn),
        traced.jaxpr,
        traced.arrays,
        _names(*args, **kwargs),
        is_differentiated=is_loss,
        has_backward=is_loss or _has_backward(traced.jaxpr),
        policies=dict(map(_policy_of, met)),
        chosen=frozenset(chosen),
        takers=frozenset(takers),
        call=call,
    )


def _traced(
    call: _Call, run: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[core.Traced, bool]:
    """Traces what `run` runs, with its gradient if it is a loss; returns whether it is one."""
    if call.is_loss is not None:
        trace = _trace_gradient if call.is_loss else _trace
        return trace(run, args, kwargs), call.is_loss
    # The name decides nothing: it saves a trace where it tells the truth.
    is_named = "loss" in _name(call.fn).lower()
    traced = _guessed_gradient(run, args, kwargs) if is_named else None
    if traced is not None:
        return traced, True
    traced = _trace(run, args, kwargs)
    if not _returns_loss(traced) or _has_backward(traced.jaxpr):
        return traced, False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The first trace has given each warning.
        return _trace_gradient(run, args, kwargs), True


def _marked(marks_objects: bool, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, whose modules mark their calls; those in arguments if asked."""
    return call_marked(lambda cls, path: marks_objects, fn, args, kwargs)


def _run(pure: PureFunction, state: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a function of NNX objects, and drops their new state."""
    return pure(state, *args, **kwargs)[0]


def _is_array(leaf: object) -> bool:
    return is_traceable(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _trace(fn: Callable[..., Any], args: Any, kwargs: Any) -> core.Traced:
    return core.trace(fn, args, kwargs, _is_array)


def _returns_loss(traced: core.Traced) -> bool:
    """Whether a function returns a loss: a floating scalar, alone or before auxiliary results."""
    avals = traced.jaxpr.out_avals
    if not avals or avals[0].shape or not jnp.issubdtype(avals[0].dtype, jnp.floating):
        return False
    result = traced.rebuild(range(len(avals)))
    return result == 0 or (isinstance(result, tuple) and len(result) > 0 and result[0] == 0)


def _trace_gradient(fn: Callable[..., Any], args: Any, kwargs: Any) -> core.Traced:
    """Traces the value and the gradient of a loss in the floating arrays of the first argument.

    The loss itself stands before its arguments.
    """
    leaves, treedef = jax.tree.flatten(args[1:2])
    indices = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]
    if not indices:
        raise ValueError(
            "Expected a loss to differentiate in its first argument, got one without a floating "
            "array in it: pass the parameters first."
        )

    def gradient(*args: Any, **kwargs: Any) -> Any:
        given = treedef.flatten_up_to(args[1:2])

        def loss(params: list[Any]) -> Any:
            leaves = list(given)
            for i, param in zip(indices, params, strict=True):
                leaves[i] = param
            result = fn(args[0], *treedef.unflatten(leaves), *args[2:], **kwargs)
            first, aux = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
            return first, [leaf for leaf in jax.tree.leaves(aux) if is_traceable(leaf)]

        return jax.value_and_grad(loss, has_aux=True)([given[i] for i in indices])

    return _trace(gradient, args, kwargs)


def _guessed_gradient(fn: Callable[..., Any], args: Any, kwargs: Any) -> core.Traced | None:
    """Traces the gradient of what may be a loss; None if it is no loss or holds a gradient."""
    with contextlib.suppress(Exception):  # A loss that fails does so again when it is traced alone.
        traced = _trace_gradient(fn, args, kwargs)
        if not _holds_gradient(traced.jaxpr):
            return traced
    return None


_BACKWARD = "transpose("  # in the scopes of a backward pass
_INNER_BACKWARD = re.compile(r"jvp\(.*transpose\(")  # of a backward pass that is differentiated


def _has_backward(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr holds the backward pass of a gradient."""
    return any(
        _BACKWARD in str(eqn.source_info.name_stack)
        or any(map(_has_backward, core.inner_jaxprs(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _holds_gradient(jaxpr: Jaxpr) -> bool:
    """Whether the jaxpr of a gradient holds a gradient that the function itself computes."""
    for eqn in jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        if _INNER_BACKWARD.search(stack):
            return True
        # The forward pass of a jitted function holds no backward pass but its own.
        holds = _holds_gradient if _BACKWARD in stack else _has_backward
        if any(map(holds, core.inner_jaxprs(eqn.params))):
            return True
    return False


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _names(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[str]:
    """Returns the names of the arrays in a function and its arguments, as `params['w']`."""
    try:
        arguments = dict(inspect.signature(fn).bind_partial(*args).arguments)
    except (TypeError, ValueError):  # a function of C, or one that JAX would refuse
        arguments = {}
    names = [name for name, value in arguments.items() if any(value is arg for arg in args)]
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    names = [_name(fn), *names, *kwargs]
    trees = zip(names, [fn, *args, *kwargs.values()], strict=True)
    return [
        name + jax.tree_util.keystr(path)
        for name, tree in trees
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if _is_array(leaf)
    ]


def _is_chosen(session: PolicyScope, met: ModuleRecord) -> bool:
    """Whether a rule or its class gives a module its policy, and not the default of the map."""
    if met.boundary is None or met.surrounding is not None:
        return met.boundary is not None
    return session.explicit_policy(*met.module, None) is not None


def _policy_of(met: ModuleRecord) -> tuple[str, str]:
    """Returns the path of a module, and the policy under which it ran."""
    policy = met.boundary
    if policy is None and met.surrounding is not None:
        policy = inherited_policy(met.surrounding)
    return met.module.path, "" if policy is None else str(policy)
