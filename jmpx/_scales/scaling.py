"""The base of loss scales: arguments, numbers as texts, Flax's checkpoints, and scaling."""

import contextlib
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpx._base.messages import describe
from jmpx._base.trees import Flag, at_least_float32, is_array, is_floating, is_inexact_array

# Between these two, a scale and its reciprocal are normal float32 numbers; hardware may flush
# subnormal ones to 0.
LOWEST_SCALE, HIGHEST_SCALE = 2.0**-126, 2.0**126
LARGEST_FLOAT16 = (2 - 2.0**-10) * 2**15
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_LARGEST_COUNT = 2**31 - 1  # The counter is an int32.
_BELOW_1 = float(np.nextafter(1, 0))


class Argument(NamedTuple):
    """An argument of a loss scale: its name in the class, its range, and the range in words."""

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
# Kind -> its arguments.
ARGUMENTS: dict[str, dict[str, Argument]] = {
    "dynamic": DYNAMIC,
    "static": STATIC,
    "none": {},
    "auto": DYNAMIC,
}


def check_number(argument: Argument, value: object, what: str, at: str = "") -> int | float:
    """Returns the number of a value or a concrete scalar array, if it is in range."""
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
    """Returns a leaf of a loss scale as a NumPy array of shape (); refuses other leaves."""
    if is_array(leaf) and leaf.ndim == 0 and not isinstance(leaf, jax.core.Tracer):
        with contextlib.suppress(RuntimeError):  # It was donated, or another process holds it.
            return np.asarray(leaf)
    stack = ", or index the replica, as jax.tree.map(lambda x: x[0], loss_scale)"
    raise TypeError(
        f"Expected {name} of the loss scale to be one number, got {describe(leaf)}: take it "
        "outside of jax.jit and jax.vmap, and before a step donates it"
        f"{stack if is_array(leaf) and leaf.ndim else ''}."
    )


# Numbers of loss scales as texts, such as `2**15`.


def parse_number(text: str) -> int | float:
    """Returns the number that `32768`, `2**15`, `0.5` or `1e4` stands for, inf if too large."""
    # No sign before a power, because Python reads -2**2 as -(2**2); no words, because `float` takes
    # nan and inf. Powers are of floats, so that a huge one costs nothing.
    if not re.fullmatch(r"[-+.\deE_]+|[\d.][-+.\deE_]*\s*\*\*\s*[-+\d]+", text.strip(), re.ASCII):
        raise ValueError(text)
    base, power, exponent = text.partition("**")
    if not power:
        is_whole = re.fullmatch(r"[-+]?\d+", text.strip(), re.ASCII)
        return int(text) if is_whole else plain_number(float(text))
    try:
        return plain_number(float(base) ** int(exponent))
    except (OverflowError, ZeroDivisionError):
        return math.inf


def format_number(number: int | float) -> str:
    """Returns the text of a number, which `parse_number` reads back; a long one may be a power."""
    text = str(plain_number(number))
    if len(text) > 8 and number > 0:
        exponent = math.frexp(number)[1] - 1
        if 2.0**exponent == number:
            return f"2**{exponent}"
    return text


def plain_number(number: int | float) -> int | float:
    """Returns a whole number as an int, which is shorter, unless it has more than 16 digits."""
    is_whole = isinstance(number, float) and number.is_integer() and abs(number) < 2**53
    return int(number) if is_whole else number


def shortest(number: np.float32) -> int | float:
    """Returns the number with the fewest digits that is `number` in float32, or a power of two."""
    exact, short = float(number), float(str(number))
    is_exact = math.frexp(exact)[0] == 0.5 or np.float32(short) != number
    return plain_number(exact if is_exact else short)


# Lets `flax.serialization` save and restore loss scales.


_known: set[type] = set()


def register_with_flax(cls: type, names: tuple[str, ...] = ()) -> None:
    """Tells Flax which fields of a class to save; others come from the template."""
    # Each new instance calls this, because jmpx does not import Flax, which may come later.
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or cls in _known:
        return
    _known.add(cls)

    def to_state_dict(value: object) -> dict[str, Any]:
        return {name: getattr(value, name) for name in names}

    def from_state_dict(template: Any, state: Any) -> Any:
        got = sorted(state) if isinstance(state, dict) else type(state).__name__
        if got != sorted(names):
            raise ValueError(
                f"Expected the state of a {cls.__name__} to hold {sorted(names)}, got {got}: the "
                "checkpoint is of another loss scale or program, so restore it into a template of "
                "the kind that was saved."
            )
        for name, value in state.items():
            is_missing = value is None and getattr(template, name) is not None
            if is_missing or isinstance(value, dict | list | str):
                raise ValueError(
                    f"Expected {name} in the state of a {cls.__name__} to be a number, got "
                    f"{type(value).__name__}: the checkpoint is torn, so restore an older one."
                )
        return dataclasses.replace(template, **state)

    with contextlib.suppress(ValueError):  # A registration of the user's own stays.
        serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


# Scaling and texts, which all loss scales share.


T = TypeVar("T")


class Scaling:
    """A loss scale. `scale` multiplies by its factor, `unscale` divides by it."""

    _kind: ClassVar[str]

    @property
    def _effective_scale(self) -> jax.Array | np.ndarray | np.float32:
        """The factor within its bounds, as a float32 array of shape ()."""
        raise NotImplementedError

    def _numbers(self) -> dict[str, int | float]:
        """The numbers by their keys in strings; defaults are left out, except `init`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, str | int | float]:
        """Returns a mapping such as `{"type": "dynamic", "init": 32768, "period": 500}`.

        `jmpx.get_loss_scale` reads it, and `json.dumps` takes it. Defaults are left out, except
        `init`.

        Raises:
            TypeError: if the scale or its counter is traced, or is not one number.
        """
        return {"type": self._kind, **self._numbers()}

    def __str__(self) -> str:
        """Returns the string, which `jmpx.get_loss_scale` parses back to an equal loss scale.

        A loss scale whose leaves are not concrete numbers is written as by `repr`.
        """
        try:
            numbers = self._numbers()
        except TypeError:
            return repr(self)
        parts = [f"{key}={format_number(number)}" for key, number in numbers.items()]
        return ",".join([self._kind, *parts]).replace("static,init=", "static=")

    def adjust(self, grads_finite: Flag) -> Self:
        """Returns the next loss scale: this one, unless a subclass changes it."""
        del grads_finite
        return self

    def scale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays multiplied by the scale.

        Args:
            tree: any pytree; other leaves pass untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is 0, or a stack of scales outside `jax.vmap`.
        """
        return _multiply(tree, self._effective_scale.astype)

    def unscale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays divided by the scale.

        Arguments, result and errors are as in `scale`.
        """
        scale = self._effective_scale
        return _multiply(tree, lambda dtype: 1 / scale.astype(dtype))


def _multiply(tree: T, factor: Callable[[np.dtype], ArrayLike]) -> T:
    """Multiplies floating and complex arrays, in float32 or wider, by the factor of their dtype."""
    factor = functools.cache(factor)  # computed once for each dtype, not for each leaf

    def multiply_leaf(leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        if not is_floating(leaf):
            return jax.lax.complex(multiply_leaf(jnp.real(leaf)), multiply_leaf(jnp.imag(leaf)))
        wide = jnp.asarray(at_least_float32(leaf))
        return wide * factor(wide.dtype)

    return jax.tree.map(multiply_leaf, tree)
