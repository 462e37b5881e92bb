"""Loss scales: what they scale, by which factor, in which dtype, at which cost, and as pytrees."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64, normal, warns_once
from helpers.training import LARGEST_SCALE, LEAST_SCALE, value
from hypothesis import given, settings, strategies as st

import jmpx

KINDS = {
    "NoOp": jmpx.NoOpLossScale(),
    "Static": jmpx.StaticLossScale(2.0**15),
    "Dynamic": jmpx.DynamicLossScale(2.0**15),
}


# scale and unscale


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_unscale_undo_each_other_and_leave_other_leaves(kind, rng):
    tree = {
        "x": rng.normal(size=4).astype(np.float32),
        "z": jnp.asarray(rng.normal(size=2) + 1j * rng.normal(size=2), jnp.complex64),
        "n": jnp.arange(3),
        "key": jax.random.key(0),
        "other": ("name", None, jnp.tanh, 3, True),
    }
    scaled = KINDS[kind].scale(tree)
    back = KINDS[kind].unscale(scaled)
    for name in ("x", "z"):
        factor = np.float32(KINDS[kind].loss_scale)
        np.testing.assert_array_equal(scaled[name], np.asarray(tree[name]) * factor)
        np.testing.assert_array_equal(back[name], tree[name])
        assert back[name].dtype == tree[name].dtype
    for name in ("n", "key"):
        assert scaled[name] is tree[name] and back[name] is tree[name]
    assert back["other"] == tree["other"]


def test_no_op_returns_its_argument():
    tree = {"x": jnp.ones(2, jnp.float16)}
    no_op = jmpx.NoOpLossScale()
    assert no_op.scale(tree) is tree and no_op.unscale(tree) is tree
    assert no_op.adjust(jnp.array(False)) is no_op and no_op.loss_scale == 1


@pytest.mark.parametrize(
    ("dtype", "kind", "run"),
    [
        (jnp.float16, "Static", lambda f: f),
        (jnp.bfloat16, "Dynamic", jax.jit),
        (jnp.float8_e4m3fn, "Static", jax.jit),
    ],
)
def test_narrow_leaves_are_scaled_in_float32(dtype, kind, run, rng):
    x = jnp.asarray(rng.normal(size=64), dtype).at[0].set(4)  # 4 * 2**15 is beyond float16
    wide = np.asarray(x).astype(np.float32)
    scaled, unscaled = run(KINDS[kind].scale)(x), run(KINDS[kind].unscale)(x)
    assert scaled.dtype == unscaled.dtype == jnp.float32
    np.testing.assert_array_equal(scaled, wide * np.float32(2**15))
    np.testing.assert_array_equal(unscaled, wide / np.float32(2**15))


def low_dynamic(loss_scale):
    return jmpx.DynamicLossScale(loss_scale, min_loss_scale=0)


@pytest.mark.parametrize("kind", [jmpx.StaticLossScale, low_dynamic])
def test_powers_of_two_are_exact_to_the_extremes(kind, rng):
    # XLA computes x / s as x * (1 / s), and flushes 1 / 2**127 to zero.
    x = rng.normal(size=100).astype(np.float32)
    by_argument = jax.jit(lambda loss_scale, x: loss_scale.unscale(x))
    for power in (-126, -3, 0, 15, 126):
        scaled = np.ldexp(x, np.clip(power, -100, 100)).astype(np.float32)
        loss_scale = kind(2.0**power)
        expected = np.ldexp(scaled.astype(np.float64), -power).astype(np.float32)
        np.testing.assert_array_equal(loss_scale.unscale(scaled), expected)
        if kind is low_dynamic or power == -126:
            np.testing.assert_array_equal(by_argument(loss_scale, scaled), expected)
        with np.errstate(over="ignore", under="ignore"):
            product = x * np.float32(2.0**power)
        product[np.abs(product) < 2.0**-126] = 0  # flushed
        np.testing.assert_array_equal(loss_scale.scale(x), product)
    for transform in (jax.jit, jax.vmap):
        np.testing.assert_array_equal(transform(loss_scale.unscale)(scaled), expected)


@settings(deadline=None, max_examples=30)
@given(
    st.floats(2.0**-126, 2.0**126, width=32),
    st.floats(-1, 1, width=32, allow_subnormal=False),
)
def test_unscale_divides(s, x):
    expected = np.float64(x) / np.float64(s)
    for kind in (jmpx.StaticLossScale, low_dynamic):
        got = float(kind(s).unscale(jnp.float32(x)))
        # XLA may multiply by the rounded reciprocal, and flushes numbers below 2**-126.
        assert abs(got - expected) <= 2.0**-22 * abs(expected) + 2.0**-126


def unflattened(number, **configuration):
    """Makes a loss scale as a checkpoint does: from its leaves, without its constructor."""
    template = jmpx.DynamicLossScale(**configuration)
    leaves = [np.float32(number), np.int32(0)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


ORIGINS = {
    "number": jmpx.DynamicLossScale,
    "NumPy": lambda number, **kw: jmpx.DynamicLossScale(np.float64(number), **kw),
    "array": lambda number, **kw: jmpx.DynamicLossScale(jnp.float32(number), **kw),
    "traced": lambda number, **kw: jax.jit(lambda x: jmpx.DynamicLossScale(x, **kw))(number),
    "mapped": lambda number, **kw: jax.tree.map(
        lambda x: x[0], jax.vmap(lambda x: jmpx.DynamicLossScale(x, **kw))(jnp.array([number]))
    ),
    "replaced": lambda number, **kw: dataclasses.replace(
        jmpx.DynamicLossScale(**kw), loss_scale=number
    ),
    "unflattened": unflattened,
}
# The initial scale, the configuration, and the resulting scale.
BOUNDS = [
    (2.0**20, {"max_loss_scale": 2.0**10}, 2.0**10),
    (0.5, {}, 1.0),
    (0.0, {"min_loss_scale": 0}, LEAST_SCALE),
    (2.0**127, {}, LARGEST_SCALE),
    (2.0**127, {"max_loss_scale": 2.0**127}, LARGEST_SCALE),
    (0.5, {"min_loss_scale": 0.125}, 0.5),
    (2.0**-140, {"min_loss_scale": 2.0**-140}, LEAST_SCALE),
    (8.0, {"min_loss_scale": 32, "max_loss_scale": 64}, 32.0),
]


@pytest.mark.parametrize("origin", ORIGINS)
def test_one_scale_holds_in_every_method(origin, rng):
    x = rng.normal(size=4).astype(np.float32)
    for start, configuration, expected in BOUNDS[: 2 if origin == "traced" else None]:
        loss_scale = ORIGINS[origin](start, **configuration)
        if origin != "unflattened":
            assert value(loss_scale) == expected, (start, configuration)
        assert loss_scale.scale(jnp.float32(1)) == value(loss_scale.adjust(True)) == expected
        low = max(configuration.get("min_loss_scale", 1), LEAST_SCALE)
        assert value(loss_scale.adjust(False)) == max(expected / 2, low)
        if 2.0**-100 < expected < 2.0**100:  # nothing of x is flushed
            np.testing.assert_array_equal(loss_scale.unscale(loss_scale.scale(x)), x)


@pytest.mark.parametrize(("start", "configuration", "expected"), BOUNDS[:4])
def test_and_in_the_gradient_functions(start, configuration, expected, rng):
    x = jnp.asarray(rng.integers(1, 8, size=4), jnp.float32)
    factor = 2.0 ** -np.clip(np.log2(expected), -100, 100)

    @jax.jit
    def run(loss_scale, x):
        seen = loss_scale.scale(jnp.float32(1)), loss_scale.adjust(False).adjust(True).loss_scale
        grad_fn = jmpx.grad(lambda w: (w * x * factor).sum(), loss_scale, policy="full")
        return *seen, grad_fn(x)

    scale, shrunk, (new, finite, grads) = run(unflattened(start, **configuration), x)
    assert scale == value(new) == expected and finite
    assert shrunk == max(expected / 2, configuration.get("min_loss_scale", 1), LEAST_SCALE)
    np.testing.assert_array_equal(grads, x * factor)


def test_a_static_scale_of_0_holds_a_place_and_cannot_scale():
    nothing = jmpx.StaticLossScale(0.0)
    assert jax.tree.leaves(nothing) == [] and nothing == jmpx.StaticLossScale(0)
    grad_fn = jmpx.grad(jnp.sum, nothing, policy="full")
    for use in (nothing.scale, nothing.unscale, jax.jit(nothing.unscale), grad_fn):
        with pytest.raises(ValueError, match=r"Cannot scale .* by StaticLossScale\(0\): give a"):
            use(jnp.ones(2))


@pytest.mark.parametrize(
    "loss_scale",
    [jmpx.StaticLossScale(1 / 3), low_dynamic(1000.1)],
    ids=["Static", "Dynamic"],
)
def test_float64_gradients_keep_their_digits(loss_scale, rng):
    exact = float(np.float32(loss_scale.loss_scale))
    with enable_x64():
        x = rng.normal(size=64)
        unscaled = jax.jit(lambda s, x: s.unscale(x))(loss_scale, jnp.asarray(x))
        assert unscaled.dtype == jnp.float64
        np.testing.assert_allclose(unscaled, x / exact, rtol=2.0**-52)
        grad_fn = jmpx.grad(lambda w: (w * x).sum(), loss_scale, policy="f64")
        np.testing.assert_allclose(jax.jit(grad_fn)(jnp.asarray(x))[2], x, rtol=2.0**-51)
        both = jax.jit(lambda s, z: s.unscale(s.scale(z)))(loss_scale, jnp.asarray(x + 1j * x))
        np.testing.assert_allclose(both, x + 1j * x, rtol=2.0**-51)


def test_each_leaf_is_unscaled_in_its_own_dtype_by_one_product(rng):
    with enable_x64():
        tree = {
            "a": jnp.asarray(rng.normal(size=3), jnp.float16),
            "b": normal(rng, 3),
            "c": jnp.asarray(rng.normal(size=3), jnp.float64),
        }
        for method in ("scale", "unscale"):
            jaxpr = jax.make_jaxpr(lambda s, t, m=method: getattr(s, m)(t))(
                jmpx.DynamicLossScale(3.0), tree
            )
            of_arrays = [eqn for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape == (3,)]
            names = sorted(eqn.primitive.name for eqn in of_arrays)
            assert names == ["convert_element_type", "mul", "mul", "mul"]
            products = [eqn.invars for eqn in of_arrays if eqn.primitive.name == "mul"]
            dtypes = [{atom.aval.dtype.name for atom in atoms} for atoms in products]
            assert dtypes == [{"float32"}, {"float32"}, {"float64"}]


def test_unscaled_gradients_are_checked_where_unscaling_may_overflow():
    def are_read(scale):
        grad_fn = jmpx.grad(lambda w: (w * w).sum(), scale, policy="full")
        jaxpr = jax.make_jaxpr(lambda w: grad_fn(w)[1:])(jnp.ones(3))
        return any(jaxpr.jaxpr.outvars[-1] in eqn.invars for eqn in jaxpr.eqns)

    for text in ("static=1", "dynamic", "dynamic,min=1"):
        assert not are_read(jmpx.get_loss_scale(text))
    for text in ("static=0.5", "dynamic,init=2,min=0.5"):
        assert are_read(jmpx.get_loss_scale(text))
    own = type("Own", (jmpx.DynamicLossScale,), {"unscale": lambda self, tree: tree})
    assert are_read(own())


# Construction


def test_positional_arguments_are_those_of_jmp():
    loss_scale = jmpx.DynamicLossScale(jnp.float32(10), jnp.int32(3), 20, 3, jnp.asarray(0.37))  # pyright: ignore[reportArgumentType]
    assert (value(loss_scale), loss_scale.counter, loss_scale.period) == (10, 3, 20)
    assert loss_scale.factor == 3 and loss_scale.min_loss_scale == np.float32(0.37)
    assert jmpx.DynamicLossScale() == jmpx.DynamicLossScale(2**15, 0, 2000, 2, 1.0, None, None, 1)
    for name in ("NoOp", "Static", "Dynamic"):
        assert isinstance(KINDS[name], getattr(jmpx, f"{name}LossScale"))
        assert isinstance(KINDS[name], jmpx.LossScale)


@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
def test_an_integer_array_is_taken_with_one_warning(name):
    with warns_once(__file__, f"Expected floating type for {name}"):
        loss_scale = jmpx.DynamicLossScale(**{name: jnp.asarray(8)})  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda s: s.adjust(False), loss_scale)
        jmpx.DynamicLossScale(2**15)
    assert getattr(loss_scale, name) == 8


def test_a_static_scale_is_hashable_and_a_constant():
    static = jmpx.StaticLossScale(jnp.float16(8))
    assert static == jmpx.StaticLossScale(8) and hash(static) == hash(jmpx.StaticLossScale(8.0))
    assert isinstance(static.loss_scale, np.float32)  # pyright: ignore[reportArgumentType]


# As pytrees


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, np.float64, jnp.float32])
def test_the_scale_is_a_strong_float32_whatever_it_was_given(dtype):
    for given_scale in (np.asarray(2**15, dtype), jnp.asarray(np.asarray(2**15, dtype))):
        loss_scale = jmpx.DynamicLossScale(given_scale)
        for scale in (loss_scale, loss_scale.adjust(True), jmpx.cast_tree(loss_scale, jnp.float16)):
            assert scale.loss_scale.dtype == jnp.float32 and value(scale) == 2**15
            assert scale.counter.dtype == jnp.int32
            assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(scale))


def test_leaves_and_paths():
    assert jax.tree.leaves(KINDS["NoOp"]) == [] == jax.tree.leaves(KINDS["Static"])
    loss_scale = jmpx.DynamicLossScale(2.0**15, hysteresis=3)
    assert jax.tree.leaves(loss_scale) == [loss_scale.loss_scale, loss_scale.counter]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(loss_scale)]
    assert paths == [".loss_scale", ".counter"]
    assert jax.tree.structure(loss_scale) != jax.tree.structure(KINDS["Dynamic"])


def test_trees_of_anything_have_its_structure():
    loss_scale = KINDS["Dynamic"]
    mesh = jax.sharding.Mesh(jax.devices(), "d")
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for thing in (0, None, True, replicated, jax.sharding.PartitionSpec(), object(), "x"):
        tree = jax.tree.map(lambda _, thing=thing: thing, loss_scale)
        assert tree.loss_scale is thing and tree.counter is thing
        assert jmpx.DynamicLossScale(object()).counter == 0
    shardings = jax.tree.map(lambda _: replicated, loss_scale)
    placed = jax.jit(lambda s: s, in_shardings=(shardings,), out_shardings=shardings)(loss_scale)
    assert placed.loss_scale.sharding == replicated
    axes = jax.tree.map(lambda _: 0, loss_scale)
    stacked = jax.vmap(jmpx.DynamicLossScale)(jnp.array([2.0, 4.0]))
    halved = jax.vmap(lambda s: s.adjust(False), in_axes=(axes,))(stacked)
    np.testing.assert_array_equal(halved.loss_scale, [1.0, 2.0])


def test_a_stack_of_scales_needs_vmap(rng):
    stack = jax.vmap(jmpx.DynamicLossScale)(jnp.array([1.0, 2.0, 4.0]))
    x = rng.normal(size=3).astype(np.float32)
    scaled = jax.vmap(lambda s, x: s.scale(x))(stack, x)
    np.testing.assert_array_equal(scaled, x * [1, 2, 4])
    for method in (stack.scale, stack.unscale, lambda _: stack.adjust(True)):
        with pytest.raises(ValueError, match=r"Expected a loss scale of shape \(\), got \(3,\)"):
            method(x)
