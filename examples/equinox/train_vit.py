"""Trains the vision transformer of `vit.py` on small images, in the precision that flags set.

    python examples/equinox/train_vit.py "--mp_policy=c=bf16; */head: full"

The policy map sets the dtype of each part: here products of the model run in bfloat16, except for
those of its head, and norms and the softmax compute in float32, as they do without a rule. The
digits come with scikit-learn. CIFAR is read from the archive that its authors publish for Python;
you download it into a directory:

    python examples/equinox/train_vit.py --dataset=cifar10 --data_dir=DIRECTORY --patch=4 \
        --width=192 --depth=6 --batch_size=256 --epochs=30

Each batch is split over all devices that JAX finds. One string sets the dtypes of parameters, of
computation (`c`) and of the sum of gradients over devices (`r`), and the precision of products in
float32 (`m`):

    python examples/equinox/train_vit.py --mp_loss_scale=dynamic,period=500 \
        "--mp_policy=c=f16,r=bf16; */head: c=f32,m=highest"

`--audit` trains nothing, and prints which parts of the train step run in which dtype. So does
`python -m jmpx audit`; `ranges` and `first-nonfinite` take `train_vit.py:make_arrays`:

    python examples/equinox/train_vit.py --audit
    python -m jmpx audit examples/equinox/train_vit.py:make -- --depth=6

`choose` finds the parts that need float32. For gradients within 0.5 % of float32's, that is the
head alone, `c=bf16,save=products; */head: full`, with 17 of 47.5 MiB on a TPU v5e:

    python -m jmpx choose examples/equinox/train_vit.py:make_losses --error 0.005 --chip v5e
"""

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from history import History, define_plot, draw, end_if_diverged
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm
from vit import VisionTransformer

import jmpx
import jmpx.flags

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
DEFAULT_POLICY = "c=bf16; */head: full"
WARMUP_SHARE = 0.1
WEIGHT_DECAY = 0.05
LARGEST_NORM = 1.0

