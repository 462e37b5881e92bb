"""Trains the network of `train.py` with parameters that are stored in bfloat16.

    python examples/haiku/storage.py --params_rounding=stochastic --learning_rate=1e-4

Such parameters lose small updates unless these are rounded stochastically, or the bits that the
parameters lack are kept in the optimizer's state (`split`).
"""

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import train
from absl import app, flags

import jmpx

ROUNDING = flags.DEFINE_enum(
    "params_rounding",
    "stochastic",
    ["nearest", "stochastic", "split"],
    "How updates of 16-bit parameters are rounded: nearest drops the small ones.",
)
flags.FLAGS.set_default("mp_policy", "by=arguments,bf16-true")
flags.register_validator(
    "mp_policy",
    lambda policy: jmpx.get_policy_map(policy).default.param_dtype == jnp.bfloat16,
    "this example stores parameters in bfloat16: write params=bfloat16",
)


def make_masters(images: Any) -> hk.Params:
    """Returns the parameters as the network makes them without policies: float32."""
    init = jax.jit(train.network.init, static_argnums=2)
    with jmpx.push_policy(hk.BatchNorm, "float32"):
        return init(jax.random.key(train.SEED.value), images[:1], True)[0]


def as_stored(master: jax.Array, param: jax.Array) -> jax.Array:
    """Returns a float32 parameter in the dtype in which the network stores it."""
    if param.dtype == jnp.bfloat16:
        return jmpx.optim.split_master(master)[0]  # The optimizer's state has the rest, if any.
    return jmpx.cast_tree(master, param.dtype)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")
    data, test_data = train.load_digits()
    optimizer, grad_dtype = train.make_adam(data), None
    state = train.make_state(optimizer, data.images)
    masters = state.params
    if ROUNDING.value != "nearest":
        rounding: Any = ROUNDING.value
        optimizer = jmpx.optim.low_precision_params(optimizer, rounding, seed=train.SEED.value)
        masters, grad_dtype = make_masters(data.images), jnp.float32
        state = state._replace(params=jax.tree.map(as_stored, masters, state.params))
    optimizer = jmpx.skip_nonfinite(optimizer)
    state = state._replace(opt_state=optimizer.init(masters))
    step = functools.partial(train.train_step, optimizer, grad_dtype=grad_dtype)
    train.train(step, state, data, test_data)


if __name__ == "__main__":
    app.run(main)
