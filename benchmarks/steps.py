"""Train steps in mixed precision, each written once, in every way that the benchmarks compare.

A step is `run(state, *batch) -> state, loss` with `state = params, opt_state, scaling`, where
`scaling` is the implementation's loss scale. The implementations:

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
- autocast, autocast_saved: a model without casts under `jmpx.autocast`; the latter keeps results of
  products for the backward pass, by `save="products"`.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from models import Transformer, Zeros, cross_entropy
from records import PyTree

import jmpx

ADAM = optax.adam(1e-3)
START, PERIOD = 2.0**15, 2000  # of the dynamic loss scale
LOW = ("bfloat16", "float16")
SCALED = ("float16", "bfloat16_scaled")  # what is computed with a loss scale


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
    "handwritten": (handwritten, ("float32", *LOW, "bfloat16_scaled")),
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


def shapes(model: Any, size: int) -> tuple[PyTree, Any]:
    """Returns the shapes of parameters and of a batch, which take neither time nor memory."""
    rng = Zeros(np.random.PCG64())
    return jax.eval_shape(lambda: model.init(rng)), jax.eval_shape(lambda: model.batch(rng, size))


def start(step: Step, params: PyTree) -> PyTree:
    """Returns the shapes of the state that a step begins with."""
    # MPX's loss scale counts with a plain number.
    scaling = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, step.scaling))
    return params, jax.eval_shape(step.optimizer.init, params), scaling


def trace(point: Point, model: Transformer, size: int, chips: Any = None) -> Any:
    """Traces a step of a transformer."""
    step, (params, batch) = point.make(model), shapes(model, size)
    return traced(step, start(step, params), batch, chips)


def traced(step: Step, state: PyTree, batch: Any, chips: Any = None) -> Any:
    """Traces a step that donates its state, on shapes, for JAX's default device or for chips.

    Several chips share the state and the batch, as FSDP does. The state goes in and out as leaves,
    because JAX cannot lower JMP's loss scales.
    """
    leaves, structure = jax.tree.flatten(state)

    def train_step(leaves: list[Any], *batch: Any) -> Any:
        state, loss = step.run(structure.unflatten(leaves), *batch)
        return jax.tree.leaves(state), loss

    outputs = None
    if chips:
        mesh = Mesh(np.array(chips), ("data",))
        one = SingleDeviceSharding(chips[0]) if len(chips) == 1 else None
        outputs = [one or share(mesh, leaf) for leaf in leaves], one or NamedSharding(mesh, P())
        leaves = tpu.described(leaves, outputs[0])
        batch = tpu.described(batch, one or NamedSharding(mesh, P("data")))
    return jax.jit(train_step, donate_argnums=0, out_shardings=outputs).trace(leaves, *batch)


def share(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Returns the sharding over the longest axis that all chips can share, as FSDP stores it."""
    axes = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
    longest = max(axes, key=lambda axis: leaf.shape[axis], default=None)
    names = ["data" if axis == longest else None for axis in range(leaf.ndim)]
    return NamedSharding(mesh, P(*names))
