"""What a report counts: FLOPs as by hand and as XLA's, what is saved, casts and scopes."""

import math

import autocast as readme_table
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, normal, zoo
from helpers.findings_of import shape
from helpers.planted_layer import outlined
from hypothesis import assume, given, settings, strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from models import Transformer

import jmpx

pytestmark = pytest.mark.versions
N = 8
W, BF16_W = shape(N, N), shape(N, N, dtype=BF16)
PRODUCT = 2 * N**3


def audited(fn, *args):
    return jmpx.inspect.audit(fn)(*args)


def flops(f, *args):
    """FLOPs of the products of a function, which is looked at as it is: a list is no loss."""
    return sum(row.flops for row in audited(lambda *args: [f(*args)], *args).products)


def xla_flops(f, *args):
    """What XLA counts in the program as it was lowered, before it optimizes it."""
    costs = jax.jit(f).lower(*args).cost_analysis()
    return costs.get("flops", 0)  # pyright: ignore[reportOptionalMemberAccess]


def float32_products(count):
    return (("float32 x float32", count * PRODUCT, count),)


# FLOPs.


def test_products_by_dtypes_most_flops_first():
    def fn(a, b):
        mixed = lax.dot(a, b), lax.dot(b, a)
        return *mixed, lax.dot(a, a), lax.dot(b[:4], b)

    assert audited(fn, W, BF16_W).products == (
        ("bfloat16 x float32", 2 * PRODUCT, 2),
        ("float32 x float32", PRODUCT, 1),
        ("bfloat16 x bfloat16", PRODUCT // 2, 1),
    )


def test_loops_and_branches_run_as_often_as_their_lengths_say():
    def row(x, w):
        return x @ w, None

    def table(x, w):
        return lax.scan(row, x, w)[0], x.sum(axis=1)

    report = audited(lambda x, w: lax.scan(table, x, w), W, shape(3, 5, N, N))
    assert report.products == float32_products(15) and not report.has_while

    def branches(x):  # each counts
        return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: (x @ x) @ x, x)

    assert audited(branches, W).products == float32_products(3)

    def trips(x, w):  # an unknown number counts for one
        return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)

    report = audited(trips, W, W)
    assert report.products == float32_products(1) and report.has_while


def test_shards_count_for_one_device():
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    fn = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    assert audited(fn, W, W).products[0].flops == PRODUCT // 2


def arguments(model, rng, *size):
    """The shapes of a model's parameters and of a batch."""
    return jax.eval_shape(lambda: (model.init(rng), *model.batch(rng, *size)))


def test_a_scanned_model_multiplies_as_often_as_one_that_is_written_out(rng):
    reports = []
    for scanned in (False, True):
        model = Transformer(layers=3, width=16, hidden=32, heads=2, scanned=scanned)
        reports.append(audited(model.loss, *arguments(model, rng, 2, 8)))
    assert reports[0].products == reports[1].products
    assert reports[0].uncounted == reports[1].uncounted == ()


def test_operations_whose_products_are_unknown_are_named():
    def fn(x):
        return jnp.linalg.eigh(x)[1] @ jax.pure_callback(np.sin, x, jnp.exp(x)), jnp.cumsum(x)

    report = audited(fn, W)
    assert report.uncounted == ("pure_callback",)
    assert report.products == float32_products(1)


sizes = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_matrix_product_multiplies_each_combination_of_indices_once(data):
    letters = dict(zip("abcdef", data.draw(st.lists(sizes, min_size=6, max_size=6)), strict=True))
    # a and b are in both operands and the result, c and d are contracted, e and f are free.
    lhs, rhs = data.draw(st.permutations("abcde")), data.draw(st.permutations("abcdf"))
    spec = f"{''.join(lhs)},{''.join(rhs)}->abef"
    operands = (shape(*(letters[name] for name in names)) for names in (lhs, rhs))
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
    params = {
        "window_strides": stride,
        "padding": padding,
        "lhs_dilation": hole,
        "rhs_dilation": far,
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "feature_group_count": feature_groups,
        "batch_group_count": batch_groups,
    }
    return shape(batch, *size, feature_groups * inputs), shape(*kernel, inputs, outputs), params


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

    assert flops(convolve, shape(3, 4), shape(5, 4)) == 2 * 3 * 4 * 5
    assert flops(convolve, shape(0, 4), shape(5, 4)) == 0
    of_padding = lambda x, kernel: lax.conv_general_dilated(x, kernel, (1,), [(3, 3)])  # noqa: E731
    assert flops(of_padding, shape(1, 1, 0), shape(1, 1, 2)) == 0


