"""`jmpx.filter_value_and_grad` and `jmpx.filter_grad` on one device, against hand-written casts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal
from helpers.jaxprs import equations
from helpers.training import LOSS_SCALES, POLICIES, by_hand, loss_fn, make_params

import jmpx
import jmpx.mpx as mpx


@pytest.mark.sampled(5)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", LOSS_SCALES)
def test_value_and_gradients_equal_the_hand_written_ones(kind, policy, jit, rng):
    # To the bit: a power of two scales exactly, as long as nothing over- or underflows.
    params, x = make_params(rng), normal(rng, 5, 6)
    grad_fn = jmpx.filter_value_and_grad(loss_fn, LOSS_SCALES[kind](), policy=f"c={policy}")
    value, scaling, finite, grads = (jax.jit(grad_fn) if jit else grad_fn)(params, x)
    expected_value, expected = jax.jit(functools.partial(by_hand, dtype=POLICIES[policy]))(
        params, x
    )
    assert value.dtype == jnp.float32 and value.shape == ()
    assert finite.dtype == jnp.bool_ and bool(finite)
    assert jax.tree.structure(scaling) == jax.tree.structure(LOSS_SCALES[kind]())
    # Compiled, XLA keeps float32 between fused 16-bit operations; eager, it rounds after each.
    rounding = 0 if jit else float(jnp.finfo(POLICIES[policy]).eps)
    np.testing.assert_allclose(value, expected_value, rtol=2 * rounding)
    for name, grad in grads.items():
        assert grad.dtype == params[name].dtype
        np.testing.assert_allclose(grad, expected[name], rtol=4 * rounding, atol=rounding)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("power", [-10, 0, 10, 15])
@pytest.mark.parametrize("step", ["growth", "shrink", "neither"])
def test_the_gradient_ratio_is_exactly_1_on_growth_and_shrink_steps(step, power, rng):
    # Products of few-bit numbers: exact in float16 and float32, so any wrong factor shows.
    w = jnp.asarray(rng.integers(1, 8, size=8), jnp.float32)
    x = jnp.asarray(rng.integers(1, 8, size=8), jnp.float32)
    overflow = jnp.float32(jnp.inf if step == "shrink" else 1.0)

    def loss_fn(params, x):
        return (params["w"] * x).sum().astype(jnp.float32) * 2.0**-3 + params["v"].astype(
            jnp.float32
        )

    def with_overflow(params, x):
        return loss_fn(params, x) + 0 * params["v"].astype(jnp.float32) * overflow

    period = 1 if step == "growth" else 9
    scaling = jmpx.DynamicLossScale(2.0**power, period=period, min_loss_scale=2.0**-20)
    grad_fn = jmpx.filter_grad(with_overflow, scaling, policy="c=f16")
    new_scaling, finite, grads = jax.jit(grad_fn)({"w": w, "v": jnp.float32(0.0)}, x)
    factor = {"growth": 2, "shrink": 0.5, "neither": 1}[step]
    assert new_scaling.loss_scale == 2.0**power * factor
    assert bool(finite) == (step != "shrink")
    np.testing.assert_array_equal(np.asarray(grads["w"]) / (np.asarray(x) * 2.0**-3), np.ones(8))


@pytest.mark.parametrize(
    ("power", "low"),
    [(-126, 2.0**-126), (-10, 2.0**-126), (-10, 1.0), (126, 1.0), (127, 1.0), (127, 2.0**126)],
)
def test_the_gradient_ratio_is_exactly_1_at_every_scale(power, low, rng):
    # A scale below its minimum counts as the minimum, and 2**127 counts as 2**126.
    w = jnp.asarray(rng.integers(1, 8, size=8), jnp.float32)
    factor = 2.0 ** -np.clip(power, -100, 100)

    @jax.jit
    def grads_of(scaling, w):
        return jmpx.filter_grad(lambda w: (w**2).sum() * factor, scaling, policy="full")(w)

    scaling = jmpx.DynamicLossScale(2.0**power, min_loss_scale=low)
    _, finite, grads = grads_of(scaling, w)
    assert bool(finite)
    np.testing.assert_array_equal(grads, w * (2 * factor))


class Enlarging(jmpx.DynamicLossScale):
    """A loss scale of the user's own that makes gradients ten times as large."""

    def unscale(self, tree):
        return jax.tree.map(lambda x: 10 * x, super().unscale(tree))


