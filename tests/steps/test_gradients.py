"""`jmpx.value_and_grad` and `jmpx.grad`: values, flags, arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F16, F32, normal
from helpers.jaxprs import equations_of
from helpers.training import LOSS_SCALES, POLICIES, by_hand, loss_fn, make_params

import jmpx
import jmpx.mpx as mpx

in_16_bits = pytest.mark.filterwarnings(  # on purpose
    "ignore:The gradient function differentiates parameters that are stored in less:UserWarning"
)

NO_SCALE = jmpx.NoOpLossScale()
HALF = "by=arguments,c=f16"

# Values


@pytest.mark.parametrize(
    ("kind", "policy", "jit"),
    [("NoOp", "bf16", False), ("Static", "f16", True), ("Dynamic", "f32", True)],
)
def test_value_and_gradients_equal_the_hand_written_ones(kind, policy, jit, rng):
    # To the bit: a power of two scales exactly, as long as nothing over- or underflows.
    params, x = make_params(rng), normal(rng, 5, 6)
    grad_fn = jmpx.value_and_grad(loss_fn, LOSS_SCALES[kind](), policy=f"by=arguments,c={policy}")
    value, scaling, finite, grads = (jax.jit(grad_fn) if jit else grad_fn)(params, x)
    reference = jax.jit(functools.partial(by_hand, dtype=POLICIES[policy]))
    expected_value, expected = reference(params, x)
    assert value.dtype == F32 and value.shape == ()
    assert finite.dtype == jnp.bool_ and bool(finite)
    assert jax.tree.structure(scaling) == jax.tree.structure(LOSS_SCALES[kind]())
    # Compiled, XLA keeps float32 between fused 16-bit operations; eager, it rounds after each.
    rounding = 0 if jit else float(jnp.finfo(POLICIES[policy]).eps)
    np.testing.assert_allclose(value, expected_value, rtol=2 * rounding)
    for name, grad in grads.items():
        assert grad.dtype == params[name].dtype
        np.testing.assert_allclose(grad, expected[name], rtol=4 * rounding, atol=rounding)


@pytest.mark.parametrize("step", ["growth", "shrink", "neither"])
def test_the_gradient_ratio_is_exactly_1_on_growth_and_shrink_steps(step, rng):
    # Products of few-bit numbers: exact in float16 and float32, so any wrong factor shows.
    w, x = (jnp.asarray(rng.integers(1, 8, size=8), F32) for _ in range(2))

    def loss_fn(params, x, overflow):
        v = params["v"].astype(F32)
        return (params["w"] * x).sum().astype(F32) * 2.0**-3 + v + 0 * v * overflow.astype(F32)

    @jax.jit
    def grads_of(scaling, overflow):
        grad_fn = jmpx.grad(loss_fn, scaling, policy="c=f16")
        return grad_fn({"w": w, "v": jnp.float32(0.0)}, x, overflow)

    for power in (-10, 0, 10, 15):
        period = 1 if step == "growth" else 9
        scaling = jmpx.DynamicLossScale(2.0**power, period=period, min_loss_scale=2.0**-20)
        overflow = jnp.float32(jnp.inf if step == "shrink" else 1.0)
        new_scaling, finite, grads = grads_of(scaling, overflow)
        factor = {"growth": 2, "shrink": 0.5, "neither": 1}[step]
        assert new_scaling.loss_scale == 2.0**power * factor
        assert bool(finite) == (step != "shrink")
        ratio = np.asarray(grads["w"]) / (np.asarray(x) * 2.0**-3)
        np.testing.assert_array_equal(ratio, np.ones(8))


class Enlarging(jmpx.DynamicLossScale):
    """A loss scale of the user's own that makes gradients ten times as large."""

    def unscale(self, tree):
        return jax.tree.map(lambda x: 10 * x, super().unscale(tree))


jax.tree_util.register_pytree_node(
    Enlarging, lambda s: ((s.loss_scale,), None), lambda _, leaves: Enlarging(*leaves)
)

SCALES = {
    "no-op": NO_SCALE,
    "static": jmpx.StaticLossScale(8),
    "static below 1": jmpx.StaticLossScale(2.0**-3),
    "dynamic": jmpx.DynamicLossScale(8.0),
    "dynamic below 1": jmpx.DynamicLossScale(2.0**-3, min_loss_scale=2.0**-5),
    "below its minimum": jmpx.DynamicLossScale(2.0**-3),
    "of one's own": Enlarging(1.0),
}
ENLARGED = ("static below 1", "dynamic below 1", "of one's own")


