"""Policy maps through Linen's lifted transformations, and of state that loops carry."""

# Flax types the result of `apply` as a union with the state that it updated.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, LOG, MIXED, assert_same_bits, dtypes, normal
from helpers.jaxprs import equations_of
from helpers.linen import Watched, cast, init

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("rules", ["", "; BatchNorm: full"])
def test_batch_norm(rng, log, train, rules):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Watched(name="before")(x)
            x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
            return Watched(name="after")(x)

    x = normal(rng, 16, 4)
    variables = init(rng, Net(), x)
    stats = jax.tree.map(lambda a: jnp.abs(normal(rng, *a.shape)) + 1, variables["batch_stats"])
    variables["batch_stats"] = stats
    with jmpx.flax.policies(MIXED + rules):
        y, updates = Net().apply(variables, x, mutable=["batch_stats"])
    assert log == [(name, "bfloat16", "bfloat16") for name in ("before", "after")]
    assert y.dtype == F32 and set(dtypes(updates)) == {"float32"}

    params = variables["params"]
    dtype = F32 if rules else BF16
    h = (x.astype(BF16) @ cast(params["before"]["w"], BF16)).astype(dtype)
    norm = nn.BatchNorm(use_running_average=not train)
    norm_variables = {"params": cast(params["norm"], dtype), "batch_stats": stats["norm"]}
    h, expected = norm.apply(norm_variables, h, mutable=["batch_stats"])
    assert_same_bits(updates["batch_stats"]["norm"], expected["batch_stats"])
    expected = h.astype(BF16) @ cast(params["after"]["w"], BF16)
    assert_same_bits(y, expected.astype(F32))


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
        first = jnp.zeros_like(xs[:, 0], self.carry)
        last, ys = step(name="step")(first, xs)
        LOG.append(("carry", last.dtype.name))
        return last, ys


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "rules", ["", "; LayerNorm: full", "; Step: full", "; */step: c=f32,o=f16"]
)
@pytest.mark.parametrize("carry", [None, F32, BF16])
def test_scan_keeps_its_carry(rng, rules, carry):
    xs = normal(rng, 2, 5, 4)
    variables = init(rng, Loop(), xs)
    with jmpx.flax.policies(MIXED + rules):
        last, ys = jax.jit(Loop(carry).apply)(variables, xs)
    inside = "float32" if "step" in rules.lower() else "bfloat16"
    assert set(LOG[:-1]) == {("w", inside, inside)}
    assert LOG[-1] == ("carry", "float32" if carry == F32 else "bfloat16")
    assert last.dtype == ys.dtype == F32
    reference = Loop(carry).apply(variables, xs)
    for got, expected in zip((last, ys), reference, strict=True):
        np.testing.assert_allclose(got, expected, atol=0.15, rtol=0.05)


def test_the_outermost_module_may_be_lifted(rng):
    step = nn.scan(Step, variable_broadcast="params", split_rngs={"params": False})
    carry, xs = normal(rng, 2, 4), normal(rng, 5, 2, 4)
    variables = init(rng, step(), carry, xs)
    for dtype in (F32, BF16):
        with jmpx.flax.policies("c=bf16,o=f16"):
            last, ys = step().apply(variables, carry.astype(dtype), xs)
        assert (last.dtype, ys.dtype) == (dtype, jnp.float16)


@pytest.mark.thorough
def test_recurrent_cells(rng):
    xs = normal(rng, 2, 5, 4)
    model = nn.RNN(nn.LSTMCell(4), return_carry=True)
    variables = init(rng, model, xs)
    full = model.apply(variables, xs)
    for rules in ("", "; LSTMCell: full", "; RNNCellBase: bf16"):
        with jmpx.flax.policies(MIXED + rules):
            result = model.apply(variables, xs)
        assert set(dtypes(result)) == {"float32"}
        for got, expected in zip(jax.tree.leaves(result), jax.tree.leaves(full), strict=True):
            np.testing.assert_allclose(got, expected, atol=0.05)


class Decoder(nn.Module):
    """A step whose carry is that of a cell and its last output, both made in float32."""

    @nn.compact
    def __call__(self, carry, x):
        state, last = carry
        state, y = nn.LSTMCell(4)(state, x + last)
        y = nn.Dense(4)(y)
        return (state, y), y


class Decoding(nn.Module):
    lift: str
    carry: jnp.dtype

    @nn.compact
    def __call__(self, xs):
        zeros = jnp.zeros_like(xs[0], self.carry)
        carry = ((zeros, zeros), zeros)
        if self.lift == "scan":
            scan = nn.scan(Decoder, variable_broadcast="params", split_rngs={"params": False})
            return scan(name="cell")(carry, xs)
        cell = Decoder(name="cell")
        if self.lift == "function":
            body = nn.scan(
                lambda cell, carry, x: cell(carry, x),
                variable_broadcast="params",
                split_rngs={"params": False},
            )
            return body(cell, carry, xs)
        if self.is_initializing():
            return cell(carry, xs[0])
        return jax.lax.scan(lambda carry, x: cell(carry, x), carry, xs)


