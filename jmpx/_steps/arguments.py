"""What a gradient function is given: parameters to differentiate, and model state."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmpx._base.casts import cast_like
from jmpx._base.dtypes import DTypeLike, as_dtype, check_enabled, dtype_name
from jmpx._base.leaves import (
    PyTree,
    can_replace,
    is_array,
    is_floating,
    is_inexact_array,
    is_int,
    is_traceable,
    spell,
)
from jmpx._base.messages import describe, did_you_mean
from jmpx._base.moved import remedy
from jmpx._scales.kinds import in_place_of_loss_scale, is_loss_scale


def check_arguments(func: object, scaling: object) -> None:
    """Refuses anything but a function and a loss scale.

    Raises:
        TypeError: if one of them is something else.
    """
    if not callable(func):
        raise TypeError(
            f"Expected a function to differentiate, got {func!r}: pass the callable itself."
        )
    if not is_loss_scale(scaling):
        example = "pass for example jmpx.NoOpLossScale() or jmpx.DynamicLossScale()"
        raise TypeError(
            f"Expected a loss scale as the second argument, got {describe(scaling)}: "
            f"{in_place_of_loss_scale(scaling, example)}."
        )


_OPTIONS = ["policy", "grad_dtype", "uncast", "state_argnum", "batch", "over"]


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Refuses keyword arguments that no gradient function takes.

    Raises:
        TypeError: if there are any.
    """
    for name in options:
        accepted = f"Expected {', '.join(_OPTIONS)} or has_aux as an option of a gradient function"
        if found := remedy("a gradient function", name):
            raise TypeError(f"{accepted}, got {name}: {found}.")
        raise TypeError(f"{accepted}, got {name!r}{did_you_mean(name, _OPTIONS)}")


def partition(args: Sequence[PyTree]) -> tuple[list[jax.Array], Callable[..., PyTree]]:
    """Takes the differentiable arrays out of the first argument.

    Returns:
        The arrays, and a function `merge(arrays, others)` that puts such a list back. By default
        the other leaves are those of the argument; with `others=None` they are None.
    """
    if not args:
        raise TypeError(
            "Expected the parameters to differentiate as the first positional argument, got none: "
            "pass them by position."
        )
    leaves, treedef = jax.tree.flatten(args[0])
    indices = [index for index, leaf in enumerate(leaves) if is_inexact_array(leaf)]

    def merge(arrays: Sequence[Any], others: Sequence[Any] | None = leaves) -> PyTree:
        merged: list[Any] = [None] * len(leaves) if others is None else list(others)
        for index, array in zip(indices, arrays, strict=True):
            merged[index] = array
        return treedef.unflatten(merged)

    # JAX arrays have the dtype of their gradient. NumPy's float64 becomes float32 without x64.
    return [jnp.asarray(leaves[index]) for index in indices], merge