@pytest.mark.parametrize("dtype", [F32, F16])
@in_16_bits
def test_the_flag_is_that_of_the_gradients_as_they_are_returned(dtype):
    @jax.custom_vjp
    def loss_fn(params, slope):
        return jnp.float32(1)

    def backward(slope, scaled):
        return {"a": jnp.ones(2, dtype), "b": jnp.full(2, slope)}, jnp.zeros_like(slope)

    loss_fn.defvjp(lambda params, slope: (jnp.float32(1), slope), backward)
    params = {"a": jnp.ones(2, dtype), "b": jnp.ones(2, dtype)}

    @jax.jit
    def all_scales(slope):
        policy = jmpx.Policy(dtype, dtype, F32)
        of = lambda s: jmpx.grad(loss_fn, s, policy=policy)(params, slope)  # noqa: E731
        return {name: tuple(of(scale))[1:] for name, scale in SCALES.items()}

    # The largest number, divided by less than 1, overflows only when it is unscaled.
    for slope in (np.inf, np.nan, 1.0, "largest"):
        number = jnp.finfo(dtype).max if slope == "largest" else slope
        for name, (finite, grads) in all_scales(jnp.asarray(number, dtype)).items():
            assert bool(finite) == all(np.isfinite(np.asarray(g)).all() for g in grads.values())
            assert bool(finite) == (slope == 1 or slope == "largest" and name not in ENLARGED)


def test_float16_gradients_that_would_underflow_survive_and_are_exact(rng):
    w = jnp.asarray(rng.integers(1, 8, size=16), F32)

    def tiny(w):
        return (w * jnp.asarray(2.0**-12, w.dtype) * jnp.asarray(2.0**-14, w.dtype)).sum()

    _, _, grads = jmpx.grad(tiny, jmpx.StaticLossScale(2.0**14), policy=HALF)(w)
    np.testing.assert_array_equal(grads, jax.grad(tiny)(w))
    _, _, lost = jmpx.grad(tiny, NO_SCALE, policy=HALF)(w)
    np.testing.assert_array_equal(lost, np.zeros(16))


@pytest.mark.parametrize("dtype", [F32, F16])
@in_16_bits
def test_float16_gradients_are_never_multiplied_or_divided_in_float16(dtype):
    # The loss itself neither multiplies nor divides, so each product is of the scaling.
    grad_fn = jmpx.grad(lambda p: p["w"].sum(), jmpx.DynamicLossScale(), policy="c=f16")
    found = equations_of(grad_fn, {"w": jnp.ones(8, dtype)})
    arithmetic = [eqn for eqn in found if eqn.primitive.name in ("mul", "div")]
    assert len(arithmetic) >= 3
    assert {v.aval.dtype for eqn in arithmetic for v in eqn.invars} == {F32}


# Arguments


class Model:
    """A pytree with every kind of leaf, one of them twice."""

    def __init__(self, weight, shared, extras):
        self.weight, self.shared, self.extras = weight, shared, extras


jax.tree_util.register_pytree_node(
    Model,
    lambda m: ((m.weight, m.shared, m.shared, m.extras), None),  # pyright: ignore[reportArgumentType]
    lambda _, children: Model(children[0], (children[1], children[2]), children[3]),
)


