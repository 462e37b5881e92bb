"""Which parameters are shards: found by the exchanges in a loss, or told by `jmpx.Over`."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import jax

from jmpx._base.axes import axis_names, tracked_axes
from jmpx._base.messages import describe
from jmpx._base.trees import AxisName, PyTree, is_inexact_array, is_none
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, evaluate, inner_jaxprs, is_literal, trace
from jmpx._jaxprs.equations import EXCHANGES, HIDING, PLACEMENTS
from jmpx._jaxprs.inner import all_equations, inner_of, walk

R = TypeVar("R")
S = TypeVar("S")

_NOTHING: frozenset[int] = frozenset()

# Primitives that give a device the arrays of others.
_GATHERS = EXCHANGES | {"pgather"}
# Primitives that name axes but send nothing along them. `jax.lax.pbroadcast` does send.
_CASTS = ("preduced", "reduced_vary_cast", "vary_unreduced_cast")
_SEND_NOTHING = (*(PLACEMENTS - {"pbroadcast"}), *_CASTS)

# The operands whose elements the result holds; the others are indices and masks, through which no
# gradient passes.
_PICKED_FROM = {
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}


class Gather(NamedTuple):
    """An operation that gives a device parts of parameters that other devices hold."""

    params: frozenset[int]  # the indices of the parameters
    operation: str  # the name of the primitive
    axes: frozenset[Hashable]  # the mapped axes over which it gathers
    in_groups: bool  # whether it gathers within groups of an axis, by `axis_index_groups`
    by_place: bool  # whether each device picks its part by its place on an axis, as from a copy


class Exchange(NamedTuple):
    """An operation through which the loss of a device depends on a parameter of other devices."""

    param: int  # the index of the parameter
    operation: str  # the name of the primitive
    axis: Hashable  # the mapped axis


class Source(NamedTuple):
    """The parameters and exchanges that an array is computed from."""

    # The parameters whose elements it holds, or None if it depends on data. A scalar holds none: it
    # scales a parameter, or picks a part of one.
    origin: frozenset[int] | None
    # The parameters that contribute to it, so that a gradient can go back to them.
    params: frozenset[int] = _NOTHING
    gathers: frozenset[Gather] = frozenset()  # the gathers that contribute to it
    # The operations by which it depends on parameters of other devices.
    exchanges: frozenset[Exchange] = frozenset()
    # The parameters that contribute through an operation which hides its computation.
    hidden: frozenset[int] = _NOTHING
    by_place: bool = False  # whether it depends on the place of its device on a mapped axis


def find_exchanges(
    func: Callable[[list[jax.Array]], R], params: list[jax.Array], axes: Iterable[Hashable]
) -> tuple[Callable[[list[jax.Array]], R], Source]:
    """Traces a function of parameters once, and finds what its loss reads of other devices.

    A gather of activations, as in contrastive losses, counts as another exchange, because they
    depend on data. Exchanges that reach only aux, or no gradient, do not count. Returns a function
    that does the same without another call of `func`, and the source of its loss.
    """
    traced = trace(func, (params,), {})
    inputs = [Source(frozenset([i]), frozenset([i])) for i in range(len(params))]
    results = _follow(traced.jaxpr, inputs, frozenset(axes))
    return lambda params: traced.rebuild(evaluate(traced.jaxpr, params)), results[0]


def _join(sources: Sequence[Source]) -> Source:
    """Returns the source of an array that is computed from arrays of these sources."""
    if not sources:
        return Source(_NOTHING)
    origins, *others, by_place = zip(*sources, strict=True)
    origin = None if None in origins else _union(origins)
    return Source(origin, *map(_union, others), by_place=any(by_place))


def _picked(name: str, operands: Sequence[Source]) -> Source:
    """Returns the joined source of the operands that an operation picks elements of."""
    elements = _PICKED_FROM.get(name, slice(None))
    source = _join(operands[elements])
    indices = [operand for operand in operands if operand not in operands[elements]]
    # An index among the data may be the device's place.
    by_place = name == "axis_index" or any(o.by_place or o.origin is None for o in indices)
    return source._replace(by_place=source.by_place or by_place)


def _union(sets: Sequence[frozenset[S]]) -> frozenset[S]:
    """Returns the union of sets; often the largest holds the others."""
    largest: frozenset[S] = max(sets, key=len, default=frozenset())
    if all(each is largest or each <= largest for each in sets):
        return largest
    return largest.union(*sets)


def _sent_along(eqn: Equation) -> frozenset[Hashable]:
    """Returns the mapped axes along which an equation, or one in its jaxprs, sends something."""
    found: set[Hashable] = set()
    for each in (eqn, *(e for jaxpr in inner_jaxprs(eqn.params) for e in all_equations(jaxpr))):
        if not each.primitive.name.startswith(_SEND_NOTHING):
            for key in ("axis_name", "axes"):
                found.update(axis_names(each.params.get(key, ())))
    # The axes of `reduce_sum` and others are numbers.
    return frozenset(name for name in found if not isinstance(name, int))


def _follow(jaxpr: Jaxpr, inputs: Sequence[Source], axes: frozenset[Hashable]) -> list[Source]:
    """Returns the sources of a jaxpr's results, given those of its operands."""

    def step(eqn: Equation, operands: list[Source]) -> list[Source]:
        inner = inner_of(eqn)
        if inner is None:
            return _operation(eqn, operands, axes)
        operands, end = operands[inner.first :], inner.consts + inner.carry
        while True:  # until the sources of a loop's carry no longer change
            branches = [_follow(each, operands, axes) for each in inner.jaxprs]
            results = list(map(_join, zip(*branches, strict=True)))
            before = operands[inner.consts : end]
            operands[inner.consts : end] = map(_join, zip(before, results, strict=False))
            if operands[inner.consts : end] == before:
                return results

    return walk(jaxpr, inputs, step, _constant, _join)


