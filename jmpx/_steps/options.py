"""Gradient functions: their model state, their checked arguments, and their results."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jmpx._adapters.applying import Application, UncastArguments, UncastLike
from jmpx._base.axes import AxisName, varying_axes
from jmpx._base.contexts import may_be_rounded
from jmpx._base.dtypes import DTypeLike, dtype_name
from jmpx._base.messages import check_runs_at_once, describe, warn
from jmpx._base.trees import (
    PyTree,
    can_replace,
    cast_like,
    holds_on_all,
    is_array,
    is_floating,
    is_none,
    is_traceable,
    select_tree,
    serialized,
    spell,
)
from jmpx._devices.shards import Over
from jmpx._policies.maps import PolicyMap
from jmpx._scales.kinds import LossScale, NoOpLossScale
from jmpx._scales.strings import MixedPrecisionLike
from jmpx._steps.batches import Batch, as_grad_dtype, numbers_of, paths_of, split_batch
from jmpx._steps.checks import check_loss_scale, check_whole

# Model state: an argument whose new value a function returns in its aux.


_ALL = "state"  # the rest of an aux that is the state alone


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The argument that holds model state, which comes back in aux, by its position."""

    argnum: int | None = None

    @classmethod
    def of(cls, argnum: object, has_aux: bool) -> "ModelState":
        """Checks the position that the user gave."""
        if argnum is None:
            return cls()
        argnum = check_whole(argnum, "state_argnum", "give the position of the model state")
        if not has_aux:
            raise ValueError(
                f"Cannot return the model state of state_argnum={argnum} without aux: return "
                "(loss, state) or (loss, (state, other)), and say has_aux=True."
            )
        return cls(argnum)

    def get(self, args: Sequence[PyTree]) -> PyTree:
        """Returns the state among the arguments of a call, as JAX's arrays, or None."""
        if self.argnum is None:
            return None
        if self.argnum >= len(args):
            raise ValueError(
                f"Cannot find the model state at argument {self.argnum}, as state_argnum says, in "
                f"a call with {len(args)} positional arguments: pass it by position."
            )
        # A copy, because a `State` of Equinox cannot be read after the function has set it.
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if is_traceable(leaf) else leaf, args[self.argnum]
        )

    def put(self, args: Sequence[PyTree], state: PyTree) -> tuple[PyTree, ...]:
        """Returns the arguments with another state among them."""
        return tuple(state if index == self.argnum else arg for index, arg in enumerate(args))

    def split(self, aux: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
        """Splits aux into the new state, in the dtypes of the old one, and the rest."""
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

    def join(self, state: PyTree, rest: PyTree) -> PyTree:
        """Returns the aux that `split` took apart."""
        if self.argnum is None:
            return rest
        return state if rest is _ALL else (state, *rest)

    def check(self, new: PyTree, old: PyTree) -> None:
        """Refuses a new state in which more has changed than the values of arrays."""
        pairs = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
        for (path, before), after in pairs:
            if not can_replace(after, before):
                raise ValueError(
                    f"Cannot hand the model state of argument {self.argnum} from one micro-batch "
                    f"to the next, because the function changes its "
                    f"{jax.tree_util.keystr(path) or 'leaf'} from {spell(before)} to "
                    f"{spell(after)}: keep an array there, in one dtype."
                )


def _alike(new: PyTree, old: PyTree) -> bool:
    """Whether two pytrees have one structure, and their arrays one shape."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return False
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return all(jnp.shape(a) == jnp.shape(b) for a, b in pairs if is_array(a) and is_array(b))


def kept_if_finite(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns new model state, but the old one where the gradients are not finite.

    A leaf stays new where there is no choice: it is no array, its shape or dtype has changed, or it
    has become the same on all devices.
    """

    def keep(new: PyTree, old: PyTree) -> PyTree:
        if not (is_traceable(new) and is_traceable(old) and can_replace(new, old)):
            return new
        if not varying_axes(old) <= varying_axes(new):
            return new
        # Devices with their own flags would select different values of a shared array.
        axes = tuple(sorted(varying_axes(finite) - varying_axes(new), key=str))
        place = jax.typeof(new).sharding
        if jax.typeof(old).sharding.spec != place.spec:  # on an Explicit mesh
            old = jax.sharding.reshard(old, place)
        return select_tree(holds_on_all(finite, axes) if axes else finite, new, old)

    return jax.tree.map(keep, new, old, is_leaf=is_none)


# The arguments of `value_and_grad` and `grad`, checked.


_OVERWRITTEN = "_overwrite_with_gradient"  # a collection of Flax

ValueT = TypeVar("ValueT")
AuxT = TypeVar("AuxT")
ScalingT = TypeVar("ScalingT", bound=LossScale)


class Options:
    """The arguments of a gradient function, checked."""

    def __init__(
        self,
        func: Callable[..., PyTree],
        scaling: LossScale,
        has_aux: bool,
        policy: MixedPrecisionLike | None,
        grad_dtype: DTypeLike | None,
        uncast: UncastLike,
        state_argnum: int | None,
        microbatches: int | None,
        batch: Batch | None,
        over: Over | AxisName | None,
    ) -> None:
        if not callable(func):
            raise TypeError(
                f"Expected a function to differentiate as the first argument, got {describe(func)}:"
                " write the function, then the loss scale."
            )
        check_runs_at_once(func)
        check_loss_scale(scaling)
        self.func, self.scaling, self.has_aux = func, scaling, has_aux
        self.over = over if over is None or isinstance(over, Over) else Over(over)
        self.batch = _batch(batch, microbatches)
        numbers_of(self.batch.argnums, state_argnum)
        self.split = functools.partial(split_batch, self.batch, state_argnum)
        kept = UncastArguments.of(func, uncast, state_argnum)
        self.applying = Application.of(policy, func, kept, "The gradient function")
        self.policy_map = self.applying.policy_map
        _check_reduce(self.policy_map, self.over)
        self.grad_dtype = as_grad_dtype(grad_dtype)
        summed_in = self.applying.reduce_dtype or self.grad_dtype
        self.widens = summed_in is not None and jnp.dtype(summed_in).itemsize >= 4
        self.model_state = ModelState.of(state_argnum, has_aux)

    def warn_of_no_scale(self) -> None:
        """Warns if gradients are computed in float16 without a loss scale."""
        if type(self.scaling) is not NoOpLossScale:
            return
        default, rules = self.policy_map.default, self.policy_map.rules
        rules = () if self.policy_map.way == "arguments" else rules
        if jnp.float16 in {default.compute_dtype, *(rule.compute for rule in rules)}:
            warn(
                "The gradient function computes in float16 without a loss scale, so that gradients "
                "below 2**-24 become 0: give it jmpx.DynamicLossScale() and carry that from step "
                "to step, compute in bfloat16, or write jmpx.StaticLossScale(1) if this is "
                "intentional."
            )

    def check_overwritten(self, model: PyTree) -> None:
        """Refuses state that Flax's float8 layers hand out as gradients where it would change."""
        is_scaled = not isinstance(self.scaling, NoOpLossScale)
        is_mean = self.batch.microbatches > 1 or self.over is not None
        if not (is_scaled or is_mean):
            return
        path = next((path for path in paths_of(model) if _OVERWRITTEN in path), None)
        if path is not None:
            raise ValueError(
                f"Cannot hand out the new state of a float8 layer of Flax at {path}, which comes "
                f"in place of a gradient, where it is {'unscaled' if is_scaled else 'averaged'} "
                "like one: give jmpx.NoOpLossScale(), and neither batch= nor over=, or leave "
                "the float8 layer out."
            )

    def check_stored(self, params: Sequence[jax.Array], model: PyTree) -> None:
        """Warns of narrow parameters, in which updates are lost, unless they are meant to be so.

        A user who gives `grad_dtype`, as for `low_precision_params`, or that dtype as `params` in
        the policy, knows of them. A function of jmpx around may have rounded them.
        """
        if self.grad_dtype is not None or may_be_rounded():
            return
        default = self.policy_map.default
        dtypes = default.param_dtype, *(rule.params for rule in self.policy_map.rules)
        wanted = [jnp.dtype(dtype) for dtype in dtypes if dtype is not None]
        found = [is_floating(p) and p.dtype.itemsize < 4 and p.dtype not in wanted for p in params]
        if not any(found):
            return
        narrow = sum(p.size for p, is_narrow in zip(params, found, strict=True) if is_narrow)
        share = 100 * narrow / max(1, sum(p.size for p in params))
        first = found.index(True)
        warn(
            f"The gradient function differentiates parameters that are stored in less than 32 bits,"
            f" {share:.3g} % of all, such as {spell(params[first])} at {paths_of(model)[first]}, "
            f"where its policy says params={dtype_name(default.param_dtype)}: small "
            "updates of them round to nothing, so create them in float32, or keep their gradients "
            "in float32 by grad_dtype=jnp.float32 for jmpx.optim.low_precision_params, or write "
            f"params={dtype_name(params[first].dtype)} if this is intentional."
        )


def _batch(batch: object, microbatches: int | None) -> Batch:
    """Returns how the batch is split, which is given by a number or as a whole."""
    if microbatches is not None:
        if batch is not None:
            raise ValueError(
                f"Cannot split a batch by both microbatches={describe(microbatches)} and batch=: "
                "write jmpx.Batch(microbatches=...), or leave batch out."
            )
        return Batch(microbatches=microbatches)
    if batch is None or isinstance(batch, Batch):
        return batch or Batch()
    raise TypeError(
        f"Expected batch to be a jmpx.Batch, got {describe(batch)}: write microbatches=8, or for "
        "example batch=jmpx.Batch(argnums=1, microbatches=8)."
    )


def _check_reduce(policy_map: PolicyMap, over: Over | None) -> None:
    """Refuses a reduce dtype of 16 bits in which nothing is summed."""
    if policy_map.default.reduce_dtype is None or over is not None:
        return
    compute, reduce = policy_map.default.compute_dtype, policy_map.default.reduce_dtype
    if jnp.dtype(reduce).itemsize < 4 and reduce != compute:
        raise ValueError(
            f"Cannot sum gradients in {dtype_name(reduce)}, as reduce in the gradient function's "
            f"policy says, where they are computed in {dtype_name(compute)} and no mapped axis is "
            "averaged over: write r=f32, leave reduce out, or give over=jmpx.Over(...)."
        )


# The results of gradient functions.


@serialized
class ValueAndGradients(NamedTuple, Generic[ValueT, ScalingT]):
    """The result of a function that `value_and_grad` made; it unpacks as a tuple does.

    As a pytree it matches its own class alone: a prefix of it, such as `out_specs` of
    `jax.shard_map`, is a `ValueAndGradients` too.

    Attributes:
        value: the unscaled loss, in float32 of shape (); with `has_aux` the pair `(loss, aux)`.
        loss_scale: the loss scale of the next step.
        grads_finite: whether all gradients are finite: a bool array of shape ().
        grads: gradients of the structure, shapes and dtypes of the first argument, with None for
            what cannot be differentiated; for an NNX module, an `nnx.State` of its parameters.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> grad_fn = jmpx.value_and_grad(jnp.sum, jmpx.NoOpLossScale(), policy="c=bf16")
        >>> result = grad_fn(jnp.ones(2))
        >>> result.value, result.grads
        (Array(2., dtype=float32), Array([1., 1.], dtype=float32))
    """

    __module__ = "jmpx.types"

    value: ValueT
    loss_scale: ScalingT
    grads_finite: jax.Array
    grads: PyTree


@serialized
class Gradients(NamedTuple, Generic[ScalingT]):
    """The result of a function that `grad` made: `ValueAndGradients` without a value."""

    __module__ = "jmpx.types"

    loss_scale: ScalingT
    grads_finite: jax.Array
    grads: PyTree


@serialized
class GradientsAndAux(NamedTuple, Generic[ScalingT, AuxT]):
    """The result of a function that `grad` made with `has_aux`: `Gradients`, and aux."""

    __module__ = "jmpx.types"

    loss_scale: ScalingT
    grads_finite: jax.Array
    grads: PyTree
    aux: AuxT
