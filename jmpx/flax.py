"""Flax: policy maps for Linen modules, and for NNX modules.

`policies` is for Linen, a context around `init` and `apply`; `with_policies` is for NNX, a view of
a model that is made inside the loss function.
"""

import contextlib
import dataclasses
import functools
import gc
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from jmpx._casts import cast_like
from jmpx._contexts import Context, entered, note_cast, opened, refuse_other_tasks
from jmpx._loss_scale import register_with_flax
from jmpx._marks import Module, in_module
from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, get_policy_map, warn_unused
from jmpx._registry import policy_for, running

try:
    from flax import linen as nn, nnx
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "jmpx.flax needs Flax, which is not installed: pip install 'jmpx[flax]'.", name="flax"
    ) from None

M = TypeVar("M", bound=nnx.Module)

register_with_flax()


_LINEN, _NNX = "jmpx.flax.policies", "jmpx.flax.with_policies"


class _Thread(threading.local):
    """The calls of NNX views that run in this thread, innermost last."""

    def __init__(self) -> None:
        self.views: list[nnx.Module] = []


_thread = _Thread()


# Linen


@contextlib.contextmanager
def policies(policy_map: str | Policy | PolicyMap | None = None) -> Iterator[None]:
    """Runs Linen modules under a policy map while the context lasts; also a decorator.

    A context around `init` and `apply`, in a jitted function or around its call. Calls of public
    methods are cast where a rule, a class policy or the map's default says so; `setup` and private
    methods run in what surrounds them. A module that is told a `dtype` of its own computes in that
    inside.

    Each module gets the parameters that it asks for by `self.param` in the compute dtype of the
    innermost policy, cast from the stored ones (what `setup` asks for, in that of the first call);
    what `self.variables` shows is what is stored. `init` creates parameters in the param dtype of
    that policy. Other collections, such as `batch_stats`, are left alone. What `nn.scan` loops
    over, and a recurrent cell, hands back its carry in the dtype in which the carry came.

    Contexts may be nested: the innermost one alone holds; they may end in any order. Of the tasks
    of an event loop, one at a time can be in a context: leave it before each `await`. Code that is
    compiled already cannot be told apart: it runs in another task as in the one that holds the
    context.

    Args:
        policy_map: a policy map, a policy, or a string of either; None for the policies of classes
            alone (`jmpx.set_policy`). Paths are those of the parameters, joined by slashes.

    Yields:
        None.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if the string is not of the grammar; if another task of the thread is in a
            context of jmpx, at entry or, while this one lasts, when that task runs a module.

    Warns:
        UserWarning: at the end, of each rule that matched none of the modules that ran. Once for a
            map, if no Linen module ever ran under it while there is an NNX module, which needs
            `with_policies`. A Linen module that was compiled ahead of time does not run here: in a
            program that has both, ignore it.

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
    parsed = None if policy_map is None else get_policy_map(policy_map)
    interceptor = _Interceptor(parsed)
    with entered(Context(_LINEN, interceptor, key=(parsed,), install=_interception)):
        yield
    if parsed is not None:
        warn_unused(parsed, interceptor.seen, stacklevel=3)
        _warn_without_linen(parsed, interceptor.has_run, stacklevel=3)


# The maps of contexts that have ended once: a Linen module ran under them, or it was said that none
# did. Later a module may run compiled, which cannot be seen.
_settled: set[PolicyMap] = set()


def _warn_without_linen(policy_map: PolicyMap, has_run: bool, stacklevel: int) -> None:
    """Warns once of a map under which no Linen module ran, where NNX modules are about."""
    if policy_map in _settled:
        return
    _settled.add(policy_map)
    if not has_run and _has_nnx_modules():
        warnings.warn(
            f"No Linen module ran under jmpx.flax.policies({str(policy_map)!r}), which casts those "
            "alone: for an NNX model make a view inside of the loss function, "
            "jmpx.flax.with_policies(model, policy_map).",
            stacklevel=stacklevel + 1,
        )


def _has_nnx_modules() -> bool:
    """Whether an NNX module exists. That NNX is imported says nothing: this file imports it."""
    return any(nnx.Module in type(thing).__mro__ for thing in gc.get_objects())


def _interception() -> contextlib.AbstractContextManager[None]:
    """Intercepts the method calls of this thread."""
    return nn.intercept_methods(_intercept)


def _intercept(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    interceptors = opened(_LINEN)
    if context.module.scope is None or not interceptors:
        return method(*args, **kwargs)  # it reads nothing; or a context ended out of order
    refuse_other_tasks(f"run the Linen module {type(context.module).__name__}")
    for interceptor in interceptors:  # an outer one casts nothing, but was not set up in vain
        interceptor.has_run = True
    return interceptors[-1](method, args, kwargs, context)


@contextlib.contextmanager
def marked_calls() -> Iterator[None]:
    """Marks the calls of Linen's public methods while the context lasts, for `jmpx.autocast`.

    Yields:
        None.
    """

    def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if module.scope is None or not _is_public(type(module), context.method_name):
            return method(*args, **kwargs)
        with in_module(_lifted_class(type(module)), "/".join(module.path)):
            return method(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield


@dataclasses.dataclass(frozen=True)
class _Call:
    """A running method of a module.

    Attributes:
        module: the module's class and path. Methods that a module calls on itself, its base class's
            and the body of a lifted transform run as part of the call that is cast.
        boundary: the policy at whose boundary its calls cast, None if they do not.
        surrounding: the policy of the call around it.
        is_cast: whether a public method is running, whose inputs have been cast.
    """

    module: tuple[type, tuple[str, ...]]
    boundary: Policy | None
    surrounding: Policy | None
    is_cast: bool = False

    @property
    def policy(self) -> Policy | None:
        return self.surrounding if self.boundary is None else self.boundary


class _Interceptor:
    """Casts the method calls of one context of `policies`."""

    def __init__(self, policy_map: PolicyMap | None) -> None:
        self.policy_map = policy_map
        self.has_run = False
        self.seen: list[tuple[type, str]] = []
        self.calls: list[_Call] = []

    def __call__(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Any,
    ) -> Any:
        module = context.module
        # Methods of `nn.Module` itself cannot be intercepted, an attribute goes before them.
        object.__setattr__(module, "param", functools.partial(self._param, module))
        call = self._find_call(module)
        casts = not call.is_cast and _is_public(type(module), context.method_name)
        self.calls.append(dataclasses.replace(call, is_cast=call.is_cast or casts))
        try:
            with running(call.policy, _LINEN):
                if not casts or call.boundary is None:
                    return method(*args, **kwargs)
                return _run_at_boundary(call.boundary, module, method, args, kwargs)
        finally:
            self.calls.pop()

    def _find_call(self, module: nn.Module) -> _Call:
        """Returns the call that a method of `module` begins, or that it is part of."""
        cls, path = _lifted_class(type(module)), module.path
        around = self.calls[-1] if self.calls else None
        if around is not None and around.module == (cls, path):
            return around
        self.seen.append((cls, "/".join(path)))
        surrounding = None if around is None else around.policy
        boundary = policy_for(self.policy_map, *self.seen[-1], surrounding)
        return _Call((cls, path), boundary, surrounding)

    def _param(
        self, module: nn.Module, name: str, init: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Stands in for `module.param`: creates in the param dtype, reads in the compute dtype."""
        policy = self.calls[-1].policy if self.calls else None
        if policy is None:
            return type(module).param(module, name, init, *args, **kwargs)

        def create(*args: Any, **kwargs: Any) -> Any:
            return policy.cast_to_param(init(*args, **kwargs))

        return policy.cast_to_compute(type(module).param(module, name, create, *args, **kwargs))


