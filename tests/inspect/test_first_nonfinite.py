"""Planted causes of infinities and NaNs are found, each on its line, and fixed by its rule."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F16, F32, ROOT, enable_x64, normal, run_python_blocks, zoo
from helpers.findings_of import line_of
from helpers.planted_layer import planted
from jax.sharding import PartitionSpec as P

import jmpx

ONES, HALF = jnp.ones(3), jnp.ones(3, F16)
look = jmpx.inspect.first_nonfinite


def total(x):
    return x.astype(F32).sum()


def find(fn, *args):
    """Returns the report, which must not be None."""
    found = look(fn)(*args)
    assert found is not None
    return found


def place_of(found):
    assert found.place is not None
    return found.place.line


# Causes: functions of two arrays of float16


def masked_rows(w, x):
    logits = jnp.where(x > 2, x * w, -1e9)  # <-
    return total(jax.nn.softmax(logits))


def in_a_scan(w, x):
    def body(carry, _):
        return carry * (w + 1), None  # <-

    return total(jax.lax.scan(body, x, length=20)[0])


def in_a_while_loop(w, x):
    def body(carry):
        count, carry = carry
        return count + 1, carry * (w + 1)  # <-

    return jax.lax.while_loop(lambda carry: carry[0] < 20, body, (0, x))[1]  # no loss


def in_a_scan_backward(w, x):
    def body(carry, _):
        return carry * 8, None  # <-

    return total(jax.lax.scan(body, w, length=4)[0]) * 100


@jax.custom_vjp
def own(x):
    return x


own.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent * 60000 * 60000,))
BEYOND = "beyond float16, whose largest number is 65504"
# The loss, a factor of x, the operation, whether the pass is backward, part of the cause.
PLANTED = [
    (lambda w, x: total(jnp.exp(x * w)), 12, "exp", False, BEYOND),
    (
        lambda w, x: total((x.astype(F32) * w.astype(F32) * 70000).astype(F16)),
        *(1, "convert_element_type", False, BEYOND),
    ),
    (masked_rows, 1, "convert_element_type", False, "It gives up to 1e+09, beyond float16"),
    (
        lambda w, x: total(jnp.where(w > 9, jnp.sqrt(w - 1), 0)),
        *(1, "div", False, "It divides by zero, here or in a derivative"),
    ),
    (
        lambda w, x: total(jax.nn.softmax(jnp.where(x > 2, x * w, -jnp.inf))),
        *(1, "sub", False, "It makes a NaN of intentional infinities"),
    ),
    (lambda w, x: total(jnp.log(w * (x - x))), 1, "log", False, "It reads zero or less"),
    (lambda w, x: total(jnp.sqrt(-w * x)), 1, "sqrt", False, "It reads less than zero"),
    (in_a_while_loop, 1, "mul", False, BEYOND),
    (
        lambda w, x: total(jax.checkpoint(lambda x: jnp.exp(x))(jax.jit(jnp.multiply)(x, w))),
        *(12, "exp", False, BEYOND),
    ),
    (
        lambda w, x: total(jax.lax.cond(x[0] > 0, lambda x: jnp.exp(x * 8), lambda x: x, x * w)),
        *(2, "exp", False, BEYOND),
    ),
    (lambda w, x: total(own(x * w) * 2), 1, "mul", True, BEYOND),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("loss", "factor", "operation", "is_backward", "cause"), PLANTED)
def test_a_planted_cause_is_found_on_its_line(loss, factor, operation, is_backward, cause):
    found = find(loss, HALF, HALF * factor)
    assert found.operation == operation and found.is_backward == is_backward
    assert place_of(found) == line_of(loss)
    assert cause in found.cause and found.rule == ""
    assert any(each.infs or each.nans for each in found.results)
    assert found.loss_scale is None and not found.given


# Layers that overflow in float16, for x of at least 1/16 and for some of its numbers.
OVERFLOWS = {
    "a product": lambda x: x @ jnp.full((4, 4), 6e4) @ jnp.full((4, 4), 6e4),
    "a cast": lambda x: (x.astype(F32) * 2e6).astype(F16),
    "a loop": lambda x: jax.lax.scan(lambda c, _: (c * 60, c), x.astype(F16), None, 5)[1].sum(0),
    "a while loop": lambda x: jax.lax.fori_loop(0, 5, lambda i, c: c * 60, x.astype(F16)),
    "a call": lambda x: jax.jit(lambda x: jax.nn.silu(x * 6e4) * 6e4)(x.astype(F16)),
    "a checkpoint": lambda x: jax.checkpoint(lambda x: jnp.exp(x + 9) * 6e4)(x.astype(F16)),
    "a branch": lambda x: jax.lax.cond(x.sum() > 0, lambda x: x * 6e4 * 60, abs, x.astype(F16)),
    "backward": lambda x: own(x.astype(F16)),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("by", ["operations", "arguments", "modules"])
@pytest.mark.parametrize("scale", [None, 2.0**34])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_what_the_first_operation_reads_is_finite(name, scale, by, rng):
    """Of arrays of thousands of numbers, too: XLA's maxima on CPUs drop NaNs from 4,096 on."""

    def layer(x):
        y = OVERFLOWS[name](x)
        y = jnp.where(jnp.isfinite(y), y, y - y)  # infinities become NaNs
        return (y @ jnp.ones((4, 4), F16) @ jnp.ones((4, 4), F16)).astype(F32)

    loss, (params, _) = planted("haiku", layer, None)
    x = 1 + abs(normal(rng, 2048, 4)) ** rng.integers(1, 4)
    params = jax.tree.map(lambda w: jnp.ones(w.shape, w.dtype), params)
    policy = f"by={by},c=f16"
    if scale is None:
        found = find(jmpx.apply_policy(loss, policy), params, x)
    else:
        step = lambda params, scale, x: jmpx.grad(loss, scale, policy=policy)(params, x)  # noqa: E731
        found = find(step, params, jmpx.DynamicLossScale(scale), x)
    assert found.operation and not any(each.is_broken for each in found.operands)
    assert any(each.is_broken for each in found.results)


