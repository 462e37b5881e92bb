"""`low_precision_params`: 16-bit parameters that learn as float32 ones do, or do so on average."""

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
from helpers import (
    BF16,
    F16,
    F32,
    apply_updates,
    assert_same_bits,
    dtypes,
    lenient,
    normal,
    warns_once,
)
from helpers.maps import mesh_of
from jax.sharding import PartitionSpec as P

import jmpx
from jmpx.optim import low_precision_params, merge_master, split_master

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": lenient(optax.adam(1e-2)),
    "adamw": lenient(optax.adamw(1e-2, weight_decay=0.1)),
}
ADAM, MOMENTUM = OPTIMIZERS["adam"], OPTIMIZERS["momentum"]
roundings = pytest.mark.parametrize("rounding", ["split", "stochastic"])


def make_params(rng):
    return {"w": normal(rng, 3, 4), "layers": [normal(rng, 4), normal(rng)]}


@jax.jit
def grad_of(params):
    """The float32 gradients at parameters of any dtype."""
    loss = lambda p: sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(p))  # noqa: E731
    return jax.grad(loss)(jmpx.cast_to_full(params))


def train(optimizer, params, state, steps, by_optimizer_update=True):
    """Trains 16-bit parameters; each step in Python, and so each operation compiled alone."""
    for _ in range(steps):
        grads = grad_of(params)
        if by_optimizer_update:
            params, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
        else:
            updates, state = optimizer.update(grads, state, params)
            params = apply_updates(params, updates)
    return params, state


# Split masters


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("momentum", "skip_nonfinite"),
        ("adamw", "optimizer_update"),
        ("sgd", "apply_updates"),
    ],
)
def test_split_is_the_training_of_float32_masters_to_the_bit(name, way, rng):
    inner, masters = OPTIMIZERS[name], make_params(rng)
    optimizer = low_precision_params(inner, "split")
    if way == "skip_nonfinite":
        optimizer = jmpx.skip_nonfinite(optimizer)
    state, inner_state = optimizer.init(masters), inner.init(masters)
    params, state = train(optimizer, split_master(masters)[0], state, 4, way != "apply_updates")
    for _ in range(4):
        grads = grad_of(split_master(masters)[0])
        updates, inner_state = inner.update(grads, inner_state, masters)
        masters = optax.apply_updates(masters, updates)
    state = state.inner_state if way == "skip_nonfinite" else state
    assert_same_bits(params, split_master(masters)[0])
    assert_same_bits(merge_master(params, state.low), masters)
    assert_same_bits(state.inner_state, inner_state)


# Stochastic rounding


def test_a_seed_repeats_and_each_step_and_leaf_draw_anew():
    def rounded(seed, steps=1):
        optimizer = low_precision_params(optax.sgd(1.0), "stochastic", seed=seed)
        grads = {"a": jnp.full(64, 2.0**-9), "b": jnp.full(64, 2.0**-9)}
        state = optimizer.init(grads)
        for _ in range(steps):
            params = jax.tree.map(lambda g: jnp.full(64, -1, BF16), grads)
            params, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
        return params

    first = rounded(0)
    assert_same_bits(first, rounded(0))
    different = [first["a"], first["b"], rounded(1)["a"], rounded(0, steps=2)["a"]]
    assert len({np.asarray(x).tobytes() for x in different}) == 4


def test_no_gradient_moves_nothing(rng):
    params = jmpx.cast_tree(make_params(rng), jnp.bfloat16)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    params["w"] = params["w"].at[0].set(-0.0)
    optimizer = low_precision_params(optax.sgd(0.1), "stochastic")
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert_same_bits(apply_updates(params, updates), params)


# The updates


