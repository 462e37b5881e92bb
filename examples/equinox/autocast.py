"""Trains a small convolutional network on digits under autocast; the model contains no cast.

    python examples/equinox/autocast.py
    python examples/equinox/autocast.py "--mp_policy=c=f16; op.tanh: full" --mp_loss_scale=static=8
    python examples/equinox/autocast.py --mp_policy=full
    python examples/equinox/autocast.py --audit

The policy sets the dtype of matrix products and convolutions; autocast's rules set those of all
other operations. Rules for modules (`*/eqx.nn.MLP: c=f32,m=highest`) and for operations
(`op.tanh: full`) override it.
"""

from typing import Any

import datasets
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from history import end_if_diverged
from tqdm import tqdm

import jmpx
import jmpx.flags

MP = jmpx.flags.define_mp_flags(default_policy="c=bf16")
SEED = flags.DEFINE_integer("seed", 0, "Seeds initialization and batches.", lower_bound=0)
EPOCHS = flags.DEFINE_integer("epochs", 15, "How many times to go over the data.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Images in a step.", 1, 1024)
AUDIT = flags.DEFINE_bool("audit", False, "Print the audit of the train step, and train nothing.")


class Network(eqx.Module):
    """Logits of shape [10] for one image of shape [8, 8, 1]."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        first_key, second_key, mlp_key = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, 16, 3, padding=1, key=first_key)
        self.second = eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=second_key)
        self.norm = eqx.nn.LayerNorm((32, 4, 4))
        self.mlp = eqx.nn.MLP(32 * 4 * 4, 10, 64, 1, activation=jnp.tanh, key=mlp_key)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = jax.nn.gelu(self.first(image.transpose(2, 0, 1)))
        x = self.norm(self.second(x))
        return self.mlp(jax.nn.gelu(x).ravel())


def logits_of(model: Network, images: Any) -> jax.Array:
    """Returns float32 logits [batch, 10] of images [batch, 8, 8, 1]."""
    return jmpx.cast_to_full(jax.vmap(model)(images))


def loss_fn(model: Network, batch: datasets.Data) -> jax.Array:
    logits = logits_of(model, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


@eqx.filter_jit
def train_step(model, opt_state, loss_scale, batch, optimizer):
    """Takes one step, in which the policy says what is cast."""
    loss, loss_scale, grads_finite, grads = jmpx.value_and_grad(
        loss_fn, loss_scale, policy=MP.policy_map
    )(model, datasets.prepared(batch))
    model, opt_state = jmpx.optimizer_update(
        model, optimizer, opt_state, grads, grads_finite | (not MP.skip_nonfinite)
    )
    return model, opt_state, loss_scale, loss


@eqx.filter_jit
def accuracy_of(model: Network, data: datasets.Data) -> jax.Array:
    logits = jmpx.apply_policy(logits_of, MP.policy_map)(model, datasets.prepared(data).images)
    return (logits.argmax(axis=-1) == data.labels).mean()


def make_state(optimizer: Any) -> tuple[Network, optax.OptState, jmpx.LossScale]:
    model = Network(jax.random.key(SEED.value))
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), MP.loss_scale()


def make_optimizer() -> optax.GradientTransformation:
    return jmpx.skip_nonfinite(optax.adam(2e-3))  # counts the steps that are skipped


def make() -> tuple[Any, tuple[Any, ...]]:
    """Makes the train step and the shapes of its arguments, for `python -m jmpx audit`."""
    optimizer = make_optimizer()
    state = eqx.filter_eval_shape(make_state, optimizer)
    images: Any = jax.ShapeDtypeStruct((BATCH_SIZE.value, 8, 8, 1), jnp.uint8)
    labels: Any = jax.ShapeDtypeStruct((BATCH_SIZE.value,), jnp.int32)
    return train_step, (*state, datasets.Data(images, labels), optimizer)


def main(argv: list[str]) -> None:
    del argv
    if AUDIT.value:
        step, args = make()
        print(jmpx.inspect.audit(step)(*args))
        return
    train_data, test_data = datasets.load("digits", None)
    rng = np.random.default_rng(SEED.value)
    optimizer = make_optimizer()
    model, opt_state, loss_scale = make_state(optimizer)
    steps = len(train_data.labels) // BATCH_SIZE.value
    with tqdm(total=EPOCHS.value * steps, unit="step", leave=False) as progress:
        for epoch in range(1, EPOCHS.value + 1):
            losses = []
            for batch in datasets.batches(train_data, BATCH_SIZE.value, rng):
                model, opt_state, loss_scale, loss = train_step(
                    model, opt_state, loss_scale, batch, optimizer
                )
                losses.append(float(loss))
                end_if_diverged(MP, opt_state, loss_scale)
                progress.update()
            progress.write(
                f"epoch {epoch:2d}  loss {np.mean(losses):.4f}  "
                f"test accuracy {float(accuracy_of(model, test_data)):.2%}"
            )


if __name__ == "__main__":
    app.run(main)
