"""Errors and warnings of the optimizer helpers, and optimizers that they run as optax does."""

# Optax types states, updates and parameters as pytrees of arrays, which have no fields and no None.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import apply_updates, assert_same_bits, dtypes, lenient, normal, warns_once

import jmpx
import jmpx.equinox
import jmpx.flax

# Optimizers that widen their state at the first step


def make_params(rng, bfloat16=("b",)):
    params = {
        "w": normal(rng, 3, 2),
        "b": normal(rng, 2),
    }
    return {k: v.astype(jnp.bfloat16) if k in bfloat16 else v for k, v in params.items()}


def like(params, rng):
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


WIDENING = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "prodigy": optax.contrib.prodigy,
    "dog": optax.contrib.dog,
    "nested": lambda: optax.chain(optax.clip(1.0), optax.contrib.dog()),
}


def test_these_optimizers_widen_their_state_at_the_first_step(rng):
    params, widened = make_params(rng), set()
    for name, make in WIDENING.items():
        optimizer = lenient(make())
        before = optimizer.init(params)
        _, after = jax.eval_shape(optimizer.update, params, before, params)
        if dtypes(before) != dtypes(after):
            widened.add(name)
    # Not inject_hyperparams in optax 0.2.4.
    assert widened >= WIDENING.keys() - {"inject_hyperparams"}


WAYS = [("plain", "cond"), ("plain", "where"), ("counting", "cond"), ("wrapped", "where")]
CASES = [
    *[("dog", *way, ("b",)) for way in WAYS],
    ("inject_hyperparams", "plain", "cond", ("b",)),
    ("inject_hyperparams", "wrapped", "where", ("b",)),
    ("prodigy", "plain", "cond", ("b",)),
    ("nested", "counting", "where", ("b",)),
    ("inject_hyperparams", "plain", "cond", ("w", "b")),  # nothing widens
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "way", "skip", "bfloat16"), CASES)
def test_they_run_as_optax_runs_them(name, way, skip, bfloat16, rng):
    plain = lenient(WIDENING[name]())
    optimizer = plain if way == "plain" else jmpx.skip_nonfinite(plain, skip_by=skip)
    params = make_params(rng, bfloat16)
    state, plain_state = optimizer.init(params), plain.init(params)

    @jax.jit
    def step(params, state, grads, finite):
        if way == "wrapped":
            updates, state = optimizer.update(grads, state, params, grads_finite=finite)
            return apply_updates(params, updates), state
        return jmpx.optimizer_update(params, optimizer, state, grads, finite, skip_by=skip)

    by_hand, apply = jax.jit(plain.update), jax.jit(apply_updates)
    for finite in (False, True, False, True):
        grads = like(params, rng)
        new, state = step(params, state, grads, finite)
        inner = state if way == "plain" else state.inner_state
        updates, after = by_hand(grads, plain_state, params)
        assert dtypes(inner) == dtypes(after) and dtypes(new) == dtypes(params)
        if finite:
            plain_state, expected = after, apply(params, updates)
        else:  # the old values, in the dtypes that optax gives them
            plain_state = jax.tree.map(lambda x, y: x.astype(y.dtype), plain_state, after)
            expected = params
            assert_same_bits((new, inner), (params, plain_state))
        for got, right in zip(
            jax.tree.leaves((new, inner)), jax.tree.leaves((expected, plain_state)), strict=True
        ):
            # Compiled together, update and sum may be fused into one rounding.
            eps = float(jnp.finfo(got.dtype).eps) if jnp.issubdtype(got.dtype, jnp.inexact) else 0
            np.testing.assert_allclose(
                np.asarray(got, np.float64), np.asarray(right, np.float64), rtol=8 * eps, atol=eps
            )
        params = new


@pytest.mark.parametrize("name", ["inject_hyperparams", "dog"])
def test_a_widened_state_is_carried_by_a_scan(name, rng):
    # From the second step on: optax's own first step does not fit into a scan either.
    optimizer, params = lenient(WIDENING[name]()), make_params(rng)
    grads = like(params, rng)

    def step(carry, finite):
        return jmpx.optimizer_update(*carry[:1], optimizer, carry[1], grads, finite), None

    first, _ = jax.jit(step)((params, optimizer.init(params)), jnp.array(True))
    flags = jnp.array([True, False, True])
    (scanned, state), _ = jax.jit(lambda c: jax.lax.scan(step, c, flags))(first)
    for finite in flags:
        first, _ = jax.jit(step)(first, finite)
    assert dtypes((scanned, state)) == dtypes(first)
    np.testing.assert_allclose(scanned["w"], first[0]["w"], rtol=1e-5, atol=1e-6)


