"""Checks of what an optimizer step is given: errors, and warnings of what would train badly."""

import contextlib
import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.leaves import PyTree, is_array, is_floating, is_none, is_view, spell
from jmpx._base.messages import describe
from jmpx._storage.low_precision_params import LowPrecisionParamsState
from jmpx._storage.transformations import in_place_of_optimizer, is_optimizer, name_of

LARGEST_COUNT = 2**31 - 1  # an int32
# By then a scale of 2**24 has been at its floor of 1 for half of the time.
MAX_CONSECUTIVE_SKIPS = 50
_ORDER = "the arguments are (model, optimizer, optimizer_state, grads, grads_finite)"


def check_skip_by(skip_by: object) -> None:
    """Refuses other ways to skip than "cond" and "where"."""
    if skip_by not in ("cond", "where"):
        raise ValueError(
            f'Expected skip_by to be "cond" or "where", got {skip_by!r}: leave it out for the '
            "default."
        )


def check_limit(limit: object, name: str) -> int:
    """Returns how many steps in a row may be skipped, as a Python number.

    Raises:
        TypeError: if `limit` is not a whole number.
        ValueError: if it is less than 1 or more than an int32 can count.
    """
    if isinstance(limit, bool | np.bool_) or not isinstance(limit, int | np.integer):
        raise TypeError(
            f"Expected {name} to be a whole number of steps, got {describe(limit)}: give for "
            f"example {MAX_CONSECUTIVE_SKIPS}."
        )
    if not 1 <= limit <= LARGEST_COUNT:
        raise ValueError(
            f"Expected {name} to be between 1 and 2**31 - 1 steps, got {limit}: give for example "
            f"{MAX_CONSECUTIVE_SKIPS}."
        )
    return int(limit)


def refuse_skip(optimizer: Any, extra_args: dict[str, Any]) -> None:
    """Refuses the old name of `skip_by`, which optax would ignore as an extra argument.

    An optimizer whose `update` names an argument `skip` gets it.
    """
    skip = extra_args.get("skip")
    if not isinstance(skip, str) or skip not in ("cond", "where"):
        return
    with contextlib.suppress(TypeError, ValueError):  # from what has no signature
        if "skip" in inspect.signature(optimizer.update).parameters:
            return
    raise TypeError(
        f"Unexpected argument skip={skip!r} of jmpx.optimizer_update: write skip_by={skip!r}, "
        "which is its name now."
    )


def check_optimizer(optimizer: object) -> None:
    """Refuses what is no optax gradient transformation, such as an `nnx.Optimizer`."""
    if not is_optimizer(optimizer):
        raise TypeError(
            "Expected an optax gradient transformation as the second argument, got "
            f"{name_of(optimizer)}: {in_place_of_optimizer(optimizer, _ORDER)}."
        )


def check_state(state: Any) -> None:
    """Refuses a state that the optimizer of `skip_nonfinite` has not made."""
    if not hasattr(state, "inner_state"):
        raise TypeError(
            "Expected the state of an optimizer of jmpx.skip_nonfinite, got a "
            f"{type(state).__name__}: make it by the init of the wrapped optimizer, as "
            "jmpx.skip_nonfinite(optimizer).init(params), and not by that of the one inside."
        )


def trained_part(model: PyTree, grads: PyTree) -> PyTree:
    """Checks the gradients, and returns the model with None for leaves without a gradient."""
    for leaf in jax.tree.leaves(grads):
        is_flag = isinstance(leaf, bool) or getattr(leaf, "dtype", None) == jnp.bool_
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
        warnings.warn(
            f"Expected the model, got a view of its {type(view).__name__}, whose parameters may "
            "be rounded to 16 bits, and would stay so: give the policy to the gradient function, "
            "and the model itself to the optimizer.",
            stacklevel=3,
        )


