"""The counts of an array, against NumPy's float64, and against casts to the real formats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from hypothesis import example, given, settings, strategies as st

import jmpx

# One array is counted here, and reports are made of chosen counts: public names count programs.
from jmpx._inspect.ranges import counting
from jmpx._inspect.ranges.api import Ranges
from jmpx._inspect.ranges.counting import (
    FORMATS,
    MANTISSA_BITS,
    Histogram,
    Range,
    as_format,
    bin_of,
    merged,
)

SIZE = 64
# Float32's own edges, and those of each format with their neighbours, at scale 1.
EDGES = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]


def bits_of(key):
    """The bits of the float32 number whose exponent and mantissa a key holds."""
    mantissa = 1 + (key % 2**MANTISSA_BITS) / 2**MANTISSA_BITS
    return int(np.float32(np.ldexp(mantissa, key >> MANTISSA_BITS)).view(np.uint32))


for known in FORMATS.values():
    for edge in (known.kept, known.normal, known.overflows):
        EDGES += [bits_of(edge + i) for i in range(-2, 3) if edge >> MANTISSA_BITS < 127]

PATTERNS = st.lists(
    st.builds(
        lambda magnitude, sign: magnitude | sign << 31,
        st.one_of(st.integers(0, 2**31 - 1), st.sampled_from(EDGES)),
        st.booleans(),
    ),
    min_size=SIZE,
    max_size=SIZE,
)


@functools.partial(jax.jit, static_argnums=1)
def measured(array, masks=()):
    bins = counting.bins_of(counting.magnitudes(array), masks)
    return counting.count(bins, np.uint16(0), 1)[0]


def measure(array, masks=()):
    counts = np.asarray(measured(array, masks))
    assert counts.sum() == array.size
    return Histogram.of(counts)


def rounded_once(numbers, dtype):
    """The nearest numbers of a format, with ties to even: a cast from float64 may round twice."""
    info = jnp.finfo(dtype)
    exponents = np.maximum(np.frexp(numbers)[1] - 1, np.frexp(float(info.tiny))[1] - 1)
    unit = np.ldexp(1.0, exponents - info.nmant)
    nearest = np.rint(numbers / unit) * unit
    return np.where(np.abs(nearest) > float(info.max), np.inf, nearest)


def cast_shares(numbers, dtype, scale):
    """The shares of numbers that rounding to a format loses, denormalizes and makes infinite."""
    rounded = rounded_once(numbers.astype(np.float64) * scale, dtype)
    small = np.abs(rounded) < float(jnp.finfo(dtype).tiny)
    counts = (rounded == 0).sum(), (small & (rounded != 0)).sum(), (~np.isfinite(rounded)).sum()
    return tuple(int(count) / max(numbers.size, 1) for count in counts)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(PATTERNS)
@example([0x01000001] * SIZE)  # 2**-9 of it has to be rounded at once, not by way of float32
def test_every_number_is_counted_where_it_belongs(patterns):
    array = np.asarray(patterns, np.uint32).view(np.float32)
    histogram = measure(array)
    finite = np.abs(array[np.isfinite(array) & (array != 0)])
    exponents = np.frexp(finite.astype(np.float64))[1] - 1
    found, counts = np.unique(exponents, return_counts=True)
    assert histogram.exponents == dict(zip(found.tolist(), counts.tolist(), strict=True))
    assert histogram.zeros == np.sum(array == 0)
    assert histogram.infinite == np.isinf(array).sum()
    assert histogram.nan == np.isnan(array).sum()
    assert (histogram.size, histogram.numbers) == (array.size, finite.size)
    for dtype in FORMATS:
        for scale in (1.0, 2.0**13, 2.0**-9):
            expected = cast_shares(finite, np.dtype(getattr(jnp, dtype)), scale)
            assert histogram.shares(dtype, scale) == expected


@pytest.mark.parametrize("dtype", FORMATS)
def test_shares_of_many_numbers_are_those_of_casts(dtype, rng):
    exponents = rng.integers(-45, 20, size=20_000)
    array = np.ldexp(rng.uniform(-2, 2, size=exponents.size), exponents).astype(np.float32)
    histogram = measure(array)
    for scale in (1, 2**15, 2.0**-7, 2**100):
        expected = cast_shares(array[array != 0], np.dtype(getattr(jnp, dtype)), float(scale))
        assert histogram.shares(dtype, scale) == expected
        assert sum(expected) > 0 or dtype == "bfloat16"


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_largest_scale_does_not_overflow_and_twice_it_does(dtype, rng):
    largest = float(jnp.finfo(dtype).max)
    near = largest * np.concatenate([1 + rng.uniform(-0.1, 0.1, 50), [1, 2.0**-9, 3e-5]])
    for number in np.minimum(near, 3.4028234e38).astype(np.float32):
        exponent = measure(np.asarray([number])).head_room(dtype)
        for more in (0, 1):
            scaled = float(number) * 2.0 ** (exponent + more)
            found = rounded_once(np.asarray([scaled]), np.dtype(getattr(jnp, dtype)))
            assert np.isinf(found[0]) == bool(more)


def test_a_mask_takes_what_a_score_adds_to_it_and_no_more():
    mask = int(np.float32(1e9).view(np.uint32))
    for apart, is_masked in ((0, 1), (counting._NEAR, 1), (counting._NEAR + 1, 0)):
        for bits in (mask - apart, mask + apart):
            array = np.array([bits], np.uint32).view(np.float32)
            found = measure(array, (1e9,))
            expected = is_masked, 1 - is_masked
            assert (found.masked, found.numbers) == expected, (apart, bits - mask)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 1, 3)])
def test_every_shape_is_measured(shape):
    histogram = measure(np.full(shape, 3.0, np.float32))
    assert histogram.exponents == ({1: int(np.prod(shape))} if np.prod(shape) else {})


def test_counts_go_beyond_32_bits():
    total = np.zeros((2, 2), np.uint32)
    for _ in range(3):
        total = counting.add_counts(total, np.asarray([2**32 - 1, 7], np.uint32))
    assert counting.as_integers(total).tolist() == [3 * (2**32 - 1), 21]


def test_histograms_are_merged(rng):
    halves = [np.ldexp(rng.normal(size=50), k).astype(np.float32) for k in (-3, 4)]
    whole = measure(np.concatenate(halves))
    assert merged(map(measure, halves)) == whole
    assert merged([]) == Histogram()


def test_a_scale_is_a_power_of_two_and_only_four_formats_are_known():
    for scale in (3, 0, -2, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="power of two"):
            Histogram().shares("float16", scale)
    for dtype in ("float32", jnp.float32, "float15"):
        with pytest.raises(ValueError, match="Expected one of the formats float16|Unknown dtype"):
            Histogram().shares(dtype)
    assert as_format("f16") is as_format(jnp.float16) is as_format(np.dtype("float16"))
    assert as_format("float8_e4m3fn") is as_format(jnp.float8_e4m3fn)


# Programs and reports


@pytest.mark.parametrize("few", [150, pytest.param(0, marks=pytest.mark.thorough)])
def test_activations_and_gradients_are_counted_by_hand(rng, few, monkeypatch):
    """Programs run both ways: compiled as a whole, and one operation after the other."""
    monkeypatch.setattr(counting, "_FEW", few)
    x, w = normal(rng, 5, 4), normal(rng, 4, 3)

    def loss_fn(w, x):
        with jax.named_scope("layer"):
            h = jnp.sin(x @ w)
        return jnp.sum(h * np.float32(2**-9))

    found = jmpx.inspect.ranges(loss_fn)(w, x)
    z = x @ w
    cotangent = np.full((5, 3), 2.0**-9, np.float32) * jnp.cos(z)
    layer, outside = ({each.scope: each for each in found.activations}[s] for s in ("layer", ""))
    # The product, its sine, and the cosine that the backward pass reads.
    assert layer.histogram == merged(map(measure, (z, jnp.sin(z), jnp.cos(z))))
    # The loss is a single number, which does not count.
    assert outside.histogram == measure(jnp.sin(z) * np.float32(2**-9))
    (gradients,) = (each.histogram for each in found.gradients if each.scope == "layer")
    both = merged(map(measure, (cotangent, x.T @ cotangent)))
    assert max(gradients.exponents) == max(both.exponents)
    assert found.histogram("gradients").size == sum(a.size for a in (cotangent, cotangent, w))
    assert found.title == "loss_fn and its gradient"


def many_scopes(number, name):
    histogram = Histogram(((bin_of(-149 << 23), 2), (bin_of(-20 << 23), 3)))
    ranges = tuple(Range(f"{name}_{i}", histogram) for i in range(number))
    return Ranges("step", ranges, ranges[: number // 2])


def test_the_table_has_a_line_for_each_scope_of_which_the_worst_are_shown():
    deep = many_scopes(3, "language_model/transformer/layers_with_long_names/attention/projection")
    lines = str(deep).splitlines()
    (head,) = [line for line in lines if line.endswith("scope")]
    assert len(head) <= 80
    assert sum("2**-149 .. 2**-20" in line for line in lines) == 3
    large = Range("large", Histogram(((bin_of(20 << 23), 1),)))
    few = many_scopes(40, "scope")
    text = str(Ranges("step", (*few.activations, large), few.gradients))
    assert "  large\n" in text and "... and 17 more, which to_dict() holds" in text
    assert sum("  scope_" in line for line in text.splitlines()) == 23
