"""A step of a language model with 32,000 tokens, whose head is a scope that rules may select."""

import dataclasses

import jax
import numpy as np
import optax
import steps
from models import LanguageModel, Params, Zeros, affine, cross_entropy

import jmpx

TOKENS = 32_000
ROUNDED = "by=operations,c=bf16,o=f32"
KEPT = f"{ROUNDED}; head: product=f32"


@dataclasses.dataclass(frozen=True)
class Model(LanguageModel):
    layers: int = 1
    classes: int = TOKENS
    islands: bool = False

    def _classify(self, params: Params, x: jax.Array) -> jax.Array:
        x = self.normalized(params["norm"], x)
        with jax.named_scope("head"):
            return affine(params["head"], x)


def traced(policy, sharding):
    """Returns the traced step under a policy, on descriptions of arrays with this sharding."""
    model, rng = Model(), Zeros(np.random.PCG64())
    params = jax.eval_shape(lambda: model.init(rng))
    state = params, jax.eval_shape(steps.ADAM.init, params)
    batch = jax.eval_shape(lambda: model.batch(rng, 8))
    apply = jmpx.apply_policy(model.apply, policy)

    def step(state, text, labels):
        params, opt_state = state
        grads = jax.grad(lambda params: cross_entropy(apply(params, text), labels))(params)
        updates, opt_state = steps.ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    on = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return jax.jit(step, donate_argnums=0).trace(*jax.tree.map(on, (state, *batch)))
