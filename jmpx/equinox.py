"""Equinox: the compute view of a model, in which each part has the policy that a map gives it.

`jmpx.set_policy` and its kin keep the policies of Equinox classes in jmpx's own registry.
"""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jmpx._contexts import note_cast
from jmpx._dtypes import computable
from jmpx._leaves import is_floating
from jmpx._marks import Module, in_module
from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, get_policy_map, warn_unused
from jmpx._registry import policy_for, running

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    if error.name != "equinox":
        raise
    raise ModuleNotFoundError(
        "jmpx.equinox needs Equinox, which is not installed: pip install 'jmpx[equinox]'.",
        name="equinox",
    ) from None

T = TypeVar("T")

_NAME = "jmpx.equinox.with_policies"


def with_policies(model: T, policy_map: str | Policy | PolicyMap | None = None) -> T:
    """Returns the compute view of a model, to be made and called inside the loss function.

    The view is the model with its floating parameters cast, each from its stored value to the
    compute dtype of the innermost policy around it. A module that has a policy is a boundary: its
    `__call__` and its other public methods cast their floating arguments to the compute dtype and
    their result to the output dtype, also under `jax.vmap`, `equinox.filter_checkpoint` and the
    like. Within a method, `self` is the plain module, so that one method that calls another casts
    nothing in between. The map's default is the policy of the model as a whole. The policy of
    a mere container, a module without public methods or an `equinox.nn.Shared`, is that of each
    module in it.

    `isinstance`, attributes, the order of the leaves and their paths are those of the model; the
    types of its nodes are subclasses, so its tree definition is not: compute with a view, and
    return or store the model. Gradients with respect to the model have its structure and dtypes.

    What passes a boundary as it is: `equinox.nn.State`, everything that can be called (functions,
    modules), and whatever has no floating dtype. `BatchNorm` and `SpectralNorm` compute in the
    dtype in which they are stored, that of their running statistics, under every policy;
    `GRUCell` and `LSTMCell` hand their hidden state back in the dtype it came in. A parameter tied
    by `equinox.nn.Shared` is cast by the policy of the module that stores it.

    Args:
        model: an `equinox.Module` with its parameters as they are stored.
        policy_map: a policy map string, a policy or a policy map, whose rules name classes or
            paths (`layers/0`); None for the policies set by `jmpx.set_policy` alone, which a map's
            rules go before.

    Returns:
        The view: as `model`, its floating leaves of the same shapes in the compute dtypes.

    Raises:
        TypeError: if `model` is not an `equinox.Module`, or holds a view; if `policy_map` is of
            another type.
        ValueError: if the string is not of the grammar of policy maps.

    Warns:
        UserWarning: for each rule that matches no module.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> import jmpx
        >>> from jmpx.equinox import with_policies
        >>> model = eqx.nn.MLP(3, "scalar", 8, 1, key=jax.random.key(0))
        >>> def loss_fn(model, x):
        ...     model = with_policies(model, "c=bf16,o=f32; layers/1: full")
        ...     print(*[layer.weight.dtype for layer in model.layers])
        ...     return jnp.mean(jax.vmap(model)(x) ** 2)
        >>> grads = eqx.filter_grad(loss_fn)(model, jnp.ones((4, 3)))
        bfloat16 float32
        >>> grads.layers[0].weight.dtype.name
        'float32'
    """
    if not isinstance(model, eqx.Module):
        raise TypeError(
            f"Expected an equinox.Module to make a view of, got a {type(model).__name__}: pass the "
            "model itself, or make views of the modules in it one by one."
        )
    builder = _Builder(None if policy_map is None else get_policy_map(policy_map))
    view = builder.build(model, "", None, None)
    if builder.policy_map is not None:
        warn_unused(builder.policy_map, builder.seen, stacklevel=2)
    return view


class _View:
    """Marks the classes of a view, and hides them from the user's `__init_subclass__`."""

    __jmpx_view__ = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


