"""Train steps in mixed precision, each written once, in every way that the benchmarks compare.

A step computes `run(state, *batch) -> state, loss` from `state = params, opt_state, scaling`, where
`scaling` is whatever the implementation carries to scale its loss. The implementations:

- handwritten: a dynamic loss scale, gradients that are checked as they arrive, and `where`, which
  selects what to keep; the flag is an output. Where nothing scales, nothing is skipped.
- handwritten_cond: skips with `lax.cond`. handwritten_late: checks the gradients after they are
  unscaled, as JMP and MPX do, and selects with `where`. handwritten_divide,
  handwritten_cond_divide: divide by the scale where the others multiply by its inverse.
- jmp, mpx: as the users of JMP and of MPX (PyPI: mixed-precision-for-JAX) write it. MPX scales and
  skips in bfloat16, too.
- jmpx: `value_and_grad` by arguments with `optimizer_update`, which skips as its platform does
  best: with `lax.cond` on CPUs and GPUs, with `where` on TPUs; jmpx_where and jmpx_cond always do
  the one.
- jmpx_counting: the same with an optimizer made by `skip_nonfinite`. jmpx_jmp_style: JMP's step
  with jmpx in its place.
- autocast, autocast_saved: a model without casts under `jmpx.autocast`; the latter saves for the
  backward pass what products made, with `save="products"`.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tpu
from models import Transformer, cross_entropy

import jmpx

PyTree = Any

ADAM = optax.adam(1e-3)
START, PERIOD = 2.0**15, 2000  # of the dynamic loss scale
LOW = ("bfloat16", "float16")
SCALED = ("float16", "bfloat16_scaled")  # what is computed with a loss scale
DTYPES = ("float32_highest", "float32", *LOW)  # the first one multiplies without TF32


class Step(NamedTuple):
    """A train step, and what its state holds at the start."""

    run: Callable[..., tuple[PyTree, jax.Array]]
    scaling: PyTree
    optimizer: optax.GradientTransformation = ADAM


class Point(NamedTuple):
    """One implementation in one dtype."""

    implementation: str
    dtype: str

    def make(self, model: Transformer) -> Step:
        make, _ = IMPLEMENTATIONS[self.implementation]
        return make(model, self.dtype.partition("_")[0], scales=self.dtype in SCALED)


# --- By hand ---


def cast(tree: PyTree, dtype: str) -> PyTree:
    """Casts floating arrays; tokens and labels stay integers."""
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if floating(x) else x, tree)


def update(grads: PyTree, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def unscale(grads: PyTree, scale: jax.Array) -> PyTree:
    return jax.tree.map(lambda g: g * (1 / scale), grads)


def divide(grads: PyTree, scale: jax.Array) -> PyTree:
    return jax.tree.map(lambda g: g / scale, grads)


def all_finite(grads: PyTree) -> jax.Array:
    return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()


def by_where(finite: jax.Array, new: Callable[..., Any], grads: PyTree, *old: PyTree) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new(grads, *old), old)


def by_cond(finite: jax.Array, new: Callable[..., Any], grads: PyTree, *old: PyTree) -> Any:
    return jax.lax.cond(finite, new, lambda grads, *old: old, grads, *old)


def handwritten(
    model: Transformer,
    dtype: str,
    scales: bool = False,
    skip: Callable[..., Any] = by_where,
    late: bool = False,
    unscale: Callable[..., PyTree] = unscale,
) -> Step:
    def loss_fn(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
        return model.loss(cast(params, dtype), cast(x, dtype), labels)

    def scaled_loss(params: PyTree, scale: jax.Array, *batch: jax.Array) -> Any:
        loss = loss_fn(params, *batch)
        return loss * scale, loss

    def plain(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        return (*update(grads, params, opt_state), scaling), loss

    def scaled(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, (scale, counter, _) = state
        grads, loss = jax.grad(scaled_loss, has_aux=True)(params, scale, *batch)
        if late:
            grads = unscale(grads, scale)
        finite = all_finite(grads)

        def new(grads: PyTree, *old: PyTree) -> Any:
            return update(unscale(grads, jnp.float32(1) if late else scale), *old)

        params, opt_state = skip(finite, new, grads, params, opt_state)
        due = counter == PERIOD - 1
        grown = jnp.where(due & jnp.isfinite(scale * 2), scale * 2, scale)
        scale = jnp.where(finite, grown, jnp.maximum(scale / 2, 1.0))
        counter = jnp.where(finite & ~due, counter + 1, 0)
        return (params, opt_state, (scale, counter, finite)), loss  # the flag is an output

    if not scales:
        return Step(plain, ())
    return Step(scaled, (jnp.float32(START), jnp.int32(0), jnp.array(True)))


# --- As the libraries' users write it ---


def jmp_style(model: Transformer, dtype: str, scales: bool = False, library: str = "jmp") -> Step:
    jmp = importlib.import_module(library)
    policy = jmp.get_policy(f"params=float32,compute={dtype},output=float32")

    def scaled_loss(params: PyTree, loss_scale: Any, *batch: jax.Array) -> Any:
        params, batch = policy.cast_to_compute((params, batch))
        loss = model.loss(params, *batch)
        return loss_scale.scale(loss), loss

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, loss_scale = state
        grads, loss = jax.grad(scaled_loss, has_aux=True)(params, loss_scale, *batch)
        grads = loss_scale.unscale(grads)
        new = update(grads, params, opt_state)
        if scales:
            finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(finite)
            new = jmp.select_tree(finite, new, (params, opt_state))
        return (*new, loss_scale), loss

    return Step(run, jmp.DynamicLossScale(jnp.float32(START)) if scales else jmp.NoOpLossScale())


def mpx_style(model: Transformer, dtype: str, scales: bool = False) -> Step:
    import mpx

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        mpx.set_half_precision_datatype(jnp.dtype(dtype))  # global in MPX, read while tracing
        grad_fn = mpx.filter_value_and_grad(model.loss, scaling)
        loss, scaling, finite, grads = grad_fn(params, *batch)
        new = mpx.optimizer_update(params, ADAM, opt_state, grads, finite)
        return (*new, scaling), loss

    start = jnp.float32(START if scales else 1)
    return Step(run, mpx.DynamicLossScaling(start, jnp.float32(1)))


def jmpx_style(
    model: Transformer,
    dtype: str,
    scales: bool = False,
    counting: bool = False,
    loss_fn: Callable[..., jax.Array] | None = None,
    policy: str | None = None,
    **skip: Any,
) -> Step:
    optimizer = jmpx.skip_nonfinite(ADAM) if counting else ADAM

    def run(state: PyTree, *arrays: jax.Array) -> Any:
        params, opt_state, scaling = state
        casts = policy or f"by=arguments,compute={dtype}"
        grad_fn = jmpx.value_and_grad(loss_fn or model.loss, scaling, policy=casts)
        loss, scaling, finite, grads = grad_fn(params, *arrays)
        if scales:
            new = jmpx.optimizer_update(params, optimizer, opt_state, grads, finite, **skip)
        else:
            new = update(grads, params, opt_state)
        return (*new, scaling), loss

    return Step(run, jmpx.DynamicLossScale(START) if scales else jmpx.NoOpLossScale(), optimizer)


def autocast_style(
    model: Transformer,
    dtype: str,
    scales: bool = False,
    rules: str = "",
    with_loss: bool = False,
    **options: Any,
) -> Step:
    """Autocast does the casts, so the policy of the gradients is `full`."""
    apply = jmpx.autocast(model.apply, f"compute={dtype}{rules}", **options)

    def loss_fn(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(apply(params, x), labels)

    if with_loss:
        loss_fn = jmpx.autocast(model.loss, f"compute={dtype}{rules}", **options)
    return jmpx_style(model, dtype, scales, loss_fn=loss_fn, policy="full")


PEERS = ("jmp", "mpx")
IMPLEMENTATIONS: dict[str, tuple[Callable[..., Step], tuple[str, ...]]] = {  # and their dtypes
    "handwritten": (handwritten, (*DTYPES, "bfloat16_scaled")),
    "handwritten_cond": (partial(handwritten, skip=by_cond), SCALED),
    "handwritten_divide": (partial(handwritten, unscale=divide), SCALED),
    "handwritten_cond_divide": (partial(handwritten, skip=by_cond, unscale=divide), SCALED),
    "handwritten_late": (partial(handwritten, late=True), SCALED),
    "jmp": (jmp_style, (*LOW, "bfloat16_scaled")),
    "mpx": (mpx_style, (*LOW, "bfloat16_scaled")),
    "jmpx": (jmpx_style, (*LOW, "bfloat16_scaled")),
    "jmpx_where": (partial(jmpx_style, skip_by="where"), SCALED),
    "jmpx_cond": (partial(jmpx_style, skip_by="cond"), SCALED),
    "jmpx_counting": (partial(jmpx_style, counting=True), SCALED),
    "jmpx_jmp_style": (partial(jmp_style, library="jmpx"), LOW),
    "autocast": (autocast_style, LOW),
    "autocast_saved": (partial(autocast_style, save="products"), LOW),
}


# --- Traced ---


class Traced(NamedTuple):
    """A traced step, and the leaves of the state that it begins with."""

    step: Any  # what `jax.jit(...).trace` returns
    leaves: list[Any]


def trace(point: Point, model: Transformer, size: int, sharding: Any = None) -> Traced:
    """Traces a step, for the devices of a sharding if there is one."""
    rng, step = np.random.default_rng(0), point.make(model)
    params = model.init(rng)
    state, batch = (params, step.optimizer.init(params), step.scaling), model.batch(rng, size)
    if sharding is not None:
        arrays = jax.tree.map(jnp.asarray, (state, batch))
        state, batch = tpu.described(arrays, jax.tree.map(lambda _: sharding, arrays))
    precision = "highest" if point.dtype == "float32_highest" else None
    return traced(step, state, batch, precision)


def traced(
    step: Step, state: PyTree, batch: Any, precision: str | None, outputs: Any = None
) -> Traced:
    """Traces a step that donates its state.

    The state goes in and out as leaves, because JAX cannot lower JMP's loss scales.

    Args:
        step: what to trace.
        state: arrays, or what describes them.
        batch: those, too.
        precision: of matrix products, as `jax.default_matmul_precision` takes it.
        outputs: shardings of the leaves and of the loss; None leaves them to XLA.
    """
    leaves, structure = jax.tree.flatten(state)

    def train_step(leaves: list[Any], *batch: Any) -> Any:
        state, loss = step.run(structure.unflatten(leaves), *batch)
        return jax.tree.leaves(state), loss

    with jax.default_matmul_precision(precision):
        jitted = jax.jit(train_step, donate_argnums=0, out_shardings=outputs)
        return Traced(jitted.trace(leaves, *batch), leaves)
