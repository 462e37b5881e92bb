"""The train steps that `tpu_compile.py` and `gpu_compile.py` compile: which model, way, chips.

Transformers take the steps of `steps.py`. The ResNet is Haiku's, which keeps the averages of its
BatchNorms as state, so its steps are here. In those by hand and of MPX, BatchNorm is a float32
island; a Haiku user of JMP sets its policy. A model under autocast has no island.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import steps
import tpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import LanguageModel, Transformer, ViT, Zeros, cross_entropy
from steps import Step

import jmpx

PyTree = Any
LOW = "bfloat16"  # a TPU v5e has no float16


class Point(NamedTuple):
    """One program. The batch is that of one chip."""

    model: str
    way: str
    layers: int
    batch: int
    scanned: bool = False
    chips: str = "one"  # or eight: "data" splits the batch, "fsdp" the state, too
    dtype: str = LOW  # of transformers; float16 has a dynamic loss scale


# --- Transformers ---


class Network(eqx.Module):
    """The transformer as an Equinox module."""

    params: PyTree
    model: Transformer = eqx.field(static=True)

    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        return self.model.loss(self.params, x, labels)


def by_modules(model: Transformer, dtype: str) -> Step:
    """The transformer as an Equinox module, which casts; the islands stay as they are."""
    policy = f"by=modules,compute={dtype},output=float32"

    def loss_fn(network: Network, x: jax.Array, labels: jax.Array) -> jax.Array:
        return network(x, labels)

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        grad_fn = jmpx.value_and_grad(loss_fn, scaling, policy=policy)
        loss, scaling, _, grads = grad_fn(Network(params, model), *batch)
        return (*steps.update(grads.params, params, opt_state), scaling), loss

    return Step(run, jmpx.NoOpLossScale())


def float32(model: Transformer, dtype: str) -> Step:
    return steps.handwritten(model, "float32")


def by_arguments(model: Transformer, dtype: str, save: str = "products") -> Step:
    """The transformer with its islands, whose arguments jmpx casts, and where it keeps less."""
    policy = f"by=arguments,compute={dtype},save={save}"
    return steps.jmpx_style(model, dtype, policy=policy)


def float32_gradients(model: Transformer, dtype: str) -> Step:
    policy = f"by=arguments,compute={dtype},reduce=float32"
    return steps.jmpx_style(model, dtype, policy=policy)


autocast = steps.autocast_style
CARRY = "; op.scan: bfloat16"  # the dtype in which a scan hands activations on
MARKED, LOW_SCORES = {"checkpointed": True}, {"scaled_low": True}
ALL_DOTS = MARKED | {"saveable": jax.checkpoint_policies.dots_saveable}
skipping = lambda by: partial(steps.jmpx_style, skip_by=by)  # noqa: E731
# Each way, and the fields of its model.
TRANSFORMER_WAYS: dict[str, tuple[Callable[..., Step], dict[str, Any]]] = {
    "float32": (float32, {}),
    "float32, highest": (float32, {}),
    "by hand": (steps.handwritten, {}),
    "by hand, low scores": (steps.handwritten, LOW_SCORES),
    "by hand, cond": (partial(steps.handwritten, skip=steps.by_cond), {}),
    "by hand, marked blocks": (steps.handwritten, MARKED),
    "by hand, marked blocks, all dots": (steps.handwritten, ALL_DOTS),
    "by hand, low scores, marked blocks": (steps.handwritten, LOW_SCORES | MARKED),
    "JMP": (steps.jmp_style, {}),
    "MPX": (steps.mpx_style, {}),
    "module policies": (by_modules, {}),
    "gradient functions": (steps.jmpx_style, {}),
    "gradient functions, r=f32": (float32_gradients, {}),
    "arguments, save": (by_arguments, {}),
    "arguments, save mixed": (partial(by_arguments, save="products+mixed"), {}),
    "arguments, save attention": (partial(by_arguments, save="products+attention"), {}),
    "gradient functions, where": (skipping("where"), {}),
    "gradient functions, cond": (skipping("cond"), {}),
    "autocast": (autocast, {}),
    "autocast, marked blocks": (autocast, MARKED),
    "autocast, save": (partial(autocast, save="products"), {}),
    "autocast, save mixed": (partial(autocast, save="products+mixed"), {}),
    "autocast, save attention": (partial(autocast, save="products+attention"), {}),
    "autocast, save, with the loss": (partial(autocast, save="products", with_loss=True), {}),
    "autocast, marked blocks, bfloat16 carry": (partial(autocast, rules=CARRY), MARKED),
    "autocast, save, bfloat16 carry": (partial(autocast, rules=CARRY, save="products"), {}),
}


def transformer(point: Point, small: bool) -> Transformer:
    """Returns the model of a point; a small one has one layer of a tenth of the width."""
    form: Any = {"scanned": point.scanned, **TRANSFORMER_WAYS[point.way][1]}
    width: Any = {"layers": point.layers, "width": 768, "heads": 12, "hidden": 3072}
    if small:
        width |= {"width": 128, "heads": 2, "hidden": 256}
    if point.model == "vit":
        return ViT(**form, **width, classes=1000, image=32 if small else 224, patch=16)
    sizes: Any = {} if point.model == "language_model" and not small else {"classes": 256}
    sizes |= {"length": 1024} if point.model == "long_byte_model" else {}
    sizes |= {"length": 64} if small else {}
    return LanguageModel(**form, **width, **sizes)


# --- The ResNet ---


def resnet(images: jax.Array) -> jax.Array:
    return hk.nets.ResNet50(1000)(images, is_training=True)


NETWORK = hk.transform_with_state(resnet)
WITH_STATE = tuple[jax.Array, PyTree]  # a loss, and the averages


def island(next_fn: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Runs a BatchNorm in float32: an interceptor of Haiku's methods."""
    if not isinstance(context.module, hk.BatchNorm) or context.method_name != "__call__":
        return next_fn(*args, **kwargs)
    x, *rest = args
    return next_fn(x.astype(jnp.float32), *rest, **kwargs).astype(x.dtype)