def _constant(atom: Atom, _: object) -> Source:
    return Source(_NOTHING if is_literal(atom) or not _shape(atom) else None)


def _shape(atom: Atom) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())  # a token has no shape


def _operation(eqn: Equation, operands: list[Source], axes: frozenset[Hashable]) -> list[Source]:
    """Returns the sources of the results of an equation without jaxprs to follow."""
    name = eqn.primitive.name
    source = Source(None) if name == "stop_gradient" else _picked(name, operands)
    along = _sent_along(eqn)
    over = along & axes
    if source.origin and over and name in _GATHERS:
        in_groups = eqn.params.get("axis_index_groups") is not None
        gather = Gather(source.origin, name, over, in_groups, source.by_place)
        source = source._replace(gathers=source.gathers | {gather})
    if name.startswith(HIDING) or (along and inner_jaxprs(eqn.params)):
        source = source._replace(hidden=source.hidden | source.params)
    if along and source.params:
        new = {Exchange(param, name, axis) for param in source.params for axis in along}
        source = source._replace(exchanges=source.exchanges | new)
    # A scalar of an array, such as a parameter's norm, may be gathered.
    of_arrays = any(map(_shape, eqn.invars))
    scalar = source if source.origin is None else source._replace(origin=_NOTHING)
    return [scalar if of_arrays and not _shape(var) else source for var in eqn.outvars]


# Which parameters of a gradient function are shards, and over which of the mapped axes.
#
# A replica has a copy on each device, and its gradient is the mean over devices. The gradient of a
# shard was summed by the backward pass of its gather, so it is divided by the number of devices, as
# is the gradient of an own part, in tensor and expert parallelism.


Axes = frozenset[Hashable]
_NO_AXES: Axes = frozenset()

# The value of a mask for a parameter: True for a shard, False for a replica, "own" for an own part.
Says: TypeAlias = bool | Literal["own"]


