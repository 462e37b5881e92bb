"""Planted causes of infinities and NaNs are found, each on its line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F16, F32, enable_x64, normal
from helpers.nonfinite import HALF, find, line_of, marked_line, total
from jax.sharding import PartitionSpec as P

import jmpx

ONES = jnp.ones(3)


def overflowing_exp(w, x):
    return total(jnp.exp(x * w))  # HERE


def overflowing_sum(w, x):
    many = jnp.broadcast_to(x * w, (80, 3))
    return total(jax.lax.reduce(many, np.float16(0), jax.lax.add, (0,)))  # HERE


def overflowing_product(w, x):
    return total((x[None] * w) @ x[:, None])  # HERE


def overflowing_cast(w, x):
    y = x.astype(F32) * w.astype(F32) * 70000
    return total(y.astype(F16))  # HERE


def masked_rows(w, x):
    logits = jnp.where(x > 2, x * w, -1e9)  # HERE
    return total(jax.nn.softmax(logits))


def masked_by_infinity(w, x):
    logits = jnp.where(x > 2, x * w, -jnp.inf)
    return total(jax.nn.softmax(logits))  # HERE


def division(w, x):
    return total(w / (x - x))  # HERE


def logarithm(w, x):
    return total(jnp.log(w * (x - x)))  # HERE


def negative_root(w, x):
    return total(jnp.sqrt(-w * x))  # HERE


def slope_of_root(w, x):
    return total(jnp.where(w > 9, jnp.sqrt(w - 1), 0))  # HERE


def slope_overflows(w, x):
    scaled = w * 100  # HERE
    return total(scaled) * 1000


def underflow(w, x):
    small = w * x * 1e-4
    return total(x / (small * small))  # HERE


def in_a_scan(w, x):
    def body(carry, _):
        return carry * (w + 1), None  # HERE

    return total(jax.lax.scan(body, x, length=20)[0])


def in_a_while_loop(w, x):
    def body(carry):
        count, carry = carry
        return count + 1, carry * (w + 1)  # HERE

    return jax.lax.while_loop(lambda carry: carry[0] < 20, body, (0, x))[1]  # no loss


def in_a_scan_backward(w, x):
    def body(carry, _):
        return carry * 8, None  # HERE

    return total(jax.lax.scan(body, w, length=4)[0]) * 100


def in_jit(w, x):
    @jax.jit
    def called(x):
        return jnp.exp(x)  # HERE

    return total(called(jax.jit(jnp.multiply)(x, w)))


def in_a_branch(w, x):
    exploding = lambda x: jnp.exp(x * 8)  # noqa: E731  # HERE
    return total(jax.lax.cond(x[0] > 0, exploding, lambda x: x, x * w))


def in_a_checkpoint(w, x):
    @jax.checkpoint
    def called(x):
        return jnp.exp(x)  # HERE

    return total(called(x * w))


def in_vmap(w, x):
    return total(jax.vmap(lambda x, w: jnp.exp(x * w))(x, w))  # HERE


@jax.custom_vjp
def own(x):
    return x


def own_backward(_, cotangent):
    return (cotangent * 60000 * 60000,)


own.defvjp(lambda x: (x, None), own_backward)


def in_an_own_backward_pass(w, x):
    return total(own(x * w) * 2)  # HERE


BEYOND = "beyond float16, whose largest number is 65504"
# The loss, a factor of x, the operation, whether the pass is backward, part of the cause.
PLANTED = [
    (overflowing_exp, 12, "exp", False, BEYOND),
    (overflowing_sum, 1000, "reduce_sum", False, BEYOND),
    (overflowing_product, 300, "dot_general", False, BEYOND),
    (overflowing_cast, 1, "convert_element_type", False, BEYOND),
    (masked_rows, 1, "convert_element_type", False, "It gives up to 1e+09, beyond float16"),
    (masked_by_infinity, 1, "sub", False, "It makes a NaN of intentional infinities"),
    (division, 1, "div", False, "It divides by zero"),
    (logarithm, 1, "log", False, "It reads zero or less"),
    (negative_root, 1, "sqrt", False, "It reads less than zero"),
    (slope_of_root, 1, "div", False, "It divides by zero, here or in a derivative"),
    (slope_overflows, 1, "mul", True, BEYOND),
    (underflow, 1, "div", False, "because of numbers that 16 bits lost"),
    (in_a_scan, 1, "mul", False, BEYOND),
    (in_a_while_loop, 1, "mul", False, BEYOND),
    (in_a_scan_backward, 1, "mul", True, BEYOND),
    (in_jit, 12, "exp", False, BEYOND),
    (in_a_branch, 2, "exp", False, BEYOND),
    (in_a_checkpoint, 12, "exp", False, BEYOND),
    (in_vmap, 12, "exp", False, BEYOND),
    (in_an_own_backward_pass, 1, "mul", True, BEYOND),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("loss", "factor", "operation", "is_backward", "cause"),
    PLANTED,
    ids=[planted[0].__name__ for planted in PLANTED],
)
def test_a_planted_cause_is_found_on_its_line(loss, factor, operation, is_backward, cause):
    found = find(loss, HALF, HALF * factor)
    assert found.operation == operation and found.is_backward == is_backward
    assert line_of(found) == marked_line(loss)
    assert cause in found.cause and found.rule == ""
    assert any(each.infs or each.nans for each in found.results)
    assert found.loss_scale is None and not found.given


def test_the_trips_of_loops_are_told():
    found = find(in_a_scan, HALF, HALF)
    ((trip, place),) = found.trips
    assert 2.0 ** (trip + 1) == 2.0**16 and "in_a_scan" in str(place)
    assert "trip       16 of the loop at " in str(found)
    (backward,) = find(in_a_scan_backward, HALF, HALF).trips
    assert 100 * 8.0 ** backward[0] < 65504 < 100 * 8.0 ** (backward[0] + 1)


def nested(w, x):
    def outer(carry, _):
        carry = jax.lax.fori_loop(0, 3, lambda i, c: c * (w + 1), carry)
        return carry, None

    return total(jax.lax.scan(outer, x, length=9)[0])


def test_also_those_of_loops_in_loops():
    found = find(nested, HALF, HALF)
    (outer, _), (inner, _) = found.trips
    assert 3 * outer + inner + 1 == 16


# What is infinite on purpose, or dropped, is nothing to report.
FINE = {
    "a mask of -inf": lambda w, x: total(jax.nn.softmax(w.at[0].set(-jnp.inf) * x)),
    "where -inf": lambda w, x: jax.nn.softmax(jnp.where(jnp.arange(3) > 1, w * x, -jnp.inf)).astype(
        F32
    )[2],
    "where -1e9 in float16": lambda w, x: jax.nn.softmax(
        jnp.where(jnp.arange(3) > 1, w * x, -1e9)
    ).astype(F32)[2],
    "a dropped log": lambda w, x: total(w * jnp.where(x > 2, jnp.log(x - x), 1)),
    "a maximum": lambda w, x: (w * x).max(initial=-jnp.inf).astype(F32),
    "logsumexp": lambda w, x: jax.nn.logsumexp((w * x).astype(F32)),
    "a saturated tanh": lambda w, x: jnp.tanh(w * x * 60000 * 2),
    "a comparison with another array": lambda w, x: (
        total(w) * jnp.where(jnp.any(w * x * 60000 * 2 != x), 1.0, 2.0)
    ),
    "a minimum in a loop": lambda w, x: total(
        jax.lax.fori_loop(0, 3, lambda i, m: jnp.minimum(m, w * x), jnp.full(3, jnp.inf, F16))
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", FINE)
def test_an_infinity_that_goes_nowhere_is_not_reported(loss):
    assert jmpx.inspect.first_nonfinite(FINE[loss])(HALF, HALF) is None


def test_of_two_causes_the_first_is_told():
    def loss(w, x):
        second = lambda: jnp.log(w - w)  # noqa: E731
        first = jnp.exp(w * 100)  # HERE
        return total(first + second())

    found = find(loss, HALF, HALF)
    assert found.operation == "exp"


def test_what_was_given_is_told_first(rng):
    def loss(params, batch):
        return ((batch["x"] @ params["w"]) ** 2).mean()

    params, batch = {"w": normal(rng, 3, 2)}, {"x": normal(rng, 4, 3)}
    assert jmpx.inspect.first_nonfinite(loss)(params, batch) is None
    for bad, kind in ((jnp.nan, "NaN"), (jnp.inf, "inf")):
        broken = {"w": params["w"].at[1, 1].set(bad)}
        found = find(loss, broken, batch)
        assert (found.given, found.kind, found.operation) == ("params['w']", kind, "")
        found = find(loss, params, {"x": batch["x"].at[0].set(bad)})
        assert found.given == "batch['x']" and found.results[0].nans + found.results[0].infs == 3


def test_a_constant_is_told_with_the_line_that_reads_it():
    table = np.array([1, np.nan, 2], np.float32)

    def loss(w):
        return (w * jnp.asarray(table)).sum()  # HERE

    found = find(loss, ONES)
    assert found.given == "a constant" and line_of(found) == marked_line(loss)


def layers(w, x):
    """Layers that are scanned: the second one overflows."""

    def layer(x, w):
        return jnp.maximum(x * w, 0), None  # HERE

    return total(jax.lax.scan(layer, x, w)[0])


def test_an_infinity_that_is_saved_for_the_backward_pass_is_told_where_it_was_made():
    def loss(w, x):
        def layer(x, w):
            return jnp.tanh((x * w) ** 3), None  # HERE

        return total(jax.lax.scan(layer, x, w)[0])

    found = find(loss, jnp.array([[8.0], [4e4], [1]], F16), 4 * HALF[:1])
    assert found.is_backward is False and line_of(found) == marked_line(loss)


def test_scanned_layers_tell_which_layer():
    found = find(layers, jnp.array([[8.0], [4e4], [1]], F16), 2 * HALF[:1])
    assert [trip for trip, _ in found.trips] == [1] and line_of(found) == marked_line(layers)
    assert [each.largest for each in found.operands] == [16, 4e4]


def test_inside_of_shard_map(rng):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")

    def body(w, x):
        return jax.lax.pmean(total(jnp.exp(x * w)), "d")  # HERE

    def loss(w, x):
        return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)

    x = np.array([1, 2, 3, 12], np.float16)  # the second device overflows
    found = find(loss, jnp.ones((), F16), x)
    assert found.operation == "exp" and line_of(found) == marked_line(body)
    assert found.operands[0].largest == 12 and found.operands[0].shape == (2,)
    assert jmpx.inspect.first_nonfinite(loss)(jnp.ones((), F16), x / 2) is None


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_of_one_device_is_found(bad):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")

    def body(x):
        return jax.lax.psum(jax.lax.scan(lambda sum, y: (sum + jnp.log(y), None), 0.0, x)[0], "d")

    x = np.array([1, 2, 3, 4], np.float32)
    x[2 * bad + 1] = -1
    fn = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False)
    found = jmpx.inspect.first_nonfinite(lambda x: [fn(x)])(x)
    assert found is not None
    assert (found.operation, found.kind) == ("log", "NaN")
    assert found.operands[0].largest == 1 and [trip for trip, _ in found.trips] == [1]


@pytest.mark.parametrize(
    ("dtype", "most"), [("float64", 700), ("complex128", 700), ("complex64", 80), ("bfloat16", 80)]
)
def test_numbers_of_any_width_are_finite_up_to_their_own_largest(dtype, most):
    with enable_x64():
        look = jmpx.inspect.first_nonfinite(lambda x: [jnp.exp(x)])
        assert look(jnp.array([1, most], dtype)) is None
        found = look(jnp.array([1, 1.2 * most], dtype))
        assert found is not None
        assert (found.operation, found.kind) == ("exp", "inf")
