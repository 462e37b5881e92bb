"""Operations that need more than 16 bits: exponentials, long sums, sums of loops and devices.

Each is found once, on its line, with a rule that mends it; what is alike and no hazard is not.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F16, F32
from helpers.findings_of import found, line_of, shape
from helpers.jaxprs import equations_of
from helpers.planted_layer import FRAMEWORKS, planted
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jmpx
import jmpx.flax

pytestmark = pytest.mark.versions
NAMES = ("low-exp", "low-sum", "low-carry", "low-collective")
MANY = 300  # more terms than bfloat16 counts


def hazards(fn, *args):
    return found(fn, *args, names=NAMES)


def hazards_of(layer, *sizes, dtype=BF16):
    """The hazards in the mean of the results of a layer."""
    loss = lambda x: jnp.mean(jnp.asarray(layer(x)).astype(F32))  # noqa: E731
    return hazards(loss, shape(*sizes, dtype=dtype))


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


# Layers with a hazard, at the line with a mark.


def gate(x):
    return x * jnp.exp(x)  # <-


def logarithm(x):
    return jnp.log(1 + jnp.abs(x))  # <-


def norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-2)  # <-


def turned(x):
    return jnp.cos(x)  # <-


def power(x):
    return jnp.abs(x) ** 2.5  # <-


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))  # <-
    return e / jnp.sum(e, -1, keepdims=True)


def pool(x):
    return x + jnp.sum(x, 0, keepdims=True, dtype=x.dtype)  # <-


def running(x):
    return jnp.cumsum(x, 0)  # <-


def scattered(x):
    rows = jnp.zeros(len(x), jnp.int32)
    return x + jnp.zeros_like(x[:1]).at[rows].add(x)  # <-


def by_scan(x):
    def body(total, row):
        return total + row, None  # <-

    return x + lax.scan(body, jnp.zeros_like(x[0]), x)[0]


def by_fori(x):
    return x + lax.fori_loop(0, MANY, lambda i, total: total + x[i], x[0])  # <-


def by_select(x):
    def body(total, row):
        summed = (total.astype(F32) + row.astype(F32)).astype(x.dtype)  # <-
        return jnp.where(row > 0, summed, total), None

    return x + lax.scan(body, jnp.zeros_like(x[0]), x)[0]


def nested(x):
    def body(total, row):
        return lax.scan(lambda total, n: (total - n, None), total, row)[0], None  # <-

    return x + lax.scan(body, jnp.zeros_like(x[0, 0]), x)[0]


def over_devices(x):
    def add(x):
        return lax.psum(x, "data")  # <-

    return jnp.tile(jax.shard_map(add, mesh=mesh(), in_specs=P("data"), out_specs=P())(x), (2, 1))


# layer -> name, severity in bfloat16
PLANTS = {
    **dict.fromkeys((gate, logarithm, norm, power), ("low-exp", "medium")),
    softmax: ("low-exp", "low"),
    **dict.fromkeys((pool, running), ("low-sum", "medium")),
    scattered: ("low-sum", "high"),
    **dict.fromkeys((by_scan, by_fori, by_select), ("low-carry", "high")),
    nested: ("low-carry", "low"),
    over_devices: ("low-collective", "medium"),
}


def all_plants(x) -> Any:
    return sum(plant(x) for plant in PLANTS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_planted_hazard_is_found_once_and_its_rule_mends_it(framework):
    def hazards_under(policy):
        loss, args = planted(framework, all_plants, policy, rows=MANY)
        return hazards(loss, *args)

    findings = hazards_under("c=bf16,o=f32")
    expected = [(*PLANTS[plant], line_of(plant)) for plant in PLANTS]
    seen = [(each.name, each.severity, each.place.line) for each in findings]
    assert sorted(seen) == sorted(expected)
    functions = {each.place.function for each in findings if each.name in ("low-exp", "low-sum")}
    assert functions == {plant.__name__ for plant in [*PLANTS][:8]}
    assert {each.place.file for each in findings} == {__file__}
    assert all(each.scope.endswith("plant") for each in findings)
    (rule,) = {each.rule for each in findings}
    assert rule == "*/plant: full"
    assert not hazards_under(f"c=bf16,o=f32; {rule}")


# Programs without a hazard.


def activations(x):
    names = "gelu silu tanh sigmoid softplus elu selu celu log_sigmoid mish relu6 squareplus"
    return sum(getattr(jax.nn, name)(x) for name in names.split())


def float32_sums(x):
    total = jnp.sum(x, 0) + jnp.mean(x, 0)  # JAX sums in float32
    return x + total + jnp.cumsum(x.astype(F32), 0).astype(x.dtype)


def reversible(x):
    def body(streams, w):
        a, b = streams
        a = a + jnp.tanh(b * w)
        return (a, b + jnp.tanh(a * w)), None

    return lax.scan(body, (x, x), x)[0][0]


def gated(x):
    def body(state, row):
        keep = jax.nn.sigmoid(row + state)
        return keep * state + (1 - keep) * row, None

    return lax.scan(body, jnp.zeros_like(x[0]), x)[0]


def counted(x):
    return x * jnp.asarray(lax.while_loop(lambda i: i < 5, lambda i: i + 1, 0), x.dtype)


def written(x):
    write = lambda i, cache: lax.dynamic_update_slice(cache, x[i][None] + 1, (i, 0))  # noqa: E731
    return lax.fori_loop(0, len(x), write, jnp.zeros_like(x))


def gathered(x):
    def gather(x):
        return lax.all_gather(x, "data", tiled=True)

    specs: dict[str, Any] = {"in_specs": P("data"), "out_specs": P()}
    # The gradient of a gather is a sum.
    return jax.shard_map(gather, mesh=mesh(), check_vma=False, **specs)(lax.stop_gradient(x))


CLEAN = [
    activations,
    float32_sums,
    gathered,
    lambda x: all_plants(x.astype(F32)).astype(x.dtype),
    lambda x: jax.nn.gelu(x, approximate=False),  # its derivative is an exponential
    lambda x: jax.nn.softmax(x.astype(F32)).astype(x.dtype),
    lambda x: x + jnp.sum(x[:256], 0, dtype=x.dtype),
    lambda x: x * x[jnp.arange(len(x)), jnp.zeros(len(x), jnp.int32)][:, None],
    lambda x: x * jnp.take_along_axis(x, jnp.zeros((len(x), 1), jnp.int32), 1),
    lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(x.dtype),
    lambda x: jnp.sort(x, 0) + x[jnp.argsort(x[:, 0])],
    lambda x: x * jnp.exp(1j * x.astype(jnp.complex64)).real.astype(x.dtype),
]
CLEAN_LOOPS = [
    reversible,
    gated,
    counted,
    written,
    lambda x: lax.scan(lambda h, w: (h + jnp.tanh(h * w), None), x, x)[0],  # a residual stream
    lambda x: lax.scan(lambda mean, row: (0.9 * mean + 0.1 * row, None), x[0], x)[0],
    lambda x: lax.scan(lambda s, r: (s + r.astype(F32), None), jnp.zeros(x[0].shape), x)[0],
    lambda x: lax.scan(lambda c, row: (c, row + 1), x[0], x)[1],
    # The gradient of a value that a loop over layers closes over is a sum of few terms.
    lambda x: lax.scan(lambda h, w: (h + jnp.tanh(h * w + x[0]), None), x[1], x)[0],
]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_what_is_no_hazard_is_not_found(dtype):
    def all_clean(x):
        clean = [all_plants] if dtype == F32 else CLEAN
        results = [layer(x) for layer in clean] + [layer(x[:24]) for layer in CLEAN_LOOPS]
        return sum(jnp.mean(jnp.asarray(each).astype(F32)) for each in results)

    assert not hazards_of(all_clean, MANY, 4, dtype=dtype)
    # The count of a loop is no sum, also if no gradient needs it.
    assert not hazards(lambda x: (counted(x), 0), shape(24, 3, dtype=dtype))


# Exponentials.


WAYS = {
    "vmap": jax.vmap(gate),
    "checkpoint": jax.checkpoint(gate),
    "scan": lambda x: lax.scan(lambda c, _: (gate(c), None), x, None, 3)[0],
    "cond": lambda x: lax.cond(x[0, 0] > 0, gate, jnp.negative, x),
    "while": lambda x: x * lax.while_loop(lambda c: c[0, 0] < 2, gate, lax.stop_gradient(x)),
    "linearize": lambda x: jax.jvp(gate, (x,), (x,))[1],
}


def test_a_hazard_is_found_once_under_each_transformation():
    def all_ways(x):
        for way, fn in WAYS.items():
            with jax.named_scope(f"in_{way}"):
                x = fn(x)
        return x

    findings = hazards_of(all_ways, 4, 3)
    assert sorted(each.scope for each in findings) == sorted(f"in_{way}" for way in WAYS)
    assert {each.place.line for each in findings} == {line_of(gate)}


def softmax_by_reciprocal(x):
    return jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))  # <-


def distances(x):
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - x[None]) ** 2, -1)) @ x  # <-


def online(x):
    def body(carry, row):
        largest, total = carry
        new = jnp.maximum(largest, jnp.max(row))
        return (new, total * jnp.exp(largest - new) + jnp.exp(row - new)), None  # <-

    start = jnp.full((), -jnp.inf, x.dtype), jnp.zeros_like(x[0])
    return lax.scan(body, start, x)[0][1]


@jax.jit
def softplus(x):
    """A name of JAX does not hide a function that may overflow."""
    return jnp.log(1 + jnp.exp(x))  # <-


@pytest.mark.parametrize("dtype, naive", [(BF16, "medium"), (F16, "high")])
def test_an_exponential_of_numbers_up_to_0_is_less_severe(dtype, naive):
    layers = {softmax_by_reciprocal: "low", distances: "low", online: "low", softplus: naive}
    findings = hazards_of(lambda x: sum(layer(x).mean() for layer in layers), 8, 4, dtype=dtype)
    expected = [(severity, line_of(layer)) for layer, severity in layers.items()]
    assert sorted((each.severity, each.place.line) for each in findings) == sorted(expected)


@pytest.mark.parametrize(
    "layer, dtype, severity, says",
    [
        (gate, BF16, "medium", "overflows beyond 88.72, and is off by up to 3.1% near 8"),
        (gate, F16, "high", "overflows beyond 11.09, and is off by up to 0.4% near 8"),
        (turned, BF16, "medium", "angles that are off by up to 0.03 near 8, and by 1 above 256"),
        (turned, F16, "low", "angles that are off by up to 0.004 near 8, and by 1 above 2048"),
        (power, BF16, "medium", "loses digits"),
        (power, F16, "high", "overflows beyond 65504"),
    ],
)
def test_what_the_messages_of_exponentials_say(layer, dtype, severity, says):
    (finding,) = hazards_of(layer, 4, 3, dtype=dtype)
    assert finding.severity == severity and says in finding.message
    is_of_angles = "before the code that makes the angles of cos" in finding.advice
    assert is_of_angles == (layer is turned)


def test_autocast_leaves_no_exponential_but_those_that_a_rule_asks_for():
    def loss(w, x):
        return jnp.mean(sum(layer(x @ w) for layer in (gate, logarithm, norm, power, softmax)) @ w)

    w, policy = shape(4, 4), "c=bf16; op.exp: bf16"
    assert not hazards(jmpx.autocast(loss), w, w)
    low = lambda w, x: jnp.mean(gate(x @ w))  # noqa: E731
    (finding,) = hazards(jmpx.autocast(low, policy), w, w)
    assert finding.rule == "op.exp: f32"
    assert not hazards(jmpx.autocast(low, f"{policy}; {finding.rule}"), w, w)


# Sums.


@pytest.mark.parametrize("dtype, limit", [(BF16, 256), (F16, 2048)])
def test_a_sum_stops_where_the_messages_say(dtype, limit):
    assert dtype.type(limit) + dtype.type(1) == limit
    for trips, severity in ((limit + 1, "high"), (limit, "medium"), (limit // 16, "low")):

        def by_loop(w, trips=trips):
            terms = w * jnp.ones(trips, dtype)
            return lax.scan(lambda s, t: (s + t, None), jnp.zeros_like(w), terms)[0]

        (finding,) = hazards_of(by_loop, dtype=dtype)
        assert (finding.name, finding.severity) == ("low-carry", severity)
        assert f"1/{limit} of" in finding.message

    summed = lambda x: jnp.sum(x, dtype=x.dtype)  # noqa: E731
    assert not hazards_of(summed, limit, dtype=dtype)
    (finding,) = hazards_of(summed, limit + 1, dtype=dtype)
    assert f"{limit + 1:,} terms" in finding.message

    def scattered_sum(terms):
        return jnp.zeros(1, dtype).at[jnp.zeros(len(terms), jnp.int32)].add(terms)[0]

    (finding,) = hazards_of(scattered_sum, limit + 9, dtype=dtype)
    assert finding.severity == "high" and f"only to {limit}: " in finding.message


def test_a_while_loop_is_found():
    def fn(x):
        def body(state):
            i, total = state
            return i + 1, total + x[i]  # <-

        return lax.while_loop(lambda state: state[0] < 5, body, (0, jnp.zeros((), x.dtype)))[1]

    (finding,) = hazards(lambda x: fn(x)[None], shape(8, dtype=BF16))
    assert (finding.name, finding.place.line) == ("low-carry", line_of(fn))
    assert finding.severity == "high" and "unknown" in finding.message


@pytest.mark.parametrize(
    "decay, trips, severities",
    [(0.999, MANY, ["high"]), (0.999, 100, ["medium"]), (0.96, MANY, ["medium"]), (0.5, MANY, [])],
)
def test_a_moving_average_in_a_loop_is_a_sum_of_as_many_terms_as_it_keeps(decay, trips, severities):
    def fn(x):
        def body(mean, row):
            return mean * decay + row * (1 - decay), None

        return lax.scan(body, jnp.zeros_like(x[0]), x)[0]

    found = hazards(fn, shape(trips, 2, dtype=BF16))
    assert [(each.name, each.severity) for each in found] == [("low-carry", s) for s in severities]


def test_the_gradient_of_a_recurrent_weight_is_a_sum_over_time():
    def loss(w, x, cast_in_cell):
        w = w if cast_in_cell else w.astype(BF16)

        def cell(h, row):
            return jnp.tanh(h @ w.astype(BF16) + row), None

        h, _ = lax.scan(cell, jnp.zeros((2, 4), BF16), x)  # <-
        return jnp.mean(h.astype(F32))

    w, x = shape(4, 4), shape(MANY, 2, 4, dtype=BF16)
    (finding,) = hazards(loss, w, x, False)
    assert (finding.name, finding.place.line) == ("low-carry", line_of(loss))
    assert "gradient" in finding.message
    assert not hazards(loss, w, shape(100, 2, 4, dtype=BF16), False)
    assert not hazards(loss, w, x, True)


def test_micro_batches_in_16_bits_are_found():
    """Besides gradients, a loop carries the values that they depend on, such as a model's state."""

    def step(w, x):
        def body(carry, batch):
            total, mean = carry
            grads = jax.grad(lambda w: jnp.mean((batch @ w - mean).astype(F32)))(w)
            return (total + grads, jnp.maximum(mean, (batch @ w).max())), None  # <-

        return lax.scan(body, (jnp.zeros_like(w), jnp.zeros((), w.dtype)), x)[0]

    (finding,) = hazards(step, shape(4, 2, dtype=BF16), shape(9, 3, 4, dtype=BF16))
    assert (finding.name, finding.severity) == ("low-carry", "low")
    assert finding.place.line == line_of(step)


