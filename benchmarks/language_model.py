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

For gradients within 1 % of float32's, jmpx chooses `by=operations,c=bf16,save=products` (0.4 %):
    python -m jmpx choose benchmarks/language_model.py:make_losses --error 0.01
"""

import functools
import hashlib
import platform
import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import records
from records import Record
from tqdm import tqdm

import jmpx

RESULTS = records.RESULTS / "language_model.jsonl"
SEEDS = 3

PyTree = Any  # JAX has no type for pytrees


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


# --- The model: a transformer whose parameters are nested dicts ---


def init(size: Size, characters: int, seed: int) -> PyTree:
    """Returns float32 parameters."""
    rng, width = np.random.default_rng(seed), size.width

    def normal(*shape: int, scale: float) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    def layer() -> PyTree:
        return {
            "norm1": jnp.ones(width),
            "qkv": normal(width, 3 * width, scale=width**-0.5),
            "mix": normal(width, width, scale=(2 * size.layers * width) ** -0.5),
            "norm2": jnp.ones(width),
            "up": normal(width, 4 * width, scale=width**-0.5),
            "down": normal(4 * width, width, scale=(8 * size.layers * width) ** -0.5),
        }

    return {
        "characters": normal(characters, width, scale=1),
        "positions": normal(size.context, width, scale=1),
        "layers": [layer() for _ in range(size.layers)],
        "norm": jnp.ones(width),
        "head": normal(width, characters, scale=width**-0.5),
    }


def normalize(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Normalizes the last axis in float32 and scales it."""
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype) * scale


def attend(qkv: jax.Array) -> jax.Array:
    """Mixes the values of each character and those before it; the softmax is in float32."""
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.tri(q.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def predict(params: PyTree, text: jax.Array, heads: int) -> jax.Array:
    """Returns the scores of the next characters, of shape (batch, length, characters).

    The model computes in the dtype of the parameters, but for normalization and softmax, which are
    in float32.
    """
    x = params["characters"][text] + params["positions"]
    for layer in params["layers"]:
        qkv = (normalize(layer["norm1"], x) @ layer["qkv"]).reshape(*text.shape, 3, heads, -1)
        x = x + attend(qkv).reshape(x.shape) @ layer["mix"]
        x = x + jax.nn.gelu(normalize(layer["norm2"], x) @ layer["up"]) @ layer["down"]
    return normalize(params["norm"], x) @ params["head"]


def make_losses() -> tuple[Callable[..., jax.Array], list[tuple[Any, ...]]]:
    """Makes the loss and batches of its arguments, for `python -m jmpx choose`."""
    text, size = read_text(), SIZE._replace(batch=4)
    params, data = init(size, text.characters, 0), batches(text.train, size, 0)
    return make_loss(Precision(), size.heads), [(params, jnp.asarray(next(data))) for _ in range(8)]


def make_loss(precision: Precision, heads: int) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Returns the mean cross-entropy, a function of parameters and text."""
    apply: Callable[..., jax.Array] = functools.partial(predict, heads=heads)
    if precision.autocast:
        apply = jmpx.autocast(apply, precision.autocast)

    def loss_fn(params: PyTree, text: jax.Array) -> jax.Array:
        logits = apply(params, text[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    return loss_fn


def train(precision: Precision, size: Size, text: Text, seed: int) -> Record:
    """Trains one model, and returns its validation losses and how many steps it skipped."""
    policy = jmpx.get_policy(precision.policy)
    loss_fn = make_loss(precision, size.heads)
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

    params, rng = init(size, text.characters, seed), np.random.default_rng(seed)
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
    common = {
        **SIZE._asdict(),
        "text_sha256": read_text().sha256,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
    }
    return [common | {"seed": s, "precision": p} for s in range(SEEDS) for p in PRECISIONS]


def measure(precision: str, seed: int, small: bool = False, **fields: Any) -> Record:
    size = Size(*(fields[name] for name in Size._fields))
    size = size._replace(width=8, steps=4, validate_every=2) if small else size
    return train(PRECISIONS[precision], size, read_text(), seed)


def table(found: list[Record]) -> str:
    """Returns a Markdown table of the last loss of each seed: one row per precision."""
    losses: dict[str, dict[int, float]] = {name: {} for name in PRECISIONS}
    for record in found:
        losses[record["precision"]][record["seed"]] = record["losses"][-1][1]
    rows = []
    for name, by_seed in losses.items():
        base = losses["float32"] if name != "float32" else {}
        less = [loss - base[seed] for seed, loss in by_seed.items() if seed in base]
        mean = f"{statistics.mean(less):+.5f}" if less else ""
        ends = f"{min(less):+.5f} to {max(less):+.5f}" if len(less) > 1 else ""
        values = by_seed.values()
        wide = f"{max(values) - min(values):.4f}" if len(by_seed) > 1 else ""
        skipped = sum(r["skipped_steps"] for r in found if r["precision"] == name)
        if by_seed:
            loss = f"{statistics.mean(values):.4f}"
            rows.append((name, str(len(by_seed)), loss, wide, mean, ends, str(skipped)))
    header = ("precision", "seeds", "validation loss", "spread over seeds")
    header += ("difference to float32", "smallest to largest", "skipped steps")
    return records.table(header, rows)


def main(arguments: list[str] | None = None) -> None:
    records.main(__doc__, {"language_model": (points(), measure)}, arguments, RESULTS)


if __name__ == "__main__":
    main()