def test_the_trips_of_loops_are_told():
    found = find(in_a_scan, HALF, HALF)
    ((trip, place),) = found.trips
    assert 2.0 ** (trip + 1) == 2.0**16 and "in_a_scan" in str(place)
    assert "trip       16 of the loop at " in str(found)
    data = json.loads(found.to_json())
    assert data["operation"] == "mul" and data["trips"][0]["trip"] == trip
    assert BEYOND in found.cause and not found.is_backward
    assert data["place"]["line"] == line_of(in_a_scan) == place_of(found)
    numbers = {"smallest": 2.0**15, "largest": 2.0**15, "nans": 0, "infs": 0}
    assert data["operands"][0] == {"dtype": "float16", "shape": [3], **numbers}
    assert data["results"][0]["infs"] == 3 and data["results"][0]["largest"] is None
    found = find(in_a_scan_backward, HALF, HALF)
    assert found.is_backward and place_of(found) == line_of(in_a_scan_backward)
    ((trip, _),) = found.trips
    assert 100 * 8.0**trip < 65504 < 100 * 8.0 ** (trip + 1)


def test_also_those_of_loops_in_loops():
    def nested(w, x):
        def outer(carry, _):
            return jax.lax.fori_loop(0, 3, lambda i, c: c * (w + 1), carry), None

        return total(jax.lax.scan(outer, x, length=9)[0])

    (outer, _), (inner, _) = find(nested, HALF, HALF).trips
    assert 3 * outer + inner + 1 == 16


# Numbers that are infinite on purpose, or dropped, are not reported.
FINE = {
    "a mask of -inf": lambda w, x: total(jax.nn.softmax(w.at[0].set(-jnp.inf) * x)),
    "where -1e9 in float16": lambda w, x: jax.nn.softmax(
        jnp.where(jnp.arange(3) > 1, w * x, -1e9)
    ).astype(F32)[2],
    "a maximum": lambda w, x: (w * x).max(initial=-jnp.inf).astype(F32),
    "a dropped log": lambda w, x: total(w * jnp.where(x > 2, jnp.log(x - x), 1)),
    "a comparison": lambda w, x: total(w) * jnp.where(jnp.any(w * x * 60000 * 2 != x), 1.0, 2.0),
    "a minimum in a loop": lambda w, x: total(
        jax.lax.fori_loop(0, 3, lambda i, m: jnp.minimum(m, w * x), jnp.full(3, jnp.inf, F16))
    ),
    "a saturated tanh": lambda w, x: jnp.tanh(w * x * 60000 * 2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", FINE)
def test_an_infinity_that_goes_nowhere_is_not_reported(loss):
    assert look(FINE[loss])(HALF, HALF) is None


@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit, jax.checkpoint])
def test_a_mask_made_of_constants_is_not_the_cause_of_what_overflows(around):
    def loss(w, x):
        mask = jnp.log(jnp.tril(jax.lax.iota("float32", 4)[:, None] + jnp.ones((4, 4))))
        scores = (1e3 * w) @ (1e3 * w).T  # <-
        return total(jax.nn.softmax(scores + mask) @ x)

    policy = jmpx.apply_policy(around(loss), "c=f16")
    square = jnp.full((4, 4), 0.5) + jnp.eye(4)
    found = jmpx.inspect.first_nonfinite(policy)(square, square)
    assert found is not None
    assert (found.operation, found.rule) == ("dot_general", "op.dot_general: f32")


