"""`stochastic_round`: right on average, one of two neighbors each time, and the same everywhere."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F16, F32, normal
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jmpx

E4M3, E5M2, F64 = (np.dtype(d) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2, np.float64))
FORMATS = [BF16, F16, E4M3, E5M2]
formats = pytest.mark.parametrize("dtype", FORMATS)


def bits_of(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def widened(array, dtype=F64):
    """Returns the numbers of an array in a wider dtype, without NumPy's warnings of NaN."""
    with np.errstate(all="ignore"):
        return np.asarray(array).astype(dtype)


def all_of(dtype):
    """Returns every value of a narrow dtype."""
    size = 8 * dtype.itemsize
    return np.arange(2**size, dtype=f"u{size // 8}").view(dtype)


def neighbors(values, dtype):
    """Returns the next values of `dtype` at or below finite numbers, and at or above them."""
    grid = widened(all_of(dtype))
    grid = np.unique(grid[np.isfinite(grid)])
    below = grid[np.searchsorted(grid, values, side="right") - 1]
    return below, grid[np.searchsorted(grid, values)]


def within(rng, dtype, n):
    """Returns float32 numbers of every size that are not beyond the largest of `dtype`."""
    numbers = rng.integers(2**32, size=8 * n, dtype=np.uint32).view(F32)
    largest = float(jnp.finfo(dtype).max)
    return numbers[np.abs(numbers) <= largest][:n]


@formats
def test_the_mean_is_right(dtype, key, rng):
    smallest = float(jnp.finfo(dtype).smallest_normal)
    numbers = rng.uniform(-1, 1, 8) * smallest * np.array([0.02, 0.1, 0.5, 1, 2, 7, 50, 1000])
    far_below = float(jnp.finfo(dtype).smallest_subnormal) * 2.0**-10
    numbers, n = np.append(numbers, far_below).astype(F32), 20_000
    rounded = jmpx.optim.stochastic_round(np.tile(numbers, (n, 1)), dtype, key)
    below, above = neighbors(numbers, dtype)
    mean = widened(rounded).mean(0)
    deviation = np.sqrt((numbers - below) * (above - numbers) / n)
    assert (above > below).all()
    assert (np.abs(mean - numbers) <= 4 * deviation).all()


