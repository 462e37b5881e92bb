"""What the adapters of all frameworks share, and the words that they use.

- A *boundary* is a call of a module's public method that casts: its arguments to the compute dtype
  of a policy, the *boundary policy*, and its result to the output dtype.
- The *surrounding policy* of a call is the policy under which the call around it runs; the
  outermost call has none. Of nested calls or contexts, the *innermost* one began last.
- A *session* is one use of a policy map: a `policies` context with those of an equal map that begin
  in it, or one making of a view.
- A *pool* is what the sessions of one policy map have met that begin in one context, so that a rule
  which matches a module of any framework counts as used.
- A *view* is a model that `with_policies` made: its parameters are cast, and its modules cast at
  their boundaries.
- The *carry* of a loop is the value that each step takes and hands to the next one. It keeps its
  dtype, because a loop in JAX requires that.
- A *proxy class* is a subclass that an adapter makes of a module's class, so that the methods cast
  or mark their calls. The *plain class* is the class that the user wrote.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._adapters.dtype_fields import FieldCensus
from jmpx._base.casts import cast_like, cast_tree
from jmpx._base.contexts import (
    Context,
    Hook,
    entered,
    excuse_casts,
    is_held,
    opened,
    refuse_other_tasks,
)
from jmpx._base.dtypes import DTypeLike, dtype_name
from jmpx._base.leaves import is_floating
from jmpx._base.made_once import made_once
from jmpx._base.matmul import is_algorithm, matmul_of
from jmpx._base.messages import user_stacklevel
from jmpx._jaxprs import core
from jmpx._jaxprs.marks import Module, in_module
from jmpx._policies.added_rules import in_force
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike, warn_unused
from jmpx._policies.policy import Policy
from jmpx._policies.registry import in_loop, policy_of, running
from jmpx._policies.rules import Rule

T = TypeVar("T")

PyTree: TypeAlias = Any  # JAX has no type for pytrees
# A method of a user's module takes and returns values of any types.
Method: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]

core.import_extend()  # now, because `in_loop` is often asked first inside of a trace

_PLAIN = "_jmpx_plain_class"  # the attribute of a proxy class that holds the plain class


@contextlib.contextmanager
def required_package(package: str, framework: str) -> Iterator[None]:
    """Says how to install a framework whose import fails; put it around the import.

    Args:
        package: the package that is imported, which is also the name of the adapter and the extra.
        framework: the framework's name.

    Raises:
        ModuleNotFoundError: if the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"jmpx.{package} needs {framework}, which is not installed: "
            f"pip install 'jmpx[{package}]'.",
            name=package,
        ) from None


class ModuleRecord(NamedTuple):
    """A module that a session met, or an array of a view that has a rule of its own.

    Args:
        module: the module, or the class and path of the array.
        boundary: its boundary policy; None if its calls do not cast.
        surrounding: the surrounding policy; None for the outermost call.
        rule: the rule of an array; None for a module.
    """

    module: Module
    boundary: Policy | None
    surrounding: Policy | None
    rule: Rule | None = None


@dataclasses.dataclass(eq=False)  # an open pool is told from another one of an equal map
class Pool:
    """What the sessions of one policy map have met that began in one context of `pooled`.

    Args:
        name: the function that applies the policy map, as the user calls it.
        policy_map: the policy map; None for the policies of classes alone.

    Attributes:
        seen: the modules that were met.
        arrays: the paths of the floating arrays of views.
        census: the parameters that `dtype` fields keep from the policy map.
        coarse: the convolutions for which JAX ignores the algorithm of their policy, with its name.
    """

    name: str
    policy_map: PolicyMap | None
    seen: set[Module] = dataclasses.field(default_factory=set)
    arrays: set[str] = dataclasses.field(default_factory=set)
    census: FieldCensus = dataclasses.field(default_factory=FieldCensus)
    coarse: dict[Module, str | None] = dataclasses.field(default_factory=dict)

    @classmethod
    def open_for(cls, name: str, policy_map: PolicyMap | None) -> "Pool":
        """Returns the outermost open pool of an equal map, a new one if there is none."""
        pools = (pool for pool in opened(cls) if pool.policy_map == policy_map)
        return next(pools, cls(name, policy_map))

    def warn(self, stacklevel: int) -> None:
        """Warns of rules and of an algorithm without effect, and of `dtype` fields that go before.

        Args:
            stacklevel: the `stacklevel` that the caller would give to `warnings.warn`.
        """
        if self.policy_map is not None:
            warn_unused(self.policy_map, self.seen, stacklevel + 1, arrays=self.arrays)
            self.census.warn(self.policy_map, self.name, stacklevel + 1)
        if self.coarse:
            warn_of_convolution(*next(iter(self.coarse.items())), stacklevel + 1)