# MultiSteps


def micro_steps(optimizer, params, all_grads):
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in all_grads:
        updates, state = update(grads, state, params)
        params = apply_updates(params, updates)
    return params


def test_multi_steps_recovers_inside_of_skip_nonfinite_alone(rng):
    params, inner = make_params(rng, ()), lenient(optax.sgd(0.1))
    all_grads = [like(params, rng) for _ in range(7)]
    all_grads[1] = jax.tree.map(lambda g: g * jnp.inf, all_grads[1])
    with jax.numpy_dtype_promotion("standard"):
        lost = micro_steps(optax.MultiSteps(jmpx.skip_nonfinite(inner), 2), params, all_grads)
        assert_same_bits(lost, params)  # every step is skipped, for ever
    with jax.numpy_dtype_promotion("standard"):
        found = micro_steps(jmpx.skip_nonfinite(optax.MultiSteps(inner, 2)), params, all_grads)
        without = all_grads[:1] + all_grads[2:]
        assert_same_bits(found, micro_steps(optax.MultiSteps(inner, 2), params, without))


def test_skip_nonfinite_hands_extra_arguments_to_multi_steps(rng):
    seen = []

    def update(updates, state, params=None, *, value=None, **extra):
        seen.append(value is not None)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer, params = jmpx.skip_nonfinite(optax.MultiSteps(inner, 1)), make_params(rng, ())
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(params, optimizer.init(params), params, value=3.0)
    assert seen and all(seen)


# Views


def equinox_views():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    return model, jmpx.equinox.with_policies(model, "c=bf16,o=f32")


def nnx_views():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return model, jmpx.flax.with_policies(model, "c=bf16")


def test_a_view_that_reaches_an_optimizer_is_told():
    optimizer = optax.sgd(0.1)
    counting = jmpx.skip_nonfinite(optimizer)
    model, view = equinox_views()
    state = counting.init(model)
    calls = {
        "init": lambda model: counting.init(model),
        "update": lambda model: counting.update(model, state),
        "optimizer_update": lambda model: jmpx.optimizer_update(
            model, optimizer, optimizer.init(model), model, True
        ),
    }
    for call in calls.values():
        call(model)  # nothing is said
        with warns_once(__file__, "got a view of its Linear.*: give the policy to"):
            call(view)


def test_a_view_in_a_larger_tree_is_found():
    model, view = equinox_views()
    with pytest.warns(UserWarning, match="got a view of its Linear"):
        jmpx.skip_nonfinite(optax.sgd(0.1)).init({"layers": [model, {"head": view}]})


def test_optimizer_update_tells_of_an_nnx_view():
    _, view = nnx_views()
    optimizer = optax.sgd(0.1)
    none = jax.tree.map(lambda _: None, view)
    with pytest.warns(UserWarning, match="got a view of its Linear"):
        jmpx.optimizer_update(view, optimizer, optimizer.init({}), none, True)


def test_the_loop_of_the_docs_says_nothing(rng):
    model = eqx.nn.MLP(3, "scalar", 8, 1, key=jax.random.key(0))
    optimizer = jmpx.skip_nonfinite(lenient(optax.adam(1e-2)))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, x):
        view = jmpx.equinox.with_policies(model, "c=bf16,o=f32")
        return jax.vmap(view)(x).sum()

    @eqx.filter_jit
    def step(model, state, x):
        _, finite, grads = jmpx.filter_grad(loss_fn, jmpx.NoOpLossScale(), policy="full")(model, x)
        return jmpx.optimizer_update(model, optimizer, state, grads, finite)

    x = normal(rng, 4, 3)
    for _ in range(2):
        model, state = step(model, state, x)


# Parameters of 16 bits