PAIRS = [(BF16, F16), (F16, BF16), (F16, E4M3), (BF16, E5M2), *((F32, each) for each in FORMATS)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stored, dtype", PAIRS)
def test_each_result_is_a_neighbor_and_both_occur(stored, dtype, key, rng):
    if stored.itemsize < dtype.itemsize or stored == dtype:
        pytest.skip("untouched or refused")
    numbers = widened(within(rng, dtype, 4_000), stored)
    exact = widened(numbers)
    numbers = numbers[np.abs(exact) <= float(jnp.finfo(dtype).max)]
    exact = widened(numbers)
    rounded = jmpx.optim.stochastic_round(numbers, dtype, key)
    assert rounded.dtype == dtype
    below, above = neighbors(exact, dtype)
    rounded = widened(rounded)
    assert (np.signbit(rounded) == np.signbit(exact)).all()
    is_below, is_above = rounded == below, rounded == above
    assert (is_below | is_above).all()
    normal = np.abs(exact) > float(jnp.finfo(dtype).smallest_normal)
    if stored.itemsize > dtype.itemsize:
        assert 0.4 < is_below[normal & (above > below)].mean() < 0.6


@formats
def test_what_the_dtype_has_stays(dtype, key):
    values = all_of(dtype)
    values = values[~np.isnan(widened(values))]
    rounded = jmpx.optim.stochastic_round(widened(values, F32), dtype, key)
    np.testing.assert_array_equal(bits_of(rounded), bits_of(values))


@pytest.mark.sampled(3)
@formats
@pytest.mark.parametrize("jit", [False, True])
def test_nan_and_what_is_too_large_become_what_a_cast_makes_of_them(dtype, jit, key, rng):
    largest = float(jnp.finfo(dtype).max)
    numbers = np.concatenate(
        [
            widened(largest * (1 + 2.0 ** -np.arange(2, 20)), F32),
            rng.integers(0x7F800000, 2**31, 100, dtype=np.uint32).view(F32),  # NaN
            np.array([np.inf, np.nan, np.finfo(F32).max], F32),
        ]
    )
    numbers = np.concatenate([numbers, -numbers])

    def func(x):
        return jmpx.optim.stochastic_round(x, dtype, key)

    rounded = (jax.jit(func) if jit else func)(jnp.asarray(numbers))
    cast = jnp.asarray(numbers).astype(dtype)
    np.testing.assert_array_equal(bits_of(rounded), bits_of(cast))
    assert np.isfinite(widened(cast)).any()  # what is nearest to the largest


def test_small_updates_arrive_on_average(rng, key):
    def step(carry, key):
        plain, stochastic = carry
        new = jmpx.optim.stochastic_round(stochastic.astype(F32) + 2.0**-10, BF16, key)
        return ((plain.astype(F32) + 2.0**-10).astype(BF16), new), None

    start = (jnp.ones(500, BF16),) * 2
    (plain, stochastic), _ = jax.lax.scan(step, start, jax.random.split(key, 1000))
    assert (plain == 1).all()
    assert abs(float(stochastic.astype(F32).mean()) - (1 + 1000 / 1024)) < 4 * 0.09 / 500**0.5


# Keys and devices


def test_a_key_gives_the_same_bits_and_another_key_others(key, rng):
    tree = {"a": normal(rng, 100), "b": None, "c": [normal(rng, 100)]}
    tree["c"][0] = tree["a"]
    first = jmpx.optim.stochastic_round(tree, BF16, key)
    again = jax.jit(jmpx.optim.stochastic_round, static_argnums=1)(tree, "bf16", key)
    other = jmpx.optim.stochastic_round(tree, BF16, jax.random.fold_in(key, 1))
    assert first["b"] is None
    for left, right in zip(*map(jax.tree.leaves, (first, again)), strict=True):
        np.testing.assert_array_equal(left, right)
    assert (first["a"] != first["c"][0]).any()  # a key for each leaf
    assert (first["a"] != other["a"]).any()


def test_an_old_key_and_one_of_another_kind_are_keys(rng):
    values = normal(rng, 50)
    new, old = (f(3) for f in (jax.random.key, jax.random.PRNGKey))
    np.testing.assert_array_equal(
        jmpx.optim.stochastic_round(values, F16, new), jmpx.optim.stochastic_round(values, F16, old)
    )
    assert jmpx.optim.stochastic_round(values, F16, jax.random.key(0, impl="rbg")).dtype == F16


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), "d")


def test_replicas_and_shards_are_rounded_as_one_array_is(mesh, key, rng):
    values = normal(rng, 16, 8)
    expected = jmpx.optim.stochastic_round(values, BF16, key)
    for spec in (P(), P("d"), P(None, "d")):
        func = jax.jit(lambda x, key: jmpx.optim.stochastic_round(x, BF16, key))
        rounded = func(jax.device_put(values, NamedSharding(mesh, spec)), key)
        assert rounded.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        for shard in rounded.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])


def test_replicas_in_shard_map_stay_alike_and_shards_take_a_key_of_their_device(mesh, key):
    values = jnp.full(64, 1 + 2.0**-8)

    def per_device(replica, shard, key):
        own = jax.random.fold_in(key, jax.lax.axis_index("d"))
        rounded = jmpx.optim.stochastic_round(replica, BF16, key)
        return rounded, rounded[None], jmpx.optim.stochastic_round(shard, BF16, own)

    func = jax.shard_map(
        per_device, mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=(P(), P("d"), P("d"))
    )
    replica, copies, shards = jax.jit(func)(values, jnp.tile(values, 8), key)
    np.testing.assert_array_equal(replica, jmpx.optim.stochastic_round(values, BF16, key))
    np.testing.assert_array_equal(copies, np.tile(replica, (8, 1)))
    assert len({each.tobytes() for each in np.asarray(shards).reshape(8, -1)}) == 8


