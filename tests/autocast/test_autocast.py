"""Autocast as users meet it: what runs in which dtype, rules, modules, memory, errors."""

import functools
import pickle
import warnings

import autocast as benchmark
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, enable_x64, lenient
from jax import lax

import jmpx

BF16, F16, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def dtypes(tree):
    return [leaf.dtype.name for leaf in jax.tree.leaves(tree)]


def equations(f, *args):
    """All equations of a function, those of inner functions too."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for value in eqn.params.values():
                for inner in value if isinstance(value, tuple) else (value,):
                    if hasattr(inner, "eqns"):
                        yield from walk(inner)

    return list(walk(jax.make_jaxpr(f)(*args)))


def dots(f, *args):
    """The operand dtypes of all matrix products of a function, in their order."""
    products = [eqn for eqn in equations(f, *args) if eqn.primitive.name == "dot_general"]
    return ["x".join(var.aval.dtype.name for var in eqn.invars) for eqn in products]


LOW, FULL = "bfloat16xbfloat16", "float32xfloat32"


# What runs in which dtype.

OPERATIONS = {
    "bfloat16": [
        lambda h: h @ h,
        jnp.tanh,
        jax.nn.relu,
        jax.nn.gelu,
        jax.nn.sigmoid,
        jnp.sqrt,
        jnp.sin,
        lambda h: h**2,
        lambda h: h / 3 - 1,
        lambda h: jnp.where(h > 0, h, -1e9),
        lambda h: jnp.max(h, axis=0),
        lambda h: jnp.concatenate([h.T, h.reshape(h.T.shape)]),
        lambda h: jnp.pad(h, 1)[1:].at[0].set(0.0),
        lambda h: h + jnp.arange(h.shape[1], dtype=jnp.float32),
        lambda h: h + jnp.exp(jnp.arange(h.shape[1]).astype(jnp.float32)),
        lambda h: h * jax.random.normal(jax.random.key(0), h.shape),
        lambda h: jnp.sort(h),
        lambda h: lax.top_k(h, 1)[0],
        lambda h: lax.cond(h[0, 0] > 0, jnp.tanh, jnp.abs, h),
        lambda h: jax.jit(jnp.tanh)(h),
        lambda h: jax.checkpoint(jnp.tanh)(h),
        lambda h: lax.conv(h[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"),
    ],
    "float32": [
        jnp.exp,
        lambda h: jnp.log(jnp.abs(h) + 1.0),
        lambda h: jnp.abs(h) ** 1.5,
        jnp.sum,
        lambda h: jnp.mean(h, axis=0),
        jnp.cumsum,
        lambda h: lax.rsqrt(jnp.abs(h) + 1.0),
        jax.nn.softmax,
        jax.nn.log_softmax,
        jax.nn.logsumexp,
        lambda h: jnp.linalg.norm(h),
        lambda h: lax.erf_inv(jnp.tanh(h)),
        lambda h: jax.scipy.special.gammaln(h + 9.0),
        lambda h: jnp.linalg.qr(h)[0],
        lambda h: jax.ops.segment_sum(h, jnp.zeros(h.shape[0], int), 2),
        lambda h: lax.cond(h[0, 0] > 0, jnp.tanh, jnp.exp, h),
        lambda h: lax.fori_loop(0, 3, lambda _, c: c + h[0], jnp.zeros(h.shape[1])),
        lambda h: jnp.matmul(h, h, precision="highest"),
    ],
}


@pytest.mark.parametrize(
    "op, dtype", [(op, dtype) for dtype, ops in OPERATIONS.items() for op in ops]
)
def test_classes_of_operations(rng, op, dtype):
    w, x = normal(rng, 3, 3), normal(rng, 3, 3)

    def f(w, x):
        return op(x @ w)

    result = jmpx.autocast(f, output=None)(w, x)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.astype(jnp.float32), f(w, x), rtol=0.06, atol=0.06)
    restored = jmpx.autocast(f)(w, x)
    assert_same_bits(restored, result.astype(jnp.float32))


def test_inputs_and_constants_yield_to_what_a_product_made(rng):
    w, b, x = normal(rng, 3, 2), normal(rng, 2), normal(rng, 4, 3)
    table = normal(rng, 4, 2)

    @jmpx.autocast(output=None)
    def f(w, b, x):
        h = x @ w + b  # a float32 input
        h = h * jnp.float32(0.5) + table  # a constant, a closed-over array
        h = h + jnp.sin(jnp.exp(-jnp.arange(2.0)))  # what was computed of constants alone
        return h, b + 1.0, h + jnp.exp(h)

    activation, alone, statistic = f(w, b, x)
    assert dtypes([activation, alone, statistic]) == ["bfloat16", "float32", "float32"]


def test_one_cast_a_weight(rng):
    w, x = normal(rng, 3, 3), normal(rng, 4, 3)
    casts = [
        eqn
        for eqn in equations(jmpx.autocast(lambda w, x: (x @ w) @ w), w, x)
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.shape == (3, 3)
    ]
    assert len(casts) == 1


def test_what_was_traced_in_16_bits_stays(rng):
    x = normal(rng, 3, 3)

    @jmpx.autocast(policy="c=bf16", output=None)
    def f(x):
        half = x.astype(jnp.float16)
        return half @ half, (half @ half).astype(jnp.float32), x @ x

    assert dtypes(f(x)) == ["float16", "float32", "bfloat16"]


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_output(rng, compute):
    w, x = normal(rng, 3, 2), normal(rng, 4, 3)
    f = functools.partial(jmpx.autocast, lambda w, x: (x @ w, jnp.argmax(x), "text", 3.5, None))
    assert dtypes(f(f"c={compute}")(w, x)[:2]) == ["float32", "int32"]
    assert dtypes(f(f"c={compute}", output=None)(w, x)[:2]) == [compute, "int32"]
    assert dtypes(f(f"c={compute}", output="bf16")(w, x)[:2]) == ["bfloat16", "int32"]
    assert f(f"c={compute}")(w, x)[2:] == ("text", 3.5, None)


def test_a_full_policy_changes_nothing(rng):
    w, x = normal(rng, 5, 5), normal(rng, 4, 5)
    f = jax.nn.gelu
    assert_same_bits(jmpx.autocast(lambda w, x: f(x @ w), "full")(w, x), f(x @ w))


# Rules.


@pytest.mark.parametrize(
    "how",
    [
        {"rules": {lax.exp_p: jnp.bfloat16}},
        {"rules": {"exp": "bf16"}},
        {"rules": {"op.exp": jnp.bfloat16}},
        {"policy": "c=bf16; op.exp: bf16"},
        {"policy": "c=bf16; op.exp: full", "rules": {"exp": "bf16"}},  # the last rule wins
    ],
    ids=str,
)
def test_rules_of_operations(rng, how):
    x = normal(rng, 3, 3)
    assert jmpx.autocast(lambda x: jnp.exp(x @ x), output=None, **how)(x).dtype == jnp.bfloat16


def test_a_rule_may_ask_for_more_precision_than_was_traced(rng):
    x = jnp.asarray(1 + rng.uniform(size=64) / 64, jnp.float32)
    f = jmpx.autocast(jnp.prod, rules={lax.reduce_prod_p: "float64"})
    with enable_x64():
        got = f(x)
        assert any(v.aval.dtype == "float64" for e in equations(f, x) for v in e.outvars)
    assert_same_bits(got, jnp.asarray(np.prod(np.asarray(x, np.float64)), jnp.float32))


def test_grampax_semantics(rng):
    """Its default: the operands of products are cast, their results cast back."""
    w, b, x = normal(rng, 3, 2), normal(rng, 2), normal(rng, 4, 3)
    f = jmpx.autocast(lambda: jnp.tanh(x @ w + b), "full", rules={lax.dot_general_p: "bf16"})
    cast = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    assert_same_bits(f(), jnp.tanh((cast(x) @ cast(w)).astype(jnp.float32) + b))


def test_carries_of_loops(rng):
    """A sum over 2,000 steps is right in float32; a rule carries it in 16 bits, where it stalls."""

    def count(x):
        one = (x @ x)[0, 0]
        looped = lax.fori_loop(0, 2000, lambda _, c: c + one, jnp.float32(0))
        return looped, lax.while_loop(
            lambda c: c[0] < 2000, lambda c: (c[0] + 1, c[1] + one), (0, 0.0)
        )[1]

    x = jnp.eye(2)
    assert [float(s) for s in jmpx.autocast(count)(x)] == [2000, 2000]
    assert [float(s) for s in jmpx.autocast(count, rules={"scan": "bf16"})(x)] == [256, 2000]
    assert [float(s) for s in jmpx.autocast(count, "c=bf16; op.while: bf16")(x)] == [2000, 256]


def test_sums_over_devices_run_in_float32(rng):
    """And are rounded to what was summed: gradients that are averaged keep their digits."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(
        lambda x: lax.psum(jnp.tanh(x @ x), "d"), mesh=mesh, in_specs=spec("d"), out_specs=spec()
    )
    f, x = jmpx.autocast(f, output=None), normal(rng, 24, 3)
    sums = [eqn for eqn in equations(f, x) if eqn.primitive.name.startswith("psum")]
    assert [var.aval.dtype for eqn in sums for var in eqn.invars] == [F32]
    blocks = jnp.asarray(x, jnp.bfloat16).reshape(8, 3, 3)
    expected = jnp.tanh(blocks @ blocks).astype(jnp.float32).sum(axis=0).astype(jnp.bfloat16)
    assert f(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(
        f(x).astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=2e-2
    )


# Scopes.


def named(x):
    with jax.named_scope("trunk"):
        x = jnp.tanh(x @ x)
    with jax.named_scope("head"):
        return jax.jit(lambda x: lax.scan(lambda c, _: (c @ x, None), x, None, 2)[0])(x)


@pytest.mark.parametrize(
    "policy, expected",
    [
        ("c=bf16", [LOW, LOW]),
        ("c=bf16; */head: full", [LOW, FULL]),
        ("c=bf16; */head/*: full", [LOW, FULL]),
        ("c=bf16; head: full", [LOW, FULL]),
        ("c=bf16; *: full; */trunk: bf16", [LOW, FULL]),
        ("c=full; */trunk: bf16", [LOW, FULL]),
        ("c=bf16; */head: full; op.dot_general: bf16", [LOW, LOW]),
        ("c=bf16; op.dot_general: full; */trunk: bf16", [LOW, FULL]),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint])
def test_rules_of_scopes(rng, policy, expected, transform):
    shape = (3, 2, 2) if transform is jax.vmap else (2, 2)
    got = dots(transform(jmpx.autocast(named, policy)), normal(rng, *shape))
    assert got[: len(expected)] == expected


def test_an_island_yields_outside(rng):
    x = normal(rng, 3, 3)

    def f(x):
        h = x @ x
        with jax.named_scope("norm"):
            n = h - h.mean()
        return n, h + n

    results = functools.partial(jmpx.autocast, f, output=None)
    assert dtypes(results("c=bf16; norm: full")(x)) == ["float32", "bfloat16"]
    assert dtypes(results("c=bf16; norm: c=f32,o=f32")(x)) == ["float32", "float32"]


def mark_with(x):
    with jmpx.full_precision():
        return jnp.tanh(x @ x)


@jmpx.full_precision
def mark_decorated(x):
    return jnp.tanh(x @ x)


@jmpx.force_full_precision
def forced(x):
    return jnp.tanh(x @ x)


@pytest.mark.parametrize("f", [mark_with, mark_decorated, forced])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        jax.vmap,
        lambda f: lambda x: lax.map(f, x),
        lambda f: lambda x: jax.grad(lambda x: f(x).sum())(x),
    ],
)
def test_full_precision(rng, f, wrap):
    x = normal(rng, 3, 4, 4)

    def outer(x):
        return wrap(f)(x) if wrap is not jax.checkpoint else jax.vmap(wrap(f))(x)

    policy = "c=bf16; *: bf16; op.tanh: bf16; op.dot_general: bf16"  # no rule overrides it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        marked = jax.make_jaxpr(jmpx.autocast(outer, policy))(x)
    names = [v.aval.dtype for e in equations(jmpx.autocast(outer), x) for v in e.outvars]
    assert BF16 not in names
    assert "bf16" not in str(marked)


