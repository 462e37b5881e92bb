"""`low_precision_params` with frameworks, devices and other optimizers, and what it refuses."""

# Optax types states, updates and parameters as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BF16, F32, assert_same_bits, dtypes, lenient, normal, warns_once
from helpers.sixteen_bits import grad_of, make_optimizer, make_params, train
from jax.sharding import Mesh, PartitionSpec as P

import jmpx

# Gradients of 16 bits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_16_bits_are_told_once(jit, rng):
    masters = make_params(rng)
    optimizer = jmpx.skip_nonfinite(
        jmpx.optim.low_precision_params(make_optimizer("adam"), "stochastic")
    )
    params, state = jmpx.cast_tree(masters, jnp.bfloat16), optimizer.init(masters)

    def step(params, state, grads):
        return jmpx.optimizer_update(params, optimizer, state, grads, jmpx.all_finite(grads))

    run = jax.jit(step) if jit else step
    grads = grad_of(params)
    run(params, state, grads)  # nothing is said
    narrow = {**grads, "w": grads["w"].astype(BF16)}
    with warns_once(__file__, r"bfloat16\[3, 4\] at grads\['w'\].*grad_dtype="):
        run(params, state, narrow)
    _, after = run(params, state, grads)
    assert after.inner_state.inner_state[0].nu["w"].dtype == F32


# Around and inside of others


def test_multi_steps_inside_steps_as_with_masters(rng):
    masters, grads = make_params(rng), [make_params(rng) for _ in range(4)]
    multi: Any = lenient(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    optimizer = jmpx.optim.low_precision_params(multi, "split")
    params, state = jmpx.optim.split_master(masters)[0], optimizer.init(masters)
    expected, multi_state = masters, multi.init(masters)
    for each in grads:
        params, state = jmpx.optimizer_update(params, optimizer, state, each, True)
        updates, multi_state = multi.update(each, multi_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert_same_bits(jmpx.optim.merge_master(params, state.low), expected)


def test_extra_arguments_are_handed_on(rng):
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append((value, dtypes(params)))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = jmpx.optim.low_precision_params(inner, "stochastic")
    params = jmpx.cast_tree(make_params(rng), jnp.bfloat16)
    jmpx.optimizer_update(
        params, optimizer, optimizer.init(params), grad_of(params), True, value=3.0
    )
    assert seen == [(3.0, dtypes(grad_of(params)))]


# Frameworks and devices


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_equinox_modules(rounding, rng, key):
    model = eqx.nn.MLP(3, "scalar", 8, 1, key=key)
    optimizer = jmpx.optim.low_precision_params(make_optimizer("adam"), rounding)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    model = jmpx.optim.split_master(model)[0]
    x = normal(rng, 4, 3).astype(BF16)

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x).astype(F32) ** 2))(model)
        grads = jmpx.cast_to_full(grads)
        return jmpx.optimizer_update(model, optimizer, state, grads, jmpx.all_finite(grads))

    new, after = step(*step(model, state))
    assert dtypes(eqx.filter(new, eqx.is_array)) == dtypes(eqx.filter(model, eqx.is_array))
    assert dtypes(after) == dtypes(state) and new.activation is model.activation
    assert not jnp.array_equal(new.layers[0].weight, model.layers[0].weight)


@pytest.mark.thorough
@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_nnx_modules(rounding, rng, standard_promotion):
    x = normal(rng, 4, 3).astype(BF16)
    results = []
    for by_nnx in (True, False):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        optimizer = jmpx.optim.low_precision_params(make_optimizer("adam"), rounding)
        masters = nnx.state(model, nnx.Param)
        of_nnx = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        state = optimizer.init(masters)
        nnx.update(model, jmpx.optim.split_master(masters)[0])
        grads = jmpx.cast_to_full(nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model))
        for _ in range(2):
            if by_nnx:
                of_nnx.update(model, grads)
            else:
                model, state = jmpx.optimizer_update(model, optimizer, state, grads, True)
        results.append(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param))))
        assert model.kernel[...].dtype == BF16
    assert_same_bits(*results)


