"""Policy maps through Linen's lifted transformations, and of state that loops carry."""

# Flax types the result of `apply` as a union with the state that it updated.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, dtypes, normal
from helpers.jaxprs import dots
from helpers.linen import Watched, cast, init, under

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")

X, XS = normal(np.random.default_rng(0), 3, 4), normal(np.random.default_rng(0), 2, 5, 4)
SHARED = {"variable_broadcast": "params", "split_rngs": {"params": False}}


def assert_close(ours, full, **tolerance):
    for got, expected in zip(*map(jax.tree.leaves, (ours, full)), strict=True):
        assert got.dtype == F32
        np.testing.assert_allclose(got, expected, **tolerance)


@pytest.mark.parametrize(("train", "rules"), [(True, ""), (True, "; BatchNorm: full"), (False, "")])
def test_batch_norm(rng, log, train, rules):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Watched(name="before")(x)
            return Watched(name="after")(nn.BatchNorm(not train, name="norm")(x))

    x = normal(rng, 16, 4)
    variables = init(rng, Net(), x)
    stats = jax.tree.map(lambda a: jnp.abs(normal(rng, *a.shape)) + 1, variables["batch_stats"])
    variables["batch_stats"] = stats

    def by_hand(variables):
        params, dtype = variables["params"], F32 if rules else BF16
        h = (x.astype(BF16) @ cast(params["before"]["w"], BF16)).astype(dtype)
        own = {"params": cast(params["norm"], dtype), "batch_stats": stats["norm"]}
        h, updates = nn.BatchNorm(not train).apply(own, h, mutable=["batch_stats"])
        y = (h.astype(BF16) @ cast(params["after"]["w"], BF16)).astype(F32)
        return y, {"batch_stats": {"norm": updates["batch_stats"]}}

    run = under(MIXED + rules, Net(), x, mutable=["batch_stats"])
    ours, hand = jax.jit(lambda v: (run(v), by_hand(v)))(variables)
    assert log == [(name, "bfloat16", "bfloat16") for name in ("before", "after")]
    assert_same_bits(ours, hand)


# Loops


class Step(nn.Module):
    """A step of a loop: the carry, and something to stack."""

    @nn.compact
    def __call__(self, carry, x):
        carry = carry + Watched(name="w")(x).astype(carry.dtype)
        return carry, nn.LayerNorm(name="norm")(carry)


class Loop(nn.Module):
    carry: jnp.dtype | None = None  # of the first carry; None for that of the input

    @nn.compact
    def __call__(self, xs):
        step = nn.scan(
            Step, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=1, out_axes=1
        )
        last, ys = step(name="step")(jnp.zeros_like(xs[:, 0], self.carry), xs)
        LOG.append(("carry", last.dtype.name))
        return last, ys


@pytest.mark.parametrize(
    ("rules", "carry"),
    [("", None), ("; Step: full", BF16), ("; */step: c=f32,o=f16", F32)],
)
def test_scan_keeps_its_carry(rng, rules, carry, log):
    variables = init(rng, Loop(), XS)
    run = under(MIXED + rules, Loop(carry), XS)
    shapes = jax.eval_shape(run, variables)
    inside = "float32" if "step" in rules.lower() else "bfloat16"
    assert set(log[:-1]) == {("w", inside, inside)}
    assert log[-1] == ("carry", "float32" if carry == F32 else "bfloat16")
    assert dtypes(shapes) == ["float32", "float32"]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_outermost_module_may_be_lifted(rng, dtype):
    step, carry, xs = nn.scan(Step, **SHARED), normal(rng, 2, 4), normal(rng, 5, 2, 4)
    run = under("c=bf16,o=f16", step(), carry.astype(dtype), xs)
    last, ys = jax.eval_shape(run, init(rng, step(), carry, xs))
    assert (last.dtype, ys.dtype) == (dtype, F16)


@pytest.mark.parametrize(
    ("rules", "dtype"), [("", F32), ("; LSTMCell: c=bf16,o=f32", BF16), ("; LSTMCell: full", BF16)]
)
def test_a_cell_keeps_its_carry_in_a_loop_of_jax(rng, rules, dtype):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, xs):
            cell, carry = nn.LSTMCell(4), 2 * (jnp.zeros_like(xs[0], dtype),)
            if self.is_initializing():
                return cell(carry, xs[0])
            carry, ys = jax.lax.scan(lambda carry, x: cell(carry, x), carry, xs)
            LOG.append({leaf.dtype for leaf in carry})
            return carry, ys

    xs = normal(rng, 5, 2, 4)
    variables, run = init(rng, Net(), xs), under(MIXED + rules, Net(), xs)
    jax.eval_shape(run, variables)
    assert LOG == [{dtype}]
    if not rules:
        assert_close(*jax.jit(lambda v: (run(v), Net().apply(v, xs)))(variables), atol=0.2)