def with_islands() -> Any:
    return hk.intercept_methods(island)


def with_jmp() -> Any:
    import jmp

    stack = contextlib.ExitStack()
    low = jmp.get_policy(f"params=float32,compute={LOW},output=float32")
    norm = jmp.get_policy(f"params=float32,compute=float32,output={LOW}")
    stack.enter_context(hk.mixed_precision.push_policy(hk.nets.ResNet50, low))
    stack.enter_context(hk.mixed_precision.push_policy(hk.BatchNorm, norm))
    return stack


def cast_by_hand(params: PyTree) -> PyTree:
    keep = lambda module, name, x: x if "batchnorm" in module else x.astype(LOW)  # noqa: E731
    return hk.data_structures.map(keep, params)


SAVED = jmpx.autocast(NETWORK.apply, save="products")
# How the network is applied, in which context, and whether its arguments are cast by hand.
RESNET_WAYS: dict[str, tuple[Callable[..., Any], Callable[[], Any], bool]] = {
    "float32": (NETWORK.apply, contextlib.nullcontext, False),
    "by hand": (NETWORK.apply, with_islands, True),
    "JMP": (NETWORK.apply, with_jmp, False),
    "MPX": (NETWORK.apply, with_islands, False),
    "autocast": (jmpx.autocast(NETWORK.apply), contextlib.nullcontext, False),
    "autocast, save": (SAVED, contextlib.nullcontext, False),
}


