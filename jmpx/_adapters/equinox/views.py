"""`jmpx.equinox.with_policies`: the compute view of a model."""

import dataclasses
import functools
import inspect
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from jmpx._adapters.boundaries import (
    Method,
    Selected,
    check_view,
    field_in_call,
    plain_class,
    proxy_class,
    public_methods,
    run_cast,
)
from jmpx._adapters.equinox import nodes
from jmpx._adapters.scopes import PolicyScope, for_modules, inherited_policy
from jmpx._base.contexts import note_cast
from jmpx._base.dtypes import as_dtype, computable
from jmpx._base.made_once import made_once
from jmpx._base.trees import PyTree, cast_except, is_floating, is_view
from jmpx._jaxprs.marks import Module
from jmpx._policies.maps import PolicyMap, PolicyMapLike
from jmpx._policies.policy import Policy

T = TypeVar("T")

_NAME = "jmpx.equinox.with_policies"

# These modules keep running statistics in the dtype of the parameters, and compute in it.
_WITH_STATISTICS = (eqx.nn.BatchNorm, eqx.nn.SpectralNorm)
_CELLS = (eqx.nn.GRUCell, eqx.nn.LSTMCell)  # the hidden state of a cell is the carry of a loop
_INHERITING = (*_WITH_STATISTICS, *_CELLS)  # boundaries, also where nothing gives them a policy


def with_policies(model: T, policy_map: PolicyMapLike | None = None) -> T:
    """Returns the compute view of a model, to be made and called inside the loss function.

    The view is the model with its floating parameters cast, each from its stored value to the
    compute dtype of the innermost policy; its modules cast what they are called with, and those
    with a policy what they return. docs/equinox.md has the details.

    Args:
        model: an `equinox.Module` with its parameters as they are stored.
        policy_map: all that `jmpx.get_policy_map` takes; None for the policies of classes alone
            (`jmpx.set_policy`), before which its rules go.

    Returns:
        The view, whose node types are subclasses. Compute with it, and return or store the model.
        A view under the same policy map, or a part of one, is returned as it is.

    Raises:
        TypeError: if `model` is not an `equinox.Module`, or `policy_map` of another type.
        ValueError: if the string is not of the grammar of policy maps, or if `model` is or holds a
            view under another policy map.

    Warns:
        UserWarning: for each rule that matches no module.

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
    """
    if not isinstance(model, eqx.Module):
        raise TypeError(
            f"Expected an equinox.Module to make a view of, got a {type(model).__name__}: pass the "
            "model itself, or make views of the modules in it one by one; jmpx.flax is for Linen "
            "and NNX."
        )
    followed = None if policy_map is None else for_modules(policy_map, _NAME)
    scope = EquinoxScope(followed)
    view = scope.view(model)
    if view is not model:
        scope.pool.warn(stacklevel=2)
    return view


class _Around(NamedTuple):
    """The surroundings of a node of a model."""

    surrounding: Policy | None = None  # of calls of the modules in the node
    inner: Policy | None = None  # casts leaves; differs in a container that is never called
    selected: Selected | None = None  # by a rule, for `dtype` fields


_OUTSIDE = _Around()