DECODER_RULES = [
    "",
    "; LSTMCell: c=bf16,o=f32",
    "; Dense: o=f32",
    "; Decoder: full",
    "; */cell: f32",
]
# A user's own loop cannot be changed: there it is the test below that holds.
CARRIES = [
    *(
        (lift, rules, carry)
        for lift in ("scan", "function")
        for rules in DECODER_RULES
        for carry in (F32, BF16)
    ),
    *(("jax", rules, F32) for rules in DECODER_RULES[:3]),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("lift", "rules", "carry"), CARRIES)
def test_cells_keep_a_carry_of_any_dtype(rng, lift, rules, carry):
    xs = normal(rng, 5, 2, 4)
    variables = init(rng, Decoding(lift, F32), xs)
    expected = Decoding(lift, F32).apply(variables, xs)
    with jmpx.flax.policies(MIXED + rules):
        results = Decoding(lift, carry).apply(variables, xs)
    assert set(dtypes(results)) == {"float32"}
    for got, reference in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        np.testing.assert_allclose(got, reference, atol=0.2)


@pytest.mark.parametrize(
    ("policy_map", "carry", "rule"),
    [
        ("c=bf16; Cell: c=bf16,o=f32", BF16, "Cell: compute=bfloat16,output=bfloat16"),
        ("c=bf16; Cell: c=f16", F32, "Cell: compute=float16,output=float32"),
    ],
)
def test_a_rule_mends_a_users_own_loop(rng, policy_map, carry, rule):
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            return nn.Dense(4)(carry) + nn.Dense(4)(x)

    class Net(nn.Module):
        carry: jnp.dtype

        @nn.compact
        def __call__(self, xs):
            cell, first = Cell(name="cell"), jnp.zeros((2, 4), self.carry)
            if self.is_initializing():
                return cell(first, xs[0])
            return jax.lax.scan(lambda carry, x: (cell(carry, x), None), first, xs)[0]

    xs = normal(rng, 5, 2, 4)
    variables = init(rng, Net(F32), xs)
    with pytest.raises(TypeError, match="must have equal types"):
        with jmpx.flax.policies(policy_map):
            Net(carry).apply(variables, xs)
    with jmpx.flax.policies(f"{policy_map}; {rule}"):
        Net(carry).apply(variables, xs)


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
        if self.kind == "switch":
            return nn.switch(1, [run, lambda _, x: x, lambda _, x: layer(x)], self, x)
        if self.kind == "lax.cond":
            return jax.lax.cond(True, lambda x: run(self, x), lambda x: x, x)
        if self.kind == "while":
            carry = nn.while_loop(
                lambda _, c: c[0] < 2, lambda _, c: (c[0] + 1, run(self, c[1])), self, (0, x)
            )
            return carry[1]
        if self.kind == "numpy":  # which is float64
            scan = nn.scan(
                lambda _, c, __: (c + layer(np.ones((3, 4))), None),
                variable_broadcast="params",
                split_rngs={"params": False},
                length=2,
            )
            return scan(self, x, None)[0]
        if self.kind == "nn.vjp":
            return nn.vjp(run, self, x)[1](jnp.ones(x.shape, F32))[1]
        return jax.vjp(lambda x: run(self, x), x)[1](jnp.ones(x.shape, F32))[0]


KINDS = ["cond", "switch", "lax.cond", "while", "numpy", "nn.vjp", "jax.vjp"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_results_in_loops_are_as_wide_as_what_came_in(rng, kind):
    model, x = InLoops(kind), normal(rng, 3, 4)
    variables = init(rng, model, x)
    with jmpx.flax.policies(MIXED):
        y = model.apply(variables, x)
    assert y.dtype == F32
    np.testing.assert_allclose(y, model.apply(variables, x), atol=0.2, rtol=0.1)


CELLS = ["LSTMCell", "OptimizedLSTMCell", "GRUCell", "MGUCell", "SimpleCell"]


@pytest.mark.thorough
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_all_products_of_cells_run_in_16_bits(rng, cell, dtype):
    xs, name = normal(rng, 2, 5, 4), jnp.dtype(dtype).name
    model = nn.RNN(getattr(nn, cell)(4), return_carry=True)
    variables = init(rng, model, xs)

    def run(variables):
        with jmpx.flax.policies(f"c={name},o=f32"):
            return model.apply(variables, xs)

    eqns = [eqn for eqn in equations_of(run, variables) if eqn.primitive.name == "dot_general"]
    assert {var.aval.dtype.name for eqn in eqns for var in eqn.invars} == {name}
    results = run(variables), model.apply(variables, xs)
    for got, full in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, full, atol=0.1)


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LIFTS)
def test_lifted_modules(rng, name):
    model, x = lifted(LIFTS[name]), normal(rng, 3, 4)
    variables = init(rng, model, x)

    def loss(params):
        with jmpx.flax.policies(f"{MIXED}; Block: full"):
            return model.apply({"params": params}, x).mean()

    grads = jax.grad(loss)(variables["params"])
    assert set(dtypes(grads)) == {"float32"}
    assert set(LOG) == {("w", "float32", "float32"), ("last", "bfloat16", "bfloat16")}
    full = jax.grad(lambda params: model.apply({"params": params}, x).mean())(variables["params"])
    for grad, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(full), strict=True):
        assert np.linalg.norm(grad - expected) < 0.05 * np.linalg.norm(expected)


