"""The counts of an audit: FLOPs as by hand, saved bytes, casts and scopes."""

import math

import autocast as readme_table
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, normal, zoo
from helpers.findings_of import shape
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jmpx

pytestmark = pytest.mark.versions
N = 8
W, BF16_W = shape(N, N), shape(N, N, dtype=BF16)
PRODUCT = 2 * N**3


def audited(fn, *args):
    return jmpx.inspect.audit(fn)(*args)


def flops(f, *args):
    """FLOPs of the products of a function, which returns a list so that it is no loss."""
    return sum(row.flops for row in audited(lambda *args: [f(*args)], *args).products)


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

    def trips(x, w):  # an unknown number counts as one
        return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)

    report = audited(trips, W, W)
    assert report.products == float32_products(1) and report.has_while


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def test_products_of_a_gradient_that_is_dropped_do_not_count():
    def layer(x, w):
        return jnp.tanh(product(x, w)), None

    def loss(w, x):
        return lax.scan(layer, x, w)[0].sum()

    args = shape(3, N, N), W
    assert audited(loss, *args).products == float32_products(9)  # each trip but one needs it
    assert audited(lambda w, x: product(x, w).sum(), W, W).products == float32_products(2)
    assert audited(lambda w, x: (x @ w).sum(), W, W).products == float32_products(2)

    def step(w, x):
        return w - jax.grad(lambda w, x: (product(x, w) ** 2).sum(), argnums=(0, 1))(w, x)[0]

    report = audited(step, BF16_W, BF16_W)  # the value of this loss is read by nothing
    assert [row.count for row in report.products] == [2] and not report.findings


def test_shards_count_for_one_device():
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    fn = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    assert audited(fn, W, W).products[0].flops == PRODUCT // 2


def test_operations_whose_products_are_unknown_are_named():
    def fn(x):
        return jnp.linalg.eigh(x)[1] @ jax.pure_callback(np.sin, x, jnp.exp(x)), jnp.cumsum(x)

    report = audited(fn, W)
    assert report.uncounted == ("pure_callback",)
    assert report.products == float32_products(1)


def scaled(w, x):
    formats = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    return jax.nn.scaled_dot_general(x, w, (((1,), (0,)), ((), ())), configs=formats)


def grouped(w, x):
    return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([3, len(x) - 3], jnp.int32))


def iterated(w, x):
    return jax.scipy.sparse.linalg.cg(lambda x: w @ x, x)[0]


@pytest.mark.parametrize(
    "fn, count, names",
    [
        (scaled, 2, ()),
        (grouped, 2, ()),
        (jax.jit(grouped), 2, ()),
        (lambda w, x: lax.platform_dependent(w, x, default=scaled), 2, ()),
        (iterated, 2, ("custom_linear_solve",)),  # for the first residual, and the gradient's
    ],
)
def test_products_of_primitives_of_jax_count_or_are_named(fn, count, names):
    n = 32
    report = audited(lambda w, x: jnp.mean(fn(w, x) ** 2), shape(n, n), shape(n, n))
    assert (sum(row.count for row in report.products), report.uncounted) == (count, names)
    assert sum(row.flops for row in report.products) == count * 2 * n**3


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


def multiplies_as_counted(groups, outputs, *axes):
    """Whether a convolution of ones sums as many products as are counted.

    Each axis has the sizes of input and kernel, a stride, dilations and padding.
    """
    features, batches = groups
    size, kernel, stride, hole, far, padding = zip(*axes, strict=True)
    x = np.ones((2 * batches, *size, 2 * features), np.float32)
    taps = np.ones((*kernel, 2, outputs * features * batches), np.float32)

    def convolve(x, taps, hole=hole, padding=padding):
        return lax.conv_general_dilated(
            *(x, taps, stride, padding, hole, far),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=features,
            batch_group_count=batches,
        )

    # The sum is of an input that is padded, with holes, beforehand: XLA:CPU refuses some negative
    # padding of convolutions.
    ends = [(before, after, gap - 1) for (before, after), gap in zip(padding, hole, strict=True)]
    padded = lax.pad(x, np.float32(0), [(0, 0, 0), *ends, (0, 0, 0)])
    none = [1] * len(axes), [(0, 0)] * len(axes)
    total = convolve(padded, taps, *none).sum()
    return flops(convolve, x, taps) == 2 * float(total)


GROUPS = [(1, 1), (3, 1), (1, 2)]


@pytest.mark.parametrize("groups", GROUPS)
def test_a_convolution_of_ones_sums_as_many_products_as_are_counted(groups):
    assert multiplies_as_counted(
        *(groups, 3, (9, 3, 2, 1, 1, (-1, 1)), (8, 3, 1, 3, 2, (2, 0)))  # last, a hole
    )