def test_of_two_causes_the_first_is_told_whatever_jax_does_about_nans():
    def loss(w, x):
        second = lambda: jnp.log(w - w)  # noqa: E731
        first = jnp.exp(w * 100)  # <-
        return total(first + second())

    with jax.debug_nans(True), jax.debug_infs(True):
        assert find(loss, HALF, HALF).operation == "exp"


def test_what_was_given_is_told_first(rng):
    def loss(params, batch):
        return ((batch["x"] @ params["w"]) ** 2).mean()

    params, batch = {"w": normal(rng, 3, 2)}, {"x": normal(rng, 4, 3)}
    assert look(loss)(params, batch) is None
    for bad, kind in ((jnp.nan, "NaN"), (jnp.inf, "inf")):
        broken = {"w": params["w"].at[1, 1].set(bad)}
        found = find(loss, broken, batch)
        assert (found.given, found.kind, found.operation) == ("params['w']", kind, "")
        found = find(loss, params, {"x": batch["x"].at[0].set(bad)})
        assert found.given == "batch['x']" and found.results[0].nans + found.results[0].infs == 3


def test_a_constant_is_told_with_the_line_that_reads_it():
    table = np.array([1, np.nan, 2], np.float32)

    def loss(w):
        return (w * jnp.asarray(table)).sum()  # <-

    found = find(loss, ONES)
    assert found.given == "a constant" and place_of(found) == line_of(loss)


@pytest.mark.thorough
@pytest.mark.parametrize("is_saved", [False, True])
def test_scanned_layers_tell_which_layer(is_saved):
    """Also if the infinity is saved for the backward pass, or no number of a loss has it."""

    def layers(w, x):
        def layer(x, w):
            return jnp.tanh((x * w) ** 3) if is_saved else jnp.maximum(x * w, 0), None  # <-

        return total(jax.lax.scan(layer, x, w)[0])

    found = find(layers, jnp.array([[8.0], [4e4], [1]], F16), (4 if is_saved else 2) * HALF[:1])
    assert found.is_backward is False and place_of(found) == line_of(layers)
    if not is_saved:
        assert [trip for trip, _ in found.trips] == [1]
        assert [each.largest for each in found.operands] == [16, 4e4]


def test_inside_of_shard_map():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")

    def body(w, x):
        return jax.lax.pmean(total(jnp.exp(x * w)), "d")  # <-

    def loss(w, x):
        return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)

    x = np.array([1, 2, 3, 12], np.float16)  # the second device overflows
    found = find(loss, jnp.ones((), F16), x)
    assert found.operation == "exp" and place_of(found) == line_of(body)
    assert found.operands[0].largest == 12 and found.operands[0].shape == (2,)
    assert look(loss)(jnp.ones((), F16), x / 2) is None


def test_a_nan_of_one_device_is_found():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")

    def body(x):
        return jax.lax.psum(jax.lax.scan(lambda sum, y: (sum + jnp.log(y), None), 0.0, x)[0], "d")

    x = np.array([1, -1, 3, 4], np.float32)
    fn = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False)
    found = find(lambda x: [fn(x)], x)
    assert (found.operation, found.kind) == ("log", "NaN")
    assert found.operands[0].largest == 1 and [trip for trip, _ in found.trips] == [1]


@pytest.mark.parametrize(("dtype", "most"), [("complex128", 700), ("bfloat16", 80)])
def test_numbers_of_any_width_are_finite_up_to_their_own_largest(dtype, most):
    with enable_x64():
        assert look(lambda x: [jnp.exp(x)])(jnp.array([1, most], dtype)) is None
        found = find(lambda x: [jnp.exp(x)], jnp.array([1, 1.2 * most], dtype))
        assert (found.operation, found.kind) == ("exp", "inf")


def test_numbers_of_operands_are_counted(rng):
    x = np.array(normal(rng, 50))
    x[0] = 0.125
    found = find(lambda w, x: jnp.log(w * x).mean(), jnp.ones(50), x)
    (operand,) = found.operands
    expected = [np.abs(x).min(), np.abs(x).max()]
    np.testing.assert_allclose([operand.smallest or 0, operand.largest or 0], expected, rtol=1e-6)
    assert found.kind == "NaN" and found.results[0].nans == (x < 0).sum()