jax.tree_util.register_pytree_node(
    Enlarging, lambda s: ((s.loss_scale,), None), lambda _, leaves: Enlarging(*leaves)
)

SCALES = {
    "no-op": jmpx.NoOpLossScale(),
    "static": jmpx.StaticLossScale(8),
    "static below 1": jmpx.StaticLossScale(2.0**-3),
    "dynamic": jmpx.DynamicLossScale(8.0),
    "dynamic below 1": jmpx.DynamicLossScale(2.0**-3, min_loss_scale=2.0**-5),
    "below its minimum": jmpx.DynamicLossScale(2.0**-3),
    "of one's own": Enlarging(1.0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("bad", [np.inf, np.nan, 1.0, "largest"])
def test_the_flag_is_that_of_the_gradients_as_they_are_returned(bad, param_dtype, name):
    # The largest number, divided by less than 1, overflows only when it is unscaled.
    slope = jnp.asarray(jnp.finfo(param_dtype).max if bad == "largest" else bad, param_dtype)

    @jax.custom_vjp
    def loss_fn(params):
        return jnp.float32(1)

    def backward(_, scaled):
        return ({"a": jnp.ones(2, param_dtype), "b": jnp.full(2, slope)},)

    loss_fn.defvjp(lambda params: (jnp.float32(1), None), backward)
    params = {"a": jnp.ones(2, param_dtype), "b": jnp.ones(2, param_dtype)}
    _, finite, grads = jmpx.filter_grad(
        loss_fn, SCALES[name], policy=jmpx.Policy(param_dtype, param_dtype, jnp.float32)
    )(params)
    assert bool(finite) == all(np.isfinite(np.asarray(g)).all() for g in grads.values())
    enlarged = name in ("static below 1", "dynamic below 1", "of one's own")
    assert bool(finite) == (bad == 1 or bad == "largest" and not enlarged)


def test_float16_gradients_that_would_underflow_survive_and_are_exact(rng):
    w = jnp.asarray(rng.integers(1, 8, size=16), jnp.float32)

    def tiny(w):
        return (w * jnp.asarray(2.0**-12, w.dtype) * jnp.asarray(2.0**-14, w.dtype)).sum()

    expected = jax.grad(tiny)(w)
    scaling = jmpx.StaticLossScale(2.0**14)
    _, _, grads = jmpx.filter_grad(tiny, scaling, policy="c=f16")(w)
    np.testing.assert_array_equal(grads, expected)
    _, _, lost = jmpx.filter_grad(tiny, jmpx.NoOpLossScale(), policy="c=f16")(w)
    np.testing.assert_array_equal(lost, np.zeros(16))


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.float16])
def test_float16_gradients_are_never_multiplied_or_divided_in_float16(param_dtype, rng):
    # The loss itself neither multiplies nor divides, so each product is of the scaling.
    params = {"w": jnp.asarray(rng.normal(size=8), param_dtype)}
    grad_fn = jmpx.filter_grad(lambda p: p["w"].sum(), jmpx.DynamicLossScale(), policy="c=f16")
    jaxpr = jax.make_jaxpr(grad_fn)(params)
    arithmetic = [e for e in equations(jaxpr) if e.primitive.name in ("mul", "div")]
    assert len(arithmetic) >= 3
    for eqn in arithmetic:
        assert {v.aval.dtype for v in eqn.invars} == {np.dtype("float32")}


class Model:
    """A pytree with every kind of leaf, one of them twice."""

    def __init__(self, weight, shared, extras):
        self.weight, self.shared, self.extras = weight, shared, extras


