"""A call of a gradient function: passes, means, one check, one loss scale."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jmpx._adapters.applying import State
from jmpx._base.axes import axis_names, check_axis, is_mapped, tracked_axes, vary, varying_axes
from jmpx._base.stateful import Arguments, Changes, Keywords, PureFunction
from jmpx._base.trees import (
    PyTree,
    all_finite,
    at_least_float32,
    is_array,
    is_floating,
    is_inexact_array,
    spell,
)
from jmpx._devices.gather import unscaled_mean
from jmpx._devices.shards import Axes, Over, Parameters, find_exchanges, read_mask
from jmpx._jaxprs.passed_on import without_passed_on
from jmpx._scales.kinds import LossScale, NoOpLossScale, is_at_least_1
from jmpx._steps.batches import (
    Backward,
    Merge,
    accumulate,
    cast_gradients,
    paths_of,
    positions_of,
    split_parameters,
    widened,
)
from jmpx._steps.options import Options, ValueAndGradients, kept_if_finite
from jmpx._steps.widening import value_and_wide_gradients

R = TypeVar("R")


def differentiate(
    options: Options, pure: PureFunction, state: State, args: Arguments, kwargs: Keywords
) -> tuple[ValueAndGradients[PyTree, LossScale], Changes]:
    """Computes a loss and its gradients; returns them, and the changes of NNX objects."""
    stored, merge = split_parameters(args)
    positions_of(options.batch, options.model_state.argnum, len(args))  # refuses wrong ones
    options.check_overwritten(args[0])
    params = widened(stored, options.grad_dtype)
    options.warn_of_no_scale()
    options.check_stored(stored, args[0])
    old_state = options.model_state.get(args)
    call = _Call(options, pure, merge, kwargs)
    result, checked, axes = call.mean(params, state, args)
    grads = cast_gradients(result.grads, stored, options.grad_dtype)
    pairs = zip(grads, params, strict=True)
    if any(grad.dtype.itemsize < param.dtype.itemsize for grad, param in pairs):
        checked = None  # the last cast may overflow
    grads_finite = all_finite(grads if checked is None else checked, axes or None)
    new_scale = options.scaling.adjust(grads_finite)
    updates, model_state = result.state
    if not isinstance(options.scaling, NoOpLossScale):
        updates = kept_if_finite(grads_finite, updates, updates.stored(with_random=False))
        model_state = kept_if_finite(grads_finite, model_state, old_state)
    aux = options.model_state.join(model_state, result.aux)
    value = (result.value, aux) if options.has_aux else result.value
    return ValueAndGradients(value, new_scale, grads_finite, merge(grads, None)), updates


class _Call(NamedTuple):
    """One call of a gradient function."""

    options: Options
    pure: PureFunction
    merge: Merge  # puts parameters back into the first argument
    kwargs: Keywords

    def mean(
        self, params: list[jax.Array], state: State, args: Arguments
    ) -> tuple[Backward, list[jax.Array] | None, tuple[Hashable, ...]]:
        """Returns the mean value and gradients over micro-batches and over an axis.

        Second are arrays that cost less to check than the gradients and are finite if these are, or
        None; third the axes along which devices still have to agree on that.
        """
        options, over = self.options, self.options.over
        shards = _Shards(self.merge(params), over)
        params = vary(params, shards.axes)
        run = self.run if options.batch.microbatches == 1 else self.accumulate
        with options.applying.products():  # around all: a custom_vjp is traced backward, too
            backward = run(params, state, args, shards)
        value, grads = unscaled_mean(
            backward.value,
            backward.grads,
            options.scaling,
            None if over is None else over.axis_name,
            options.applying.reduce_dtype,
            shards.found,
        )
        mean = backward._replace(value=value, grads=grads)
        if over is not None:
            return mean, None, shards.disagreeing(grads, value)
        # Unscaling by 1 or more keeps finite gradients finite: the scaled ones can be checked.
        return mean, backward.grads if is_at_least_1(options.scaling) else None, ()

    def accumulate(
        self, params: list[jax.Array], state: State, args: Arguments, shards: "_Shards"
    ) -> Backward:
        """Runs all micro-batches of a batch, each from the state that the one before it left."""
        options, model_state = self.options, self.options.model_state
        parts, join = options.split(args, self.kwargs)

        def run(states: tuple[State, PyTree], arrays: Sequence[jax.Array]) -> Backward:
            inputs = model_state.put(join(arrays), states[1])
            one = self.run(params, states[0], inputs, shards)
            changes, new = one.state
            aux = one.aux, dataclasses.replace(changes, arrays=[])
            return one._replace(state=(changes.advance(states[0]), new), aux=aux)

        total = accumulate(run, (state, model_state.get(args)), parts, params)
        aux, changes = total.aux
        return total._replace(state=(changes.stored(total.state[0]), total.state[1]), aux=aux)

    def run(
        self, params: list[jax.Array], state: State, args: Arguments, shards: "_Shards"
    ) -> Backward:
        """Runs one forward and backward pass."""
        options, application = self.options, self.options.applying._replace(stored=args[0])
        old = options.model_state.get(args)

        def scaled_loss(params: list[jax.Array]) -> tuple[jax.Array, PyTree]:
            inputs = (self.merge(params), *args[1:])
            result, updates = application.run(self.pure, state, inputs, self.kwargs)
            if options.batch.microbatches > 1:
                given = self.pure, state, inputs, self.kwargs, updates
                updates = without_passed_on(application.run, *given)
            value, aux = _loss_and_aux(result, options.has_aux)
            new, aux = options.model_state.split(aux, old)
            if options.batch.microbatches > 1:
                options.model_state.check(new, old)
            # Each device differentiates its own loss, and the gradients are averaged. The gradient
            # of a common loss would be this device's part of it alone.
            value = vary([at_least_float32(value)], shards.axes)[0]
            return options.scaling.scale(value), (value, aux, (updates, new))

        run = shards.find(scaled_loss, params)
        if options.widens:
            (_, (value, aux, states)), scaled = value_and_wide_gradients(run, params)
        else:
            (_, (value, aux, states)), scaled = jax.value_and_grad(run, has_aux=True)(params)
        return Backward(value, aux, states, [at_least_float32(grad) for grad in scaled])


class _Shards:
    """Which parameters are shards; the first pass sets `found`."""

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

    def find(
        self, run: Callable[[list[jax.Array]], R], params: list[jax.Array]
    ) -> Callable[[list[jax.Array]], R]:
        """Returns a pass that does the same, after it has found which parameters are shards."""
        if not self.axes:
            return run
        run, loss = find_exchanges(run, params, self.axes)
        self.found = self.parameters.find_shards(loss, self.axes)
        self.shared_over = frozenset(exchange.axis for exchange in loss.exchanges)
        return run

    def disagreeing(self, grads: list[jax.Array], value: jax.Array) -> tuple[Hashable, ...]:
        """Returns the axes along which devices share a loss, but not their gradients."""
        # Losses also read parameters of other devices along axes that are not averaged over, as in
        # tensor parallelism.
        varying = frozenset[Hashable]().union(*map(varying_axes, grads))
        tracked = tracked_axes()
        others = {axis for axis in self.shared_over.difference(self.axes) if is_mapped(axis)}
        over = {axis for axis in others if axis in varying or axis not in tracked}
        over = over.union(*self.found, varying - varying_axes(value))
        return tuple(sorted(over, key=str))


def _loss_and_aux(result: PyTree, has_aux: bool) -> tuple[jax.Array, PyTree]:
    """Splits the result of the user's function, and checks that its loss is a floating scalar."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        got = f"a tuple of {len(result)}" if type(result) is tuple else _kind(result)
        if is_array(result):
            got = f"one {result.dtype} scalar" if result.ndim == 0 else f"one {spell(result)}"
        raise TypeError(
            f"Expected the function to return (loss, aux), as has_aux=True says, got {got}: return "
            "a pair, or leave has_aux out."
        )
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, float) or (is_array(loss) and is_floating(loss) and loss.ndim == 0):
        return jnp.asarray(loss), aux
    remedy = "reduce it, for example with jnp.mean, and return anything else through has_aux=True"
    if "Gradients" in type(loss).__name__:
        remedy = "it is a gradient function already, so give the loss itself"
    elif loss is None:
        remedy = "return the loss"
    raise TypeError(
        "Expected the function to return a floating scalar as its loss, got "
        f"{spell(loss) if is_array(loss) else _kind(loss)}: {remedy}."
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
