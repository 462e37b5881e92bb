"""Types of loss scales, gradients and optimizer steps. Run here, and checked by pyright."""

# An ignored error must be there: it is what this file asserts.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
import pytest
from flax import nnx
from typed_models import Params, make_params, ones, predict

import jmpx


def loss_fn(params: Params, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return predict(params, x, scale=scale)["y"].sum()


def loss_and_count(params: Params, x: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, x), x.size


@pytest.fixture
def x() -> jax.Array:
    return ones(4, 2)


def test_loss_scales() -> None:
    params = make_params()
    noop, static = jmpx.NoOpLossScale(), jmpx.StaticLossScale(np.float16(8))
    dynamic = jmpx.DynamicLossScale(jnp.float32(2**10), period=7, factor=2, max_loss_scale=2.0**20)
    assert_type(noop.adjust(True), jmpx.NoOpLossScale)
    assert_type(static.adjust(np.bool_(True)), jmpx.StaticLossScale)
    assert_type(dynamic.adjust(jmpx.all_finite(params)), jmpx.DynamicLossScale)
    assert_type(noop.loss_scale, float)
    assert_type(static.loss_scale, np.float32)
    assert_type(dynamic.period, int)
    scales: list[jmpx.LossScale] = [noop, static, dynamic, jmpx.mpx.DynamicLossScaling(2.0**10)]
    for scale in scales:
        assert_type(scale.scale(params), Params)
        assert_type(scale.unscale(params), Params)


def test_loss_scales_from_strings_and_mappings() -> None:
    assert_type(jmpx.get_loss_scale("dynamic, init=2**15"), jmpx.LossScale)
    assert_type(jmpx.get_loss_scale({"type": "static", "init": 8}), jmpx.LossScale)
    assert_type(jmpx.get_loss_scale("auto", policy="f16"), jmpx.LossScale)
    assert_type(jmpx.get_loss_scale("auto", jmpx.get_policy_map("f16")), jmpx.LossScale)
    assert_type(jmpx.get_loss_scale(jmpx.StaticLossScale(8)), jmpx.StaticLossScale)
    dynamic = jmpx.DynamicLossScale(hysteresis=2)
    assert_type(jmpx.get_loss_scale(dynamic, policy=jmpx.get_policy("f32")), jmpx.DynamicLossScale)
    assert_type(dynamic.to_dict(), dict[str, str | int | float])
    assert_type(dynamic.hysteresis, int)
    with pytest.raises(TypeError):
        jmpx.get_loss_scale(8)  # pyright: ignore[reportArgumentType, reportCallIssue]
    scale: jmpx.LossScale = jmpx.get_loss_scale("none")
    assert str(scale) == "none" and scale.to_dict() == {"type": "none"}


def test_gradients(x: jax.Array) -> None:
    dynamic = jmpx.DynamicLossScale(8.0)
    policy = jmpx.get_policy_map("bf16-mixed")
    result = jmpx.grad(loss_fn, dynamic, policy=policy)(make_params(), x, scale=2.0)
    assert_type(result.loss_scale, jmpx.DynamicLossScale)
    assert_type(result.grads_finite, jax.Array)
    assert isinstance(result.grads, Params)
    scaling, grads_finite, grads = result
    assert_type(scaling, jmpx.DynamicLossScale)
    assert_type(grads_finite, jax.Array)
    assert scaling is result.loss_scale and grads is result.grads
    named: jmpx.types.Gradients[jmpx.DynamicLossScale] = result
    assert named._fields == ("loss_scale", "grads_finite", "grads")

    static = jmpx.StaticLossScale(8.0)
    with_aux = jmpx.grad(loss_and_count, static, has_aux=True, policy="c=bf16")(make_params(), x)
    assert_type(with_aux.loss_scale, jmpx.StaticLossScale)
    assert_type(with_aux.grads_finite, jax.Array)
    assert_type(with_aux.aux, int)
    new_static, _, grads, aux = with_aux
    assert_type(new_static, jmpx.StaticLossScale)
    assert_type(aux, int)
    assert isinstance(grads, Params) and aux == 8
    named_too: jmpx.types.GradientsAndAux[jmpx.StaticLossScale, int] = with_aux
    assert named_too._fields == ("loss_scale", "grads_finite", "grads", "aux")


def test_values_and_gradients(x: jax.Array) -> None:
    noop = jmpx.NoOpLossScale()
    policy = jmpx.get_policy_map("f32")
    result = jmpx.value_and_grad(loss_fn, noop, policy=policy)(make_params(), x, scale=2.0)
    assert_type(result.value, jax.Array)
    assert_type(result.loss_scale, jmpx.NoOpLossScale)
    assert_type(result.grads_finite, jax.Array)
    assert isinstance(result.grads, Params)
    value, scaling, grads_finite, _ = result
    assert_type(value, jax.Array)
    assert_type(scaling, jmpx.NoOpLossScale)
    assert_type(grads_finite, jax.Array)

    grad_fn = jmpx.value_and_grad(loss_and_count, noop, has_aux=True, policy="c=bf16")
    with_aux = grad_fn(make_params(), x)
    assert_type(with_aux.value, tuple[jax.Array, int])
    named: jmpx.types.ValueAndGradients[tuple[jax.Array, int], jmpx.NoOpLossScale] = with_aux
    assert named._fields == ("value", "loss_scale", "grads_finite", "grads")
    (value, aux), scaling, _, grads = with_aux
    assert_type(value, jax.Array)
    assert_type(aux, int)
    assert_type(scaling, jmpx.NoOpLossScale)
    assert isinstance(grads, Params) and aux == 8


def test_differentiated_functions_keep_the_signature(x: jax.Array) -> None:
    grad = jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy="f32")
    value_and_grad = jmpx.value_and_grad(loss_fn, jmpx.NoOpLossScale(), policy="f32")
    with pytest.raises(TypeError):
        grad(make_params())  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        value_and_grad(make_params(), x, size=2.0)  # pyright: ignore[reportCallIssue]