class InLoops(nn.Module):
    """A layer in each loop, branch and derivative, of an array that was made in float32."""

    kind: str

    @nn.compact
    def __call__(self, x):
        layer, norm = nn.Dense(4), nn.BatchNorm(use_running_average=True)
        if self.is_initializing():
            return norm(layer(x))
        x = jnp.ones(x.shape, F32)

        def run(_, x):
            return norm(layer(x))

        if self.kind == "cond":
            return nn.cond(True, run, lambda _, x: x, self, x)
        if self.kind == "lax.cond":
            return jax.lax.cond(True, lambda x: run(self, x), lambda x: x, x)
        if self.kind == "while":
            carry = nn.while_loop(
                lambda _, c: c[0] < 2, lambda _, c: (c[0] + 1, run(self, c[1])), self, (0, x)
            )
            return carry[1]
        if self.kind == "numpy":  # which is float64
            step = lambda _, c, __: (c + layer(np.ones((3, 4))), None)  # noqa: E731
            return nn.scan(step, **SHARED, length=2)(self, x, None)[0]
        return nn.vjp(run, self, x)[1](jnp.ones(x.shape, F32))[1]


@pytest.mark.parametrize("kind", ["cond", "lax.cond", "while", "numpy", "nn.vjp"])
def test_results_in_loops_are_as_wide_as_what_came_in(rng, kind):
    model = InLoops(kind)
    variables, run = init(rng, model, X), under(MIXED, model, X)
    assert jax.eval_shape(run, variables).dtype == F32
    if kind == "nn.vjp":
        both = jax.jit(lambda v: (run(v), model.apply(v, X)))
        assert_close(*both(variables), atol=0.2, rtol=0.1)


CELLS = ["LSTMCell", "OptimizedLSTMCell", "GRUCell", "MGUCell", "SimpleCell"]


@pytest.mark.parametrize(
    ("cell", "dtype"), [(cell, (BF16, F16)[n % 2]) for n, cell in enumerate(CELLS)]
)
def test_all_products_of_cells_run_in_16_bits(rng, cell, dtype):
    model = nn.RNN(getattr(nn, cell)(4), return_carry=True)
    variables = init(rng, model, XS)
    run = under(f"c={dtype.name},o=f32", model, XS)
    assert set(dots(run, variables)) == {f"{dtype.name}x{dtype.name}"}
    if cell == "OptimizedLSTMCell":
        ruled = under(f"{MIXED}; {cell}: full", model, XS)
        assert set(dots(ruled, variables)) == {"float32xfloat32"}
        assert set(dtypes(jax.eval_shape(ruled, variables))) == {"float32"}
        assert_close(*jax.jit(lambda v: (run(v), model.apply(v, XS)))(variables), atol=0.1)


# Lifted modules and functions


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + Watched(name="w")(nn.LayerNorm(name="norm")(x))

    def half(self, x):
        LOG.append(("half", x.dtype.name))
        return x / 2


def lifted(lift):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Watched(name="last")(lift(Block)(name="block")(x))

    return Net()


LIFTS = {
    "remat": nn.remat,
    "jit": nn.jit,
    "remat of jit": lambda cls: nn.remat(nn.jit(cls)),
    "remat_scan": lambda cls: nn.remat_scan(cls, lengths=(2, 2)),
    "vmap": lambda cls: nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True}),
}


@pytest.mark.parametrize("name", LIFTS)
def test_lifted_modules(rng, name, log):
    model = lifted(LIFTS[name])
    variables = init(rng, model, X)
    run = under(f"{MIXED}; Block: full", model, X)
    gradient = jax.grad(lambda variables: run(variables).mean())
    assert set(dtypes(jax.eval_shape(gradient, variables))) == {"float32"}
    assert set(log) == {("w", "float32", "float32"), ("last", "bfloat16", "bfloat16")}


def test_functions_that_are_lifted_read_cast_parameters(rng, log):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            def body(mdl, carry, x):
                w = mdl.param("w", nn.initializers.ones, (4,))
                LOG.append((carry.dtype.name, w.dtype.name))
                return carry + w * x, None

            return nn.scan(body, **SHARED)(self, jnp.zeros(4, x.dtype), x)[0]

    variables = init(rng, Net(), X)
    assert jax.eval_shape(under(MIXED, Net(), X), variables).dtype == F32
    assert set(log) == {("bfloat16", "bfloat16")}


def test_variables_that_are_mapped(rng):
    model = nn.WeightNorm(nn.Dense(4))
    variables, run = init(rng, model, X), under(MIXED, model, X)
    assert dots(run, variables) == ["bfloat16xbfloat16"]
    assert_close(*jax.jit(lambda v: (run(v), model.apply(v, X)))(variables), atol=0.1)


def test_policies_of_classes_hold_through_lifts(rng, log):
    model = lifted(nn.remat)
    variables = init(rng, model, X)
    with jmpx.push_policy(Block, "c=f16,o=bf16"):
        assert jax.eval_shape(under(None, model, X), variables).dtype == F32
    assert log == [("w", "float16", "float16"), ("last", "bfloat16", "float32")]


def test_methods_that_are_not_lifted_are_of_the_lifted_class(log):
    with jmpx.push_policy(Block, "c=bf16"), jmpx.flax.policies():
        nn.remat(Block)().apply({}, jnp.ones(3), method="half")
    assert log == [("half", "bfloat16")]
