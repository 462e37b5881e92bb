"""The ranges of a program: frozen data, which prints and draws itself, and gives advice."""

import dataclasses
import json
import os

from jmpx._base.dtypes import DTypeLike
from jmpx._base.messages import describe, did_you_mean
from jmpx._inspect.ranges.advice import policy_text, scale_for, scale_or_1
from jmpx._inspect.ranges.data import Histogram, Range, Shares, check_scope, merged
from jmpx._inspect.ranges.plot import plot_histograms
from jmpx._inspect.ranges.text import Found, found_text

_VERSION = 1  # of `to_dict`: it changes when the meaning of a key does
_KINDS = ("activations", "gradients")


@dataclasses.dataclass(frozen=True)
class Ranges:
    """What `jmpx.inspect.ranges` found: the magnitudes of activations and gradients, by scope.

    `print(ranges)` shows them, and `jmpx.inspect.ranges` says which numbers count. Numbers of
    float64 that float32 cannot hold count as infinite or zero.

    Attributes:
        title: the name of the function.
        activations: the numbers of the forward pass, by scope, in the order of the program.
        gradients: the numbers of the backward pass, by scope.
        masks: constants beyond float16 that `jnp.where` puts into arrays, such as 1e9 for -1e9.
            Numbers of these magnitudes are counted apart: they do not overflow where they matter,
            as softmax makes the same of an infinity, and autocast keeps them finite.
        is_step: whether the function is a step that contains its gradient; False for a loss.
    """

    __module__ = "jmpx.inspect"

    title: str
    activations: tuple[Range, ...]
    gradients: tuple[Range, ...]
    masks: tuple[float, ...] = ()
    is_step: bool = False

    def histogram(self, kind: str = "gradients", scope: str | None = None) -> Histogram:
        """Returns how many numbers have which magnitude.

        Args:
            kind: `gradients` or `activations`.
            scope: a scope, with those inside of it, or a selector such as `*/mlp`; None for all.

        Raises:
            ValueError: if there is no such kind or scope.
        """
        if kind not in _KINDS:
            raise ValueError(
                f"Expected kind= to be 'activations' or 'gradients', got {describe(kind)}"
                f"{did_you_mean(str(kind), list(_KINDS))}"
            )
        check_scope((*self.activations, *self.gradients), scope)
        found = self.activations if kind == "activations" else self.gradients
        return merged(each.histogram for each in found if scope is None or each.is_in(scope))

    def shares(
        self,
        dtype: DTypeLike,
        scale: float = 1,
        *,
        kind: str = "gradients",
        scope: str | None = None,
    ) -> Shares:
        """Returns which shares of the numbers that are not zero a format does not hold.

        The shares are exact: each number is multiplied by the scale and rounded once.

        Args:
            dtype: `float16`, `bfloat16`, `e4m3` (`float8_e4m3fn`) or `e5m2` (`float8_e5m2`).
            scale: what the numbers are multiplied by, a power of two, such as a loss scale.
            kind: `gradients` or `activations`.
            scope: a scope or a selector, see `histogram`; None for all.

        Raises:
            ValueError: if an argument is none of those described here.
        """
        return self.histogram(kind, scope).shares(dtype, scale)

    def loss_scale(self, head_room: int = 2, dtype: DTypeLike = "float16") -> float:
        """Returns a loss scale for the gradients: a static one, or where a dynamic one begins.

        It is the largest power of two with which the largest gradient, times `2**head_room`, does
        not overflow. If the function scales its loss itself, it is a factor to that scale. A loss
        that is itself computed in float16, as under `policy="c=f16"` of the gradient functions,
        takes no more than 2**15, because the scale passes through its dtype.

        Args:
            head_room: by how many powers of two gradients may grow.
            dtype: the format that holds the gradients. For bfloat16 it is 1.

        Raises:
            ValueError: if `head_room` is not a whole number, the format is unknown, or there are no
                gradients.

        Example:
            >>> import jax.numpy as jnp
            >>> import jmpx
            >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
            >>> found = jmpx.inspect.ranges(loss_fn)(jnp.ones(4), jnp.eye(4))
            >>> str(jmpx.DynamicLossScale(found.loss_scale()))
            'dynamic,init=16384'
        """
        return scale_for(self.gradients, head_room, dtype)

    def rules(self, dtype: DTypeLike = "float16", scale: float | None = None) -> str:
        """Returns a policy map string that keeps in float32 what would overflow.

        A scope is kept if an operation in it computes a number beyond the dtype, or reads one from
        elsewhere. Selectors are the paths of modules, else named scopes, which only autocast
        follows, and outside of both operations such as `op.mul?`, a rule for the operation
        everywhere: a `jax.named_scope` around it is more precise.

        Args:
            dtype: `float16` or `bfloat16`, in which all the rest computes.
            scale: the loss scale, by which gradients are multiplied, a power of two; None for the
                one that `loss_scale` recommends for the dtype.

        Returns:
            A string such as `"compute=float16,output=float32; */head: compute=float32"`; without a
            rule if nothing overflows.

        Raises:
            ValueError: if the dtype is another one, or the scale is not a power of two.
        """
        factor = scale_or_1(self.gradients, dtype) if scale is None else scale
        return policy_text(self.activations, self.gradients, dtype, factor)

    def plot(
        self, path: str | os.PathLike[str], scope: str | None = None, scale: float = 1
    ) -> None:
        """Draws how many numbers have which exponent, as figure 3 of arXiv 1710.03740 does.

        The range of float16 is shaded. It needs matplotlib.

        Args:
            path: the file to write, which ends with `.png`, `.svg` or `.pdf`.
            scope: a scope or a selector, see `histogram`; None for all.
            scale: a loss scale, a power of two: the picture shows where it moves float16's range.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if the file has another ending, or there is no such scope.
        """
        where = "" if scope is None else f" in {scope}"
        histograms = {kind: self.histogram(kind, scope) for kind in _KINDS}
        plot_histograms(f"{self.title}{where}: magnitudes in float32", histograms, path, scale)

    def to_text(self, *, width: int = 100, all: bool = False) -> str:
        """Returns the ranges as text: formats, scopes, a loss scale and rules for float16.

        Args:
            width: how many columns the text may have, 72 or more. Paths and rules are never broken.
            all: whether to show every scope.

        Raises:
            ValueError: if `width` is not a whole number, or less than 72.
        """
        title = self.title + (" and its gradient" if self.gradients and not self.is_step else "")
        return found_text(Found(title, self.activations, self.gradients, self.masks), width, all)

    def __str__(self) -> str:
        return self.to_text()

    def to_dict(self) -> dict[str, object]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them."""
        return {
            "version": _VERSION,
            "title": self.title,
            "is_step": self.is_step,
            "masks": list(self.masks),
            **{kind: list(map(_range_dict, getattr(self, kind))) for kind in _KINDS},
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict()` as JSON.

        Args:
            indent: as in `json.dumps`; None puts all into one line.
        """
        return json.dumps(self.to_dict(), indent=indent)


def _range_dict(each: Range) -> dict[str, object]:
    names = ("scope", "selector", "largest", "smallest", "entering")
    return {
        **{name: getattr(each, name) for name in names},
        "operations": [operation._asdict() for operation in each.operations],
        "exponents": {str(e): count for e, count in each.histogram.exponents.items()},
        **{n: getattr(each.histogram, n) for n in ("zeros", "infinite", "nan", "masked")},
    }
