"""Float32 that leaks into 16 bits: each leak is found once, at its line, with a remedy."""

import functools
import math
import os
import sysconfig

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32
from helpers.findings_of import found, line_of, shape
from helpers.zoo import outlined
from jax import lax

import jmpx
import jmpx.flax

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.versions]

WIDTH = 8
POSITIONS = np.linspace(0, 1, WIDTH)
THREE = jnp.array(np.float32(3))
MASK = jnp.tri(WIDTH, dtype=bool)[3]


def mean_square(y):
    return jnp.mean(y.astype(F32) ** 2)


def seen(findings):
    """The lines and names of findings in this file."""
    assert all(os.path.samefile(each.place.file, __file__) for each in findings), findings
    return sorted((each.place.line, each.name) for each in findings)


# Each takes activations in 16 bits and a float32 parameter. Its leak is at the line with a mark, or
# at the line of a lambda.


def float32_parameter(x, w):
    x = jnp.tanh(x)
    return x + w[0]  # <-


def float32_product(x, w):
    wide = x.astype(F32)
    wide = jnp.tanh(wide)
    y = wide @ w  # <-
    return y.astype(x.dtype)


def product_of_arguments(x, w):
    folded = w @ w  # <-
    return x @ folded.astype(x.dtype)


def wide_result(x, w):
    y = jnp.einsum("btd,bsd->bts", x, x, preferred_element_type=F32)  # <-
    return x + y.astype(x.dtype).mean(axis=-1, keepdims=True)


def saved_gelu(x, w):
    wide = jnp.tile(x, 2 * WIDTH).astype(F32)  # <-
    return jax.nn.gelu(wide)[..., :WIDTH].astype(x.dtype)


def down_and_up(x, w):
    y = jax.nn.softmax(x.astype(F32)).astype(x.dtype)
    return jax.nn.softmax(y.astype(F32)).astype(x.dtype)  # <-


def rounded_by_way_of_float32(x, w):
    y = (x @ w.astype(x.dtype)).astype(F32)
    return y.astype(F16).astype(x.dtype)  # <-


def mask_of_floats(x, w):
    bias = jnp.where(MASK, 0.0, -1e9)
    return x + bias  # <-


DIMENSIONS = (((2,), (0,)), ((), ()))
LARGE = np.where(MASK, 0, -1e9).astype(np.float32)
IN_BFLOAT16 = {
    lambda x, w: x * np.sqrt(8): "promotion",
    lambda x, w: x + POSITIONS: "promotion",
    lambda x, w: x * THREE: "promotion",
    lambda x, w: jax.jit(lambda x: x * np.float32(3))(x): "promotion",
    lambda x, w: jnp.where(MASK, x, np.float32(0.5)): "promotion",
    float32_parameter: "promotion",
    float32_product: "float32-product",
    product_of_arguments: "float32-product",
    (mixed := lambda x, w: (x @ w).astype(x.dtype)): "mixed-product",
    (einsum := lambda x, w: jnp.einsum("btd,de->bte", x, w).astype(x.dtype)): "mixed-product",
    lambda x, w: lax.dot_general(x.astype(F32), w, DIMENSIONS).astype(x.dtype): "mixed-product",
    wide_result: "mixed-product",
    saved_gelu: "saved-float32",
    down_and_up: "cast-to-and-fro",
    lambda x, w: x @ w.astype(F16).astype(BF16): "double-rounding",
    rounded_by_way_of_float32: "double-rounding",
}
RANGES = [
    mask_of_floats,
    lambda x, w: jnp.where(MASK, x, -1e9),
    lambda x, w: x + jnp.asarray(LARGE).astype(x.dtype),
    lambda x, w: x + -1e9 * MASK.astype(x.dtype),
    lambda x, w: x / (jnp.abs(x) + 1e-9),
    lambda x, w: x * jnp.sqrt(jnp.mean(x.astype(F32)).astype(x.dtype) + 1e-8),
    lambda x, w: x - 1e9 * MASK,
    lambda x, w: x + (1.0 - MASK.astype(jnp.int32)) * -1e9,
    lambda x, w: x + ((1 - lax.stop_gradient(w[0])) * -1e9).astype(x.dtype),
]
LEAKS = IN_BFLOAT16 | dict.fromkeys(RANGES, "constant-range")
OF_DTYPE = {BF16: [*IN_BFLOAT16], F16: RANGES}


