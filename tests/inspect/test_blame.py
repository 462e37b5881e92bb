"""`blame`: shares of an error, against runs in which one group rounds, or all but one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.planted_layer import FRAMEWORKS, drawn_model, planted

import jmpx
from jmpx._inspect.blame.api import blamed_runs, group_names
from jmpx._inspect.graph import Graph

BATCHES = 8
ARGUMENTS = "by=arguments,c=bf16,o=f32"
POLICY = "by=operations,c=bf16"


def mlp(params, x):
    for index, w in enumerate(params):
        with jax.named_scope(f"layer{index}"):
            x = x + jnp.tanh(x @ w)
    return x


def attention(params, x):
    q, k, v = (x @ w for w in params)
    with jax.named_scope("scores"):
        scores = q @ k.T / x.shape[-1] ** 0.5
    with jax.named_scope("mix"):
        return jax.nn.softmax(scores) @ v


def scanned(params, x):
    def body(x, w):
        with jax.named_scope("product"):
            y = x @ w
        with jax.named_scope("sum"):
            return x + jnp.sin(y), None

    return jax.lax.scan(body, x, jnp.stack(params))[0]


def normed(params, x):
    for index, w in enumerate(params):
        with jax.named_scope(f"norm{index}"):
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        with jax.named_scope(f"gelu{index}"):
            x = jax.nn.gelu(x @ w)
    return x


def remat(params, x):
    for index, w in enumerate(params):
        with jax.named_scope(f"layer{index}"):
            x = x + jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T)(x, w)
    return x


MODELS = [mlp, attention, scanned, normed, remat]


def loss_of(model):
    def loss_fn(params, x, y):
        difference = model(params, x).astype(jnp.float32) - y
        return jnp.mean(difference**2)

    return loss_fn


def drawn(rng, model=None):
    """Batches: of a loss, or of a model alone."""
    params = [jnp.asarray(rng.normal(size=(32, 32)) / 6, jnp.float32) for _ in range(3)]
    data = [jnp.asarray(rng.normal(size=(2, 48, 32)), jnp.float32) for _ in range(BATCHES)]
    return [(params, *xy) if model is None else (params, xy[0]) for xy in data]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [POLICY, "by=operations,c=f16,o=f16"])
@pytest.mark.parametrize("is_loss", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_shares_explain_the_error_and_are_those_of_one_line_at_a_time(rng, model, is_loss, policy):
    func, batches = (loss_of(model), drawn(rng)) if is_loss else (model, drawn(rng, model))
    report = jmpx.inspect.blame(func, policy, by="lines")(*batches)
    assert 0.75 < report.explained < 1.25
    program, runs = blamed_runs(func, policy, batches)
    names = np.array(group_names(Graph(program), runs.points, "lines"))
    everywhere = np.ones(len(names), bool)
    assert np.isclose(runs.squared(everywhere) ** 0.5, report.error, rtol=1e-3)
    # A constant such as the root of 32 was rounded when it was traced, whatever the mask.
    assert runs.squared(~everywhere) < report.error**2 / 10
    alone = np.array([runs.squared(names == row.name) for row in report.rows])
    shares = np.array([row.share for row in report.rows]) / report.explained
    assert 0.5 * np.abs(shares - alone / alone.sum()).sum() <= 0.15


@pytest.mark.parametrize("model", MODELS)
def test_rounded_runs_are_those_of_emulate(rng, model):
    batches = drawn(rng, model)
    expected = jax.jit(jmpx.inspect.emulate(jmpx.apply_policy(model, POLICY)))(*batches[0])
    _, runs = blamed_runs(model, POLICY, batches[:1])
    (found,), _ = runs.points.rounded(lambda array: array, runs.batches[0].arrays)
    # By the order of float32 sums, and by powers, whose factors are rounded one after the other.
    assert np.mean(found != expected) < (0.1 if model is normed else 0.01)
    limit = 5e-3 if model is normed else 1e-3
    assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected)


def test_a_sum_of_one_number_is_measured_and_its_errors_add_up():
    def total(x):
        def body(total, _):
            return total + x, None

        return jax.lax.scan(body, jnp.zeros_like(x), None, 1000)[0]

    x = jnp.full((1,), 0.1, jnp.bfloat16)
    report = jmpx.inspect.blame(total)((x,))
    exact = 1000 * float(x[0])
    written = float(jax.jit(jmpx.inspect.emulate(total))(x)[0])
    assert written - exact < -60  # the sum stays at 32
    assert np.isclose(report.error, abs(written - exact) / exact, rtol=1e-4)
    (row,) = report.rows
    assert (row.operation, row.is_measured) == ("add", True)
    assert np.isclose(row.share, 1)
    assert "one number" in str(report).lower()
    # The local errors of the rounded run sum to the error of the result.
    _, runs = blamed_runs(total, None, [(x,)])
    _, errors = runs.points.rounded(lambda array: array, runs.batches[0].arrays, keep=True)
    ((local,),) = errors.values()
    assert local.shape == (1000, 1)
    assert np.isclose(np.asarray(local, np.float64).sum(), written - exact, rtol=0.01)


def test_what_is_in_a_while_loop_is_measured(rng):
    def repeated(w, x):
        w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)

        def body(state):
            with jax.named_scope("inside"):
                return jnp.tanh(state[0] @ w), state[1] + 1

        state = jax.lax.while_loop(lambda state: state[1] < 3, body, (x, 0))
        with jax.named_scope("outside"):
            return state[0] * 3

    batches = [tuple(jnp.asarray(rng.normal(size=(2, 8, 8)), jnp.float32)) for _ in range(2)]
    report = jmpx.inspect.blame(repeated)(*batches)
    assert {"inside", "outside"} < {row.name for row in report.rows}
    assert all(row.is_measured for row in report.rows)
    assert "while loop" in str(report)


def cancelled(x):
    return (x + 100) - 100


def by_moments(x):
    x = x + 20
    return x - ((x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2)


def near_one(x):
    return jnp.log(1 + 0.01 * jnp.exp(x / 4))


def added_up(x):
    def body(total, _):
        return total + jnp.asarray(0.07, x.dtype), None

    return jax.lax.scan(body, x, None, 400)[0]


def squares(x):
    return (x + 50) ** 2 - x * x - 2500


PLANTS = [cancelled, by_moments, near_one, added_up, squares]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_layer_ranks_first(rng, framework, dtype, plant):
    loss, (model, x) = planted(framework, plant, f"c={dtype},o={dtype}", rows=8)
    model = drawn_model(model, rng)
    batches = [(model, jnp.asarray(rng.normal(size=x.shape), jnp.float32)) for _ in range(BATCHES)]
    program, runs = blamed_runs(loss, None, batches)
    names = np.array(group_names(Graph(program), runs.points, "modules"))
    without = runs.squared(np.array(["plant" not in name for name in names]))
    assert without < runs.squared(np.ones(len(names), bool)) / 2  # it is a plant
    report = jmpx.inspect.blame(loss, by="modules")(*batches)
    assert "plant" in report.rows[0].name, report
    assert report.rows[0].rule.endswith("plant: full"), report


def test_kinks_of_a_gradient_are_measured(rng):
    def kinked(params, x):
        for index, w in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                x = jax.nn.relu(x @ w) * 2
        return x

    report = jmpx.inspect.blame(loss_of(kinked), POLICY)(*drawn(rng))
    assert all(row.is_measured for row in report.rows)
    assert "kinks of relu" in str(report)
    assert 0.5 < report.explained < 1.5


def test_turns_of_a_scan_are_one_line(rng):
    report = jmpx.inspect.blame(scanned, POLICY)(*drawn(rng, scanned))
    assert {"product", "sum"} <= {row.name for row in report.rows}
    sizes = {row.name: row.size for row in report.rows}
    assert sizes["product"] >= 3 * (48 * 32 + 32 * 32)  # the results and the weights


def test_the_error_is_that_against_float32_without_the_policy(rng):
    def thirds(x):
        return x / 3 + jnp.asarray(0.1, x.dtype)

    x = jnp.asarray(rng.normal(size=100), jnp.float32)
    report = jmpx.inspect.blame(thirds, ARGUMENTS)((x,))
    written = jax.jit(jmpx.inspect.emulate(jmpx.apply_policy(thirds, ARGUMENTS)))(x)
    expected = np.linalg.norm(written - thirds(x)) / np.linalg.norm(thirds(x))
    assert np.isclose(report.error, expected, rtol=1e-3)


def test_seeds(rng):
    batches = drawn(rng)
    run = jmpx.inspect.blame(loss_of(mlp), POLICY)
    assert run(*batches) == run(*batches)
    assert run(*batches) != jmpx.inspect.blame(loss_of(mlp), POLICY, seed=1)(*batches)


def test_the_report(rng, tmp_path):
    batches = drawn(rng)
    report = jmpx.inspect.blame(loss_of(mlp), POLICY)(*batches)
    data = json.loads(report.to_json())
    assert data["rows"][0]["name"] == report.rows[0].name
    assert "over 8 batches" in str(report)
    assert report.to_html().count("<tr>") == len(report.rows) + 1
    report.plot(tmp_path / "blame.png")
    assert (tmp_path / "blame.png").stat().st_size > 5000
    assert report.check(at_most=1) is report
    with pytest.raises(AssertionError, match=r"off by at most 1e-06, got .* of which layer"):
        report.check(at_most=1e-6)
    better = jmpx.inspect.blame(loss_of(mlp), f"{POLICY}; layer0: full")(*batches)
    lines = better.diff(data).splitlines()
    assert "before" in lines[0]
    assert any(line.startswith("layer0") for line in lines)
    assert better.diff(report) == better.diff(data)


def passing(x):
    return x * 2


X = jnp.ones(3)
BAD = [
    (lambda: jmpx.inspect.blame(passing, by="files"), "Expected by= to be one of"),
    (lambda: jmpx.inspect.blame(passing, of="loss"), "Expected of= to be 'gradients'"),
    (lambda: jmpx.inspect.blame(passing)(), "Expected batches, got none"),
    (lambda: jmpx.inspect.blame(passing)(X), "Expected batches that are tuples"),
    (lambda: jmpx.inspect.blame(passing, "c=f32")((X,)), "computes nothing in 16 bits"),
    (lambda: jmpx.inspect.blame(passing)((X,)), "give a policy"),
    (lambda: jmpx.inspect.blame(passing, POLICY)((X,), (X[:2],)), "others in batch 1"),
    (lambda: jmpx.inspect.blame(passing, POLICY)((jnp.arange(3),)), "no|No"),
    (
        lambda: jmpx.inspect.blame(jnp.log, ARGUMENTS)((-X,)),
        "finite in float32, got .* first by log at",
    ),
    (
        lambda: jmpx.inspect.blame(passing, "by=arguments,c=f16")((X * 6e4,)),
        "in 16 bits, got .* first by mul at",
    ),
    (lambda: jmpx.inspect.blame(None)((X,)), "function"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.parametrize(("call", "match"), BAD)
def test_bad_input(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def test_shapes_are_refused():
    with pytest.raises(TypeError, match=r"jmpx\.inspect\.blame runs it"):
        jmpx.inspect.blame(passing, POLICY)((jax.ShapeDtypeStruct((3,), "float32"),))
