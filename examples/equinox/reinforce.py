"""Trains a small transformer by reinforcement, and shows where sampler and trainer disagree.

    python examples/equinox/reinforce.py                      # all precisions, three seeds
    python examples/equinox/reinforce.py --steps=50 --seeds=1 --plot=reinforce.png

The model reads eight tokens and is to write them in reverse. A sampler writes them one by one, with
a cache of keys and values, and the trainer scores what was written in one pass over all tokens.
Both have one model and one policy, and GRPO takes their log-probabilities for the same. In 16 bits
they differ, because each rounds other numbers: the sampler divides by the sum of the attention's
weights after it has multiplied by the values, as kernels for sampling do, and the trainer before.
The loss of GRPO is a clipped ratio of both probabilities, times the reward less the mean reward of
the answers to one prompt.

Each result of 16 bits is rounded where the program writes it (`jmpx.inspect.emulate`), because a
CPU leaves out some roundings, and so shows less of the difference than a chip does.
"""

import collections
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tqdm import tqdm

import jmpx

POLICIES = {
    "float32": "full",
    "bfloat16": "c=bf16",
    "bfloat16, */head: product=f32": "c=bf16; */head: product=f32",
    "float16": "c=f16",
}
STEPS = flags.DEFINE_integer("steps", 120, "Steps of each run.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each precision.", lower_bound=1)
PLOT = flags.DEFINE_string("plot", None, "A picture to write, such as reinforce.png.")

TOKENS, LENGTH = 16, 8  # different tokens; tokens in a prompt, and in an answer
PROMPTS, ANSWERS = 8, 8  # in a step; and to each prompt
CLIP = 0.2
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
FLOOR = 1e-10  # the smallest divergence in the picture; float32's is smaller


