"""What loss scales have in common: how they scale, and how they are written."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpx._base.casts import at_least_float32
from jmpx._base.leaves import is_floating, is_inexact_array
from jmpx._base.trees import Flag
from jmpx._scales.numbers import format_number

T = TypeVar("T")


class Scaling:
    """A loss scale. `scale` multiplies by its factor, `unscale` divides by it."""

    _kind: ClassVar[str]

    @property
    def _effective_scale(self) -> jax.Array | np.ndarray | np.float32:
        """The factor within its bounds, as a float32 of shape (), of JAX or of NumPy."""
        raise NotImplementedError

    def _numbers(self) -> dict[str, int | float]:
        """The numbers by their keys in strings, without defaults other than that of `init`."""
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
        """Returns this loss scale, which never changes, unless a subclass says more."""
        del grads_finite
        return self

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

        The arguments, the result and the errors are those of `scale`.
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