MP = jmpx.flags.define_mp_flags(default_policy=DEFAULT_POLICY)
SEED = flags.DEFINE_integer("seed", 0, "Seeds initialization and batches.", lower_bound=0)
EPOCHS = flags.DEFINE_integer("epochs", 15, "How many times to go over the data.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Images in a step.", lower_bound=1)
ACCUMULATE = flags.DEFINE_integer(
    "accumulate", 1, "How many micro-batches a batch is split into.", lower_bound=1
)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "The rate after warm-up.")
WIDTH = flags.DEFINE_integer("width", 64, "Features of a token.", lower_bound=1)
DEPTH = flags.DEFINE_integer("depth", 4, "Blocks of attention and MLP.", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", 4, "Heads of attention; they divide --width.", 1)
PATCH = flags.DEFINE_integer("patch", 2, "The side of a patch; it divides the image's.", 1)
DATASET = flags.DEFINE_enum("dataset", "digits", datasets.NAMES, "Which images to learn.")
DATA_DIR = flags.DEFINE_string("data_dir", None, "The directory that holds a CIFAR archive.")
PLOT = define_plot()
AUDIT = flags.DEFINE_bool("audit", False, "Print the audit of the train step, and train nothing.")


def runs_here(policy_map: Any) -> bool:
    """Whether a policy map stores weights in float32, and computes and sums in `DTYPES`."""
    policy_map = jmpx.get_policy_map(policy_map)
    default, rules = policy_map.default, policy_map.rules
    params = {default.param_dtype, *(rule.params for rule in rules)}
    others = {default.compute_dtype, default.output_dtype, default.reduce_dtype}
    others.update(dtype for rule in rules for dtype in (rule.compute, rule.output))
    return params <= {jnp.float32, None} and others <= {*DTYPES, None}


flags.register_validator(
    "mp_policy",
    runs_here,
    "this example keeps float32 weights, and computes in float32, bfloat16 and float16 only",
)
flags.register_validator(
    "learning_rate", lambda rate: 0 < rate < math.inf, "must be a positive number"
)
flags.register_multi_flags_validator(
    ["heads", "width"],
    lambda values: values["width"] % values["heads"] == 0,
    "--heads must divide --width",
)
flags.register_multi_flags_validator(
    ["patch", "dataset"],
    lambda values: datasets.side_of(values["dataset"]) % values["patch"] == 0,
    "--patch must divide the side of the images: 8 pixels for digits, 32 for CIFAR",
)
flags.register_multi_flags_validator(
    ["accumulate", "batch_size"],
    lambda values: values["batch_size"] % values["accumulate"] == 0,
    "--accumulate must divide --batch_size",
)
flags.register_multi_flags_validator(
    ["dataset", "data_dir"],
    lambda values: (
        values["dataset"] == "digits"
        or values["data_dir"] is not None
        and Path(values["data_dir"], datasets.ARCHIVES[values["dataset"]].file).is_file()
    ),
    "--data_dir must be a directory that holds the archive of --dataset: "
    + " or ".join(archive.file for archive in datasets.ARCHIVES.values()),
)


class TrainState(NamedTuple):
    model: VisionTransformer  # the master weights, float32
    opt_state: optax.OptState
    loss_scale: jmpx.LossScale


def make_optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """Returns AdamW with clipping, warm-up and cosine decay; its gradients are unscaled already."""
    warmup = max(1, int(WARMUP_SHARE * steps))
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / warmup, learning_rate, warmup, max(steps, warmup + 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(LARGEST_NORM),
        optax.adamw(schedule, weight_decay=WEIGHT_DECAY, mask=is_matrix),
    )


def is_matrix(params: Any) -> Any:
    """Returns True for each parameter that decays: biases and the scales of norms do not."""
    return jax.tree.map(lambda param: param.ndim > 1, params)


def logits_of(model: VisionTransformer, images: Any) -> jax.Array:
    """Returns float32 logits [batch, classes] of images [batch, side, side, channels]."""
    return jmpx.cast_to_full(jax.vmap(model)(images))


def loss_fn(model: VisionTransformer, batch: datasets.Data) -> jax.Array:
    logits = logits_of(model, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


@functools.cache
def all_devices() -> Mesh:
    return Mesh(jax.devices(), ("data",))


def make_step_of_device(
    policy_map: Any,
    optimizer: optax.GradientTransformation,
    skip_nonfinite: bool,
    microbatches: int,
    axis_name: str | None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the train step of one device: `(state, batch) -> (state, metrics)`."""

    def step(state: TrainState, batch: datasets.Data) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, loss_scale, grads_finite, grads = jmpx.value_and_grad(
            loss_fn,
            state.loss_scale,
            policy=policy_map,
            over=None if axis_name is None else jmpx.Over(axis_name),
            batch=jmpx.Batch(microbatches=microbatches),
        )(state.model, datasets.prepared(batch))
        model, opt_state = jmpx.optimizer_update(
            state.model, optimizer, state.opt_state, grads, grads_finite | (not skip_nonfinite)
        )
        metrics = {"loss": loss, **jmpx.metrics(opt_state, loss_scale)}
        return TrainState(model, opt_state, loss_scale), metrics

    return step


def make_step(
    policy_map: Any,
    optimizer: optax.GradientTransformation,
    skip_nonfinite: bool,
    microbatches: int = 1,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the jitted train step: `(state, batch) -> (state, metrics)`.

    Each device gets its share of the images, and goes through it in micro-batches. It sums their
    gradients in float32. Then the gradients are averaged over devices, once, in the dtype that the
    policy map says, and one check decides whether the step is taken and how the loss scale changes.
    """
    step = jax.shard_map(
        make_step_of_device(policy_map, optimizer, skip_nonfinite, microbatches, "data"),
        mesh=all_devices(),
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    return jax.jit(step)


@functools.partial(jax.jit, static_argnames="policy_map")
def count_correct(model: VisionTransformer, batch: datasets.Data, policy_map: Any) -> jax.Array:
    logits = jmpx.apply_policy(logits_of, policy_map)(model, datasets.prepared(batch).images)
    return (logits.argmax(axis=-1) == batch.labels).sum()


def accuracy_of(
    model: VisionTransformer, data: datasets.Data, size: int, policy_map: Any, sharding: Any
) -> float:
    """Returns the share of images whose label the model finds, computed in batches of `size`."""
    missing = -len(data.labels) % size
    images = np.pad(data.images, ((0, missing), (0, 0), (0, 0), (0, 0)))
    labels = np.pad(data.labels, (0, missing), constant_values=-1)  # -1: never correct
    correct = 0
    for start in range(0, len(labels), size):
        batch = datasets.Data(images[start : start + size], labels[start : start + size])
        correct += int(count_correct(model, jax.device_put(batch, sharding), policy_map))
    return correct / len(data.labels)


def make_model(image_shape: tuple[int, ...]) -> VisionTransformer:
    return VisionTransformer(
        image_shape,
        datasets.classes_of(DATASET.value),
        patch=PATCH.value,
        width=WIDTH.value,
        depth=DEPTH.value,
        heads=HEADS.value,
        key=jax.random.key(SEED.value),
    )


def make_state(optimizer: optax.GradientTransformation, image_shape: tuple[int, ...]) -> TrainState:
    model = make_model(image_shape)
    params = eqx.filter(model, eqx.is_inexact_array)
    return TrainState(model, optimizer.init(params), MP.loss_scale())


def make_step_optimizer(steps: int) -> optax.GradientTransformation:
    # It counts the steps that are skipped in a row.
    return jmpx.skip_nonfinite(make_optimizer(steps, LEARNING_RATE.value))


def make() -> tuple[Callable[..., Any], tuple[Any, datasets.Data]]:
    """Makes the train step and the shapes of its arguments, for `python -m jmpx audit`."""
    check_batch_size(BATCH_SIZE.value)
    optimizer = make_step_optimizer(1)
    image_shape = datasets.shape_of(DATASET.value)
    images: Any = jax.ShapeDtypeStruct((BATCH_SIZE.value, *image_shape), jnp.uint8)
    labels: Any = jax.ShapeDtypeStruct((BATCH_SIZE.value,), jnp.int32)
    state = jax.eval_shape(functools.partial(make_state, optimizer, image_shape))
    step = make_step(MP.policy_map, optimizer, MP.skip_nonfinite, ACCUMULATE.value)
    return step, (state, datasets.Data(images, labels))


def make_arrays() -> tuple[Callable[..., Any], tuple[TrainState, datasets.Data]]:
    """Makes a step and its first arguments, for `ranges` and `first-nonfinite`.

    The step is that of one device, because these two cannot look inside of `jax.shard_map`.
    """
    train_data, _ = datasets.load(DATASET.value, DATA_DIR.value)
    optimizer = make_step_optimizer(1)
    batch = next(datasets.batches(train_data, BATCH_SIZE.value, np.random.default_rng(SEED.value)))
    state = make_state(optimizer, batch.images.shape[1:])
    step = make_step_of_device(
        MP.policy_map, optimizer, MP.skip_nonfinite, ACCUMULATE.value, axis_name=None
    )
    return step, (state, batch)


def make_losses() -> tuple[Any, list[tuple[Any, ...]], Any]:
    """Makes the loss, batches of its arguments, and steps, for `python -m jmpx choose`."""
    optimizer, image_shape = make_step_optimizer(1), datasets.shape_of(DATASET.value)
    state = jax.eval_shape(functools.partial(make_state, optimizer, image_shape))
    images: Any = jax.ShapeDtypeStruct((BATCH_SIZE.value, *image_shape), jnp.uint8)
    labels: Any = jax.ShapeDtypeStruct((BATCH_SIZE.value,), jnp.int32)

    def step_of(policy: Any) -> tuple[Any, tuple[Any, ...]]:
        step = make_step_of_device(policy, optimizer, MP.skip_nonfinite, 1, axis_name=None)
        return jax.jit(step, donate_argnums=0), (state, datasets.Data(images, labels))

    train_data, _ = datasets.load(DATASET.value, DATA_DIR.value)
    data = datasets.batches(train_data, 16, np.random.default_rng(SEED.value))
    model = make_model(image_shape)
    return loss_fn, [(model, datasets.prepared(next(data))) for _ in range(8)], step_of


def check_batch_size(images: int) -> None:
    """Ends the program if the batches do not fit the data or the devices."""
    if BATCH_SIZE.value > images:
        sys.exit(f"--batch_size={BATCH_SIZE.value} must not exceed the {images} training images")
    if BATCH_SIZE.value // ACCUMULATE.value % jax.device_count():
        sys.exit(
            f"--batch_size={BATCH_SIZE.value} must be a multiple of --accumulate times the "
            f"{jax.device_count()} devices"
        )


def train(history: History, train_data: datasets.Data, test_data: datasets.Data) -> None:
    """Trains as the flags say, and prints a line an epoch."""
    rng = np.random.default_rng(SEED.value)
    steps_per_epoch = len(train_data.labels) // BATCH_SIZE.value
    steps = EPOCHS.value * steps_per_epoch

    sharded = NamedSharding(all_devices(), PartitionSpec("data"))
    replicated = NamedSharding(all_devices(), PartitionSpec())

    optimizer = make_step_optimizer(steps)
    state = jax.device_put(make_state(optimizer, train_data.images.shape[1:]), replicated)
    step = make_step(MP.policy_map, optimizer, MP.skip_nonfinite, ACCUMULATE.value)

    with tqdm(total=steps, unit="step", dynamic_ncols=True, leave=False) as progress:
        for epoch in range(1, EPOCHS.value + 1):
            for batch in datasets.batches(train_data, BATCH_SIZE.value, rng):
                start = time.perf_counter()
                history.scales.append(float(state.loss_scale.loss_scale))
                state, metrics = step(state, jax.device_put(batch, sharded))
                metrics = jax.device_get(metrics)
                if metrics["consecutive_skipped"]:
                    history.skipped.append(len(history.losses))
                history.losses.append(float(metrics["loss"]))
                history.seconds.append(time.perf_counter() - start)
                end_if_diverged(MP, state.opt_state, state.loss_scale)
                progress.set_postfix(metrics, refresh=False)
                progress.update()
            history.accuracies.append(
                accuracy_of(state.model, test_data, BATCH_SIZE.value, MP.policy_map, sharded)
            )
            progress.write(
                f"epoch {epoch:2d}  loss {np.mean(history.losses[-steps_per_epoch:]):.4f}  "
                f"test accuracy {history.accuracies[-1]:.2%}  "
                f"loss scale {float(state.loss_scale.loss_scale):.10g}  "
                f"skipped steps {len(history.skipped)}"
            )


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")
    if AUDIT.value:
        step, args = make()
        print(jmpx.inspect.audit(step)(*args))
        return
    try:
        train_data, test_data = datasets.load(DATASET.value, DATA_DIR.value)
    except ValueError as error:
        sys.exit(str(error))
    check_batch_size(len(train_data.labels))
    history = History()
    train(history, train_data, test_data)
    # The first step includes compilation.
    milliseconds = 1000 * statistics.median(history.seconds[1:] or history.seconds)
    print(
        f"test accuracy {history.accuracies[-1]:.2%}, {milliseconds:.1f} ms a step "
        f"({MP.mixed_precision()})"
    )
    if PLOT.value is not None:
        draw(history, f"{DATASET.value}, {MP.policy_map}", PLOT.value)
        print(f"wrote {PLOT.value}")


if __name__ == "__main__":
    app.run(main)