def test_gradients_in_a_dtype_of_their_own(x: jax.Array) -> None:
    noop, params = jmpx.NoOpLossScale(), jmpx.cast_tree(make_params(), jnp.bfloat16)
    grad = jmpx.grad(loss_fn, noop, policy="by=arguments,bf16", grad_dtype=jnp.float32)
    assert_type(grad(params, x), jmpx.types.Gradients[jmpx.NoOpLossScale])
    for dtype in "float32", np.dtype(np.float32), np.float32, None:
        value_and_grad = jmpx.value_and_grad(
            loss_and_count, noop, has_aux=True, policy="by=arguments,bf16", grad_dtype=dtype
        )
        assert_type(value_and_grad(params, x).value, tuple[jax.Array, int])
    with pytest.raises(TypeError):
        jmpx.grad(loss_fn, noop, policy="bf16", grad_dtype=32)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        jmpx.grad(loss_fn, noop)  # pyright: ignore[reportCallIssue]


def test_sharded_parameters_keep_their_type() -> None:
    def gathered(params: Params) -> Params:
        whole = jmpx.distributed.gather(params, "data", "c=bf16", axis=None)
        assert_type(whole, Params)
        assert_type(
            jmpx.distributed.gather({"w": ones(3)}, ("data",), "c=f16,r=f32"), dict[str, jax.Array]
        )
        return whole

    jax.vmap(gathered, axis_name="data", axis_size=2, in_axes=None)(make_params())


class State(NamedTuple):
    params: Params
    optimizer_state: optax.OptState
    scaling: jmpx.LossScale


def step(state: State, x: jax.Array, optimizer: optax.GradientTransformation) -> State:
    """A train step, as a program writes it."""
    grad = jmpx.grad(loss_fn, state.scaling, policy="16-mixed")
    scaling, grads_finite, grads = grad(state.params, x)
    params, optimizer_state = jmpx.optimizer_update(
        state.params, optimizer, state.optimizer_state, grads, grads_finite
    )
    assert_type(params, Params)
    assert_type(optimizer_state, optax.OptState)
    return State(params, optimizer_state, scaling)


def test_a_train_step(x: jax.Array) -> None:
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.5))
    assert_type(optimizer, optax.GradientTransformationExtraArgs)
    params = make_params()
    state = State(params, optimizer.init(params), jmpx.DynamicLossScale(8.0))
    state = step(state, x, optimizer)
    assert isinstance(state.optimizer_state, jmpx.types.SkipNonfiniteState)
    assert_type(state.optimizer_state.grads_finite, jax.Array)
    assert_type(state.optimizer_state.total_skipped, jax.Array)
    assert_type(state.optimizer_state.consecutive_skipped, jax.Array)
    assert state.optimizer_state.total_skipped == 0