class EquinoxScope(PolicyScope):
    """Makes the views of models."""

    def __init__(self, policy_map: PolicyMap | None) -> None:
        super().__init__(_NAME, policy_map)
        self.made: dict[type, type] = {}  # proxy classes, and the classes that they replace
        # Nodes of views, and the nodes of models that they replace, by the identities of the first,
        # which are kept so that no other object gets them.
        self.replaced: dict[int, tuple[PyTree, PyTree]] = {}

    def view(self, node: PyTree, path: str = "", around: _Around = _OUTSIDE) -> PyTree:
        """Returns a node of the model as it is in the view: a module, a container or a leaf."""
        if nodes.keeps_dtype(node):
            return node
        if jax.tree_util.all_leaves([node]):
            cast = None if around.inner is None else around.inner.cast_to_compute
            return node if cast is None else self.replace(node, cast(node))
        if nodes.is_module(node):
            return self.module_view(node, path, around)
        return nodes.map_children(node, path, lambda child, at: self.view(child, at, around))

    def module_view(self, module: eqx.Module, path: str, around: _Around) -> eqx.Module:
        """Returns a module as it is in the view; see `view`."""
        if is_view(module):
            check_view(module, self.policy_map)
            return module
        cls = type(module)
        rule, policy = self.module_policies(module, path, around)
        field = field_in_call(module, rule and rule.compute_dtype, around.selected)
        is_called = nodes.is_called(cls) and (policy is not None or not nodes.is_internal(cls))
        surrounding = policy if is_called and policy is not None else around.surrounding
        inner = _Around(surrounding, policy or around.inner, field.selected)
        view = nodes.map_children(module, path, lambda child, at: self.view(child, at, inner))
        if surrounding is None or not is_called:
            return self.replace(module, view)
        sets_field = field.is_ruled and field.value is not None
        written = nodes.fields_of(module)["dtype"] if sets_field else None
        made = _view_class(cls, surrounding, policy is not None, written, self.policy_map)
        self.made[made] = cls
        view = nodes.as_instance(view, made)
        if sets_field:
            nodes.fields_of(view)["dtype"] = as_dtype(field.value)
        return self.replace(module, view)

    def replace(self, old: PyTree, new: T) -> T:
        """Notes a node of the view, and the node of the model that it replaces."""
        if new is not old:
            self.replaced[id(new)] = new, old
        return new

    def module_policies(
        self, module: eqx.Module, path: str, around: _Around
    ) -> tuple[Policy | None, Policy | None]:
        """Returns the policy given to a module, and the one that holds in it alone.

        Both are None if the module has only the policies around it.
        """
        cls, (surrounding, inner, _) = plain_class(type(module)), around
        rule, policy = self.policies_of(cls, path, surrounding)
        if inner is not surrounding and rule is None:
            policy = inner  # of a container
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
    """A `__post_init__` that instances have, but not their class."""

    def __get__(self, instance: PyTree, owner: type) -> PyTree:
        if instance is None:
            raise AttributeError("__post_init__")
        plain: PyTree = super(_QuietProxy, instance)
        return plain.__post_init__


class _QuietProxy(_Proxy):
    """A proxy class of a class with both `__init__` and `__post_init__`.

    Equinox has warned of the class, and would warn of the proxy class again. A filter of warnings
    would hold for all threads.
    """

    __post_init__ = _HiddenPostInit()


def proxy_mixin(cls: type) -> type:
    """Returns the base of the proxy classes of a module's class."""
    parameters: PyTree = cls.__dataclass_params__  # pyright: ignore[reportAttributeAccessIssue]
    has_both = hasattr(cls, "__post_init__") and not parameters.init
    return _QuietProxy if has_both or issubclass(cls, _QuietProxy) else _Proxy


@made_once  # so that views of one model have one tree definition, and jit's cache is hit
def _view_class(
    cls: type, policy: Policy, is_boundary: bool, written: object, policy_map: PolicyMap | None
) -> type:
    """Returns the proxy class whose public methods cast, at boundaries their results, too.

    If a rule has set the `dtype` field of the module, `written` is the field as it was.
    """
    names = public_methods(cls, eqx.Module)
    methods = {name: _casting(cls, name, policy, is_boundary) for name in names}
    marks = {"view": policy_map, "boundary": is_boundary, "written": written}
    marks = {f"__jmpx_{name}__": value for name, value in marks.items()}
    return proxy_class(cls, {**methods, **marks}, proxy_mixin(cls))


def _casting(cls: type, name: str, policy: Policy, is_boundary: bool) -> Method:
    """Returns a public method that casts; see `_view_class`."""
    called = Module(cls, "")  # one class for all paths
    run = functools.partial(run_cast, by=_NAME, module=called, is_boundary=is_boundary)

    @functools.wraps(inspect.getattr_static(cls, name), updated=())
    def method(self: eqx.Module, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        plain = nodes.as_instance(self, cls)
        if not is_boundary and not _reads(plain):
            return getattr(plain, name)(*args, **kwargs)
        # The user may have replaced parameters since, as by a tied or a normalized weight.
        plain = getattr(cast_except(policy.cast_to_compute, plain, _has_a_policy), name)
        hidden = next(iter(args[1:2]), kwargs.get("hidden"))
        carry = hidden if issubclass(cls, _CELLS) else None
        return run(policy, plain, args, kwargs, carry=carry, passes=_passes)

    return method


def _reads(module: eqx.Module) -> bool:
    """Whether a module has floating arrays of its own."""

    def is_other(node: object) -> bool:
        return node is not module and (nodes.is_module(node) or nodes.keeps_dtype(node))

    return any(map(is_floating, jax.tree.leaves(module, is_leaf=is_other)))


def _has_a_policy(node: object) -> bool:
    """Whether the policy around a node casts nothing in it."""
    return nodes.keeps_dtype(node) or getattr(type(node), "__jmpx_boundary__", False)


def _passes(node: object) -> bool:
    return nodes.keeps_dtype(node) or is_view(node) or callable(node)