def warn_of_inner_counts(state: PyTree, counting: type) -> None:
    """Warns if transformations around `skip_nonfinite` hide it from `optimizer_update`.

    Args:
        state: the state of the optimizer, which is not one of `skip_nonfinite` itself.
        counting: the class of the states of `skip_nonfinite`.
    """
    if _holds(state, counting):
        warnings.warn(
            "Got an optimizer with a jmpx.skip_nonfinite inside of other transformations, which "
            "does not count the steps that optimizer_update skips: make it the outermost one, or "
            "let it skip alone by optimizer_update(..., grads_finite=True).",
            stacklevel=3,
        )


def _holds(state: PyTree, cls: type) -> bool:
    """Whether a state of class `cls` is in the state of an optimizer."""
    is_one = lambda node: isinstance(node, cls)  # noqa: E731
    return any(map(is_one, jax.tree.leaves(state, is_leaf=is_one)))


def _has_later_steps(state: PyTree) -> bool:
    """Whether an `optax.chain` has transformations after `low_precision_params`."""
    is_chain = lambda node: type(node) is tuple and bool(node)  # noqa: E731
    chains = [node for node in jax.tree.leaves(state, is_leaf=is_chain) if is_chain(node)]
    return any(
        _holds(node[:-1], LowPrecisionParamsState) or _has_later_steps(node[-1]) for node in chains
    )


def warn_of_later_steps(state: PyTree) -> None:
    """Warns if an `optax.chain` changes what `low_precision_params` has rounded."""
    if _has_later_steps(state):
        warnings.warn(
            "Got an optax.chain with transformations after jmpx.optim.low_precision_params, which "
            "change updates of parameters that it has rounded: put them inside, as in "
            "low_precision_params(optax.chain(...), ...).",
            stacklevel=3,
        )


def warn_of_cast_masters(params: PyTree, optimizer: Any, state: PyTree, grads: PyTree) -> None:
    """Warns if all parameters are of 16 bits, but the state was made of wider ones.

    The state is compared to the state that the optimizer's `init` makes of these parameters,
    because some optimizers keep wide accumulators for 16-bit parameters. Wide gradients widen the
    state of 16-bit parameters too, so that there is no warning with them.
    """
    given = [leaf for leaf in jax.tree.leaves((params, grads)) if is_floating(leaf)]
    if not given or params is None or any(leaf.dtype.itemsize != 2 for leaf in given):
        return
    if _holds(state, LowPrecisionParamsState):  # It is made of wider ones, as it should be.
        return
    wide = [is_floating(x) and x.ndim > 0 and x.dtype.itemsize > 2 for x in jax.tree.leaves(state)]
    if not any(wide):
        return
    with contextlib.suppress(jax.errors.JAXTypeError):  # from an init that cannot be traced
        made = jax.eval_shape(optimizer.init, params)
        if jax.tree.structure(made) == jax.tree.structure(state) and any(
            is_wide and is_floating(leaf) and leaf.dtype.itemsize == 2
            for is_wide, leaf in zip(wide, jax.tree.leaves(made), strict=True)
        ):
            warnings.warn(
                "Got parameters of 16 bits, and an optimizer state that was made of wider ones: "
                "cast parameters inside of the loss function, and update those that are stored; or "
                "make the state of the 16-bit ones, by the optimizer's init.",
                stacklevel=3,
            )


def warn_of_multi_steps(init: Any) -> None:
    """Warns if `optax.MultiSteps.init` is among the callers, as only the stack can tell."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code is not init.__code__:
        frame, level = frame.f_back, level + 1
    # A MultiSteps with a should_skip_update_fn, whose state is not empty, adds up no non-finite
    # gradients.
    if frame is not None and frame.f_locals.get("skip_state", ()) == ():
        warnings.warn(
            "optax.MultiSteps around jmpx.skip_nonfinite never recovers from an overflow, because "
            "the sum of its gradients stays non-finite: write skip_nonfinite(optax.MultiSteps("
            "optimizer, n)), which leaves out the one micro-step that overflowed.",
            stacklevel=level + 1,
        )