class PolicyScope:
    """One use of a policy map: contexts of an equal map in each other, or one making of a view.

    Args:
        name: the function that begins the session, as the user calls it.
        policy_map: a policy map, a policy, or a string of either; None for the policies of classes
            alone.

    Attributes:
        pool: the pool in which the session began; one of its own outside of all.
        paths: the paths of the modules that were met.
        ruled: the paths of the floating arrays of a view that have rules of their own.
        met: the modules with their policies, in the order of their first calls; empty outside of
            `listening`.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if the string is not of the grammar of policy maps.
    """

    def __init__(self, name: str, policy_map: PolicyMapLike | None) -> None:
        self.name = name
        self.policy_map = _for_modules(policy_map, name)
        excuse_casts(name, self.policy_map)
        self.pool = Pool.open_for(name, self.policy_map)
        self.paths: set[str] = set()
        self.ruled: set[str] = set()
        self.met: dict[ModuleRecord, None] = {}
        self.tell_listeners()

    def tell_listeners(self) -> None:
        """Adds the session to those that the open contexts of `listening` collect."""
        self._listeners = opened(_Listener)
        for listener in self._listeners:
            if self not in listener:
                listener.append(self)

    @property
    def census(self) -> FieldCensus:
        """The parameters that `dtype` fields keep from the policy map."""
        return self.pool.census

    def give_back(self) -> None:
        """Gives back what the session has replaced; it ends in the thread in which it began."""

    def boundary_policy(self, cls: type, path: str, surrounding: Policy | None) -> Policy | None:
        """Returns the policy at whose boundary a call of a module casts, and notes the module.

        A rule of the map goes before the policy of the class, and that before the map's default,
        which is the policy of the outermost call alone.

        Args:
            cls: the class of the module.
            path: the path of the module.
            surrounding: the surrounding policy; None for the outermost call.

        Returns:
            The boundary policy, None for a call that does not cast.

        Raises:
            ValueError: if another task of this thread is inside a context of jmpx.
        """
        refuse_other_tasks(f"cast a {cls.__name__}")
        self.pool.seen.add(Module(cls, path))
        self.paths.add(path)
        policy = self.explicit_policy(cls, path, surrounding)
        if policy is None and surrounding is None and self.policy_map is not None:
            return self.policy_map.default
        return policy

    def explicit_policy(self, cls: type, path: str, surrounding: Policy | None) -> Policy | None:
        """Returns the policy that a rule or else the class gives to a module, None without one."""
        if self.policy_map is not None:
            rule = self.policy_map.rule_for(cls, path)
            if rule is not None:
                return rule.resolve(self.policy_map.default, surrounding)
        policy = policy_of(cls)
        default = None if self.policy_map is None else self.policy_map.default
        matmul = matmul_of(default if surrounding is None else surrounding)
        if policy is None or matmul is None or matmul_of(policy) is not None:
            return policy
        if not isinstance(policy, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]
            # One of JMP, which Haiku's registry may hold.
            policy = Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
        return dataclasses.replace(policy, matmul_precision=matmul)  # inherited, as by a rule

    def array_policy(self, path: str, surrounding: Policy | None) -> Policy | None:
        """Returns the policy of a floating array in a view, and notes the array.

        That is the last glob that matches the array and no module around it: a glob of both is a
        rule for modules. The modules around have asked for their policies before.

        Args:
            path: the path of the array.
            surrounding: the policy that casts the arrays around it; None if none does.

        Returns:
            The policy, None for an array that no rule selects.
        """
        rules = () if self.policy_map is None else self.policy_map.rules
        ends = [end for end, letter in enumerate(path) if letter == "/"]
        around = [outer for outer in ("", *(path[:end] for end in ends)) if outer in self.paths]
        selecting = [
            rule
            for rule in rules
            if rule.is_path
            and rule.matches(object, path)
            and not any(rule.matches(object, outer) for outer in around)
        ]
        self.pool.arrays.add(path)
        if not selecting or self.policy_map is None:
            return None
        self.ruled.add(path)
        policy = selecting[-1].resolve(self.policy_map.default, surrounding)
        if self._listeners:
            self.met[ModuleRecord(Module(jax.Array, path), policy, surrounding, selecting[-1])] = (
                None
            )
        return policy

    def record_module(
        self, cls: type, path: str, boundary: Policy | None, surrounding: Policy | None
    ) -> None:
        """Notes the policies of a module, after the adapter has decided on its boundary."""
        if self._listeners:
            self.met[ModuleRecord(Module(cls, path), boundary, surrounding)] = None

    def note_convolution(self, cls: type, path: str, policy: Policy | None) -> None:
        """Notes a convolution without a precision of its own, for `warn`.

        Args:
            cls: its class.
            path: its path.
            policy: the policy under which it runs.
        """
        if policy is not None and ignores_matmul(matmul_of(policy), policy.compute_dtype):
            self.pool.coarse.setdefault(Module(cls, path), matmul_of(policy))

    def warn(self, stacklevel: int) -> None:
        """Warns of what the pool warns of, unless a context of `pooled` does so at its end.

        Args:
            stacklevel: the `stacklevel` that the caller would give to `warnings.warn`.
        """
        if not is_held(self.pool):
            self.pool.warn(stacklevel + 1)


