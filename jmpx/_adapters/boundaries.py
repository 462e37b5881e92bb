"""Casts at the calls of modules: of arguments, results and parameters; proxy classes."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._adapters.dtype_fields import field_in_autocast
from jmpx._base.made_once import made_once
from jmpx._base.stateful import Arguments as Args, Function as Method, Keywords as Kwargs
from jmpx._base.trees import PyTree, cast_except, cast_like, cast_tree, is_floating
from jmpx._jaxprs import core
from jmpx._jaxprs.marks import Module
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy
from jmpx._policies.registry import in_loop, is_outermost, marked_call, running

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
        """Returns the test for nodes that pass as they are in a call of an outermost module."""

        def passes_these(node: object) -> bool:
            return passes(node) or any(node is leaf for leaf in self.leaves)

        nodes = jax.tree.leaves((args, kwargs), is_leaf=passes_these)
        self.came |= any(node is leaf for node in nodes for leaf in self.leaves)
        # The tracers in the body of another trace are other objects than these leaves.
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

    At a boundary, the result is cast to the output dtype. Other calls are of modules that read
    parameters themselves: an argument in float32, such as noise, would widen their products.

    In loops and branches of JAX, where results have to keep the dtype of a carry, and anywhere if
    it `keeps`, such a call casts only arguments that are wider than the compute dtype, and widens
    results back: to the widest floating argument of the same shape, or else of all. Elsewhere the
    result is as the method returns it.

    The outermost call leaves the arguments of `leaving_uncast` as they are. The new `carry` of a
    step gets the dtypes of the old one. Nodes that `passes` selects stay as they are. `by` is the
    function that has the call cast, as the user calls it.
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

    Without casts an argument stays the same object: a module may append to a list.
    """
    compute = np.dtype(policy.compute_dtype)

    def cast(argument: PyTree) -> PyTree:
        if isinstance(argument, jax.Array) and argument.dtype == compute:
            return argument  # as in most calls
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


# Casts of parameters: one in each trace, however often modules read a parameter.


# Parameters and their casts, by identity and dtype. The parameter is kept so that no other object
# gets its identity.
_Casts = dict[tuple[int, np.dtype], tuple[PyTree, PyTree]]


class ParameterCasts:
    """The casts that are made while a model is traced, anew in each trace: no array may leak."""

    def __init__(self) -> None:
        self._traces: list[tuple[object, _Casts]] = []  # those that are under way, innermost last

    def clear(self) -> None:
        """Forgets the casts."""
        self._traces.clear()

    def to_compute(self, policy: Policy, tree: T) -> T:
        """Returns a stored parameter, any pytree, in the compute dtype of a policy."""
        return jax.tree.map(lambda leaf: self._cast(policy, leaf), tree)

    def _cast(self, policy: Policy, leaf: PyTree) -> PyTree:
        # JAX's search for leaks would find the casts of inner traces here.
        if not isinstance(leaf, jax.core.Tracer) or core.looks_for_leaks():
            return policy.cast_to_compute(leaf)
        casts, key = self._casts(), (id(leaf), jnp.dtype(policy.compute_dtype))
        if key not in casts:
            casts[key] = leaf, policy.cast_to_compute(leaf)
        return casts[key][1]

    def _casts(self) -> _Casts:
        """Returns the casts of the current trace; forgets those of inner traces, which ended."""
        current = core.current_trace()
        known = [i for i, (trace, _) in enumerate(self._traces) if trace == current]
        if known:
            del self._traces[known[0] + 1 :]
        else:
            self._traces.append((current, {}))
        return self._traces[-1][1]


# Proxy classes: subclasses of a user's classes, whose public methods cast or mark their calls.


_PLAIN = "_jmpx_plain_class"  # the attribute of a proxy class that holds the plain class


def is_public(name: str) -> bool:
    """Whether a method of this name is public, as `__call__` is, too."""
    return name == "__call__" or not name.startswith("_")


def public_methods(cls: type, base: type) -> Iterator[str]:
    """Yields the names of the public methods that a class adds to the framework's base class."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    others = {*dir(base), *(field.name for field in fields)}
    for name in dir(cls):
        if not is_public(name) or name in others:
            continue
        attribute = inspect.getattr_static(cls, name)
        # Objects that `equinox.filter_jit` makes bind to an instance, too, as functions do.
        binds = callable(attribute) and hasattr(attribute, "__get__")
        is_method = binds and not isinstance(attribute, staticmethod | classmethod | type)
        if is_method or isinstance(attribute, functools.partialmethod):
            yield name


def proxy_class(cls: type[T], namespace: Mapping[str, object], mixin: type = object) -> type[T]:
    """Returns a subclass that bears the names and the docstring of its class."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (cls,) if issubclass(cls, mixin) else (mixin, cls)
    return type(cls)(cls.__name__, bases, {**namespace, **names})


@made_once
def marking_proxy_class(
    cls: type[T], modules: tuple[Module, ...], base: type, mixin: type = object
) -> type[T]:
    """Returns the proxy class whose public methods mark their calls, for `jmpx.autocast`.

    A call counts for several `modules`: this one, and containers around it.
    """

    def marked(name: str) -> Method:
        method = inspect.getattr_static(cls, name)

        @functools.wraps(method, updated=())
        def wrapper(self: T, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
            with contextlib.ExitStack() as stack:
                for module in modules:
                    stack.enter_context(marked_call(*module))
                stack.enter_context(field_in_autocast(self, modules[-1]))
                return method.__get__(self, type(self))(*args, **kwargs)

        return wrapper

    namespace = {name: marked(name) for name in public_methods(cls, base)}
    return proxy_class(cls, {**namespace, _PLAIN: plain_class(cls)}, mixin)


def plain_class(cls: type) -> type:
    """Returns the class that the user wrote, also for a proxy class that marks."""
    return getattr(cls, _PLAIN, cls)


def check_view(view: object, policy_map: PolicyMap | None) -> None:
    """Raises if a module is a view under another policy map than one that is given."""
    cls: PyTree = type(view)
    if policy_map not in (None, cls.__jmpx_view__):
        raise ValueError(
            f"Cannot apply policy map {str(policy_map)!r} to a {cls.__name__} that is a view "
            f"already, under {str(cls.__jmpx_view__ or '')!r}, because its parameters are cast: "
            "give the part a rule in that policy map, or pass the model itself."
        )


def is_optimizer_state(node: object) -> bool:
    """Whether a node of a pytree is a state of Optax or jmpx, whose arrays are never cast."""
    package = type(node).__module__.partition(".")[0]
    return package in ("optax", "jmpx") and not jax.tree_util.all_leaves([node])
