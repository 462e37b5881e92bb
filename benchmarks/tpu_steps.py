"""The train steps that `tpu_compile.py` compiles: which model, in which way, on how many chips.

Transformers take the steps of `steps.py`. The ResNet is Haiku's, which keeps the averages of its
BatchNorms as state, so its steps are here. In those by hand, of MPX and of the gradient functions,
BatchNorm is a float32 island; a Haiku user of JMP sets its policy, and one of a policy map gives it
a rule. A model under autocast has no island.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import fsdp
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import steps
from models import LanguageModel, Transformer, ViT, cross_entropy
from steps import Step

import jmpx

PyTree = Any
LOW = "bfloat16"  # TPUs of this kind have no float16


class Point(NamedTuple):
    """One program. The batch is that of one chip."""

    model: str
    way: str
    layers: int
    batch: int
    scanned: bool = False
    unroll: int = 1
    chips: str = "one"  # or eight: "data" splits the batch, "fsdp" the state, too


# Transformers.


def by_modules(model: Transformer, dtype: str, optimizer: steps.Optimizer) -> Step:
    """The transformer as an Equinox module, which casts; the islands stay as they are."""
    policy = f"by=modules,compute={dtype},output=float32"

    def loss_fn(network: fsdp.Network, x: jax.Array, labels: jax.Array) -> jax.Array:
        return network(x, labels)

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, scaling = state
        grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, policy=policy)
        loss, scaling, _, grads = grad_fn(fsdp.Network(params, model), *batch)
        return (*steps.update(optimizer, grads.params, params, opt_state), scaling), loss

    return Step(run, jmpx.NoOpLossScale(), optimizer)


def float32(model: Transformer, dtype: str, optimizer: steps.Optimizer) -> Step:
    return steps.handwritten(model, "float32", optimizer)


autocast = steps.autocast_style
CARRY = "; op.scan: bfloat16"  # the dtype in which a scan hands activations on
TRANSFORMER_WAYS: dict[str, tuple[Callable[..., Step], bool]] = {  # and whether blocks are marked
    "float32": (float32, False),
    "float32, highest": (float32, False),
    "by hand": (steps.handwritten, False),
    "by hand, marked blocks": (steps.handwritten, True),
    "JMP": (partial(steps.jmp_style, library="jmp"), False),
    "MPX": (steps.mpx_style, False),
    "module policies": (by_modules, False),
    "gradient functions": (steps.jmpx_style, False),
    "autocast": (autocast, False),
    "autocast, marked blocks": (autocast, True),
    "autocast, save": (partial(autocast, save="products"), False),
    "autocast, save, with the loss": (partial(autocast, save="products", with_loss=True), False),
    "autocast, marked blocks, bfloat16 carry": (partial(autocast, rules=CARRY), True),
    "autocast, save, bfloat16 carry": (partial(autocast, rules=CARRY, save="products"), False),
}


def transformer(point: Point, small: bool) -> Transformer:
    """Returns the model of a point; a small one has one layer of a tenth of the width."""
    _, marked = TRANSFORMER_WAYS[point.way]
    form: Any = {"scanned": point.scanned, "unroll": point.unroll, "checkpointed": marked}
    width: Any = {"layers": point.layers, "width": 768, "heads": 12, "hidden": 3072}
    if small:
        width |= {"width": 128, "heads": 2, "hidden": 256}
    if point.model == "vit":
        return ViT(**form, **width, classes=1000, image=32 if small else 224, patch=16)
    sizes: Any = {"classes": 256} if small or point.model == "byte_model" else {}
    sizes |= {"length": 64} if small else {}
    return LanguageModel(**form, **width, **sizes)


# The ResNet.


def resnet(images: jax.Array) -> jax.Array:
    return hk.nets.ResNet50(1000)(images, is_training=True)


NETWORK = hk.transform_with_state(resnet)
WITH_STATE = tuple[jax.Array, PyTree]  # a loss, and the averages


def is_norm(module: str) -> bool:
    return "batchnorm" in module


def island(next_fn: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Runs a BatchNorm in float32: an interceptor of Haiku's methods."""
    if not isinstance(context.module, hk.BatchNorm) or context.method_name != "__call__":
        return next_fn(*args, **kwargs)
    x, *rest = args
    return next_fn(x.astype(jnp.float32), *rest, **kwargs).astype(x.dtype)


def loss_of(
    apply: Callable[..., Any], around: Callable[[], Any] = contextlib.nullcontext
) -> Callable[..., WITH_STATE]:
    def loss_fn(params: PyTree, state: PyTree, images: jax.Array, labels: jax.Array) -> WITH_STATE:
        with around():
            logits, state = apply(params, state, None, images)
        return cross_entropy(logits, labels), state

    return loss_fn


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
    keep = lambda module, name, x: x if is_norm(module) else x.astype(LOW)  # noqa: E731
    return hk.data_structures.map(keep, params)


def plain_gradients(loss_fn: Callable[..., WITH_STATE], cast: Callable[..., Any]) -> Any:
    def run(scaling: Any, params: PyTree, state: PyTree, *batch: jax.Array) -> Any:
        def cast_loss(params: PyTree) -> WITH_STATE:
            params, images = cast(params, batch[0])
            return loss_fn(params, state, images, batch[1])

        (loss, state), grads = jax.value_and_grad(cast_loss, has_aux=True)(params)
        return loss, state, scaling, grads, True

    return run


def mpx_gradients(scaling: Any, params: PyTree, state: PyTree, *batch: jax.Array) -> Any:
    import mpx

    mpx.set_half_precision_datatype(jnp.dtype(LOW))  # global in MPX, read while tracing
    loss_fn = loss_of(NETWORK.apply, with_islands)

    def of_params(params: PyTree, images: jax.Array, labels: jax.Array) -> WITH_STATE:
        return loss_fn(params, state, images, labels)

    grad_fn = mpx.filter_value_and_grad(of_params, scaling, has_aux=True)
    (loss, new), scaling, finite, grads = grad_fn(params, *batch)
    return loss, new, scaling, grads, finite


