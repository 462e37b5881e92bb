"""Types of MPX's words. They are run here, and checked by pyright."""

# An ignored error must be there, so that a type that became Any is noticed.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
from typed_models import Params, make_params, ones, predict

import jmpx.mpx


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    return jnp.mean(predict(params, x)["y"])


def test_casts_keep_the_type_of_the_tree() -> None:
    params = make_params()
    casts = [
        assert_type(jmpx.mpx.cast_tree(params, jnp.bfloat16), Params),
        assert_type(jmpx.mpx.cast_to_bfloat16(params), Params),
        assert_type(jmpx.mpx.cast_to_float16(params), Params),
        assert_type(jmpx.mpx.cast_to_float32(params), Params),
        assert_type(jmpx.mpx.cast_to_full_precision(params), Params),
        assert_type(jmpx.mpx.cast_to_half_precision(params), Params),
        assert_type(jmpx.mpx.select_tree(jmpx.mpx.all_finite(params), params, params), Params),
    ]
    assert all(isinstance(tree, Params) for tree in casts)


def test_force_full_precision_keeps_the_signature() -> None:
    full = jmpx.mpx.force_full_precision(predict, jnp.bfloat16)
    assert_type(full(make_params(), ones(4, 2), scale=2.0), dict[str, jax.Array])


def test_a_step() -> None:
    params, batch = make_params(), ones(4, 2)
    optimizer = optax.sgd(0.1)
    state = optimizer.init(params)
    scaling: jmpx.mpx.DynamicLossScaling = jmpx.mpx.DynamicLossScaling(2.0**10)
    scaling, _, grads = jmpx.mpx.filter_grad(loss_fn, scaling)(params, batch)
    assert isinstance(grads, Params)
    loss, scaling, finite, grads = jmpx.mpx.filter_value_and_grad(loss_fn, scaling)(params, batch)
    assert_type(loss, jax.Array)
    params, _ = jmpx.mpx.optimizer_update(params, optimizer, state, grads, finite)
    assert_type(params, Params)
    value, scaled_grads = jmpx.mpx.calculate_scaled_grad(loss_fn, scaling)(params, batch)
    assert value > 0 and isinstance(scaled_grads, Params)
    _, aux = jmpx.mpx.scaled(lambda: (ones(), 3), scaling, has_aux=True)()
    assert aux == 3 and assert_type(scaling.loss_scaling, Any) is not None
    assert_type(scaling.min_loss_scaling, float)


def test_dtypes() -> None:
    assert_type(jmpx.mpx.half_precision_datatype(), type[Any])
    jmpx.mpx.set_half_precision_datatype(jmpx.mpx.HALF_PRECISION_DATATYPE)
    assert_type(jmpx.mpx.FLOAT16_MAX, np.float32)
    assert jmpx.mpx.FLOAT16_MAX < jmpx.mpx.BFLOAT16_MAX
