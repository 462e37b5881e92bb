"""Measures what an audit costs over tracing alone, as lines of JSON.

    python benchmarks/audit_cost.py --layers 24 48 --runs=5

A vision transformer, cast to bfloat16 by hand, as a loss (which the audit differentiates) and as a
train step with Adam, of shapes alone. Each run clears JAX's caches; a line holds the least CPU
seconds of each, because what else the machine does only adds to them. An audit of a loss traces it
once more, to see that it contains no gradient, unless its name says that it is a loss.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import records
from models import ViT
from tqdm import tqdm

import jmpx

ADAM = optax.adam(1e-3)


def programs(layers: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns a loss and a step of a model, each with the shapes of its arguments."""
    model = ViT(layers=layers)
    params = jax.eval_shape(lambda: model.init(np.random.default_rng(0)))
    batch = jax.eval_shape(lambda: model.batch(np.random.default_rng(0)))
    state = jax.eval_shape(ADAM.init, params)

    def loss_fn(params: Any, images: Any, labels: Any) -> Any:
        params, images = jmpx.cast_tree((params, images), jnp.bfloat16)
        return model.loss(params, images, labels)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return {"loss": (loss_fn, (params, *batch)), "step": (step, (params, state, *batch))}


def fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns another function that does the same, of which JAX knows no trace."""

    def loss_or_step(*args: Any) -> Any:
        return fn(*args)

    loss_or_step.__name__ = fn.__name__
    return loss_or_step


def seconds(fn: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Returns the CPU seconds that a call takes, with empty caches."""
    jax.clear_caches()
    start = time.process_time()
    fn(*args)
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 48])
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args(arguments)
    for layers in tqdm(given.layers):
        for name, (fn, args) in programs(layers).items():
            traced = jax.value_and_grad(fn) if name == "loss" else fn
            trace, audit = float("inf"), float("inf")
            for _ in range(given.runs):
                trace = min(trace, seconds(jax.make_jaxpr(fresh(traced)), args))
                audit = min(audit, seconds(jmpx.inspect.audit(fresh(fn)), args))
            records.emit(
                "audit_cost",
                program=name,
                layers=layers,
                trace_s=round(trace, 3),
                audit_s=round(audit, 3),
                ratio=round(audit / trace, 3),
            )


if __name__ == "__main__":
    main()
