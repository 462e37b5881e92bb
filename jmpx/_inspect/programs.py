"""Traces the program that a report inspects: a train step, as a jaxpr.

A loss is differentiated in its first argument; a step computes its own gradients. A function is a
loss if it returns a floating scalar: see `_is_loss`.
"""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmpx._adapters.scopes import ModuleRecord, PolicyScope, inherited_policy, listening
from jmpx._base.contexts import INSPECTED, MARKED, SHOWN, fact_set
from jmpx._base.messages import describe
from jmpx._base.stateful import split
from jmpx._base.trees import PyTree, is_floating, is_traceable
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import any_holds, holds, inner_of, is_backward, walk
from jmpx._jaxprs.marks import Array, Equation, Jaxpr
from jmpx._policies.maps import Rule, trial_rules
from jmpx._policies.registry import call_marked

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


class _Call(NamedTuple):
    """A function and its arguments, and how they are traced."""

    fn: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    marks: int = 2  # modules mark their calls: 2: all, 1: in functions under a policy, 0: by rules
    rules: tuple[Rule, ...] = ()  # the rules that are added to each policy map
    purpose: str = SHOWN  # of the trace; see `contexts.INSPECTED`
    with_state: bool = False  # whether the state of NNX objects is an input and a result


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The program that JAX makes of a function."""

    name: str
    jaxpr: Jaxpr  # a closed jaxpr; its scopes have marks of modules
    arrays: Sequence[Array]  # the inputs of the jaxpr, among the arguments, or their shapes
    names: Sequence[str]  # the names of these inputs, such as `params['w']`
    is_differentiated: bool  # whether it is a loss, with the gradient in its first argument
    is_unclear: bool  # whether it may be a loss, or a step: it is taken for a step
    has_backward: bool  # whether it holds a backward pass
    policies: dict[str, str]  # the policies of modules that an adapter ran, by their paths
    chosen: frozenset[str]  # the paths of modules whose policy a rule or their class gives
    mapped_by: frozenset[str]  # the public functions that took a policy map: rules can be added
    call: _Call  # the function, and how it was traced
    parameters: range  # which inputs are in the first argument
    gradients: int = 0  # how many of the last results are gradients of a loss

    @property
    def uses_autocast(self) -> bool:
        """Whether `jmpx.autocast` took a policy map."""
        return "jmpx.autocast" in self.mapped_by

    @property
    def takes_scopes(self) -> bool:
        """Whether rules select scopes, too; a function without a policy may cast by hand."""
        return self.uses_autocast or not self.mapped_by

    def as_step(self) -> tuple[Callable[..., PyTree], tuple[jax.ShapeDtypeStruct, ...]]:
        """Returns the program as a function of its inputs, and their shapes."""
        step = lambda *arrays: core.evaluate(self.jaxpr, arrays)  # noqa: E731
        step.__name__ = self.name
        return step, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.in_avals)

    def with_rules(self, *rules: Rule) -> "Program":
        """Traces the program again, with rules at the end of its policy maps.

        Errors of the function under these rules pass through, such as JAX's TypeError for a loop
        whose carry changes its dtype.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The first trace has given each warning.
            return _traced_program(self.call._replace(rules=rules), self.is_differentiated)


def traced_program(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree] | None = None,
    with_gradient: bool = True,
    purpose: str = SHOWN,
) -> Program:
    """Traces a function on arrays or their shapes, by default with its gradient if it is a loss.

    Any other function is traced as it is.

    Raises:
        TypeError: if `fn` is not callable, or is compiled.
        ValueError: if `fn` is a loss without a floating array in its first argument.
    """
    if not callable(fn) or isinstance(fn, jax.stages.Compiled):
        raise TypeError(
            f"Expected a loss or a train step to look at, got {describe(fn)}: pass the function "
            "itself, and its arguments to the function that is returned; jmpx.inspect.compiled "
            "reads steps that are lowered or compiled."
        )
    call = _Call(fn, args, kwargs or {}, purpose=purpose)
    is_loss = None if with_gradient else False
    # A module that marks its calls is of another class. So the function cannot join it with a part
    # of the module that it closes over, as `eqx.combine` would.
    for marks in (2, 1):
        with contextlib.suppress(TypeError, ValueError):
            return _traced_program(call._replace(marks=marks), is_loss)
    return _traced_program(call._replace(marks=0), is_loss)