def at_their_lines(leaks):
    return sorted((line_of(leak), LEAKS[leak]) for leak in leaks)


def network(framework, leaks, dtype):
    """The loss of a network with a module for each leak, in a shortcut between two layers.

    Layers have parameters in a dtype, the planted modules in float32.
    """

    def body(m, x):
        for i, leak in enumerate(leaks):
            plant = lambda m, y, leak=leak: leak(y, m.param("w", WIDTH, WIDTH))  # noqa: E731
            y = m.inner(f"plant_{i}", plant)(m.linear(f"before_{i}", WIDTH)(x))
            x = x + m.linear(f"after_{i}", WIDTH)(y).astype(x.dtype)
        return x

    def cast(path, leaf):
        is_planted = "plant" in jax.tree_util.keystr(path)
        return leaf if is_planted else shape(*leaf.shape, dtype=dtype)

    net = outlined(framework, body, jnp.ones((2, 3, WIDTH)))
    model = jax.tree_util.tree_map_with_path(cast, net.model)
    run = lambda model, x, policy=None: mean_square(net.under(policy)(model, x))  # noqa: E731
    return run, model, shape(2, 3, WIDTH, dtype=dtype)


# Some of these plant an overflow in a cast.
overflows = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")


@pytest.mark.sampled(3)
@overflows
@pytest.mark.parametrize(
    "framework, dtype", [("haiku", BF16), ("linen", F16), ("nnx", BF16), ("equinox", F16)]
)
def test_each_leak_is_found_once_at_its_line(framework, dtype):
    findings = found(*network(framework, OF_DTYPE[dtype], dtype))
    assert seen(findings) == at_their_lines(OF_DTYPE[dtype])
    scopes = {each.scope.rpartition("/")[2] for each in findings}
    assert scopes == {f"plant_{i}" for i in range(len(OF_DTYPE[dtype]))}
    assert all(each.rule or each.advice for each in findings)


def in_scan(block, x, *weights):
    return lax.scan(lambda x, w: (block(x, *w), None), x, [w[None] for w in weights])[0]


WAYS = {
    "jit in scan": lambda block, *args: in_scan(jax.jit(block), *args),
    "vmap": lambda block, x, *w: jax.vmap(lambda x: block(x[None], *w)[0])(x),
    "cond": lambda block, x, *w: lax.cond(x.sum() > 0, block, lambda x, *w: x, x, *w),
    "checkpoint": lambda block, *args: jax.checkpoint(block)(*args),
}


@pytest.mark.sampled(2)
@overflows
@pytest.mark.parametrize(
    "way, dtype",
    [("jit in scan", BF16), ("vmap", BF16), ("cond", F16), ("checkpoint", BF16)],
)
def test_lines_under_transformations(way, dtype):
    # Values that are computed anew are not saved.
    leaks = [leak for leak in OF_DTYPE[dtype] if (way, leak) != ("checkpoint", saved_gelu)]

    def loss(linear, w, x):
        for leak in leaks:
            block = lambda x, linear, w: (leak(x @ linear, w) @ linear).astype(x.dtype)  # noqa: B023, E731
            x = x + WAYS[way](block, x, linear, w)
        return mean_square(x)

    w, x = shape(WIDTH, WIDTH), shape(2, 3, WIDTH, dtype=dtype)
    findings = found(loss, shape(WIDTH, WIDTH, dtype=dtype), w, x, names=LEAKS.values())
    assert seen(findings) == at_their_lines(leaks)


# Programs that follow the advice, and programs without a leak.


def cast_result(x, w):
    y = jnp.einsum("btd,bsd->bts", x, x).astype(F32)
    return x + jax.nn.softmax(y).astype(x.dtype).mean(axis=-1, keepdims=True)