jax.tree_util.register_pytree_node(
    Model,
    lambda m: ((m.weight, m.shared, m.shared, m.extras), None),  # pyright: ignore[reportArgumentType]
    lambda _, children: Model(children[0], (children[1], children[2]), children[3]),
)


@pytest.mark.parametrize("kind", LOSS_SCALES)
def test_models_with_leaves_of_every_kind(kind, rng):
    extras = {
        "activation": jnp.tanh,
        "name": "model",
        "none": None,
        "steps": jnp.arange(2),
        "new key": jax.random.key(0),
        "old key": jax.random.PRNGKey(0),
        "rate": 0.5,
        "numpy": rng.normal(size=3).astype(np.float32),
        "half": jnp.asarray(rng.normal(size=3), jnp.bfloat16),
        "complex": jnp.asarray([1 + 2j], jnp.complex64),
    }
    tied = normal(rng, 3)
    model = Model(normal(rng, 3), tied, extras)

    def loss_fn(model, x):
        assert model.weight.dtype == model.extras["half"].dtype == jnp.float16
        assert model.extras["complex"].dtype == jnp.complex64
        assert model.extras["rate"] == 0.5 and model.extras["name"] == "model"
        h = model.extras["activation"](x * model.weight) + model.extras["numpy"]
        h = h + model.extras["half"] * sum(jax.tree.leaves(model.shared)[:1])
        noise = jax.random.normal(model.extras["new key"], (3,), h.dtype)
        square = (model.extras["complex"] * model.extras["complex"].conj()).real
        return (h + noise).sum().astype(jnp.float32) + square.sum()

    x = rng.normal(size=3).astype(np.float32)
    value, _, finite, grads = jmpx.filter_value_and_grad(
        loss_fn, LOSS_SCALES[kind](), policy="c=f16"
    )(model, x)
    assert value.dtype == jnp.float32 and bool(finite)
    assert isinstance(grads, Model)
    for name in ("activation", "name", "none", "steps", "new key", "old key", "rate"):
        assert grads.extras[name] is None
    assert grads.weight.dtype == grads.extras["numpy"].dtype == jnp.float32
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
    (value, aux), scaling, finite, grads = jmpx.filter_value_and_grad(
        with_aux, jmpx.DynamicLossScale(2.0), has_aux=True, policy="c=bf16"
    )(params, x, **arguments)
    assert seen == {"x": jnp.bfloat16, "scale": jnp.bfloat16, "labels": jnp.int32, "name": "train"}
    assert value.dtype == jnp.float32
    assert aux["hidden"].dtype == jnp.bfloat16 and aux["name"] == "train"
    result = jmpx.filter_grad(with_aux, jmpx.DynamicLossScale(2.0), has_aux=True, policy="c=bf16")(
        params, x, **arguments
    )
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
    value, new_scaling, finite, grads = mpx.filter_value_and_grad(
        loss_fn, scaling, use_mixed_precision=False
    )(params)
    assert new_scaling is scaling and bool(finite)
    assert value.dtype == jnp.bfloat16 and grads["b"].dtype == jnp.bfloat16
    assert not bool(jnp.isfinite(grads["w"]).any())


def test_the_default_policy_is_half(rng):
    seen = []

    def loss_fn(w):
        seen.append(w.dtype)
        return w.sum()

    jmpx.filter_grad(loss_fn, jmpx.NoOpLossScale())(jnp.ones(2))
    assert seen == [jmpx.half_dtype()]