@dataclasses.dataclass(frozen=True)
class Over:
    """A mapped axis over which a gradient function averages, and which parameters are its shards.

    It is the option `over` of `value_and_grad` and `grad` under `jax.shard_map`,
    `jax.pmap` and `jax.vmap`. The value is averaged in float32, the gradients in the policy's
    reduce; unset, in float32 or the wider dtype of a parameter. The flag and the loss scale are the
    same on the whole axis.

    Each device may hold a copy of a parameter, or a shard of it that the function gathers, by
    `jmpx.distributed.gather` or by `lax.all_gather`. Where `jax.shard_map` tracks which arrays
    vary, `sharded` is needed for few parameters; with `check_vma=False`, and under `jax.pmap` and
    `jax.vmap`, it has to tell what a gathered parameter is, and all others are averaged. The page
    on many devices has the rules.

    Args:
        axis_name: the name of the mapped axis, or a tuple of several.
        sharded: True for a shard that the function gathers, False for a copy, "own" for a part that
            no device gathers, such as an expert or a part of a tensor, whose activations travel; or
            a pytree of these that is a prefix of the first argument.

    Raises:
        TypeError: if `axis_name` is None, or a leaf of `sharded` neither a bool nor "own".

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def loss_fn(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> noop = jmpx.NoOpLossScale()
        >>> grad_fn = jmpx.grad(loss_fn, noop, policy="c=bf16,r=f32", over=jmpx.Over("data"))
        >>> batch = jnp.stack([jnp.zeros((2, 3)), jnp.ones((2, 3))])  # of two devices
        >>> jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")(jnp.ones(3), batch).grads
        Array([[3., 3., 3.],
               [3., 3., 3.]], dtype=float32)
    """

    __module__ = "jmpx"

    axis_name: AxisName
    sharded: PyTree = None

    def __post_init__(self) -> None:
        if self.axis_name is None or not axis_names(self.axis_name):
            raise TypeError(
                "Expected axis_name of jmpx.Over to be the name of a mapped axis, got "
                f'{self.axis_name!r}: give it, as in jmpx.Over("data"), or leave over out where '
                "nothing is averaged."
            )
        for leaf in jax.tree.leaves(self.sharded):
            if not (isinstance(leaf, bool) or (isinstance(leaf, str) and leaf == "own")):
                raise TypeError(
                    "Expected sharded of jmpx.Over to be a bool or a pytree of bools, got the leaf "
                    f"{describe(leaf)}: say True for parameters whose shards the function gathers, "
                    'and "own" for a part that no device gathers.'
                )