# Sums over devices.


def test_the_rule_for_a_collective_mends_it():
    def found_in_step(policy):
        """In a step that averages its gradients over devices, by a policy."""

        def loss(w, x):
            return jnp.mean((x @ w.astype(x.dtype)).astype(F32))

        def local(w, x):
            over = jmpx.Over("data")
            step = jmpx.value_and_grad(loss, jmpx.NoOpLossScale(), policy=policy, over=over)
            result = step(w, x)
            return result.value, result.grads

        specs: dict[str, Any] = {"in_specs": (P(), P("data")), "out_specs": (P(), P())}
        step = jax.shard_map(local, mesh=mesh(), check_vma=False, **specs)
        return hazards(step, shape(3, 2), shape(4, 3))

    (finding,) = found_in_step("c=bf16,o=f32,r=bf16")
    assert finding.name == "low-collective" and "'data'" in finding.message
    assert "x.astype(jnp.float32) before the sum" in finding.advice
    assert not found_in_step(f"c=bf16,o=f32,{finding.advice.partition(' ')[0]}")


def test_r_is_proposed_for_sums_of_gradients_alone():
    (finding,) = hazards_of(over_devices, 4, 2)
    assert finding.advice == "x.astype(jnp.float32) before the sum"


def test_a_sum_over_a_mapped_axis_is_a_sum():
    def total(x):
        return jax.vmap(lambda row: lax.psum(row, "rows"), axis_name="rows")(x)

    (finding,) = hazards_of(total, MANY, 2)
    assert finding.name == "low-sum" and "300 terms" in finding.message
    assert not hazards_of(total, 4, 2)