MENDED = [
    cast_result,
    lambda x, w: jnp.tanh(x) + w[0].astype(x.dtype),
    lambda x, w: x * math.sqrt(8),
    lambda x, w: x + POSITIONS.astype(x.dtype),
    lambda x, w: x @ w.astype(x.dtype),
    lambda x, w: jax.nn.gelu(jnp.tile(x, 2 * WIDTH))[..., :WIDTH],
    lambda x, w: jnp.where(MASK, x, jnp.finfo(x.dtype).min),
    lambda x, w: jnp.where(MASK, x, -jnp.inf),
    lambda x, w: x / (jnp.abs(x) + 1e-4),
    lambda x, w: x - 6e4 * MASK,
    lambda x, w: x + (w[0] * 1e-9 * 1e9).astype(x.dtype),
    lambda x, w: jnp.clip(jnp.clip(x, -1, 1), 0.01, 0.99),
    lambda x, w: jax.nn.softplus(x) + jax.nn.mish(x),  # which add a 0 to x
    lambda x, w: x * 0 + x / sum([x]),
    lambda x, w: sum([x, x]),
]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_mended_leaks(dtype):
    def loss(linear, w, x):
        for leak in MENDED:
            x = x + (leak(x @ linear, w) @ linear).astype(x.dtype)
        return mean_square(x)

    w, x = shape(WIDTH, WIDTH), shape(2, 3, WIDTH, dtype=dtype)
    assert not found(loss, shape(WIDTH, WIDTH, dtype=dtype), w, x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework, linear", [("haiku", "Linear"), ("linen", "Dense")])
def test_rules_mend_products_in_a_module_that_is_left_in_float32(framework, linear):
    products = [mixed, einsum, product_of_arguments]
    args, policy = network(framework, products, F32), f"{linear}: c=bf16,o=bf16"
    findings = found(*args, policy)
    assert seen(findings) == at_their_lines(products)
    assert not found(*args, "; ".join([policy, *(each.rule for each in findings)]))


def test_rules_mend_dtype_fields():
    class Fields(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(WIDTH, name="first")(x)
            wide = nn.Dense(WIDTH, dtype=F32, name="wide")(x)
            return wide + nn.Dense(WIDTH, name="last")(x)

    net, x = Fields(), shape(8, WIDTH)
    params = jax.eval_shape(net.init, jax.random.key(0), x)

    def wide(policy_map):
        def loss(params, x):
            with jmpx.flax.policies(policy_map):
                return mean_square(jnp.asarray(net.apply(params, x)))

        return found(loss, params, x, names=("float32-product", "mixed-product"))

    (finding,) = wide("c=bf16,o=f32")
    assert finding.rule == "*/wide: c=bf16,o=bf16"
    assert wide(f"c=bf16,o=f32; {finding.rule}") == []


# Leaks through several functions.


def block(x, w):
    return x + rms_norm(x).astype(BF16) @ w


def rms_norm(x):
    wide = x.astype(F32)
    return wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)


def stream(w, x):
    x = x.astype(F32)  # <-
    for _ in range(3):
        x = block(x, w)
    return mean_square(x.astype(BF16) @ w)


def router(x, w):
    return jax.nn.softmax((x @ w).astype(F32))  # <-


def experts(w, x):
    x = x + router(x, w)[..., :1] * block(x, w)
    return mean_square(x @ w)


X, W, BF16_W = shape(2, 3, WIDTH), shape(WIDTH, WIDTH), shape(WIDTH, WIDTH, dtype=BF16)
BF16_X = shape(2, 3, WIDTH, dtype=BF16)
PRODUCT = 2 * 2 * 3 * WIDTH**2  # FLOPs


@pytest.mark.parametrize("loss, wide, products", [(stream, stream, 0), (experts, router, 1)])
def test_float32_that_widens_other_functions(loss, wide, products):
    (finding,) = found(loss, BF16_W, BF16_X)
    assert seen([finding]) == [(line_of(wide), "promotion")]
    assert finding.flops == products * 3 * PRODUCT


def test_flops_are_those_of_both_passes():
    def loss(w, half, x):
        def body(x, _):
            return (x * np.float32(2) @ half).astype(BF16) @ w.astype(BF16), None

        return mean_square(lax.scan(body, x, None, length=5)[0])

    (finding,) = found(loss, W, BF16_W, BF16_X)
    # The gradient is in `w` alone: the gradient of `half` is not computed.
    assert (finding.flops, finding.count) == (5 * 2 * PRODUCT, 5)


def test_a_step_in_float32_may_have_some_16_bits():
    def loss(w, x):
        scores = (x @ w.astype(BF16)).astype(F32)
        return mean_square(jnp.tanh(jnp.tanh(scores @ w) @ w) @ w)

    assert not found(loss, W, BF16_X)


def test_parameters_stored_in_another_16_bit_dtype():
    net = outlined("haiku", lambda m, x: m.linear("linear", WIDTH)(x), jnp.ones((2, 3, WIDTH)))
    params = jax.tree.map(lambda leaf: shape(*leaf.shape, dtype=BF16), net.model)
    run = net.under("p=bf16,c=f16,o=f32")
    (finding,) = found(lambda params, x: mean_square(run(params, x)), params, X)
    assert (finding.name, finding.count) == ("double-rounding", 2)
    assert "params['haiku_net/linear']" in finding.message


def test_convolution():
    def convolved(x, kernel):
        names = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=names)

    def loss(kernel, x):
        for _ in range(2):
            x = convolved(x, kernel.astype(BF16))
        return mean_square(convolved(jnp.tanh(x.astype(F32)), kernel))

    (finding,) = found(loss, shape(3, WIDTH, WIDTH), BF16_X)
    assert finding.name == "float32-product"
    assert finding.message.startswith("A convolution")
    taps = 2 + 3 + 2  # of the kernel, at the three places of the inputs
    assert finding.flops == 3 * 2 * 2 * taps * WIDTH**2


