"""`stochastic_round`, and `update_report`, which counts updates lost to rounding."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BF16, F16, F32, assert_same_bits, bits_of, enable_x64, normal
from helpers.maps import mesh_of
from jax.sharding import NamedSharding, PartitionSpec as P

from jmpx.inspect import update_report
from jmpx.optim import stochastic_round

E4M3, E5M2, F64 = (np.dtype(d) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2, np.float64))
FORMATS = [BF16, F16, E4M3, E5M2]
formats = pytest.mark.parametrize("dtype", FORMATS)
rounded_in_jit = jax.jit(stochastic_round, static_argnums=1)


def widened(array, dtype=F64):
    """Returns the numbers of an array in a wider dtype, without NumPy's warnings of NaN."""
    with np.errstate(all="ignore"):
        return np.asarray(array).astype(dtype)


@functools.cache
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
    return numbers[np.abs(numbers) <= float(jnp.finfo(dtype).max)][:n]


@formats
def test_the_mean_is_right(dtype, key, rng):
    smallest = float(jnp.finfo(dtype).smallest_normal)
    numbers = rng.uniform(-1, 1, 8) * smallest * np.array([0.02, 0.1, 0.5, 1, 2, 7, 50, 1000])
    far_below = float(jnp.finfo(dtype).smallest_subnormal) * 2.0**-10
    numbers, n = np.append(numbers, far_below).astype(F32), 20_000
    rounded = stochastic_round(np.tile(numbers, (n, 1)), dtype, key)
    below, above = neighbors(numbers, dtype)
    mean = widened(rounded).mean(0)
    deviation = np.sqrt((numbers - below) * (above - numbers) / n)
    assert (above > below).all()
    assert (np.abs(mean - numbers) <= 4 * deviation).all()


@pytest.mark.parametrize(("stored", "dtype"), [(F32, F16), (F16, E4M3), (BF16, E5M2), (F16, BF16)])
def test_each_result_is_a_neighbor_and_both_occur(stored, dtype, key, rng):
    numbers = widened(within(rng, dtype, 4_000), stored)
    numbers = numbers[np.abs(widened(numbers)) <= float(jnp.finfo(dtype).max)]
    exact = widened(numbers)
    rounded = stochastic_round(numbers, dtype, key)
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
    rounded = stochastic_round(widened(values, F32), dtype, key)
    np.testing.assert_array_equal(bits_of(rounded), bits_of(values))


@pytest.mark.parametrize(("dtype", "jit"), [(BF16, True), (F16, False), (E5M2, True)])
def test_nan_and_what_is_too_large_become_what_a_cast_makes_of_them(dtype, jit, key, rng):
    largest = float(jnp.finfo(dtype).max)
    too_large = widened(largest * (1 + 2.0 ** -np.arange(2, 20)), F32)
    nan = rng.integers(0x7F800000, 2**31, 100, dtype=np.uint32).view(F32)
    numbers = np.concatenate([too_large, nan, np.array([np.inf, np.nan, np.finfo(F32).max], F32)])
    numbers = np.concatenate([numbers, -numbers])
    rounded = (rounded_in_jit if jit else stochastic_round)(jnp.asarray(numbers), dtype, key)
    cast = jnp.asarray(numbers).astype(dtype)
    np.testing.assert_array_equal(bits_of(rounded), bits_of(cast))
    assert np.isfinite(widened(cast)).any()  # what is nearest to the largest


# Keys and devices


@pytest.mark.thorough
def test_a_key_gives_the_same_bits_and_another_key_others(key, rng):
    values = normal(rng, 100)
    tree = {"a": values, "b": None, "c": [values]}
    first = stochastic_round(tree, BF16, key)
    other = stochastic_round(tree, BF16, jax.random.fold_in(key, 1))
    assert first["b"] is None
    assert_same_bits(first, rounded_in_jit(tree, "bf16", key))
    assert (first["a"] != first["c"][0]).any()  # a key for each leaf
    assert (first["a"] != other["a"]).any()
    # An old key, and one of another kind.
    new, old = (stochastic_round(values, F16, f(3)) for f in (jax.random.key, jax.random.PRNGKey))
    np.testing.assert_array_equal(new, old)
    assert stochastic_round(values, F16, jax.random.key(0, impl="rbg")).dtype == F16


@pytest.mark.thorough
def test_replicas_and_shards_are_rounded_as_one_array_is(key, rng):
    values, mesh = normal(rng, 16, 8), mesh_of(8)
    expected = stochastic_round(values, BF16, key)
    for spec in (P(), P(None, "data")):
        sharding = NamedSharding(mesh, spec)
        rounded = rounded_in_jit(jax.device_put(values, sharding), BF16, key)
        assert rounded.sharding.is_equivalent_to(sharding, 2)
        for shard in rounded.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])


