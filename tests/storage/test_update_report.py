"""`update_report`: which updates round to nothing."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BF16, F16, F32, enable_x64, lenient, normal
from helpers.maps import mesh_of
from jax.sharding import PartitionSpec as P

from jmpx.inspect import update_report

F64, E4M3, E5M2 = (np.dtype(d) for d in (np.float64, jnp.float8_e4m3fn, jnp.float8_e5m2))


def widened(array):
    """Returns numbers in float64, without NumPy's warnings of NaN."""
    with np.errstate(all="ignore"):
        return np.asarray(array).astype(F64)


def bits_of(array):
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def vanish(params, changes):
    """Tells which changes do not reach half of the distance to the neighbor, by all of a dtype."""
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


def test_adam_in_bfloat16_stalls_and_the_report_tells(rng):
    params = {"norm": jnp.ones(64, BF16), "w": normal(rng, 8, 8) / 100}
    optimizer = lenient(optax.adamw(1e-3, weight_decay=0.1))

    def step(carry, key):
        params, state = carry
        grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape, p.dtype), params)
        updates, state = optimizer.update(grads, state, params)
        report = update_report(params, updates)
        new = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
        return (new, state), report

    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys), donate_argnums=0)
    (new, _), report = run((params, optimizer.init(params)), jax.random.split(jax.random.key(0), 5))
    assert (new["norm"] == 1).all()
    assert report.updates["['norm']"].stored.shape == (5,)
    text = str(report).splitlines()
    assert text[3].startswith("     100.0      100.0 ") and text[3].endswith("  ['norm'], bfloat16")
    assert text[-1].startswith("Remedy for bfloat16: float32 parameters")


def test_devices_add_their_counts_up(rng):
    params, updates = normal(rng, 16, 4), normal(rng, 16, 4) / 500
    whole = jax.jit(update_report)(params, updates)
    total = lambda p, u: jax.lax.psum(update_report(p, u), "data")  # noqa: E731
    specs = {"in_specs": P("data"), "out_specs": P()}
    added = jax.jit(jax.shard_map(total, mesh=mesh_of(8), **specs))(params, updates)
    assert counts_of(added.updates[""]) == counts_of(whole.updates[""])
    assert str(added) == str(whole)


# Trees


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


# Text


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
