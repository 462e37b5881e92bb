"""What a gradient function does when it is called: passes, means, one check, one loss scale."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmpx._adapters.applying import Application, Applying
from jmpx._adapters.uncast import UncastArguments, UncastLike
from jmpx._base.axes import axis_names, check_axis, is_mapped, tracked_axes, vary, varying_axes
from jmpx._base.casts import at_least_float32
from jmpx._base.dtypes import DTypeLike
from jmpx._base.leaves import (
    PyTree,
    can_replace,
    is_array,
    is_floating,
    is_inexact_array,
    is_none,
    is_traceable,
    spell,
)
from jmpx._base.stateful import PureFunction
from jmpx._base.trees import all_finite, holds_on_all, select_tree
from jmpx._devices.exchanges import find_exchanges
from jmpx._devices.reduction import unscaled_mean
from jmpx._devices.shards import Over, Parameters, check_over, read_mask
from jmpx._scales.kinds import LossScale, NoOpLossScale, is_at_least_1
from jmpx._scales.mixed_precision import MixedPrecisionLike
from jmpx._steps.arguments import (
    GradDtype,
    ModelState,
    check_arguments,
    partition,
    paths_of,
    refuse_unknown,
)
from jmpx._steps.batches import GROUPS, MICROBATCHES, Batch, BatchArguments, as_batch
from jmpx._steps.groups import AXIS, Groups, as_placed, check_variables
from jmpx._steps.microbatches import Backward, accumulate
from jmpx._steps.policy_warnings import (
    scale_needed,
    warn_of_no_scale,
    warn_of_reduce,
    warning_of_convolutions,
)
from jmpx._steps.results import ValueAndGradients

Axes = frozenset[Hashable]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a gradient function was made with.

    Attributes:
        func: the function to differentiate.
        scaling: the loss scale.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: whether anything is cast, scaled and checked.
        applying: how `func` runs under the policy.
        grad_dtype: the dtype of the gradients.
        model_state: the argument that holds model state.
        batch: how a batch is split.
        over: the mapped axis, and which parameters are its shards; None if there is none.
    """

    func: Callable[..., Any]
    scaling: LossScale
    has_aux: bool
    use_mixed_precision: bool
    applying: Applying
    grad_dtype: GradDtype
    model_state: ModelState
    batch: Batch
    over: Over | None

    @classmethod
    def of(
        cls,
        func: Callable[..., Any],
        scaling: LossScale,
        has_aux: bool,
        use_mixed_precision: bool,
        /,
        *,
        policy: MixedPrecisionLike | None = None,
        grad_dtype: DTypeLike | None = None,
        uncast: UncastLike = (),
        state_argnum: int | None = None,
        batch: Batch | None = None,
        over: Over | None = None,
        **unknown: Any,
    ) -> "Options":
        """Checks what the user gave.

        Raises:
            TypeError: if an argument is of another type, or an option unknown.
            ValueError: if an argument has no such value, or two contradict each other.
        """
        refuse_unknown(unknown)
        check_arguments(func, scaling)
        check_over(over)
        batch = as_batch(batch)
        _check_one_mean(batch, over)
        averages = over is not None or batch.sharding is not None
        BatchArguments.of(batch.argnums, state_argnum)
        kept = UncastArguments.of(func, uncast).including(state_argnum)
        applying = Applying.of(policy, func, kept, "The gradient function")
        if use_mixed_precision and not averages:
            warn_of_reduce(applying.policy_map)
        return cls(
            func=func,
            scaling=scaling,
            has_aux=has_aux,
            use_mixed_precision=use_mixed_precision,
            applying=applying,
            grad_dtype=GradDtype.of(grad_dtype),
            model_state=ModelState.of(state_argnum, has_aux),
            batch=batch,
            over=over,
        )

    @property
    def batch_arguments(self) -> BatchArguments:
        """The arguments that are split."""
        return BatchArguments.of(self.batch.argnums, self.model_state.argnum)

    def applied(self) -> Application:
        """Returns what runs `func` in one call."""
        application = self.applying.now()
        return application if self.use_mixed_precision else application._replace(policy_map=None)

    @property
    def scale(self) -> LossScale:
        """The loss scale of the backward pass."""
        return self.scaling if self.use_mixed_precision else NoOpLossScale()

    def to_float32(self, array: jax.Array) -> jax.Array:
        """Returns a loss in float32, or as it is where nothing is cast."""
        return at_least_float32(array) if self.use_mixed_precision else array


