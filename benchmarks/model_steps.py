"""The train steps that `tpu_compile.py` and `gpu_compile.py` compile: which model, way, chips.

Transformers take the steps of `steps.py`. The ResNet is Haiku's, which keeps the averages of its
BatchNorms as state, so its steps are here. In those by hand and of MPX, BatchNorm is a float32
island; a Haiku user of JMP sets its policy. A model under autocast has no island.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import steps
from models import LanguageModel, Transformer, ViT, cross_entropy
from records import PyTree
from steps import Step

import jmpx

LOW = "bfloat16"  # a TPU v5e has no float16


class Point(NamedTuple):
    """One program. The batch is that of one chip."""

    model: str
    way: str
    layers: int
    batch: int
    scanned: bool = False
    chips: str = "one"  # or "fsdp": all of them share the state and the batch
    dtype: str = LOW  # of transformers; float16 has a dynamic loss scale


# --- Transformers ---


class Network(eqx.Module):
    """The transformer as an Equinox module."""

    params: PyTree
    model: Transformer = eqx.field(static=True)

    def __call__(self, *batch: jax.Array) -> jax.Array:
        return self.model.loss(self.params, *batch)


def by_modules(model: Transformer, dtype: str) -> Step:
    """The transformer as an Equinox module, which casts; the islands stay as they are."""
    loss_fn = lambda network, *batch: network(*batch)  # noqa: E731
    policy = f"by=modules,compute={dtype},output=float32"

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        grad_fn = jmpx.value_and_grad(loss_fn, scaling, policy=policy)
        loss, scaling, _, grads = grad_fn(Network(params, model), *batch)
        return (*steps.update(grads.params, params, opt_state), scaling), loss

    return Step(run, jmpx.NoOpLossScale())


def float32(model: Transformer, dtype: str) -> Step:
    return steps.handwritten(model, "float32")


def under(more: str) -> Callable[..., Step]:
    """Returns a maker of steps whose arguments jmpx casts; the islands stay as they are."""
    policy = "by=arguments,compute={},{}".format
    return lambda model, dtype: steps.jmpx_style(model, dtype, policy=policy(dtype, more))


autocast = steps.autocast_style
FP8, MXFP8 = ({"rules": f"; */mlp: m={word}"} for word in ("fp8", "mxfp8"))
CARRY = "; op.scan: bfloat16"  # the dtype in which a scan hands activations on
MARKED, LOW_SCORES = {"checkpointed": True}, {"scaled_low": True}
NORM_FIRST = {"norm_first": True}  # of ViTs
ALL_DOTS = MARKED | {"saveable": jax.checkpoint_policies.dots_saveable}
# Each way, and the fields of its model.
TRANSFORMER_WAYS: dict[str, tuple[Callable[..., Step], dict[str, Any]]] = {
    "float32": (float32, {}),
    "float32, norm first": (float32, NORM_FIRST),
    "by hand": (steps.handwritten, {}),
    "by hand, low scores": (steps.handwritten, LOW_SCORES),
    "by hand, cond": (partial(steps.handwritten, skip=steps.by_cond), {}),
    "by hand, marked blocks": (steps.handwritten, MARKED),
    "by hand, marked blocks, all dots": (steps.handwritten, ALL_DOTS),
    "by hand, low scores, marked blocks": (steps.handwritten, LOW_SCORES | MARKED),
    "by hand, low scores, norm first": (steps.handwritten, LOW_SCORES | NORM_FIRST),
    "by hand, embedding summed in float32": (steps.handwritten, {"sums_wide": True}),
    "JMP": (steps.jmp_style, {}),
    "MPX": (steps.mpx_style, {}),
    "module policies": (by_modules, {}),
    "gradient functions": (steps.jmpx_style, {}),
    "gradient functions, r=f32": (under("reduce=float32"), {}),
    "arguments, save": (under("save=products"), {}),
    "arguments, save mixed": (under("save=products+mixed"), {}),
    "arguments, save attention": (under("save=products+attention"), {}),
    "gradient functions, where": (partial(steps.jmpx_style, skip_by="where"), {}),
    "gradient functions, cond": (partial(steps.jmpx_style, skip_by="cond"), {}),
    "autocast": (autocast, {}),
    "autocast, marked blocks": (autocast, MARKED),
    "autocast, save": (partial(autocast, save="products"), {}),
    "autocast, save mixed": (partial(autocast, save="products+mixed"), {}),
    "autocast, save attention": (partial(autocast, save="products+attention"), {}),
    "autocast, fp8": (partial(autocast, **FP8), {}),
    "autocast, mxfp8": (partial(autocast, **MXFP8), {}),
    "autocast, save, fp8": (partial(autocast, save="products", **FP8), {}),
    "autocast, save, with the loss": (partial(autocast, save="products", with_loss=True), {}),
    "autocast, marked blocks, bfloat16 carry": (partial(autocast, rules=CARRY), MARKED),
    "autocast, save, bfloat16 carry": (partial(autocast, rules=CARRY, save="products"), {}),
}


# How many tokens there are, and in each text.
TEXTS = {"language_model": (32_000, 512), "byte_model": (256, 512), "long_byte_model": (256, 1024)}


def transformer(point: Point, small: bool) -> Transformer:
    """Returns the model of a point; a small one has layers of a sixth of the width."""
    form: Any = {"scanned": point.scanned, **TRANSFORMER_WAYS[point.way][1]}
    if point.way.startswith("autocast"):
        form["islands"] = False
    width, heads, hidden = (128, 2, 256) if small else (768, 12, 3072)
    form |= {"layers": point.layers, "width": width, "heads": heads, "hidden": hidden}
    if point.model == "vit":
        return ViT(**form, classes=1000, image=32 if small else 224, patch=16)
    classes, length = (256, 64) if small else TEXTS[point.model]
    return LanguageModel(**form, classes=classes, length=length)


# --- The ResNet ---


@hk.transform_with_state
def network(images: jax.Array) -> jax.Array:
    return hk.nets.ResNet50(1000)(images, is_training=True)


def island(next_fn: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Runs a BatchNorm in float32: an interceptor of Haiku's methods."""
    if not isinstance(context.module, hk.BatchNorm) or context.method_name != "__call__":
        return next_fn(*args, **kwargs)
    x, *rest = args
    return next_fn(x.astype(jnp.float32), *rest, **kwargs).astype(x.dtype)