@pytest.mark.parametrize(
    ("rounding", "dtype", "factor"), [("split", BF16, 2**15), ("stochastic", F16, 2**12)]
)
def test_what_is_returned_adds_up_to_the_new_parameters(rounding, dtype, factor, rng):
    size, spread = 20_000, 12 if dtype == F16 else 60
    old = (rng.normal(size=size) * 2.0 ** rng.uniform(-spread, spread, size)).astype(dtype)
    # Half of them nearly cancel: the new parameter is a tiny part of the old one.
    near = -old.astype(F32) * (1 + rng.normal(size=size) * 2.0 ** rng.uniform(-24, 0, size))
    far = rng.normal(size=size) * 2.0 ** rng.uniform(-spread, spread, size)
    change = np.where(rng.random(size) < 0.5, near, far).astype(F32)
    optimizer = low_precision_params(optax.sgd(-1.0), rounding)
    state = optimizer.init(jnp.asarray(old, F32))
    new, _ = jmpx.optimizer_update(jnp.asarray(old), optimizer, state, change, True)

    @jax.jit  # in which XLA could keep a sum in float32
    def by_hand(params):
        updates, _ = optimizer.update(change, state, params)
        assert updates.dtype == F32
        return apply_updates(params, updates)

    found = np.asarray(by_hand(jnp.asarray(old)), np.float64)
    new, old = np.asarray(new, np.float64), old.astype(np.float64)
    finite = np.isfinite(new)
    np.testing.assert_array_equal(found[~finite], new[~finite])
    found, new, old = found[finite], new[finite], old[finite]
    exact = np.abs(old) <= factor * np.abs(new)
    assert 0.5 < exact.mean() < 1
    np.testing.assert_array_equal(found[exact], new[exact])
    assert (np.abs(found - new) <= 2.0**-24 * np.abs(old)).all()


@roundings
def test_parameters_that_stayed_float32_are_updated_as_usual(rounding, rng):
    masters = make_params(rng)
    optimizer = low_precision_params(MOMENTUM, rounding)
    params = {**split_master(masters)[0], "w": masters["w"]}
    expected, _ = MOMENTUM.update(grad_of(masters), MOMENTUM.init(masters), masters)
    for by_optimizer_update in (True, False):
        got, state = train(optimizer, params, optimizer.init(masters), 1, by_optimizer_update)
        assert dtypes(got) == dtypes(params)
        assert_same_bits(got["w"], masters["w"] + expected["w"])
        assert dtypes(state) == dtypes(optimizer.init(masters))


def test_gradients_of_16_bits_are_told_once(rng):
    masters = make_params(rng)
    optimizer = jmpx.skip_nonfinite(low_precision_params(ADAM, "stochastic"))
    params, state = jmpx.cast_tree(masters, jnp.bfloat16), optimizer.init(masters)

    def step(params, state, grads):
        return jmpx.optimizer_update(params, optimizer, state, grads, jmpx.all_finite(grads))

    run = jax.jit(step)
    grads = grad_of(params)
    run(params, state, grads)  # nothing is said
    narrow = {**grads, "w": grads["w"].astype(BF16)}
    with warns_once(__file__, r"bfloat16\[3, 4\] at grads\['w'\].*grad_dtype="):
        run(params, state, narrow)
    _, after = run(params, state, grads)
    assert after.inner_state.inner_state[0].nu["w"].dtype == F32


# Steps that are skipped