@pytest.mark.thorough
@in_16_bits
def test_models_with_leaves_of_every_kind(rng):
    others = {"activation": jnp.tanh, "name": "model", "none": None, "rate": 0.5}
    keys = {"new key": jax.random.key(0), "old key": jax.random.PRNGKey(0)}
    others |= keys | {"steps": jnp.arange(2)}
    extras = others | {
        "numpy": rng.normal(size=3).astype(np.float32),
        "half": jnp.asarray(rng.normal(size=3), jnp.bfloat16),
        "complex": jnp.asarray([1 + 2j], jnp.complex64),
    }
    model = Model(normal(rng, 3), normal(rng, 3), extras)

    def loss_fn(model, x):
        assert model.weight.dtype == model.extras["half"].dtype == F16
        assert model.extras["complex"].dtype == jnp.complex64
        assert model.extras["rate"] == 0.5 and model.extras["name"] == "model"
        h = model.extras["activation"](x * model.weight) + model.extras["numpy"]
        h = h + model.extras["half"] * sum(jax.tree.leaves(model.shared)[:1])
        noise = jax.random.normal(model.extras["new key"], (3,), h.dtype)
        square = (model.extras["complex"] * model.extras["complex"].conj()).real
        return (h + noise).sum().astype(F32) + square.sum()

    grad_fn = jmpx.value_and_grad(loss_fn, LOSS_SCALES["Dynamic"](), policy=HALF)
    value, _, finite, grads = grad_fn(model, rng.normal(size=3).astype(np.float32))
    assert value.dtype == F32 and bool(finite) and isinstance(grads, Model)
    assert all(grads.extras[name] is None for name in others)
    assert grads.weight.dtype == grads.extras["numpy"].dtype == F32
    assert grads.extras["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(grads.extras["numpy"], np.ones(3))
    np.testing.assert_allclose(grads.extras["complex"], [2 - 4j])


def test_keyword_arguments_aux_and_what_is_cast(rng):
    params, x = make_params(rng), rng.normal(size=(5, 6)).astype(np.float32)
    seen = {}

    def with_aux(params, x, *, scale, labels, name):
        seen.update(x=x.dtype, scale=scale.dtype, labels=labels.dtype, name=name)
        aux = {"hidden": x @ params["w"], "labels": labels, "name": name}
        return (aux["hidden"] * scale).sum(), aux

    arguments = {"scale": jnp.float32(0.5), "labels": jnp.arange(5), "name": "train"}
    options = {"has_aux": True, "policy": "by=arguments,c=bf16"}
    grad_fn = jmpx.value_and_grad(with_aux, jmpx.DynamicLossScale(2.0), **options)
    (value, aux), scaling, finite, grads = grad_fn(params, x, **arguments)
    assert seen == {"x": jnp.bfloat16, "scale": jnp.bfloat16, "labels": jnp.int32, "name": "train"}
    assert value.dtype == F32
    assert aux["hidden"].dtype == jnp.bfloat16 and aux["name"] == "train"
    grad_fn = jmpx.grad(with_aux, jmpx.DynamicLossScale(2.0), **options)
    result = grad_fn(params, x, **arguments)
    assert len(result) == 4 and result[0] == scaling and result[1] == finite
    np.testing.assert_array_equal(result[2]["w"], grads["w"])
    np.testing.assert_array_equal(result[3]["hidden"], aux["hidden"])


def test_without_mixed_precision_it_is_the_plain_gradient(rng):
    params = make_params(rng)
    params["b"] = params["b"].astype(jnp.bfloat16)

    def loss_fn(params):
        assert params["b"].dtype == jnp.bfloat16
        return (params["w"] * jnp.float32(jnp.inf)).sum().astype(jnp.bfloat16) + params["b"].sum()

    scaling = jmpx.DynamicLossScale()
    grad_fn = mpx.filter_value_and_grad(loss_fn, scaling, use_mixed_precision=False)
    value, new_scaling, finite, grads = grad_fn(params)
    assert new_scaling is scaling and bool(finite)
    assert value.dtype == jnp.bfloat16 and grads["b"].dtype == jnp.bfloat16
    assert not bool(jnp.isfinite(grads["w"]).any())


def test_a_policy_of_the_users_own_does_the_casts(rng):
    class OnlyMatrices(jmpx.Policy):
        def cast_to_compute(self, tree):
            cast = lambda x: jmpx.cast_tree(x, self.compute_dtype) if jnp.ndim(x) > 1 else x  # noqa: E731
            return jax.tree.map(cast, tree)

    def loss_fn(params):
        assert (params["w"].dtype, params["b"].dtype) == (jnp.bfloat16, F32)
        return params["w"].sum().astype(F32) + params["b"].sum()

    policy = OnlyMatrices("f32", "bf16", "f32")
    _, _, grads = jmpx.grad(loss_fn, NO_SCALE, policy=policy)(make_params(rng))
    assert {g.dtype for g in grads.values()} == {F32}


def test_numpy_parameters_of_float64_without_x64(rng):
    params = {"w": rng.normal(size=3)}
    _, finite, grads = jmpx.grad(lambda p: p["w"].sum(), NO_SCALE, policy="bf16")(params)
    assert grads["w"].dtype == F32
    optimizer = optax.sgd(1.0)
    new, _ = jmpx.optimizer_update(params, optimizer, optimizer.init(params), grads, finite)
    np.testing.assert_array_equal(new["w"], params["w"].astype(np.float32) - 1)


def test_a_loss_may_be_a_number_of_python():
    assert jmpx.value_and_grad(lambda w: 0.5, NO_SCALE, policy="full")(np.ones(2))[0] == 0.5
