"""Trains a small ResNet on handwritten digits, in the precision that flags set.

    python examples/haiku/train.py --mp_policy=c=bf16
    python examples/haiku/train.py --mp_policy=16-mixed --mp_loss_scale=dynamic,init=2**24
    python examples/haiku/train.py "--mp_policy=by=modules,c=f16; */head: c=f32,m=highest"

The images come with scikit-learn. Beside this file, `plot.py` draws a run, `reports.py` audits the
step, `storage.py` stores 16-bit parameters, `train_distributed.py` trains in several processes.
"""

import functools
import sys
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
import optax
from absl import app, flags
from tqdm import tqdm

import jmpx
import jmpx.flags

MP = jmpx.flags.define_mp_flags()
SEED = flags.DEFINE_integer("seed", 0, "Seeds initialization and batches.", 0)
EPOCHS = flags.DEFINE_integer("epochs", 15, "How many times to go over the data.", 1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Images in a batch.", 1, 1437)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Adam's first; it falls to 0.", 0)


class Data(NamedTuple):
    images: np.ndarray  # float32[n, 8, 8, 1], from 0 to 1
    labels: np.ndarray


class TrainState(NamedTuple):
    params: hk.Params
    model_state: hk.State
    opt_state: optax.OptState
    loss_scale: jmpx.LossScale


class ResNet(hk.Module):
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        conv = functools.partial(hk.Conv2D, with_bias=False)
        norm = lambda x: hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training)  # noqa: E731
        x = jax.nn.relu(norm(conv(16, 3)(x)))
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            shortcut = conv(channels, 1, stride)(x)
            x = jax.nn.relu(norm(conv(channels, 3, stride)(x)))
            x = jax.nn.relu(norm(conv(channels, 3)(x)) + shortcut)
        return hk.Linear(10, name="head")(x.mean(axis=(1, 2)))


network = hk.transform_with_state(lambda images, is_training: ResNet()(images, is_training))


def loss_fn(params: Any, model_state: Any, batch: Data) -> tuple[jax.Array, hk.State]:
    logits, model_state = network.apply(params, model_state, None, batch.images, True)
    labels = jax.nn.one_hot(batch.labels, 10)
    return optax.softmax_cross_entropy(jmpx.cast_to_full(logits), labels).mean(), model_state


@jax.jit
def accuracy(state: TrainState, data: Data) -> jax.Array:
    apply = jmpx.apply_policy(network.apply, MP.policy_map, uncast=1)
    logits, _ = apply(state.params, state.model_state, None, data.images, False)
    return (logits.argmax(axis=-1) == data.labels).mean()


def make_adam(data: Data) -> optax.GradientTransformation:
    steps = EPOCHS.value * (len(data.labels) // BATCH_SIZE.value)
    return optax.adam(optax.cosine_decay_schedule(LEARNING_RATE.value, steps))


def make_state(optimizer: optax.GradientTransformation, images: Any) -> TrainState:
    if MP.policy_map.way == "modules":  # By operations, statistics are in float32 anyway.
        low = MP.policy_map.default.compute_dtype
        jmpx.set_policy(hk.BatchNorm, jmpx.get_policy("full").with_output_dtype(low))
    init = jax.jit(jmpx.apply_policy(network.init, MP.policy_map), static_argnums=2)
    params, model_state = init(jax.random.key(SEED.value), images[:1], True)
    return TrainState(params, model_state, optimizer.init(params), MP.loss_scale())


@functools.partial(jax.jit, static_argnums=(0, 3))
def train_step(optimizer: Any, state: TrainState, batch: Data, grad_dtype: Any = None) -> Any:
    (loss, model_state), loss_scale, grads_finite, grads = jmpx.value_and_grad(
        loss_fn, state.loss_scale, True, policy=MP.policy_map, uncast=1, grad_dtype=grad_dtype
    )(state.params, state.model_state, batch)
    take = grads_finite | (not MP.skip_nonfinite)
    params, opt_state = jmpx.optimizer_update(state.params, optimizer, state.opt_state, grads, take)
    model_state = jmpx.select_tree(take, model_state, state.model_state)
    metrics = {"loss": loss, **jmpx.metrics(opt_state, loss_scale)}
    return TrainState(params, model_state, opt_state, loss_scale), metrics


def load_digits() -> tuple[Data, Data]:
    """Returns the training and the test images, by a fixed split."""
    from sklearn import datasets, model_selection  # here, because reports need no data

    digits: Any = datasets.load_digits()  # scikit-learn has no types
    images = (digits.images[..., None] / 16).astype(np.float32)
    parts: Any = model_selection.train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    return Data(*parts[::2]), Data(*parts[1::2])


def batches(data: Data, rng: np.random.Generator) -> list[Data]:
    """Returns the full batches of one epoch, shuffled."""
    order, size = rng.permutation(len(data.labels)), BATCH_SIZE.value
    parts = order[: len(order) // size * size].reshape(-1, size)
    return [Data(data.images[part], data.labels[part]) for part in parts]


def train(step: Any, state: TrainState, data: Data, test_data: Data) -> list[dict[str, Any]]:
    """Trains, prints a line an epoch, and returns the metrics of each step."""
    rng, history = np.random.default_rng(SEED.value), []
    for epoch in range(1, EPOCHS.value + 1):
        losses = []
        for batch in tqdm(batches(data, rng), f"epoch {epoch}", unit="step", leave=False):
            state, metrics = step(state, batch)
            history.append(metrics := jax.device_get(metrics))
            losses.append(metrics["loss"])
            try:
                MP.check_progress(state.opt_state, state.loss_scale)
            except FloatingPointError as error:  # --mp_max_skips says when
                sys.exit(f"Training diverged. {error}")
        metrics["accuracy"] = float(accuracy(state, test_data))
        print(
            f"epoch {epoch:2d}  loss {np.mean(losses):.4f}  "
            f"test accuracy {metrics['accuracy']:.2%}  "
            f"loss scale {metrics['loss_scale']:.10g}  skipped steps {metrics['total_skipped']}"
        )
    print(f"test accuracy {history[-1]['accuracy']:.2%} ({MP.mixed_precision()})")
    return history


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")
    data, test_data = load_digits()
    optimizer = jmpx.skip_nonfinite(make_adam(data))  # It counts the steps that are skipped.
    step = functools.partial(train_step, optimizer)
    train(step, make_state(optimizer, data.images), data, test_data)


if __name__ == "__main__":
    app.run(main)
