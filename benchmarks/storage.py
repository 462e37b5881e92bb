"""Measures what it costs to keep parameters, optimizer state and averages in 16 bits.

    python benchmarks/storage.py --again            # all parts: some ten minutes of one CPU core
    python benchmarks/storage.py --again --only counting

Its parts:

- counting: 1,000 times 2**-10 is added to 1, which bfloat16 loses each time.
- regression: a linear regression by gradient descent, in small steps; the loss of other data.
- transformer: the small language model of `language_model.py`, trained by Adam at a rate of 1e-3;
  the mean of the last tenth of its losses.

All models compute in float32, so that only storage differs. Each number of 16 bits is rounded where
the program writes it (`jmpx.inspect.emulate`), because XLA leaves out casts that are cast back.
`bytes` are those of parameters and optimizer state, for each parameter.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
import records
from records import PyTree, Record

import jmpx

Optimizer = Any  # an optax gradient transformation


# --- The ways to store parameters ---


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


def rounded(rounding: Any, narrow_state: bool = False) -> Way:
    """Stores parameters as `low_precision_params` does, and the state in bfloat16 if asked."""

    def make(optimizer: Any, seed: int) -> Any:
        if narrow_state:
            optimizer = jmpx.optim.with_state_dtype(optimizer, jnp.bfloat16, seed=seed)
        return jmpx.optim.low_precision_params(optimizer, rounding, seed=seed)

    return Way(make)


WAYS = {
    "float32": Way(lambda optimizer, seed: optimizer, jnp.float32),
    "bfloat16": Way(nearest, grad_dtype=None),
    "bfloat16, float32 state": Way(lambda adam, _: jmpx.optim.with_state_dtype(adam, jnp.float32)),
    "bfloat16, stochastic": rounded("stochastic"),
    "bfloat16, stochastic, bfloat16 state": rounded("stochastic", narrow_state=True),
    "bfloat16, Kahan": Way(kahan),
    "split master": rounded("split"),
    "split master, bfloat16 state": rounded("split", narrow_state=True),
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
    policy = {"by": "arguments", "params": how.dtype, "compute": "float32"}
    noop = jmpx.NoOpLossScale()
    grad_fn = jmpx.value_and_grad(loss_fn, noop, policy=policy, grad_dtype=how.grad_dtype)

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        found = grad_fn(params, batch)
        return jmpx.optimizer_update(params, optimizer, state, found.grads, True), found.value

    @jax.jit
    @jmpx.inspect.emulate
    def run(carry: Any, batches: Any) -> tuple[Any, jax.Array]:
        return jax.lax.scan(step, carry, batches)

    params = masters if how.dtype == jnp.float32 else jmpx.optim.split_master(masters)[0]
    (params, state), losses = run((params, optimizer.init(masters)), batches)
    return Trained(params, state, np.asarray(losses))


# The parts. Each returns the figures of one way.


def counting(way: str, small: bool = False) -> Record:
    """Adds 2**-10 to 1, a thousand times, in many parameters at once."""
    masters = {"w": jnp.ones(64 if small else 4096)}
    optimizer = optax.sgd(2.0**-10)
    trained = train(way, optimizer, masters, lambda p, _: -p["w"].sum(), jnp.zeros(1000))
    values = np.asarray(trained.params["w"], np.float64)
    fields = {"mean": values.mean(), "sd": values.std(), "exact": 1 + 1000 * 2.0**-10}
    return {"bytes": trained.bytes(), **fields}


def regression(way: str, seed: int, small: bool = False) -> Record:
    """Learns 100 weights of a linear function with noise of 0.01, whose square is the best loss."""
    steps, inputs, examples = (100, 8, 64) if small else (4000, 100, 2048)
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=inputs)

    def draw() -> tuple[jax.Array, jax.Array]:
        x = rng.normal(size=(examples, inputs))
        y = x @ weights + 0.01 * rng.normal(size=examples)
        return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

    def loss(params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ params["w"].astype(jnp.float32) - y) ** 2)

    data, others = draw(), draw()
    masters = {"w": jnp.zeros(inputs)}
    loss_fn = lambda params, _: loss(params, *data)  # noqa: E731
    trained = train(way, optax.sgd(0.01), masters, loss_fn, jnp.zeros(steps), seed)
    return {"loss": float(loss(trained.params, *others))}


SIZE = language_model.Size(width=48, context=32, batch=16, steps=2500)
SMALL = language_model.Size(width=8, layers=1, heads=2, context=8, batch=4, steps=20)


def transformer(way: str, seed: int, small: bool = False) -> Record:
    """Trains the language model, each way on the same batches."""
    size, text = SMALL if small else SIZE, language_model.read_text()
    model = language_model.model_of(size, text)
    masters = model.init(np.random.default_rng(seed))
    batches = jnp.asarray(np.stack([*language_model.batches(text.train, size, seed)]))
    trained = train(way, optax.adam(1e-3), masters, language_model.make_loss(model), batches, seed)
    loss = float(trained.losses[-size.steps // 10 :].mean())
    return {"bytes": trained.bytes(), "loss": loss, "text_sha256": text.sha256[:12]}


PARTS = {each.__name__: each for each in (counting, regression, transformer)}
POINTS = [
    *({"part": "counting", "way": way} for way in OF_PARAMS),
    *({"part": "regression", "way": w, "seed": seed} for seed in range(5) for w in OF_PARAMS),
    *({"part": "transformer", "way": way, "seed": seed} for seed in range(2) for way in WAYS),
]


def measure(part: str, **point: Any) -> Record:
    return PARTS[part](**point)


def figures(found: list[Record], part: str, way: str, key: str) -> list[float]:
    """Returns one figure of all seeds."""
    return [r[key] for r in found if (r["part"], r["way"]) == (part, way) and key in r]


def over_float32(found: list[Record], way: str) -> list[float]:
    """Returns the transformer's losses less those of float32 with the same seed and JAX."""
    key = lambda r: (r["seed"], r["versions"]["jax"], r["python"])  # noqa: E731
    runs = [r for r in found if r["part"] == "transformer"]
    base = {key(r): r["loss"] for r in runs if r["way"] == "float32"}
    return [r["loss"] - base[key(r)] for r in runs if r["way"] == way and key(r) in base]


def cell(values: list[float], form: str) -> str:
    """Returns the mean, and the smallest and largest of several."""
    if not values:
        return ""
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{ends}"


def table(found: list[Record]) -> str:
    """Returns the table of one version of JAX: one row per way."""
    rows = []
    for way in WAYS:
        of = functools.partial(figures, found, way=way)
        sd = of("counting", key="sd")[:1]
        rows.append(
            (
                way,
                cell(of("counting", key="bytes")[:1], ".3g"),
                cell(of("transformer", key="bytes")[:1], ".3g"),
                cell(of("counting", key="mean"), ".4f") + (f" (sd {sd[0]:.3f})" if any(sd) else ""),
                cell(of("regression", key="loss"), ".1e"),
                cell(of("transformer", key="loss"), ".4f").partition(" ")[0],
                cell(over_float32(found, way), "+.4f") if way != "float32" else "",
            )
        )
    header = ("parameters", "bytes each", "with Adam", "1 + 1000 times 2^-10")
    header += ("regression, SGD", "language model, Adam", "less float32's")
    return records.table(header, rows)


RESULTS = records.RESULTS / "storage.jsonl"


BENCHMARKS: records.Benchmarks = {"storage": (POINTS, measure)}
main = functools.partial(records.main, __doc__, BENCHMARKS, out=RESULTS, by_version=True)

if __name__ == "__main__":
    main()
