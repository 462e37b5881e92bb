"""Norms run in float32, and what reads their result reads it rounded, once."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32, leniently, normal
from jax import lax

import jmpx

SHAPE = (4, 6, 6, 8)  # an image


def by_hand(axes, running=False):
    """A norm as users write it."""

    def norm(h, s, b, mean, var):
        if not running:
            mean = h.mean(axes, keepdims=True)
            var = ((h - mean) ** 2).mean(axes, keepdims=True)
        return (h - mean) * lax.rsqrt(var + 1e-5) * s + b

    return norm


def rms(h, s, *_):
    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6) * s


def haiku(make, **running):
    @leniently
    def norm(h, s, *_):
        init, _ = hk.transform_with_state(lambda h: make()(h, **dict.fromkeys(running, True)))
        _, apply = hk.transform_with_state(lambda h: make()(h, **running))
        given = jax.tree.map(
            lambda leaf: s.reshape(leaf.shape) if leaf.size == s.size else jnp.zeros_like(leaf),
            init(None, h),
        )
        return apply(*given, None, h)[0]

    return norm


def linen(make):
    def norm(h, s, b, mean, var):
        variables = {"params": {"scale": s, "bias": b}, "batch_stats": {"mean": mean, "var": var}}
        return make().apply(variables, h, mutable=["batch_stats"])[0]

    return norm


def of_nnx(make):
    def norm(h, s, b, mean, var):
        module = make(nnx.Rngs(0))
        given = {"scale": s, "bias": b, "mean": mean, "var": var}
        for name, vector in given.items():
            variable = getattr(module, name, None)
            if isinstance(variable, nnx.Variable):
                variable[...] = vector
        return module(h)

    return norm


def equinox(make):
    def norm(h, s, b, *_):
        module = eqx.tree_at(
            lambda m: (m.weight, m.bias), make(), (s, b), is_leaf=lambda x: x is None
        )
        for _ in range(3):
            module = jax.vmap(module)
        return module(h)

    return norm


def equinox_groups(h, s, b, *_):
    module = eqx.nn.GroupNorm(2, 8)
    module = eqx.tree_at(lambda m: (m.weight, m.bias), module, (s, b))
    return jnp.moveaxis(jax.vmap(module)(jnp.moveaxis(h, -1, 1)), 1, -1)


def equinox_batch(is_training):
    def norm(h, s, b, mean, var):
        module, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="ema")
        module = eqx.tree_at(lambda m: (m.weight, m.bias), module, (s, b))
        state = state.set(module.ema_state_index, (mean, var))
        state = state.set(module.ema_first_time_index, jnp.array(False))
        module = eqx.nn.inference_mode(module, not is_training)
        run = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return jnp.moveaxis(run(jnp.moveaxis(h, -1, 1), state)[0], 1, -1)

    return norm


NORMS = {
    "layer": by_hand(-1),
    "batch": by_hand((0, 1, 2)),
    "running": by_hand((), running=True),
    "rms": rms,
    "haiku LayerNorm": haiku(lambda: hk.LayerNorm(-1, True, True)),
    "haiku RMSNorm": haiku(lambda: hk.RMSNorm(-1)),
    "haiku GroupNorm": haiku(lambda: hk.GroupNorm(2)),
    "haiku BatchNorm": haiku(lambda: hk.BatchNorm(True, True, 0.9), is_training=True),
    "haiku BatchNorm, running": haiku(lambda: hk.BatchNorm(True, True, 0.9), is_training=False),
    "linen LayerNorm": linen(nn.LayerNorm),
    "linen RMSNorm": linen(nn.RMSNorm),
    "linen GroupNorm": linen(lambda: nn.GroupNorm(2)),
    "linen BatchNorm": linen(lambda: nn.BatchNorm(use_running_average=False)),
    "linen BatchNorm, running": linen(lambda: nn.BatchNorm(use_running_average=True)),
    "nnx LayerNorm": of_nnx(lambda rngs: nnx.LayerNorm(8, rngs=rngs)),
    "nnx RMSNorm": of_nnx(lambda rngs: nnx.RMSNorm(8, rngs=rngs)),
    "nnx GroupNorm": of_nnx(lambda rngs: nnx.GroupNorm(8, 2, rngs=rngs)),
    "nnx BatchNorm": of_nnx(lambda rngs: nnx.BatchNorm(8, rngs=rngs)),
    "nnx BatchNorm, running": of_nnx(
        lambda rngs: nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
    ),
    "equinox LayerNorm": equinox(lambda: eqx.nn.LayerNorm(8)),
    "equinox RMSNorm": equinox(lambda: eqx.nn.RMSNorm(8)),
    "equinox GroupNorm": equinox_groups,
    "equinox BatchNorm": equinox_batch(True),
    "equinox BatchNorm, running": equinox_batch(False),
}
READERS = {
    "relu": lambda y, h: jax.nn.relu(y),
    "silu": lambda y, h: jax.nn.silu(y),
    "gelu": lambda y, h: jax.nn.gelu(y),
    "residual": lambda y, h: y + h,
    "slice": lambda y, h: y[:, ::2],
    "transpose": lambda y, h: y.swapaxes(0, 1),
    "maximum": lambda y, h: jnp.maximum(y, 0),
    "jit": lambda y, h: jax.jit(jnp.abs)(y),
    "checkpoint": lambda y, h: jax.checkpoint(lambda y: jax.nn.silu(y))(y),
    "branch": lambda y, h: lax.cond(h[0, 0, 0, 0] > 0, jax.nn.relu, jax.nn.silu, y),
    "scan": lambda y, h: lax.scan(lambda c, y: (c, jax.nn.silu(y)), None, y)[1],
}


def arguments(rng):
    x, w = normal(rng, *SHAPE), normal(rng, 8, 8) / 3
    scale, bias, mean = 1 + normal(rng, 8) / 4, normal(rng, 8), normal(rng, 8)
    return x, w, scale, bias, mean, normal(rng, 8) ** 2 + 0.5


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_runs_in_float32_and_is_rounded_once(rng, norm):
    x, w, *given = arguments(rng)

    def f(x, w, *given):
        h = x @ w
        y = NORMS[norm](h, *given)
        results = {name: reader(y, h) for name, reader in READERS.items()}
        return h, results, [result @ w for result in results.values()]

    h, results, _ = jax.eval_shape(jmpx.autocast(f, output=None), x, w, *given)
    assert h.dtype == BF16
    assert {name for name, result in results.items() if result.dtype == F32} == set()
    h, result, _ = jmpx.autocast(
        lambda *args: (
            *(h := args[0] @ args[1],),
            y := NORMS[norm](h, *args[2:])[::2],
            y @ args[1],
        ),
        output=None,
    )(x, w, *given)
    expected = NORMS[norm](h.astype(F32), *given)[::2]
    error = np.abs(np.asarray(result, F32) - expected)
    # Half of a bfloat16's last digit, and what sums in another order make of it.
    assert (error <= 0.00391 * np.abs(expected) + 1e-5).all(), error.max()
