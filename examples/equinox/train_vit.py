"""Trains a vision transformer on small images, in the precision that flags ask for.

    python examples/equinox/train_vit.py "--mp_policy=c=bf16,o=f32; LayerNorm: full; Softmax: full"

The policy map says which parts compute in what: the default bfloat16, with float32 islands. The
digits come with scikit-learn; CIFAR is read from its archive for Python, where it lies:

    python examples/equinox/train_vit.py --dataset=cifar10 --data_dir=DIRECTORY --patch=4 \
        --width=192 --depth=6 --batch_size=256 --epochs=30

All devices that JAX sees share each batch.
"""

import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

import jmpx
import jmpx.equinox
import jmpx.flags

PLOT_FORMATS = (".pdf", ".png", ".svg")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
DEFAULT_POLICY = "c=bf16,o=f32; LayerNorm: full; Softmax: full; */head: c=f32,o=f32"
WARMUP_SHARE = 0.1
WEIGHT_DECAY = 0.05
LARGEST_NORM = 1.0

MP = jmpx.flags.define_mp_flags(default_policy=DEFAULT_POLICY)
SEED = flags.DEFINE_integer("seed", 0, "Seeds initialization and batches.", lower_bound=0)
EPOCHS = flags.DEFINE_integer("epochs", 15, "How many times to go over the data.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Images in a step.", lower_bound=1)
ACCUMULATE = flags.DEFINE_integer(
    "accumulate", 1, "How many micro-batches a step's batch is taken in.", lower_bound=1
)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "The rate after warm-up.")
WIDTH = flags.DEFINE_integer("width", 64, "Features of a token.", lower_bound=1)
DEPTH = flags.DEFINE_integer("depth", 4, "Blocks of attention and MLP.", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", 4, "Heads of attention; they divide --width.", 1)
PATCH = flags.DEFINE_integer("patch", 2, "The side of a patch; it divides the image's.", 1)
DATASET = flags.DEFINE_enum("dataset", "digits", datasets.NAMES, "Which images to learn.")
DATA_DIR = flags.DEFINE_string("data_dir", None, "The directory that holds a CIFAR archive.")
PLOT = flags.DEFINE_string("plot", None, "Where to draw how the training went: a .png file.")


def runs_here(policy_map: Any) -> bool:
    """Whether all weights are float32, and all else of a policy map is in `DTYPES`."""
    policy_map = jmpx.get_policy_map(policy_map)
    default, rules = policy_map.default, policy_map.rules
    params = {default.param_dtype, *(rule.params for rule in rules)}
    others = {default.compute_dtype, default.output_dtype}
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
flags.register_validator(
    "plot",
    lambda path: (
        path is None or Path(path).suffix in PLOT_FORMATS and os.access(Path(path).parent, os.W_OK)
    ),
    f"must be a file ending in {', '.join(PLOT_FORMATS)} in a directory that can be written to",
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


class Softmax(eqx.Module):
    """A softmax over the last axis: a module, so that a policy map can name it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x, axis=-1)


class Attention(eqx.Module):
    """Multi-head self-attention over tokens of shape [tokens, width]."""

    heads: int = eqx.field(static=True)
    qkv: eqx.nn.Linear
    softmax: Softmax
    out: eqx.nn.Linear

    def __init__(self, width: int, heads: int, key: jax.Array):
        qkv_key, out_key = jax.random.split(key)
        self.heads = heads
        self.qkv = eqx.nn.Linear(width, 3 * width, key=qkv_key)
        self.softmax = Softmax()
        self.out = eqx.nn.Linear(width, width, key=out_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens, width = x.shape
        qkv = jax.vmap(self.qkv)(x).reshape(tokens, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, part] for part in range(3))
        scores = jnp.einsum("thd,shd->hts", q, k) * (width // self.heads) ** -0.5
        mixed = jnp.einsum("hts,shd->thd", self.softmax(scores), v)
        return jax.vmap(self.out)(mixed.reshape(tokens, width))


class Mlp(eqx.Module):
    """Two layers with a GELU between them, on one token."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(width, 4 * width, key=up_key)
        self.down = eqx.nn.Linear(4 * width, width, key=down_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Block(eqx.Module):
    """Attention and an MLP, each beside a shortcut and behind a norm."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: Mlp

    def __init__(self, width: int, heads: int, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = Attention(width, heads, attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(jax.vmap(self.attention_norm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class VisionTransformer(eqx.Module):
    """Logits of shape [classes] for one image of shape [side, side, channels]."""

    patch: int = eqx.field(static=True)
    embedding: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self,
        image_shape: tuple[int, ...],
        classes: int,
        *,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        key: jax.Array,
    ):
        embedding_key, positions_key, head_key, *block_keys = jax.random.split(key, 3 + depth)
        side, _, channels = image_shape
        self.patch = patch
        self.embedding = eqx.nn.Linear(patch * patch * channels, width, key=embedding_key)
        self.positions = 0.5 * jax.random.normal(positions_key, ((side // patch) ** 2, width))
        self.blocks = [Block(width, heads, block_key) for block_key in block_keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=head_key)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = jax.vmap(self.embedding)(patches(image, self.patch)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(axis=0))


def patches(image: jax.Array, size: int) -> jax.Array:
    """Cuts an image [side, side, channels] into patches [count, size * size * channels]."""
    side, _, channels = image.shape
    count = side // size
    grid = image.reshape(count, size, count, size, channels).swapaxes(1, 2)
    return grid.reshape(count * count, size * size * channels)


class TrainState(NamedTuple):
    model: VisionTransformer  # the master weights, float32
    opt_state: optax.OptState
    loss_scale: jmpx.LossScale


class History:
    """What each step and each epoch reported."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.skipped: list[int] = []
        self.seconds: list[float] = []
        self.accuracies: list[float] = []


def make_optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine; it clips gradients, which are unscaled by then."""
    warmup = max(1, int(WARMUP_SHARE * steps))
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / warmup, learning_rate, warmup, max(steps, warmup + 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(LARGEST_NORM),
        optax.adamw(schedule, weight_decay=WEIGHT_DECAY, mask=is_matrix),
    )


def is_matrix(params: Any) -> Any:
    """Which parameters decay: not the biases, nor the scales of norms."""
    return jax.tree.map(lambda param: param.ndim > 1, params)


def logits_of(model: VisionTransformer, images: jax.Array, policy_map: Any) -> jax.Array:
    """Returns float32 logits [batch, classes] of uint8 images [batch, side, side, channels]."""
    view = jmpx.equinox.with_policies(model, policy_map)
    return jmpx.cast_to_float32(jax.vmap(view)(images.astype(jnp.float32) / 127.5 - 1))


def make_step(
    policy_map: Any, optimizer: optax.GradientTransformation, skip_nonfinite: bool
) -> Callable[..., tuple[TrainState, jax.Array, jax.Array]]:
    """Returns the jitted train step: `(state, micro_batches) -> (state, loss, grads_finite)`.

    The arrays of `micro_batches` have the shape [micro-batches, images in each, ...]. Their
    gradients are averaged in float32; then one check decides on one step and one loss scale.
    """

    def loss_fn(model: VisionTransformer, batch: datasets.Data) -> jax.Array:
        logits = logits_of(model, batch.images, policy_map)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    @jax.jit
    def step(
        state: TrainState, micro_batches: datasets.Data
    ) -> tuple[TrainState, jax.Array, jax.Array]:
        # The policy map does the casts, inside the model: "full" adds none to them.
        value_and_grad = jmpx.filter_value_and_grad(loss_fn, state.loss_scale, policy="full")

        def add(total: Any, batch: datasets.Data) -> tuple[Any, None]:
            loss, _, _, grads = value_and_grad(state.model, batch)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.model))
        total, _ = jax.lax.scan(add, nothing, micro_batches)
        loss, grads = jax.tree.map(lambda x: x / len(micro_batches.labels), total)
        grads_finite = jmpx.all_finite(grads)
        model, opt_state = jmpx.optimizer_update(
            state.model, optimizer, state.opt_state, grads, grads_finite | (not skip_nonfinite)
        )
        loss_scale = state.loss_scale.adjust(grads_finite)
        return TrainState(model, opt_state, loss_scale), loss, grads_finite

    return step


@functools.partial(jax.jit, static_argnames="policy_map")
def count_correct(model: VisionTransformer, batch: datasets.Data, policy_map: Any) -> jax.Array:
    logits = logits_of(model, batch.images, policy_map)
    return (logits.argmax(axis=-1) == batch.labels).sum()


def batches(data: datasets.Data, size: int, rng: np.random.Generator) -> Iterator[datasets.Data]:
    """Yields the full batches of one epoch, shuffled."""
    order = rng.permutation(len(data.labels))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield datasets.Data(data.images[chosen], data.labels[chosen])


def split(batch: datasets.Data, count: int) -> datasets.Data:
    """Cuts a batch into micro-batches, along a new first axis."""
    return jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), batch)


def accuracy_of(
    model: VisionTransformer, data: datasets.Data, size: int, policy_map: Any, sharding: Any
) -> float:
    """Returns the share of images whose label the model finds, taken in batches of `size`."""
    missing = -len(data.labels) % size
    images = np.pad(data.images, ((0, missing), (0, 0), (0, 0), (0, 0)))
    labels = np.pad(data.labels, (0, missing), constant_values=-1)  # which no logit is the largest
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

    mesh = Mesh(jax.devices(), ("data",))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    micro_sharded = NamedSharding(mesh, PartitionSpec(None, "data"))
    replicated = NamedSharding(mesh, PartitionSpec())

    model = make_model(train_data.images.shape[1:])
    optimizer = make_optimizer(steps, LEARNING_RATE.value)
    state = TrainState(model, optimizer.init(model), MP.loss_scale())
    state = jax.device_put(state, replicated)
    step = make_step(MP.policy_map, optimizer, MP.skip_nonfinite)

    with tqdm(total=steps, unit="step", dynamic_ncols=True, leave=False) as progress:
        for epoch in range(1, EPOCHS.value + 1):
            for batch in batches(train_data, BATCH_SIZE.value, rng):
                start = time.perf_counter()
                history.scales.append(float(state.loss_scale.loss_scale))
                micro_batches = jax.device_put(split(batch, ACCUMULATE.value), micro_sharded)
                state, loss, grads_finite = step(state, micro_batches)
                if not grads_finite and MP.skip_nonfinite:
                    history.skipped.append(len(history.losses))
                history.losses.append(float(loss))
                history.seconds.append(time.perf_counter() - start)
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


def draw(history: History, path: str) -> None:
    """Draws loss, test accuracy and the loss scale's path, with the skipped steps marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 7), layout="constrained")
    loss, accuracy, scale = figure.subplots(3, sharex=True)
    figure.suptitle(f"{DATASET.value}, {MP.policy_map}", fontsize="small", wrap=True)
    steps = np.arange(len(history.losses))
    epoch_ends = np.arange(1, len(history.accuracies) + 1) * len(steps) / len(history.accuracies)

    loss.plot(steps, history.losses, linewidth=1)
    loss.set(ylabel="training loss", yscale="log")
    accuracy.plot(epoch_ends, 100 * np.array(history.accuracies), marker="o", markersize=3)
    accuracy.set(ylabel="test accuracy (%)")
    scale.step(steps, history.scales, where="post", linewidth=1)
    scale.set(ylabel="loss scale", xlabel="step")
    scale.set_yscale("log", base=2)
    if history.skipped:
        skipped_at = [history.scales[step] for step in history.skipped]
        label = f"skipped steps ({len(history.skipped)})"
        scale.plot(history.skipped, skipped_at, "x", color="tab:red", label=label)
        scale.legend()
    for axis in (loss, accuracy, scale):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")
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
        f"({MP.policy_map})"
    )
    if PLOT.value is not None:
        draw(history, PLOT.value)
        print(f"wrote {PLOT.value}")


if __name__ == "__main__":
    app.run(main)