TRUE_BFLOAT16 = {
    "adam": lambda: optax.adam(1e-2),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "inject_hyperparams": WIDENING["inject_hyperparams"],
    "dog": WIDENING["dog"],
    "float32 moment": lambda: optax.adam(1e-2, mu_dtype=jnp.float32),
    "float32 momentum": lambda: optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32),
    "float32 sum": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("gradients", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", TRUE_BFLOAT16)
def test_parameters_of_16_bits_keep_their_dtype(name, gradients, rng):
    with jax.numpy_dtype_promotion("standard"):
        optimizer, params = TRUE_BFLOAT16[name](), make_params(rng, ("w", "b"))
        state = optimizer.init(params)
        for _ in range(2):
            grads = jmpx.cast_tree(like(params, rng), gradients)
            params, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
    assert {leaf.dtype for leaf in params.values()} == {np.dtype(jnp.bfloat16)}


# Swapped arguments


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("model", [{"w": np.ones(2, np.float32), "f": None}, [np.ones(2)]])
def test_swapped_arguments_are_a_sentence(model, momentum):
    optimizer = optax.sgd(0.1, momentum)
    state = optimizer.init(model)
    right = [model, optimizer, state, model, True]
    jmpx.optimizer_update(*right[:4], True)
    order = r"the arguments are \(model, optimizer, optimizer_state, grads, grads_finite\)\.$"
    for a in range(5):
        for b in range(a):
            if (b, a) == (0, 3):
                continue  # of one structure: nothing tells them apart
            swapped = list(right)
            swapped[a], swapped[b] = right[b], right[a]
            flag = "Expected grads_finite to be a scalar bool, got a tuple: "
            with pytest.raises(TypeError, match=flag if (b, a) == (2, 4) else order) as error:
                jmpx.optimizer_update(*swapped)
            assert "\n" not in str(error.value), (a, b)


def test_gradients_are_arrays_or_none(rng):
    model = {"w": jnp.ones(2), "act": jnp.tanh}
    optimizer = optax.sgd(0.1)
    state = optimizer.init({"w": model["w"], "act": None})
    with pytest.raises(TypeError, match="numbers or None, got .* among them: the arguments are"):
        jmpx.optimizer_update({"w": model["w"], "act": None}, optimizer, state, model, True)
    with pytest.raises(TypeError, match=r"numbers or None, got bool\[\] among them: "):
        jmpx.optimizer_update(model["w"], optimizer, state, jnp.array(True), model["w"])
    with pytest.raises(TypeError, match="Expected gradients of the structure of the model"):
        jmpx.optimizer_update(model, optimizer, state, {"v": jnp.ones(2)}, True)
    weight = {"w": jnp.ones(())}
    stepped, _ = jmpx.optimizer_update(weight, optimizer, optimizer.init(weight), {"w": 0.5}, True)
    np.testing.assert_allclose(stepped["w"], 0.95)


# skip_nonfinite inside of other transformations


HIDING = {
    "chain": lambda inner: optax.chain(optax.clip(1.0), inner),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, 2),
    "MultiSteps as a transformation": lambda inner: optax.MultiSteps(
        optax.chain(optax.clip(1.0), inner), 2
    ).gradient_transformation(),
}


@pytest.mark.parametrize(
    ("name", "finite"),
    [*zip(HIDING, [jnp.array(True), False, np.bool_(True)], strict=True)],
)
def test_a_hidden_skip_nonfinite_is_warned_of(name, finite, rng):
    optimizer = HIDING[name](jmpx.skip_nonfinite(lenient(optax.sgd(0.1))))
    params = make_params(rng, ())
    state = optimizer.init(params)
    with warns_once(__file__, "inside other transformations, which does not count the steps"):
        with jax.numpy_dtype_promotion("standard"):
            jmpx.optimizer_update(params, optimizer, state, params, finite)


def test_a_hidden_skip_nonfinite_may_skip_alone(rng):
    optimizer = optax.chain(optax.clip(1.0), jmpx.skip_nonfinite(optax.sgd(0.1)))
    params = make_params(rng, ())
    grads = {**params, "w": params["w"].at[0].set(jnp.nan)}
    state = optimizer.init(params)
    new, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
    assert_same_bits(new, params)
    assert state[1].total_skipped == 1


# What is not the optimizer, or not its state


def test_an_optimizer_of_nnx_is_refused_with_what_to_pass():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.state(model, nnx.Param)
    for state in (None, optimizer, optimizer.opt_state):
        with pytest.raises(
            TypeError, match=r"got flax\.nnx.*Optimizer: pass .*optimizer\.tx"
        ) as error:
            jmpx.optimizer_update(model, optimizer, state, grads, True)
        assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match=r"optimizer\.tx\.init\(nnx\.state\(") as error:
        jmpx.skip_nonfinite(optimizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_the_state_of_the_optimizer_inside_is_refused(inner, jit):
    params, optimizer = {"w": jnp.ones(2)}, jmpx.skip_nonfinite(inner)
    message = r"got a tuple: make it by the init of the wrapped optimizer"
    with pytest.raises(TypeError, match=message):
        jit(optimizer.update)(params, inner.init(params), params)
    update = lambda state, finite: jmpx.optimizer_update(params, optimizer, state, params, finite)  # noqa: E731
    with pytest.raises(TypeError, match=message):
        jit(update)(inner.init(params), jnp.array(True))
    with pytest.raises(TypeError, match="got a dict: make it by"):
        update(optimizer.init(params)._asdict(), True)
