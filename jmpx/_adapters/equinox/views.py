"""`jmpx.equinox.with_policies`: the compute view of a model."""

import dataclasses
import functools
import inspect
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._adapters.boundaries import Method, cast_except, run_cast
from jmpx._adapters.dtype_fields import Selected, field_in_call
from jmpx._adapters.equinox import nodes
from jmpx._adapters.proxies import plain_class, proxy_class, public_methods
from jmpx._adapters.scopes import PolicyScope, inherited_policy
from jmpx._base.contexts import note_cast
from jmpx._base.dtypes import as_dtype, computable
from jmpx._base.leaves import PyTree, is_floating, is_view
from jmpx._base.made_once import made_once
from jmpx._policies.frameworks import required_package
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy

with required_package("equinox", "Equinox"):
    import equinox as eqx

T = TypeVar("T")

_NAME = "jmpx.equinox.with_policies"

# These modules keep running statistics in the dtype of the parameters, and compute in it.
_WITH_STATISTICS = (eqx.nn.BatchNorm, eqx.nn.SpectralNorm)
_CELLS = (eqx.nn.GRUCell, eqx.nn.LSTMCell)  # the hidden state of a cell is the carry of a loop
_INHERITING = (*_WITH_STATISTICS, *_CELLS)  # boundaries, also where nothing gives them a policy


def with_policies(model: T, policy_map: PolicyMapLike | None = None) -> T:
    """Returns the compute view of a model, to be made and called inside the loss function.

    The view is the model with its floating parameters cast, each from its stored value to the
    compute dtype of the innermost policy. Public methods of a module that has a policy cast their
    floating arguments to the compute dtype and their result to the output dtype; those of any other
    module with floating arrays of its own cast their arguments alone. Within JAX's loops and
    branches, such a module returns at least the dtype that came in. Inside a method, `self` is the
    plain module. docs/equinox.md tells what passes a boundary as it is, and how `BatchNorm`, cells,
    containers, `dtype` fields and single arrays are treated.

    `isinstance`, attributes, the order of the leaves and their paths are those of the model. The
    types of the view's nodes are subclasses, so its tree definition differs: compute with a view,
    and return or store the model. Gradients with respect to the model have its structure and
    dtypes.

    Args:
        model: an `equinox.Module` with its parameters as they are stored.
        policy_map: all that `jmpx.get_policy_map` takes. Its rules name classes or paths
            (`layers/0`), and take precedence over the policies of classes (`jmpx.set_policy`);
            None for those policies alone.

    Returns:
        The view: as `model`, its floating leaves of the same shapes in the compute dtypes. A view
        under the same policy map, or a part of one, is returned as it is.

    Raises:
        TypeError: if `model` is not an `equinox.Module`, or holds a view under another policy map;
            if `policy_map` is of another type.
        ValueError: if the string is not of the grammar of policy maps.

    Warns:
        UserWarning: for each rule that matches no module and no array.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
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

    See Also:
        `jmpx.apply_policy`, which makes the views of all models among a function's arguments.
    """
    if not isinstance(model, eqx.Module):
        raise TypeError(
            f"Expected an equinox.Module to make a view of, got a {type(model).__name__}: pass the "
            "model itself, or make views of the modules in it one by one."
        )
    scope = EquinoxScope(policy_map)
    view = scope.outermost(model)
    if view is not model:
        scope.pool.warn(stacklevel=2)
    return view


class _Around(NamedTuple):
    """What holds in the nodes around one in a model.

    Args:
        surrounding: the surrounding policy of calls of the modules in the node.
        inner: the policy that casts the leaves in the node. It differs from `surrounding` in a
            module that has a policy but is never called, because it is a mere container.
        selected: what a rule makes of `dtype` fields; None without one.
    """

    surrounding: Policy | None = None
    inner: Policy | None = None
    selected: Selected | None = None


