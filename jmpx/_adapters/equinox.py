"""Equinox: the compute view of a model, in which each part has the policy that a map gives it."""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._adapters.dtype_fields import Selected, field_in_call
from jmpx._adapters.sessions import (
    Method,
    PolicyScope,
    PyTree,
    cast_except,
    inherited_policy,
    is_optimizer_state,
    marking_proxy_class,
    noted_carries,
    plain_class,
    proxy_class,
    public_methods,
    required_package,
    run_at_boundary,
    run_reading,
)
from jmpx._base.casts import cast_tree
from jmpx._base.contexts import note_cast
from jmpx._base.dtypes import as_dtype, computable, dtype_name
from jmpx._base.leaves import is_floating, is_view
from jmpx._base.made_once import made_once
from jmpx._base.messages import user_stacklevel
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy

with required_package("equinox", "Equinox"):
    import equinox as eqx

__all__ = ("with_policies",)

T = TypeVar("T")

_NAME = "jmpx.equinox.with_policies"

# These modules keep running statistics in the dtype of the parameters, and compute in it.
_WITH_STATISTICS = (eqx.nn.BatchNorm, eqx.nn.SpectralNorm)
_CELLS = (eqx.nn.GRUCell, eqx.nn.LSTMCell)  # the hidden state of a cell is the carry of a loop
_CONVOLUTIONS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
_JITTED: Any = type(eqx.filter_jit(lambda: None))
_INHERITING = (*_WITH_STATISTICS, *_CELLS)  # boundaries, also where nothing gives them a policy