class Block(eqx.Module):
    """A layer: attention to all tokens before, and a perceptron."""

    norm1: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.out = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])

    def projected(self, x: jax.Array) -> jax.Array:
        """Returns the query, the key and the value of one token, [3, heads, size]."""
        return self.qkv(self.norm1(x)).reshape(3, HEADS, -1)

    def finished(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """Returns the layer's output for one token and the mean of the values it attends to."""
        x = x + self.out(mixed.ravel())
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


HEADS = 4
Cache = list[jax.Array]  # of each layer, keys and values [2, tokens, heads, size]


class Transformer(eqx.Module):
    """Logits of the next tokens, for all tokens at once or one by one."""

    tokens: jax.Array
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array, width: int = 64, layers: int = 4):
        keys = jax.random.split(key, layers + 3)
        self.tokens = jax.random.normal(keys[0], (TOKENS, width))
        self.positions = jax.random.normal(keys[1], (2 * LENGTH, width))
        self.blocks = [Block(width, key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, TOKENS, key=keys[2])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [length, tokens] of tokens [length], in one pass."""
        x = self.tokens[tokens] + self.positions[: len(tokens)]
        for block in self.blocks:
            q, k, v = jnp.moveaxis(jax.vmap(block.projected)(x), 1, 0)
            mixed = attended(q, k, v, jnp.tri(len(tokens), dtype=bool))
            x = jax.vmap(block.finished)(x, mixed)
        return jax.vmap(lambda x: self.head(self.norm(x)))(x)

    def step(self, cache: Cache, token: jax.Array, place: jax.Array) -> tuple[Cache, jax.Array]:
        """Returns the cache and the logits [tokens] after one more token."""
        x, after = self.tokens[token] + self.positions[place], []
        for block, known in zip(self.blocks, cache, strict=True):
            q, *new = block.projected(x)
            known = known.at[:, place].set(jnp.stack(new).astype(known.dtype))
            seen = jnp.arange(known.shape[1]) <= place
            x = block.finished(x, attended_late(q, *known, seen))
            after.append(known)
        return after, self.head(self.norm(x))

    def empty_cache(self, length: int) -> Cache:
        size = self.positions.shape[1] // HEADS
        return [jnp.zeros((2, length, HEADS, size)) for _ in self.blocks]


def attended(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the mean of the values [keys, heads, size] that each query attends to."""
    scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("hqk,khd->qhd", weights, v)


def attended_late(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the same for one query [heads, size], and divides by the sum of weights last."""
    scores = jnp.where(seen, jnp.einsum("hd,khd->hk", q, k) * q.shape[-1] ** -0.5, -1e30)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return jnp.einsum("hk,khd->hd", weights, v) / weights.sum(axis=-1)[:, None]


# The two ways to score a text, which `jmpx.inspect.compare` compares.


def chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probabilities of tokens, in float32."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]


def full_pass(model: Transformer, text: jax.Array) -> jax.Array:
    """Returns the log-probabilities [batch, length - 1] of a text, each token by those before."""
    return chosen(jax.vmap(model)(text[:, :-1]), text[:, 1:])


def with_cache(model: Transformer, text: jax.Array) -> jax.Array:
    """Returns the same log-probabilities, token by token, as the sampler computes them."""

    def score(text: jax.Array) -> jax.Array:
        def step(cache: Cache, given: tuple[jax.Array, ...]) -> tuple[Cache, jax.Array]:
            return model.step(cache, *given)

        length = len(text) - 1
        _, logits = jax.lax.scan(step, model.empty_cache(length), (text[:-1], jnp.arange(length)))
        return chosen(logits, text[1:])

    return jax.vmap(score)(text)


def sample(model: Transformer, prompts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns texts [batch, 2 length] that begin with prompts, and their answers' scores."""

    def write(prompt: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: Any, given: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            cache, token = carry
            place, key = given
            token = jnp.where(place < LENGTH, prompt[place % LENGTH], token)
            cache, logits = model.step(cache, token, place)
            new = jax.random.categorical(key, logits.astype(jnp.float32))
            return (cache, new), (new, chosen(logits, new))

        length = 2 * LENGTH - 1
        given = jnp.arange(length), jax.random.split(key, length)
        first = model.empty_cache(length), prompt[0]
        _, (tokens, scores) = jax.lax.scan(step, first, given)
        return jnp.concatenate([prompt, tokens[LENGTH - 1 :]]), scores[LENGTH - 1 :]

    return jax.vmap(write)(prompts, jax.random.split(key, len(prompts)))


# --- Training ---


class Answers(NamedTuple):
    """Sampled texts, the sampler's scores, and rewards less the means of their groups."""

    texts: jax.Array
    scores: jax.Array
    advantages: jax.Array


def loss_fn(model: Transformer, given: Answers) -> tuple[jax.Array, jax.Array]:
    """Returns GRPO's loss, and the divergence of the trainer from the sampler."""
    d = full_pass(model, given.texts)[:, LENGTH - 1 :] - given.scores
    ratio = jnp.exp(d)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gains = jnp.minimum(ratio * given.advantages, clipped * given.advantages)
    return -gains.mean(), jnp.mean(jnp.expm1(d) - d)


def make_step(policy: jmpx.PolicyMap) -> Any:
    """Returns a step: it samples answers, rewards them and trains on them."""
    sampler = jmpx.apply_policy(sample, policy)

    @eqx.filter_jit
    @jmpx.inspect.emulate
    def step(model: Transformer, state: Any, loss_scale: Any, key: jax.Array) -> Any:
        ask, answer = jax.random.split(key)
        prompts = jnp.repeat(jax.random.randint(ask, (PROMPTS, LENGTH), 0, TOKENS), ANSWERS, axis=0)
        texts, scores = sampler(model, prompts, answer)
        rewards = (texts[:, LENGTH:] == prompts[:, ::-1]).astype(jnp.float32)
        groups = rewards.reshape(PROMPTS, ANSWERS, LENGTH)
        advantages = (groups - groups.mean(axis=1, keepdims=True)).reshape(rewards.shape)
        given = Answers(texts, scores, advantages)
        gradient = jmpx.value_and_grad(loss_fn, loss_scale, has_aux=True, policy=policy)
        (_, kl), loss_scale, grads_finite, grads = gradient(model, given)
        model, state = jmpx.optimizer_update(model, OPTIMIZER, state, grads, grads_finite)
        return model, state, loss_scale, (rewards.mean(), kl)

    return step


def train(step: Any, loss_scale: jmpx.LossScale, seed: int, progress: tqdm) -> np.ndarray:
    """Returns the rewards and divergences [steps, 2] of one run."""
    model_key, key = jax.random.split(jax.random.key(seed))
    model = Transformer(model_key)
    state, found = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)), []
    for number in range(STEPS.value):
        now = jax.random.fold_in(key, number)
        model, state, loss_scale, seen = step(model, state, loss_scale, now)
        found.append([float(each) for each in seen])
        progress.update()
    return np.asarray(found)


def plot(found: dict[str, list[np.ndarray]], path: str) -> None:
    """Draws rewards and divergences over the steps, a line for each seed."""
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(
        2, sharex=True, figsize=(7, 6), dpi=120, layout="constrained"
    )
    for color, (name, runs) in enumerate(found.items()):
        for run in runs:
            label = name if run is runs[0] else None
            upper.plot(run[:, 0], color=f"C{color}", alpha=0.7, linewidth=1, label=label)
            lower.plot(np.maximum(run[:, 1], FLOOR), color=f"C{color}", alpha=0.7, linewidth=1)
    upper.set(ylabel="reward (share of tokens)", title="A sampler and a trainer of one model")
    lower.set(ylabel=f"KL of the trainer (at least {FLOOR:g})", xlabel="step", yscale="log")
    upper.legend(fontsize="small")
    figure.savefig(path)


def main(argv: list[str]) -> None:
    del argv
    texts = jax.random.randint(jax.random.key(1), (16, 2 * LENGTH), 0, TOKENS)
    model = Transformer(jax.random.key(0))
    for name, policy in POLICIES.items():
        ways = (jmpx.apply_policy(fn, policy) for fn in (full_pass, with_cache))
        report = jmpx.inspect.compare(*ways)(model, texts)
        if report.log_probabilities is not None:
            print(f"{name}: KL before training {report.log_probabilities.kl:.1e}")
    found = collections.defaultdict(list)
    with tqdm(
        total=len(POLICIES) * SEEDS.value * STEPS.value, unit="step", leave=False
    ) as progress:
        for name, policy in POLICIES.items():
            mp = jmpx.get_mixed_precision(policy)  # with a dynamic loss scale for float16
            step = make_step(mp.policy_map)
            for seed in range(SEEDS.value):
                found[name].append(train(step, mp.loss_scale, seed, progress))
            last = [run[-10:].mean(axis=0) for run in found[name]]
            rewards = ", ".join(f"{reward:.3f}" for reward, _ in last)
            progress.write(f"{name}: rewards {rewards}, KL {np.mean([kl for _, kl in last]):.1e}")
    if PLOT.value:
        plot(found, PLOT.value)


if __name__ == "__main__":
    app.run(main)
