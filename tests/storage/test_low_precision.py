"""`split_master`, `low_precision_params`, `with_state_dtype`: 16 bits that learn as float32."""

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
    bits_of,
    dtypes,
    lenient,
    leniently,
    normal,
    warns_once,
)
from hypothesis import example, given, settings, strategies as st
from optax import contrib

import jmpx
from jmpx.optim import low_precision_params, merge_master, split_master, with_state_dtype

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": lenient(optax.adam(1e-2)),
    "adamw": lenient(optax.adamw(1e-2, weight_decay=0.1)),
    "chain": lenient(optax.chain(optax.clip(1.0), optax.adagrad(1e-2))),
    "multi steps": lenient(optax.MultiSteps(optax.adam(1e-2), 2)),
    "hyperparameters": lenient(optax.inject_hyperparams(optax.adam)(1e-2)),
}
ADAM, MOMENTUM = OPTIMIZERS["adam"], OPTIMIZERS["momentum"]
roundings = pytest.mark.parametrize("rounding", ["split", "stochastic"])


def make_params(rng, dtype=F32):
    return {"w": normal(rng, 3, 4).astype(dtype), "b": normal(rng, 4).astype(dtype)}


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
    [("momentum", "skip_nonfinite"), ("adamw", "optimizer_update"), ("sgd", "apply_updates")],
)
def test_split_is_the_training_of_float32_masters_to_the_bit(name, way, rng):
    inner, masters = OPTIMIZERS[name], {**make_params(rng), "scalars": [normal(rng)]}
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
    # Half of the updates nearly cancel the parameter, so the new one is tiny.
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
    expected: Any = MOMENTUM.update(grad_of(masters), MOMENTUM.init(masters), masters)[0]
    for by_optimizer_update in (True, False):
        got, state = train(optimizer, params, optimizer.init(masters), 1, by_optimizer_update)
        assert dtypes(got) == dtypes(params)
        assert_same_bits(got["w"], masters["w"] + expected["w"])
        assert dtypes(state) == dtypes(optimizer.init(masters))


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
    bad["b"] = bad["b"].at[1].set(jnp.nan)

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


def test_what_comes_after_it_in_a_chain_is_told(rng):
    masters, clip = {"w": normal(rng, 3)}, optax.clip(1.0)
    params = jmpx.optim.split_master(masters)[0]
    low = jmpx.optim.low_precision_params(optax.sgd(0.1), "split")
    after = optax.chain(low, optax.scale(0.5))

    def step(optimizer):
        jmpx.optimizer_update(params, optimizer, optimizer.init(masters), masters, True)

    for optimizer in (low, optax.chain(clip, low), jmpx.skip_nonfinite(optax.chain(clip, low))):
        step(optimizer)  # nothing is said
    for optimizer in (after, jmpx.skip_nonfinite(after), optax.chain(clip, after)):
        with warns_once(__file__, "transformations after jmpx.optim.low_precision_params"):
            step(optimizer)


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
    optimizer = low_precision_params(with_state_dtype(ADAM, "bf16"), rounding)
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


# States in another dtype


@pytest.mark.parametrize(
    ("name", "dtype", "params_dtype"),
    [
        ("momentum", BF16, F32),
        ("multi steps", BF16, F32),
        ("hyperparameters", F32, BF16),
        pytest.param("chain", BF16, BF16, marks=pytest.mark.thorough),
    ],
)
def test_arrays_are_stored_in_the_dtype_and_scalars_as_they_are(name, dtype, params_dtype, rng):
    optimizer = with_state_dtype(OPTIMIZERS[name], dtype)
    params, grads = make_params(rng, params_dtype), make_params(rng, params_dtype)
    before = state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(grads, state, params)
        assert dtypes(state) == dtypes(before)  # which a scan can carry
        params = apply_updates(params, updates)
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 0]
    assert arrays and all(leaf.dtype == dtype for leaf in arrays)
    scalars = {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim == 0}
    assert scalars <= {"int32", "float32"}
    assert {u.dtype for u in updates.values()} == {np.dtype(F32)}