S = TypeVar("S", bound=PolicyScope)


@contextlib.contextmanager
def in_policy_scope(
    kind: type[S], name: str, policy_map: PolicyMapLike | None, hook: Hook
) -> Iterator[S]:
    """Opens a session, or goes on with the innermost one of its kind if it follows an equal map.

    Contexts that go on with one session may end in any order: it lasts as long as any of them.

    Args:
        kind: the adapter's class of sessions.
        name: the function that makes the context, as the user calls it.
        policy_map: all that `PolicyScope` takes.
        hook: hooks into the framework; see `_contexts.Context`.

    Yields:
        The session.
    """
    innermost = opened(kind)[-1:]
    if innermost and innermost[0].policy_map == _for_modules(policy_map, name):
        session = innermost[0]
        session.tell_listeners()
    else:
        session = kind(name, policy_map)
    # JAX's caches tell policy maps apart, and not sessions of an equal one.
    with entered(Context(name, session, (session.policy_map,), hook, session.give_back)):
        yield session


def _for_modules(policy_map: PolicyMapLike | None, name: str) -> PolicyMap | None:
    """Returns the policy map that an adapter follows; None for None.

    Raises:
        ValueError: if the map is written for another way than by modules.
    """
    if policy_map is None:
        return None
    return in_force(get_policy_map(policy_map).applied_by("modules", name), name)


@contextlib.contextmanager
def pooled(policy_map: PolicyMapLike | None, name: str) -> Iterator[Any]:
    """Has the sessions of all frameworks under one policy map warn together, at the end.

    Inside of another pool of an equal map, that is this pool, too: the last of them to end warns.

    Args:
        policy_map: the policy map; None for the policies of classes alone.
        name: the function that applies it, as the user calls it.

    Yields:
        The policy map to give to the adapters, None for None.
    """
    pool = Pool.open_for(name, _for_modules(policy_map, name))
    with entered(Context(name, pool)):
        yield None if policy_map is None else get_policy_map(policy_map).applied_by("modules", name)
    if not is_held(pool):
        pool.warn(user_stacklevel("jax", "flax", "haiku", "equinox"))


class _Wrapper(NamedTuple):
    """A running call of a module that wraps one of another framework."""

    policy: Policy
    policy_map: PolicyMap | None


def wrapping(
    policy: Policy, policy_map: PolicyMap | None
) -> contextlib.AbstractContextManager[None]:
    """Hands a policy on to the modules of another framework that run in the context.

    Args:
        policy: the policy under which the module runs that wraps them.
        policy_map: the policy map; sessions under other ones take no notice.
    """
    return entered(Context("wrapping", _Wrapper(policy, policy_map)))


def wrapper_policy(policy_map: PolicyMap | None) -> Policy | None:
    """Returns the policy that `wrapping` hands on to sessions of a policy map, None without one."""
    wrappers = [each for each in opened(_Wrapper) if each.policy_map == policy_map]
    return wrappers[-1].policy if wrappers else None


def ignores_matmul(matmul: str | None, dtype: DTypeLike) -> bool:
    """Whether JAX would ignore an algorithm for a convolution that is computed in a dtype."""
    return is_algorithm(matmul) and jnp.dtype(dtype) == jnp.float32