def with_policies(model: T, policy_map: PolicyMapLike | None = None) -> T:
    """Returns the compute view of a model, to be made and called inside the loss function.

    The view is the model with its floating parameters cast, each from its stored value to the
    compute dtype of the innermost policy. A module that has a policy makes a boundary: its
    `__call__` and its other public methods cast their floating arguments to the compute dtype and
    their result to the output dtype, also under `jax.vmap`, `equinox.filter_checkpoint` and the
    like. Any other module with floating arrays of its own casts its floating arguments to the
    compute dtype around it, so that noise or a one-hot that is made inside does not widen what
    follows. Inside a method, `self` is the plain module, so that one method that calls another
    casts nothing in between. The map's default is the policy of the model as a whole. A mere
    container, a module without public methods or an `equinox.nn.Shared`, gives its policy to each
    module in it.

    Within JAX's loops and branches, the latter modules return at least the dtype that came in, as a
    carry has to keep its dtype. A glob that matches an array and no module around it (`*/freqs:
    full`) sets the dtype of that array alone. A rule sets the floating static field `dtype` of a
    module that it selects, such as that of `RotaryPositionalEmbedding`, and the same field of
    modules inside with the same value.

    `isinstance`, attributes, the order of the leaves and their paths are those of the model. The
    types of the view's nodes are subclasses, so its tree definition differs: compute with a view,
    and return or store the model. Gradients with respect to the model have its structure and
    dtypes.

    Three kinds of values pass a boundary as they are: `equinox.nn.State`, everything that can be
    called (functions, modules), and whatever has no floating dtype. `BatchNorm` and `SpectralNorm`
    compute under every policy in the dtype in which they are stored, which is that of their running
    statistics. `GRUCell` and `LSTMCell` return their hidden state in the dtype in which it came to
    them, also where they are the model: that is the dtype of the loop's carry. A parameter tied by
    `equinox.nn.Shared` is cast by the policy of the module that stores it.

    The `matmul` of a policy holds for the products in its region, forward and backward, but not in
    what a `jax.custom_vjp` or `jax.custom_jvp` defines: JAX traces that later. See docs/matmul.md.

    Args:
        model: an `equinox.Module` with its parameters as they are stored.
        policy_map: all that `jmpx.get_policy_map` takes. Its rules name classes or paths
            (`layers/0`). Its rules go before the policies of classes (`jmpx.set_policy`);
            None for those policies alone.

    Returns:
        The view: as `model`, its floating leaves of the same shapes in the compute dtypes. A view
        under the same policy map, or a part of one, is returned as it is.

    Raises:
        TypeError: if `model` is not an `equinox.Module`, or holds a view under another policy map;
            if `policy_map` is of another type.
        ValueError: if the string is not of the grammar of policy maps.

    Warns:
        UserWarning: for each rule that matches no module and no array; once if a convolution
            computes in float32 under a dot algorithm, which JAX ignores for it.

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
    session = _PolicyScope(_NAME, policy_map)
    view = session.outermost(model)
    if view is not model:
        session.warn(stacklevel=2)
    return view


class _Around(NamedTuple):
    """What holds in the nodes around one in a model.

    Args:
        surrounding: the surrounding policy of calls of the modules in the node.
        inner: the policy that casts the leaves in the node. It differs from `surrounding` in a
            module that has a policy but is never called, because it is a mere container.
        selected: what a rule makes of `dtype` fields; None without one.
    """

    surrounding: Policy | None
    inner: Policy | None
    selected: Selected | None


class _PolicyScope(PolicyScope):
    """Makes the view of one model.

    Attributes:
        made: the classes of modules in the view, and the classes in whose place they are.
        replaced: by the identities of nodes of the view, the nodes, which are kept so that no
            others get their identities, and the nodes of the model in whose place they are.
    """

    def __init__(self, name: str, policy_map: PolicyMapLike | None) -> None:
        super().__init__(name, policy_map)
        self.made: dict[type, type] = {}
        self.replaced: dict[int, tuple[Any, Any]] = {}
        self._classes: dict[tuple[Any, ...], tuple[Policy | None, type]] = {}

    def outermost(self, model: T) -> T:
        """Returns the view of a model; a view under the same policy map is the same object."""
        around = _Around(None, None, None)
        if self.policy_map is not None and _holds(model, is_view):  # a part of a view
            inherited = inherited_policy(self.policy_map.default)
            around = _Around(inherited, inherited, None)
        view = self.view(model, "", around)
        return view

    def view(self, node: PyTree, path: str, around: _Around) -> PyTree:
        """Returns a node of the model as it is in the view: a module, a container or a leaf.

        Args:
            node: the node.
            path: its path.
            around: what holds in the nodes around it.
        """
        if _keeps_dtype(node):
            return node
        if jax.tree_util.all_leaves([node]):
            own = self.array_policy(path, around.inner) if is_floating(node) else None
            policy = around.inner if own is None else own
            return (
                node if policy is None else self.note_replaced(policy.cast_to_compute(node), node)
            )
        if _is_module(node):
            return self.module_view(node, path, around)
        return _map_children(node, path, lambda child, at: self.view(child, at, around))

    def module_view(self, module: eqx.Module, path: str, around: _Around) -> eqx.Module:
        """Returns a module as it is in the view; see `view`."""
        if is_view(module):
            return self.made_before(module, path)
        policy, surrounding = self.module_policy(module, path, around), around.surrounding
        is_boundary = policy is not None and _is_called(type(module))
        rule = self.explicit_policy(plain_class(type(module)), path, surrounding)
        field = field_in_call(module, rule, around.selected)
        surrounding = policy if is_boundary else surrounding
        inner = _Around(surrounding, policy or around.inner, field.selected)
        view = _map_children(module, path, lambda child, at: self.view(child, at, inner))
        casts = surrounding is not None and (is_boundary or (policy is None and _may_read(module)))
        written = _fields(module)["dtype"] if field.is_ruled and field.value is not None else None
        if casts or written is not None:
            kind = _Kind(is_boundary, self.ruled_in(path), written)
            view = _as_instance(
                view, self.view_class(type(module), surrounding if casts else None, kind)
            )
        if written is not None:
            _fields(view)["dtype"] = as_dtype(field.value)
        return self.note_replaced(view, module)

    def note_replaced(self, new: T, old: T) -> T:
        """Notes a node of the view, and the node of the model in whose place it is."""
        if new is not old:
            self.replaced[id(new)] = new, old
        return new

    def view_class(self, cls: type, policy: Policy | None, kind: "_Kind") -> type:
        """Returns the proxy class of a class; see `_view_class`, of whose key the hash is slow."""
        key = cls, id(policy), kind
        if key not in self._classes:
            made = _view_class(cls, policy, kind, self.policy_map)
            self._classes[key] = policy, made  # the policy, so that no other one gets its identity
            self.made[made] = cls
        return self._classes[key][1]

    def made_before(self, view: eqx.Module, path: str) -> eqx.Module:
        """Returns a view in the model, which is one of the same policy map.

        Raises:
            TypeError: if it is one of another policy map.
        """
        policy_map = vars(type(view))["__jmpx_map__"]
        if policy_map == self.policy_map:
            return view
        raise TypeError(
            f"Expected a model with its stored parameters, got a view at {path!r} under "
            f"{str(policy_map)!r}, whose parameters are rounded already: write a rule for the "
            "module in that policy map, or call jmpx.equinox.with_policies on the model itself."
        )

    def ruled_in(self, path: str) -> frozenset[str]:
        """Returns the arrays in a module that have rules of their own, by their paths in it."""
        start = f"{path}/" if path else ""
        inside = filter(lambda at: at.startswith(start), self.ruled)
        return frozenset(at.removeprefix(start) for at in inside)

    def module_policy(self, module: eqx.Module, path: str, around: _Around) -> Policy | None:
        """Returns the policy of a module itself, None if it has only those around it."""
        cls, (surrounding, inner, _) = plain_class(type(module)), around
        policy = self.boundary_policy(cls, path, surrounding)
        has_statistics = issubclass(cls, _WITH_STATISTICS)
        if inner is not surrounding and self.explicit_policy(cls, path, surrounding) is None:
            policy = inner  # a container hands its policy on
        if policy is None and surrounding is not None and issubclass(cls, _INHERITING):
            policy = inherited_policy(surrounding)
        if issubclass(cls, _CONVOLUTIONS):
            self.note_convolution(cls, path, surrounding if policy is None else policy)
        if policy is not None:
            note_cast(_NAME)
        if policy is not None and has_statistics:
            stored = [leaf.dtype for leaf in jax.tree.leaves(module) if is_floating(leaf)]
            dtype = computable(stored[0] if stored else jnp.float32)
            policy = dataclasses.replace(policy, compute_dtype=dtype)
        self.record_module(cls, path, policy, inner)
        return policy


def _map_children(node: PyTree, path: str, func: Callable[[Any, str], Any]) -> PyTree:
    """Returns a node with the results of `func` for each child and its path as the children.

    A node whose children stay the same objects stays the same object: NNX needs that.
    """
    children, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    names = [jax.tree_util.keystr(key, simple=True) for key, _ in children]
    mapped = [
        func(child, f"{path}/{name}" if path else name)
        for name, (_, child) in zip(names, children, strict=True)
    ]
    changed = any(new is not old for new, (_, old) in zip(mapped, children, strict=True))
    return treedef.unflatten(mapped) if changed else node


def _holds(tree: PyTree, test: Callable[[Any], bool]) -> bool:
    """Whether a pytree has a node of a kind."""
    return any(map(test, jax.tree.leaves(tree, is_leaf=test)))


# A view is made in each trace, and `isinstance`, `issubclass` and `vars` of modules are slow: they
# run Python code of Equinox and of `abc`.


@functools.lru_cache(maxsize=4096)
def _is_module_class(cls: type) -> bool:
    return issubclass(cls, eqx.Module)


@functools.lru_cache(maxsize=4096)
def _is_state_class(cls: type) -> bool:
    return issubclass(cls, eqx.nn.State | eqx.nn.StateIndex)


def _is_module(node: Any) -> bool:
    return _is_module_class(type(node))


def _keeps_dtype(node: Any) -> bool:
    return _is_state_class(type(node))


def _fields(module: Any) -> dict[str, Any]:
    return object.__getattribute__(module, "__dict__")


@functools.lru_cache(maxsize=4096)
def _is_called(cls: type) -> bool:
    """Whether modules of a class have boundaries; those in a `Shared` are called outside of it."""
    return any(public_methods(cls, eqx.Module)) and not issubclass(cls, eqx.nn.Shared)


def _may_read(module: eqx.Module) -> bool:
    """Whether a module has leaves of its own, of which its public methods may read floating arrays.

    Or it has None in their place, as in one part of a model after `equinox.partition`. The other
    part gets the same class, so that `equinox.combine` joins the two.
    """
    if _is_internal(module) or not _is_called(type(module)):
        return False
    is_leaf: Callable[[Any], bool] = lambda child: (  # noqa: E731
        child is None or (child is not module and _is_part(child))
    )
    return not all(map(_is_part, jax.tree.leaves(module, is_leaf=is_leaf)))


def _reads(module: eqx.Module) -> bool:
    """Whether a module has floating arrays of its own."""
    if any(map(is_floating, _fields(module).values())):
        return True
    own = jax.tree.leaves(module, is_leaf=lambda child: child is not module and _is_part(child))
    return any(map(is_floating, own))


def _is_part(node: Any) -> bool:
    """Whether the arrays in a node are not those of the module around it."""
    return _is_module(node) or _keeps_dtype(node)


class _Proxy:
    """Hides proxy classes from the user's `__init_subclass__`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class _HiddenPostInit:
    """A `__post_init__` that an instance has, as before, and its class has not."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise AttributeError("__post_init__")
        plain: Any = super(_QuietProxy, instance)
        return plain.__post_init__


class _QuietProxy(_Proxy):
    """A proxy class of a class with both `__init__` and `__post_init__`.

    Equinox has warned of the class, and would warn of the proxy class. Filters of warnings could
    not tell it apart: they belong to all threads.
    """

    __post_init__ = _HiddenPostInit()


def _mixin(cls: type) -> type:
    """Returns the base of the proxy classes of a module's class."""
    parameters: Any = cls.__dataclass_params__  # pyright: ignore[reportAttributeAccessIssue]
    has_both = hasattr(cls, "__post_init__") and not parameters.init
    return _QuietProxy if has_both or issubclass(cls, _QuietProxy) else _Proxy