@pytest.mark.thorough
def test_replicas_in_shard_map_stay_alike_and_shards_take_a_key_of_their_device(key):
    values = jnp.full(64, 1 + 2.0**-8)

    def per_device(replica, shard, key):
        own = jax.random.fold_in(key, jax.lax.axis_index("data"))
        rounded = stochastic_round(replica, BF16, key)
        return rounded, rounded[None], stochastic_round(shard, BF16, own)

    ins, outs = (P(), P("data"), P()), (P(), P("data"), P("data"))
    func = jax.shard_map(per_device, mesh=mesh_of(8), in_specs=ins, out_specs=outs)
    replica, copies, shards = jax.jit(func)(values, jnp.tile(values, 8), key)
    np.testing.assert_array_equal(replica, stochastic_round(values, BF16, key))
    np.testing.assert_array_equal(copies, np.tile(replica, (8, 1)))
    assert len({each.tobytes() for each in np.asarray(shards).reshape(8, -1)}) == 8


@pytest.mark.thorough
def test_vmap_and_donated_buffers(key, rng):
    values, keys = normal(rng, 2, 20), jax.random.split(key, 2)
    func = lambda x, key: stochastic_round(x, E5M2, key)  # noqa: E731
    expected = [rounded_in_jit(x, E5M2, k) for x, k in zip(values, keys, strict=True)]
    mapped = jax.jit(jax.vmap(func))(values, keys)
    np.testing.assert_array_equal(mapped, jnp.stack(expected))
    step = jax.jit(lambda x, k: func(x.astype(F32) + 1, k), donate_argnums=0)
    assert step(mapped, key).shape == (2, 20)


# Trees


def test_other_leaves_pass_untouched(key):
    half = jnp.ones(2, BF16)
    tree = {"f": half, "i": jnp.arange(2), "z": 1j, "n": 0.1, "k": key, "call": print, "none": None}
    tree |= {"complex": jnp.ones(2, jnp.complex64), "bool": np.array(True), "text": "x"}
    rounded = stochastic_round(tree, BF16, key)
    assert all(rounded[name] is leaf for name, leaf in tree.items())


def test_arrays_of_numpy_shapes_and_modules(key):
    tree = [np.ones((2, 3), F32), np.float32(0.5), jnp.zeros((0, 3))]
    rounded = stochastic_round(tree, F16, key)
    shapes = jax.eval_shape(lambda tree: stochastic_round(tree, F16, key), tree)
    for leaves in rounded, shapes:
        found = [(leaf.shape, leaf.dtype) for leaf in leaves]
        assert found == [((2, 3), F16), ((), F16), ((0, 3), F16)]
    linear = eqx.nn.Linear(3, 2, key=key)
    rounded = jax.eval_shape(lambda tree: stochastic_round(tree, BF16, key), linear)
    assert isinstance(rounded, eqx.nn.Linear) and rounded.weight.dtype == BF16
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    rounded = jax.eval_shape(lambda tree: stochastic_round(tree, BF16, key), state)
    assert jax.tree.structure(rounded) == jax.tree.structure(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {BF16}


WRONG_KEYS = [None, 0, jax.random.split(jax.random.key(0)), jnp.ones(2)]


@pytest.mark.parametrize("wrong", WRONG_KEYS, ids=str)
def test_what_is_not_one_key_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="key|Expected|PRNG"):
        stochastic_round(jnp.ones(2), BF16, wrong)


# update_report


def vanish(params, changes):
    """Finds changes below half of the distance to the neighbor, by listing all values."""
    dtype = params.dtype
    if dtype == F32:
        return (widened(params) + changes).astype(F32) == params
    grid = widened(np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype))
    grid = np.unique(grid[np.isfinite(grid)])
    end = grid[-1] + (grid[-1] - grid[-2]) / 2
    halves = np.concatenate([[-end], (grid[1:] + grid[:-1]) / 2, [end]])
    is_inf = ~np.isfinite(widened(params))
    place = np.searchsorted(grid, np.where(is_inf, 0, widened(params)))
    new, is_even = widened(params) + changes, bits_of(params) % 2 == 0
    inside = (halves[place] < new) & (new < halves[place + 1])
    return is_inf | inside | (is_even & ((halves[place] == new) | (new == halves[place + 1])))


def counts_of(lost):
    return [int(field) for field in lost]


def expected_counts(params, changes):
    with np.errstate(over="ignore"):
        in_formats = [params, *(params.astype(F32).astype(each) for each in (BF16, F16))]
    return [len(changes), *(int(vanish(each, widened(changes)).sum()) for each in in_formats)]