# One cause is one finding, which names the line where float32 was made.


def made_elsewhere(w, x):
    noise = jax.random.normal(jax.random.key(0), x.shape)  # made
    noise = jnp.tanh(noise)
    first = noise @ w  # <-
    second = noise @ w.T
    return mean_square(x @ w + (first + second).astype(BF16))


def added_elsewhere(w, x):
    angles = jnp.sin(jnp.arange(WIDTH, dtype=F32))  # made
    x = jnp.tanh(x)
    return mean_square((x @ w + angles) @ w)  # <-


def wide_island(w, x):
    x = x @ w
    wide = x.astype(F32)  # made
    normal = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    gate = jax.nn.silu(normal @ w)  # <-
    return mean_square(((normal @ w.T) * gate).astype(BF16) @ w @ w)


@pytest.mark.parametrize(
    "loss, name, count",
    [
        (made_elsewhere, "mixed-product", 2),
        (added_elsewhere, "promotion", 1),
        (wide_island, "mixed-product", 2),
    ],
)
def test_a_finding_names_the_line_where_float32_was_made(loss, name, count):
    (finding,) = found(loss, BF16_W, BF16_X)
    assert (finding.name, finding.count) == (name, count)
    assert finding.place.line == line_of(loss)
    assert f"{os.path.basename(__file__)}:{line_of(loss, 'made')} " in finding.message
    assert finding.message.startswith("2 products") == (count == 2)


def test_a_boolean_that_becomes_float32_is_an_array():
    is_trained = jnp.asarray(True)

    def loss(w, x):
        return mean_square((x * jax.jit(lambda: is_trained.astype(F32))()) @ w)  # <-

    (finding,) = found(loss, BF16_W, BF16_X)
    assert (finding.name, finding.place.line) == ("promotion", line_of(loss))
    assert "meets a float32 array and goes on" in finding.message


def tied(m, tokens):
    """A product in a parent that owns nothing."""
    table = m.param("table", 100, WIDTH)
    x = m.linear("last", WIDTH)(m.linear("first", 256)(table[tokens]))
    x = jnp.tanh(jax.random.normal(jax.random.key(0), x.shape)) + x  # <-
    return x @ table.T.astype(x.dtype)


def test_a_tied_head_in_a_parent_is_found_where_its_input_became_float32():
    tokens = jnp.zeros((8, 16), int)
    net = outlined("linen", tied, tokens)
    run = net.under("c=bf16,o=f32")
    (finding,) = found(lambda model, ids: mean_square(run(model, ids)), net.model, tokens)
    assert (finding.name, finding.place.line) == ("promotion", line_of(tied))
    assert ", with 1 product behind it" in finding.message
    assert ".astype" in finding.advice