def _check_one_mean(batch: Batch, over: Over | None) -> None:
    """Refuses a batch that `jax.jit` splits over devices beside a mapped axis."""
    if batch.sharding is not None and over is not None:
        raise ValueError(
            f"Cannot average over both batch=jmpx.Batch(sharding={batch.sharding}) and "
            f"over=jmpx.Over({over.axis_name!r}): a sharding is for jax.jit alone, and over for "
            "the mapped axis of jax.shard_map, jax.pmap or jax.vmap, so leave one of them out."
        )


def differentiate(
    options: Options,
    pure: PureFunction,
    state: list[Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, Any],
) -> tuple[ValueAndGradients[Any, Any], list[Any]]:
    """Computes a loss and its gradients; returns them, and the new state of NNX objects.

    Args:
        options: what the gradient function was made with.
        pure: the function, as a pure one of the state of the objects among its arguments.
        state: that state.
        args: the positional arguments of a call.
        kwargs: its keyword arguments.
    """
    stored, merge = partition(args)
    options.grad_dtype.check()
    params = options.grad_dtype.widen(stored) if options.use_mixed_precision else stored
    application = options.applied()
    warn_of_no_scale(application.policy_map, options.scaling)
    call = _Call(options, application, pure, merge, kwargs)
    old_state = options.model_state.get(args)
    checked, axes = None, ()
    if options.batch.sharding is None:
        result, checked, axes = call.mean(params, state, args, options.over)
    else:
        groups = Groups(options.batch.sharding)
        run = functools.partial(_mean_of_groups, groups, options, call.application, pure)
        result = groups.in_auto_axes(run, (params, options.scaling, state, args, kwargs))
        if groups.explicit_axes:
            stored_state = result.state[0].stored(), old_state
            result = result._replace(state=as_placed(result.state, stored_state))
    grads = options.grad_dtype.cast(result.grads, stored)
    pairs = zip(grads, params, strict=True)
    if any(grad.dtype.itemsize < param.dtype.itemsize for grad, param in pairs):
        checked = None  # the last cast may overflow
    grads_finite, new_scaling = jnp.array(True), options.scaling
    if options.use_mixed_precision:
        grads_finite = all_finite(grads if checked is None else checked, axes or None)
        new_scaling = options.scaling.adjust(grads_finite)
    updates, model_state = result.state
    if not isinstance(options.scale, NoOpLossScale):
        updates = _kept(grads_finite, updates, updates.stored(with_random=False))
        model_state = _kept(grads_finite, model_state, old_state)
    aux = options.model_state.join(model_state, result.aux)
    value = (result.value, aux) if options.has_aux else result.value
    return ValueAndGradients(value, new_scaling, grads_finite, merge(grads, others=None)), updates