def resnet_step(way: str) -> Step:
    """Returns a step whose `scaling` is the averages, and for MPX the loss scale, too."""
    apply, around, casts = RESNET_WAYS[way]

    def loss_of(params: PyTree, images: jax.Array, state: PyTree, labels: jax.Array) -> WITH_STATE:
        with around():
            logits, state = apply(params, state, None, images)
        return cross_entropy(logits, labels), state

    def plain(state: PyTree, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: PyTree) -> WITH_STATE:
            inputs = (cast_by_hand(params), images.astype(LOW)) if casts else (params, images)
            return loss_of(*inputs, averages, labels)

        params, opt_state, averages = state
        (loss, averages), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (*steps.update(grads, params, opt_state), averages), loss

    def with_mpx(state: PyTree, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: PyTree, images: jax.Array, labels: jax.Array) -> WITH_STATE:
            return loss_of(params, images, averages, labels)

        params, opt_state, (scaling, averages) = state
        mpx.set_half_precision_datatype(jnp.dtype(LOW))  # global in MPX, read while tracing
        grad_fn = mpx.filter_value_and_grad(loss_fn, scaling, has_aux=True)
        (loss, averages), scaling, finite, grads = grad_fn(params, images, labels)
        new = mpx.optimizer_update(params, steps.ADAM, opt_state, grads, finite)
        return (*new, (scaling, averages)), loss

    if way != "MPX":
        return Step(plain, ())
    import mpx

    return Step(with_mpx, mpx.DynamicLossScaling(jnp.float32(1), jnp.float32(1)))


# --- Either, on one chip or on eight ---


def make(point: Point, size: int, small: bool) -> tuple[Step, PyTree, PyTree]:
    """Returns a step, and the shapes of its state and of its batch."""
    if point.model == "resnet":
        step, side = resnet_step(point.way), 64 if small else 224
        images = jax.ShapeDtypeStruct((size, side, side, 3), jnp.float32)
        params, averages = jax.eval_shape(NETWORK.init, jax.random.key(0), images)
        scaling = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, step.scaling))
        scaling = (scaling, averages) if scaling else averages
        state = params, jax.eval_shape(step.optimizer.init, params), scaling
        return step, state, (images, jax.ShapeDtypeStruct((size,), jnp.int32))
    model = transformer(point, small)
    if point.way.startswith("autocast"):
        model = dataclasses.replace(model, islands=False)
    scales: Any = {"scales": True} if point.dtype == "float16" else {}
    step = TRANSFORMER_WAYS[point.way][0](model, point.dtype, **scales)
    return step, *abstract(step, model, size)


def abstract(step: Step, model: Transformer, size: int) -> tuple[PyTree, Any]:
    """Returns the shapes of the state that a step begins with, and of a batch."""
    params, batch = shapes(model, size)
    # MPX's loss scale counts with a plain number.
    scaling = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, step.scaling))
    return (params, jax.eval_shape(step.optimizer.init, params), scaling), batch


def shapes(model: Transformer, size: int) -> tuple[PyTree, Any]:
    """Returns those of the parameters and of a batch, which take neither time nor memory."""
    rng = Zeros(np.random.PCG64())
    return jax.eval_shape(lambda: model.init(rng)), jax.eval_shape(lambda: model.batch(rng, size))


def share(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Returns the sharding over the longest axis that all chips can share, as FSDP stores it."""
    axes = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
    longest = max(axes, key=lambda axis: leaf.shape[axis], default=None)
    names = ["data" if axis == longest else None for axis in range(leaf.ndim)]
    return NamedSharding(mesh, P(*names))


def trace(point: Point, chips: list[Any], small: bool = False) -> Any:
    """Traces a step that donates its state, for the first or for all of some chips."""
    if small:
        point = point._replace(layers=2, batch=2)
    size = point.batch * (1 if point.chips == "one" else len(chips))
    step, state, batch = make(point, size, small)
    leaves, structure = jax.tree.flatten(state)  # JMP's loss scale cannot hold a sharding
    if point.chips == "one":
        rows = whole = jax.sharding.SingleDeviceSharding(chips[0])
        places = [whole for _ in leaves]
    else:
        mesh = Mesh(np.array(chips), ("data",))
        whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        place = partial(share, mesh) if point.chips == "fsdp" else lambda _: whole
        places = [*map(place, leaves)]
    leaves, batch = tpu.described((leaves, batch), (places, jax.tree.map(lambda _: rows, batch)))
    precision = "highest" if point.way.endswith("highest") else None
    state, outputs = structure.unflatten(leaves), (places, whole)
    return steps.traced(step, state, batch, precision, outputs).step
