"""Trains with the products of MLPs in 8 bits, and compares the losses with bfloat16's.

    python benchmarks/eight_bits.py               # the runs that are missing
    python benchmarks/eight_bits.py --only ViT    # those of one model

All runs take half an hour of one CPU core. The models, none of which has a cast:

- MLP: two hidden layers of 512 on scikit-learn's digits. The head is outside of the rule.
- ViT: the vision transformer of `examples/equinox` on the same digits, with its default sizes.
- language model: that of `language_model.py`, with its text, sizes and steps.

A rule for `*/mlp` sets what their MLPs multiply in; all else is under `c=bf16`. The seed draws the
parameters and the order of the batches, the same ones for each policy. MLP and ViT train by Adam
for 15 epochs; their loss is that of 352 of the 360 test images, a multiple of 32, as products in 8
bits need it.

A CPU has no units for 8 bits, so `+emulate` rounds the operands to the same numbers. Each result of
16 bits is rounded where the program writes it, too (`jmpx.inspect.emulate`). A product sums in
float32. A rule that has no effect ends the script.
"""

import functools
import itertools
import math
import runpy
import statistics
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
import records
from models import affine, linear
from records import PyTree, Record

import jmpx

RESULTS = records.RESULTS / "eight_bits.jsonl"
EXAMPLES = records.RESULTS.parents[1] / "examples" / "equinox"
SEEDS, EPOCHS, BATCH, RATE = 5, 15, 64, 1e-3
MULTIPLE = 32  # of the axes of products in mxfp8
FLOAT32, BASE = "float32", "c=bf16"
POLICIES = (FLOAT32, BASE, *(f"{BASE}; */mlp: m={m}+emulate" for m in ("fp8", "mxfp8")))


def example(name: str) -> Any:
    """Returns what a file of the example defines; by its path, as names there are here, too."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


# --- The classifiers of digits ---


def mlp(seed: int) -> PyTree:
    """Returns the float32 parameters of an MLP."""
    rng, sizes = np.random.default_rng(seed), (64, 512, 512, 10)
    return [linear(rng, *pair) for pair in zip(sizes[:-1], sizes[1:], strict=True)]


def apply_mlp(params: PyTree, images: jax.Array) -> jax.Array:
    x = images.reshape(len(images), -1)
    with jax.named_scope("mlp"):
        for layer in params[:-1]:
            x = jax.nn.gelu(affine(layer, x))
    return affine(params[-1], x)


def vit(seed: int) -> PyTree:
    """Returns a ViT with the sizes that the flags of `train_vit.py` have by default."""
    sizes = {"patch": 2, "width": 64, "depth": 4, "heads": 4}
    return example("vit").VisionTransformer((8, 8, 1), 10, **sizes, key=jax.random.key(seed))


CLASSIFIERS = {"MLP": (mlp, apply_mlp), "ViT": (vit, lambda model, images: jax.vmap(model)(images))}


def classifier(model: str, policy: str, seed: int, small: bool = False) -> Record:
    """Trains a classifier, and returns its loss and accuracy on the test images."""
    datasets, (make, apply) = example("datasets"), CLASSIFIERS[model]
    train_data, test_data = datasets.load_digits()
    params, rng = make(seed), np.random.default_rng(seed)
    batches = [b for _ in range(EPOCHS) for b in datasets.batches(train_data, BATCH, rng)]
    batches = batches[:2] if small else batches
    steps = len(batches)
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, RATE, steps // 10, steps))

    def loss_fn(params: PyTree, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = apply(params, batch.images).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return losses.mean(), (logits.argmax(axis=-1) == batch.labels).mean()

    @jax.jit
    @jmpx.inspect.emulate
    def step(params: PyTree, state: Any, batch: Any) -> Any:
        grad_fn = jmpx.value_and_grad(loss_fn, jmpx.NoOpLossScale(), has_aux=True, policy=policy)
        grads = grad_fn(params, datasets.prepared(batch)).grads
        return jmpx.optimizer_update(params, optimizer, state, grads, True)

    @jax.jit
    @jmpx.inspect.emulate
    def test(params: PyTree, batch: Any) -> tuple[jax.Array, jax.Array]:
        return jmpx.apply_policy(loss_fn, policy)(params, datasets.prepared(batch))

    state = optimizer.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    count = len(test_data.labels) // MULTIPLE * MULTIPLE
    loss, accuracy = test(params, jax.tree.map(lambda x: x[:count], test_data))
    return {"steps": steps, "loss": round(float(loss), 5), "accuracy": round(float(accuracy), 5)}


# --- The points, and the table ---


def text_model(policy: str, seed: int, small: bool = False) -> Record:
    """Trains the language model, and returns its validation loss."""
    size, text = language_model.SIZE, language_model.read_text()
    if small:  # few steps, of products that are large enough for 8 bits
        size = size._replace(width=MULTIPLE, layers=1, steps=2, validate_every=2)
    precision = language_model.Precision(autocast=None if policy == FLOAT32 else policy)
    *_, (steps, loss) = language_model.train(precision, size, text, seed)["losses"]
    return {"steps": steps, "loss": loss, "text_sha256": text.sha256}


MODELS: dict[str, Any] = {name: functools.partial(classifier, name) for name in CLASSIFIERS}
MODELS["language model"] = text_model
RUNS = itertools.product(MODELS, range(SEEDS), POLICIES)
POINTS = [{"model": model, "policy": policy, "seed": seed} for model, seed, policy in RUNS]


def measure(model: str, **point: Any) -> Record:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a rule without effect would measure bfloat16
        return MODELS[model](**point)


def cells(lines: list[Record], base: list[Record], key: str, factor: int) -> tuple[str, str]:
    """Returns mean and deviation over the seeds, and the mean difference and its standard error."""
    if key not in lines[0]:
        return "", ""
    of_base = {each["seed"]: factor * each[key] for each in base}
    values = [factor * each[key] for each in lines]
    less = [value - of_base[each["seed"]] for value, each in zip(values, lines, strict=True)]
    digits = 4 if factor == 1 else 2
    ours = f"{statistics.mean(values):.{digits}f} (sd {statistics.stdev(values):.{digits}f})"
    error = statistics.stdev(less) / math.sqrt(len(less))
    over = f"{statistics.mean(less):+.{digits + 1}f} ± {error:.{digits + 1}f}"
    return ours, "" if lines == base else over


def table(found: list[Record]) -> str:
    """Returns a Markdown table with one row per model and policy."""
    rows, of = [], {}
    for line in found:
        of.setdefault((line["model"], line["policy"]), []).append(line)
    for (model, policy), lines in of.items():
        both = (("loss", 1), ("accuracy", 100))
        figures = [cell for one in both for cell in cells(lines, of[model, BASE], *one)]
        rows.append((model, f"`{policy}`", *figures))
    less = f"less `{BASE}`'s"
    return records.table(("model", "policy", "loss", less, "accuracy, %", less), rows)


BENCHMARKS: records.Benchmarks = {"eight_bits": (POINTS, measure)}
main = functools.partial(records.main, __doc__, BENCHMARKS, out=RESULTS)

if __name__ == "__main__":
    main()