def with_islands(*args: Any) -> Any:
    with hk.intercept_methods(island):
        return network.apply(*args)


def by_hand(params: PyTree, averages: PyTree, rng: Any, images: jax.Array) -> Any:
    keep = lambda module, name, x: x if "batchnorm" in module else x.astype(LOW)  # noqa: E731
    return with_islands(hk.data_structures.map(keep, params), averages, rng, images.astype(LOW))


def with_jmp(*args: Any) -> Any:
    import jmp

    push = hk.mixed_precision.push_policy
    low = jmp.get_policy(f"params=float32,compute={LOW},output=float32")
    norm = jmp.get_policy(f"params=float32,compute=float32,output={LOW}")
    with push(hk.nets.ResNet50, low), push(hk.BatchNorm, norm):
        return network.apply(*args)


RESNET_WAYS: dict[str, Callable[..., Any]] = {  # how each applies the network
    "float32": network.apply,
    "by hand": by_hand,
    "JMP": with_jmp,
    "MPX": with_islands,
    "autocast": jmpx.autocast(network.apply),
    "autocast, save": jmpx.autocast(network.apply, save="products"),
}


def resnet_step(way: str) -> Step:
    """Returns a step whose `scaling` is the averages, and for MPX the loss scale, too."""

    def loss_fn(params: PyTree, images: jax.Array, labels: jax.Array, averages: PyTree) -> Any:
        logits, averages = RESNET_WAYS[way](params, averages, None, images)
        return cross_entropy(logits, labels), averages

    def plain(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, averages = state
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, averages), grads = grad_fn(params, *batch, averages)
        return (*steps.update(grads, params, opt_state), averages), loss

    def with_mpx(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, (scaling, averages) = state
        mpx.set_half_precision_datatype(jnp.dtype(LOW))  # global in MPX, read while tracing
        grad_fn = mpx.filter_value_and_grad(
            partial(loss_fn, averages=averages), scaling, has_aux=True
        )
        (loss, averages), scaling, finite, grads = grad_fn(params, *batch)
        new = mpx.optimizer_update(params, steps.ADAM, opt_state, grads, finite)
        return (*new, (scaling, averages)), loss

    if way != "MPX":
        return Step(plain, ())
    import mpx

    return Step(with_mpx, mpx.DynamicLossScaling(jnp.float32(1), jnp.float32(1)))


# --- Either, on one chip or on all ---


def make(point: Point, size: int, small: bool) -> tuple[Step, PyTree, PyTree]:
    """Returns a step, and the shapes of its state and of its batch."""
    if point.model == "resnet":
        step, side = resnet_step(point.way), 64 if small else 224
        images = jax.ShapeDtypeStruct((size, side, side, 3), jnp.float32)
        params, averages = jax.eval_shape(network.init, jax.random.key(0), images)
        *state, scaling = steps.start(step, params)
        state = *state, (scaling, averages) if scaling else averages
        return step, state, (images, jax.ShapeDtypeStruct((size,), jnp.int32))
    model = transformer(point, small)
    scales: Any = {"scales": True} if point.dtype == "float16" else {}
    step = TRANSFORMER_WAYS[point.way][0](model, point.dtype, **scales)
    params, batch = steps.shapes(model, size)
    return step, steps.start(step, params), batch


def trace(point: Point, chips: list[Any], small: bool = False) -> Any:
    """Traces a step that donates its state, for the first or for all of some chips."""
    if small:
        point = point._replace(layers=2, batch=2)
    chips = chips[:1] if point.chips == "one" else chips
    return steps.traced(*make(point, point.batch * len(chips), small), chips)