def test_replicas_stay_alike_under_shard_map(rng):
    mesh = Mesh(np.asarray(jax.devices()), ("d",))
    optimizer = jmpx.optim.low_precision_params(make_optimizer("adam"), "stochastic")
    params = jmpx.cast_tree({"w": normal(rng, 16)}, jnp.bfloat16)
    x = normal(rng, 8, 16)

    def per_device(params, state, x):
        grads = {"w": jax.lax.pmean(x[0] * params["w"].astype(F32), "d")}
        finite = jmpx.all_finite(grads)
        return jmpx.optimizer_update(params, optimizer, state, grads, finite)

    step = jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=(P(), P()))
    new, _ = jax.jit(step)(params, optimizer.init(params), x)
    copies = {np.asarray(shard.data).tobytes() for shard in new["w"].addressable_shards}
    assert len(copies) == 1 and new["w"].dtype == BF16


# The state


@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_the_state_is_of_plain_arrays_whose_dtypes_stay(rounding, rng):
    masters = make_params(rng)
    adam = jmpx.optim.with_state_dtype(make_optimizer("adam"), "bf16")
    optimizer = jmpx.optim.low_precision_params(adam, rounding)
    params, state = jmpx.optim.split_master(masters)[0], optimizer.init(masters)
    _, after = train(optimizer, params, state, 1)
    assert dtypes(after) == dtypes(state)
    assert after.inner_state.inner_state[0].nu["w"].dtype == BF16
    assert all(isinstance(np.asarray(leaf), np.ndarray) for leaf in jax.tree.leaves(after))
    assert jax.tree.structure(jax.eval_shape(optimizer.init, masters)) == jax.tree.structure(state)


def test_bad_arguments_are_a_sentence():
    adam = make_optimizer("adam")
    cases = [
        (TypeError, "Expected an optax gradient transformation, got 3", (3, "split"), {}),
        (ValueError, 'Expected rounding to be "stochastic" or "split", got \'kahan\'',
         (adam, "kahan"), {}),
        (ValueError, 'Expected rounding to be "stochastic" or "split", got None', (adam, None), {}),
    ]  # fmt: skip
    for error, match, arguments, keywords in cases:
        with pytest.raises(error, match=match):
            jmpx.optim.low_precision_params(*arguments, **keywords)


def test_bad_parameters_and_states_are_a_sentence(rng):
    masters = make_params(rng)
    split = jmpx.optim.low_precision_params(make_optimizer("adam"), "split")
    stochastic = jmpx.optim.low_precision_params(make_optimizer("adam"), "stochastic")
    params, _ = jmpx.optim.split_master(masters)
    grads, state = grad_of(params), split.init(masters)
    half = jmpx.cast_tree(masters, jnp.float16)
    cases = [
        (ValueError, "Cannot split bfloat16.*pass float32 parameters", lambda: split.init(params)),
        (ValueError, r"of 16 bits for .* got float32\[4\]: pass",
         lambda: split.update(grads, state, masters)),
        (ValueError, "got none: pass them to update", lambda: split.update(grads, state)),
        (TypeError, 'with rounding="split", got another: make one by init',
         lambda: split.update(grads, make_optimizer("adam").init(masters), params)),
        (TypeError, 'with rounding="split", got another',
         lambda: split.update(grads, stochastic.init(masters), params)),
        (TypeError, 'with rounding="stochastic", got another',
         lambda: stochastic.update(grads, state, params)),
        (ValueError, r"Cannot merge float16\[4\] with uint16\[4\]",
         lambda: split.update(grads, state, half)),
        (ValueError, r"Cannot merge bfloat16\[2, 4\] with uint16\[3, 4\]",
         lambda: split.update(grads, state, {**params, "w": params["w"][:2]})),
        (ValueError, "Dict key mismatch|keys",
         lambda: split.update(grads, state, {"w": params["w"]})),
    ]  # fmt: skip
    for error, match, call in cases:
        with pytest.raises(error, match=match):
            call()