def jmpx_gradients(scaling: Any, params: PyTree, state: PyTree, *batch: jax.Array) -> Any:
    loss_fn = loss_of(NETWORK.apply, with_islands)

    def of_params(params: PyTree, images: jax.Array, labels: jax.Array) -> WITH_STATE:
        return loss_fn(params, state, images, labels)

    policy = f"compute={LOW}"
    grad_fn = jmpx.filter_value_and_grad(of_params, scaling, has_aux=True, policy=policy)
    (loss, new), scaling, finite, grads = grad_fn(params, *batch)
    return loss, new, scaling, grads, finite


def uncast(*args: Any) -> Any:
    return args


RESNET_WAYS: dict[str, Callable[[], Any]] = {  # gradients of a loss with state
    "float32": lambda: plain_gradients(loss_of(NETWORK.apply), uncast),
    "by hand": lambda: plain_gradients(
        loss_of(NETWORK.apply, with_islands),
        lambda params, images: (cast_by_hand(params), images.astype(LOW)),
    ),
    "JMP": lambda: plain_gradients(loss_of(NETWORK.apply, with_jmp), uncast),
    "MPX": lambda: mpx_gradients,
    "module policies": lambda: plain_gradients(
        loss_of(jmpx.apply_policy(NETWORK.apply, f"compute={LOW},output=float32; BatchNorm: full")),
        uncast,
    ),
    "gradient functions": lambda: jmpx_gradients,
    "autocast": lambda: plain_gradients(loss_of(jmpx.autocast(NETWORK.apply)), uncast),
    "autocast, save": lambda: plain_gradients(
        loss_of(jmpx.autocast(NETWORK.apply, save="products")), uncast
    ),
}


def update_always(params: PyTree, optimizer: Any, opt_state: PyTree, grads: PyTree, _: Any) -> Any:
    return steps.update(optimizer, grads, params, opt_state)


def resnet_step(way: str) -> Step:
    """Returns a step whose parameters are those of Haiku and its state."""
    gradients = RESNET_WAYS[way]()
    scaling: Any = jmpx.NoOpLossScale()
    optimizer_update: Callable[..., Any] = update_always
    if way == "MPX":
        import mpx

        scaling = mpx.DynamicLossScaling(jnp.float32(1), jnp.float32(1))
        optimizer_update = mpx.optimizer_update

    def run(state: PyTree, *batch: jax.Array) -> Any:
        params, opt_state, (scaling, averages) = state
        loss, averages, scaling, grads, finite = gradients(scaling, params, averages, *batch)
        new = optimizer_update(params, steps.ADAM, opt_state, grads, finite)
        return (*new, (scaling, averages)), loss

    return Step(run, scaling, steps.ADAM)


# Either, on one chip or on eight.


class Inputs(NamedTuple):
    """The state and the batch of a step, as shapes."""

    state: PyTree
    batch: PyTree


def inputs(point: Point, step: Step, size: int, small: bool) -> Inputs:
    if point.model == "resnet":
        side = 64 if small else 224
        images = jax.ShapeDtypeStruct((size, side, side, 3), jnp.float32)
        params, averages = jax.eval_shape(NETWORK.init, jax.random.key(0), images)
        labels = jax.ShapeDtypeStruct((size,), jnp.int32)
        batch = images, labels
    else:
        model, rng = transformer(point, small), np.random.default_rng(0)
        params = jax.eval_shape(lambda: model.init(rng))
        averages, batch = {}, jax.eval_shape(lambda: model.batch(rng, size))
    opt_state = jax.eval_shape(step.optimizer.init, params)
    # MPX's loss scale counts with a plain number.
    scaling = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, step.scaling))
    if point.model == "resnet":
        scaling = scaling, averages
    return Inputs((params, opt_state, scaling), batch)


def make(point: Point, small: bool = False) -> Step:
    if point.model == "resnet":
        return resnet_step(point.way)
    way, _ = TRANSFORMER_WAYS[point.way]
    model = transformer(point, small)
    if point.way.startswith("autocast"):
        model = dataclasses.replace(model, islands=False)
    return way(model, LOW, steps.ADAM)


def split(leaf: Any, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Returns a sharding over the longest axis that the chips can share evenly."""
    axes = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
    chosen = max(axes, key=lambda axis: leaf.shape[axis], default=None)
    names = ["data" if axis == chosen else None for axis in range(leaf.ndim)]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))


def trace(point: Point, chips: list[Any], small: bool = False) -> Any:
    """Traces a step that donates its state, for the first or for all of some chips."""
    step = make(point, small)
    given = inputs(point, step, point.batch * (1 if point.chips == "one" else len(chips)), small)
    leaves, structure = jax.tree.flatten(given.state)
    if point.chips == "one":
        chip = jax.sharding.SingleDeviceSharding(chips[0])
        places, rows, whole = [chip] * len(leaves), chip, chip
    else:
        mesh = jax.sharding.Mesh(np.array(chips), ("data",))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        places = [split(x, mesh) if point.chips == "fsdp" else whole for x in leaves]

    def train_step(leaves: list[jax.Array], *batch: jax.Array) -> Any:
        state, loss = step.run(structure.unflatten(leaves), *batch)
        return jax.tree.leaves(state), loss

    described = fsdp.sharded((leaves, given.batch), (places, tuple(rows for _ in given.batch)))
    jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(places, whole))
    with jax.default_matmul_precision("highest" if point.way.endswith("highest") else None):
        return jitted.trace(described[0], *described[1])
