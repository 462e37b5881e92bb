"""How a loss scale scales: the product with a pytree, and the numbers that a scale may be."""

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpx._base.casts import at_least_float32
from jmpx._base.leaves import is_array, is_floating, is_inexact_array

T = TypeVar("T")

# Between these two, a scale and its reciprocal are normal float32 numbers. Hardware may flush other
# numbers to 0.
LOWEST_SCALE, HIGHEST_SCALE = 2.0**-126, 2.0**126
LARGEST_FLOAT16 = (2 - 2.0**-10) * 2**15
LONGEST_PERIOD = 2**31 - 1  # The counter is an int32.
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def as_number(value: object, name: str, least: int = 0) -> int | float:
    """Returns a setting, which is a number or a concrete scalar array, as a Python number.

    Raises:
        TypeError: if `value` is traced or anything else.
        ValueError: if it is below `least`, NaN or beyond float32.
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"Expected {name} to be a number, got the traced {value.aval}: set it outside jax.jit, "
            "or keep what changes in the loss_scale of a DynamicLossScale, which may be traced."
        )
    number = value.item() if is_array(value) and value.ndim == 0 else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"Expected {name} to be a number, got {value!r}: give for example 2.0**15.")
    if not least <= number <= LARGEST_FLOAT32:
        raise ValueError(
            f"Expected {name} to be between {least} and float32's largest number, got {number}: "
            "give for example 2.0**15."
        )
    return number


def as_leaf(value: Any, dtype: type[np.generic], name: str) -> Any:
    """Returns a number or an array as an array of `dtype`, and any other object as it is.

    The array is not weakly typed. A number becomes a NumPy array, which starts no backend and which
    Orbax saves; Orbax refuses NumPy scalars.

    Raises:
        TypeError: if `value` is a bool or text.
        ValueError: if it is a number out of its range.
    """
    if isinstance(value, jax.Array):
        return jnp.asarray(value, dtype)
    if is_array(value):
        with np.errstate(all="ignore"):  # As in JAX, a float64 beyond float32 silently becomes inf.
            return np.asarray(value).astype(dtype)
    if not isinstance(value, int | float | str):
        return value
    is_counter = dtype is np.int32
    number = as_number(value, f"DynamicLossScale.{name}", -LONGEST_PERIOD if is_counter else 0)
    if is_counter and number > LONGEST_PERIOD:
        raise ValueError(
            f"Expected DynamicLossScale.{name} to be at most 2**31 - 1, got {number}: leave it out "
            "to begin with 0."
        )
    return np.asarray(number, dtype)


def is_integer_array(value: object) -> bool:
    """Whether `value` is an array of integers, of which JMP warns when it is given as a scale."""
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.integer)


class Scaling:
    """A loss scale with a factor. `scale` multiplies by it, `unscale` divides by it."""

    @property
    def _effective_scale(self) -> Any:
        """The factor within its bounds, as a float32 of shape (), of JAX or of NumPy."""
        raise NotImplementedError

    def scale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays multiplied by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is 0, or a stack of scales outside `jax.vmap`.
        """
        return _multiply(tree, self._effective_scale.astype)

    def unscale(self, tree: T) -> T:
        """Returns `tree` with its floating and complex arrays divided by the scale.

        Args:
            tree: any pytree; leaves of other kinds are handed on untouched.

        Returns:
            The tree, 8 and 16-bit leaves in float32, wider ones in their own dtype.

        Raises:
            ValueError: if the scale is 0, or a stack of scales outside `jax.vmap`.
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


def register_with_flax(*classes: type, names: tuple[str, ...] = ()) -> None:
    """Lets `flax.serialization` save and restore loss scales, now or when it is imported.

    Args:
        *classes: classes of loss scales.
        names: their leaves.
    """

    def register(serialization: Any) -> None:
        from jmpx._scales.state_dicts import register_states  # here, because few programs need it

        register_states(serialization, classes, names)

    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        register(serialization)
    elif not any(isinstance(each, _Finder) and each.key == classes for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(classes, register))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `flax.serialization` once, as the next finders do, and has it registered with.

    Args:
        key: tells apart what is to be registered.
        register: is called with the module as soon as it is imported.
    """

    def __init__(self, key: object, register: Callable[[Any], None]) -> None:
        self.key, self.register = key, register

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Returns the spec of the module; None of any other, and when it was found before."""
        if name != "flax.serialization" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self.register(module)

            loader.exec_module = exec_module
        return spec
