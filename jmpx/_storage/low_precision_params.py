"""Optimizers whose parameters or states are stored in 16 bits."""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.dtypes import DTypeLike, as_dtype, check_enabled, dtype_name
from jmpx._base.messages import describe, user_stacklevel
from jmpx._base.stateful import is_object
from jmpx._base.trees import (
    PyTree,
    at_least_float32,
    cast_tree,
    is_array,
    is_floating,
    is_none,
    serialized,
    spell,
)
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import depends
from jmpx._storage.rounding import merge_master, split_master, stochastic_round

if TYPE_CHECKING:
    import optax


def is_optimizer(optimizer: object) -> bool:
    """Whether `optimizer` has the two functions of an optax gradient transformation."""
    return hasattr(optimizer, "init") and hasattr(optimizer, "update")


def name_of(value: object) -> str:
    """Returns the text of a value in errors; for an object of NNX, whose repr is long, its type."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__name__}" if is_object(value) else describe(value)


def in_place_of_optimizer(value: object, otherwise: str) -> str:
    """Returns the remedy for a wrong optimizer, which for an `nnx.Optimizer` is its `tx`."""
    if not (is_object(value) and hasattr(value, "tx")):
        return otherwise
    return "wrap the optax optimizer that it is made of, and make the nnx.Optimizer of the result"


def with_extra_args(optimizer: PyTree) -> "optax.GradientTransformationExtraArgs":
    """Returns an optax optimizer, or an `optax.MultiSteps`, as one that takes extra arguments."""
    import optax

    if not is_optimizer(optimizer):
        raise TypeError(
            f"Expected an optax gradient transformation, got {name_of(optimizer)}: "
            f"{in_place_of_optimizer(optimizer, 'pass for example optax.adam(1e-3)')}."
        )
    if isinstance(optimizer, optax.MultiSteps):  # It takes extra arguments without declaring it.
        multi_steps: PyTree = optimizer
        optimizer = optax.GradientTransformationExtraArgs(multi_steps.init, multi_steps.update)
    return optax.with_extra_args_support(optimizer)


def widen(tree: PyTree) -> PyTree:
    """Returns a tree with its leaves of 8 and 16 bits in float32, which is exact."""
    return jax.tree.map(lambda x: at_least_float32(x) if is_floating(x) else x, tree)


def apply_update(update: PyTree, leaf: PyTree) -> PyTree:
    """Returns a parameter plus its update, in the dtype of the parameter."""
    if update is None:
        return leaf
    leaf = jnp.asarray(leaf)
    with jax.numpy_dtype_promotion("standard"):  # The update of a bfloat16 leaf may be float32.
        return jnp.asarray(leaf + update, leaf.dtype)


def step_key(seed: int, stream: int, count: jax.Array) -> jax.Array:
    """Returns the key of a step; each `stream` has keys of its own."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), count)


# Optimizers of 16-bit parameters, which round by chance or keep low bits, so that none stalls.


Rounding: TypeAlias = Literal["stochastic", "split"]
_STREAM, _STATE_STREAM = 0, 1  # of the keys for parameters, and for optimizer states


@serialized
class LowPrecisionParamsState(NamedTuple):
    """The state of `low_precision_params`.

    Attributes:
        inner_state: the state of the wrapped optimizer.
        low: with "split", the low halves of the parameters, in uint16:
            `jmpx.optim.merge_master(params, low)` are the float32 masters. None with "stochastic".
        count: with "stochastic", the number of updates, from which the key of each step is made:
            an int32 array of shape (). None with "split".
    """

    __module__ = "jmpx.types"

    inner_state: PyTree
    low: PyTree
    count: jax.Array | None


