"""Train steps in mixed precision, each written once, in every way that the benchmarks compare.

A step computes `run(state, *batch) -> state, loss` from `state = params, opt_state, scaling`, where
`scaling` is whatever the implementation carries to scale its loss. The implementations:

- handwritten: float16 has a dynamic loss scale, checks the gradients as they arrive and selects
  with `where`; the flag is an output. Other dtypes neither scale nor skip, unless `scales` says so.
- handwritten_cond: skips with `lax.cond`. handwritten_late: checks the gradients after they are
  unscaled, as JMP and MPX do, and selects with `where`.
- jmp, mpx: as the users of JMP and of MPX (PyPI: mixed-precision-for-JAX) write it. MPX scales and
  skips in bfloat16, too.
- jmpx: `filter_value_and_grad` with `optimizer_update`, which skips as its platform does best: with
  `lax.cond` on CPUs and GPUs, with `where` on TPUs; jmpx_where always selects.
- jmpx_counting, jmpx_counting_where: the same with an optimizer made by `skip_nonfinite`.
- jmpx_wrapped, jmpx_wrapped_cond: `skip_nonfinite` alone, with `optax.apply_updates`; it selects
  unless told otherwise.
- jmpx_jmp_style: JMP's step with jmpx in its place.
- autocast, autocast_saved: a model without casts under `jmpx.autocast`; the latter saves for the
  backward pass what products made, with `save="products"`.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Transformer, cross_entropy

import jmpx

PyTree = Any
Batch = tuple[jax.Array, jax.Array]  # inputs and labels
Optimizer = optax.GradientTransformation

ADAM = optax.adam(1e-3)
START, PERIOD = 2.0**15, 2000  # of the dynamic loss scale
LOW = ("bfloat16", "float16")
DTYPES = ("float32_highest", "float32", *LOW)  # the first one multiplies without TF32


class Step(NamedTuple):
    """A train step, and what its state holds at the start."""

    run: Callable[..., tuple[PyTree, jax.Array]]
    scaling: PyTree
    optimizer: Optimizer


class Point(NamedTuple):
    """One implementation in one dtype."""

    implementation: str
    dtype: str

    def make(self, model: Transformer, optimizer: Optimizer) -> Step:
        make, _ = IMPLEMENTATIONS[self.implementation]
        return make(model, self.dtype.removesuffix("_highest"), optimizer)


def points(implementations: Iterable[str], dtypes: Sequence[str]) -> list[Point]:
    """Returns the pairs that exist and whose library is installed."""
    installed = [n for n in implementations if n not in PEERS or importlib.util.find_spec(n)]
    return [Point(n, d) for n in installed for d in dtypes if d in IMPLEMENTATIONS[n][1]]


# By hand.


def cast(tree: PyTree, dtype: str) -> PyTree:
    """Casts floating arrays; tokens and labels stay integers."""
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if floating(x) else x, tree)


def update(
    optimizer: Optimizer, grads: PyTree, params: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree]:
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def unscale(grads: PyTree, scale: jax.Array) -> PyTree:
    return jax.tree.map(lambda g: g * (1 / scale), grads)


def all_finite(grads: PyTree) -> jax.Array:
    return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()


def by_where(finite: jax.Array, new: Callable[..., Any], grads: PyTree, *old: PyTree) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new(grads, *old), old)


def by_cond(finite: jax.Array, new: Callable[..., Any], grads: PyTree, *old: PyTree) -> Any:
    return jax.lax.cond(finite, new, lambda grads, *old: old, grads, *old)


def handwritten(
    model: Transformer,
    dtype: str,
    optimizer: Optimizer,
    skip: Callable[..., Any] = by_where,
    late: bool = False,
    scales: bool | None = None,
) -> Step:
    scales = dtype == "float16" if scales is None else scales

    def loss_fn(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
        return model.loss(cast(params, dtype), cast(x, dtype), labels)

    def scaled_loss(params: PyTree, scale: jax.Array, *batch: jax.Array) -> Any:
        loss = loss_fn(params, *batch)
        return loss * scale, loss

    def plain(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        return (*update(optimizer, grads, params, opt_state), scaling), loss

    def scaled(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, (scale, counter, _) = state
        grads, loss = jax.grad(scaled_loss, has_aux=True)(params, scale, *batch)
        if late:
            grads = unscale(grads, scale)
        finite = all_finite(grads)

        def new(grads: PyTree, *old: PyTree) -> Any:
            return update(optimizer, unscale(grads, jnp.float32(1) if late else scale), *old)

        params, opt_state = skip(finite, new, grads, params, opt_state)
        due = counter == PERIOD - 1
        grown = jnp.where(due & jnp.isfinite(scale * 2), scale * 2, scale)
        scale = jnp.where(finite, grown, jnp.maximum(scale / 2, 1.0))
        counter = jnp.where(finite & ~due, counter + 1, 0)
        return (params, opt_state, (scale, counter, finite)), loss  # the flag is an output

    if not scales:
        return Step(plain, (), optimizer)
    return Step(scaled, (jnp.float32(START), jnp.int32(0), jnp.array(True)), optimizer)


# As the libraries' users write it.


def jmp_style(
    model: Transformer,
    dtype: str,
    optimizer: Optimizer,
    library: str,
    scales: bool | None = None,
) -> Step:
    scales = dtype == "float16" if scales is None else scales
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
        new = update(optimizer, grads, params, opt_state)
        if scales:
            finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(finite)
            new = jmp.select_tree(finite, new, (params, opt_state))
        return (*new, loss_scale), loss

    if scales:
        return Step(run, jmp.DynamicLossScale(jnp.float32(START)), optimizer)
    return Step(run, jmp.NoOpLossScale(), optimizer)


def mpx_style(
    model: Transformer, dtype: str, optimizer: Optimizer, scales: bool | None = None
) -> Step:
    import mpx

    scales = dtype == "float16" if scales is None else scales
    start = START if scales else 1.0

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        mpx.set_half_precision_datatype(jnp.dtype(dtype))  # global in MPX, read while tracing
        grad_fn = mpx.filter_value_and_grad(model.loss, scaling)
        loss, scaling, finite, grads = grad_fn(params, *batch)
        new = mpx.optimizer_update(params, optimizer, opt_state, grads, finite)
        return (*new, scaling), loss

    return Step(run, mpx.DynamicLossScaling(jnp.float32(start), jnp.float32(1)), optimizer)


def jmpx_style(
    model: Transformer,
    dtype: str,
    optimizer: Optimizer,
    counting: bool = False,
    loss_fn: Callable[..., jax.Array] | None = None,
    policy: str | None = None,
    scales: bool | None = None,
    **skip: Any,
) -> Step:
    scaled = dtype == "float16" if scales is None else scales
    optimizer = jmpx.skip_nonfinite(optimizer) if counting else optimizer

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        grad_fn = jmpx.filter_value_and_grad(
            loss_fn or model.loss, scaling, policy=policy or f"compute={dtype}"
        )
        loss, scaling, finite, grads = grad_fn(params, *batch)
        if scaled:
            new = jmpx.optimizer_update(params, optimizer, opt_state, grads, finite, **skip)
        else:
            new = update(optimizer, grads, params, opt_state)
        return (*new, scaling), loss

    scaling = jmpx.DynamicLossScale(START) if scaled else jmpx.NoOpLossScale()
    return Step(run, scaling, optimizer)


def jmpx_wrapped(model: Transformer, dtype: str, optimizer: Optimizer, **skip: Any) -> Step:
    """The step of those who apply the updates themselves."""
    wrapped = jmpx.skip_nonfinite(optimizer, **skip)

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        grad_fn = jmpx.filter_value_and_grad(model.loss, scaling, policy=f"compute={dtype}")
        loss, scaling, finite, grads = grad_fn(params, *batch)
        updates, opt_state = wrapped.update(grads, opt_state, params, grads_finite=finite)
        return (optax.apply_updates(params, updates), opt_state, scaling), loss

    return Step(run, jmpx.DynamicLossScale(START), wrapped)


def autocast_style(
    model: Transformer,
    dtype: str,
    optimizer: Optimizer,
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
    return jmpx_style(model, dtype, optimizer, loss_fn=loss_fn, policy="full")


FLOAT16 = ("float16",)
PEERS = ("jmp", "mpx")
IMPLEMENTATIONS: dict[str, tuple[Callable[..., Step], tuple[str, ...]]] = {
    "handwritten": (handwritten, DTYPES),
    "handwritten_cond": (partial(handwritten, skip=by_cond), FLOAT16),
    "handwritten_late": (partial(handwritten, late=True), FLOAT16),
    "jmp": (partial(jmp_style, library="jmp"), LOW),
    "mpx": (mpx_style, LOW),
    "jmpx": (jmpx_style, LOW),
    "jmpx_where": (partial(jmpx_style, skip_by="where"), FLOAT16),
    "jmpx_counting": (partial(jmpx_style, counting=True), FLOAT16),
    "jmpx_counting_where": (partial(jmpx_style, counting=True, skip_by="where"), FLOAT16),
    "jmpx_wrapped": (jmpx_wrapped, FLOAT16),
    "jmpx_wrapped_cond": (partial(jmpx_wrapped, skip_by="cond"), FLOAT16),
    "jmpx_jmp_style": (partial(jmp_style, library="jmpx"), LOW),
    "autocast": (autocast_style, LOW),
    "autocast_saved": (partial(autocast_style, save="products"), LOW),
}


# Traced, compiled, run.


class Traced(NamedTuple):
    """A traced step, and the leaves of the state that it begins with."""

    step: Any  # what `jax.jit(...).trace` returns
    leaves: list[jax.Array]
    structure: Any  # of the state, a PyTreeDef
    batch: Batch


def trace(
    point: Point,
    model: Transformer,
    size: int,
    optimizer: Optimizer = ADAM,
    seed: int = 0,
) -> Traced:
    """Traces a step that donates its state.

    The state goes in and out as leaves, because JAX cannot lower JMP's loss scales.
    """
    rng = np.random.default_rng(seed)
    step = point.make(model, optimizer)
    params = model.init(rng)
    state = params, step.optimizer.init(params), step.scaling
    leaves, structure = jax.tree.flatten(state)

    def train_step(leaves: list[jax.Array], *batch: jax.Array) -> Any:
        state, loss = step.run(structure.unflatten(leaves), *batch)
        return jax.tree.leaves(state), loss

    batch = model.batch(rng, size)
    precision = "highest" if point.dtype == "float32_highest" else None
    with jax.default_matmul_precision(precision):
        traced = jax.jit(train_step, donate_argnums=0).trace(leaves, *batch)
    return Traced(traced, leaves, structure, batch)


class Program:
    """A compiled step, and its training state, which goes round."""

    def __init__(self, traced: Traced, options: dict[str, Any] | None = None) -> None:
        """Compiles the step; `options` are XLA's."""
        self._leaves, self._structure, self._batch = traced[1:]
        self.compiled = traced.step.lower().compile(options)
        self.loss = jnp.float32(jnp.nan)

    @property
    def params(self) -> PyTree:
        return self._structure.unflatten(self._leaves)[0]

    def run(self, steps: int) -> float:
        """Runs some steps and returns the seconds that one took."""
        start = time.perf_counter()
        for _ in range(steps):
            self._leaves, self.loss = self.compiled(self._leaves, *self._batch)
        jax.block_until_ready((self._leaves, self.loss))
        return (time.perf_counter() - start) / steps