class _Kind(NamedTuple):
    """What proxy classes of one class under one policy differ in.

    Args:
        is_boundary: whether they cast at a boundary, rather than their arguments alone.
        ruled: the paths of the arrays in the module that have rules of their own.
        written: the `dtype` field of the module, if a rule has set it in the view.
    """

    is_boundary: bool
    ruled: frozenset[str]
    written: Any


@made_once  # so that views of one model have one tree definition, and jit's cache is hit
def _view_class(
    cls: type, policy: Policy | None, kind: _Kind, policy_map: PolicyMap | None
) -> type:
    """Returns the proxy class whose public methods cast.

    Args:
        cls: the class of a module.
        policy: the policy by which they cast; None if they do not.
        kind: how they cast.
        policy_map: the policy map of the view.
    """
    methods: dict[str, Any] = {}
    if policy is not None:
        for name in public_methods(cls, eqx.Module):
            methods[name] = _casting(cls, name, policy, kind.is_boundary, kind.ruled)
    marks = {"view": kind.is_boundary, "map": policy_map, "written": kind.written}
    marks = {f"__jmpx_{name}__": value for name, value in marks.items()}
    return proxy_class(cls, {**methods, **marks}, _mixin(cls))


def _casting(
    cls: type, name: str, policy: Policy, is_boundary: bool, ruled: frozenset[str]
) -> Method:
    """Returns a public method that casts; see `_view_class`."""

    @functools.wraps(inspect.getattr_static(cls, name), updated=())
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        plain = _as_instance(self, cls)
        if not is_boundary and not _reads(plain):
            return getattr(plain, name)(*args, **kwargs)
        plain = getattr(_cast_late(plain, policy, ruled), name)
        hidden = next(iter(args[1:2]), kwargs.get("hidden"))
        carry = hidden if issubclass(cls, _CELLS) else None
        run = run_at_boundary if is_boundary else run_reading
        with noted_carries(plain_class(cls), policy):
            return run(policy, plain, args, kwargs, by=_NAME, carry=carry, passes=_passes)

    return method