def warn_of_convolution(module: Module, matmul: str | None, stacklevel: int) -> None:
    """Warns of a convolution in float32 under a dot algorithm, which JAX ignores for it.

    Args:
        module: the convolution.
        matmul: the name of the algorithm.
        stacklevel: the `stacklevel` that the caller would give to `warnings.warn`.
    """
    warnings.warn(
        f"matmul={matmul} does not hold for convolutions, such as the {module.cls.__name__} at "
        f"{module.path!r}: JAX ignores a dot algorithm there and takes its default precision, so "
        "give the convolutions a word, such as matmul=highest.",
        stacklevel=stacklevel + 1,
    )


class _Listener(list[PolicyScope]):
    """The sessions that began in a context of `listening`."""


@contextlib.contextmanager
def listening() -> Iterator[list[PolicyScope]]:
    """Collects the sessions that begin while the context lasts; each notes what it meets."""
    listener = _Listener()
    # The key is new each time, so that JAX traces a jitted function again and its modules run.
    with entered(Context("listening", listener, key=object())):
        yield listener


def inherited_policy(surrounding: Policy) -> Policy:
    """Returns the policy of a boundary that no rule, class or default gives a policy.

    A module with running statistics in float32, and a cell whose carry may be in another dtype,
    need a boundary, so that their results come in the dtype of their surroundings.
    """
    return surrounding.with_output_dtype(surrounding.compute_dtype)


def run_at_boundary(
    policy: Policy,
    method: Method,
    args: Args,
    kwargs: Kwargs,
    *,
    by: str,
    carry: PyTree = None,
    passes: Callable[[Any], bool] | None = None,
) -> Any:
    """Runs a method with its arguments and its result cast.

    Args:
        policy: the boundary policy.
        method: the method.
        args: its positional arguments.
        kwargs: its keyword arguments.
        by: the function that makes the boundary, as the user calls it.
        carry: the carry among the arguments, if the method is a step of a loop.
        passes: whether a node of a pytree passes the boundary as it is; None if none does.

    Returns:
        The result in the output dtype, but a new carry in the dtypes of the old one.
    """

    def to_output(tree: PyTree) -> PyTree:
        return cast_except(policy.cast_to_output, tree, passes)

    args, kwargs = _cast_arguments(policy, args, kwargs, passes)
    with running(policy, by):
        result = method(*args, **kwargs)
    return cast_result(to_output, result, carry)


def cast_result(cast: Callable[[PyTree], PyTree], result: Any, carry: PyTree) -> Any:
    """Returns the result of a call cast, but a new carry in the dtypes of the old one.

    Args:
        cast: casts what is no carry.
        result: the result.
        carry: the old carry, if the call is a step of a loop; else None.
    """
    if carry is None:
        return cast(result)
    structure = jax.tree.structure(carry)
    if jax.tree.structure(result) == structure:  # the carry alone, as in `nn.remat_scan`
        return jax.tree.map(cast_like, result, carry)
    # The carry and the output of a step, as in `nn.scan`.
    if isinstance(result, tuple) and result and jax.tree.structure(result[0]) == structure:
        return (jax.tree.map(cast_like, result[0], carry), *cast(result[1:]))
    return cast(result)


def run_reading(
    policy: Policy,
    method: Method,
    args: Args,
    kwargs: Kwargs,
    *,
    by: str,
    carry: PyTree = None,
    passes: Callable[[Any], bool] | None = None,
    keeps: bool = False,
) -> Any:
    """Runs a call that is no boundary, of a module that reads parameters itself.

    What is made inside of a model, such as noise, is often float32. Floating arguments are cast, so
    that it does not widen the products of this module and all that follows.

    Args:
        policy: the policy under which the module reads its parameters.
        method: the method.
        args: its positional arguments.
        kwargs: its keyword arguments.
        by: the function that casts, as the user calls it.
        carry: the carry among the arguments, if the method is a step of a loop.
        passes: whether a node of a pytree passes as it is; None if none does.
        keeps: whether the result is to be as wide as the arguments outside of loops, too.

    Returns:
        The result as the method returns it, but a new carry in the dtypes of the old one. Inside of
        a loop or a branch of JAX, where results have to keep the dtype of a carry, only arguments
        that are wider than the compute dtype are cast. If there are any, each array of the result
        is at least as wide as the widest floating argument of its shape was, or of all if none has
        it.
    """
    came = _floating_leaves((args, kwargs), passes) if keeps or in_loop() else []
    size = np.dtype(policy.compute_dtype).itemsize
    is_narrowed = any(each.dtype.itemsize > size for each in came)

    def widen(tree: PyTree) -> PyTree:
        if not is_narrowed:
            return tree
        return cast_except(lambda tree: jax.tree.map(_as_wide_as(came), tree), tree, passes)

    passing = _passes_narrow(policy, passes) if came else passes
    args, kwargs = _cast_arguments(policy, args, kwargs, passing)
    with running(policy, by):
        result = method(*args, **kwargs)
    return cast_result(widen, result, carry)


