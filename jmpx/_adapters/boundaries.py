"""Casts at the calls of modules: of arguments, results, parameters and `dtype` fields."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.dtypes import DTypeLike, as_dtype, computable, dtype_name
from jmpx._base.made_once import made_once
from jmpx._base.messages import casts_noted
from jmpx._base.stateful import Arguments as Args, Function as Method, Keywords as Kwargs
from jmpx._base.trees import PyTree, cast_except, cast_like, cast_tree, is_floating
from jmpx._jaxprs import core
from jmpx._jaxprs.marks import Module, Selects, selects
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy
from jmpx._policies.registry import in_loop, is_outermost, marked_call, running


def dtype_field(module: object) -> np.dtype | None:
    """Returns the floating dtype that the `dtype` field of a module names, but none of 8 bits."""
    value = vars(module).get("dtype")
    if value is None:
        return None
    try:
        dtype = np.dtype(value)
    except TypeError:  # a field of this name that holds something else
        return None
    is_usable = jnp.issubdtype(dtype, jnp.floating) and computable(dtype) == dtype
    return dtype if is_usable else None


class Selected(NamedTuple):
    """How a rule changes the `dtype` fields in the layer that it selects."""

    written: np.dtype | None  # the field of that layer as the user wrote it, None if it has none
    dtype: np.dtype  # the compute dtype of the rule


class FieldInCall(NamedTuple):
    """The `dtype` field of a layer during a call."""

    value: np.dtype | None  # None for a layer without the field
    is_ruled: bool  # whether a rule set it, which may have selected a layer around this one
    selected: Selected | None  # for the layers inside; None if no rule is around them


def field_in_call(module: object, ruled: DTypeLike | None, around: Selected | None) -> FieldInCall:
    """Returns the field of a layer in a call, by a rule for the layer or for one around it.

    `ruled` is the compute dtype of the rule for the layer, None without one.
    """
    field = dtype_field(module)
    if ruled is not None:
        dtype = np.dtype(ruled)
        return FieldInCall(None if field is None else dtype, True, Selected(field, dtype))
    if field is not None and around is not None and field in (around.written, around.dtype):
        return FieldInCall(around.dtype, True, around)
    return FieldInCall(field, False, around)


def reading_policy(policy: Policy, field: np.dtype | None) -> Policy:
    """Returns the policy under which a layer reads its parameters: its field takes precedence."""
    if field is None or field == np.dtype(policy.compute_dtype):
        return policy
    return dataclasses.replace(policy, compute_dtype=field)


def spelled_as(written: DTypeLike | None, dtype: np.dtype) -> DTypeLike:
    """Returns a dtype in the form of another: a name, a NumPy dtype or a scalar type of JAX."""
    if isinstance(written, str):
        return dtype.name
    return dtype if isinstance(written, np.dtype) else as_dtype(dtype)


@contextlib.contextmanager
def field_set(module: object, dtype: np.dtype | None) -> Iterator[None]:
    """Sets the `dtype` field of a module for a call; None leaves it."""
    fields = vars(module)  # a module of Linen or Equinox is frozen
    written = fields.get("dtype")
    if dtype is None or (written is not None and np.dtype(written) == dtype):
        yield
        return
    fields["dtype"] = spelled_as(written, dtype)
    try:
        yield
    finally:
        fields["dtype"] = written


class _Call(NamedTuple):
    """A running method of a module under autocast."""

    by: Selects  # of the autocast around it
    module: Module
    field: FieldInCall


_running = contextvars.ContextVar[_Call | None]("_running", default=None)


@contextlib.contextmanager
def field_in_autocast(layer: object, module: Module) -> Iterator[None]:
    """Has a layer compute in float32 for a call that autocast traces, if a rule sets its field.

    Autocast casts what is traced in float32, to the dtype of the rule or of what is around.
    """
    by, call = selects(), _running.get()
    if by is None:
        yield
        return
    outer = call if call is not None and call.by is by else None
    if outer is not None and outer.module == module:  # a method that the module calls on itself
        call = outer
    else:
        around = None if outer is None else outer.field.selected
        call = _Call(by, module, field_in_call(layer, jnp.float32 if by(*module) else None, around))
    token = _running.set(call)
    try:
        with field_set(layer, call.field.value if call.field.is_ruled else None):
            yield
    finally:
        _running.reset(token)


class FieldCensus:
    """Counts the parameters that `dtype` fields keep from the compute dtype of a policy map."""

    def __init__(self) -> None:
        self.sizes: dict[Module, dict[Hashable, int]] = {}  # of the parameters that each reads
        self.fields: dict[Module, np.dtype] = {}  # that no rule set

    def note_layer(self, module: Module, field: FieldInCall) -> None:
        """Notes a module that was met, and its field."""
        if field.value is not None and not field.is_ruled:
            self.fields[module] = field.value

    def note_parameter(self, module: Module, name: Hashable, stored: PyTree) -> None:
        """Notes a parameter, any pytree, that a module reads itself."""
        leaves = filter(is_floating, jax.tree.leaves(stored))
        self.sizes.setdefault(module, {})[name] = sum(int(np.prod(leaf.shape)) for leaf in leaves)

    def warn(self, policy_map: PolicyMap, by: str, stacklevel: int) -> None:
        """Warns if fields keep most parameters from the compute dtype of the map's default."""
        compute = np.dtype(policy_map.default.compute_dtype)
        sizes = {module: sum(own.values()) for module, own in self.sizes.items()}
        kept = [module for module in sizes if self.fields.get(module, compute) != compute]
        kept.sort(key=lambda module: -sizes[module])
        if 2 * sum(sizes[module] for module in kept) <= sum(sizes.values()):
            return
        # Layers without parameters, such as attention, multiply in the dtype of their fields, too.
        others = (m for m in self.fields if m.path and m not in sizes and self.fields[m] != compute)
        classes = dict.fromkeys(module.cls.__name__ for module in (*kept, *others))
        rules = "; ".join(f"{cls}: compute={dtype_name(compute)}" for cls in classes)
        warnings.warn(
            f"The dtype field of {len(kept)} of {len(sizes)} layers with parameters keeps most of "
            f"the parameters under {by}({str(policy_map)!r}) from {dtype_name(compute)}: write "
            f"'{rules}' before the other rules of the policy map, which sets the field, or give "
            "the layers another dtype.",
            stacklevel=stacklevel + 1,
        )


# Casts at the calls of modules: of arguments, results and parameters; proxy classes.


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
    module: Module,
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
    function that has the call of the `module` cast, as the user calls it.
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
    dtype, name = dtype_name(policy.compute_dtype), module.cls.__name__
    what = f"{name} at {module.path!r}" if module.path else name
    noted = casts_noted(what, dtype, f"compute={dtype}", f", or write the rule '{name}: full'")
    with running(policy, by), noted:
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