def _cast_late(module: eqx.Module, policy: Policy, ruled: frozenset[str]) -> eqx.Module:
    """Casts parameters that were put in place since the view was made.

    A tied or a normalized weight is one of them.
    """

    def cast(node: PyTree, path: str) -> PyTree:
        if path in ruled or _has_a_policy(node):
            return node
        is_leaf = jax.tree_util.all_leaves([node])
        return policy.cast_to_compute(node) if is_leaf else _map_children(node, path, cast)

    leaves, compute = jax.tree.leaves(module, is_leaf=_has_a_policy), np.dtype(policy.compute_dtype)
    if all(leaf.dtype == compute for leaf in leaves if is_floating(leaf)):
        return module
    if ruled:
        return _map_children(module, "", cast)
    return cast_except(policy.cast_to_compute, module, _has_a_policy)


def _has_a_policy(node: Any) -> bool:
    """Whether nothing is cast in a node by the policy around it."""
    return _keeps_dtype(node) or getattr(type(node), "__jmpx_view__", False)


def _passes(node: Any) -> bool:
    return _keeps_dtype(node) or is_view(node) or callable(node)


def _as_instance(module: Any, cls: type[T]) -> T:
    """Returns a module with the same fields as an instance of another class.

    Neither `__init__` nor `__check_init__` runs.
    """
    other = object.__new__(cls)
    _fields(other).update(_fields(module))
    return other