# Optimizers with copies of the parameters, and the fields of their states that are copies.
COPIES = {
    "mechanize": (contrib.mechanize(optax.adam(1e-2)), {"x0"}),
    "prodigy": (contrib.prodigy(), {"params0"}),
    "schedule_free": (contrib.schedule_free(optax.adam(1e-2), 1e-2), {"z"}),
    "cocob": (contrib.cocob(), {"init_particles"}),
    "chain": (optax.chain(optax.clip(1.0), contrib.schedule_free_adamw(1e-2)), {"z"}),
    "none": (optax.adamax(1e-2), set()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_parameters_stay_in_float32(name, rng):
    plain, fields = COPIES[name]
    optimizer = with_state_dtype(lenient(plain), "bf16")
    x, w = normal(rng, 32, 4), normal(rng, 4, 2)
    params = {"w": normal(rng, 4, 2)}

    @leniently
    def loss_of(optimizer):
        def step(state, _):
            params, state = state
            grads = jax.grad(lambda p: jnp.mean((x @ (p["w"] - w)) ** 2))(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        state = params, optimizer.init(params)
        (after, state), _ = jax.jit(lambda s: jax.lax.scan(step, s, None, 300))(state)
        return float(jnp.mean((x @ (after["w"] - w)) ** 2)), state

    (loss, state), (expected, _) = loss_of(optimizer), loss_of(lenient(plain))
    assert loss < 1.5 * expected + 1e-2
    paths = jax.tree_util.tree_leaves_with_path(state.inner_state)
    wide = [str(path) for path, leaf in paths if leaf.ndim > 0 and leaf.dtype == F32]
    assert {field for field in fields for path in wide if field in path} == fields
    assert len(wide) == len(fields)


@pytest.mark.parametrize("name", ["momentum", "chain"])
def test_in_float32_it_is_optax_itself(name, rng):
    params, inner = make_params(rng), OPTIMIZERS[name]
    optimizer = with_state_dtype(inner, "f32")
    state, inner_state = optimizer.init(params), inner.init(params)
    for _ in range(3):
        grads = make_params(rng)
        updates, state = optimizer.update(grads, state, params)
        expected, inner_state = inner.update(grads, inner_state, params)
        assert_same_bits((updates, state.inner_state), (expected, inner_state))
    assert int(state.count) == 3


def second_moments(optimizer, grads, steps):
    params = jnp.zeros(grads.shape[-1:], grads.dtype)

    def step(state, index):
        return optimizer.update(grads[index % len(grads)], state, params)[1], None

    run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(steps))[0])
    return run(optimizer.init(params))


@pytest.mark.thorough
def test_moments_of_random_gradients_have_the_error_of_the_docs(rng):
    grads = normal(rng, 200, 500)
    exact = np.asarray(second_moments(ADAM, grads, 2000)[0].nu, np.float64)
    found = second_moments(with_state_dtype(ADAM, "bf16"), grads, 2000).inner_state[0].nu
    error = np.asarray(found, np.float64) / exact - 1
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size) + 1e-3
    assert 0.02 < error.std() < 0.06


def test_a_seed_repeats_and_another_rounds_otherwise(rng):
    params, grads = make_params(rng), make_params(rng)

    def moments(seed):
        optimizer = with_state_dtype(optax.sgd(1.0, momentum=0.9), "bf16", seed=seed)
        return optimizer.update(grads, optimizer.init(params), params)[1].inner_state[0].trace

    assert_same_bits(moments(0), moments(0))
    assert not jnp.array_equal(moments(0)["w"], moments(1)["w"])


# Two halves of 16 bits make the same float32 again


LARGEST = 0x7F7F0000  # the bits of the largest bfloat16, as a float32
INF = 0x7F800000


def of_bits(bits):
    return np.asarray(bits, np.uint32).view(F32)


def around(bits):
    return np.arange(bits - 40_000, bits + 40_000, dtype=np.int64)


def patterns(rng):
    """Returns bits of random numbers, of numbers where a rule changes, and of their negatives."""
    special = [np.arange(70_000), around(0x3F800000), around(0x3F810000), around(LARGEST)]
    special += [around(INF), np.arange(0x7FFE0000, 2**31)]
    drawn = rng.integers(2**31, size=200_000)
    magnitude = np.concatenate([*special, drawn]).astype(np.uint32)
    return np.concatenate([magnitude, magnitude | np.uint32(2**31)])


