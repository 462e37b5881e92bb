"""Errors and warnings about the arguments of the functions of a train step."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jmpx._base.messages import describe, warn
from jmpx._base.trees import (
    ArrayLeaf,
    PyTree,
    all_finite,
    is_array,
    is_floating,
    is_int,
    is_none,
    is_view,
    spell,
)
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy
from jmpx._scales.kinds import is_loss_scale
from jmpx._scales.strings import get_loss_scale
from jmpx._storage.ema import LARGEST_COUNT
from jmpx._storage.low_precision_params import (
    LowPrecisionParamsState,
    in_place_of_optimizer,
    is_optimizer,
    name_of,
)

# After so many skips, a scale of 2**24 has been at its floor of 1 for half of the time.
MAX_CONSECUTIVE_SKIPS = 50
_OUTERMOST = "make it the outermost one, as in skip_nonfinite(optax.MultiSteps(optimizer, n))"
_NNX_CALL = "jmpx.optimizer_update(model, optimizer, grads=grads, grads_finite=grads_finite)"
_ORDER = "the arguments are (model, optimizer, optimizer_state, grads, grads_finite)"


def check_whole(value: object, name: str, remedy: str = "give for example 50") -> int:
    """Returns a whole number from 1 to the largest int32, as Python's."""
    if not is_int(value):
        raise TypeError(f"Expected {name} to be a whole number, got {describe(value)}: {remedy}.")
    if not 1 <= value <= LARGEST_COUNT:
        raise ValueError(
            f"Expected {name} to be between 1 and 2**31 - 1, got {describe(value)}: {remedy}."
        )
    return int(value)


def check_loss_scale(value: object, remedy: str | None = None) -> None:
    """Refuses anything but a loss scale as the second argument of a function."""
    if is_loss_scale(value):
        return
    if remedy is None:
        remedy = "write jmpx.NoOpLossScale(), or for float16 jmpx.DynamicLossScale()"
        if isinstance(value, str):
            is_scale = _is_loss_scale_text(value)
            scale, policy = f"jmpx.get_loss_scale({value!r})", f"policy={value!r}"
            remedy = f"write {scale if is_scale else f'{policy} beside a loss scale'}"
        elif isinstance(value, Policy | PolicyMap):
            remedy = "give it as policy=, beside a loss scale"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            remedy = f"write jmpx.StaticLossScale({value!r}) or jmpx.DynamicLossScale({value!r})"
    raise TypeError(
        f"Expected a loss scale as the second argument, got {describe(value)}: {remedy}."
    )


def _is_loss_scale_text(text: str) -> bool:
    try:
        get_loss_scale(text, policy="float16")
    except ValueError:
        return False
    return True


def check_skip_by(skip_by: object) -> None:
    """Refuses other ways to skip than "cond" and "where"."""
    if skip_by not in ("cond", "where"):
        raise ValueError(
            f'Expected skip_by to be "cond" or "where", got {skip_by!r}: leave it out for the '
            "default."
        )


LEFT_OUT = object()  # in place of an argument of `optimizer_update` that was not given


def check_optimizer_arguments(
    of_nnx: bool, optimizer_state: object, grads: object, grads_finite: object
) -> None:
    """Refuses a call of `optimizer_update` without an argument, or with two states."""
    if of_nnx and optimizer_state is not LEFT_OUT:
        raise TypeError(
            "Got an optimizer state as the third argument beside an nnx.Optimizer, which holds its "
            f"own: leave it out, and name the others, as in {_NNX_CALL}."
        )
    given = {"grads": grads, "grads_finite": grads_finite}
    given = given if of_nnx else {"optimizer_state": optimizer_state, **given}
    missing = [name for name, value in given.items() if value is LEFT_OUT]
    if missing:
        raise TypeError(
            f"Expected {missing[0]}, which jmpx.optimizer_update needs, got none: "
            f"{f'write {_NNX_CALL}' if of_nnx else _ORDER}."
        )


def check_optimizer(optimizer: object) -> None:
    """Refuses all but optax gradient transformations."""
    if not is_optimizer(optimizer):
        raise TypeError(
            "Expected an optax gradient transformation as the second argument, got "
            f"{name_of(optimizer)}: {in_place_of_optimizer(optimizer, _ORDER)}."
        )


def refuse_state(state: object) -> NoReturn:
    """Refuses a state that the optimizer of `skip_nonfinite` has not made."""
    raise TypeError(
        "Expected the state of an optimizer of jmpx.skip_nonfinite, got a "
        f"{type(state).__name__}: make it by the init of the wrapped optimizer, as "
        "jmpx.skip_nonfinite(optimizer).init(params), and not by that of the one inside."
    )