def test_the_report_fits_the_terminal():
    found = find(masked_rows, HALF, HALF)
    lines = str(found).splitlines()
    assert lines[0] == "convert_element_type makes an infinity in the forward pass"
    assert max(map(len, lines[2:])) <= 79
    names = [line[2:13].strip() for line in lines[1:] if line[2:13].strip()]
    assert names == ["at", "operand", "result", "cause"]


def test_nothing_is_printed_and_nothing_raises(capfd):
    def loss(w, x):
        jax.debug.print("{}", w)
        return total(w * x)

    assert look(loss)(HALF, HALF) is None
    jax.effects_barrier()
    assert "[" not in capfd.readouterr().out


# Rules: each is pasted into the program's policy, and fixes it


def saturated(w, x):
    return -jnp.mean(jnp.log(1 - jax.nn.sigmoid(x @ w)))


def readout(w, x):
    with jax.named_scope("readout"):
        return jnp.mean(jnp.exp(x * w[0]) / 1000)


def layer_in_a_scan(w, x):
    def layer(x, _):
        with jax.named_scope("layer"):
            return jnp.exp(x * w[0]) / 1e5, None

    return jnp.mean(jax.lax.scan(layer, x, length=2)[0])


def written_in_float16(w, x):
    return jnp.exp((x @ w).astype(F16)).astype(F32).sum()


WIDE, TALL = jnp.full((4, 4), 3.0), jnp.ones((2, 4))
# A function, the policy map, the scope, the rule that fixes it, and the end of the cause.
UNDER_AUTOCAST = [
    # The result of log is infinite in float32, too: the cause is that logistic rounds to 1.
    (saturated, "c=bf16; op.logistic: bf16", "", "op.logistic: f32", "numbers that 16 bits lost"),
    (layer_in_a_scan, "c=f16; op.exp: f16", "layer", "*/layer: f32", ""),
    # Autocast makes nothing wider than the code has it, and plain code has no rules.
    (
        *(written_in_float16, "c=f16; op.exp: f16", "", ""),
        "In float32 it is finite, but no rule mends it: cast what it reads with",
    ),
    (written_in_float16, None, "", "", "In float32 it is finite: cast what it reads with"),
]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("fn", "policy", "scope", "rule", "cause"), UNDER_AUTOCAST)
def test_the_rule_for_autocast_is_replayed(fn, policy, scope, rule, cause):
    args = WIDE, TALL * (1 if fn is saturated else 4)
    found = find(fn if policy is None else jmpx.autocast(fn, policy), *args)
    assert (found.scope, found.rule) == (scope, rule) and cause in found.cause
    assert fn is not saturated or found.operation == "log"
    assert not rule or look(jmpx.autocast(fn, f"{policy}; {rule}"))(*args) is None


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("framework", "rule"),
    [
        ("haiku", "*/plant: f32"),  # a call that returns the output dtype of the map
        ("equinox", "*/plant: c=f32,o=f32"),  # its result is beyond float16, too
    ],
)
def test_the_rule_for_a_module_is_replayed(framework, rule):
    def found(policy):
        loss, (model, x) = planted(framework, lambda x: x * x, policy)
        model = jax.tree.map(lambda x: jnp.full(x.shape, 6.0, x.dtype), model)
        return look(loss)(model, 12 * x)

    policy = "c=f16,o=f32; */head: c=f32,o=f32"
    first = found(policy)
    assert first is not None and first.rule == rule
    assert first.scope.endswith("plant") and first.policy
    assert found(f"{policy}; {rule}") is None


def test_a_rule_that_moves_the_overflow_is_not_the_one_that_mends_it():
    x, policy = jnp.ones((2, 3)), "p=f32,c=f16,o=f32"
    net = zoo.build("haiku", zoo.nested, x)
    # first: 144, inner: 27,648, outer, after a tanh: 240, head: 69,120
    model = jax.tree.map(lambda x: jnp.full_like(x, 48 if x.ndim > 1 else 0), net.model)
    loss = lambda policy: lambda model: total(net.under(policy)(model, x)) / 1000  # noqa: E731
    found = find(loss(policy), model)
    assert found.scope.endswith("head") and found.operation == "dot_general"
    assert found.policy and found.rule.endswith("head: c=f32,o=f32")
    assert look(loss(f"{policy}; {found.rule}"))(model) is None


# Loss scales


def scaled_loss(params, x):
    half = x.astype(F16) @ params["w"].astype(F16)
    return (half.astype(F32) ** 2).mean()  # <-