def test_haiku_scopes(rng):
    x = normal(rng, 2, 3)
    network = hk.transform(lambda x: hk.nets.MLP([4, 2], name="head")(hk.Linear(3, name="in")(x)))
    params = network.init(jax.random.key(0), x)
    apply = functools.partial(jmpx.autocast, network.apply)
    assert dots(apply("c=bf16; */head/*: full"), params, None, x) == [LOW, FULL, FULL]
    assert dots(apply("c=bf16; */linear_1: full"), params, None, x) == [LOW, LOW, FULL]


def test_linen_scopes(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(nn.Dense(3)(x))

    x = normal(rng, 2, 3)
    params = Net().init(jax.random.key(0), x)
    assert dots(jmpx.autocast(Net().apply, "c=bf16; */head: full"), params, x) == [LOW, FULL]
    assert dots(jmpx.autocast(Net().init), jax.random.key(0), x) == [LOW, LOW]


def test_equinox_scopes(rng):
    x = normal(rng, 3)
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(3, 3, key=jax.random.key(0)), eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(1))]
    )
    assert dots(jmpx.autocast(model), x) == [LOW] * 3
    assert dots(jmpx.autocast(model, "c=bf16; MLP: full"), x) == [LOW, FULL, FULL]
    assert dots(jmpx.autocast(model, "c=bf16; eqx.nn.Linear: full"), x) == [FULL] * 3