# Boundaries also where only the module around them has a policy:
_WITH_STATISTICS = (eqx.nn.BatchNorm, eqx.nn.SpectralNorm)  # kept in the dtype of the parameters
_CELLS = (eqx.nn.GRUCell, eqx.nn.LSTMCell)  # whose hidden state is the carry of a loop


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Rebuilds a model from the root on, and notes the class and path of each module."""

    policy_map: PolicyMap | None
    seen: list[tuple[type, str]] = dataclasses.field(default_factory=list)

    def build(self, node: Any, path: str, around: Policy | None, innermost: Policy | None) -> Any:
        """Returns the view of a node: a module, a container or a leaf.

        Args:
            node: the node of the model.
            path: its path.
            around: the policy of the call in which the node's modules are called.
            innermost: the policy that casts the node's leaves. It differs from `around` in a module
                that has a policy but is a mere container, so that it is never called.
        """
        if _keeps_dtype(node):
            return node
        if jax.tree_util.all_leaves([node]):
            return node if innermost is None else innermost.cast_to_compute(node)
        own = self.find(node, path, around, innermost) if isinstance(node, eqx.Module) else None
        is_boundary = own is not None and _is_called(type(node))
        innermost = innermost if own is None else own
        around = own if is_boundary else around
        built = _rebuild(node, path, lambda child, at: self.build(child, at, around, innermost))
        return _retype(built, _view_class(type(node), own)) if is_boundary else built

    def find(
        self, module: eqx.Module, path: str, around: Policy | None, innermost: Policy | None
    ) -> Policy | None:
        """Returns the policy that a module has of its own."""
        cls = _unmarked_class(type(module))
        if isinstance(module, _View):
            raise TypeError(
                f"Expected a model with its stored parameters, got a view at {path!r}: call "
                "jmpx.equinox.with_policies once, on the model itself."
            )
        self.seen.append((cls, path))
        own = policy_for(self.policy_map, cls, path, around)
        if own is None and innermost is not around:  # a container hands its policy on
            own = innermost
        if own is None and around is not None and isinstance(module, _CELLS + _WITH_STATISTICS):
            own = around.with_output_dtype(around.compute_dtype)
        if own is not None:
            note_cast(_NAME)
        if own is not None and isinstance(module, _WITH_STATISTICS):
            stored = _floating_dtype(module, jnp.float32)
            own = dataclasses.replace(own, compute_dtype=computable(stored))
        return own


def _rebuild(node: Any, path: str, build: Callable[[Any, str], Any]) -> Any:
    """Returns a node of the model with what `build` makes of each child and its path."""
    children, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    names = [jax.tree_util.keystr(key, simple=True) for key, _ in children]
    return treedef.unflatten(
        build(child, f"{path}/{name}" if path else name)
        for name, (_, child) in zip(names, children, strict=True)
    )


def _floating_dtype(tree: Any, default: Any) -> Any:
    """Returns the dtype of the first floating leaf."""
    return next((leaf.dtype for leaf in jax.tree.leaves(tree) if is_floating(leaf)), default)


def _keeps_dtype(node: Any) -> bool:
    return isinstance(node, eqx.nn.State | eqx.nn.StateIndex)


def _is_called(cls: type) -> bool:
    """Whether calls pass a module's boundary. What is in a `Shared` is called outside of it."""
    return any(_methods(cls)) and not issubclass(cls, eqx.nn.Shared)


def _methods(cls: type) -> Iterator[str]:
    """Yields the names of the methods that are boundaries: `__call__` and the public ones."""
    fields = {field.name for field in dataclasses.fields(cls)}
    for name in dir(cls):
        if name in fields or (name.startswith("_") and name != "__call__"):
            continue
        attribute = inspect.getattr_static(cls, name)
        binds = callable(attribute) and hasattr(attribute, "__get__")  # also equinox.filter_jit's
        if isinstance(attribute, functools.partialmethod) or (
            binds and not isinstance(attribute, staticmethod | type)
        ):
            yield name


@functools.cache  # so that views of one model have one tree definition, and jit's cache is hit
def _view_class(cls: Any, policy: Policy) -> Any:
    """Returns the subclass of a module class whose methods cast at the boundary."""
    return _subclass(_View, cls, {name: _boundary(cls, name, policy) for name in _methods(cls)})


