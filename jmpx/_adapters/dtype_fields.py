"""The `dtype` field of a layer: the layer computes in the dtype that the field names.

Most layers of Flax have one, such as `nn.Dense`. A rule that selects a layer sets the field for the
call. Layers inside have often been handed the field, `nn.Dense(8, dtype=self.dtype)`, so the rule
sets their fields, too, where the value is the same. Without a rule the field is the layer's compute
dtype, whatever the policy around it says.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.dtypes import DTypeLike, as_dtype, computable, dtype_name
from jmpx._base.trees import PyTree, is_floating
from jmpx._jaxprs.marks import Module, Selects, selects
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy


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
        classes = dict.fromkeys(module.cls.__name__ for module in kept)
        rules = "; ".join(f"{cls}: compute={dtype_name(compute)}" for cls in classes)
        warnings.warn(
            f"The dtype field of {len(kept)} of {len(sizes)} layers with parameters keeps most of "
            f"the parameters under {by}({str(policy_map)!r}) from {dtype_name(compute)}: write "
            f"'{rules}' before the other rules of the policy map, which sets the field, or give "
            "the layers another dtype.",
            stacklevel=stacklevel + 1,
        )