def test_remat_is_the_same_to_the_bit(rng):
    plain, remat, x = lifted(lambda cls: cls), lifted(nn.remat), normal(rng, 3, 4)
    variables = init(rng, plain, x)
    with jmpx.flax.policies(f"{MIXED}; LayerNorm: full"):
        assert_same_bits(remat.apply(variables, x), plain.apply(variables, x))


def test_functions_that_are_lifted_read_cast_parameters(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            def body(mdl, carry, x):
                w = mdl.param("w", nn.initializers.ones, (4,))
                LOG.append((carry.dtype.name, w.dtype.name))
                return carry + w * x, None

            scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False})
            return scan(self, jnp.zeros(4, x.dtype), x)[0]

    variables = init(rng, Net(), normal(rng, 5, 4))
    with jmpx.flax.policies(MIXED):
        assert Net().apply(variables, normal(rng, 5, 4)).dtype == F32
    assert set(LOG) == {("bfloat16", "bfloat16")}


def test_conditionals_and_variables_that_are_mapped(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, flag):
            one, other = Watched(name="one"), nn.WeightNorm(nn.Dense(4, name="other"))
            if self.is_initializing():
                one(x)
                other(x)
            return nn.cond(flag, lambda _, x: one(x), lambda _, x: other(x), self, x)

    x = normal(rng, 3, 4)
    variables = init(rng, Net(), x, True)
    with jmpx.flax.policies(f"{MIXED}; Watched: full"):
        y, z = (Net().apply(variables, x, flag) for flag in (True, False))
    assert set(LOG) == {("one", "float32", "float32")}
    assert_same_bits(
        y, (x.astype(BF16).astype(F32) @ variables["params"]["one"]["w"]).astype(BF16).astype(F32)
    )
    np.testing.assert_allclose(z, Net().apply(variables, x, False), atol=0.1)


@pytest.mark.thorough
def test_policies_of_classes(rng, log):
    x = normal(rng, 3, 4)
    model = lifted(nn.remat)
    variables = init(rng, model, x)
    with jmpx.push_policy(Block, "c=f16,o=bf16"), jmpx.flax.policies():
        y = model.apply(variables, x)
    assert log == [("w", "float16", "float16"), ("last", "bfloat16", "float32")] and y.dtype == F32
    log.clear()
    with jmpx.push_policy(Watched, "c=f16"), jmpx.flax.policies("c=bf16; */last: c=f32"):
        model.apply(variables, x)  # rules go before the policies of classes
    assert log == [("w", "float16", "float16"), ("last", "float32", "float32")]


def test_methods_that_are_not_lifted_are_of_the_lifted_class(log):
    with jmpx.push_policy(Block, "c=bf16"), jmpx.flax.policies():
        nn.remat(Block)().apply({}, jnp.ones(3), method="half")
    assert log == [("half", "bfloat16")]


def test_shared_modules_and_modules_as_attributes(rng):
    class Twice(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            x = self.inner(x)
            return Other(self.inner, name="other")(x)

    class Other(nn.Module):
        shared: nn.Module

        def __call__(self, x):
            return self.shared(x)

    model = Twice(Watched())
    variables = init(rng, model, normal(rng, 3, 4))
    with jmpx.flax.policies(f"{MIXED}; Other: full"):
        model.apply(variables, normal(rng, 3, 4))
    # One module in two surroundings reads its stored parameter in each of them.
    assert LOG == [("inner", *2 * ("bfloat16",)), ("inner", *2 * ("float32",))]


def test_embedding_is_looked_up_and_attended(rng):
    model, tokens = nn.Embed(7, 4), jnp.arange(7)
    variables = init(rng, model, tokens)
    table = variables["params"]["embedding"].astype(BF16)
    with jmpx.flax.policies(MIXED):
        y = model.apply(variables, tokens)
        logits = model.apply(variables, y, method="attend")
    assert_same_bits(y, table.astype(F32))
    assert_same_bits(logits, (table @ table.T).astype(F32))


def test_what_is_not_a_parameter_is_as_stored(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, flag, index):
            state = self.variable("state", "sum", jnp.zeros, (4,))
            w = self.param("w", nn.initializers.ones, (4,))
            stored = self.variables["params"]["w"].dtype.name
            LOG.append((state.value.dtype.name, w.dtype.name, stored, flag, index.dtype.name))
            state.value = state.value + x.sum(0).astype(F32)
            return {"y": x * w, "n": index, "name": "net"}

    x, index = normal(rng, 3, 4), jnp.arange(3)
    variables = init(rng, Net(), x, True, index)
    with jmpx.flax.policies("c=bf16"):
        result, state = Net().apply(variables, x, True, index=index, mutable=["state"])
    assert LOG == [("float32", "bfloat16", "float32", True, "int32")]
    assert result["y"].dtype == BF16 and result["n"].dtype == jnp.int32 and result["name"] == "net"
    assert set(dtypes(state)) == {"float32"}