def _subclass(mark: type, cls: Any, namespace: dict[str, Any]) -> Any:
    """Returns a subclass that looks like the class."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (cls,) if issubclass(cls, mark) else (mark, cls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Equinox says of `cls`, it has said already
        return type(cls)(cls.__name__, bases, {**namespace, **names})


def _boundary(cls: type, name: str, policy: Policy) -> Callable[..., Any]:
    @functools.wraps(inspect.getattr_static(cls, name), updated=())
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The parameters again: a tied or a normalized weight was put in place since they were cast.
        module = _cast(policy.cast_to_compute, _retype(self, cls), _has_a_policy)
        outside = _with_carry(policy, args, kwargs) if issubclass(cls, _CELLS) else policy
        args, kwargs = _cast(policy.cast_to_compute, (args, kwargs), _passes)
        with running(policy, _NAME):
            result = getattr(module, name)(*args, **kwargs)
        return _cast(outside.cast_to_output, result, _passes)

    return method


def _with_carry(policy: Policy, args: Any, kwargs: Any) -> Policy:
    """Returns the policy that hands the hidden state of a cell back in the dtype it came in."""
    hidden = (args[1:2], kwargs.get("hidden"))
    return policy.with_output_dtype(_floating_dtype(hidden, policy.output_dtype))


def _has_a_policy(node: Any) -> bool:
    return _keeps_dtype(node) or isinstance(node, _View)


def _passes(node: Any) -> bool:
    return _has_a_policy(node) or callable(node)


def _cast(cast: Callable[[Any], Any], tree: Any, is_kept: Callable[[Any], bool]) -> Any:
    """Casts a tree but for the nodes that are to be kept."""
    kept, values = eqx.partition(tree, is_kept, is_leaf=is_kept)
    return eqx.combine(cast(values), kept, is_leaf=is_kept)


def _retype(module: Any, cls: type) -> Any:
    """Returns a module with the same fields in another class; no `__init__` or check is run."""
    other = object.__new__(cls)
    vars(other).update(vars(module))
    return other


# Under autocast


class _Marked:
    """Marks the classes of modules whose calls are marked, as `_View` does those of a view."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Marker:
    """Has the modules of a pytree mark the calls of their methods, for `jmpx.autocast`.

    The types of those modules become subclasses. Paths begin at the outermost modules.

    Attributes:
        matches: whether the calls of a module of that class and path are to be marked.
        made: the classes that it gave to modules.
    """

    matches: Callable[[type, str], bool]
    made: set[type] = dataclasses.field(default_factory=set)

    def mark(self, tree: Any) -> Any:
        """Returns a pytree with its modules marked."""
        return _map_nodes(self._mark_root, tree, _is_root)

    def unmark(self, tree: Any) -> Any:
        """Returns a pytree whose modules are again of the classes that they came in."""
        return _map_nodes(self._unmark, tree, lambda node: type(node) in self.made)

    def _mark_root(self, node: Any) -> Any:
        if _is_bound_method(node):  # it holds the function of the class, not the subclass's
            return getattr(self._mark(node.__self__, "", ()), node.__func__.__name__)
        return self._mark(node, "", ())

    def _mark(self, node: Any, path: str, around: tuple[Module, ...]) -> Any:
        """Marks a node; `around` are containers with a rule of their own, which are not called."""
        if _keeps_dtype(node) or jax.tree_util.all_leaves([node]):
            return node
        cls, is_module = _unmarked_class(type(node)), isinstance(node, eqx.Module)
        marks = (*around, Module(cls, path)) if is_module and self.matches(cls, path) else around
        is_marked = is_module and bool(marks) and _is_called(cls)
        inside = () if is_marked else marks
        built = _rebuild(node, path, lambda child, at: self._mark(child, at, inside))
        if not is_marked:
            return built
        subclass = _marked_class(type(node), marks)
        self.made.add(subclass)
        return _retype(built, subclass)

    def _unmark(self, node: Any) -> Any:
        plain = _retype(node, type(node).__bases__[-1])
        return _rebuild(plain, "", lambda child, _: self.unmark(child))


def _map_nodes(func: Callable[[Any], Any], tree: Any, is_node: Callable[[Any], bool]) -> Any:
    """Maps nodes of a tree. What holds none stays the same object: it may be one of NNX."""
    if is_node(tree):
        return func(tree)
    if _keeps_dtype(tree) or jax.tree_util.all_leaves([tree]):
        return tree
    children, treedef = jax.tree.flatten(tree, is_leaf=lambda child: child is not tree)
    mapped = [_map_nodes(func, child, is_node) for child in children]
    changed = any(new is not old for new, old in zip(mapped, children, strict=True))
    return treedef.unflatten(mapped) if changed else tree


def _is_root(node: Any) -> bool:
    """Whether it is a model, or a method of one, and no wrapper as of `equinox.filter_vmap`."""
    is_wrapper = _is_internal(node) and not _is_bound_method(node)
    return isinstance(node, eqx.Module) and not is_wrapper


def _is_bound_method(node: Any) -> bool:
    return _is_internal(node) and hasattr(node, "__self__")


def _is_internal(node: Any) -> bool:
    """Whether it is of a class of Equinox itself, other than its layers."""
    package, _, file = type(node).__module__.partition(".")
    return package == "equinox" and not file.startswith("nn")


def _unmarked_class(cls: type) -> type:
    """Returns the class that the user knows."""
    while issubclass(cls, _Marked):
        cls = cls.__bases__[-1]
    return cls


@functools.cache
def _marked_class(cls: Any, marks: tuple[Module, ...]) -> Any:
    """Returns the subclass of a module class whose methods mark their calls."""

    def marked(name: str) -> Callable[..., Any]:
        plain = inspect.getattr_static(cls, name)

        @functools.wraps(plain, updated=())
        def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for module in marks:
                    stack.enter_context(in_module(*module))
                return plain.__get__(self, type(self))(*args, **kwargs)

        return method

    return _subclass(_Marked, cls, {name: marked(name) for name in _methods(cls)})