def draw(rng, dtype, n=3000):
    """Returns finite numbers of any size, and changes around half of what they are rounded to."""
    params = rng.integers(2 ** (8 * dtype.itemsize), size=n, dtype=f"u{dtype.itemsize}").view(dtype)
    params[: n // 4] = widened(2.0 ** rng.integers(-6, 6, n // 4)).astype(dtype)  # one-sided gaps
    params = params[np.isfinite(widened(params))]
    exponent = np.maximum(np.frexp(widened(params))[1] - 1, jnp.finfo(dtype).minexp)
    spacing = 2.0 ** (exponent - jnp.finfo(dtype).nmant)
    changes = (spacing * rng.integers(-12, 13, len(params)) / 16).astype(F32)
    return params[changes != 0], changes[changes != 0]


@pytest.mark.parametrize(("dtype", "jit"), [(BF16, True), (F16, False), (F32, True), (E5M2, True)])
def test_it_counts_what_rounding_to_the_nearest_loses(dtype, jit, rng):
    params, changes = draw(rng, dtype)
    func = jax.jit(update_report) if jit else update_report
    report = func({"a": [jnp.asarray(params)]}, {"a": [changes]})
    counts = counts_of(report.updates["['a'][0]"])
    assert counts == expected_counts(params, changes)
    assert 0 < counts[1] < counts[0]
    assert report.dtypes == (("['a'][0]", dtype.name),)


def test_what_is_not_finite_or_does_not_change_is_not_counted():
    params = jnp.array([1, 1, jnp.inf, jnp.nan, 1, 0, 0], F32)
    updates = jnp.array([jnp.nan, jnp.inf, 1, 1, 0, 1e-38, 1e-9], F32)
    counts = update_report(params, updates)
    assert counts_of(counts.updates[""]) == [2, 0, 0, 2]


def test_float64():
    with enable_x64():
        params = jnp.ones(3, F64)
        report = update_report(params, jnp.array([1e-9, 1e-17, 1e-3], F64))
        assert counts_of(report.updates[""]) == [3, 1, 3, 2]


def test_xla_cannot_hide_it_by_precision_that_it_keeps(rng):
    masters, updates = normal(rng, 1000), normal(rng, 1000) / 300

    def step(masters, updates):
        params = masters.astype(BF16)
        report = update_report(params, updates)
        return report, (params.astype(F32) + updates).astype(BF16)

    report, _ = jax.jit(step)(masters, updates)
    expected = expected_counts(np.asarray(masters).astype(BF16), np.asarray(updates))
    assert counts_of(report.updates[""]) == expected


def test_reports_of_a_scan_add_up():
    params = jnp.ones(64, BF16)
    step = lambda _, update: (None, update_report(params, jnp.full(64, update)))  # noqa: E731
    _, report = jax.lax.scan(step, None, jnp.array([1e-4, 1.0]))
    assert report.updates[""].stored.shape == (2,)
    assert str(report).splitlines()[2].startswith("      50.0       50.0 ")


def test_devices_add_their_counts_up(rng):
    params, updates = normal(rng, 16, 4), normal(rng, 16, 4) / 500
    whole = jax.jit(update_report)(params, updates)
    total = lambda p, u: jax.lax.psum(update_report(p, u), "data")  # noqa: E731
    specs: Any = {"in_specs": P("data"), "out_specs": P()}
    added = jax.jit(jax.shard_map(total, mesh=mesh_of(8), **specs))(params, updates)
    assert counts_of(added.updates[""]) == counts_of(whole.updates[""])
    assert str(added) == str(whole)


def test_leaves_without_an_update_are_left_out():
    params = {"w": jnp.ones(2), "n": jnp.arange(2), "f": jnp.ones(2), "call": print, "none": None}
    updates = {"w": jnp.ones(2), "n": jnp.ones(2), "f": None, "call": None, "none": None}
    assert list(update_report(params, updates).updates) == ["['w']"]
    masked = params | {"f": optax.MaskedNode()}
    report = update_report({**params, "w": jnp.float32(1)}, {**masked, "w": np.float32(1)})
    assert counts_of(report.updates["['w']"]) == [1, 0, 0, 0]


def test_updates_of_modules(key):
    linear = eqx.nn.Linear(3, 2, key=key)
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 1e-9), eqx.filter(linear, eqx.is_array))
    report = update_report(linear, updates)
    assert counts_of(report.updates[".weight"])[0] == 6
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    report = update_report(state, jax.tree.map(jnp.ones_like, state))
    assert sorted(counts_of(lost)[0] for lost in report.updates.values()) == [2, 6]


def test_the_text_names_the_worst():
    params = {f"p{i}": jnp.ones(10, BF16) for i in range(7)}
    updates = {f"p{i}": jnp.where(jnp.arange(10) < i, 1e-4, 1.0) for i in range(7)}
    text = str(update_report(params, updates)).splitlines()
    assert text[2:4] == [
        "      30.0       30.0       30.0  all of 7",
        "      60.0       60.0       60.0  ['p6'], bfloat16",
    ]
    assert len(text) == 9 and not any("p1" in line for line in text)


def test_the_text_knows_the_remedy():
    def last(dtype, update):
        report = update_report(jnp.ones(4, dtype), jnp.full(4, update, F32))
        return str(report).splitlines()[-1]

    assert last(BF16, 1e-4).startswith("Remedy for bfloat16: float32 parameters")
    assert last(F16, 1e-6).startswith("Remedy for float16: float32 parameters")
    assert last(F32, 1e-9).startswith("Remedy for float32: a larger learning rate")
    assert last(F32, 1e-4) == last(F32, 0.0) == "Little is lost as stored."
