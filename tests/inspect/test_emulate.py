"""`emulate`: results of 16 bits are rounded where the program writes them, on any compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F16, F32, assert_same_bits
from jax import lax

import jmpx

emulate = jmpx.inspect.emulate
LOW = [BF16, F16]


def one_by_one(f, *args):
    """Runs operations one by one, each compiled by itself, on leaves that it may write to."""
    with jax.disable_jit():
        return f(*jax.tree.map(lambda x: x, args))


# The rounding itself.


@pytest.mark.parametrize("dtype", LOW)
def test_it_rounds_as_a_cast_does(dtype, rng):
    """Of numbers of all sizes: halves between two neighbours, subnormal ones, overflowing ones."""
    below = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        halves = (below + np.nextafter(below.astype(dtype), np.array(np.inf, dtype))) / 2
        halves = halves.astype(np.float32)
        few = rng.integers(2**32, size=2**18, dtype=np.uint32).view(np.float32)
        wide = np.concatenate([below, halves, np.nextafter(halves, np.float32(0)), few])
        if dtype == BF16:  # XLA flushes float32's own subnormal numbers, which are bfloat16's, too
            wide = wide[~(np.abs(wide) < np.finfo(np.float32).tiny)]
        expected = wide.astype(dtype)
    found = jax.jit(emulate(lambda wide: wide.astype(dtype).astype(F32)))(wide)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_it_is_seen_where_a_compiler_leaves_the_cast_out(rng):
    def f(x):
        return (x * x).astype(F32) * 3

    x = jnp.asarray(rng.normal(size=4096), BF16)
    expected = one_by_one(f, x)
    assert_same_bits(jax.jit(emulate(f))(x), expected)
    text = jax.jit(emulate(f)).lower(x).as_text()
    assert text.count("reduce_precision") == 2  # of the argument, which may be a cast, too
    assert np.any(jax.jit(f)(x) != expected)  # as a CPU does it


@jax.custom_vjp
def seven(x):
    return x * x * x


# A rule that is not the derivative, so that its loss would be seen.
seven.defvjp(lambda x: (x * x * x, x), lambda x, g: (7 * g * jnp.tanh(x) * x,))


@jax.custom_jvp
def eleven(x):
    return x * x + x


@eleven.defjvp
def _(primals, tangents):
    return eleven(*primals), 11 * tangents[0] * primals[0] * primals[0]


def gated(x, w, v):
    return jnp.tanh(x * v + x) * jnp.exp(-x * x)


def polynomial(x, w, v):
    return ((x * 3 - v) * x + v) * x - 1


def rectified(x, w, v):
    return jax.nn.relu(x * x - v) ** 3


def looped(x, w, v):
    body = lambda carry: (carry[0] + 1, jnp.sin(carry[1] * carry[1]) + x)  # noqa: E731
    return lax.while_loop(lambda carry: carry[0] < 4, body, (0, x))[1]


def perceptron(x, w, v):
    return jax.nn.gelu(x @ w / 4 + v) @ w.T / 4


def policy(x, w, v):
    run = jmpx.autocast(lambda x, w: jax.nn.gelu(x @ w) @ w, f"c={x.dtype.name}")
    return run(x.astype(F32), w.astype(F32))


# Programs: of x (32, 64), w (64, 64) and v (64,), with a result of any shape.
ELEMENTWISE = {
    "looped": looped,
    "branched": lambda x, w, v: lax.cond(
        x[0, 0] > 0, lambda x: x * x * v, lambda x: jnp.sin(x) * v, x
    ),
    "by rules in a loop": lambda x, w, v: lax.scan(
        lambda h, _: (jax.jit(lambda h: seven(eleven(h) / 4))(h), None), x / 2, length=3
    )[0],
    "by rules mapped": lambda x, w, v: jax.vmap(
        jax.checkpoint(lambda row: seven(row) + eleven(row * v))
    )(x),
    "wide inside": lambda x, w, v: (jnp.sin(x.astype(F32)) * 2).astype(x.dtype) * v,
    "backwards": lambda x, w, v: lax.scan(lambda h, y: (h * y + y, h), v, x, reverse=True),
}
SUMMED = {
    "in float32": lambda x, w, v: jnp.matmul(x, w, preferred_element_type=F32) * v.astype(F32),
    "attended": lambda x, w, v: jax.nn.softmax((x @ w) @ x.T / 8) @ x,
    "convolved": lambda x, w, v: lax.conv(x[None], w[:, : len(x), None], (1,), "SAME"),
    "policy": policy,
    "segmented": lambda x, w, v: jnp.zeros((3, 64), x.dtype).at[jnp.arange(len(x)) % 3].add(x * x),
}


def each(programs):
    """Has each program once, in one of the dtypes."""
    cases = [(f, LOW[i % 2]) for i, f in enumerate(programs.values())]
    return pytest.mark.parametrize(("f", "dtype"), cases, ids=programs)


def given(rng, dtype):
    shapes = (32, 64), (64, 64), (64,)
    return tuple(jnp.asarray(rng.normal(size=shape) / 2, dtype) for shape in shapes)


def loss_of(f):
    def loss(x, w, v):
        results = jax.tree.leaves(f(x, w, v))
        return sum(jnp.sum(jnp.sin(y.astype(F32))) for y in results)

    return loss


def gradient_of(f):
    return jax.grad(loss_of(f), (0, 1, 2))


def assert_close(found, expected):
    """Numbers of 16 bits differ by one unit at most, in few places; those of float32 by 1e-6."""
    off, size = 0, 0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype == np.float32:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max(initial=0))
            continue
        up, down = (np.nextafter(b, np.array(end, b.dtype)) for end in (np.inf, -np.inf))
        assert np.all((a == b) | (a == up) | (a == down))
        off, size = off + np.sum(a != b), size + a.size
    assert off <= max(1, size / 1e4)


@pytest.mark.thorough
@pytest.mark.versions
@each(ELEMENTWISE)
def test_without_sums_each_bit_is_that_of_the_operations_one_by_one(f, dtype, rng):
    args = given(rng, dtype)
    assert_same_bits(jax.jit(emulate(f))(*args), one_by_one(f, *args))
    if f is looped:
        return  # JAX differentiates no while loop
    # Cotangents of values that a loop reads in each trip are sums of few numbers in 16 bits.
    found = jax.jit(emulate(gradient_of(f)))(*args)
    assert_close(found, one_by_one(gradient_of(f), *args))
    assert_same_bits(jax.jit(gradient_of(emulate(f)))(*args), found)


@pytest.mark.thorough
@pytest.mark.versions
@each(SUMMED)
def test_with_sums_few_numbers_differ_by_one_unit(f, dtype, rng):
    args = given(rng, dtype)
    assert_close(jax.jit(emulate(f))(*args), one_by_one(f, *args))
    expected = one_by_one(gradient_of(f), *args)
    for gradient in (emulate(gradient_of(f)), gradient_of(emulate(f))):
        assert_close(jax.jit(gradient)(*args), expected)


# Composition with transformations and policies.


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="JAX 0.7 calls it by another name")
def test_what_is_read_from_a_reference_is_rounded(rng):
    def f(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * x
        return (ref[...] * x).astype(F32)

    x = jnp.asarray(rng.normal(size=512), BF16)
    assert_same_bits(jax.jit(emulate(f))(x), (x * x * x).astype(F32))


def test_prints_and_callbacks_stay(capfd):
    def f(x):
        jax.debug.print("seen {}", x[0])
        return jax.pure_callback(lambda x: 2 * np.asarray(x), x, x * x)

    assert_same_bits(jax.jit(emulate(f))(jnp.ones(3, BF16)), jnp.full(3, 2, BF16))
    jax.effects_barrier()
    assert capfd.readouterr().out == "seen 1.0\n"


@pytest.mark.thorough
def test_under_transformations(rng):
    args = given(rng, BF16)
    x, w, v = args
    expected = one_by_one(gated, *args)
    assert_same_bits(emulate(gated)(*args), expected)  # eagerly
    for run in (
        lambda: jax.vmap(emulate(gated), (0, None, None))(*args),
        lambda: jax.jit(jax.checkpoint(emulate(gated)))(*args),
        lambda: emulate(jax.jit(gated))(x, w, v=v),
        lambda: emulate(emulate(gated))(*args),
        lambda: lax.scan(lambda _, row: (None, emulate(gated)(row, w, v)), None, x)[1],
        lambda: jax.jit(lambda x: emulate(lambda: gated(x, w, v))())(x),  # closes over a tracer
    ):
        assert_same_bits(run(), expected)


def test_arrays_that_it_closes_over_have_their_gradients(rng):
    args = given(rng, BF16)
    closed = lambda x, w, v: emulate(lambda y: polynomial(y, w, v))(x)  # noqa: E731
    found = jax.jit(gradient_of(closed))(*args)
    assert_close(found, one_by_one(gradient_of(polynomial), *args))


@pytest.mark.thorough
def test_second_derivatives_are_rounded_where_they_are_written(rng):
    x, w, v = given(rng, F16)

    def twice(f):
        slope = lambda x: jax.grad(lambda x: f(x, w, v).astype(F32).sum())(x)  # noqa: E731
        return lambda x: jax.grad(lambda x: jnp.sum(slope(x) * v, dtype=F32))(x)

    expected = one_by_one(twice(rectified), x)
    assert_same_bits(jax.jit(emulate(twice(rectified)))(x), expected)
    assert_same_bits(jax.jit(twice(emulate(rectified)))(x), expected)


@pytest.mark.thorough
def test_other_leaves_go_through():
    def f(tree, *, name, key):
        half, count = tree
        noise = jax.random.normal(key, half.shape, half.dtype)
        return {"y": half * 2 + noise, "n": count + 1, "name": name, "key": key}

    tree, key = (jnp.ones(3, BF16), jnp.int32(4)), jax.random.key(0)
    found, expected = (run(tree, name="a", key=key) for run in (emulate(f), f))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert (found["name"], int(found["n"])) == ("a", 5)
    assert_same_bits(found["y"], expected["y"])
    grads = jax.grad(lambda tree: emulate(f)(tree, name="a", key=key)["y"].sum(), allow_int=True)
    assert grads(tree)[0].dtype == BF16 and grads(tree)[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [("head: product=f32", F16), ("head: c=f32,o=f32,m=TF32_TF32_F32", BF16), ("", BF16)],
)
def test_operands_of_algorithms_are_rounded(dtype, rule, rng):
    """A CPU leaves the rounding out for bfloat16, and refuses float16."""
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 64), (64, 16)))

    def f(x, w):
        with jax.named_scope("head"):
            return x @ w

    run = emulate(jmpx.apply_policy(f, f"by=operations,c={dtype.name},o=f32; {rule}".strip("; ")))
    low = lambda x: np.asarray(x, np.float32).astype(dtype).astype(np.float32)  # noqa: E731
    if "TF32" in rule:
        low = lambda x: np.asarray(lax.reduce_precision(x, 8, 10))  # noqa: E731
    exact = low(x).astype(np.float64) @ low(w)
    logits, pullback = jax.vjp(run, x, w)
    tolerance = {"": 2 * float(jnp.finfo(dtype).eps)}.get(rule, 1e-5)
    np.testing.assert_allclose(logits, exact, rtol=tolerance, atol=tolerance)
    g = rng.normal(size=logits.shape).astype(np.float32)
    dx, dw = pullback(g)
    for found, exact in ((dx, low(g) @ low(w).T), (dw, low(x).T @ low(g))):
        np.testing.assert_allclose(found, exact, rtol=tolerance, atol=4 * tolerance)


def test_shards_sum_what_is_rounded(rng):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    x = jnp.asarray(rng.normal(size=(8, 16)), BF16)

    def f(x):
        return jax.shard_map(
            lambda x: (x * x * x).astype(F32) + lax.pmax((x * x).astype(F32), "d"),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )(x)

    square = x * x
    highest = jnp.tile(square.astype(F32).reshape(4, 2, 16).max(axis=0), (4, 1))
    assert_same_bits(jax.jit(emulate(f))(x), (square * x).astype(F32) + highest)


@pytest.mark.thorough
def test_the_state_of_nnx_modules_changes(rng):
    x = jnp.asarray(rng.normal(size=16), BF16)
    net: Any = nnx.Linear(16, 16, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0))
    net.count = nnx.BatchStat(jnp.zeros((), BF16))

    def train(net, x):
        net.count[...] += jnp.sum(x * x)
        return net(x)

    def pure(state, x):
        merged: Any = nnx.merge(graph, state)
        return train(merged, x), merged.count[...]

    graph, state = nnx.split(net)
    y, after = one_by_one(pure, state, x)
    assert_close(emulate(train)(net, x), y)
    assert_same_bits(net.count[...], after)


@pytest.mark.thorough
def test_a_train_step_as_a_whole(rng):
    """With a loss scale, a policy and the gradients of jmpx."""
    x, w, v = (each.astype(F32) for each in given(rng, F16))
    loss = lambda w, x, v: loss_of(perceptron)(x, w, v)  # noqa: E731
    gradient = jmpx.value_and_grad(loss, jmpx.DynamicLossScale(2.0**8), policy="c=f16")
    step = lambda w, x, v: gradient(w, x, v).grads  # noqa: E731
    assert_close(jax.jit(emulate(step))(w, x, v), one_by_one(step, w, x, v))


def test_formats_that_are_not_named_are_left(rng):
    f = lambda x: (x * x).astype(F32) * 3  # noqa: E731
    for dtype, other in (LOW, LOW[::-1]):
        text = jax.jit(emulate(f, [other])).lower(jnp.ones(4, dtype)).as_text()
        assert "reduce_precision" not in text
        text = jax.jit(emulate(f, (dtype,))).lower(jnp.ones(4, dtype)).as_text()
        assert "reduce_precision" in text