def _kept(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns new model state, but the old one where the gradients are not finite.

    Averages of a batch that overflowed hold infinities, and would do so for ever. What cannot be
    selected stays new: a leaf that is no array, whose shape or dtype has changed, or that has
    become the same on all devices.
    """

    def keep(new: Any, old: Any) -> Any:
        if not (is_traceable(new) and is_traceable(old) and can_replace(new, old)):
            return new
        if not varying_axes(old) <= varying_axes(new):
            return new
        # What all devices share would else differ where each of them has a flag of its own.
        axes = tuple(sorted(varying_axes(finite) - varying_axes(new), key=str))
        place = jax.typeof(new).sharding
        if jax.typeof(old).sharding.spec != place.spec:  # on an Explicit mesh
            old = jax.sharding.reshard(old, place)
        return select_tree(holds_on_all(finite, axes) if axes else finite, new, old)

    return jax.tree.map(keep, new, old, is_leaf=is_none)


def _mean_of_groups(
    groups: Groups,
    options: Options,
    application: Application,
    pure: PureFunction,
    params: list[jax.Array],
    scaling: LossScale,
    state: list[Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, Any],
) -> Backward:
    """Returns the mean value and gradients over the groups of a batch."""
    options = dataclasses.replace(options, scaling=scaling)
    call = _Call(options, application, pure, partition(args)[1], kwargs)
    parts = options.batch_arguments.split(args, groups.count, GROUPS, kwargs)

    def run(arrays: Sequence[jax.Array]) -> Backward:
        one, *_ = call.mean(params, state, parts.merge(arrays), Over(AXIS))
        changes = one.state[0]
        check_variables(changes.arrays, changes.stored().arrays)
        return one

    return groups.run(run, parts.arrays)


class _Call(NamedTuple):
    """One call of a gradient function.

    Attributes:
        options: what the function was made with.
        application: how it runs under the policy.
        pure: the function to differentiate.
        merge: puts parameters back into the first argument.
        kwargs: the keyword arguments.
    """

    options: Options
    application: Application
    pure: PureFunction
    merge: Callable[..., PyTree]
    kwargs: dict[str, Any]

    def mean(
        self,
        params: list[jax.Array],
        state: list[Any],
        args: tuple[PyTree, ...],
        over: Over | None,
    ) -> tuple[Backward, list[jax.Array] | None, tuple[Hashable, ...]]:
        """Returns the mean value and gradients over micro-batches and over an axis.

        Returns:
            The mean; arrays that are finite if all gradients are and cost less to check, or None;
            and the axes along which devices still have to agree on that.
        """
        options, application = self.options, self.application
        shards = _Shards(self.merge(params), over)
        params = vary(params, shards.axes)
        with application.products():  # around all: a custom_vjp is traced backward, too
            if options.batch.microbatches == 1:
                backward = self.run(params, state, args, shards)
            else:
                backward = self.accumulate(params, state, args, shards)
        value, grads = unscaled_mean(
            backward.value,
            backward.grads,
            options.scale,
            None if over is None else over.axis_name,
            application.reduce_dtype,
            shards.found,
        )
        mean = backward._replace(value=value, grads=grads)
        if over is not None:
            return mean, None, shards.disagreeing(grads, value)
        # Unscaling by 1 or more keeps finite gradients finite, and scaled ones are there already.
        return mean, backward.grads if is_at_least_1(options.scaling) else None, ()

    def accumulate(
        self, params: list[jax.Array], state: list[Any], args: tuple[PyTree, ...], shards: "_Shards"
    ) -> Backward:
        """Runs all micro-batches of a batch, each from the state that the one before it left."""
        options, model_state = self.options, self.options.model_state
        before = (state, model_state.get(args))
        keywords = self.kwargs if options.batch.sharding is None else None  # checked already
        count = options.batch.microbatches
        parts = options.batch_arguments.split(args, count, MICROBATCHES, keywords)

        def run(states: tuple[list[Any], PyTree], arrays: Sequence[jax.Array]) -> Backward:
            inputs = model_state.put(parts.merge(arrays), states[1])
            one = self.run(params, states[0], inputs, shards)
            changes, new = one.state
            aux = one.aux, dataclasses.replace(changes, arrays=[])
            return one._replace(state=(changes.advance(states[0]), new), aux=aux)

        total = accumulate(run, before, parts.arrays, params)
        aux, changes = total.aux
        return total._replace(state=(changes.read(total.state[0]), total.state[1]), aux=aux)

    def run(
        self, params: list[jax.Array], state: list[Any], args: tuple[PyTree, ...], shards: "_Shards"
    ) -> Backward:
        """Runs one forward and backward pass."""
        options, application = self.options, self.application._replace(stored=args[0])
        old = options.model_state.get(args)

        def scaled_loss(params: list[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, Any, Any]]:
            inputs = (self.merge(params), *args[1:])
            result, updates = application.run(self.pure, state, inputs, self.kwargs)
            value, aux = _loss_and_aux(result, options.has_aux)
            new, aux = options.model_state.split(aux, old)
            if options.batch.microbatches > 1:
                options.model_state.check(new, old)
            value = shards.of_each_device(options.to_float32(value))
            return options.scale.scale(value), (value, aux, (updates, new))

        run = shards.find(scaled_loss, params)
        run = warning_of_convolutions(run, params, application.matmul)
        with scale_needed(application, options.scale, options.func, run, params):
            (_, (value, aux, states)), scaled = jax.value_and_grad(run, has_aux=True)(params)
        return Backward(value, aux, states, [options.to_float32(grad) for grad in scaled])


class _Shards:
    """Which parameters are shards, as far as it is known: `found` is set by the first pass.

    Args:
        model: the first argument.
        over: the mapped axis, or None.
    """

    def __init__(self, model: PyTree, over: Over | None) -> None:
        self.axes: tuple[Hashable, ...] = ()
        self.found: list[Axes] = []
        if over is None:
            return
        check_axis(over.axis_name)
        self.axes = axis_names(over.axis_name)
        self.shared_over: Axes = frozenset()
        varying = [varying_axes(leaf) for leaf in jax.tree.leaves(model) if is_inexact_array(leaf)]
        self.parameters = Parameters(paths_of(model), varying, read_mask(over.sharded, model))

    def of_each_device(self, value: jax.Array) -> jax.Array:
        """Returns a loss as one of each device, also where it is the same on all.

        The gradients are averaged, so that each device has to differentiate a loss of its own. The
        gradient of a common loss is only this device's part of it.
        """
        return vary([value], self.axes)[0]

    def find(
        self, run: Callable[[list[jax.Array]], Any], params: list[jax.Array]
    ) -> Callable[[list[jax.Array]], Any]:
        """Returns a pass that does the same, after it has found which parameters are shards."""
        if not self.axes:
            return run
        run, loss = find_exchanges(run, params, self.axes)
        self.found = self.parameters.find_shards(loss, self.axes)
        self.shared_over = frozenset(exchange.axis for exchange in loss.exchanges)
        return run

    def disagreeing(self, grads: list[jax.Array], value: jax.Array) -> tuple[Hashable, ...]:
        """Returns the axes along which devices share a loss, but not their gradients.

        Also along an axis that is not averaged over, devices share what their losses read of each
        other's parameters: the parts of a tensor, for one.
        """
        varying = frozenset[Hashable]().union(*map(varying_axes, grads))
        tracked = tracked_axes()
        others = {axis for axis in self.shared_over.difference(self.axes) if is_mapped(axis)}
        over = {axis for axis in others if axis in varying or axis not in tracked}
        over = over.union(*self.found, varying - varying_axes(value))
        return tuple(sorted(over, key=str))


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """Splits the result of the user's function, and checks that its loss is a floating scalar."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "Expected the function to return (loss, aux), as has_aux=True says, got "
            f"{_spell(result)}: return a pair, or leave has_aux out."
        )
    loss: Any
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, float) or (is_array(loss) and is_floating(loss) and loss.ndim == 0):
        return jnp.asarray(loss), aux
    raise TypeError(
        f"Expected the function to return a floating scalar as its loss, got {_spell(loss)}: "
        "reduce it, for example with jnp.mean, and return anything else through has_aux=True."
    )


def _spell(result: Any) -> str:
    """Returns a result as messages name it: of a container its type, because it holds tracers."""
    is_leaf = result is None or is_array(result) or isinstance(result, int | float | complex)
    return spell(result) if is_leaf else f"a {type(result).__name__}"
