"""What the function of `--model` returned: which function is traced, and with which arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeAlias

import jax

from jmpx._base.leaves import PyTree
from jmpx._cli.targets import attempt
from jmpx._inspect.programs import trace_shapes

RETURNS = (
    "a module of Equinox or NNX, or a pair of a function, a Linen module or a Haiku transformed "
    "function and the tuple of its arguments"
)
Call: TypeAlias = tuple[Callable[..., PyTree], tuple[PyTree, ...]]


def call_of(made: PyTree) -> Call:
    """Returns the function that is traced, and its arguments.

    Of a Linen module or a Haiku transformed function, that is `apply` with shapes as parameters; of
    a model alone, a function that does not call it.

    Raises:
        ValueError: if arguments are missing.
    """
    if type(made) is not tuple:
        return _do_nothing, (made,)
    if len(made) != 2 or not isinstance(made[1], tuple | list):
        got = ", ".join(type(part).__name__ for part in made)
        raise ValueError(f"Expected the function of --model to return {RETURNS}, got ({got}).")
    fn, args = made
    return _apply_of(fn, args) if hasattr(fn, "init") else (fn, tuple(args))


def _do_nothing(model: PyTree) -> None:
    """Takes a model, of which adapters make a view."""


def is_call(fn: Callable[..., PyTree]) -> bool:
    """Whether a function of `call_of` calls the model."""
    return fn is not _do_nothing


def _apply_of(model: PyTree, args: tuple[PyTree, ...]) -> Call:
    """Returns the call of a Linen module or a Haiku transformed function."""
    key = jax.random.key(0)
    init = functools.partial(trace_shapes, model.init, (key, *args), {})
    traced = attempt("Tracing the model failed", init)
    avals = traced.jaxpr.out_avals
    made = traced.rebuild([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])
    names = [*inspect.signature(model.apply).parameters]
    if "rngs" in names:  # Linen's
        changing = [name for name in made if name != "params"]
        return functools.partial(model.apply, rngs=key, mutable=changing), (made, *args)
    stored = made if names[1:2] == ["state"] else (made,)
    keys = [key] if "rng" in names else []  # hk.without_apply_rng takes it away
    return model.apply, (*stored, *keys, *args)