def low_precision_params(
    optimizer: "optax.GradientTransformation | optax.MultiSteps",
    rounding: Rounding,
    *,
    seed: int = 0,
) -> "optax.GradientTransformationExtraArgs":
    """Wraps an optax optimizer so that it trains 16-bit parameters, which plain rounding stalls.

    Near 1, an update below 0.2 % rounds to nothing in bfloat16. Here the optimizer computes in
    float32, and the new parameters are rounded in one of two ways:

    - "stochastic": up or down by chance, right on average, as by `jmpx.optim.stochastic_round`.
      Only the parameters are stored: 2 bytes each.
    - "split": the state keeps the 16 bits that bfloat16 lacks, as `jmpx.optim.split_master` does,
      so that float32 masters are trained, at 4 bytes a parameter.

    Other transformations belong inside, and `jmpx.skip_nonfinite` around it.

    Args:
        optimizer: an optax gradient transformation, or an `optax.MultiSteps`. It gets gradients and
            parameters in float32, so its state is in float32; `jmpx.optim.with_state_dtype` inside
            keeps it in bfloat16.
        rounding: "stochastic" or "split".
        seed: of the stochastic rounding. Devices round replicated parameters alike.

    Returns:
        An optax gradient transformation, whose state is a `LowPrecisionParamsState`. `init` takes
        the float32 parameters ("stochastic" takes 16-bit ones, too), `update` the 16-bit ones:
        bfloat16, or, with "stochastic", float16. `update` returns float32 differences for
        `optax.apply_updates`, which may miss a tiny new value by 2**-24 of the old one;
        `jmpx.optimizer_update` takes the new parameters as they are. Parameters that stayed float32
        beside 16-bit ones are updated as usual.

    Raises:
        TypeError: if `optimizer`, or the state that `update` gets, is of another kind.
        ValueError: if `rounding` or the dtype of the parameters is another one.

    Warns:
        UserWarning: when `update` is given gradients of 16 bits.

    Example:
        >>> import jax.numpy as jnp, optax, jmpx
        >>> params = {"w": jnp.ones(2)}
        >>> optimizer = jmpx.optim.low_precision_params(optax.sgd(2**-10), "split")
        >>> state = optimizer.init(params)
        >>> params, _ = jmpx.optim.split_master(params)
        >>> grads = {"w": jnp.full(2, -1.0)}
        >>> for _ in range(8):
        ...     params, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
        >>> params["w"]
        Array([1.00781, 1.00781], dtype=bfloat16)
        >>> float(jmpx.optim.merge_master(params, state.low)["w"][0]) == 1 + 8 * 2**-10
        True
    """
    import optax

    inner = with_extra_args(optimizer)
    if rounding not in get_args(Rounding):
        raise ValueError(
            f'Expected rounding to be "stochastic" or "split", got {describe(rounding)}: '
            '"stochastic" needs no more memory, and "split" trains as float32 does.'
        )
    # Any, because optax's type of states excludes None.
    low_precision: PyTree = LowPrecisionParams(inner, rounding, seed)
    return optax.GradientTransformationExtraArgs(low_precision.init, low_precision.update)


@dataclasses.dataclass(frozen=True, eq=False)
class LowPrecisionParams:
    """The functions of `low_precision_params`, and its arguments."""

    inner: "optax.GradientTransformationExtraArgs"
    rounding: Rounding
    seed: int

    def init(self, params: PyTree) -> LowPrecisionParamsState:
        """Returns the state for float32 parameters."""
        if self.rounding == "split":
            _, low = split_master(params)
            return LowPrecisionParamsState(self.inner.init(params), low, None)
        count = jnp.zeros((), jnp.int32)
        return LowPrecisionParamsState(self.inner.init(widen(params)), None, count)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, LowPrecisionParamsState]:
        """Returns the float32 differences to the new parameters, and the new state."""
        wide_updates, new, state = self._step(updates, state, params, extra_args)
        differences = jax.tree.map(_difference, wide_updates, new, params, is_leaf=is_none)
        return differences, state

    def step(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: PyTree
    ) -> tuple[PyTree, LowPrecisionParamsState]:
        """Returns the new parameters themselves, and the new state."""
        return self._step(grads, state, params, extra_args)[1:]

    def _step(
        self, grads: PyTree, state: PyTree, params: PyTree, extra_args: dict[str, PyTree]
    ) -> tuple[PyTree, PyTree, LowPrecisionParamsState]:
        """Returns the inner optimizer's updates, the new parameters and the new state."""
        is_split = self.rounding == "split"
        if not isinstance(state, LowPrecisionParamsState) or (state.count is None) != is_split:
            raise TypeError(
                "Expected a state of jmpx.optim.low_precision_params with "
                f'rounding="{self.rounding}", got another: make one by init, of float32 parameters.'
            )
        _check_params(params)
        _warn_of_narrow(grads)
        masters = _merged(params, state.low) if is_split else widen(params)
        updates, inner_state = self.inner.update(
            widen(grads), state.inner_state, masters, **extra_args
        )
        masters = jax.tree.map(apply_update, updates, masters, is_leaf=is_none)
        if state.count is None:
            new, low = _split(masters, params, state.low)
            return updates, new, LowPrecisionParamsState(inner_state, low, None)
        new = _rounded(masters, params, step_key(self.seed, _STREAM, state.count))
        return updates, new, LowPrecisionParamsState(inner_state, None, state.count + 1)


