"""Calls of modules whose floating arguments are cast, and whose results may be."""

import contextlib
import contextvars
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import jax
import numpy as np

from jmpx._base.casts import cast_except, cast_like, cast_tree
from jmpx._base.leaves import PyTree, is_floating
from jmpx._base.stateful import Arguments as Args, Function as Method, Keywords as Kwargs
from jmpx._jaxprs import core
from jmpx._policies.policy import Policy
from jmpx._policies.registry import in_loop, is_outermost, running

T = TypeVar("T")

Cast: TypeAlias = Callable[[PyTree], PyTree]
Passes: TypeAlias = Callable[[object], bool]  # whether a node of a pytree passes as it is


class Uncast:
    """Leaves of arguments that the outermost modules of a function get as they are."""

    def __init__(self, leaves: Sequence[PyTree]) -> None:
        self.leaves = leaves
        self.trace = core.current_trace()
        self.came = self.is_unknown = False

    def passing(self, passes: Passes, args: Args, kwargs: Kwargs) -> Passes:
        """Returns what passes in a call of an outermost module."""

        def passes_these(node: object) -> bool:
            return passes(node) or any(node is leaf for leaf in self.leaves)

        nodes = jax.tree.leaves((args, kwargs), is_leaf=passes_these)
        self.came |= any(node is leaf for node in nodes for leaf in self.leaves)
        # The body of another trace gets tracers of its own.
        self.is_unknown |= core.current_trace() != self.trace
        return passes_these


_kept = contextvars.ContextVar[Uncast | None]("_kept", default=None)


@contextlib.contextmanager
def leaving_uncast(leaves: Sequence[PyTree]) -> Iterator[Uncast]:
    """Has the outermost modules of a function get these leaves as they are."""
    uncast = Uncast(leaves)
    token = _kept.set(uncast if leaves else None)
    try:
        yield uncast
    finally:
        _kept.reset(token)


def run_cast(
    policy: Policy,
    method: Method,
    args: Args,
    kwargs: Kwargs,
    *,
    by: str,
    is_boundary: bool,
    carry: PyTree = None,
    passes: Passes = lambda node: False,
    keeps: bool = False,
) -> PyTree:
    """Runs a method with its floating arguments cast to the compute dtype.

    At a boundary, the result is cast to the output dtype. Any other call is of a module that reads
    parameters itself, whose products an argument in float32, such as noise, would widen.

    Such a call in a loop or a branch of JAX, where results have to keep the dtype of a carry, and
    anywhere if it `keeps`, casts only arguments that are wider than the compute dtype. If there are
    any, each array of the result is at least as wide as the widest floating argument of its shape
    was, or of all if none has it. Elsewhere the result is as the method returns it.

    In the outermost call, arguments that `leaving_uncast` keeps stay as they are.

    The new `carry` of a step comes back in the dtypes of the old one. Nodes that `passes` selects
    stay as they are. `by` is the function that has the call cast, as the user calls it.
    """
    kept = _kept.get() if is_outermost() else None
    inputs = passes if kept is None else kept.passing(passes, args, kwargs)
    is_kept = not is_boundary and (keeps or in_loop())
    leaves = jax.tree.leaves((args, kwargs), is_leaf=inputs) if is_kept else []
    came = [leaf for leaf in leaves if is_floating(leaf) and not inputs(leaf)]
    size = np.dtype(policy.compute_dtype).itemsize

    def passes_narrow(node: PyTree) -> bool:
        return inputs(node) or (is_floating(node) and node.dtype.itemsize <= size)

    args, kwargs = _cast_arguments(policy, args, kwargs, passes_narrow if came else inputs)
    with running(policy, by):
        result = method(*args, **kwargs)
    if not is_boundary and all(leaf.dtype.itemsize <= size for leaf in came):
        return cast_result(result, carry)
    cast = policy.cast_to_output if is_boundary else _as_wide_as(came)
    return cast_result(result, carry, lambda tree: cast_except(cast, tree, passes))


def cast_result(result: PyTree, carry: PyTree, cast: Cast = lambda tree: tree) -> PyTree:
    """Returns the result of a call cast, but the new carry of a step in the dtypes of the old."""
    if carry is None:
        return cast(result)
    structure = jax.tree.structure(carry)
    if jax.tree.structure(result) == structure:  # the carry alone, as in `nn.remat_scan`
        return jax.tree.map(cast_like, result, carry)
    # The carry and the output of a step, as in `nn.scan`.
    if isinstance(result, tuple) and result and jax.tree.structure(result[0]) == structure:
        return (jax.tree.map(cast_like, result[0], carry), *cast(result[1:]))
    return cast(result)


def _cast_arguments(
    policy: Policy, args: Args, kwargs: Kwargs, passes: Passes
) -> tuple[Args, Kwargs]:
    """Returns the arguments of a call in the compute dtype.

    One in which nothing is cast stays the same object, as a list to which a module appends must.
    """
    compute = np.dtype(policy.compute_dtype)

    def cast(argument: PyTree) -> PyTree:
        if isinstance(argument, jax.Array) and argument.dtype == compute:
            return argument  # what most calls are given
        new = cast_except(policy.cast_to_compute, argument, passes)
        return argument if are_same(argument, new, passes) else new

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def are_same(tree: PyTree, other: PyTree, is_leaf: Passes | None = None) -> bool:
    """Whether two pytrees have the same objects as leaves."""
    leaves, others = (jax.tree.leaves(each, is_leaf=is_leaf) for each in (tree, other))
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def _as_wide_as(came: list[PyTree]) -> Cast:
    """Returns a function that casts leaves which are narrower than the arguments of their shape."""

    def widen(leaf: PyTree) -> PyTree:
        if not is_floating(leaf):
            return leaf
        same = [each for each in came if each.shape == leaf.shape] or came
        # JAX takes NumPy's float64 as float32, unless it has 64-bit types.
        dtypes = [jax.dtypes.canonicalize_dtype(each.dtype) for each in same]
        return at_least(widest(dtypes))(leaf)

    return lambda tree: jax.tree.map(widen, tree)


def widest(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Returns the dtype of the most bits, because strict promotion knows no common dtype."""
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def at_least(dtype: np.dtype) -> Cast:
    """Returns a function that casts a floating leaf which is narrower than a dtype."""

    def widen(leaf: PyTree) -> PyTree:
        is_narrow = is_floating(leaf) and leaf.dtype.itemsize < dtype.itemsize
        return cast_tree(leaf, dtype) if is_narrow else leaf

    return widen