# Under autocast


class _Marker:
    """Has the modules in a pytree mark the calls of their methods, for `jmpx.autocast`.

    The classes of those modules become proxy classes. Paths begin at the outermost modules.

    Args:
        matches: whether the calls of a module of this class and path are to be marked.
    """

    def __init__(self, matches: Callable[[type, str], bool]) -> None:
        self.matches = matches
        self.made: dict[
            type, type
        ] = {}  # the proxy classes, and the classes in whose place they are

    def mark(self, tree: T) -> T:
        """Returns a pytree with its modules marked."""
        return _map_nodes(self._mark_model, tree, _is_model)

    def unmark(self, tree: T) -> T:
        """Returns a pytree whose modules have the classes that they had before `mark`."""
        return _map_nodes(self._unmark, tree, lambda node: type(node) in self.made)

    def _mark_model(self, node: Any) -> Any:
        bound = _bound(node)
        if bound is not None:  # it holds the function of its class, not of the proxy class
            return _bind_to(self._mark(bound[0], "", ()), node)
        return self._mark(node, "", ())

    def _mark(self, node: PyTree, path: str, containers: tuple[Module, ...]) -> PyTree:
        """Marks a node.

        Args:
            node: the node.
            path: its path.
            containers: modules around it that are to be marked, but are never called: the modules
                in them are marked in their place.
        """
        if _keeps_dtype(node) or jax.tree_util.all_leaves([node]):
            return node
        cls, is_module = plain_class(type(node)), isinstance(node, eqx.Module)
        is_matched = is_module and self.matches(cls, path)
        modules = (*containers, Module(cls, path)) if is_matched else containers
        is_marked = is_module and bool(modules) and _is_called(cls)
        inner = () if is_marked else modules
        built = _map_children(node, path, lambda child, at: self._mark(child, at, inner))
        if not is_marked:
            return built
        marked = marking_proxy_class(type(node), modules, eqx.Module, _mixin(type(node)))
        self.made[marked] = type(node)
        return _as_instance(built, marked)

    def _unmark(self, node: Any) -> Any:
        plain = _as_instance(node, self.made[type(node)])
        return _map_children(plain, "", lambda child, _: self.unmark(child))


