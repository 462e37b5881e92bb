"""Programs of `train.py` for `python -m jmpx`, which says what runs in which dtype, and why.

python -m jmpx audit examples/haiku/reports.py:make -- --mp_policy=c=bf16
python -m jmpx first-nonfinite examples/haiku/reports.py:make_arrays -- --mp_policy=c=f16
python -m jmpx choose examples/haiku/reports.py:make_losses --error 0.05 --policy c=f16
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import train

import jmpx


def make() -> tuple[Any, tuple[Any, train.Data]]:
    """Makes the train step and the shapes of its arguments, for `audit`."""
    images: Any = jax.ShapeDtypeStruct((train.BATCH_SIZE.value, 8, 8, 1), jnp.float32)
    labels: Any = jax.ShapeDtypeStruct((train.BATCH_SIZE.value,), jnp.int32)
    batch = train.Data(images, labels)
    optimizer = jmpx.skip_nonfinite(train.make_adam(batch))
    state = jax.eval_shape(functools.partial(train.make_state, optimizer), images)
    return functools.partial(train.train_step, optimizer), (state, batch)


def make_arrays() -> tuple[Any, tuple[train.TrainState, train.Data]]:
    """Makes the train step and its first arguments, for `ranges` and `first-nonfinite`."""
    data, _ = train.load_digits()
    batch = train.batches(data, np.random.default_rng(train.SEED.value))[0]
    optimizer = jmpx.skip_nonfinite(train.make_adam(data))
    state = train.make_state(optimizer, data.images)
    return functools.partial(train.train_step, optimizer), (state, batch)


def make_losses() -> tuple[Any, list[tuple[Any, ...]]]:
    """Makes the loss and batches of its arguments, for `choose`."""
    data, _ = train.load_digits()
    rng = np.random.default_rng(train.SEED.value)
    init = jax.jit(train.network.init, static_argnums=2)
    params, model_state = init(jax.random.key(train.SEED.value), data.images[:1], True)
    return train.loss_fn, [(params, model_state, each) for each in train.batches(data, rng)[:2]]
