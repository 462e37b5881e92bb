"""`jmpx.remat`: a function whose backward pass keeps the results of products, and little else."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, overload

import jax
import jax.core

from jmpx._base.delayed import check_runs_at_once
from jmpx._base.leaves import PyTree
from jmpx._base.messages import user_stacklevel
from jmpx._base.stateful import Arguments, Changes, Keywords, Leaf, PureFunction, call
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Jaxpr
from jmpx._jaxprs.inner import inner_of, is_backward, once_per_jaxpr
from jmpx._remat.checkpoints import Left, with_checkpoints
from jmpx._remat.saving import Saving, get_saving

F = TypeVar("F", bound=Callable[..., Any])
Words = Literal["products", "products+mixed", "products+attention"]


@overload
def remat(fn: F, save: Words = ...) -> F: ...


@overload
def remat(fn: None = None, save: Words = ...) -> Callable[[F], F]: ...


def remat(fn: Callable[..., Any] | None = None, save: Words = "products") -> Callable[..., Any]:
    """Makes the backward pass of a function keep the results of products, and little else.

    This is `jax.checkpoint`, for which jmpx chooses the policy and the blocks: it cuts the function
    where little has to be kept, so that layers need no marks, and computes the rest again. No dtype
    and no result changes, and gradients change by the order of sums alone. A policy does the same
    by `save=`; this is for a function that has no policy.

    Nothing is traced where nothing is differentiated, as in an eager call.

    Args:
        fn: any function of pytrees, such as a loss or a model; None to decorate with arguments.
        save: "products" keeps the results of matmuls with weights, of convolutions and of experts.
            "products+mixed" also keeps those of matmuls of two activations that are no larger than
            the larger of these, as the weighted values of an attention are, and
            "products+attention" those of all matmuls: more memory, less time.

    Returns:
        A function with the arguments and results of `fn`.

    Raises:
        TypeError: if `fn` is no function.
        ValueError: if `save` has no such value.

    Warns:
        UserWarning: when called, if a part of the function stays as it is, because it is under
            `jax.checkpoint` already, has effects, or takes a gradient itself.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def loss_fn(w, x):
        ...     for _ in range(12):
        ...         x = x + jnp.tanh(x @ w) @ w.T
        ...     return jnp.square(x).mean()
        >>> w, x = jnp.eye(32) / 2, jnp.ones((64, 32))
        >>> def kept(fn):  # bytes that the backward pass reads
        ...     return sum(array.nbytes for array in jax.tree.leaves(jax.vjp(fn, w, x)[1]))
        >>> kept(jmpx.remat(loss_fn)) < 0.7 * kept(loss_fn)
        True
    """
    if fn is None:
        return functools.partial(remat, save=save)
    if not callable(fn):
        raise TypeError(
            f"Expected a function whose backward pass keeps less, got {fn!r}: write "
            "jmpx.remat(f) or decorate the function with @jmpx.remat."
        )
    check_runs_at_once(fn)
    saving = get_saving(save)
    if saving is None:
        raise ValueError(
            "Expected 'products', 'products+mixed' or 'products+attention' as save= of jmpx.remat, "
            "got None: leave jmpx.remat out to keep what JAX keeps."
        )

    def transform(
        pure: PureFunction, state: list[Leaf], args: Arguments, kwargs: Keywords
    ) -> tuple[PyTree, Changes]:
        return run_saved(pure, saving, fn, (state, *args), kwargs)

    @functools.wraps(fn, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(transform, fn, args, kwargs)

    return wrapper


def run_saved(
    fn: Callable[..., PyTree],
    saving: Saving,
    user: Callable[..., Any],
    args: PyTree,
    kwargs: Keywords,
) -> PyTree:
    """Runs a function that keeps less for its backward pass; JAX calls it by the user's name."""
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
    if not is_traced and not core.enclosing_bodies():  # nothing differentiates an eager call
        return fn(*args, **kwargs)
    with _tracing_explained():
        traced = core.trace(fn, args, kwargs, name=getattr(user, "__name__", type(user).__name__))
    jaxpr, left = keeping_less(traced.jaxpr, saving)
    for message in messages_of(left):
        warnings.warn(message, stacklevel=user_stacklevel("jax", "flax", "haiku", "equinox"))
    return traced.rebuild(core.evaluate(jaxpr, traced.arrays))


@contextlib.contextmanager
def _tracing_explained() -> Iterator[None]:
    """Adds a note to an error that comes of tracing a function which else runs with numbers."""
    bodies = {*core.enclosing_bodies()}
    try:
        yield
    except core.UNREAD as error:
        if bodies <= {"derivative"}:
            error.add_note(
                "save= traces the function that it is given to, so that Python reads no number of "
                "an array in it: leave save= or jmpx.remat out, or give it a part of the function "
                "that reads none."
            )
        raise


def keeping_less(jaxpr: Jaxpr, saving: Saving) -> tuple[Jaxpr, Left]:
    """Returns a jaxpr that does the same, and keeps less for its backward pass.

    Second, where it is as it was; None stands for all of a function that takes a gradient itself.
    """
    if _takes_a_gradient(jaxpr):
        return jaxpr, frozenset({None})
    return with_checkpoints(jaxpr, saving)


@once_per_jaxpr
def _takes_a_gradient(jaxpr: Jaxpr) -> bool:
    """Whether equations are of a backward pass; those that transpose a linear solve are not."""
    if any(map(is_backward, jaxpr.eqns)):
        return True
    held = (inner.jaxprs for inner in map(inner_of, jaxpr.eqns) if inner is not None)
    return any(map(_takes_a_gradient, itertools.chain.from_iterable(held)))


def messages_of(left: Left) -> Iterator[str]:
    """Yields what to warn of where `save=` left something as it was."""
    if left:
        places = ", ".join(sorted(str(place) for place in left if place is not None))
        yield (
            f"save= leaves a part of the function as it is{places and f' ({places})'}, because it "
            "is under jax.checkpoint or jmpx.remat, has effects such as a callback, or takes a "
            "gradient itself: leave the checkpoint out, move the effects out of it, or "
            "differentiate what save= is given to, as in jax.grad(jmpx.remat(f))."
        )
