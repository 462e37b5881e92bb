"""Trains a small language model in several precisions and compares their validation losses.

    python benchmarks/language_model.py                 # the runs that are missing

All runs take some 20 minutes of one CPU core. The text is what `help("if")` and its like print,
`pydoc_data.topics`: half a million characters of English that come with Python. They differ between
versions of Python, so each line has a hash of the text. The last tenth is for validation. The
model is a transformer that predicts each character from the ones before it; the loss is the mean
cross-entropy over the validation text, in nats a character.

The seed draws the parameters and the order of the batches, the same ones for each precision, so the
runs of one seed can be compared. Two rows say how to read the others. In "float32, nudged" each
initial parameter is changed in its last bit: any other rounding may change the loss as much.
"bfloat16 throughout" stores the parameters in bfloat16, too, where small updates are lost: it must
come out worse.

Each result of 16 bits is rounded where the program writes it (`jmpx.inspect.emulate`), because a
CPU leaves out most of these roundings. A product reads operands of 16 bits and sums in float32, as
GPUs and TPUs do.
"""

import functools
import hashlib
import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import records
from models import LanguageModel, normal, wide
from records import PyTree, Record
from tqdm import tqdm

import jmpx

RESULTS = records.RESULTS / "language_model.jsonl"
SEEDS = 3


class Precision(NamedTuple):
    """How one row of the table trains."""

    policy: str = "full"  # its params dtype stores the parameters, its compute dtype casts them
    autocast: str | None = None
    loss_scale: Callable[[], jmpx.LossScale] = jmpx.NoOpLossScale
    nudged: bool = False


PRECISIONS = {
    "float32": Precision(),
    "float32, nudged": Precision(nudged=True),
    "bfloat16": Precision("compute=bfloat16"),
    "float16": Precision("compute=float16", loss_scale=jmpx.DynamicLossScale),
    "autocast bfloat16": Precision(autocast="compute=bfloat16"),
    "autocast float16": Precision(autocast="compute=float16", loss_scale=jmpx.DynamicLossScale),
    "bfloat16 throughout": Precision("bfloat16"),
}


class Size(NamedTuple):
    """The sizes of a model and of its training."""

    width: int = 96
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 32
    steps: int = 400
    validate_every: int = 100


SIZE = Size()


# --- The text ---


class Text(NamedTuple):
    """A text as numbers, one a character."""

    train: np.ndarray
    validation: np.ndarray
    characters: int  # how many different ones there are
    sha256: str


