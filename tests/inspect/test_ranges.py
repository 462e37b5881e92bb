"""The ranges of programs, against NumPy and programs in float32, and their texts."""

import collections
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F16, normal
from jax import lax

import jmpx

look = jmpx.inspect.ranges


def counted(array):
    """The histogram of an array by exponent, as NumPy counts it."""
    array = np.abs(np.asarray(array, np.float64)).ravel()
    exponents = np.frexp(array[array > 0])[1] - 1
    return collections.Counter(exponents.tolist())


def by_scope(ranges, kind="activations"):
    return {each.scope: each for each in getattr(ranges, kind)}


def highest(found):
    """The largest exponent of a range, a histogram, or of several ranges."""
    if isinstance(found, tuple):
        return max(map(highest, found))
    return max(getattr(found, "histogram", found).exponents)


def exponent(number):
    return int(np.frexp(float(number))[1]) - 1


def body(carry, x):
    with jax.named_scope("body"):
        carry = jnp.tanh(carry * x) * 1.5
    return carry, carry * 0.25


def scanned(x):
    carry, ys = lax.scan(body, x[0], x)
    return jnp.sum(carry) + jnp.sum(ys)


def unrolled(x):
    carry, ys = x[0], []
    for each in x:
        carry, y = body(carry, each)
        ys.append(y)
    return jnp.sum(carry) + jnp.sum(jnp.stack(ys))


def test_the_trips_of_a_scan_are_counted_as_if_written_out(rng):
    x = normal(rng, 4, 3)
    found = [look(fn)(x) for fn in (scanned, unrolled)]
    loop, plain = (by_scope(each)["body"].histogram for each in found)
    assert loop == plain
    loop, plain = (by_scope(each, "gradients")["body"].histogram for each in found)
    assert loop.exponents == plain.exponents


def test_while_loops_and_the_branch_that_runs_are_counted(rng):
    def fn(x, n):
        def double(carry):
            with jax.named_scope("double"):
                return carry[0] + 1, carry[1] * 2.0

        _, x = lax.while_loop(lambda carry: carry[0] < n, double, (0, x))
        with jax.named_scope("branch"):
            return lax.cond(n > 3, lambda x: x * 1e6, lambda x: x * 1e-6, x)

    x = jnp.abs(normal(rng, 6)) + 1
    found = by_scope(look(fn)(x, 5))
    assert found["double"].histogram.exponents == sum(
        (counted(x * 2**i) for i in range(1, 6)), collections.Counter()
    )
    assert found["branch"].histogram.exponents == counted(x * 2**5 * np.float32(1e6))
    few = by_scope(look(fn)(x, 2))
    assert few["branch"].histogram.exponents == counted(x * 2**2 * np.float32(1e-6))


@jax.custom_vjp
def custom(x):
    return x * 3.0


custom.defvjp(lambda x: (x * 3.0, None), lambda _, g: (g * 2.0**-20,))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, custom, jax.nn.relu, jax.vmap], ids=lambda f: f.__name__
)
def test_what_stands_for_a_function_is_looked_into(wrap, rng):
    x = normal(rng, 3, 4)

    def loss_fn(x, inner):
        with jax.named_scope("inner"):
            return jnp.sum(inner(x) * 2.0**-10)

    fn = wrap if wrap in (custom, jax.nn.relu) else wrap(lambda x: jnp.exp(x) * 3.0)
    found = look(functools.partial(loss_fn, inner=fn))(x)
    assert highest(found.activations) == exponent(np.abs(fn(x)).max())
    slopes = jax.grad(functools.partial(loss_fn, inner=fn))(x)
    assert min(found.histogram().exponents) <= exponent(np.abs(slopes).max())


def test_what_a_checkpoint_computes_again_counts_as_activations(rng):
    x, w = normal(rng, 3, 4), normal(rng, 4, 4) * 1e4

    def loss_fn(w, x, wrap):
        h = wrap(lambda w, x: jnp.tanh(jnp.tanh(x @ w) * 0.5))(w, x)
        return jnp.mean(h)

    plain = look(functools.partial(loss_fn, wrap=lambda f: f))(w, x)
    again = look(functools.partial(loss_fn, wrap=jax.checkpoint))(w, x)
    assert highest(again.activations) == exponent(np.abs(x @ w).max())
    assert highest(again.gradients) == highest(plain.gradients) < highest(again.activations)
    assert again.loss_scale() == plain.loss_scale()