def paths_of(tree: PyTree) -> list[str]:
    """Returns the paths of the differentiable arrays of a pytree, for error messages."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        jax.tree_util.keystr(path) or "array" for path, leaf in leaves if is_inexact_array(leaf)
    ]


@dataclasses.dataclass(frozen=True)
class GradDtype:
    """The dtype in which gradients come back.

    Args:
        dtype: that of floating gradients; None means the dtype of each parameter.
    """

    dtype: DTypeLike | None = None

    @classmethod
    def of(cls, dtype: DTypeLike | None) -> "GradDtype":
        """Checks the dtype.

        Raises:
            TypeError: if it is no dtype.
            ValueError: if it is not a floating dtype, or has 8 bits.
        """
        if dtype is None:
            return cls()
        dtype = as_dtype(dtype, " in grad_dtype")
        if jnp.dtype(dtype).itemsize < 2:
            raise ValueError(
                f"Cannot return gradients in {dtype_name(dtype)}, as grad_dtype says, where most "
                "are 0 or NaN: write grad_dtype=jnp.float32 or grad_dtype=jnp.bfloat16."
            )
        return cls(dtype)

    def check(self) -> None:
        """Refuses float64 while JAX's 64-bit types are disabled.

        Raises:
            ValueError: if this is float64 and they are disabled.
        """
        if self.dtype is not None:
            check_enabled(self.dtype)

    def widen(self, params: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns parameters in a dtype in which their gradients are not rounded below this one.

        A gradient has the dtype of what is differentiated, so that this goes before the cast to the
        compute dtype. It rounds nothing.
        """
        if self.dtype is None:
            return list(params)
        dtype = jnp.dtype(self.dtype)
        wide = max(dtype, jnp.dtype(jnp.float32), key=lambda each: each.itemsize)

        def is_narrow(param: jax.Array) -> bool:
            return param.dtype != dtype and param.dtype.itemsize <= dtype.itemsize

        return [p.astype(wide) if is_floating(p) and is_narrow(p) else p for p in params]

    def cast(self, grads: Sequence[jax.Array], params: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns gradients in this dtype; complex ones, and all for None, in their parameters'."""
        dtypes = [self.dtype if is_floating(param) else None for param in params]
        triples = zip(grads, params, dtypes, strict=True)
        return [
            grad.astype(param.dtype if dtype is None else dtype) for grad, param, dtype in triples
        ]


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The argument that holds model state, such as running statistics, and comes back in aux.

    Args:
        argnum: its position; None if there is none.
    """

    argnum: int | None = None

    @classmethod
    def of(cls, argnum: object, has_aux: bool) -> "ModelState":
        """Checks the position.

        Raises:
            TypeError: if it is no int.
            ValueError: if it is that of the parameters, or if nothing comes back.
        """
        if argnum is None:
            return cls()
        if not is_int(argnum):
            raise TypeError(
                f"Expected state_argnum to be an int, got {argnum!r}: give the position of the "
                "argument that holds the model state."
            )
        if argnum < 1:
            raise ValueError(
                f"Expected state_argnum to be at least 1, got {argnum}: argument 0 holds the "
                "parameters, and positions count from there."
            )
        if not has_aux:
            raise ValueError(
                f"Cannot hand on the model state of state_argnum={argnum} without aux: return "
                "(loss, state) or (loss, (state, other)), and say has_aux=True."
            )
        return cls(int(argnum))

    def get(self, args: Sequence[PyTree]) -> PyTree:
        """Returns the state among the arguments of a call, as JAX's arrays; None if there is none.

        It is a copy: a `State` of Equinox cannot be read after the function has set it.
        """
        if self.argnum is None:
            return None
        if self.argnum >= len(args):
            raise ValueError(
                f"Cannot find the model state at argument {self.argnum}, as state_argnum says, in "
                f"a call with {len(args)} positional arguments: pass it by position."
            )
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if is_traceable(leaf) else leaf, args[self.argnum]
        )

    def put(self, args: Sequence[PyTree], state: PyTree) -> tuple[PyTree, ...]:
        """Returns the arguments with another state among them."""
        return tuple(state if index == self.argnum else arg for index, arg in enumerate(args))

    def split(self, aux: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
        """Splits aux into the new state, in the dtypes of the old one, and the rest.

        Raises:
            TypeError: if aux neither is a state nor a tuple that starts with one.
        """
        if self.argnum is None:
            return None, aux
        if _alike(aux, old):
            return jax.tree.map(cast_like, aux, old), _ALL
        if type(aux) is tuple and aux and _alike(aux[0], old):
            return jax.tree.map(cast_like, aux[0], old), aux[1:]
        raise TypeError(
            f"Expected aux to be the new model state, or a tuple that starts with it, in the "
            f"structure and the shapes of argument {self.argnum}, as state_argnum says, got "
            f"{jax.tree.structure(aux)} for {jax.tree.structure(old)}: return (loss, state) or "
            "(loss, (state, other))."
        )

    def check(self, new: PyTree, old: PyTree) -> None:
        """Refuses a new state that cannot be handed on to the next micro-batch.

        Raises:
            ValueError: if anything in it has changed but the values of arrays.
        """
        pairs = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
        for (path, before), after in pairs:
            if not can_replace(after, before):
                raise ValueError(
                    f"Cannot hand the model state of argument {self.argnum} from one micro-batch "
                    f"to the next, because the function changes its "
                    f"{jax.tree_util.keystr(path) or 'leaf'} from {spell(before)} to "
                    f"{spell(after)}: keep an array there, in one dtype."
                )

    def join(self, state: PyTree, rest: PyTree) -> PyTree:
        """Returns the aux that `split` took apart."""
        if self.argnum is None:
            return rest
        return state if rest is _ALL else (state, *rest)


_ALL = "state"  # the rest of an aux that is the state and nothing else


def _alike(new: PyTree, old: PyTree) -> bool:
    """Whether two pytrees have one structure, and their arrays one shape."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return False
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return all(jnp.shape(a) == jnp.shape(b) for a, b in pairs if is_array(a) and is_array(b))