class Parameters(NamedTuple):
    """Facts about the parameters before the function runs, one list for each kind."""

    paths: list[str]  # for error messages
    varying: list[Axes]  # the axes along which JAX knows each of them to vary
    sharded: list[Says] | None  # the values of the mask, if there is one

    def find_shards(self, loss: Source, axis_name: AxisName) -> list[Axes]:
        """Returns for each parameter the axes over which it is a shard: none for a replica.

        Where JAX tracks what varies, a parameter that is equal on all devices is a replica, because
        the mean of its gradients is right whatever the function does with it. A varying one is what
        the mask says; without a mask it is a shard if the function gathers it, and a replica if the
        loss of a device depends on its own parameter alone. Anything else is refused.
        """
        axes = axis_names(axis_name)
        tracked = tracked_axes().intersection(axes)
        for gather in sorted(loss.gathers, key=lambda gather: min(gather.params)):
            self._check_gather(gather, tracked)
        return [self._axes_of_shard(i, loss, axes, tracked) for i in range(len(self.paths))]

    def _check_gather(self, gather: Gather, tracked: Axes) -> None:
        """Refuses a gather that does not gather shards, or may not."""
        name = f"the first argument's {self.paths[min(gather.params)]}"
        reads = f"which the function reads by {gather.operation} over {_spell(gather.axes)}"
        is_tracked, masked = gather.axes <= tracked, self.sharded is not None
        of_copies = self.sharded is not None and not any(self.sharded[i] for i in gather.params)
        sums_nothing = gather.operation.startswith("all_gather_invariant") and not is_tracked
        in_groups = gather.in_groups and not of_copies
        if sums_nothing or in_groups or not (masked or is_tracked):
            raise TypeError(
                f"Cannot tell whether {name} is a shard, {reads}: say which parameters are shards "
                "by sharded= of jmpx.Over, or use jax.shard_map without check_vma=False, and "
                "gather by jax.lax.all_gather along a mesh axis, without axis_index_groups."
            )
        if not masked and not any(self.varying[index] & gather.axes for index in gather.params):
            raise TypeError(
                f"Cannot gather {name}, {reads}, because it is the same on all devices: split it "
                "by in_specs of jax.shard_map, or say sharded=False for it."
            )

    def _axes_of_shard(
        self, index: int, loss: Source, axes: tuple[Hashable, ...], tracked: Axes
    ) -> Axes:
        name = f"the first argument's {self.paths[index]}"
        varying = self.varying[index] & tracked
        gathers = [gather for gather in loss.gathers if index in gather.params]
        gathered = _NO_AXES.union(*(gather.axes for gather in gathers))
        exchanges = [e for e in loss.exchanges if e.param == index and e.axis not in gathered]
        if self.sharded is None:
            if unsure := [e for e in exchanges if e.axis in varying]:
                exchange = min(unsure, key=str)
                raise TypeError(
                    f"Cannot tell whether {name} is a shard or a replica, because it differs along "
                    f"{_spell([exchange.axis])} and the function does not gather it, but the loss "
                    f"of each device depends on those of others, by {exchange.operation}: say by "
                    'sharded= of jmpx.Over which parameters are shards, and "own" for a part that '
                    "no device gathers."
                )
            return varying & gathered
        says = self.sharded[index]
        if says is False:
            may_vary = varying.union(*(g.axes - tracked for g in gathers if not g.by_place))
            if may_vary & gathered:
                raise TypeError(
                    f"Cannot average the gradient of {name} over {_spell(may_vary & gathered)} as "
                    "that of a replica, as sharded=False says, because the function gathers it "
                    "there as a shard: say sharded=True for it."
                )
            return _NO_AXES
        untracked = frozenset(axes) - tracked
        is_gathered = gathered or says == "own" or index not in loss.params - loss.hidden
        if not (varying or untracked) or not is_gathered:
            raise TypeError(
                f"Expected a shard, as sharded={says!r} says, but {name} is the same on all "
                f"devices of {_spell(axes)}, or the function does not gather it: say sharded=False "
                'for a copy, and sharded="own" for a part with which its device alone computes, '
                "such as an expert."
            )
        unknown = [e.axis for e in exchanges if e.axis in untracked]
        known = varying | (gathered & untracked)
        if len(axes) > 1 and untracked and (unknown or not known):
            raise TypeError(
                f"Cannot tell over which of {_spell(axes)} {name} is a shard, as sharded={says!r} "
                "says, because JAX does not track there which arrays vary: give jmpx.Over one "
                "axis, or use jax.shard_map without check_vma=False."
            )
        return known if len(axes) > 1 else varying | untracked


def _spell(axes: Iterable[Hashable]) -> str:
    names = sorted(map(repr, axes))
    return f"the axis {names[0]}" if len(names) == 1 else f"the axes {' and '.join(names)}"


def read_mask(sharded: PyTree, tree: PyTree) -> list[Says] | None:
    """Returns the value of a mask for each differentiable array; None without a mask."""
    if sharded is None:
        return None
    says: list[PyTree]
    try:
        says = for_each_leaf(sharded, tree, is_inexact_array)
    except (ValueError, TypeError, KeyError):
        says = [None]
    if None in says:
        raise ValueError(
            "Expected sharded to have the structure of the first argument, or of its first levels, "
            f"got {describe(sharded)} for {jax.tree.structure(tree)}: give a bool for each "
            "parameter, or for several at once."
        )
    return says


def for_each_leaf(
    prefix: PyTree,
    tree: PyTree,
    is_wanted: Callable[[object], bool],
    is_leaf: Callable[[object], bool] | None = None,
) -> list[PyTree]:
    """Returns the value that a prefix of a pytree has for each of the wanted leaves."""
    values: list[PyTree] = []

    def add(value: PyTree, subtree: PyTree) -> None:
        values.extend(value for leaf in jax.tree.leaves(subtree, is_leaf) if is_wanted(leaf))

    jax.tree.map(add, prefix, tree, is_leaf=is_none)
    return values