# Layers of the frameworks.


def test_the_embedding_of_linen_in_16_bits_is_found_and_mended():
    """Tokens add to one row of the gradient of the table, one after the other."""
    net, tokens = nn.Embed(5, 4), shape(MANY, dtype="int32")
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)

    def by_hand(params, tokens):
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return jnp.mean(jnp.square(jnp.asarray(net.apply(low, tokens)).astype(F32)))  # <-

    def with_policy(params, tokens):
        with jmpx.flax.policies("c=bf16,o=f32"):
            return jnp.mean(jnp.square(jnp.asarray(net.apply(params, tokens))))

    (finding,) = hazards(by_hand, params, tokens)
    assert (finding.name, finding.severity) == ("low-sum", "medium")  # tokens may differ
    assert finding.place.line == line_of(by_hand)
    assert not hazards(by_hand, params, shape(100, dtype="int32"))
    assert not hazards(with_policy, params, tokens)


def test_what_nothing_reads_is_no_hazard():
    """The derivative of a maximum counts the numbers that are equal to it, also where it is 1."""

    def loss_fn(w, x, labels):
        logits = x @ w
        labels = jax.nn.one_hot(labels, MANY)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * labels, -1))

    loss = jmpx.apply_policy(loss_fn, "c=bf16")
    args = shape(8, MANY), shape(16, 8), shape(16, dtype=jnp.int32)
    sums = [e for e in equations_of(jax.grad(loss), *args) if e.primitive.name == "reduce_sum"]
    assert any(e.invars[0].aval.dtype == BF16 for e in sums)
    assert "low-sum" not in [finding.name for finding in hazards(loss, *args)]