def test_autocast_has_no_effect(rng):
    w, x = normal(rng, 4, 4) * 1e4, normal(rng, 3, 4)

    def apply(w, x):
        return jnp.tanh(x @ w @ w)

    def found(apply):
        return look(lambda w, x: jnp.mean(apply(w, x)))(w, x).activations

    assert highest(found(jmpx.autocast(apply, "c=f16"))) == highest(found(apply)) > 16


def test_bits_stay_those_that_were_traced():
    def fn(x):
        bits = lax.bitcast_convert_type(x, jnp.uint16) + jnp.uint16(1 << 10)  # twice
        return lax.bitcast_convert_type(bits, F16) * 2

    found = look(fn)(jnp.asarray([1.0], F16))
    assert found.activations[0].histogram.exponents == {1: 1, 2: 1}


def test_subnormal_numbers_are_seen():
    tiny = np.asarray([2.0**-140], np.float32)
    found = look(lambda x, y: jnp.where(y > 0, x, y))(tiny, np.ones(1, np.float32))
    assert found.activations[0].histogram.exponents == {-140: 1}
    assert found.shares("bfloat16", kind="activations").lost == 1


def test_a_mask_does_not_overflow(rng):
    def loss_fn(q, mask):
        with jax.named_scope("attention"):
            weights = jax.nn.softmax(jnp.where(mask, q @ q.T, -1e9))
        return jnp.mean(weights**2)

    found = look(loss_fn)(normal(rng, 4, 4), jnp.tri(4, dtype=bool))
    assert found.masks == (1e9,)
    assert found.histogram("activations").masked == 12  # in the scores, and less their maximum
    assert found.shares("float16", kind="activations").overflowing == 0
    assert "Masks, counted apart: 12 numbers" in str(found)


def test_a_factor_beyond_float16_is_no_mask():
    found = look(lambda x: x * 1e6)(jnp.ones(3))
    assert found.masks == () and found.shares("float16", kind="activations").overflowing == 1


def test_infinities_and_nans_do_not_count_as_overflows(rng):
    found = look(lambda x: jnp.log(x) * 2)(jnp.asarray([0.0, -1.0, 2.0]))
    histogram = found.histogram("activations")
    assert (histogram.infinite, histogram.nan, histogram.numbers) == (2, 2, 2)
    assert found.shares("float16", kind="activations").overflowing == 0
    assert "Infinite or NaN in float32: 4 numbers" in str(found)


@pytest.mark.thorough
def test_a_step_that_contains_its_gradient_is_run_as_it_is(rng):
    """The numbers of a loss scale do not count."""
    w, x = normal(rng, 4, 3), normal(rng, 5, 4)

    def loss_fn(w):
        return jnp.mean((x @ w) ** 2)

    def step(w):
        loss, gradient = jax.value_and_grad(lambda w: 2.0**10 * loss_fn(w))(w)
        return w - 0.1 * gradient, loss

    def step_of_jmpx(w, scale):
        scale, finite, gradients = jmpx.grad(loss_fn, scale, policy="full")(w)
        return jmpx.select_tree(finite, w - 0.1 * gradients, w), scale

    plain, scaled = look(loss_fn)(w), look(step)(w)
    assert (scaled.title, plain.title) == ("step", "loss_fn and its gradient")
    assert scaled.loss_scale() == plain.loss_scale() / 2**10
    found = look(step_of_jmpx)(w, jmpx.DynamicLossScale(2**16))
    assert found.loss_scale() == plain.loss_scale() / 2**16


@pytest.mark.parametrize(
    ("largest", "options", "scale"),
    [
        (1.0, {}, 2**13),
        (1.9, {}, 2**13),
        (2.0, {}, 2**12),
        (1.0, {"head_room": 0}, 2**15),
        (2.0**-30, {}, 2**43),
        (2.0**14.5, {}, 0.5),
        (2.0**20, {}, 2.0**-7),
        (1.0, {"dtype": "float8_e5m2"}, 2**13),
        (1.0, {"dtype": "float8_e4m3fn"}, 2**6),
        (1.0, {"dtype": "bfloat16"}, 1),
    ],
)
def test_the_loss_scale_leaves_head_room(largest, options, scale):
    found = look(lambda w, x: jnp.sum(w * x))(jnp.ones(1), jnp.array([largest]))
    assert found.loss_scale(**options) == scale
    (line,) = [line for line in str(found).splitlines() if "Loss scale" in line]
    loss_scale = jmpx.get_loss_scale(line.split(": ")[1].split("  ")[0])
    assert float(loss_scale.loss_scale) == found.loss_scale()
    assert float(jmpx.DynamicLossScale(found.loss_scale()).loss_scale) == max(found.loss_scale(), 1)
    code = re.search(r"In code: (.*)\nWithout min_loss_scale the floor is 1(.*)\.", str(found))
    assert (code is not None) == (found.loss_scale() < 1)
    if code:  # at its floor no gradient overflows
        assert eval(code[1], {"jmpx": jmpx}).adjust(False) == loss_scale
        is_too_large = largest > 65504
        assert code[2] == ", where this step is skipped" * is_too_large
    said = "A loss that is itself computed in float16 takes dynamic,init=32768."
    assert (said in str(found)) == (found.loss_scale() > 2**15)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        found.loss_scale(1.5)  # pyright: ignore[reportArgumentType]