def test_a_policy_of_the_users_own_does_the_casts(rng):
    class OnlyMatrices(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jax.tree.map(
                lambda x: jmpx.cast_tree(x, self.compute_dtype) if jnp.ndim(x) > 1 else x, tree
            )

    params = make_params(rng)

    def loss_fn(params):
        assert (params["w"].dtype, params["b"].dtype) == (jnp.bfloat16, jnp.float32)
        return params["w"].sum().astype(jnp.float32) + params["b"].sum()

    _, _, grads = jmpx.filter_grad(
        loss_fn, jmpx.NoOpLossScale(), policy=OnlyMatrices("f32", "bf16", "f32")
    )(params)
    assert {g.dtype for g in grads.values()} == {np.dtype("float32")}


def test_gradients_that_overflow_a_16_bit_parameter_are_not_finite():
    # 60000 is finite in float16, 60000 / 2**-3 is not: the check comes after the last cast.
    scaling = jmpx.DynamicLossScale(2.0**-3, min_loss_scale=2.0**-10)
    factor = jnp.float16(60_000)
    w = jnp.ones(2, jnp.float16)
    new_scaling, finite, grads = jmpx.filter_grad(
        lambda w: (w * factor * 8).astype(jnp.float32).sum(), scaling, policy="f16"
    )(w)
    assert not bool(finite) and new_scaling.loss_scale == 2.0**-4
    assert not bool(jnp.isfinite(grads).any())


def test_a_scale_above_float16_reaches_a_float32_loss(rng):
    w = jnp.asarray(rng.integers(1, 8, size=4), jnp.float32)

    def loss_fn(w):
        return (w.astype(jnp.float32) * 2.0**-14).sum()

    scaling = jmpx.DynamicLossScale(2.0**24)
    _, finite, grads = jmpx.filter_grad(loss_fn, scaling, policy="c=f16")(w)
    assert bool(finite)
    np.testing.assert_array_equal(grads, np.full(4, 2.0**-14))


# bad input

GOOD = jmpx.NoOpLossScale()
BAD = [
    (lambda: jmpx.filter_grad(3, GOOD), TypeError, "Expected a function to differentiate"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.filter_grad(jnp.sum, 2.0**15), TypeError, "Expected a loss scale"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.filter_grad(jnp.sum, GOOD, policy="f17"), ValueError, "Unknown dtype 'f17'"),
    (lambda: jmpx.filter_grad(jnp.sum, GOOD)(), TypeError, "first positional argument"),  # pyright: ignore[reportCallIssue]
    (lambda: jmpx.filter_grad(jnp.abs, GOOD)(jnp.ones(2)), TypeError, "floating scalar"),
    (lambda: jmpx.filter_grad(jnp.argmax, GOOD)(jnp.ones(2)), TypeError, "floating scalar"),
    (
        lambda: jmpx.filter_grad(lambda w: (w.sum(), w), GOOD)(jnp.ones(2)),  # pyright: ignore[reportArgumentType]
        TypeError,
        "scalar as its loss, got a tuple: ",
    ),
    (
        lambda: jmpx.filter_grad(jnp.sum, GOOD, has_aux=True)(jnp.ones(2)),  # pyright: ignore[reportArgumentType, reportCallIssue]
        TypeError,
        r"has_aux=True says, got a \w+: return a pair",
    ),
    (lambda: jmpx.filter_grad(lambda w: "x", GOOD)(jnp.ones(2)), TypeError, "floating scalar"),  # pyright: ignore[reportArgumentType]
    (lambda: jmpx.filter_grad(jnp.sum, GOOD, True)(jnp.ones(2)), TypeError, r"\(loss, aux\)"),  # pyright: ignore[reportArgumentType, reportCallIssue]
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_arguments_are_refused_in_one_sentence(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_numpy_parameters_of_float64_without_x64(rng):
    w = rng.normal(size=3)
    scaling, finite, grads = jmpx.filter_grad(lambda p: p["w"].sum(), GOOD, policy="bf16")({"w": w})
    assert grads["w"].dtype == jnp.float32
    optimizer = optax.sgd(1.0)
    new, _ = jmpx.optimizer_update({"w": w}, optimizer, optimizer.init({"w": w}), grads, finite)
    np.testing.assert_array_equal(new["w"], w.astype(np.float32) - 1)


def test_a_function_without_differentiable_leaves_still_has_a_value():
    value, _, finite, grads = jmpx.filter_value_and_grad(
        lambda n: jnp.float32(n["n"]), GOOD, policy="full"
    )({"n": 3})
    assert value == 3 and bool(finite) and grads == {"n": None}