@pytest.mark.parametrize(
    ("rounding", "skip_by"),
    [("split", "cond"), pytest.param("stochastic", "where", marks=pytest.mark.thorough)],
)
def test_nan_in_one_leaf_skips_everything(rounding, skip_by, rng):
    masters = make_params(rng)
    low = low_precision_params(MOMENTUM, rounding)
    params, _ = split_master(masters)
    bad = grad_of(params)
    bad["layers"][1] = jnp.float32(jnp.nan)

    def by_hand(optimizer, params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state

    def by_us(optimizer, params, state, grads):
        finite = jmpx.all_finite(grads)
        return jmpx.optimizer_update(params, optimizer, state, grads, finite, skip_by=skip_by)

    skips = jmpx.skip_nonfinite(low, skip_by=skip_by)
    for optimizer, way in ((low, by_us), (skips, by_us), (skips, by_hand)):
        state, step = optimizer.init(masters), jax.jit(way, static_argnums=0)
        new, after = step(optimizer, params, state, bad)
        assert_same_bits(new, params)
        taken, _ = step(optimizer, params, state, grad_of(params))
        assert not jnp.array_equal(taken["w"], params["w"])
        if optimizer is not low:
            assert int(after.total_skipped) == 1
            after, state = after.inner_state, state.inner_state
        assert_same_bits(after, state)


# Around and inside of others


def test_multi_steps_inside_steps_as_with_masters(rng):
    masters, grads = make_params(rng), [make_params(rng) for _ in range(4)]
    multi: Any = lenient(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    optimizer = low_precision_params(multi, "split")
    params, state = split_master(masters)[0], optimizer.init(masters)
    expected, multi_state = masters, multi.init(masters)
    for each in grads:
        params, state = jmpx.optimizer_update(params, optimizer, state, each, True)
        updates, multi_state = multi.update(each, multi_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert_same_bits(merge_master(params, state.low), expected)


def test_extra_arguments_are_handed_on(rng):
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append((value, dtypes(params)))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = low_precision_params(inner, "stochastic")
    params = jmpx.cast_tree(make_params(rng), jnp.bfloat16)
    grads, state = grad_of(params), optimizer.init(params)
    jmpx.optimizer_update(params, optimizer, state, grads, True, value=3.0)
    assert seen == [(3.0, dtypes(grads))]


@roundings
def test_the_state_is_of_plain_arrays_whose_dtypes_stay(rounding, rng):
    masters = make_params(rng)
    optimizer = low_precision_params(jmpx.optim.with_state_dtype(ADAM, "bf16"), rounding)
    state = optimizer.init(masters)
    _, after = train(optimizer, split_master(masters)[0], state, 1)
    assert dtypes(after) == dtypes(state)
    assert after.inner_state.inner_state[0].nu["w"].dtype == BF16
    assert all(isinstance(np.asarray(leaf), np.ndarray) for leaf in jax.tree.leaves(after))
    assert jax.tree.structure(jax.eval_shape(optimizer.init, masters)) == jax.tree.structure(state)


# Frameworks and devices


def test_equinox_modules(rng, key):
    model = eqx.nn.MLP(3, "scalar", 8, 0, key=key)
    optimizer = low_precision_params(MOMENTUM, "split")
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    model = split_master(model)[0]
    x = normal(rng, 4, 3).astype(BF16)

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x).astype(F32) ** 2))(model)
        grads = jmpx.cast_to_full(grads)
        return jmpx.optimizer_update(model, optimizer, state, grads, jmpx.all_finite(grads))

    new, after = step(model, state)
    assert dtypes(eqx.filter(new, eqx.is_array)) == dtypes(eqx.filter(model, eqx.is_array))
    assert dtypes(after) == dtypes(state) and new.activation is model.activation
    assert not jnp.array_equal(new.layers[0].weight, model.layers[0].weight)


@pytest.mark.thorough
@pytest.mark.versions
@roundings
def test_nnx_modules(rounding, rng, standard_promotion):
    x = normal(rng, 4, 3).astype(BF16)
    results = []
    for by_nnx in (True, False):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        optimizer = low_precision_params(ADAM, rounding)
        masters = nnx.state(model, nnx.Param)
        of_nnx = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        state = optimizer.init(masters)
        nnx.update(model, split_master(masters)[0])
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
    optimizer = low_precision_params(MOMENTUM, "stochastic")
    params = jmpx.cast_tree({"w": normal(rng, 16)}, jnp.bfloat16)
    x = normal(rng, 8, 16)

    def per_device(params, state, x):
        grads = {"w": jax.lax.pmean(x[0] * params["w"].astype(F32), "data")}
        finite = jmpx.all_finite(grads)
        return jmpx.optimizer_update(params, optimizer, state, grads, finite)

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P())}
    step = jax.jit(jax.shard_map(per_device, mesh=mesh_of(8), **specs))
    new, _ = step(params, optimizer.init(params), x)
    copies = {np.asarray(shard.data).tobytes() for shard in new["w"].addressable_shards}
    assert len(copies) == 1 and new["w"].dtype == BF16
