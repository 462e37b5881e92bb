"""Measures what it costs to keep parameters, optimizer state and averages in 16 bits.

    python benchmarks/storage.py                    # all parts: some ten minutes of one CPU core
    python benchmarks/storage.py --part counting averages
    python benchmarks/storage.py > benchmarks/results/storage.jsonl
    python benchmarks/plot_storage.py               # the table of it, and its picture

Its parts:

- counting: 1,000 times 2**-10 is added to 1, which bfloat16 loses each time.
- regression: a linear regression by gradient descent, in small steps; the loss of other data.
- transformer: the small language model of `language_model.py`, trained by Adam at a rate of 1e-3;
  the mean of the last tenth of its losses.
- moments: those of Adam after 4,000 gradients, over the ones that float64 has.
- averages: the error of moving averages, decay 0.999, from 0.5 to 1 in 5,000 steps.
- rounding: the mean error of `jmpx.optim.stochastic_round` in units of the last place; how many
  float32 numbers `jmpx.optim.split_master` gives back, and how often its high half is what a cast
  gives.

All models compute in float32, so that only storage differs. XLA may not keep more digits than the
program says (`xla_allow_excess_precision`), because otherwise it leaves out roundings to 16 bits.
`bytes` are those of parameters and optimizer state, for each parameter.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
import records
from tqdm import tqdm

import jmpx

PyTree = Any  # JAX has no type for pytrees
Optimizer = Any  # an optax gradient transformation
Fields = dict[str, Any]  # of a line of JSON

EXACTLY = {"xla_allow_excess_precision": False}
DECAY = 0.999  # of moving averages, and of Adam's second moment


# The ways to store parameters.


class Way(NamedTuple):
    """How parameters are stored and updated.

    `wrap` makes an optimizer of them, of any optimizer and a seed; its `init` takes the float32
    parameters. `grad_dtype` is the dtype of gradients; None means that of the parameters.
    """

    wrap: Callable[[Optimizer, int], Optimizer]
    dtype: Any = jnp.bfloat16
    grad_dtype: Any = jnp.float32


def nearest(optimizer: Optimizer, seed: int) -> Optimizer:
    """Returns the optimizer as optax runs it: its state is in the dtype of the parameters."""
    init = lambda params: optimizer.init(jmpx.optim.split_master(params)[0])  # noqa: E731
    return optax.GradientTransformation(init, optimizer.update)


def kahan(optimizer: Optimizer, seed: int) -> Optimizer:
    """Keeps what each update lost in bfloat16, and adds it to the next one: Kahan's summation."""

    def init(params: PyTree) -> PyTree:
        stored = jmpx.cast_to_full(jmpx.optim.split_master(params)[0])
        lost = jmpx.cast_tree(jax.tree.map(jnp.subtract, params, stored), jnp.bfloat16)
        return optimizer.init(params), lost

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, PyTree]:
        inner_state, lost = state
        old = jmpx.cast_to_full(params)
        updates, inner_state = optimizer.update(updates, inner_state, old)
        wanted = jax.tree.map(jnp.add, updates, jmpx.cast_to_full(lost))
        new = jmpx.cast_tree(jax.tree.map(jnp.add, old, wanted), jnp.bfloat16)
        taken = jax.tree.map(jnp.subtract, jmpx.cast_to_full(new), old)
        lost = jmpx.cast_tree(jax.tree.map(jnp.subtract, wanted, taken), jnp.bfloat16)
        return taken, (inner_state, lost)

    return optax.GradientTransformation(init, update)


WAYS = {
    "float32": Way(lambda optimizer, seed: optimizer, jnp.float32),
    "bfloat16": Way(nearest, grad_dtype=None),
    "bfloat16, float32 state": Way(
        lambda optimizer, seed: jmpx.optim.with_state_dtype(optimizer, jnp.float32)
    ),
    "bfloat16, stochastic": Way(
        lambda optimizer, seed: jmpx.optim.low_precision_params(optimizer, "stochastic", seed=seed)
    ),
    "bfloat16, stochastic, bfloat16 state": Way(
        lambda optimizer, seed: jmpx.optim.low_precision_params(
            optimizer, "stochastic", state_dtype=jnp.bfloat16, seed=seed
        )
    ),
    "bfloat16, Kahan": Way(kahan),
    "split master": Way(
        lambda optimizer, seed: jmpx.optim.low_precision_params(optimizer, "split")
    ),
    "split master, bfloat16 state": Way(
        lambda optimizer, seed: jmpx.optim.low_precision_params(
            optimizer, "split", state_dtype=jnp.bfloat16, seed=seed
        )
    ),
}
OF_STATE = [name for name in WAYS if "state" in name]  # these differ where there is state
OF_PARAMS = [name for name in WAYS if name not in OF_STATE]