def test_axes_as_long_as_sound_take_no_time():
    """The gradient of the kernel of a long convolution has a kernel as long as the input."""

    def loss(kernel, x):
        return lax.conv_general_dilated(x, kernel, (1,), "SAME").sum()

    n, k = 500_000, 16
    pairs = sum(n - max(0, 7 - tap) - max(0, tap - 7) for tap in range(k))
    assert flops(jax.grad(loss), shape(1, 1, k), shape(1, 1, n)) == 2 * 2 * pairs


@pytest.mark.parametrize(
    "contracted, lhs_ragged, rhs_group, lhs, rhs",
    [
        (([1], [1]), [0], [0], (6, 3), (4, 3, 5)),  # rows are in groups
        (([0], [0]), [0], [], (6, 3), (6, 5)),  # what is contracted is in groups
    ],
)
def test_ragged_products_multiply_no_zeros(contracted, lhs_ragged, rhs_group, lhs, rhs):
    numbers = lax.RaggedDotDimensionNumbers((contracted, ([], [])), lhs_ragged, rhs_group)
    product = lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)  # noqa: E731
    assert flops(product, shape(*lhs), shape(*rhs), shape(4, dtype="int32")) == 2 * 6 * 3 * 5


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, h)
        h = nn.gelu(nn.Dense(512)(nn.LayerNorm()(x)))
        return x + nn.Dense(128)(h)


def test_products_of_a_transformer_equal_a_count_by_hand_and_are_most_of_what_xla_counts():
    batch, length, width, hidden = 2, 32, 128, 512
    block, x = Block(), shape(batch, length, width)
    params = jax.eval_shape(block.init, jax.random.key(0), x)
    grad = jax.grad(lambda params, x: jnp.mean(jnp.square(jnp.asarray(block.apply(params, x)))))
    # Four projections, two layers of an MLP, scores and their use.
    each = 4 * width**2 + 2 * width * hidden + 2 * length * width
    products = 3 * 2 * batch * length * each
    assert flops(grad, params, x) == products
    assert 0.8 < products / xla_flops(grad, params, x) < 1


# What is saved for the backward pass.


@jax.custom_vjp
def doubled_sine(x):
    return 2 * jnp.sin(x)


doubled_sine.defvjp(
    lambda x: (doubled_sine(x), (jnp.cos(x), x)), lambda saved, g: (2 * saved[0] * g,)
)


def layers(body):
    """A loss whose layers are a scan, over eight weights."""
    return lambda w, x: lax.scan(lambda x, w: (body(x, w), None), x, w)[0].sum()


def tanh_layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w)


DOTS = jax.checkpoint_policies.dots_saveable
LOSSES = {
    "casts": lambda w, x: jnp.sin(x.astype(jnp.bfloat16) @ w[0].astype(jnp.bfloat16)).sum(),
    "plain": lambda w, x: jnp.exp(jnp.sin(x @ w[0])).sum(),
    "jit": lambda w, x: jax.jit(lambda w: jnp.where(w > 0, jnp.exp(w), 0.0))(w).sum(),
    "vmap": lambda w, x: jax.vmap(jax.nn.softmax)(x @ w[0])[0, 0],
    "custom_vjp": lambda w, x: doubled_sine(jnp.exp(w)).sum(),
    "scan": layers(tanh_layer),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: jnp.sin(jnp.sin(w)), jnp.exp, w).sum(),
    "fori": lambda w, x: lax.fori_loop(0, 5, lambda i, x: jnp.sin(x @ w[0]), x).sum(),
    "checkpoint_of_dots": lambda w, x: jax.checkpoint(tanh_layer, policy=DOTS)(x, w[0]).sum(),
    "checkpoint": lambda w, x: jax.checkpoint(tanh_layer)(jnp.sin(x), w[0]).sum(),
    "scan_in_checkpoint": lambda w, x: jax.checkpoint(layers(tanh_layer))(jnp.sin(w), x),
    "checkpoint_in_scan": layers(jax.checkpoint(tanh_layer)),
    "autocast_checkpoint": jmpx.autocast(layers(jax.checkpoint(tanh_layer, policy=DOTS))),
    "autocast": jmpx.autocast(layers(tanh_layer)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOSSES)
def test_saved_bytes_are_those_that_jax_gives_to_the_backward_pass(name, rng):
    w, x = normal(rng, N, N, N), normal(rng, N, N)
    residuals = readme_table.residual_bytes(lambda w: LOSSES[name](w, x), w)
    saved = [*audited(LOSSES[name], w, x).saved.values()]
    assert sum(saved) == residuals and saved == sorted(saved, reverse=True)