@pytest.mark.parametrize("rows, severity", [(8, "high"), (64, "medium"), (1024, "low")])
def test_severity_goes_by_shares(rows, severity):
    """Positions that are little work are less severe in a large step."""

    def loss(w, x):
        positions = jnp.arange(16, dtype=F32)[:, None] * jnp.ones((16, 16))
        positions = positions @ positions.T  # <-
        return mean_square(x @ w @ w) + jnp.sum(positions) * jnp.mean(x)

    report = jmpx.inspect.audit(loss)(shape(64, 64, dtype=BF16), shape(rows, 64, dtype=BF16))
    share = 2 * 16**3 / sum(each.flops for each in report.products)
    assert {"high": share > 0.01, "medium": 0.001 < share < 0.01, "low": share < 0.001}[severity]
    (finding,) = (f for f in report.findings if f.name in ("float32-product", "mixed-product"))
    assert finding.place is not None
    assert (finding.severity, finding.place.line) == (severity, line_of(loss))


def test_a_library_names_its_own_line_and_the_callers(tmp_path, monkeypatch):
    file, names = os.path.join(sysconfig.get_path("purelib"), "somebody", "layers.py"), {}
    code = "def scaled(x, number):\n    return x * number\n"
    exec(compile(code, file, "exec"), names)
    monkeypatch.chdir(tmp_path)  # a path from here would be shorter where packages are below

    def loss(w, x):
        return mean_square(names["scaled"](x @ w, np.float32(3)) @ w)  # <-

    report = jmpx.inspect.audit(loss)(BF16_W, BF16_X)
    (finding,) = report.findings
    assert finding.place is not None and finding.place.caller is not None
    assert (finding.place.file, finding.place.line) == (file, 2)
    assert finding.place.caller.line == line_of(loss)
    text = f"somebody{os.sep}layers.py:2 (scaled), called at {finding.place.caller}"
    assert str(finding.place) == text and text in str(report)


# Leaks under autocast.

BODIES = {
    "rounded behind a factor": lambda h: h * 1e-9 * 1e9,
    "mask": lambda h: jax.nn.softmax(jnp.where(jnp.tri(8, WIDTH, dtype=bool), h, -1e9)),
    "added mask": lambda h: jax.nn.softmax(h + jnp.where(jnp.tri(8, WIDTH, dtype=bool), 0, -1e9)),
    "mask times number": lambda h: jax.nn.softmax(h - 1e9 * jnp.tri(8, WIDTH, dtype=bool)),
    "exact gelu": lambda h: jax.nn.gelu(h, approximate=False),
    "norm": lambda h: h * lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6),
    "running sum": lambda h: jnp.cumsum(h, axis=0),
    "scatter": lambda h: h.at[jnp.array([0, 1, 0])].add(h[:3]),
}


@pytest.mark.parametrize("compute", ["bf16", "f16"])
def test_what_autocast_rounds_is_no_finding(compute):
    def loss(w, x):
        return sum(jnp.mean((body(x @ w) @ w) ** 2) for body in BODIES.values())

    assert not found(jmpx.autocast(loss, f"c={compute}"), W, shape(8, WIDTH))


def test_what_the_user_rounds_under_autocast_is_one_finding():
    def loss(w, x):
        return jnp.mean((x @ w).astype(BF16).astype(F32) @ w)  # <-

    (finding,) = found(jmpx.autocast(loss, "c=f16"), W, shape(8, WIDTH))
    assert (finding.name, finding.place.line) == ("double-rounding", line_of(loss))


def test_what_reads_the_float32_state_of_a_recurrence_is_no_leak_but_a_product_in_it_is():
    shapes = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((64, 16), "float32")

    def loss(w, x, is_recurrent):
        low, u = w.astype(BF16), (x.astype(BF16) @ w.astype(BF16))

        def step(state, u):
            fed = state @ low if is_recurrent else 0.9 * state
            state = fed + u.astype(F32)
            return state, state @ low

        return jnp.mean(jax.lax.scan(step, jnp.zeros(16), u)[1] ** 2)

    for is_recurrent in (False, True):
        report = jmpx.inspect.audit(functools.partial(loss, is_recurrent=is_recurrent))(*shapes)
        leaks = [each for each in report.findings if "product" in each.name]
        assert bool(leaks) is is_recurrent
