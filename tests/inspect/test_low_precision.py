"""Exponentials, long sums and collectives in 16 bits are found, each once, on the right line."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32
from helpers.findings_of import found, line_of
from helpers.planted_layer import FRAMEWORKS, planted
from jax import lax

import jmpx
import jmpx.flax
import jmpx.haiku

NAMES = ("low-exp", "low-sum", "low-collective")
MANY = 300  # more terms than bfloat16 counts


def gate(x):
    return x * jnp.exp(x)  # exp


def logarithm(x):
    return jnp.log(1 + jnp.abs(x))  # log


def norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-2)  # rsqrt


def power(x):
    return jnp.abs(x) ** 2.5  # pow


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))  # softmax
    return e / jnp.sum(e, -1, keepdims=True)


def pool(x):
    return x + jnp.sum(x, 0, keepdims=True, dtype=x.dtype)  # sum


def running(x):
    return jnp.cumsum(x, 0)  # cumsum


def scattered(x):
    rows = jnp.zeros(len(x), jnp.int32)
    return x + jnp.zeros_like(x[:1]).at[rows].add(x)  # scatter


# layer -> (name, severity in bfloat16, the comment at the end of its line)
PLANTS = {
    gate: ("low-exp", "medium", "exp"),
    logarithm: ("low-exp", "medium", "log"),
    norm: ("low-exp", "medium", "rsqrt"),
    power: ("low-exp", "medium", "pow"),
    softmax: ("low-exp", "low", "softmax"),
    pool: ("low-sum", "medium", "sum"),
    running: ("low-sum", "medium", "cumsum"),
    scattered: ("low-sum", "high", "scatter"),
}


def all_plants(x):
    return sum(plant(x) for plant in PLANTS)


EXPECTED = {(*PLANTS[layer], layer.__name__) for layer in PLANTS}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_planted_hazard_is_found_once_and_its_rule_mends_it(framework):
    loss, args = planted(framework, all_plants, "c=bf16,o=f32", rows=MANY)
    findings = found(NAMES, loss, *args)
    assert len(findings) == len(EXPECTED)
    marks = {line_of(__file__, mark): mark for _, _, mark in PLANTS.values()}
    places = [each.place for each in findings]
    assert all(place.file.endswith("test_low_precision.py") for place in places)
    assert EXPECTED == {
        (each.name, each.severity, marks[place.line], place.function)
        for each, place in zip(findings, places, strict=True)
    }
    assert all(each.scope.endswith("plant") for each in findings)
    (rule,) = {each.rule for each in findings}
    assert rule == "*/plant: full"
    loss, args = planted(framework, all_plants, f"c=bf16,o=f32; {rule}", rows=MANY)
    assert not found(NAMES, loss, *args)
    loss, args = planted(framework, all_plants, "c=f32", rows=MANY)
    assert not found(NAMES, loss, *args)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_power_says_what_the_dtype_loses(dtype):
    def loss_fn(x):
        return (x**3.3).astype(F32).mean()

    (finding,) = found(("low-exp",), loss_fn, jax.ShapeDtypeStruct((4, 3), dtype))
    assert ("overflows beyond 65504" in finding.message) == (dtype == F16)
    assert ("loses digits" in finding.message) == (dtype == BF16)


def transformed(transform, x):
    """A loss whose `gate` runs inside a transformation of JAX."""
    inside = {
        "jit": jax.jit(gate),
        "vmap": jax.vmap(gate),
        "checkpoint": jax.checkpoint(gate),
        "scan": lambda x: lax.scan(lambda c, _: (gate(c), None), x, None, 3)[0],
        "map": lambda x: lax.map(gate, x),
        "cond": lambda x: lax.cond(x[0, 0] > 0, gate, jnp.negative, x),
        "while": lambda x: lax.while_loop(lambda c: c[0, 0] < 2, gate, x),
        "linearize": lambda x: jax.jvp(gate, (x,), (x,))[1],
    }[transform]
    return lambda x: jnp.sum(inside(x).astype(F32))


@pytest.mark.parametrize("transform", "jit vmap checkpoint scan map cond linearize".split())
def test_it_is_found_once_under_transformations(transform):
    x = jax.ShapeDtypeStruct((4, 3), BF16)
    (finding,) = found(NAMES, transformed(transform, x), x)
    assert finding.place.line == line_of(__file__, "exp")


def test_it_is_found_in_a_while_loop():
    x = jax.ShapeDtypeStruct((4, 3), BF16)
    (finding,) = found(
        NAMES, lambda x: transformed("while", x)(lax.stop_gradient(x)) * x[0, 0].astype(F32), x
    )
    assert finding.place.line == line_of(__file__, "exp")


def activations(x):
    names = "gelu silu tanh sigmoid softplus elu selu celu log_sigmoid mish relu6 squareplus"
    return sum(getattr(jax.nn, name)(x) for name in names.split())


def float32_softmax(x):
    return jax.nn.softmax(x.astype(F32)).astype(x.dtype)


def float32_sums(x):
    total = jnp.sum(x, 0) + jnp.mean(x, 0)  # JAX sums in float32
    return x + total + jnp.cumsum(x.astype(F32), 0).astype(x.dtype)


def short_sum(x):
    return x + jnp.sum(x[:256], 0, dtype=x.dtype)


def picked(x):
    return x * x[jnp.arange(len(x)), jnp.zeros(len(x), jnp.int32)][:, None]


def taken(x):
    labels = jnp.zeros((len(x), 1), jnp.int32)
    return x * jnp.take_along_axis(x, labels, 1)


def drawn(x):
    return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(x.dtype)


def ordered(x):
    return jnp.sort(x, 0) + x[jnp.argsort(x[:, 0])]


def complex_phase(x):
    return x * jnp.exp(1j * x.astype(jnp.complex64)).real.astype(x.dtype)


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)  # its derivative is an exponential


CLEAN = (
    exact_gelu,
    ordered,
    complex_phase,
    activations,
    float32_softmax,
    float32_sums,
    short_sum,
    picked,
    taken,
    drawn,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("layer", CLEAN)
def test_what_is_no_hazard_is_not_found(layer, dtype):
    x = jax.ShapeDtypeStruct((MANY, 4), dtype)
    assert not found(NAMES, lambda x: jnp.mean(layer(x).astype(F32)), x)


def test_autocast_leaves_none():
    @jmpx.autocast
    def loss(w, x):
        return jnp.mean(sum(layer(x @ w) for layer in (gate, logarithm, norm, power, softmax)) @ w)

    w = jax.ShapeDtypeStruct((4, 4), F32)
    assert not found(NAMES, loss, w, w)


def test_what_autocast_runs_in_16_bits_is_found():
    def loss(w, x):
        return jnp.mean(gate(x @ w))

    w, policy = jax.ShapeDtypeStruct((4, 4), F32), "c=bf16; op.exp: bf16"
    (finding,) = found(NAMES, jmpx.autocast(loss, policy), w, w)
    assert finding.rule == "op.exp: f32"
    assert not found(NAMES, jmpx.autocast(loss, f"{policy}; {finding.rule}"), w, w)


def softmax_by_reciprocal(x):
    return jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))  # stable


def distances(x):
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - x[None]) ** 2, -1)) @ x  # stable 2


def online(x):
    def body(carry, row):
        largest, total = carry
        new = jnp.maximum(largest, jnp.max(row))
        return (new, total * jnp.exp(largest - new) + jnp.exp(row - new)), None  # stable 3

    start = jnp.full((), -jnp.inf, x.dtype), jnp.zeros_like(x[0])
    return lax.scan(body, start, x)[0][1]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "layer, mark",
    [(softmax_by_reciprocal, "stable"), (distances, "stable 2"), (online, "stable 3")],
)
def test_an_exponential_of_numbers_up_to_0_is_less_severe(layer, mark, dtype):
    x = jax.ShapeDtypeStruct((8, 4), dtype)
    (finding,) = found(NAMES, lambda x: jnp.mean(layer(x).astype(F32)), x)
    assert (finding.severity, finding.place.line) == ("low", line_of(__file__, mark))


@pytest.mark.parametrize("dtype, severity", [(BF16, "medium"), (F16, "high")])
def test_a_name_of_jax_does_not_hide_a_function_that_may_overflow(dtype, severity):
    @jax.jit
    def softplus(x):
        return jnp.log(1 + jnp.exp(x))  # naive softplus

    x = jax.ShapeDtypeStruct((4,), dtype)
    (finding,) = found(NAMES, lambda x: jnp.mean(softplus(x).astype(F32)), x)
    assert (finding.severity, finding.place.line) == (severity, line_of(__file__, "naive softplus"))


# What the messages say is measured.


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_error_of_exp_is_as_the_message_says(dtype, rng):
    x = jax.ShapeDtypeStruct((3,), dtype)
    (finding,) = found(NAMES, lambda x: jnp.sum(gate(x).astype(F32)), x)
    stated = float(finding.message.partition("up to ")[2].partition("%")[0]) / 100
    numbers = rng.uniform(8, 9, size=1000)
    exact = np.exp(numbers)
    low = np.exp(np.asarray(jnp.asarray(numbers, F32).astype(dtype), np.float64))
    assert stated / 2 < (np.abs(low - exact) / exact).max() < stated * 1.05


def test_exp_in_float16_overflows_where_the_message_says():
    x = jax.ShapeDtypeStruct((3,), F16)
    (finding,) = found(NAMES, lambda x: jnp.sum(gate(x).astype(F32)), x)
    limit = float(finding.message.partition("beyond ")[2].partition(",")[0])
    assert finding.severity == "high"
    assert jnp.isfinite(jnp.exp(F16.type(limit - 0.01)))
    assert jnp.isinf(jnp.exp(F16.type(limit + 0.01)))


@pytest.mark.parametrize("dtype, limit", [(BF16, 256), (F16, 2048)])
def test_a_sum_is_long_where_a_dtype_stops_counting(dtype, limit):
    def loss(x):
        return jnp.sum(x, dtype=x.dtype).astype(F32)

    one = jnp.ones((), dtype)
    assert one * limit + one == one * limit and one * (limit - 1) + one == one * limit
    assert not found(NAMES, loss, jax.ShapeDtypeStruct((limit,), dtype))
    (finding,) = found(NAMES, loss, jax.ShapeDtypeStruct((limit + 1,), dtype))
    assert f"{limit + 1:,} terms" in finding.message


@pytest.mark.parametrize("dtype, limit", [(BF16, 256), (F16, 2048)])
def test_a_scatter_stands_still_where_the_message_says(dtype, limit):
    def total(terms):
        return jnp.zeros(1, dtype).at[jnp.zeros(len(terms), jnp.int32)].add(terms)[0]

    (finding,) = found(NAMES, total, jax.ShapeDtypeStruct((limit + 9,), dtype))
    assert finding.severity == "high" and f"only to {limit}: " in finding.message
    assert total(jnp.ones(limit + 9, dtype)) == limit


def attention(x):
    scores = x @ x.T
    return jax.nn.softmax(scores) @ x


def test_a_module_with_products_gets_advice():
    loss, args = planted("haiku", attention, "c=bf16,o=f32")
    (finding,) = found(NAMES, loss, *args)
    assert finding.rule == "no rule fixes it and keeps all 16-bit matmuls: x.astype(jnp.float32) before exp"


def test_the_gradient_of_an_embedding_is_a_long_sum():
    """Each token adds to one row of the table, one after the other."""

    def loss(table, tokens):
        return jnp.mean(table.astype(BF16)[tokens].astype(F32) ** 2)  # lookup

    table = jax.ShapeDtypeStruct((5, 4), F32)
    tokens = jax.ShapeDtypeStruct((MANY,), jnp.int32)
    (finding,) = found(NAMES, loss, table, tokens)
    assert (finding.name, finding.severity) == ("low-sum", "medium")  # tokens may differ
    assert finding.place.line == line_of(__file__, "lookup")
    few = jax.ShapeDtypeStruct((100,), jnp.int32)
    assert not found(NAMES, loss, table, few)


# Layers of the frameworks.


def haiku_norm(policy):
    net = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, True))  # haiku norm

    def loss(params, state, x):
        with jmpx.haiku.policies(policy):
            out, state = net.apply(params, state, None, x)
        return jnp.mean(out), state

    x = jax.ShapeDtypeStruct((8, 4), F32)
    return loss, (*jax.eval_shape(net.init, jax.random.key(0), x), x)


@pytest.mark.usefixtures("standard_promotion")
def test_the_batch_norm_of_haiku_in_16_bits_is_found_and_mended():
    loss, args = haiku_norm("c=bf16,o=f32")
    (finding,) = found(NAMES, loss, *args)
    assert finding.place.line == line_of(__file__, "haiku norm")
    assert finding.rule == "x.astype(jnp.float32) before rsqrt"  # the norm is the outermost module
    loss, args = haiku_norm("c=bf16,o=f32; BatchNorm: full")
    assert not found(NAMES, loss, *args)


def embedding(policy):
    net = nn.Embed(5, 4)

    def loss(params, tokens):
        with jmpx.flax.policies(policy):
            return jnp.mean(jnp.square(jnp.asarray(net.apply(params, tokens))))  # embed

    tokens = jax.ShapeDtypeStruct((MANY,), jnp.int32)
    return loss, (jax.eval_shape(net.init, jax.random.key(0), tokens), tokens)


def test_the_embedding_of_linen_in_16_bits_is_found_and_mended():
    loss, args = embedding("c=bf16,o=f32")
    (finding,) = found(NAMES, loss, *args)
    assert (finding.name, finding.place.line) == ("low-sum", line_of(__file__, "embed"))
    assert finding.rule == "Embed: full"
    loss, args = embedding(f"c=bf16,o=f32; {finding.rule}")
    assert not found(NAMES, loss, *args)