def _cast_arguments(
    policy: Policy, args: Args, kwargs: Kwargs, passes: Callable[[Any], bool] | None
) -> tuple[Args, Kwargs]:
    """Returns the arguments of a call in the compute dtype.

    One in which nothing is cast stays the same object, as a list to which a module appends must.
    """
    compute = np.dtype(policy.compute_dtype)

    def cast(argument: Any) -> Any:
        if isinstance(argument, jax.Array) and argument.dtype == compute:
            return argument  # what most calls are given
        new = cast_except(policy.cast_to_compute, argument, passes)
        old_leaves, leaves = (jax.tree.leaves(tree, is_leaf=passes) for tree in (argument, new))
        return argument if all(map(operator.is_, old_leaves, leaves)) else new

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _passes_narrow(policy: Policy, passes: Callable[[Any], bool] | None) -> Callable[[Any], bool]:
    """Returns whether a node passes as it is, or is an array that is no wider than a policy's."""
    size = np.dtype(policy.compute_dtype).itemsize

    def is_kept(node: Any) -> bool:
        is_narrow = is_floating(node) and node.dtype.itemsize <= size
        return is_narrow or (passes is not None and passes(node))

    return is_kept


class _Came(NamedTuple):
    """A floating argument as it came."""

    shape: tuple[int, ...]
    dtype: np.dtype


def _floating_leaves(tree: PyTree, passes: Callable[[Any], bool] | None) -> list[_Came]:
    """Returns the floating leaves in a pytree, without the nodes that pass."""
    leaves = jax.tree.leaves(tree, is_leaf=passes)
    cast = [leaf for leaf in leaves if passes is None or not passes(leaf)]
    # JAX takes NumPy's float64 as float32, unless it has 64-bit types.
    canonical = jax.dtypes.canonicalize_dtype
    return [_Came(leaf.shape, canonical(leaf.dtype)) for leaf in cast if is_floating(leaf)]


def _as_wide_as(came: list[_Came]) -> Callable[[Any], Any]:
    """Returns a function that casts a floating leaf which is narrower than the arguments alike."""

    def widen(leaf: Any) -> Any:
        if not is_floating(leaf):
            return leaf
        alike = [each for each in came if each.shape == leaf.shape] or came
        # By their sizes, because strict promotion knows no common dtype.
        return at_least(max((each.dtype for each in alike), key=lambda dtype: dtype.itemsize))(leaf)

    return widen


def at_least(dtype: np.dtype) -> Callable[[Any], Any]:
    """Returns a function that casts a floating leaf which is narrower than a dtype."""

    def widen(leaf: Any) -> Any:
        is_narrow = is_floating(leaf) and leaf.dtype.itemsize < dtype.itemsize
        return cast_tree(leaf, dtype) if is_narrow else leaf

    return widen


class _Thread(threading.local):
    """The calls of `noted_carries` that are open in this thread.

    Attributes:
        inside: for each call, the innermost last, the classes of the modules that it called in
            loops or branches of JAX, with their compute dtypes.
    """

    def __init__(self) -> None:
        self.inside: list[dict[type, DTypeLike]] = []


_thread = _Thread()


@contextlib.contextmanager
def noted_carries(cls: type, policy: Policy | None) -> Iterator[None]:
    """Adds the rule that mends it to JAX's error of a carry or a branch in another dtype.

    Put it around each call of a module under a policy. An error of a loop is raised in the call
    around the loop; the modules that returned inside of the loop are named.

    Args:
        cls: the plain class of the module.
        policy: the policy under which the call runs; None if it runs under none.
    """
    inside: dict[type, DTypeLike] = {}
    calls = _thread.inside  # of this thread, where a generator may end in another one
    calls.append(inside)
    try:
        yield
    except TypeError as error:
        _note_carry(error, inside)
        raise
    finally:
        calls[:] = [call for call in calls if call is not inside]
    if policy is not None and calls and in_loop():
        calls[-1][cls] = policy.compute_dtype


_OTHER_DTYPES = re.compile(r"has type (\w+)\[.* has type (\w+)\[.* the dtypes do not match")