class Trained(NamedTuple):
    """What a training ends with, and the losses of its steps."""

    params: PyTree
    state: PyTree
    losses: np.ndarray

    def bytes(self) -> float:
        """Returns the bytes of parameters and optimizer state, for each parameter."""
        kept = [leaf for leaf in jax.tree.leaves((self.params, self.state)) if leaf.ndim]
        size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return sum(leaf.nbytes for leaf in kept) / size


def train(
    way: str,
    optimizer: Optimizer,
    masters: PyTree,
    loss_fn: Callable[[PyTree, Any], jax.Array],
    batches: PyTree,
    seed: int = 0,
) -> Trained:
    """Trains parameters that are stored in one of the ways, a step for each batch."""
    how = WAYS[way]
    optimizer = how.wrap(optimizer, seed)
    noop = jmpx.NoOpLossScale()
    grad_fn = jmpx.filter_value_and_grad(loss_fn, noop, policy="f32", grad_dtype=how.grad_dtype)

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        found = grad_fn(params, batch)
        return jmpx.optimizer_update(params, optimizer, state, found.grads, True), found.value

    @functools.partial(jax.jit, compiler_options=EXACTLY)
    def run(carry: Any, batches: Any) -> tuple[Any, jax.Array]:
        return jax.lax.scan(step, carry, batches)

    params = masters if how.dtype == jnp.float32 else jmpx.optim.split_master(masters)[0]
    (params, state), losses = run((params, optimizer.init(masters)), batches)
    return Trained(params, state, np.asarray(losses))


# The parts. Each yields the fields of its lines.


def counting(small: bool = False) -> Iterator[Fields]:
    """Adds 2**-10 to 1, a thousand times, in many parameters at once."""
    masters = {"w": jnp.ones(64 if small else 4096)}
    for way in OF_PARAMS:
        optimizer = optax.sgd(2.0**-10)
        trained = train(way, optimizer, masters, lambda p, _: -p["w"].sum(), jnp.zeros(1000))
        values = np.asarray(trained.params["w"], np.float64)
        fields = {"mean": values.mean(), "sd": values.std(), "exact": 1 + 1000 * 2.0**-10}
        yield {"way": way, "bytes": trained.bytes(), **fields}


def regression(small: bool = False) -> Iterator[Fields]:
    """Learns 100 weights of a linear function with noise of 0.01, whose square is the best loss."""
    steps, inputs, examples = (100, 8, 64) if small else (4000, 100, 2048)
    for seed in range(1 if small else 5):
        rng = np.random.default_rng(seed)
        weights = rng.normal(size=inputs)

        def draw(rng: np.random.Generator = rng, weights: np.ndarray = weights) -> Any:
            x = rng.normal(size=(examples, inputs))
            y = x @ weights + 0.01 * rng.normal(size=examples)
            return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

        def loss(params: PyTree, data: Any) -> jax.Array:
            x, y = data
            return jnp.mean((x @ params["w"].astype(jnp.float32) - y) ** 2)

        data, others = draw(), draw()
        masters = {"w": jnp.zeros(inputs)}
        for way in OF_PARAMS:
            loss_fn = lambda params, _, data=data: loss(params, data)  # noqa: E731
            trained = train(way, optax.sgd(0.01), masters, loss_fn, jnp.zeros(steps), seed)
            yield {"way": way, "seed": seed, "loss": float(loss(trained.params, others))}


SIZE = language_model.Size(width=48, context=32, batch=16, steps=2500)
SMALL = language_model.Size(width=8, layers=1, heads=2, context=8, batch=4, steps=20)