def _map_nodes(func: Callable[[Any], Any], tree: Any, is_node: Callable[[Any], bool]) -> Any:
    """Maps nodes of a tree. A tree without such nodes stays the same object."""
    if is_node(tree):
        return func(tree)
    if _keeps_dtype(tree) or jax.tree_util.all_leaves([tree]):
        return tree
    if isinstance(tree, _JITTED):  # it hides the module as arrays and a tree definition
        wrapped = tree.__wrapped__
        mapped = _map_nodes(func, wrapped, is_node)
        return tree if mapped is wrapped else eqx.filter_jit(mapped)
    return _map_children(tree, "", lambda child, _: _map_nodes(func, child, is_node))


def _is_model(node: Any) -> bool:
    """Whether it is a model or a method of one, and no wrapper such as `equinox.filter_vmap`'s."""
    is_wrapper = _is_internal(node) and _bound(node) is None
    return isinstance(node, eqx.Module) and not is_wrapper


def _bound(node: Any) -> tuple[Any, Any] | None:
    """Returns the module of a bound method, and the function; None for what is no bound method."""
    if not _is_internal(node):
        return None
    if hasattr(node, "__self__"):
        return node.__self__, node.__func__
    if isinstance(node, eqx.Partial) and len(node.args) == 1 and not node.keywords:
        owner, func = node.args[0], node.func  # as that of a method under `equinox.filter_jit`
        found = isinstance(owner, eqx.Module) and _name_of_method(owner, func) is not None
        return (owner, func) if found else None
    return None


def _name_of_method(owner: Any, func: Any) -> str | None:
    """Returns the name under which a module has a function as a method."""
    for name in (getattr(func, "__name__", ""), *public_methods(type(owner), eqx.Module)):
        method = getattr(owner, name, None)
        if any(getattr(method, place, None) is func for place in ("__func__", "func")):
            return name
    return None


def _bind_to(module: Any, method: Any) -> Any:
    """Returns a bound method of another module; its function is that of the class."""
    owner, func = _bound(method) or (None, None)
    name = _name_of_method(owner, func)
    if name is None:
        return _map_children(method, "", lambda child, _: module if child is owner else child)
    return getattr(module, name)


def _is_internal(node: Any) -> bool:
    """Whether its class is one of Equinox itself, but no layer."""
    package, _, file = type(node).__module__.partition(".")
    return package == "equinox" and not file.startswith("nn")


# Under `jmpx.apply_policy`


class _Place(NamedTuple):
    """Where a node is in a module around it.

    Args:
        cls: the class of the module.
        path: the path of the node in the module.
    """

    cls: type
    path: str

    def child(self, name: str) -> "_Place":
        """Returns where a child of the node is."""
        return _Place(self.cls, f"{self.path}/{name}" if self.path else name)


