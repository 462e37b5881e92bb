"""Train steps that `jax.export` serializes: each class of jmpx among arguments and results."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, run_python

import jmpx

SCALES = {
    "none": jmpx.NoOpLossScale(),
    "static": jmpx.StaticLossScale(1e-3),
    "dynamic": jmpx.DynamicLossScale(2.0**14, 1, period=2, factor=1.1),
    "bounds": jmpx.DynamicLossScale(3.0, max_loss_scale=5.5, backoff_factor=0.3, hysteresis=2),
    "mpx": jmpx.mpx.DynamicLossScaling(2.0**14, period=2),
}
# Optax registers none of its own states, so the optimizers inside have plain dicts.
INNER = optax.GradientTransformationExtraArgs(
    lambda params: {"trace": jax.tree.map(jnp.zeros_like, params)},
    lambda updates, state, params=None, **_: (
        jax.tree.map(lambda u: -0.1 * u, updates),
        {"trace": jax.tree.map(lambda t, u: 0.5 * t + u, state["trace"], updates)},
    ),
)
OPTIMIZERS = {
    "skip_nonfinite": (jmpx.skip_nonfinite(INNER), jnp.float32),
    "stochastic": (jmpx.optim.low_precision_params(INNER, "stochastic"), jnp.bfloat16),
    "split": (jmpx.optim.low_precision_params(INNER, "split"), jnp.bfloat16),
    "with_state_dtype": (jmpx.optim.with_state_dtype(INNER, jnp.bfloat16), jnp.float32),
}
EMA = jmpx.optim.ema(0.9)
FUNCTIONS = {
    "ValueAndGradients": (jmpx.value_and_grad, {}),
    "Gradients": (jmpx.grad, {}),
    "GradientsAndAux": (jmpx.grad, {"has_aux": True}),
}


def check(step, *args):
    """Exports a step, and compares two steps of it with those of `jax.jit`, bit for bit."""
    step = jax.jit(step)
    data = jax.export.export(step)(*args).serialize()
    loaded = jax.export.deserialize(data)
    for _ in range(2):
        expected, result = step(*args), loaded.call(*args)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        assert_same_bits(result, expected)
        args = expected[: len(args)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_of_each_loss_scale_and_result(rng, scale, name):
    function, options = FUNCTIONS[name]

    def step(loss_scale, params):
        loss = lambda w: jnp.sum(w**2)  # noqa: E731
        aux = (lambda w: (loss(w), {"w": w})) if options else loss
        result = function(aux, loss_scale, policy="c=f16", **options)(params)
        return result.loss_scale, params - result.grads.astype(jnp.float32), result

    check(step, SCALES[scale], jnp.asarray(rng.normal(size=3), jnp.float32))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_each_optimizer_state_and_report(rng, name):
    optimizer, dtype = OPTIMIZERS[name]
    wide = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)}
    params = jax.tree.map(lambda w: w.astype(dtype), wide)

    def step(params, state, average):
        grads = jax.tree.map(lambda w: jnp.sin(w).astype(jnp.float32), params)
        new, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
        _, average = EMA.update(new, average)
        report = jmpx.inspect.update_report(params, grads)
        return new, state, average, report, jmpx.inspect.nonfinite(grads)

    check(step, params, optimizer.init(wide), EMA.init(params))


@pytest.mark.thorough
def test_another_process_loads_a_step_once_it_has_named_the_classes(tmp_path):
    scale, w = jmpx.DynamicLossScale(2.0**14, period=1), np.arange(3, dtype=np.float32)

    def step(loss_scale, w):
        return jmpx.grad(lambda w: jnp.sum(w**2), loss_scale, policy="c=bf16")(w)

    file = tmp_path / "step"
    file.write_bytes(jax.export.export(jax.jit(step))(scale, w).serialize())
    code = f"""
        import jax, numpy as np
        from jmpx import DynamicLossScale
        from jmpx.types import Gradients
        step = jax.export.deserialize(bytearray(open({str(file)!r}, "rb").read()))
        result = step.call(DynamicLossScale(2.0**14, period=1), np.arange(3, dtype=np.float32))
        print(type(result) is Gradients, result.loss_scale, result.grads)
    """
    result = run_python("-c", textwrap.dedent(code))
    assert result.stdout == "True dynamic,init=32768,period=1 [0. 2. 4.]\n", result.stderr