def _run_at_boundary(
    policy: Policy, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    cast_args, cast_kwargs = policy.cast_to_compute((args, kwargs))
    result = method(*cast_args, **cast_kwargs)
    output = policy.cast_to_output(result)
    return _keep_carry(args[0], result, output) if args and _is_loop_body(module) else output


def _is_loop_body(module: nn.Module) -> bool:
    """Whether it is what a lifted `scan` calls at each step; scopes note what lifted them."""
    lifted_by = () if module.scope is None else module.scope.debug_path[-1:]
    return isinstance(module, nn.RNNCellBase) or "scan(" in "".join(lifted_by)


def _keep_carry(carry: Any, result: Any, output: Any) -> Any:
    """Returns `output`, the cast `result`, but for the new carry: it is of the old one's dtypes.

    `nn.scan` wants a pair of the new carry and something else, `nn.remat_scan` the new carry.
    """
    structure = jax.tree.structure(carry)
    if jax.tree.structure(result) == structure:
        return jax.tree.map(cast_like, result, carry)
    if isinstance(result, tuple) and result and jax.tree.structure(result[0]) == structure:
        return (jax.tree.map(cast_like, result[0], carry), *output[1:])
    return output


def _lifted_class(cls: type) -> type:
    """Returns the class that `nn.scan`, `nn.remat` and their kin made `cls` of, or `cls`."""
    while cls.__module__ == nn.remat.__module__:
        cls = cls.__bases__[0]
    return cls


def _is_public(cls: type, name: str) -> bool:
    """Whether it is a public method; bodies of lifted functions run as methods, and are not."""
    return name != "setup" and _has_public_name(name) and hasattr(cls, name)


def _has_public_name(name: str) -> bool:
    return name == "__call__" or not name.startswith("_")


# NNX


def with_policies(module: M, policy_map: str | Policy | PolicyMap | None = None) -> M:
    """Returns the view of an NNX model that computes under a policy map.

    Made inside the loss function: gradients are those of the model outside, in the structure and
    dtype of its parameters. In the view each `nnx.Param` is cast from the stored one to the compute
    dtype of the innermost policy. All other variables are the model's own: running statistics,
    caches and random streams that the view updates are updated in the model, in their dtype (make
    a cache of keys and values in the compute dtype). Attributes that are set on the view, as `sow`
    and `eval` do, are set on the view alone. A layer that is told a `dtype` computes in it inside.
    A recurrent cell hands back its carry in the dtype in which the carry came.

    A module of the view is an instance of its class in the model, of a subclass where its public
    methods cast. A view serves one computation: neither keep it nor return it from a transform.

    Args:
        module: the model; it is not changed.
        policy_map: a policy map, a policy, or a string of either; None for the policies of classes
            alone (`jmpx.set_policy`). Paths are attribute names and indices joined by slashes.

    Returns:
        The view.

    Raises:
        TypeError: if `module` is not an `nnx.Module` or `policy_map` is of another type.
        ValueError: if the string is not of the grammar.

    Warns:
        UserWarning: of each rule that matched no module.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jmpx.flax
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, x):
        ...     view = jmpx.flax.with_policies(model, "c=bf16,o=f32")
        ...     return (view(x) ** 2).mean()
        >>> loss, grads = nnx.value_and_grad(loss_fn)(model, jnp.ones((4, 3)))
        >>> loss.dtype.name, grads["kernel"][...].dtype.name
        ('float32', 'float32')
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"Expected an nnx.Module, got {module!r}: for Linen use jmpx.flax.policies, for "
            "Equinox jmpx.equinox.with_policies."
        )
    viewer = _Viewer(None if policy_map is None else get_policy_map(policy_map))
    view = viewer.convert(module, "", None)
    if viewer.policy_map is not None:
        warn_unused(viewer.policy_map, viewer.seen, stacklevel=2)
    return view


class _Viewer:
    """Makes the view of one model; what is shared in the model is shared in the view."""

    def __init__(self, policy_map: PolicyMap | None) -> None:
        self.policy_map = policy_map
        self.seen: list[tuple[type, str]] = []
        self._done: dict[int, Any] = {}

    def convert(self, value: Any, path: str, policy: Policy | None) -> Any:
        """Returns a module, a variable or another value of the model as the view has it."""
        if id(value) in self._done:
            return self._done[id(value)]
        if isinstance(value, nnx.Param):
            return self._note(value, value if policy is None else policy.cast_to_compute(value))
        if not isinstance(value, nnx.Pytree):
            return value
        cls = type(value)
        if isinstance(value, nnx.Module) and not _is_container(value):
            self.seen.append((_unmarked_class(cls), path))
            boundary = policy_for(self.policy_map, *self.seen[-1], policy)
            if boundary is None and policy is not None and _holds_statistics(value):
                boundary = policy.with_output_dtype(policy.compute_dtype)
            if boundary is not None:
                note_cast(_NNX)
                cls, policy = _view_class(cls, boundary), boundary
        view = self._note(value, object.__new__(cls))
        for name, attribute in vars(value).items():
            # Not by setattr: Flax 0.11 keeps the items of a list under integers.
            vars(view)[name] = _map_graph_nodes(
                attribute, (path, str(name)), lambda node, at: self.convert(node, at, policy)
            )
        if isinstance(value, nnx.Embed) and value.dtype == value.embedding[...].dtype:
            view.dtype = None  # told none, it noted that of its table, and would promote to it
        return view

    def _note(self, value: Any, view: Any) -> Any:
        self._done[id(value)] = view
        return view


def _map_graph_nodes(tree: Any, parts: tuple[str, ...], func: Callable[[Any, str], Any]) -> Any:
    """Maps what an attribute holds, a module, a variable or a container of them, with its path."""

    def at_path(key_path: Any, leaf: Any) -> Any:
        keys = jax.tree_util.keystr(key_path, simple=True, separator="/")
        return func(leaf, "/".join(filter(None, (*parts, keys))))

    return jax.tree_util.tree_map_with_path(at_path, tree, is_leaf=_is_graph_node)


def _is_container(module: nnx.Module) -> bool:
    """Whether it is a list or a dict: it is never called, so that a policy of it would not cast."""
    kinds = tuple(getattr(nnx, name) for name in ("List", "Dict") if hasattr(nnx, name))
    return isinstance(module, kinds) and not callable(module)


def _holds_statistics(module: nnx.Module) -> bool:
    """Whether it has running statistics: float32 as they are, they would make its results so."""
    return any(isinstance(value, nnx.BatchStat) for value in vars(module).values())


def _is_graph_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


@functools.cache
def _view_class(cls: type, policy: Policy) -> type:
    """Returns the subclass whose public methods cast; one for each class and policy."""
    at_boundary = lambda method, name: _at_boundary(method, name, policy)  # noqa: E731
    return _subclass(cls, at_boundary, __jmpx_view__=True)


def _subclass(cls: type, wrap: Callable[[Callable[..., Any], str], Any], **namespace: Any) -> type:
    """Returns a subclass that looks like the class, its public methods wrapped."""
    names = [name for name in dir(cls) if _has_public_name(name) and _is_own_method(cls, name)]
    namespace |= {name: wrap(getattr(cls, name), name) for name in names}
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), {**named, **namespace})


def _is_own_method(cls: type, name: str) -> bool:
    """Whether it is a method of instances, and not one that all modules have."""
    method = inspect.getattr_static(cls, name)
    if isinstance(method, staticmethod | classmethod | type) or not hasattr(method, "__get__"):
        return False
    return callable(method) and name not in dir(nnx.Module)


def _is_step(module: nnx.Module, name: str) -> bool:
    return isinstance(module, nnx.RNNCellBase) and name == "__call__"


def _at_boundary(method: Callable[..., Any], name: str, policy: Policy) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        views = _thread.views
        if views and views[-1] is self:
            return method(self, *args, **kwargs)  # part of the call that is cast already
        views.append(self)
        try:
            cast_args, cast_kwargs = _cast_arrays(policy.cast_to_compute, (args, kwargs))
            with running(policy, _NNX):
                result = method(self, *cast_args, **cast_kwargs)
            output = _cast_arrays(policy.cast_to_output, result)
            return _keep_carry(args[0], result, output) if args and _is_step(self, name) else output
        finally:
            views.pop()

    return wrapper


def _cast_arrays(cast: Callable[[Any], Any], tree: Any) -> Any:
    """Casts a pytree but for NNX objects in it: a copy of an `nnx.Rngs` would not count on."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_graph_node)
    leaves = [leaf if _is_graph_node(leaf) else cast(leaf) for leaf in leaves]
    return jax.tree.unflatten(structure, leaves)


# NNX under autocast


class Marker:
    """Has the modules of a pytree mark the calls of their methods, for `jmpx.autocast`.

    The classes of those modules become subclasses until `unmark`. Paths begin at the outermost
    modules.

    Args:
        matches: whether the calls of a module of that class and path are to be marked.
    """

    def __init__(self, matches: Callable[[type, str], bool]) -> None:
        self.matches = matches
        self.made: dict[type, type] = {}  # the subclasses, and the classes that they stand for
        self.given: list[Any] = []

    def mark(self, tree: Any) -> Any:
        """Marks the modules in a pytree, and returns it."""
        self.given = _graph_nodes(tree)
        for module, path in _modules(self.given):
            cls = type(module)
            if self.matches(_unmarked_class(cls), path):
                subclass = _marked_class(cls, Module(_unmarked_class(cls), path))
                self.made[subclass] = cls
                object.__setattr__(module, "__class__", subclass)
        return tree

    def unmark(self, tree: Any) -> Any:
        """Gives modules their classes back, those in a pytree too, which it returns."""
        for module, _ in _modules([*self.given, *_graph_nodes(tree)]):
            if type(module) in self.made:
                object.__setattr__(module, "__class__", self.made[type(module)])
        return tree


def _graph_nodes(tree: Any) -> list[Any]:
    return list(filter(_is_graph_node, jax.tree.leaves(tree, is_leaf=_is_graph_node)))


def _modules(roots: list[Any]) -> list[tuple[nnx.Module, str]]:
    """Returns the modules in objects that can be called, each once, with their paths."""
    found: dict[int, tuple[Any, str]] = {}

    def visit(value: Any, path: str) -> None:
        if id(value) in found or not isinstance(value, nnx.Pytree):
            return
        found[id(value)] = value, path
        for name, attribute in vars(value).items():
            _map_graph_nodes(attribute, (path, str(name)), visit)

    for root in roots:
        visit(root, "")
    return [
        (value, path)
        for value, path in found.values()
        if isinstance(value, nnx.Module) and not _is_container(value)
    ]


def _unmarked_class(cls: type) -> type:
    """Returns the class that the user knows."""
    while "_jmpx_unmarked" in vars(cls):
        cls = cls._jmpx_unmarked
    return cls


@functools.cache
def _marked_class(cls: type, module: Module) -> type:
    """Returns the subclass of a module class whose public methods mark their calls."""

    def marked(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            with in_module(*module):
                return method(self, *args, **kwargs)

        return wrapper

    return _subclass(cls, marked, _jmpx_unmarked=cls)
