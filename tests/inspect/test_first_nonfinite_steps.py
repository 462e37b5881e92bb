"""Steps with loss scales, modules of all frameworks, and the report of what is found."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F16, F32, ROOT, normal, run_python_blocks
from helpers.four_frameworks import FRAMEWORKS
from helpers.nonfinite import HALF, find, line_of, marked_line, total

import jmpx

ONES = jnp.ones(3)


def overflowing_exp(w, x):
    return total(jnp.exp(x * w))  # HERE


def masked_rows(w, x):
    logits = jnp.where(x > 2, x * w, -1e9)  # HERE
    return total(jax.nn.softmax(logits))


def in_a_scan(w, x):
    def body(carry, _):
        return carry * (w + 1), None  # HERE

    return total(jax.lax.scan(body, x, length=20)[0])


# Loss scales


def scaled_loss(params, x):
    half = x.astype(F16) @ params["w"].astype(F16)
    return (half.astype(F32) ** 2).mean()  # HERE


def step(params, loss_scale, x):
    gradients = jmpx.filter_value_and_grad(scaled_loss, loss_scale)
    loss, loss_scale, finite, grads = gradients(params, x)
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.1))
    updates, _ = optimizer.update(grads, optimizer.init(params), params, grads_finite=finite)
    return optax.apply_updates(params, updates), loss_scale, loss


PARAMS, X = {"w": jnp.ones((8, 3))}, jnp.ones((4, 8))


def finite_at(scale, x):
    made = jmpx.DynamicLossScale(scale, min_loss_scale=2.0**-14)
    return bool(jax.jit(step)(PARAMS, made, x)[1].loss_scale >= scale)


@pytest.mark.parametrize(
    ("factor", "large", "low"),
    [
        (1, 2**18, 1),
        pytest.param(2**-8, 2**30, 1, marks=pytest.mark.thorough),
        pytest.param(2**12, 2, 2**-14, marks=pytest.mark.thorough),
    ],
)
def test_a_skipped_step_of_a_large_scale_is_told_with_the_scale_that_works(factor, large, low):
    scale = jmpx.DynamicLossScale(large, min_loss_scale=low)
    params, *_ = jax.jit(step)(PARAMS, scale, X * factor)
    assert bool(jmpx.all_finite(params))  # the step was skipped: its results tell nothing
    found = find(step, PARAMS, scale, X * factor)
    assert found.is_backward and found.loss_scale == large and not found.is_at_floor
    assert marked_line(scaled_loss) - line_of(found) in (0, 1)
    lower = jmpx.get_loss_scale(found.rule)
    working = float(lower.loss_scale)
    assert np.frexp(working)[0] == 0.5  # to the last digit
    assert finite_at(working, X * factor) and not finite_at(2 * working, X * factor)
    assert jmpx.inspect.first_nonfinite(step)(PARAMS, lower, X * factor) is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("policy", ["by=modules,c=f16,o=f32", "by=operations,c=f16"])
def test_a_large_scale_is_found_beside_a_model_of_each_framework(framework, policy):
    run, model, *_ = FRAMEWORKS[framework]
    x = normal(np.random.default_rng(0), 2, 3)

    def loss_fn(model, x):
        return jnp.mean(run(model, x).astype(jnp.float32) ** 2)

    def step(model, scale, x):
        return jmpx.filter_grad(loss_fn, scale, policy=policy)(model, x)

    found = find(step, model, jmpx.DynamicLossScale(2.0**40), x)
    lower = jmpx.get_loss_scale(found.rule)
    assert found.is_backward and found.loss_scale == 2.0**40
    assert jmpx.inspect.first_nonfinite(step)(model, lower, x) is None


@pytest.mark.parametrize(
    "scale", [jmpx.StaticLossScale(2**18), jmpx.DynamicLossScale(jnp.float32(2**18))]
)
def test_a_scale_that_is_closed_over_is_mentioned(scale):
    found = find(lambda params, x: step(params, scale, x), PARAMS, X)
    assert found.is_backward and found.loss_scale is None
    assert "lower the loss scale if there is one: a jmpx.DynamicLossScale" in found.cause


def test_a_jitted_step_that_donates_keeps_its_arguments():
    donating = jax.jit(step, donate_argnums=(0, 1))
    found = find(donating, PARAMS, jmpx.DynamicLossScale(2**18), X)
    assert found.rule == "dynamic,init=8192" and PARAMS["w"].sum() == 24


def test_settings_that_stop_at_nans_do_not_stop_it():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert find(overflowing_exp, HALF, 12 * HALF).operation == "exp"


@pytest.mark.parametrize("scale", [1, 2**10])
def test_an_overflow_at_the_floor_is_told(scale):
    found = find(step, PARAMS, jmpx.DynamicLossScale(scale), X * 10000)
    assert (found.operation, found.is_backward) == ("dot_general", False)
    assert found.is_at_floor and found.loss_scale == 1 and "1, its floor" in str(found)
    assert found.rule == "" and "In float32 it is finite: cast what it reads" in found.cause


# Frameworks

HALF_INSIDE = "p=f32,c=f16,o=f32"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_module_is_named_and_its_rule_mends_it(framework):
    _, model, with_policies, _ = FRAMEWORKS[framework]
    # first: 144, inner: 27,648, outer, after a tanh: 240, head: 69,120
    model = jax.tree.map(lambda x: jnp.full_like(x, 48 if x.ndim > 1 else 0), model)

    def run(policy):
        net = with_policies(policy)
        loss = lambda model, x: total(net(model, x)) / 1000  # noqa: E731
        return jmpx.inspect.first_nonfinite(loss)(model, jnp.ones((2, 3)))

    found = run(HALF_INSIDE)
    assert found is not None and found.scope.endswith("head")
    assert found.operation == "dot_general"
    assert found.policy and found.rule.endswith("head: c=f32,o=f32")
    assert run(f"{HALF_INSIDE}; {found.rule}") is None
    assert (
        jmpx.inspect.first_nonfinite(lambda m, x: total(with_policies("c=f32")(m, x)))(
            model, jnp.ones((2, 3))
        )
        is None
    )


def test_under_autocast_the_rule_of_the_operation_mends_it():
    def loss(w, x):
        return jnp.exp(x * w).sum()

    def run(policy):
        cast = jmpx.autocast(loss, policy=policy)
        return jmpx.inspect.first_nonfinite(cast)(ONES, 12 * ONES)

    found = run("compute=f16; op.exp: f16")
    assert found is not None and found.rule == "op.exp: f32"
    assert run(f"compute=f16; {found.rule}") is None


def test_a_named_scope_is_selected_by_its_name():
    def loss(w, x):
        with jax.named_scope("readout"):
            return total(jnp.exp(x * w))

    found = find(loss, HALF, 12 * HALF)
    assert found.scope == "readout" and found.rule == ""
    found = find(jmpx.autocast(loss, "c=f16; op.exp: f16"), ONES, 12 * ONES)
    assert found.scope == "readout" and found.rule == "*/readout: f32"


# The report


def test_the_report_fits_the_terminal():
    found = find(masked_rows, HALF, HALF)
    lines = str(found).splitlines()
    assert lines[0] == "convert_element_type makes an infinity in the forward pass"
    assert max(map(len, lines[2:])) <= 79
    names = [line[2:13].strip() for line in lines[1:] if line[2:13].strip()]
    assert names == ["at", "operand", "result", "cause"]


def test_the_report_is_data():
    found = find(in_a_scan, HALF, HALF)
    data = json.loads(found.to_json())
    assert data["operation"] == "mul" and data["trips"][0]["trip"] == 15
    assert data["place"]["line"] == marked_line(in_a_scan)
    assert data["operands"][0] == {
        "dtype": "float16",
        "shape": [3],
        "smallest": 2.0**15,
        "largest": 2.0**15,
        "nans": 0,
        "infs": 0,
    }
    assert data["results"][0]["infs"] == 3 and data["results"][0]["largest"] is None
    with pytest.raises(AttributeError):
        found.rule = ""  # pyright: ignore[reportAttributeAccessIssue]


def test_numbers_of_operands_are_counted(rng):
    x = np.array(normal(rng, 50))
    x[0] = 0.125
    found = find(lambda w, x: jnp.log(w * x).mean(), jnp.ones(50), x)
    (operand,) = found.operands
    magnitudes = np.abs(x)
    expected = [magnitudes.min(), magnitudes.max()]
    np.testing.assert_allclose([operand.smallest or 0, operand.largest or 0], expected, rtol=1e-6)
    assert found.kind == "NaN" and found.results[0].nans == (x < 0).sum()


# Bad arguments


def test_a_function_is_expected():
    with pytest.raises(TypeError, match="Expected a loss or a train step to look at, got 3: pass"):
        jmpx.inspect.first_nonfinite(3)()  # pyright: ignore[reportArgumentType]


def test_arrays_are_expected():
    shape = jax.ShapeDtypeStruct((3,), "float16")
    with pytest.raises(TypeError, match="got a shape as x: jmpx.inspect.first_nonfinite runs it"):
        jmpx.inspect.first_nonfinite(overflowing_exp)(HALF, shape)
    with pytest.raises(TypeError, match="Cannot look at the traced w: call"):
        jax.jit(lambda w, x: bool(jmpx.inspect.first_nonfinite(overflowing_exp)(w, x)))(HALF, HALF)


def test_nothing_is_printed_and_nothing_raises(capfd):
    def loss(w, x):
        jax.debug.print("{}", w)
        return total(w * x)

    assert jmpx.inspect.first_nonfinite(loss)(HALF, HALF) is None
    jax.effects_barrier()
    assert "[" not in capfd.readouterr().out


@pytest.mark.thorough
def test_the_page_runs_and_its_report_is_real():
    page = ROOT / "docs" / "nonfinite.md"
    names = run_python_blocks(page)
    (report,) = re.findall(r"^```text\n(.*?)\n```$", page.read_text(), re.MULTILINE | re.DOTALL)
    without_place = lambda text: re.sub(r"at  .*\(", "at (", text)  # noqa: E731
    assert without_place(str(names["found"])) == without_place(report)