def _is_narrow(leaf: object) -> bool:
    return is_array(leaf) and is_floating(leaf) and leaf.dtype.itemsize < 4


def _warn_of_narrow(grads: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if _is_narrow(leaf):
            warnings.warn(
                "Got gradients of 16 bits for jmpx.optim.low_precision_params, such as "
                f"{spell(leaf)} at grads{jax.tree_util.keystr(path)}, which were rounded to the "
                "nearest: keep them in float32 up to the optimizer, by grad_dtype=jnp.float32 of "
                "jmpx.grad.",
                stacklevel=user_stacklevel("jax", "optax", "flax", "equinox"),
            )
            return


def _check_params(params: PyTree) -> None:
    floating = [leaf for leaf in jax.tree.leaves(params) if is_array(leaf) and is_floating(leaf)]
    if params is None or (floating and not any(map(_is_narrow, floating))):
        got = spell(floating[0]) if floating else "none"
        raise ValueError(
            f"Expected parameters of 16 bits for jmpx.optim.low_precision_params, got {got}: pass "
            "them to update, cast after init, as by jmpx.optim.split_master(params)[0], and apply "
            "updates by jmpx.optimizer_update or optax.apply_updates, which keep their dtype."
        )


def _merged(params: PyTree, low: PyTree) -> PyTree:
    """Returns the float32 masters; parameters in float32 are their own masters."""
    kept = lambda leaf, low: low if _is_narrow(leaf) else None  # noqa: E731
    return merge_master(params, jax.tree.map(kept, params, low, is_leaf=is_none))


def _split(masters: PyTree, params: PyTree, lows: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the new parameters and their low halves; float32 parameters stay as they are."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_none)
    together = zip(leaves, *map(structure.flatten_up_to, (masters, lows)), strict=True)
    halves = [split_master(one) if _is_narrow(leaf) else (one, low) for leaf, one, low in together]
    high, low = zip(*halves, strict=True) if halves else ((), ())
    return structure.unflatten(high), structure.unflatten(low)


def _rounded(masters: PyTree, params: PyTree, key: jax.Array) -> PyTree:
    """Returns the new parameters, each rounded by chance with the key of its place."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_none)
    pairs = enumerate(zip(leaves, structure.flatten_up_to(masters), strict=True))
    return structure.unflatten(
        stochastic_round(one, leaf.dtype, jax.random.fold_in(key, place))
        if _is_narrow(leaf)
        else one
        for place, (leaf, one) in pairs
    )


def _difference(update: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Returns the update by which `optax.apply_updates` makes an old parameter the new one.

    For a 16-bit parameter it is the float32 difference: -0.0 if equal, which keeps a -0.0 as it is.
    """
    if update is None or not _is_narrow(old):
        return update
    new, old = widen((new, old))
    return jnp.where(new == old, jnp.float32(-0.0), new - old)


# Optimizer state in another dtype than the parameters.


@serialized
class StateDtypeState(NamedTuple):
    """The state of `with_state_dtype`.

    Attributes:
        inner_state: the state of the wrapped optimizer, its arrays in the requested dtype.
        count: the number of updates: an int32 array of shape ().
    """

    __module__ = "jmpx.types"

    inner_state: PyTree
    count: jax.Array


def with_state_dtype(
    optimizer: "optax.GradientTransformation | optax.MultiSteps", dtype: DTypeLike, *, seed: int = 0
) -> "optax.GradientTransformationExtraArgs":
    """Keeps the state of an optimizer in a dtype of its own: float32, or bfloat16 to save memory.

    Optax makes state in the dtype of the parameters, so the moments of bfloat16 parameters stall.
    With this, the optimizer gets parameters, gradients and state in float32, and its updates are
    float32; its state is in `dtype` only between steps. bfloat16 is rounded by chance, as by
    `jmpx.optim.stochastic_round`, so that moments are right on average; the page on storage has
    their errors. For the first moment alone, use `optax.adam(mu_dtype=...)`.

    State that `init` computes from the parameters' numbers stays float32, such as the copies from
    which `optax.contrib.mechanize`, `prodigy` and `schedule_free` measure how far the parameters
    went: in 16 bits, rounding would exceed the distance. Zeros in their shapes are no such state.

    Args:
        optimizer: an optax gradient transformation, or an `optax.MultiSteps`.
        dtype: float32, bfloat16, or float64 where JAX's 64-bit types are enabled.
        seed: of the rounding.

    Returns:
        An optax gradient transformation. Its state is a `StateDtypeState`, whose floating arrays
        are in `dtype`, except copies of parameters and arrays of shape (), such as
        hyperparameters. Other arguments of `update` pass through.

    Raises:
        TypeError: if `optimizer` is not an optax gradient transformation.
        ValueError: if `dtype` is none of those above.

    Example:
        >>> import jax.numpy as jnp, optax, jmpx
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> optimizer = jmpx.optim.with_state_dtype(optax.sgd(0.1, momentum=0.9), jnp.float32)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(params, state, params)
        >>> updates["w"].dtype.name, state.inner_state[0].trace["w"].dtype.name
        ('float32', 'float32')
    """
    import optax

    inner, stored = with_extra_args(optimizer), as_dtype(dtype, " of optimizer state")
    check_enabled(stored)
    name = dtype_name(stored)
    if name not in ("bfloat16", "float32", "float64"):
        raise ValueError(
            f"Cannot keep optimizer state in {name}, where squares of small gradients are 0: give "
            "jnp.bfloat16 or jnp.float32."
        )

    def init(params: PyTree) -> PyTree:
        wide = widen(params)
        traced = core.trace(inner.init, (wide,), {})
        is_copy = traced.rebuild(depends(traced.jaxpr, [True] * len(traced.arrays)))
        state = jax.tree.map(
            lambda leaf, flag: _stored(leaf, jnp.float32 if flag is True else stored),
            inner.init(wide),
            is_copy,
        )
        return StateDtypeState(state, jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        new_updates, new = inner.update(
            widen(updates), widen(state.inner_state), widen(params), **extra_args
        )
        key = step_key(seed, _STATE_STREAM, state.count)
        leaves, structure = jax.tree.flatten(new)
        before = jax.tree.leaves(state.inner_state)
        dtypes = [leaf.dtype if is_array(leaf) else stored for leaf in before]
        if jax.tree.structure(state.inner_state) != structure:
            dtypes = [stored] * len(leaves)
        leaves = [
            _stored(leaf, dtype, jax.random.fold_in(key, place))
            for place, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True))
        ]
        return new_updates, StateDtypeState(structure.unflatten(leaves), state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _stored(leaf: PyTree, dtype: DTypeLike, key: jax.Array | None = None) -> PyTree:
    """Returns a leaf of the state in a dtype; with a key, narrow ones are rounded by chance.

    Leaves of shape (), such as hyperparameters, stay as they are: they take no memory.
    """
    if not (is_array(leaf) and is_floating(leaf) and leaf.ndim > 0):
        return leaf
    if key is None or np.dtype(dtype).itemsize >= 4:
        return cast_tree(leaf, dtype)
    return stochastic_round(cast_tree(leaf, jnp.float32), dtype, key)