def test_all_bits_come_back(rng):
    bits = patterns(rng)
    merged = bits_of(merge_master(*split_master(of_bits(bits))))
    magnitude, cut = bits & 0x7FFFFFFF, bits & 0x7FFF0000
    expected = bits.copy()
    beyond = cut == LARGEST
    expected[beyond] &= np.uint32(0xFFFFFFFE)
    expected[(magnitude == INF - 1) | (magnitude == INF - 2)] |= 1
    signaling = (cut == INF) & (magnitude > INF)
    expected[signaling] |= 0x00400000
    np.testing.assert_array_equal(merged, expected)


def test_the_high_half_is_the_usual_cast_but_for_ties_and_the_largest(rng):
    bits = patterns(rng)
    numbers = of_bits(bits)
    high = np.asarray(split_master(numbers)[0])
    assert high.dtype == BF16
    with np.errstate(over="ignore", invalid="ignore"):
        usual, wide = numbers.astype(BF16), high.astype(F32)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(numbers))
    np.testing.assert_array_equal(np.isinf(wide), np.isinf(numbers))
    finite = np.isfinite(numbers)
    tie, too_large = bits % 2**16 == 2**15, bits_of(usual) & 0x7FFF == INF >> 16
    clear = finite & ~tie & ~too_large
    np.testing.assert_array_equal(bits_of(high)[clear], bits_of(usual)[clear])
    tie &= finite & ~too_large
    assert (bits_of(high)[tie] == (bits[tie] >> 16) + 1).all()  # away from zero
    assert (np.abs(wide[finite & too_large]) == of_bits(LARGEST)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
@example(0, 0x8000)
@example(0x8000, 0xFFFF)
@example(0x7F7F, 0x7FFF)
@example(0x7F80, 5)
def test_a_new_high_half_is_what_the_master_is_nearest_to_whatever_the_low_one(high, low):
    """Pruning, clipping and loading may replace parameters and leave their low halves."""
    high = np.array(high, np.uint16).view(BF16)
    merged = np.asarray(merge_master(high, np.array(low, np.uint16)))
    assert np.isfinite(merged) == np.isfinite(high.astype(F32))
    if np.isfinite(merged):
        step = abs(int(bits_of(merged)) - (int(bits_of(high)) << 16))
        # The largest also stands for all beyond it.
        assert step <= (2**16 if int(bits_of(high)) & 0x7FFF == LARGEST >> 16 else 2**15)


def test_training_by_halves_is_training_of_masters(rng):
    params = {"w": normal(rng, 4, 3), "b": normal(rng, 3)}
    gradients = {"w": normal(rng, 30, 4, 3), "b": normal(rng, 30, 3)}
    of_masters = lambda params, g: jax.tree.map(lambda m, g: m - 2.0**-12 * g, params, g)  # noqa: E731
    of_halves = lambda halves, g: split_master(of_masters(merge_master(*halves), g))  # noqa: E731
    run = lambda step: lambda *args: jax.lax.scan(lambda c, g: (step(c, g), None), *args)[0]  # noqa: E731
    expected = jax.jit(run(of_masters))(params, gradients)
    halves = jax.jit(run(of_halves), donate_argnums=0)(split_master(params), gradients)
    assert_same_bits(merge_master(*halves), expected)


def test_other_leaves_stay_in_the_first_tree(key):
    tree = {"w": np.float32(0.1), "i": jnp.arange(2), "key": key, "call": print, "none": None}
    high, low = split_master(tree)
    assert all(high[name] is tree[name] for name in tree if name != "w")
    assert [name for name in low if low[name] is not None] == ["w"]
    merged = merge_master(high, low)
    assert merged["w"] == tree["w"] and merged["call"] is print and merged["none"] is None


def test_shapes():
    tree = [jax.ShapeDtypeStruct((2, 3), F32), jnp.zeros((0, 3))]
    (high, empty), (low, _) = jax.eval_shape(split_master, tree)
    assert (high.shape, high.dtype, low.shape, low.dtype) == ((2, 3), BF16, (2, 3), np.uint16)
    assert empty.shape == (0, 3)