def read_text() -> Text:
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    characters, numbers = np.unique(np.array(list(text)), return_inverse=True)
    train, validation = np.split(numbers.astype(np.int32), [len(numbers) * 9 // 10])
    return Text(train, validation, len(characters), hashlib.sha256(text.encode()).hexdigest())


def batches(text: np.ndarray, size: Size, seed: int) -> Iterator[np.ndarray]:
    """Yields pieces of the text at random places, of shape (batch, context + 1)."""
    rng = np.random.default_rng(seed)
    for _ in range(size.steps):
        starts = rng.integers(len(text) - size.context, size=size.batch)
        yield text[starts[:, None] + np.arange(size.context + 1)]


def pieces(text: np.ndarray, size: Size) -> np.ndarray:
    """Cuts a text in order into shape (count, batch, context + 1), and drops the rest."""
    starts = np.arange(0, len(text) - size.context, size.context)
    starts = starts[: len(starts) // size.batch * size.batch].reshape(-1, size.batch)
    return text[starts[..., None] + np.arange(size.context + 1)]


# --- The model ---


class Model(LanguageModel):
    """A transformer without biases, whose norms have a scale alone."""

    def init(self, rng: np.random.Generator) -> PyTree:
        """Returns float32 parameters."""
        width, hidden = self.width, self.hidden

        def layer() -> PyTree:
            return {
                "norm1": jnp.ones(width),
                "qkv": normal(rng, width, 3 * width, deviation=width**-0.5),
                "attention": normal(rng, width, width, deviation=(2 * self.layers * width) ** -0.5),
                "norm2": jnp.ones(width),
                "mlp1": normal(rng, width, hidden, deviation=width**-0.5),
                "mlp2": normal(rng, hidden, width, deviation=(2 * self.layers * hidden) ** -0.5),
            }

        return {
            "tokens": normal(rng, self.classes, width),
            "positions": normal(rng, self.length, width),
            "layers": [layer() for _ in range(self.layers)],
            "norm": jnp.ones(width),
            "head": normal(rng, width, self.classes, deviation=width**-0.5),
        }

    def normalized(self, norm: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.standardize(wide(x)).astype(x.dtype) * norm


def model_of(size: Size, text: Text) -> Model:
    hidden = 4 * size.width
    return Model(size.layers, size.width, size.heads, hidden, text.characters, length=size.context)


def make_loss(model: Model, autocast: str | None = None) -> Callable[..., jax.Array]:
    """Returns the mean cross-entropy, a function of parameters and text."""
    apply = jmpx.autocast(model.apply, autocast) if autocast else model.apply

    def loss_fn(params: PyTree, text: jax.Array) -> jax.Array:
        logits = apply(params, text[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    return loss_fn


def train(precision: Precision, size: Size, text: Text, seed: int) -> Record:
    """Trains one model, and returns its validation losses and how many steps it skipped."""
    policy, model = jmpx.get_policy(precision.policy), model_of(size, text)
    loss_fn = make_loss(model, precision.autocast)
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, size.steps // 10, size.steps)
    optimizer = jmpx.skip_nonfinite(optax.adam(rate))

    @jax.jit
    @jmpx.inspect.emulate
    def step(params: PyTree, opt_state: Any, loss_scale: Any, text: jax.Array) -> Any:
        by_arguments = jmpx.PolicyMap(policy, by="arguments")
        grad_fn = jmpx.value_and_grad(loss_fn, loss_scale, policy=by_arguments)
        _, loss_scale, finite, grads = grad_fn(params, text)
        return *jmpx.optimizer_update(params, optimizer, opt_state, grads, finite), loss_scale

    @jax.jit
    @jmpx.inspect.emulate
    def validate(params: PyTree, text: jax.Array) -> jax.Array:
        return jax.lax.map(functools.partial(loss_fn, policy.cast_to_compute(params)), text).mean()

    params, rng = model.init(np.random.default_rng(seed)), np.random.default_rng(seed)
    if precision.nudged:  # each becomes the next larger or smaller number
        ends = jax.tree.map(lambda x: np.float32(np.inf) * rng.choice([-1, 1], x.shape), params)
        params = jax.tree.map(lambda x, end: jnp.nextafter(x, end.astype(np.float32)), params, ends)
    params = policy.cast_to_param(params)
    state: Any = params, optimizer.init(params), precision.loss_scale()
    held_back, losses = jnp.asarray(pieces(text.validation, size)), []
    progress = tqdm(batches(text.train, size, seed), total=size.steps, disable=None, leave=False)
    for number, batch in enumerate(progress, 1):
        state = step(*state, jnp.asarray(batch))
        if number % size.validate_every == 0:
            losses.append([number, round(float(validate(state[0], held_back)), 5)])
    return {"losses": losses, "skipped_steps": int(state[1].total_skipped)}


# --- The points, and the table ---


def points() -> list[Record]:
    common = {**SIZE._asdict(), "text_sha256": read_text().sha256}
    return [common | {"seed": s, "precision": p} for s in range(SEEDS) for p in PRECISIONS]


def measure(precision: str, seed: int, small: bool = False, **fields: Any) -> Record:
    size = Size(*(fields[name] for name in Size._fields))
    size = size._replace(width=8, steps=4, validate_every=2) if small else size
    return train(PRECISIONS[precision], size, read_text(), seed)


def table(found: list[Record]) -> str:
    """Returns a Markdown table of the last loss of each seed: one row per precision."""
    final = {(r["precision"], r["seed"]): r["losses"][-1][1] for r in found}
    rows = []
    for name in PRECISIONS:
        seeds = [seed for each, seed in final if each == name]
        losses = [final[name, seed] for seed in seeds]
        less = [final[name, seed] - final["float32", seed] for seed in seeds]
        over = f"{statistics.mean(less):+.5f}", f"{min(less):+.5f} to {max(less):+.5f}"
        skipped = sum(r["skipped_steps"] for r in found if r["precision"] == name)
        ours = f"{statistics.mean(losses):.4f}", f"{max(losses) - min(losses):.4f}"
        over = ("", "") if name == "float32" else over
        rows.append((name, str(len(seeds)), *ours, *over, str(skipped)))
    header = ("precision", "seeds", "validation loss", "spread over seeds")
    header += ("difference to float32", "smallest to largest", "skipped steps")
    return records.table(header, rows)


def main(arguments: list[str] | None = None) -> None:
    records.main(__doc__, {"language_model": (points(), measure)}, arguments, RESULTS)


if __name__ == "__main__":
    main()