def test_16_bits() -> None:
    inner = jmpx.optim.with_state_dtype(optax.sgd(0.5), "bf16", seed=1)
    optimizer = jmpx.optim.low_precision_params(inner, "split", seed=1)
    assert_type(optimizer, optax.GradientTransformationExtraArgs)
    params = make_params()
    optimizer_state = optimizer.init(params)
    assert isinstance(optimizer_state, jmpx.types.LowPrecisionParamsState)
    assert_type(optimizer_state.count, jax.Array | None)
    assert isinstance(optimizer_state.inner_state, jmpx.types.StateDtypeState)
    assert_type(optimizer_state.inner_state.count, jax.Array)
    optimizer = jmpx.optim.with_state_dtype(
        optax.MultiSteps(optax.sgd(0.5), 2), jnp.float32, seed=1
    )
    assert_type(optimizer, optax.GradientTransformationExtraArgs)
    with pytest.raises(ValueError):
        jmpx.optim.low_precision_params(optimizer, "kahan")  # pyright: ignore[reportArgumentType]


def test_progress(x: jax.Array) -> None:
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.5), skip_by="cond")
    params = make_params()
    state = optimizer.init(params)
    jmpx.inspect.check_progress(state, jmpx.NoOpLossScale())
    jmpx.inspect.check_progress(
        (state, state), jmpx.DynamicLossScale(8.0), params, max_consecutive=7
    )
    with pytest.raises(TypeError):
        jmpx.inspect.check_progress(state)  # pyright: ignore[reportCallIssue]
    counts = jmpx.inspect.nonfinite(params)
    assert_type(counts, dict[str, jmpx.inspect.NonfiniteCounts])
    for count in counts.values():
        assert_type(count.inf, jax.Array)
        assert_type(count.nan, jax.Array)


def test_metrics() -> None:
    state = jmpx.skip_nonfinite(optax.sgd(0.5)).init(make_params())
    metrics = jmpx.metrics(state, jmpx.DynamicLossScale(8.0))
    assert_type(metrics, dict[str, jax.Array])
    assert metrics.keys() > jmpx.metrics(loss_scale=jmpx.NoOpLossScale()).keys()
    with pytest.raises(TypeError):
        jmpx.metrics(state, 8.0)  # pyright: ignore[reportArgumentType]


def test_an_update_keeps_the_types_of_model_and_state() -> None:
    optimizer, params = optax.sgd(0.5), {"w": ones(3)}
    state = (optax.EmptyState(), optax.EmptyState())
    model, new_state = jmpx.optimizer_update(params, optimizer, state, params, True)
    assert_type(model, dict[str, jax.Array])
    assert_type(new_state, tuple[optax.EmptyState, optax.EmptyState])


def test_an_update_takes_an_optimizer_of_nnx() -> None:
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.sgd(0.5), wrt=nnx.Param)
    model, same = jmpx.optimizer_update(module, optimizer, grads=module, grads_finite=True)
    assert_type(model, nnx.Linear)
    assert_type(same, nnx.Optimizer[nnx.Linear])
    with pytest.raises(TypeError):
        jmpx.optimizer_update(module, optimizer, module, True)  # pyright: ignore[reportCallIssue]


def test_options_of_a_gradient_function(x: jax.Array) -> None:
    batch = jmpx.Batch(argnums=(1,), microbatches=2)
    assert_type(batch, jmpx.Batch)
    assert_type(batch.microbatches, int)
    noop, params = jmpx.NoOpLossScale(), make_params()
    grad = jmpx.grad(loss_fn, noop, policy="f32", batch=batch, uncast=(1, "scale"))
    assert_type(grad(params, x), jmpx.types.Gradients[jmpx.NoOpLossScale])
    over = jmpx.Over("data", sharded=False)
    assert_type(over, jmpx.Over)
    grad = jmpx.grad(loss_fn, noop, policy="bf16", over=over, batch=None)
    mapped = jax.vmap(grad, in_axes=(None, 0), axis_name="data")
    found = jax.eval_shape(mapped, params, ones(2, 4, 2))  # pyright: ignore[reportUnknownMemberType]
    assert isinstance(found, jmpx.types.Gradients)
    with pytest.raises(TypeError):
        jmpx.grad(loss_fn, noop, policy="full", batch=8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        jmpx.grad(loss_fn, noop, policy="full", axis_name="data")  # pyright: ignore[reportCallIssue]
    assert_type(
        jmpx.grad(loss_fn, noop, policy="f32", microbatches=2)(params, x),
        jmpx.types.Gradients[jmpx.NoOpLossScale],
    )
    jmpx.grad(loss_fn, noop, policy="f32", over=("data", "model"))
    with pytest.raises(TypeError):
        jmpx.Batch(microbatches="2")  # pyright: ignore[reportArgumentType]
