"""The one table of the arguments of loss scales: their keys in strings, their ranges."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.leaves import is_array
from jmpx._base.messages import describe

# Between these two, a scale and its reciprocal are normal float32 numbers. Hardware may flush other
# numbers to 0.
LOWEST_SCALE, HIGHEST_SCALE = 2.0**-126, 2.0**126
LARGEST_FLOAT16 = (2 - 2.0**-10) * 2**15
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_LARGEST_COUNT = 2**31 - 1  # The counter is an int32.
_BELOW_1 = float(np.nextafter(1, 0))


class Argument(NamedTuple):
    """An argument of a loss scale: its name in the class, its range, and that in messages."""

    name: str
    low: float
    high: float
    expected: str
    is_whole: bool = False


_STEPS = (1, _LARGEST_COUNT, "a whole number between 1 and 2**31 - 1", True)
# By their keys in strings and mappings, in the order of printing.
DYNAMIC = {
    "init": Argument("loss_scale", 0, _LARGEST_FLOAT32, "a number between 0 and float32's largest"),
    "period": Argument("period", *_STEPS),
    "factor": Argument("factor", 1, HIGHEST_SCALE, "a number between 1 and 2**126"),
    "min": Argument("min_loss_scale", 0, HIGHEST_SCALE, "a number between 0 and 2**126"),
    "max": Argument(
        "max_loss_scale", LOWEST_SCALE, _LARGEST_FLOAT32, "between 2**-126 and float32's largest"
    ),
    "backoff": Argument("backoff_factor", LOWEST_SCALE, _BELOW_1, "at least 2**-126 and below 1"),
    "hysteresis": Argument("hysteresis", *_STEPS),
    "counter": Argument(
        "counter", -_LARGEST_COUNT, _LARGEST_COUNT, "a whole number within 2**31 - 1 of 0", True
    ),
}
# 0 is a placeholder, which cannot scale.
STATIC = {"init": Argument("loss_scale", 0, HIGHEST_SCALE, "a number between 2**-126 and 2**126")}
# Each kind, and what it takes.
ARGUMENTS: dict[str, dict[str, Argument]] = {
    "dynamic": DYNAMIC,
    "static": STATIC,
    "none": {},
    "auto": DYNAMIC,
}


def check_number(argument: Argument, value: object, what: str, at: str = "") -> int | float:
    """Returns a number, or that of a concrete scalar array, within the range of an argument."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"Expected {what} to be a number, got the traced {value.aval}{at}: set it outside "
            "jax.jit, or keep what changes in the loss_scale of a DynamicLossScale, which may be "
            "traced."
        )
    number = value.item() if is_array(value) and value.ndim == 0 else value
    error: type[Exception] = TypeError
    if isinstance(number, int | float) and not isinstance(number, bool):
        error = ValueError
        is_within = argument.low <= number <= argument.high
        if is_within and not argument.is_whole:
            return number
        if is_within and number == int(number):
            return int(number)
    raise error(f"Expected {what} to be {argument.expected}, got {describe(value)}{at}.")


def as_leaf(value: object, dtype: type[np.generic], argument: Argument) -> Any:
    """Returns a number or an array as a strong array of `dtype`, and any other object as it is."""
    if isinstance(value, jax.Array):
        return jnp.asarray(value, dtype)
    if is_array(value):
        with np.errstate(all="ignore"):  # As in JAX, a float64 beyond float32 silently becomes inf.
            return np.asarray(value).astype(dtype)
    if not isinstance(value, int | float | str):
        return value
    # A NumPy array starts no backend, and Orbax saves it; it refuses NumPy scalars.
    return np.asarray(check_number(argument, value, f"DynamicLossScale.{argument.name}"), dtype)


def concrete_leaf(leaf: object, name: str) -> np.ndarray:
    """Returns a leaf of a loss scale as a NumPy array of shape (), and refuses all else."""
    if is_array(leaf) and leaf.ndim == 0 and not isinstance(leaf, jax.core.Tracer):
        with contextlib.suppress(RuntimeError):  # It was donated, or another process holds it.
            return np.asarray(leaf)
    raise TypeError(
        f"Expected {name} of the loss scale to be one number, got {describe(leaf)}: take it "
        "outside of jax.jit and jax.vmap, and before a step donates it."
    )