class _Views:
    """Replaces the models in pytrees by views under one policy map; see `Views`.

    Each outermost module is a model, and paths begin there. Two kinds of modules are none: a train
    state, which holds the state of an optimizer or the like, and in which models are looked for;
    and data, which has no public methods, nor has any module in it.

    Args:
        policy_map: the policy map.

    Attributes:
        made: the classes of modules in views, and the classes in whose place they are.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.made: dict[type, type] = {}
        self._policy_map = policy_map
        # By the identity of a node of a view: the node, kept so that no other one gets its
        # identity, and the node of the model in whose place it is.
        self._replaced: dict[int, tuple[Any, Any]] = {}

    def view(self, tree: T) -> T:
        """Returns a pytree with a view in place of each model in it."""
        return _map_nodes(self._view, tree, _is_outermost)

    def _view(self, node: Any) -> Any:
        if is_optimizer_state(node) or _is_data(node):
            return node
        bound = _bound(node)
        if bound is not None:
            return _bind_to(self.view(bound[0]), node)
        if _holds(node, is_optimizer_state):
            return _map_children(node, "", lambda child, _: self.view(child))
        session = _PolicyScope(_NAME, self._policy_map)
        view = session.outermost(node)
        self.made |= session.made
        self._replaced |= session.replaced
        return view

    def stored(self, tree: T) -> T:
        """Returns a result of the function with models in place of their views.

        Warns:
            UserWarning: once, if arrays of a model come back in fewer bits than it stores.
        """
        rounded: dict[str, np.dtype] = {}
        result = self._stored(tree, (), rounded)
        if rounded:
            _warn_of_rounded(rounded)
        return result

    def _stored(self, node: Any, places: tuple[_Place, ...], rounded: dict[str, np.dtype]) -> Any:
        """Returns a node of the result as the model stores it.

        Args:
            node: the node.
            places: where it is in the modules around it, the outermost first.
            rounded: takes the paths of arrays that were rounded, and their dtypes.
        """
        if id(node) in self._replaced:
            return self._replaced[id(node)][1]
        if _keeps_dtype(node):
            return node
        if jax.tree_util.all_leaves([node]):
            return self._as_stored(node, places, rounded) if is_floating(node) else node
        if isinstance(node, eqx.Module):
            places = (*places, _Place(type(node), ""))

        def child(child: Any, name: str) -> Any:
            return self._stored(child, tuple(place.child(name) for place in places), rounded)

        plain = _map_children(node, "", child)
        bound = _bound(node)
        if bound is not None and plain is not node:
            return _bind_to(self._stored(bound[0], (), rounded), node)
        return _plain(plain, self.made[type(node)]) if type(node) in self.made else plain

    def _as_stored(
        self, leaf: Any, places: tuple[_Place, ...], rounded: dict[str, np.dtype]
    ) -> Any:
        """Returns a floating array that the function has put into a model, in its stored dtype."""
        found = [dtypes for place in places if (dtypes := self._dtypes.get(place))]
        if not found:
            return leaf
        # An array of the model as a whole is known by its path; one of a layer may be of several.
        dtype = max(min(found, key=len), key=lambda dtype: dtype.itemsize)
        if leaf.dtype.itemsize < dtype.itemsize:
            rounded[places[0].path] = leaf.dtype
        return cast_tree(leaf, dtype)

    @functools.cached_property
    def _dtypes(self) -> dict[_Place, set[np.dtype]]:
        """The dtypes in which models store their arrays, by their places in modules."""
        dtypes: dict[_Place, set[np.dtype]] = {}
        for view, stored in self._replaced.values():
            if isinstance(view, eqx.Module):
                for path, leaf in jax.tree_util.tree_leaves_with_path(stored):
                    if is_floating(leaf):
                        name = jax.tree_util.keystr(path, simple=True, separator="/")
                        dtypes.setdefault(_Place(type(view), name), set()).add(leaf.dtype)
        return dtypes


def _plain(view: Any, cls: type) -> Any:
    """Returns a module in a view as an instance of the class in whose place its own is."""
    module, written = _as_instance(view, cls), getattr(type(view), "__jmpx_written__")  # noqa: B009
    if written is not None:
        _fields(module)["dtype"] = written
    return module


def _is_outermost(node: Any) -> bool:
    return is_optimizer_state(node) or _is_model(node)


def _is_data(node: Any) -> bool:
    """Whether a module is a mere container of arrays, such as a batch."""
    return not _is_called(type(node)) and not _holds(
        node, lambda child: isinstance(child, eqx.Module) and _is_called(type(child))
    )


def _warn_of_rounded(rounded: dict[str, np.dtype]) -> None:
    """Warns of arrays of models that a function hands back in fewer bits than they are stored in.

    Args:
        rounded: the paths of the arrays, and the dtypes in which they come.
    """
    path, dtype = next(iter(rounded.items()))
    warnings.warn(
        f"A function under a policy map hands back arrays of its model that are rounded to "
        f"{dtype_name(dtype)} ({len(rounded)}, such as {path!r}): they went through an inner "
        "transformation such as jax.jit, or were computed from rounded ones; return the model "
        f"from outside of that, or write a rule for what changes, such as '*/{path}: full'.",
        stacklevel=user_stacklevel("jax", "equinox"),
    )


class _Adapter(Adapter):
    def marker(self, matches: Callable[[type, str], bool]) -> _Marker:
        return _Marker(matches)

    def views(self, policy_map: PolicyMap) -> _Views:
        return _Views(policy_map)


adapter: Adapter = _Adapter()