def _note_carry(error: TypeError, inside: dict[type, DTypeLike]) -> None:
    """Adds a note with rules for modules to JAX's error of dtypes that differ, if it is one."""
    dtypes = _OTHER_DTYPES.search(str(error))
    if dtypes is None or not inside:
        return
    is_loop = "carry" in str(error)  # the carry that came in is named first
    kept = dtypes[1] if is_loop else max(dtypes.groups(), key=lambda name: np.dtype(name).itemsize)
    rules = " or ".join(
        f"'{cls.__name__}: compute={dtype_name(compute)},output={kept}'"
        for cls, compute in inside.items()
    )
    error.add_note(
        "A loop of JAX keeps the dtype of its carry, and branches return equal dtypes, but a "
        "module inside returned another dtype than it was given, as its policy says: give it a "
        f"rule in the policy map with the dtype of the carry, {rules}, or begin with a carry in "
        "the other dtype."
    )


def cast_except(
    cast: Callable[[PyTree], PyTree], tree: T, passes: Callable[[Any], bool] | None
) -> T:
    """Casts a pytree except for the nodes that pass as they are."""
    if passes is None:
        return cast(tree)
    nodes, treedef = jax.tree.flatten(tree, is_leaf=passes)
    if not any(map(passes, nodes)):
        return cast(tree)
    others = treedef.unflatten([None if passes(node) else node for node in nodes])
    pairs = zip(nodes, treedef.flatten_up_to(cast(others)), strict=True)
    return treedef.unflatten([node if passes(node) else new for node, new in pairs])


def is_public(name: str) -> bool:
    """Whether a method of this name is public, as `__call__` is, too."""
    return name == "__call__" or not name.startswith("_")


def public_methods(cls: type, base: type) -> Iterator[str]:
    """Yields the names of the public methods that a module's class adds to the framework's.

    Args:
        cls: the class of the module.
        base: the framework's class of all modules.
    """
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    others = {*dir(base), *(field.name for field in fields)}
    for name in dir(cls):
        if not is_public(name) or name in others:
            continue
        attribute = inspect.getattr_static(cls, name)
        # A function binds to an instance, and so do objects such as `equinox.filter_jit` makes.
        binds = callable(attribute) and hasattr(attribute, "__get__")
        is_method = binds and not isinstance(attribute, staticmethod | classmethod | type)
        if is_method or isinstance(attribute, functools.partialmethod):
            yield name


def proxy_class(cls: type[T], namespace: dict[str, Any], mixin: type = object) -> type[T]:
    """Returns a subclass that bears the names and the docstring of its class.

    Args:
        cls: the class.
        namespace: the attributes of the subclass.
        mixin: a further base class, which goes before `cls`.
    """
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (cls,) if issubclass(cls, mixin) else (mixin, cls)
    return type(cls)(cls.__name__, bases, {**namespace, **names})


@made_once
def marking_proxy_class(
    cls: type[T], modules: tuple[Module, ...], base: type, mixin: type = object
) -> type[T]:
    """Returns the proxy class whose public methods mark their calls, for `jmpx.autocast`.

    Args:
        cls: the class of a module.
        modules: the modules that a call is of: this one, and containers around it.
        base: the framework's class of all modules.
        mixin: a further base class, which goes before `cls`.
    """

    def marked(name: str) -> Method:
        method = inspect.getattr_static(cls, name)

        @functools.wraps(method, updated=_copied_attributes(method))
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for module in modules:
                    stack.enter_context(in_module(*module))
                return method.__get__(self, type(self))(*args, **kwargs)

        return wrapper

    namespace = {name: marked(name) for name in public_methods(cls, base)}
    return proxy_class(cls, {**namespace, _PLAIN: plain_class(cls)}, mixin)


def _copied_attributes(method: object) -> tuple[str, ...]:
    """Returns what `functools.wraps` copies: the attributes of a function, not of an object."""
    return functools.WRAPPER_UPDATES if inspect.isfunction(method) else ()


def is_optimizer_state(node: Any) -> bool:
    """Whether a node of a pytree is a state of Optax or jmpx, whose arrays nobody casts.

    Averages of gradients have the structure of the model, and its modules in them.
    """
    package = type(node).__module__.partition(".")[0]
    return package in ("optax", "jmpx") and not jax.tree_util.all_leaves([node])


def plain_class(cls: type) -> type:
    """Returns the class that the user wrote, for a proxy class that marks; else `cls` itself."""
    return getattr(cls, _PLAIN, cls)