def test_saved_bytes_of_each_dtype():
    def loss(w, x):
        h = jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32)  # x is no parameter
        return jnp.sum(jnp.square((h @ w).astype(jnp.float16)).astype(jnp.float32) * x)

    # The product keeps h, the square twice its operand; the sum keeps nothing, x is an argument.
    assert audited(loss, W, W).saved == {"float32": 4 * N * N, "float16": 2 * N * N}
    assert audited(lambda x: jnp.exp(jnp.sin(x)), W).saved == {}  # without a backward pass


def test_a_step_keeps_the_same_as_its_loss():
    loss = LOSSES["scan"]

    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grads, value

    def accumulate(w, xs):
        def microbatch(total, x):
            return total + jax.grad(loss)(w, x), None

        return lax.scan(microbatch, jnp.zeros_like(w), xs)[0]

    args = shape(N, N, N), W
    expected = audited(loss, *args).saved
    assert expected and all(audited(fn, *args).saved == expected for fn in (step, jax.jit(step)))
    assert audited(accumulate, shape(N, N, N), shape(3, N, N)).saved == expected


# Casts and scopes.


def test_casts_by_count_and_bytes():
    def layer(x, _):
        return x.astype(jnp.bfloat16).astype(jnp.float32), None

    def fn(x, i):
        kept = i.astype(jnp.float32), (x > 0).astype(jnp.float32), x.astype(jnp.float32)
        return lax.scan(layer, x, None, length=5)[0], x[:1].astype(jnp.float16), *kept

    assert audited(fn, W, shape(N, dtype="int32")).casts == (
        ("bfloat16", "float32", 5, 5 * 4 * N * N),
        ("float32", "bfloat16", 5, 5 * 2 * N * N),
        ("float32", "float16", 1, 2 * N),
    )


def by_path(report):
    rows = {row.path: row for row in report.scopes}
    assert len(rows) == len(report.scopes)
    return rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
def test_a_model_has_a_row_for_each_module(framework):
    net = outlined(framework, zoo.nested, jnp.ones((2, 3)))
    run = net.under("c=f32; */inner: c=bf16; */head: c=f16,o=f32")
    rows = by_path(audited(lambda model, x: jnp.mean(run(model, x) ** 2), net.model, shape(2, 3)))
    root = net.words("<net/>")
    for path, dtype, passes, widths in (
        ("first", "float32", 2, 3 * 4),
        ("block/inner", "bfloat16", 3, 4 * 5),
        ("block/outer", "float32", 3, 5 * 6),
        ("head", "float16", 3, 6 * 7),
    ):
        row = rows.pop(root + path)
        assert row.module == net.words("<Linear>") and f"compute={dtype}" in row.policy
        assert (row.dtypes, row.flops) == (dtype, passes * 2 * 2 * widths)
    # The block calls tanh, and its layers are not in its row. The loss is in no module.
    block = rows.pop(f"{root}block")
    assert (block.module, block.dtypes, block.flops) == (net.words("<Inner>"), "float32", 0)
    assert rows.pop("").policy == ""
    # The outermost module casts its arguments at most, in frameworks whose models are objects.
    assert all((row.module, row.flops) == (net.words("<Net>"), 0) for row in rows.values())


def test_named_scopes_have_rows_and_no_class():
    def fn(w, x):
        with jax.named_scope("encoder"):
            x = x @ w
            with jax.named_scope("attention"):
                low = x.astype(BF16)
                mixed = (jax.nn.softmax((low @ low).astype(F32)) @ w).sum()
        with jax.named_scope("lookup"):
            return mixed + jnp.concatenate([x, x])[::-1].sum()

    rows = by_path(audited(fn, W, W))
    assert [path for path in rows if path] == ["encoder", "encoder/attention", "lookup"]
    assert rows["encoder"].flops == 2 * PRODUCT
    assert rows["encoder/attention"].flops == 2 * 3 * PRODUCT
    assert {*rows["encoder/attention"].dtypes.split(", ")} == {"bfloat16", "float32"}
    assert all((row.module, row.policy) == ("", "") for row in rows.values())


def test_operations_of_a_scope_count_each_trip_and_moves_by_what_they_make():
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    report = audited(lambda x, w: lax.scan(layer, x, w)[0], W, shape(5, N, N))
    assert report.scopes == (("layer", "", "", 10, "float32", 5 * PRODUCT),)

    def moved(table, i):
        with jax.named_scope("table"):
            return table.astype(BF16).T, i.T, table[0]

    assert audited(moved, W, shape(N, N, dtype="int32")).scopes[0].dtypes == "bfloat16, float32"