def trained_part(model: PyTree, grads: PyTree) -> PyTree:
    """Checks the gradients, and returns the model with None for leaves without a gradient."""
    for leaf in jax.tree.leaves(grads):
        is_flag = isinstance(leaf, bool) or (is_array(leaf) and leaf.dtype == jnp.bool_)
        if is_flag or not (is_array(leaf) or isinstance(leaf, int | float | complex)):
            raise TypeError(
                f"Expected gradients as the fourth argument, arrays of numbers or None, got "
                f"{spell(leaf) if is_flag else describe(leaf)} among them: {_ORDER}."
            )
    try:
        return jax.tree.map(lambda g, p: None if g is None else p, grads, model, is_leaf=is_none)
    except ValueError:
        raise TypeError(
            "Expected gradients of the structure of the model as the fourth argument, got a "
            f"{type(grads).__name__} for a {type(model).__name__} that differ: {_ORDER}."
        ) from None


def warn_of_views(tree: PyTree) -> None:
    """Warns if a pytree is or holds a view of a module, whose parameters are rounded."""
    view = next(filter(is_view, jax.tree.leaves(tree, is_leaf=is_view)), None)
    if view is not None:
        warn(
            f"Expected the model, got a view of its {type(view).__name__}, whose parameters may "
            "be rounded to 16 bits, and would stay so: give the policy to the gradient function, "
            "and the model itself to the optimizer."
        )


def warn_of_inner_counts(state: PyTree, skips: bool) -> None:
    """Warns if transformations around `skip_nonfinite` hide it, or would keep an overflow.

    `skips` is whether `optimizer_update` may skip the step itself.
    """
    if not _holds_counts(state):
        return
    sums = dict(_seen_before_counts(state))
    if sums and not skips:
        warn(
            "Got an optimizer with a jmpx.skip_nonfinite inside other transformations, which may "
            f"sum up gradients before it sees them, where one overflow stays: {_OUTERMOST}."
        )
    elif skips:
        alone = ", or let it skip alone by optimizer_update(..., grads_finite=True)"
        warn(
            "Got an optimizer with a jmpx.skip_nonfinite inside other transformations, which "
            "does not count the steps that optimizer_update skips: make it the outermost one, as "
            f"in skip_nonfinite(optax.chain(...)){'' if sums else alone}."
        )


def warn_of_kept_overflow(state: PyTree) -> None:
    """Warns if transformations around `skip_nonfinite` hold, and so keep, non-finite numbers.

    `state` is any pytree. Those transformations are in the same tuple as the `skip_nonfinite`.
    """
    tuples = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, tuple))
    arrays = [each for node in filter(_holds_counts, tuples) for each in _seen_before_counts(node)]
    name = next((name for name, array in arrays if not all(map(all_finite, parts(array)))), None)
    if name is not None:
        warn(
            "Got an optimizer with a jmpx.skip_nonfinite inside other transformations, whose "
            f"{name} is no longer finite, so that no later step may be: {_OUTERMOST}, and start "
            "again from a finite state."
        )


def parts(array: ArrayLeaf | complex) -> list[Any]:
    """Returns an array; of one over several processes, the parts that this process holds."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return [array]
    return [shard.data for shard in array.addressable_shards]


def _seen_before_counts(node: PyTree, path: str = "") -> Iterator[tuple[str, ArrayLeaf]]:
    """Yields the paths and floating arrays of states that see gradients before a `skip_nonfinite`.

    They are sums of gradients, as in `optax.MultiSteps`. Scalars, hyperparameters, are left out.
    """
    if _is_counting(node):
        return
    held = _holds_counts(node)
    is_part = (lambda part: part is not node) if held else None
    inner = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_part)
    if type(node) is tuple and held:  # an `optax.chain`: those after it see gradients later
        inner = inner[: 1 + max(i for i, (_, part) in enumerate(inner) if _holds_counts(part))]
    for key, part in inner:
        name = path + jax.tree_util.keystr(key)
        if held:
            yield from _seen_before_counts(part, name)
        elif is_floating(part) and part.ndim:
            yield name, part


def warn_of_later_steps(state: PyTree) -> None:
    """Warns if an `optax.chain` changes updates of parameters that are rounded already."""
    if _has_later_steps(state):
        warn(
            "Got an optax.chain with transformations after jmpx.optim.low_precision_params, which "
            "change the updates of parameters that it has rounded: put them inside, as in "
            "low_precision_params(optax.chain(...), ...)."
        )


def _has_later_steps(state: PyTree) -> bool:
    is_chain = lambda node: type(node) is tuple and bool(node)  # noqa: E731
    is_low = lambda node: isinstance(node, LowPrecisionParamsState)  # noqa: E731
    chains = filter(is_chain, jax.tree.leaves(state, is_leaf=is_chain))
    return any(_holds(chain[:-1], is_low) or _has_later_steps(chain[-1]) for chain in chains)


def _is_counting(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "consecutive_skipped")


def _holds(tree: PyTree, is_one: Callable[[object], bool]) -> bool:
    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


_holds_counts = functools.partial(_holds, is_one=_is_counting)
