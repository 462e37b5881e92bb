"""Trains a small network on handwritten digits in several dtypes, and prints a JSON line for each.

    python benchmarks/accuracy.py --seeds=3 --epochs=30

The network is an MLP with layer normalization, the data are scikit-learn's 8 x 8 digits, a fifth of
which is held back for the test. The seed draws the split, the parameters and the order of batches,
the same ones for every dtype. float16 has a dynamic loss scale; autocast_bfloat16 is the float32
network under `jmpx.autocast`. Accuracies are percent of the test digits; the spread is the largest
less the smallest over the seeds. XLA may not keep more digits than the program says, which on a CPU
it else does wherever a rounding to 16 bits comes before a widening.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import gpu_vit
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import jmpx

OPTIMIZER = jmpx.skip_nonfinite(optax.adam(1e-3))
WIDTH, BATCH = 128, 64


def init(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def linear(inputs: int, outputs: int) -> dict[str, jax.Array]:
        w = rng.standard_normal((inputs, outputs), np.float32) * np.float32(inputs**-0.5)
        return {"w": jnp.array(w), "b": jnp.zeros(outputs)}

    norm = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
    return {"up": linear(64, WIDTH), "norm": norm, "mix": linear(WIDTH, WIDTH)} | {
        "head": linear(WIDTH, 10)
    }


def logits(params: Any, images: jax.Array) -> jax.Array:
    x = gpu_vit.layer_norm(params["norm"], gpu_vit.dense(params["up"], images))
    x = jax.nn.relu(gpu_vit.dense(params["mix"], jax.nn.relu(x)))
    return gpu_vit.dense(params["head"], x)


autocast_logits = jmpx.autocast(logits, "compute=bfloat16")

# The network as called, the policy of its gradients, and the loss scale to begin with.
DTYPES: dict[str, tuple[Callable[..., jax.Array], str, Any]] = {
    "float32": (logits, "full", jmpx.NoOpLossScale()),
    "bfloat16": (logits, "compute=bfloat16", jmpx.NoOpLossScale()),
    "float16": (logits, "compute=float16", jmpx.DynamicLossScale()),
    "autocast_bfloat16": (autocast_logits, "full", jmpx.NoOpLossScale()),
}


def digits(seed: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns images and labels to train on, and to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images.astype(np.float32) - 8) / 8
    order = np.random.default_rng(seed).permutation(len(labels))
    test = order[: len(order) // 5]
    train = order[len(test) :]
    parts = images[train], labels[train], images[test], labels[test]
    x, y, test_x, test_y = map(jnp.asarray, parts)
    return x, y.astype(jnp.int32), test_x, test_y.astype(jnp.int32)


def trainer(dtype: str) -> Callable[..., Any]:
    """Returns a compiled training: (params, images, labels, order) -> params, skipped steps."""
    apply, policy, scaling = DTYPES[dtype]

    def loss_fn(params: Any, images: Any, labels: Any) -> jax.Array:
        return gpu_vit.cross_entropy(apply(params, images), labels)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, scaling = state
        grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, policy=policy)
        _, scaling, finite, grads = grad_fn(params, *batch)
        new = jmpx.optimizer_update(params, OPTIMIZER, opt_state, grads, finite)
        return (*new, scaling), None

    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def train(params: Any, images: Any, labels: Any, order: Any) -> Any:
        state = params, OPTIMIZER.init(params), scaling
        (params, opt_state, _), _ = jax.lax.scan(
            lambda state, rows: step(state, (images[rows], labels[rows])), state, order
        )
        return params, opt_state.total_skipped

    return train


def batches(count: int, epochs: int, seed: int) -> jax.Array:
    """Returns the rows of every step, of shape (steps, BATCH)."""
    rng = np.random.default_rng(seed)
    epoch = count // BATCH * BATCH
    rows = np.concatenate([rng.permutation(count)[:epoch] for _ in range(epochs)])
    return jnp.asarray(rows.reshape(-1, BATCH), jnp.int32)


def measure(dtype: str, seeds: int, epochs: int) -> dict[str, Any]:
    """Returns the test accuracies of one dtype."""
    apply, policy, _ = DTYPES[dtype]
    cast = jmpx.get_policy(policy).cast_to_compute
    train, accuracies, skipped = trainer(dtype), [], 0
    for seed in range(seeds):
        x, y, test_x, test_y = digits(seed)
        params, total = train(init(seed), x, y, batches(len(y), epochs, seed))
        correct = apply(*cast((params, test_x))).argmax(axis=-1) == test_y
        accuracies.append(100 * float(correct.mean()))
        skipped += int(total)
    return {
        "accuracy_mean": round(statistics.mean(accuracies), 2),
        "accuracy_spread": round(max(accuracies) - min(accuracies), 2),
        "accuracies": [round(accuracy, 2) for accuracy in accuracies],
        "skipped_steps": skipped,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    args = parser.parse_args(arguments)
    for dtype in tqdm(args.dtypes, unit="dtype"):
        fields = {"dtype": dtype, "epochs": args.epochs, "seeds": args.seeds}
        found = fields | measure(dtype, args.seeds, args.epochs)
        print(json.dumps({"benchmark": "accuracy", **gpu_vit.surroundings(), **found}))


if __name__ == "__main__":
    main()