def step(params, loss_scale, x):
    gradients = jmpx.value_and_grad(scaled_loss, loss_scale, policy="by=arguments,c=f16")
    loss, loss_scale, finite, grads = gradients(params, x)
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.1))
    updates, _ = optimizer.update(grads, optimizer.init(params), params, grads_finite=finite)
    return optax.apply_updates(params, updates), loss_scale, loss


PARAMS, X = {"w": jnp.ones((8, 3))}, jnp.ones((4, 8))


def finite_at(scale):
    return bool(jax.jit(step)(PARAMS, jmpx.DynamicLossScale(scale), X)[1].loss_scale >= scale)


def test_a_skipped_step_of_a_large_scale_is_told_with_the_scale_that_works():
    params, *_ = jax.jit(step)(PARAMS, jmpx.DynamicLossScale(2**18), X)
    assert bool(jmpx.all_finite(params))  # the step was skipped: its results tell nothing
    found = find(step, PARAMS, jmpx.DynamicLossScale(2**18), X)
    assert found.is_backward and found.loss_scale == 2**18 and not found.is_at_floor
    assert line_of(scaled_loss) - place_of(found) in (0, 1)
    lower = jmpx.get_loss_scale(found.rule)
    working = float(lower.loss_scale)
    assert np.frexp(working)[0] == 0.5  # to the last digit
    assert finite_at(working) and not finite_at(2 * working)
    assert look(step)(PARAMS, lower, X) is None


@pytest.mark.parametrize("scales", [[2.0**18], [2.0**10, 2.0**18, 2.0**12]])
def test_a_stack_of_scales_is_lowered_as_one_is(scales):
    scales = jnp.array(scales)
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * len(scales)), tree)  # noqa: E731
    stacked = jax.vmap(jmpx.DynamicLossScale)(scales), stack(X)
    found = find(jax.vmap(step), stack(PARAMS), *stacked)
    one = find(step, PARAMS, jmpx.DynamicLossScale(scales.max()), X)
    assert (found.rule, found.cause, found.loss_scale) == (one.rule, one.cause, one.loss_scale)


def test_a_large_scale_is_found_beside_a_model(rng):
    x = normal(rng, 2, 3)
    net = zoo.build("nnx", zoo.mlp, x, rng=rng)

    def loss_fn(model, x):
        return jnp.mean(net.apply(model, x).astype(F32) ** 2)

    def step(model, scale, x):
        return jmpx.grad(loss_fn, scale, policy="by=modules,c=f16,o=f32")(model, x)

    found = find(step, net.model, jmpx.DynamicLossScale(2.0**40), x)
    assert found.is_backward and found.loss_scale == 2.0**40
    assert look(step)(net.model, jmpx.get_loss_scale(found.rule), x) is None


def test_a_scale_that_is_closed_over_is_mentioned():
    scale = jmpx.DynamicLossScale(jnp.float32(2**18))
    found = find(lambda params, x: step(params, scale, x), PARAMS, X)
    assert found.is_backward and found.loss_scale is None
    assert "lower the loss scale if there is one: a jmpx.DynamicLossScale" in found.cause


def test_a_jitted_step_that_donates_keeps_its_arguments():
    donating = jax.jit(step, donate_argnums=(0, 1))
    found = find(donating, PARAMS, jmpx.DynamicLossScale(2**18), X)
    assert found.rule == "dynamic,init=8192" and PARAMS["w"].sum() == 24


@pytest.mark.parametrize("scale", [1, 2**10])
def test_an_overflow_at_the_floor_is_told(scale):
    found = find(step, PARAMS, jmpx.DynamicLossScale(scale), X * 10000)
    assert (found.operation, found.is_backward) == ("dot_general", False)
    assert found.is_at_floor and found.loss_scale == 1 and "1, its floor" in str(found)
    assert found.rule == "" and "In float32 it is finite: cast what it reads" in found.cause


def test_a_rule_at_the_floor_of_the_scale_is_replayed_there():
    def step(w, scale, x):
        fn = jmpx.autocast(readout, "c=f16; op.exp: f16")
        return jmpx.value_and_grad(fn, scale, policy="full")(w, x)

    found = find(step, WIDE, jmpx.DynamicLossScale(2.0**10), 4 * TALL)
    assert (found.rule, found.is_at_floor) == ("*/readout: f32", True)


@pytest.mark.thorough
def test_the_page_of_nan_runs_and_its_report_is_real():
    page = ROOT / "docs" / "nonfinite.md"
    names = run_python_blocks(page)
    (report,) = re.findall(r"^```text\n(.*?)\n```$", page.read_text(), re.MULTILINE | re.DOTALL)
    without_place = lambda text: re.sub(r"at  .*\(", "at (", text)  # noqa: E731
    assert without_place(str(names["found"])) == without_place(report)