def test_vmap_and_donated_buffers(key, rng):
    values, keys = normal(rng, 3, 20), jax.random.split(key, 3)

    def func(x, key):
        return jmpx.optim.stochastic_round(x, E5M2, key)

    expected = [func(x, k) for x, k in zip(values, keys, strict=True)]
    mapped = jax.jit(jax.vmap(func))(values, keys)
    np.testing.assert_array_equal(mapped, jnp.stack(expected))
    step = jax.jit(lambda x, k: func(x.astype(F32) + 1, k), donate_argnums=0)
    assert step(mapped, key).shape == (3, 20)


# Trees


def test_other_leaves_pass_untouched(key):
    half = jnp.ones(2, BF16)
    tree = {"f": half, "i": jnp.arange(2), "z": 1j, "n": 0.1, "k": key, "call": print, "none": None}
    tree |= {"complex": jnp.ones(2, jnp.complex64), "bool": np.array(True), "text": "x"}
    rounded = jmpx.optim.stochastic_round(tree, BF16, key)
    assert all(rounded[name] is leaf for name, leaf in tree.items())


def test_arrays_of_numpy_and_shapes(key):
    tree = [np.ones((2, 3), F32), np.float32(0.5)]
    rounded = jmpx.optim.stochastic_round(tree, F16, key)
    shapes = jax.eval_shape(lambda tree: jmpx.optim.stochastic_round(tree, F16, key), tree)
    for leaves in rounded, shapes:
        assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [((2, 3), F16), ((), F16)]
    assert jmpx.optim.stochastic_round(jnp.zeros((0, 3)), BF16, key).shape == (0, 3)


def test_modules(key):
    linear = eqx.nn.Linear(3, 2, key=key)
    rounded = jmpx.optim.stochastic_round(linear, BF16, key)
    assert isinstance(rounded, eqx.nn.Linear) and rounded.weight.dtype == BF16
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    rounded = jmpx.optim.stochastic_round(state, BF16, key)
    assert jax.tree.structure(rounded) == jax.tree.structure(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {BF16}


# Errors

KEY = jax.random.key(0)
ERRORS = {
    "Cannot round stochastically to float32: expected bfloat16, float16, float8_e4m3fn or "
    "float8_e5m2; jmpx.cast_tree casts to others.": (jnp.ones(2), F32, KEY),
    "Cannot round stochastically to float8_e4m3fnuz": (jnp.ones(2), "float8_e4m3fnuz", KEY),
    "Unknown dtype 'bf61'": (jnp.ones(2), "bf61", KEY),
    "Unknown dtype 'int8'": (jnp.ones(2), jnp.int8, KEY),
    "Unknown dtype None": (jnp.ones(2), None, KEY),
    "Cannot round float8_e5m2[2] at tree['w'][0] to bfloat16: cast it by jmpx.cast_tree, which is "
    "exact to a wider dtype, or to float32 before.": ({"w": [jnp.ones(2, E5M2)]}, BF16, KEY),
    "Cannot round float64[2] at tree to bfloat16: cast it": (np.ones(2), BF16, KEY),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_input_gets_one_sentence(message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as error:
        jmpx.optim.stochastic_round(*ERRORS[message])
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


WRONG_KEYS = [None, 0, jax.random.split(KEY), jnp.ones((2, 2), "uint32"), jnp.ones(2)]


@pytest.mark.parametrize("wrong", WRONG_KEYS, ids=str)
def test_what_is_not_one_key_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="key|Expected|PRNG"):
        jmpx.optim.stochastic_round(jnp.ones(2), BF16, wrong)
