"""Counts of non-finite numbers and of skipped steps: checked on the host, or for a logger."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.trees import (
    ArrayLeaf,
    PyTree,
    all_finite,
    at_least_float32,
    is_array,
    is_floating,
    is_inexact_array,
    is_traceable,
    serialized,
)
from jmpx._scales.kinds import DynamicLossScale, LossScale
from jmpx._scales.scaling import format_number
from jmpx._steps.checks import (
    LARGEST_COUNT,
    MAX_CONSECUTIVE_SKIPS,
    check_loss_scale,
    check_whole,
    parts,
    warn_of_kept_overflow,
)
from jmpx._storage.low_precision_params import is_optimizer

Leaf: TypeAlias = Any  # an array or a Python number


@serialized
class NonfiniteCounts(NamedTuple):
    """How many elements of an array are infinite (`inf`) and NaN: int32 arrays of shape ()."""

    __module__ = "jmpx.inspect"

    inf: jax.Array
    nan: jax.Array


def nonfinite(tree: PyTree) -> dict[str, NonfiniteCounts]:
    """Counts the infinities and the NaNs in each leaf of a pytree, such as gradients.

    Args:
        tree: any pytree. Floating and complex arrays and Python floats are counted, as
            `jmpx.all_finite` checks them; other leaves are left out. Under `jax.jit` it costs two
            reductions a leaf.

    Returns:
        The counts by the path of the leaf, such as `"['layer']['w']"`. An element of a complex leaf
        whose parts are infinite and NaN is counted twice.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> counts = jmpx.inspect.nonfinite({"w": jnp.array([jnp.inf, jnp.nan, jnp.nan])})
        >>> {path: (int(inf), int(nan)) for path, (inf, nan) in counts.items()}
        {"['w']": (1, 2)}
    """
    return {path: _count(leaf) for path, leaf in _inexact_leaves(tree).items()}


def _inexact_leaves(tree: PyTree) -> dict[str, Leaf]:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_inexact_array(leaf) or isinstance(leaf, float | complex)
    }


def _count(leaf: Leaf) -> NonfiniteCounts:
    if is_array(leaf) and not is_traceable(leaf):
        inf, nan = (jnp.asarray(np.sum(f(leaf)), jnp.int32) for f in (np.isinf, np.isnan))
        return NonfiniteCounts(inf, nan)
    wide = at_least_float32(leaf) if is_floating(leaf) else leaf
    return NonfiniteCounts(*(_sum(f(wide)) for f in (jnp.isinf, jnp.isnan)))


def _sum(flags: jax.Array) -> jax.Array:
    """Counts flags in int32; counts of larger arrays end near its largest number."""
    if flags.size <= LARGEST_COUNT:
        return flags.sum(dtype=jnp.int32)
    return jnp.minimum(flags.sum(dtype=jnp.float32), LARGEST_COUNT - 127).astype(jnp.int32)


def check_progress(
    opt_state: PyTree,
    loss_scale: LossScale,
    grads: PyTree = None,
    max_consecutive: int = MAX_CONSECUTIVE_SKIPS,
) -> None:
    """Raises if an optimizer of `skip_nonfinite` has skipped too many steps in a row.

    A run that diverged would skip every step and learn nothing. Call this on the host, between
    steps: it waits for one number of the state, and adds nothing to the compiled step. Every
    process of a program raises at the same step, where all of them have the state.

    Args:
        opt_state: the state of an optimizer of `skip_nonfinite`, or any pytree that holds one or
            several, such as a Flax `TrainState`, an `nnx.Optimizer` or a stack of states from
            `jax.vmap`; the longest row counts. Any field or key `consecutive_skipped` is read.
        loss_scale: the loss scale of the same step, or a stack of them.
        grads: gradients of the last step: the error names those that are not finite.
        max_consecutive: how many steps in a row may be skipped; one more is an error. The default
            is more than a scale of 2**24 needs to fall to 1 by halves.

    Raises:
        FloatingPointError: if more steps than `max_consecutive` were skipped in a row. Of a stack,
            as of an ensemble, it names the members where only some skip.
        TypeError: if an argument is of another type, or the state is traced, as under `jax.jit`.
        ValueError: if `max_consecutive` is less than 1.

    Warns:
        UserWarning: if the last step was skipped, and a transformation around `skip_nonfinite`,
            such as an `optax.MultiSteps`, has an infinity or NaN in its state, where it stays.

    Example:
        >>> import jax.numpy as jnp, optax, jmpx
        >>> optimizer, params = jmpx.skip_nonfinite(optax.sgd(0.1)), jnp.ones(2)
        >>> grads, state = jnp.array([1.0, jnp.nan]), optimizer.init(params)
        >>> for _ in range(3):
        ...     _, state = optimizer.update(grads, state, params)
        >>> jmpx.inspect.check_progress(state, jmpx.NoOpLossScale(), grads, max_consecutive=2)
        Traceback (most recent call last):
        ...
        FloatingPointError: Skipped 3 optimizer steps in a row, more than max_consecutive=2, with
        the loss scale 'none', and infinities or NaN in grads: lower the learning rate, return the
        loss scale from the step if it never changed, or look for the cause in the data and by
        jmpx.inspect.nonfinite(grads).
    """
    limit = check_whole(max_consecutive, "max_consecutive")
    check_loss_scale(loss_scale, "pass the one of the step, or jmpx.NoOpLossScale()")
    counts = counts_of(opt_state, "consecutive_skipped")
    if not counts:
        raise TypeError(
            "Expected the state of an optimizer of jmpx.skip_nonfinite, got a "
            f"{type(opt_state).__name__} without one: wrap the optimizer, as "
            "jmpx.skip_nonfinite(optax.adam(1e-3)), and pass the state of the last step."
        )
    stack = max((np.asarray(part) for count in counts for part in parts(count)), key=np.max)
    if count := int(stack.max()):
        warn_of_kept_overflow(opt_state)
    if count > limit:
        members = stack.size if jax.process_count() == 1 else 1  # others may hold more of them
        at = int(stack.argmax())
        loss_scale = jax.tree.map(lambda x: _one_of(x, at, members), loss_scale)
        skipping = [*map(str, np.flatnonzero(stack > limit))]
        member = f" in member {_first(skipping)} of {members} (counted from 0)"
        floor = lower = ""
        least = f"init={format_number(getattr(loss_scale, 'min_loss_scale', 0))}"
        if str(loss_scale).split(",")[:2] == ["dynamic", least]:
            floor = ", which is at its floor, min_loss_scale, where gradients still are not finite"
            lower = (
                "if the parameters are finite, lower that floor to the scale that "
                "jmpx.inspect.ranges proposes or compute in bfloat16; else "
            )
        elif isinstance(loss_scale, DynamicLossScale):
            lower = (
                "if it fell in each of these steps, it began too high, so wait, or begin with a "
                "lower one; else "
            )
        raise FloatingPointError(
            f"Skipped {count} optimizer steps in a row{member * (len(skipping) < members)}, more "
            f"than max_consecutive={limit}, with the loss scale '{loss_scale}'{floor}"
            f"{_named(grads)}: {lower}lower the learning rate, return the loss scale from the step "
            "if it never changed, or look for the cause in the data and by "
            "jmpx.inspect.nonfinite(grads)."
        )


def _one_of(leaf: Leaf, member: int, members: int) -> Leaf:
    """Returns the number of one member in a stack, or else the least one of it."""
    if not np.ndim(leaf):
        return leaf
    return np.ravel(leaf)[member] if np.size(leaf) == members else np.min(parts(leaf)[0])


def counts_of(opt_state: PyTree, name: str) -> list[ArrayLeaf | int]:
    """Returns the counts of `skip_nonfinite` of this name, wherever a pytree has them."""
    found: list[PyTree] = []

    def visit(node: object) -> bool:  # as `is_leaf`: faster than a map of all leaves with paths
        if isinstance(node, tuple):
            found.append(getattr(node, name, None))
        elif not is_array(node) and isinstance(node, Mapping):  # a checkpoint, an `nnx.State`
            found.append(node.get(name))
        return False

    jax.tree.leaves(opt_state, is_leaf=visit)
    counts = jax.tree.leaves(found)  # without None; a variable of NNX becomes its array
    return [count for count in counts if is_array(count) or isinstance(count, int)]


def _named(grads: PyTree) -> str:
    """Returns the part of a message that names the first three gradients that are not finite."""
    leaves = _inexact_leaves(grads).items()
    bad = [f"grads{path}" for path, leaf in leaves if not all(map(all_finite, parts(leaf)))]
    return f", and infinities or NaN in {_first(bad)}" if bad else ""


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Scalars for a logger: the loss scale, and the skipped steps.


def metrics(opt_state: PyTree = None, loss_scale: LossScale | None = None) -> dict[str, jax.Array]:
    """Returns the scalars of a mixed-precision step that a logger plots.

    Call it at the end of the step, under `jax.jit`, and return the dict with the loss: nothing
    waits for the device until the logger reads them, by `jax.device_get(metrics)`.

    Args:
        opt_state: the state of an optimizer of `skip_nonfinite`, or any pytree that holds one or
            several, as `check_progress` takes it.
        loss_scale: the loss scale of the next step; `jmpx.NoOpLossScale()` is the constant 1.

    Returns:
        A dict of arrays of shape () with `"loss_scale"` in float32, `"total_skipped"`, the steps
        that were skipped so far, and `"consecutive_skipped"`, those in a row up to this one, in
        int32; without those that the arguments do not tell. Inside `jax.shard_map` and `jax.pmap`
        they are the device's own. Of several states, or of a stack of them, they are the largest
        counts and the smallest scale.

    Raises:
        TypeError: if the arguments are swapped or of other types, or there is neither a loss scale
            nor a state of `skip_nonfinite`.

    Example:
        >>> import jax.numpy as jnp, optax, jmpx
        >>> state = jmpx.skip_nonfinite(optax.sgd(0.1)).init(jnp.ones(2))
        >>> found = jmpx.metrics(state, jmpx.DynamicLossScale(1024.0))
        >>> {name: float(value) for name, value in found.items()}
        {'loss_scale': 1024.0, 'total_skipped': 0.0, 'consecutive_skipped': 0.0}
    """
    remedy = "jmpx.metrics takes (opt_state, loss_scale), those that the step returns"
    if loss_scale is not None:
        check_loss_scale(loss_scale, remedy)
    found = {} if loss_scale is None else {"loss_scale": _factor_of(loss_scale)}
    for name in ("total_skipped", "consecutive_skipped"):
        if counts := counts_of(opt_state, name):
            found[name] = functools.reduce(jnp.maximum, map(_largest, counts))
    if not found or is_optimizer(opt_state):
        raise TypeError(
            "Expected a loss scale, or the state of an optimizer of jmpx.skip_nonfinite, got a "
            f"{type(opt_state).__name__} without one: {remedy}, and "
            "jmpx.skip_nonfinite(optax.adam(1e-3)) counts skipped steps."
        )
    return found


def _factor_of(loss_scale: LossScale) -> jax.Array:
    """Returns the factor of any loss scale, as it scales 1; the smallest of a stack."""
    one_scale = jax.tree.map(lambda x: x.min() if jnp.ndim(x) else x, loss_scale)
    return jnp.asarray(one_scale.scale(jnp.ones((), jnp.float32)), jnp.float32)


def _largest(count: ArrayLeaf | int) -> jax.Array:
    count = jnp.asarray(count, jnp.int32)
    return count.max() if count.ndim else count