small = st.integers(1, 3)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_so_does_any_convolution(data):
    pad = st.tuples(st.integers(-2, 4), st.integers(-2, 4))
    axis = st.tuples(st.integers(9, 12), sizes, small, small, small, pad)
    kernel_fits = axis.filter(lambda a: (a[0] - 1) * a[3] + sum(a[5]) >= (a[1] - 1) * a[4])
    axes = data.draw(kernel_fits), data.draw(kernel_fits)
    assert multiplies_as_counted(data.draw(st.sampled_from(GROUPS)), data.draw(small), *axes)


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
        (([0], [0]), [0], [], (6, 3), (6, 5)),  # the contracted axis is in groups
    ],
)
def test_ragged_products_multiply_no_zeros(contracted, lhs_ragged, rhs_group, lhs, rhs):
    numbers = lax.RaggedDotDimensionNumbers((contracted, ([], [])), lhs_ragged, rhs_group)
    product = lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)  # noqa: E731
    assert flops(product, shape(*lhs), shape(*rhs), shape(4, dtype="int32")) == 2 * 6 * 3 * 5


# Bytes that are saved for the backward pass.


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
    assert expected and audited(jax.jit(step), *args).saved == expected
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


def test_named_scopes_have_rows_and_no_class():
    def fn(w, x):
        with jax.named_scope("encoder"):
            x = x @ w
            with jax.named_scope("attention"):
                low = x.astype(BF16)
                return (jax.nn.softmax((low @ low).astype(F32)) @ w).sum()

    rows = by_path(audited(fn, W, W))
    assert [path for path in rows if path] == ["encoder", "encoder/attention"]
    assert rows["encoder"].flops == 2 * PRODUCT
    assert rows["encoder/attention"].flops == 2 * 3 * PRODUCT
    assert {*rows["encoder/attention"].dtypes.split(", ")} == {"bfloat16", "float32"}
    assert all((row.module, row.policy) == ("", "") for row in rows.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
def test_a_model_has_a_row_for_each_module(framework):
    net = zoo.outlined(framework, zoo.nested, jnp.ones((2, 3)))
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
    # The block calls tanh; its layers have rows of their own. The loss is in no module.
    block = rows.pop(f"{root}block")
    assert (block.module, block.dtypes, block.flops) == (net.words("<Inner>"), "float32", 0)
    assert rows.pop("").policy == ""
    # The outermost module only casts its arguments, and only in frameworks with models as objects.
    assert all((row.module, row.flops) == (net.words("<Net>"), 0) for row in rows.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
def test_a_row_has_the_policy_by_operations(framework):
    net = zoo.outlined(framework, zoo.nested, jnp.ones((2, 3)))
    loss = lambda model, x: jnp.mean(net.apply(model, x) ** 2)  # noqa: E731
    policy = "c=bf16; */block/outer: full; */head: c=f32,m=highest"
    rows = by_path(audited(jmpx.apply_policy(loss, policy), net.model, shape(2, 3)))
    root = net.words("<net/>")
    expected = {
        "first": "compute=bfloat16",
        "block": "compute=bfloat16",  # calls tanh
        "block/inner": "compute=bfloat16",
        "block/outer": "compute=float32",
        "head": "compute=float32,matmul=highest",
    }
    assert {path: rows[root + path].policy for path in expected} == expected
    assert rows[""].policy == "compute=bfloat16"


@pytest.mark.parametrize("save", ["", ",save=products"])
def test_scopes_have_the_policy_by_operations(save):
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    def loss(w, x):
        with jax.named_scope("half"):
            x = jmpx.autocast(jnp.matmul, "c=f16")(x, w)
        x, _ = lax.scan(lambda x, _: layer(x, w), x, None, 3)
        with jmpx.full_precision(), jax.named_scope("marked"):
            return jnp.mean(x @ w)

    def step(w, x):
        grads = jmpx.grad(loss, jmpx.NoOpLossScale(), policy=f"c=bf16{save}")(w, x).grads
        with jax.named_scope("update"):
            return w - grads

    # Scopes of pieces repeat the name of the model.
    rows = {path.split("/")[-1]: row.policy for path, row in by_path(audited(step, W, W)).items()}
    policies = {"half": "float16", "layer": "bfloat16", "marked": "float32", "": "bfloat16"}
    expected = {name: f"compute={dtype}" for name, dtype in policies.items()}
    assert rows == {**expected, "update": ""}


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
