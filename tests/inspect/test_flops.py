"""FLOPs of products: equal to counts by hand, and to what XLA counts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.flops import flops, shape_of, xla_flops
from hypothesis import assume, given, settings, strategies as st
from jax import lax

sizes = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_matrix_product_multiplies_each_combination_of_indices_once(data):
    letters = dict(zip("abcdef", data.draw(st.lists(sizes, min_size=6, max_size=6)), strict=True))
    # a and b are in both operands and the result, c and d are contracted, e and f are free.
    lhs, rhs = data.draw(st.permutations("abcde")), data.draw(st.permutations("abcdf"))
    spec = f"{''.join(lhs)},{''.join(rhs)}->abef"
    operands = (shape_of(*(letters[name] for name in names)) for names in (lhs, rhs))
    total = flops(lambda x, y: jnp.einsum(spec, x, y), *operands)
    assert total == 2 * math.prod(letters.values())


@st.composite
def convolutions(draw):
    """Operands and parameters of a convolution of two axes, with groups of either kind."""
    feature_groups, batch_groups = draw(
        st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (1, 3)])
    )
    batch = batch_groups * draw(st.integers(1, 3))
    inputs, outputs = draw(st.integers(1, 3)), feature_groups * batch_groups * draw(sizes)
    axis = st.tuples(*[st.integers(1, 9), st.integers(1, 5), *[st.integers(1, 3)] * 3])
    pad = st.tuples(st.integers(-2, 4), st.integers(-2, 4))
    size, kernel, stride, hole, far = zip(*(draw(axis) for _ in range(2)), strict=True)
    padding = [draw(pad), draw(pad)]
    for n, k, h, f, p in zip(size, kernel, hole, far, padding, strict=True):
        assume((n - 1) * h + 1 + sum(p) >= (k - 1) * f + 1 and (n - 1) * h + 1 + min(p) >= 1)
    return (
        shape_of(batch, *size, feature_groups * inputs),
        shape_of(*kernel, inputs, outputs),
        dict(
            window_strides=stride,
            padding=padding,
            lhs_dilation=hole,
            rhs_dilation=far,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=feature_groups,
            batch_group_count=batch_groups,
        ),
    )


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_a_convolution_counts_the_taps_that_xla_counts(case):
    x, kernel, params = case
    convolve = lambda x, k: lax.conv_general_dilated(x, k, **params)  # noqa: E731
    assert flops(convolve, x, kernel) == xla_flops(convolve, x, kernel)


def test_a_convolution_of_ones_sums_as_many_products_as_are_counted():
    x, kernel = np.ones((2, 3, 9, 8), np.float32), np.ones((6, 3, 3, 4), np.float32)

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (2, 1), "SAME", rhs_dilation=(1, 2))

    assert flops(convolve, x, kernel) == 2 * float(convolve(x, kernel).sum())


def test_a_convolution_without_axes_and_an_empty_one():
    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (), ())

    assert flops(convolve, shape_of(3, 4), shape_of(5, 4)) == 2 * 3 * 4 * 5
    assert flops(convolve, shape_of(0, 4), shape_of(5, 4)) == 0

    def of_padding(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1,), [(3, 3)])

    assert flops(of_padding, shape_of(1, 1, 0), shape_of(1, 1, 2)) == 0


def test_axes_as_long_as_sound_take_no_time():
    """The gradient of the kernel of a long convolution has a kernel as long as the input."""

    def loss(kernel, x):
        return lax.conv_general_dilated(x, kernel, (1,), "SAME").sum()

    n, k = 500_000, 16
    pairs = sum(n - max(0, 7 - tap) - max(0, tap - 7) for tap in range(k))
    assert flops(jax.grad(loss), shape_of(1, 1, k), shape_of(1, 1, n)) == 2 * 2 * pairs


@pytest.mark.parametrize(
    "contracted, lhs_ragged, rhs_group, lhs, rhs",
    [
        (([1], [1]), [0], [0], (6, 3), (4, 3, 5)),  # rows are in groups
        (([0], [0]), [0], [], (6, 3), (6, 5)),  # what is contracted is in groups
    ],
)
def test_ragged_products_multiply_no_zeros(contracted, lhs_ragged, rhs_group, lhs, rhs):
    numbers = lax.RaggedDotDimensionNumbers((contracted, ([], [])), lhs_ragged, rhs_group)

    def product(x, y, sizes):
        return lax.ragged_dot_general(x, y, sizes, numbers)

    groups = shape_of(4, dtype=jnp.int32)
    assert flops(product, shape_of(*lhs), shape_of(*rhs), groups) == 2 * 6 * 3 * 5