def test_the_loss_scale_of_a_loss_with_derivatives_inside_is_that_of_its_gradients(rng):
    """As of a network that solves an equation, or of forces: `grad` inside of the loss."""
    w, x = normal(rng, 4, 1), normal(rng, 16, 4)

    def loss_fn(w, x):
        slope = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)
        return 1e5 * jnp.mean(slope**2)

    found = look(loss_fn)(w, x)
    largest = np.abs(jax.grad(loss_fn)(w, x)).max()
    assert found.title == "loss_fn and its gradient" and largest > 2**10
    assert max(found.histogram().exponents) >= np.log2(largest) - 1
    assert found.loss_scale() * largest < 2**15
    number = jnp.int32(3)  # nothing to differentiate
    assert look(lambda n, w: loss_fn(w * n.astype(w.dtype), x))(number, w).title == "<lambda>"


def test_a_function_without_gradients_has_activations_alone(rng):
    found = look(lambda x: x @ x)(normal(rng, 3, 3))
    assert len(found.activations) == 1 and found.gradients == ()
    assert found.histogram().size == 0
    text = str(look(lambda x: x + 1)(np.arange(3)))
    assert "0 scopes" in text and "Loss scale" not in text and "subnormal" not in text


# Text, JSON and pictures


@pytest.fixture(scope="module")
def found():
    rng = np.random.default_rng(0)

    def loss_fn(params, x):
        with jax.named_scope("net"):
            with jax.named_scope("encoder"):
                h = jnp.tanh(x @ params["w"])
            with jax.named_scope("energy"):
                h = jnp.square(1000 * h).sum(-1)
        return jnp.mean(jnp.sqrt(h)) / 1000

    return look(loss_fn)({"w": normal(rng, 8, 4)}, normal(rng, 6, 8))


def test_the_text_says_what_matters(found):
    text = str(found)
    assert text.startswith("Ranges of loss_fn and its gradient in float32: 3 scopes, ")
    (row,) = [line for line in text.splitlines() if line.endswith("net/energy")]
    shares = found.shares("float16", kind="activations", scope="net/energy")
    assert f"{100 * shares.overflowing:.1f} %" in row
    assert f"dynamic,init={int(found.loss_scale())}  " in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_json_holds_what_the_ranges_hold(found):
    data = json.loads(found.to_json())
    assert [each["scope"] for each in data["gradients"]] == [e.scope for e in found.gradients]
    energy = data["activations"][1]
    histogram = found.activations[1].histogram
    assert energy["exponents"] == {str(e): n for e, n in histogram.exponents.items()}


def test_scopes_are_found_by_path_by_name_and_by_glob(found):
    inner = [each.histogram for each in found.activations if each.scope.startswith("net/")]
    sizes = [each.numbers for each in inner]
    expected = {"net": sum(sizes), "net/encoder": sizes[0], "encoder": sizes[0]}
    expected |= {"*/energy": sizes[1], "net/*": sum(sizes)}
    for scope, size in expected.items():
        assert found.histogram("activations", scope).numbers == size
    outside = found.activations[2].histogram.numbers
    assert found.histogram("activations", "").numbers == outside
    assert found.histogram("activations").numbers > sum(sizes)


def test_a_picture_says_what_float16_loses(found, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    file = tmp_path / "energy.SVG"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        found.plot(str(file), scope="*/energy", scale=2**4)
    drawn = file.read_text()
    shares = found.shares("float16", kind="activations", scope="*/energy")
    assert drawn.startswith("<?xml")
    assert f"overflowing {100 * shares.overflowing:.1f} %" in drawn
    assert "its gradient in */energy" in drawn and "at scale 2**4" in drawn