class EquinoxScope(PolicyScope):
    """Makes the view of one model.

    Attributes:
        made: the classes of modules in the view, and the classes in whose place they are.
        replaced: by the identities of nodes of the view, the nodes, which are kept so that no
            others get their identities, and the nodes of the model in whose place they are.
    """

    def __init__(self, policy_map: PolicyMapLike | None) -> None:
        super().__init__(_NAME, policy_map)
        self.made: dict[type, type] = {}
        self.replaced: dict[int, tuple[PyTree, PyTree]] = {}

    def outermost(self, model: T) -> T:
        """Returns the view of a model; a view under the same policy map is the same object."""
        around = _Around()
        if self.policy_map is not None and nodes.holds(model, is_view):  # a part of a view
            inherited = inherited_policy(self.policy_map.default)
            around = _Around(inherited, inherited)
        return self.view(model, "", around)

    def view(self, node: PyTree, path: str, around: _Around) -> PyTree:
        """Returns a node of the model as it is in the view: a module, a container or a leaf."""
        if nodes.keeps_dtype(node):
            return node
        if nodes.is_leaf(node):
            own = self.array_policy(path, around.inner) if is_floating(node) else None
            policy = own or around.inner
            return node if policy is None else self.replace(node, policy.cast_to_compute(node))
        if nodes.is_module(node):
            return self.module_view(node, path, around)
        return nodes.map_children(node, path, lambda child, at: self.view(child, at, around))

    def module_view(self, module: eqx.Module, path: str, around: _Around) -> eqx.Module:
        """Returns a module as it is in the view; see `view`."""
        cls = type(module)
        if is_view(module):
            self.check_view(cls, path)
            return module
        rule, policy = self.module_policies(module, path, around)
        is_boundary = policy is not None and nodes.is_called(cls)
        field = field_in_call(module, rule, around.selected)
        surrounding = policy if is_boundary else around.surrounding
        inner = _Around(surrounding, policy or around.inner, field.selected)
        view = nodes.map_children(module, path, lambda child, at: self.view(child, at, inner))
        casts = is_boundary or (
            surrounding is not None and policy is None and nodes.may_read(module)
        )
        written = (
            nodes.fields_of(module)["dtype"] if field.is_ruled and field.value is not None else None
        )
        if casts or written is not None:
            kind = _Kind(is_boundary, self.ruled_in(path), written)
            made = _view_class(cls, surrounding if casts else None, kind, self.policy_map)
            self.made[made] = cls
            view = nodes.as_instance(view, made)
        if written is not None:
            nodes.fields_of(view)["dtype"] = as_dtype(field.value)
        return self.replace(module, view)

    def replace(self, old: PyTree, new: T) -> T:
        """Notes a node of the view, and the node of the model in whose place it is."""
        if new is not old:
            self.replaced[id(new)] = new, old
        return new

    def check_view(self, cls: type, path: str) -> None:
        """Raises if a module is of a view under another policy map."""
        policy_map = vars(cls)["__jmpx_map__"]
        if policy_map != self.policy_map:
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

    def module_policies(
        self, module: eqx.Module, path: str, around: _Around
    ) -> tuple[Policy | None, Policy | None]:
        """Returns the policy that is given to a module, and the one that holds in it alone.

        Both are None if it has only those of the nodes around it.
        """
        cls, (surrounding, inner, _) = plain_class(type(module)), around
        rule, policy = self.policies_of(cls, path, surrounding)
        if inner is not surrounding and rule is None:
            policy = inner  # a container hands its policy on
        if policy is None and surrounding is not None and issubclass(cls, _INHERITING):
            policy = inherited_policy(surrounding)
        if policy is not None:
            note_cast(_NAME, policy.compute_dtype)
        if policy is not None and issubclass(cls, _WITH_STATISTICS):
            stored = [leaf.dtype for leaf in jax.tree.leaves(module) if is_floating(leaf)]
            dtype = computable(stored[0] if stored else jnp.float32)
            policy = dataclasses.replace(policy, compute_dtype=dtype)
        self.record_module(cls, path, policy, inner)
        return rule, policy


class _Proxy:
    """Hides proxy classes from the user's `__init_subclass__`."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass


class _HiddenPostInit:
    """A `__post_init__` that an instance has, as before, and its class has not."""

    def __get__(self, instance: PyTree, owner: type) -> PyTree:
        if instance is None:
            raise AttributeError("__post_init__")
        plain: PyTree = super(_QuietProxy, instance)
        return plain.__post_init__


class _QuietProxy(_Proxy):
    """A proxy class of a class with both `__init__` and `__post_init__`.

    Equinox has warned of the class, and would warn of the proxy class. Filters of warnings could
    not tell it apart: they belong to all threads.
    """

    __post_init__ = _HiddenPostInit()


def proxy_mixin(cls: type) -> type:
    """Returns the base of the proxy classes of a module's class."""
    parameters: PyTree = cls.__dataclass_params__  # pyright: ignore[reportAttributeAccessIssue]
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
    written: object


@made_once  # so that views of one model have one tree definition, and jit's cache is hit
def _view_class(
    cls: type, policy: Policy | None, kind: _Kind, policy_map: PolicyMap | None
) -> type:
    """Returns the proxy class of a class whose public methods cast by a policy, if there is one."""
    names = () if policy is None else public_methods(cls, eqx.Module)
    methods = {name: _casting(cls, name, policy, kind) for name in names if policy is not None}
    marks = {"view": kind.is_boundary, "map": policy_map, "written": kind.written}
    marks = {f"__jmpx_{name}__": value for name, value in marks.items()}
    return proxy_class(cls, {**methods, **marks}, proxy_mixin(cls))


def _casting(cls: type, name: str, policy: Policy, kind: _Kind) -> Method:
    """Returns a public method that casts; see `_view_class`."""
    run = functools.partial(run_cast, is_boundary=kind.is_boundary)

    @functools.wraps(inspect.getattr_static(cls, name), updated=())
    def method(self: eqx.Module, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        plain = nodes.as_instance(self, cls)
        if not kind.is_boundary and not nodes.reads(plain):
            return getattr(plain, name)(*args, **kwargs)
        plain = getattr(_cast_late(plain, policy, kind.ruled), name)
        hidden = next(iter(args[1:2]), kwargs.get("hidden"))
        carry = hidden if issubclass(cls, _CELLS) else None
        return run(policy, plain, args, kwargs, by=_NAME, carry=carry, passes=_passes)

    return method


def _cast_late(module: T, policy: Policy, ruled: frozenset[str]) -> T:
    """Casts parameters that were put in place since the view was made.

    A tied or a normalized weight is one of them.
    """

    def cast(node: PyTree, path: str) -> PyTree:
        if path in ruled or _has_a_policy(node):
            return node
        return (
            policy.cast_to_compute(node)
            if nodes.is_leaf(node)
            else nodes.map_children(node, path, cast)
        )

    leaves, compute = jax.tree.leaves(module, is_leaf=_has_a_policy), np.dtype(policy.compute_dtype)
    if all(leaf.dtype == compute for leaf in leaves if is_floating(leaf)):
        return module
    if ruled:
        return nodes.map_children(module, "", cast)
    return cast_except(policy.cast_to_compute, module, _has_a_policy)


def _has_a_policy(node: object) -> bool:
    """Whether nothing is cast in a node by the policy around it."""
    return nodes.keeps_dtype(node) or getattr(type(node), "__jmpx_view__", False)


def _passes(node: object) -> bool:
    return nodes.keeps_dtype(node) or is_view(node) or callable(node)