def transformer(small: bool = False) -> Iterator[Fields]:
    """Trains the language model, each way on the same batches."""
    size, text = SMALL if small else SIZE, language_model.read_text()
    loss_fn = language_model.make_loss(language_model.Precision(), size.heads)
    for seed in range(1 if small else 2):
        masters = language_model.init(size, text.characters, seed)
        batches = jnp.asarray(np.stack([*language_model.batches(text.train, size, seed)]))
        for way in WAYS:
            trained = train(way, optax.adam(1e-3), masters, loss_fn, batches, seed)
            loss = float(trained.losses[-size.steps // 10 :].mean())
            fields = {"bytes": trained.bytes(), "loss": loss, "text_sha256": text.sha256[:12]}
            yield {"way": way, "seed": seed, **fields}


def moments(small: bool = False) -> Iterator[Fields]:
    """Gives Adam gradients that are equal at all steps, and normal ones, and compares with float64.

    What bfloat16 makes of equal ones depends on their mantissa, and so each entry has another one.
    """
    steps, count = (100, 16) if small else (4000, 1024)
    drawn = np.random.default_rng(0).normal(size=(steps, count))
    equal = np.broadcast_to(2.0 ** np.linspace(-1, 1, count), (steps, count))
    for name, grads in {"equal": equal, "normal": drawn}.items():
        batches = jnp.asarray(grads, jnp.float32)
        age = np.arange(steps)[::-1]
        first = 0.1 * 0.9**age @ grads
        second = (1 - DECAY) * DECAY**age @ grads**2
        for way in ("bfloat16", "bfloat16, float32 state", "bfloat16, stochastic, bfloat16 state"):
            loss_fn = lambda params, grads: (params["w"] * grads).sum()  # noqa: E731
            trained = train(way, optax.adam(1e-6), {"w": jnp.ones(count)}, loss_fn, batches)
            mu, nu = (np.asarray(m["w"], np.float64) for m in adam_moments(trained.state))
            ratio, mean_square = nu / second, nu / (grads**2).mean(0)
            yield {
                "way": way,
                "gradients": name,
                "nu_over_mean_square": mean_square.mean(),
                "smallest_and_largest": [mean_square.min(), mean_square.max()],
                "nu_over_exact": ratio.mean(),
                "nu_sd": ratio.std(),
                "mu_error": float(np.sqrt(((mu - first) ** 2).mean() / (first**2).mean())),
            }


def adam_moments(state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the first and the second moment of an Adam that others may wrap."""
    is_adam = lambda part: isinstance(part, optax.ScaleByAdamState)  # noqa: E731
    (adam,) = (part for part in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(part))
    return adam.mu, adam.nu


def averages(small: bool = False) -> Iterator[Fields]:
    """Averages parameters that are 1 all the time, from 0.5 on."""
    steps = 100 if small else 5000
    exact = 1 - 0.5 * DECAY**steps
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        update = functools.partial(optax.incremental_update, step_size=1 - DECAY)
        found = repeat(lambda old, update=update: update(jnp.ones_like(old), old), steps, dtype)
        yield {"way": f"optax, {found.dtype.name}", "error": abs(float(found) - exact)}
    average = jmpx.optim.ema(DECAY)
    ones = jnp.ones((), jnp.bfloat16)
    init = average.init(jnp.full((), 0.5, jnp.bfloat16))
    found = repeat(lambda state: average.update(ones, state)[1], steps, init=init).average
    yield {"way": "jmpx.optim.ema of bfloat16", "error": abs(float(found) - exact)}


def repeat(func: Callable[[Any], Any], times: int, dtype: Any = None, init: Any = None) -> Any:
    """Applies a function many times, first to `init` or to 0.5."""
    init = jnp.full((), 0.5, dtype) if init is None else init
    body = lambda _, value: func(value)  # noqa: E731
    run = jax.jit(lambda init: jax.lax.fori_loop(0, times, body, init), compiler_options=EXACTLY)
    return run(init)


def rounding(small: bool = False) -> Iterator[Fields]:
    """Rounds normal numbers, and splits them."""
    count = 1000 if small else 2**22
    x = np.random.default_rng(0).normal(size=count).astype(np.float32)
    key = jax.random.key(0)
    rounded = np.asarray(jmpx.optim.stochastic_round(x, jnp.bfloat16, key), np.float64)
    _, exponent = np.frexp(x)
    errors = (rounded - x) / 2.0 ** (exponent - 8)  # bfloat16 has 8 digits
    yield {
        "way": "jmpx.optim.stochastic_round",
        "mean_error_ulp": errors.mean(),
        "standard_error_ulp": errors.std() / count**0.5,
    }
    x = jnp.asarray(x)
    high, low = jmpx.optim.split_master(x)
    back = jmpx.optim.merge_master(high, low)
    same = np.asarray(back).view(np.uint32) == np.asarray(x).view(np.uint32)
    yield {
        "way": "jmpx.optim.split_master",
        "rebuilt": same.mean(),
        "high_is_the_cast": float((high == x.astype(jnp.bfloat16)).mean()),
    }


PARTS = {
    each.__name__: each for each in (counting, regression, transformer, moments, averages, rounding)
}


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=[*PARTS])
    parser.add_argument("--small", action="store_true", help="sizes for a test: seconds")
    args = parser.parse_args(arguments)
    with tqdm(unit="line", disable=None) as progress:
        for part in args.part:
            for fields in PARTS[part](args.small):
                records.emit("storage", part=part, **fields)
                progress.update()


if __name__ == "__main__":
    main()
