"""`split_master` and `merge_master`: two halves of 16 bits that make the same float32 again."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import BF16, F32, assert_same_bits, normal
from helpers.maps import mesh_of
from hypothesis import example, given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from jmpx.optim import merge_master, split_master

LARGEST = 0x7F7F0000  # the bits of the largest bfloat16, as a float32
INF = 0x7F800000


def of_bits(bits):
    return np.asarray(bits, np.uint32).view(F32)


def bits_of(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def around(bits):
    return np.arange(bits - 40_000, bits + 40_000, dtype=np.int64)


def patterns(rng):
    """Returns bits of random numbers, of those where a rule changes, and of their negatives."""
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


def test_normal_numbers_are_rebuilt_and_nearly_all_are_cast_as_usual(rng):
    numbers = rng.normal(size=100_000).astype(F32)
    high, low = split_master(numbers)
    np.testing.assert_array_equal(merge_master(high, low), numbers)
    assert (np.asarray(high) == numbers.astype(BF16)).mean() > 0.9999


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


def test_shards_are_split_where_they_are(rng):
    values = normal(rng, 16)
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    halves = jax.jit(jax.shard_map(split_master, mesh=mesh_of(8), **specs))(values)
    assert all(len(half.sharding.device_set) == 8 for half in halves)
    assert_same_bits(halves, split_master(values))
    np.testing.assert_array_equal(jax.jit(merge_master)(*halves), values)


# Trees


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


def test_modules_are_split_and_merged(key):
    layers = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    for tree in (eqx.nn.MLP(2, 2, 4, 0, key=key), nnx.state(nnx.Sequential(*layers))):
        high, low = split_master(tree)
        assert type(high) is type(low) is type(tree)
        assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {np.dtype(np.uint16)}
        merged = merge_master(high, low)
        assert jax.tree.structure(merged) == jax.tree.structure(tree)
        for left, right in zip(*map(jax.tree.leaves, (merged, tree)), strict=True):
            assert left is right or (bits_of(left) == bits_of(right)).all()