def traced_step(step: Callable[..., PyTree], args: tuple[PyTree, ...]) -> Program:
    """Traces a step as it is; its first inputs and last results are the states of NNX objects."""
    return _traced_program(_Call(step, args, {}, marks=0, with_state=True), False)


def _traced_program(call: _Call, is_loss: bool | None = None) -> Program:
    """Traces a function, with its gradient if it is a loss; with None it finds out."""

    def marked(fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return call_marked(None, lambda cls, path: call.marks > 1, fn, args, kwargs)

    arguments = (call.fn, *call.args), call.kwargs
    with (
        fact_set(INSPECTED, call.purpose),
        fact_set(MARKED, call.marks > 0),
        listening() as sessions,
        trial_rules(call.rules) as mapped_by,
        split(marked, *arguments) as (pure, state, args, kwargs),
    ):

        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return pure(state, *args, **kwargs)[0]

        def run_on(state: list[PyTree], *args: PyTree) -> PyTree:
            result, changes = pure(state, *args)
            return result, changes.arrays

        given = (run_on, (state, *args)) if call.with_state else (run, args)
        traced, is_loss = _traced(*given, kwargs, is_loss)
        met = [(session, each) for session in sessions for each in session.met]
        sizes = [sum(map(_is_array, jax.tree.leaves(each))) for each in args[:2]]
        chosen = {each.module.path for session, each in met if _is_chosen(session, each)}
    return Program(
        name_of(call.fn),
        traced.jaxpr,
        traced.arrays,
        _names(*args, **kwargs),
        is_differentiated=bool(is_loss),
        is_unclear=is_loss is None,
        has_backward=bool(is_loss) or any_holds(traced.jaxpr, is_backward),
        policies={each.module.path: _policy_of(each) for _, each in met},
        chosen=frozenset(chosen),
        mapped_by=frozenset(mapped_by),
        call=call,
        parameters=range(sizes[0], sum(sizes)),
        gradients=len(_differentiated(args[1])) if is_loss else 0,
    )


def _traced(
    run: Callable[..., PyTree], args: PyTree, kwargs: PyTree, is_loss: bool | None
) -> tuple[core.Traced, bool | None]:
    """Traces a function, with its gradient if it is a loss; returns `_is_loss`."""
    if not is_loss:
        traced = core.trace(run, args, kwargs, _is_array)
        found = False if is_loss is False else _is_loss(traced, args[1:2])
        if not found:
            return traced, found
    with warnings.catch_warnings():
        if is_loss is None:
            warnings.simplefilter("ignore")  # The first trace has given each warning.
        return _trace_gradient(run, args, kwargs), True


def _is_array(leaf: object) -> bool:
    return is_traceable(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _is_loss(traced: core.Traced, first: PyTree) -> bool | None:
    """Whether a function returns a loss, to be differentiated in `first`; None if it is unclear.

    The loss of a step does not depend on the backward pass in it, unlike a loss with forces. If it
    does, and new parameters are returned, too, as by a training loop, the function may be either.
    """
    if not _returns_scalar(traced) or not any_holds(traced.jaxpr, is_backward):
        return _returns_scalar(traced)
    is_behind, *others = _behind_gradients(traced.jaxpr, [False] * len(traced.jaxpr.in_avals))
    results = zip(traced.jaxpr.out_avals[1:], others, strict=True)
    made = Counter((aval.shape, aval.dtype) for aval, is_made in results if is_made)
    leaves = jax.tree.leaves(first)
    given = Counter((leaves[i].shape, leaves[i].dtype) for i in _differentiated(first))
    return is_behind and (None if given <= made else True)


def _returns_scalar(traced: core.Traced) -> bool:
    """Whether a function returns a floating scalar, alone or before auxiliary results."""
    avals = traced.jaxpr.out_avals
    if not avals or avals[0].shape or not jnp.issubdtype(avals[0].dtype, jnp.floating):
        return False
    result = traced.rebuild(range(len(avals)))
    return result == 0 or (isinstance(result, tuple) and len(result) > 0 and result[0] == 0)


def _behind_gradients(jaxpr: Jaxpr, operands: Sequence[bool]) -> list[bool]:
    """Returns which results depend on a backward pass, or on these operands."""

    def step(eqn: Equation, operands: Sequence[bool]) -> Sequence[bool]:
        inner = inner_of(eqn)
        if inner is None or is_backward(eqn):
            return [any(operands) or holds(eqn, is_backward)] * len(eqn.outvars)
        given, before = list(operands[inner.first :]), None
        results = list[bool]()
        while given != before:  # A loop reads its carry in the next trip.
            columns = zip(*(_behind_gradients(each, given) for each in inner.jaxprs), strict=True)
            results, before = list(map(any, columns)), given.copy()
            carry = range(inner.consts, inner.consts + inner.carry)
            for i, result in zip(carry, results, strict=False):
                given[i] |= result
        return results

    return walk(jaxpr, operands, step, lambda atom, constant: False)


def _trace_gradient(fn: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> core.Traced:
    """Traces the value and the gradient of a loss in the floating arrays of its first argument.

    `args` has the loss itself before its arguments.
    """
    indices = _differentiated(*args[1:2])
    if not indices:
        raise ValueError(
            "Expected a loss to differentiate in its first argument, got one without a floating "
            "array in it: pass the parameters first."
        )

    def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
        given, treedef = jax.tree.flatten(args[1:2])

        def loss(params: list[Array]) -> PyTree:
            new = dict(zip(indices, params, strict=True))
            leaves = [new.get(i, leaf) for i, leaf in enumerate(given)]
            result = fn(args[0], *treedef.unflatten(leaves), *args[2:], **kwargs)
            first, aux = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
            return first, [leaf for leaf in jax.tree.leaves(aux) if is_traceable(leaf)]

        return jax.value_and_grad(loss, has_aux=True)([given[i] for i in indices])

    return core.trace(gradient, args, kwargs, _is_array)


def _differentiated(*first: PyTree) -> list[int]:
    """Returns which leaves of the first argument of a loss are differentiated."""
    return [i for i, leaf in enumerate(jax.tree.leaves(first)) if is_floating(leaf)]


def name_of(fn: Callable[..., PyTree]) -> str:
    """Returns the name of a function, also of one that wraps a `functools.partial` of it."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__wrapped__
    return getattr(fn, "__name__", type(fn).__name__)


def _names(fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> list[str]:
    """Returns the names of the arrays in a function and its arguments, such as `params['w']`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a function of C
        parameters = ()
    names = [each.name for each in parameters if each.kind in _POSITIONAL]
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    # JAX flattens dictionaries, and so the keyword arguments, in the order of their keys.
    trees = [(name_of(fn), fn), *zip(names, args, strict=False), *sorted(kwargs.items())]
    return [
        name + jax.tree_util.keystr(path)
        for name, tree in trees
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if _is_array(leaf)
    ]


def _is_chosen(session: PolicyScope, met: ModuleRecord) -> bool:
    """Whether a rule or its class, not the default of the map, gives a module its policy."""
    if met.boundary is None or met.surrounding is not None:
        return met.boundary is not None
    return session.explicit_policy(*met.module, None) is not None


def _policy_of(met: ModuleRecord) -> str:
    """Returns the policy under which a module ran; empty if there was none."""
    policy = met.boundary
    if policy is None and met.surrounding is not None:
        policy = inherited_policy(met.surrounding)
    return "" if policy is None else str(policy)