# Modules.


def mlp(key=0):
    return eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(key))


def test_part_of_a_model(rng):
    def where(model):
        return model.layers[1]

    model = eqx.tree_at(where, mlp(), jmpx.autocast(where(mlp()), "bf16"))
    assert dots(jax.vmap(model), normal(rng, 4, 3)) == [FULL, LOW, FULL]


def test_a_module_under_autocast_is_a_pytree_that_holds_it(tmp_path):
    model = mlp()
    wrapped = jmpx.autocast(model, "c=bf16; op.tanh: full", output="bf16")
    assert isinstance(wrapped, jmpx.Autocast)
    assert wrapped.__wrapped__ is model
    assert_same_bits(*(eqx.filter(tree, eqx.is_array) for tree in (wrapped.__wrapped__, model)))
    assert jax.tree.structure(wrapped) == jax.tree.structure(
        jmpx.autocast(model, "c=bf16; op.tanh: full", output="bf16")
    )
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", wrapped)
    restored = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", jmpx.autocast(mlp(key=1)))
    assert_same_bits(*(eqx.filter(tree, eqx.is_array) for tree in (restored.__wrapped__, model)))
    linear = jmpx.autocast(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    assert_same_bits(pickle.loads(pickle.dumps(linear)), linear)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.device_put(linear, sharding)
    assert placed.weight.sharding == sharding


def test_a_model_that_holds_one_trains(rng):
    x, y = normal(rng, 16, 3), normal(rng, 16, 2)
    model = eqx.tree_at(lambda m: m.layers[1], mlp(), jmpx.autocast(mlp().layers[1]))
    optimizer = lenient(optax.adam(1e-2))
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    def loss_fn(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @eqx.filter_jit
    def step(model, state):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    first = float(loss_fn(model))
    for _ in range(30):
        model, state, loss = step(model, state)
    assert float(loss) < 0.9 * first
    assert isinstance(model.layers[1], jmpx.Autocast)


def test_constant_loss_scaling_through_vjp(rng):
    """The recipe of Grampax's README."""
    x = normal(rng, 4, 3)
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    loss, loss_vjp = jax.vjp(lambda m: loss_fn(m, x), jmpx.autocast(linear, "c=f16"))
    (grads,) = loss_vjp(jnp.float32(2**12))
    grads = jax.tree.map(lambda g: g / 2**12, grads)
    expected = jax.grad(loss_fn)(linear, x)
    assert grads.weight.dtype == jnp.float32
    np.testing.assert_allclose(loss, loss_fn(linear, x), rtol=2e-3)
    np.testing.assert_allclose(grads.weight, expected.weight, rtol=4e-3, atol=1e-3)


def test_methods_and_bound_methods(rng):
    class Model(eqx.Module):
        w: jax.Array

        @jmpx.autocast(output=None)
        def __call__(self, x):
            return x @ self.w

        def plain(self, x):
            return x @ self.w

    model = Model(normal(rng, 3, 3))
    x = normal(rng, 2, 3)
    assert model(x).dtype == jnp.bfloat16
    assert jmpx.autocast(model.plain, output=None)(x).dtype == jnp.bfloat16
    assert eqx.filter_grad(lambda m: m(x).astype(jnp.float32).sum())(model).w.dtype == jnp.float32


def test_it_keeps_name_and_docstring():
    @jmpx.autocast
    def f(x):
        """Squares."""
        return x * x

    assert (f.__name__, f.__doc__) == ("f", "Squares.")


# Memory, gradients, lowering.


@pytest.fixture(scope="module")
def transformer():
    rng = np.random.default_rng(5)
    model = benchmark.Transformer()
    return model.init(rng), benchmark.losses(model, model.batch(rng))


def test_residuals(transformer):
    """The benchmark's figures, which do not depend on the machine: bars of the project."""
    params, ways = transformer
    kept = {way: benchmark.residual_bytes(loss_fn, params) for way, loss_fn in ways.items()}
    ratios = {way: bytes_ / kept["float32"] for way, bytes_ in kept.items()}
    assert ratios["autocast"] < 0.66
    assert ratios["autocast, save_low_precision"] < 0.27
    assert 0.85 < ratios["grampax"] < 0.9  # what it is worth to leave activations low


def test_products_as_lowered_for_cuda(transformer):
    params, ways = transformer
    assert benchmark.dot_operands(ways["autocast"], params) == {"bf16 x bf16": 75}
    head = lambda p, x: x @ p  # noqa: E731
    f = jmpx.autocast(lambda p: jmpx.full_precision(head)(jnp.tanh(p @ p), p).sum())
    assert benchmark.dot_operands(f, jnp.eye(4)) == {"bf16 x bf16": 3, "f32 x f32": 3}


def test_gradients_are_nearer_to_float32_than_those_of_a_bfloat16_model(rng):
    model = benchmark.Transformer(1, 32, 2, 64, scanned=True)
    params = model.init(rng)
    ways = benchmark.losses(model, model.batch(rng, 4, 16))
    full, half, autocast, saving = (
        benchmark.gradients(ways[way], params)
        for way in ("float32", "bfloat16", "autocast", "autocast, save_low_precision")
    )
    assert np.linalg.norm(autocast - full) <= np.linalg.norm(half - full)
    assert np.linalg.norm(saving - full) <= 1.1 * np.linalg.norm(half - full)


def test_save_low_precision_alone(rng):
    """A model cast by a policy: its 16-bit activations are kept, its float32 islands are not."""
    w, x = normal(rng, 8, 8), normal(rng, 16, 8)

    def loss_fn(w):
        h = jnp.tanh(jnp.bfloat16(1) * x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        probabilities = jax.nn.softmax(h.astype(jnp.float32))
        return jnp.sum(probabilities**2)

    saved = jax.checkpoint(loss_fn, policy=jmpx.save_low_precision)
    kept = jax.make_jaxpr(lambda w: jax.vjp(saved, w)[1])(w).jaxpr
    kept = [v.aval for v in kept.outvars if v not in (*kept.invars, *kept.constvars)]
    assert {aval.dtype for aval in kept} == {BF16}
    assert benchmark.residual_bytes(saved, w) < 0.5 * benchmark.residual_bytes(loss_fn, w)
    assert_same_bits(jax.grad(saved)(w), jax.grad(loss_fn)(w))


@pytest.mark.parametrize(
    "policy, loss_scale",
    [("c=f16", jmpx.DynamicLossScale(2**12)), ("c=bf16", jmpx.NoOpLossScale())],
)
def test_with_a_loss_scale(rng, policy, loss_scale):
    model = benchmark.Transformer(1, 16, 2, 32, classes=8)
    params, (x, labels) = model.init(rng), model.batch(rng, 2, 8)

    def loss_fn(params, apply=model.apply):
        return benchmark.cross_entropy(apply(params, x), labels)

    step = jmpx.filter_value_and_grad(
        functools.partial(loss_fn, apply=jmpx.autocast(model.apply, policy)),
        loss_scale,
        policy="full",
    )
    loss, _, grads_finite, grads = jax.jit(step)(params)
    value, expected = jax.value_and_grad(loss_fn)(params)
    assert grads_finite
    np.testing.assert_allclose(loss, value, rtol=1e-2)
    flat = [
        np.concatenate([np.ravel(g) for g in jax.tree.leaves(tree)]) for tree in (grads, expected)
    ]
    tolerance = 3e-3 if policy == "c=f16" else 3e-2
    assert np.linalg.norm(flat[0] - flat[1]) < tolerance * np.linalg.norm(flat[1])


# Errors and warnings.


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        (lambda: jmpx.autocast("c=f16"), TypeError, "Expected a function .* got 'c=f16'"),
        (lambda: jmpx.autocast(jnp.sin, "c=bf61"), ValueError, "did you mean 'bf16'"),
        (lambda: jmpx.autocast(jnp.sin, rules={"exp": "bf61"}), ValueError, "Unknown dtype 'bf61'"),
        (lambda: jmpx.autocast(jnp.sin, rules={jnp.exp: "bf16"}), TypeError, "lax.exp_p or 'exp'"),
        (lambda: jmpx.autocast(jnp.sin, output="trace"), ValueError, "Unknown dtype 'trace'"),
        (lambda: jmpx.autocast(jnp.sin, "c=f64")(1.0), ValueError, "64-bit types are disabled"),
        (lambda: jmpx.full_precision(3), TypeError, "Expected a function to wrap, got 3"),
    ],
)
def test_errors(wrong, error, words):
    with pytest.raises(error, match=words):
        wrong()


def test_a_function_that_creates_haiku_parameters(rng):
    x = normal(rng, 2, 3)
    f = jmpx.autocast(lambda x: hk.Linear(2)(x))
    with pytest.raises(ValueError, match=r"parameter .* 'linear/w' .* autocast the apply"):
        hk.transform(f).init(jax.random.key(0), x)
    norm = jmpx.autocast(lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    with pytest.raises(ValueError, match="autocast the apply"):
        hk.transform_with_state(norm).init(jax.random.key(0), x)
    inner = hk.transform(lambda x: jmpx.autocast(jnp.matmul)(x, hk.Linear(2)(x)))  # creates none
    assert inner.init(jax.random.key(0), normal(rng, 2, 2))["linear"]["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    "policy, words",
    [
        ("c=bf16; op.expp: f32", "matched no operation; did you mean 'op.exp'"),
        ("c=bf16; op.log: f32", "matched no operation"),
        ("c=bf16; */heads/*: f32", "matched no scope; did you mean 'head'"),
        ("c=bf16; LayerNorm: f32", "matched no scope"),
    ],
)
def test_rules_that_matched_nothing(rng, policy, words):
    with pytest.warns(UserWarning, match=words) as record:
        jmpx.autocast(named, policy)(normal(rng, 2, 2))
    assert record[0].filename == __file__


def test_used_rules_are_known_at_each_call(rng):
    x = normal(rng, 2, 2)
    for _ in range(2):  # the second one finds the inner jit retraced
        jmpx.autocast(named, "c=bf16; */head: full; op.tanh: f32")(x)
