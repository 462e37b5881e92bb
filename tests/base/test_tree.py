"""`cast_tree`, `all_finite` and `select_tree`."""

import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import enable_x64, normal
from helpers.maps import mesh_of
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import jmpx

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scale:
    """A pytree of a class of the user's own, and callable, as the modules of Equinox are."""

    weight: Any

    def __call__(self, x):
        return x * self.weight  # strict promotion: an error unless both dtypes agree


UNTOUCHED = {
    "integers": jnp.arange(3),
    "numpy integers": np.arange(3),
    "bools": jnp.array([True]),
    "complex": jnp.array([1j]),
    "new key": jax.random.key(3),
    "old key": jax.random.PRNGKey(3),
    "int": 3,
    "float": 0.1,
    "bool": True,
    "string": "relu",
    "function": jnp.tanh,
    "object": object(),
    "dtype": np.dtype("float32"),
    "structure": jax.ShapeDtypeStruct((2,), jnp.int32),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn])
def test_cast_tree_leaves_other_leaves_as_the_same_objects(dtype):
    cast = jmpx.cast_tree({**UNTOUCHED, "none": None}, dtype)
    assert cast["none"] is None
    for name, leaf in UNTOUCHED.items():
        assert cast[name] is leaf, name


KINDS = {
    "jax": jnp.asarray,
    "numpy": np.asarray,
    "numpy scalar": lambda x: x[0],
    "structure": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
}


@pytest.mark.parametrize("kind", KINDS)
def test_cast_tree_casts_every_kind_of_floating_array(kind, rng):
    for source, target in [(s, t) for s in FLOATS for t in FLOATS]:
        array = rng.normal(size=4).astype(source)
        leaf = KINDS[kind](array)
        box = jmpx.cast_tree(Scale([leaf, (leaf,)]), target)
        cast = box.weight[0]
        assert cast.dtype == target and cast.shape == leaf.shape
        assert isinstance(cast, type(leaf) if kind != "numpy scalar" else np.generic)
        assert (cast is leaf) == (source == target)
        if kind != "structure":
            expected = KINDS[kind](array.astype(target))
            np.testing.assert_array_equal(np.asarray(cast), expected)
            np.testing.assert_array_equal(np.asarray(box.weight[1][0]), expected)


def test_cast_of_a_structure_keeps_its_sharding():
    sharding = SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    assert jmpx.cast_tree(leaf, "bf16").sharding == sharding


def test_numpy_overflow_is_inf_without_a_warning():
    assert np.isinf(jmpx.cast_tree(np.array([1e6], np.float32), jnp.float16)).all()


def test_leaves_stay_where_they_are(rng):
    mesh, devices = mesh_of(8), jax.devices()
    shardings = [NamedSharding(mesh, spec) for spec in (P(), P("data"), P(None, "data"))]
    x = rng.normal(size=(8, 8)).astype(np.float32)
    places = [*devices[:2], *shardings]
    tree = [jnp.asarray(x), *(jax.device_put(x, place) for place in places)]
    cast = jmpx.cast_tree((tree, {"numpy": x}), jnp.float16)
    assert type(cast[1]["numpy"]) is np.ndarray
    for before, after in zip(tree, cast[0], strict=True):
        assert after.dtype == jnp.float16
        assert (after.sharding, after.committed) == (before.sharding, before.committed)
        np.testing.assert_array_equal(after, x.astype(np.float16))


def test_under_tracing_each_leaf_is_cast_by_itself(rng):
    leaves = [normal(rng, 3) for _ in range(70)]
    cast = functools.partial(jmpx.cast_tree, dtype="f16")
    jaxpr = jax.make_jaxpr(cast)(leaves)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["convert_element_type"] * 70
    constants = jax.jit(lambda x: cast([x, *leaves]))(leaves[0])
    np.testing.assert_array_equal(jnp.stack(constants[1:]), jnp.stack(cast(leaves)))


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
def test_constants_of_a_traced_function_are_cast_once_while_it_is_traced(make, rng):
    weights = rng.normal(size=(3, 3)).astype(np.float32)
    tree = {"w": make(weights)}
    product = lambda x: x @ jmpx.cast_tree(tree, jnp.bfloat16)["w"]  # noqa: E731
    total = lambda x: product(x).sum()  # noqa: E731
    x = jnp.asarray(rng.normal(size=(2, 3)), jnp.bfloat16)
    for func in (product, jax.jit(product), jax.vmap(product), jax.grad(total)):
        assert "f32[3,3]" not in str(jax.make_jaxpr(func)(x))
    expected = jax.jit(jnp.matmul)(x, weights.astype(x.dtype))
    np.testing.assert_array_equal(jax.jit(product)(x), expected)


def test_named_casts(rng):
    """The functions of MPX are in tests/drop_in."""
    for cast, dtype in ((jmpx.cast_to_full, "float32"), (jmpx.cast_to_half, jmpx.half_dtype())):
        tree = cast({"x": rng.normal(size=3), "n": 1})
        assert tree["x"].dtype == dtype and tree["n"] == 1


def test_float64_with_x64(rng):
    x = rng.normal(size=3).astype(np.float32)
    with enable_x64():
        assert jmpx.cast_tree(jnp.asarray(x), "float64").dtype == np.float64


# cast_function, force_full_precision


@pytest.mark.parametrize(
    ("dtype", "return_dtype", "expected"),
    [
        (jnp.float16, None, jnp.float16),
        (jnp.bfloat16, "f32", jnp.float32),
        (jnp.float32, jnp.float16, jnp.float16),
    ],
)
def test_cast_function_casts_arguments_and_any_result(dtype, return_dtype, expected, rng):
    seen = []

    def func(x, *, scale):
        seen.append((x["a"].dtype, scale.dtype))
        y = x["a"] * scale
        return {"y": [y], "n": 2, "name": "result", "list": (y + 1, None)}

    run = jmpx.mpx.cast_function(func, dtype, return_dtype)
    result = run({"a": rng.normal(size=3).astype(np.float32)}, scale=np.float32(2))
    assert seen == [(dtype, dtype)]
    assert result["y"][0].dtype == result["list"][0].dtype == expected
    assert (result["n"], result["name"], result["list"][1]) == (2, "result", None)


def test_force_full_precision_computes_in_float32_and_gives_back_the_dtype_that_came_in(rng):
    x = jnp.asarray(rng.uniform(1, 2, size=70_000), jnp.bfloat16)
    total = jmpx.force_full_precision(lambda x: x.sum() / x.size, jnp.float32)(x)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, np.asarray(x).astype(np.float64).mean(), rtol=1e-5)
    f16, bf16, f32 = (jnp.ones(3, dtype) for dtype in FLOATS)
    add = jmpx.force_full_precision(lambda *xs: {"sum": sum(xs)})  # pyright: ignore[reportArgumentType, reportCallIssue]
    cases = [((f16,), f16), ((bf16, bf16), bf16), ((bf16, f32), f32), ((f16, bf16), f32)]
    for inputs, like in cases:
        assert add(*inputs)["sum"].dtype == like.dtype
    ones = jmpx.force_full_precision(lambda n: jnp.ones(n, jnp.float16))
    assert ones(3).dtype == jnp.float16  # no floating input: as it is


def test_force_full_precision_as_decorator_and_under_transformations(rng):
    @jmpx.force_full_precision
    def softmax(x, axis=-1):
        """Sums to one."""
        assert x.dtype == jnp.float32
        return jax.nn.softmax(x, axis=axis)

    x = jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16)
    assert softmax.__name__ == "softmax" and softmax.__doc__ == "Sums to one."
    y = jax.jit(jax.vmap(softmax))(x)
    assert y.dtype == jnp.bfloat16
    expected = jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, expected)
    grad = jax.jit(jax.grad(lambda x: softmax(x)[0, 0].astype(jnp.float32)))(x)
    assert grad.dtype == jnp.bfloat16 and bool(jnp.isfinite(grad).all())


def test_a_callable_pytree_is_cast_with_its_arguments(rng):
    weight, x = (jnp.asarray(rng.normal(size=3), jnp.bfloat16) for _ in range(2))
    module = Scale(weight)
    y = jmpx.force_full_precision(module, jnp.float32)(x)
    np.testing.assert_array_equal(y, x.astype(jnp.float32) * weight.astype(jnp.float32))
    assert module.weight.dtype == jnp.bfloat16
    assert jmpx.mpx.cast_function(module, "f16")(x).dtype == jnp.float16


# all_finite


@pytest.mark.parametrize(
    ("leaves", "dtype", "bad"),
    [(1, jnp.bfloat16, -np.inf), (1, jnp.complex64, np.inf), (7, jnp.float8_e5m2, np.nan)],
)
def test_all_finite_finds_one_bad_entry_anywhere(leaves, dtype, bad, rng):
    tree = [jnp.asarray(rng.normal(size=(3, 2)), dtype) for _ in range(leaves)]
    jitted = jax.jit(jmpx.all_finite)
    assert jitted(tree).dtype == jnp.bool_ and jitted(tree).shape == ()
    assert jmpx.all_finite(tree) and jitted(tree)
    which = rng.integers(leaves)
    tree[which] = tree[which].at[tuple(rng.integers((3, 2)))].set(bad)
    assert not jmpx.all_finite(tree) and not jitted(tree)


def test_all_finite_of_other_leaves():
    assert jmpx.all_finite(None) and jmpx.all_finite({}) and jmpx.all_finite(UNTOUCHED)
    assert jmpx.all_finite([1.0, 2]) and not jmpx.all_finite([1.0, float("nan")])
    assert not jmpx.all_finite([np.ones(2), np.float32(np.inf)])
    assert not jmpx.all_finite(ml_dtypes.bfloat16(np.inf))


def test_all_finite_under_vmap_is_per_element(rng):
    tree = [rng.normal(size=(4, 3)).astype(np.float32) for _ in range(3)]
    tree[1][2, 0] = np.nan
    flags = jax.jit(jax.vmap(jmpx.all_finite))(tree)
    np.testing.assert_array_equal(flags, [True, True, False, True])
    together = jax.vmap(functools.partial(jmpx.all_finite, axis_name="i"), axis_name="i")
    np.testing.assert_array_equal(jax.jit(together)(tree), [False] * 4)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(np.longdouble, (3,)), (np.longdouble, ()), (np.clongdouble, (3,)), (np.clongdouble, (0,))],
)
def test_all_finite_of_long_doubles(dtype, shape):
    beyond_float64 = np.full(shape, np.longdouble(10) ** 400, dtype)
    check = {"long": beyond_float64[()], "float": jnp.ones(2)}
    for run in (jmpx.all_finite, lambda t: jax.jit(lambda w: jmpx.all_finite({**t, "w": w}))(1.0)):
        assert run(check)
        bad = np.full(shape, np.nan if dtype == np.longdouble else np.inf, dtype)
        assert bool(run({**check, "long": bad})) == (0 in shape)
        assert not run({**check, "float": jnp.array([1.0, jnp.inf])})


# select_tree

NEW = {"x": jnp.arange(3.0), "key": jax.random.key(1), "rate": 0.1, "count": 2, "f": jnp.tanh}
OLD = {"x": -jnp.arange(3.0), "key": jax.random.key(2), "rate": 0.1, "count": 1, "f": jnp.tanh}


def pick(pred):
    picked = jmpx.select_tree(pred, NEW, OLD)
    assert picked.pop("f") is jnp.tanh and picked.pop("rate") == 0.1
    return picked


@pytest.mark.parametrize("take", [True, False])
@pytest.mark.parametrize("kind", [bool, np.bool_, jnp.bool_, "traced"])
def test_select_tree_selects_arrays_and_keeps_the_rest(kind, take):
    picked = jax.jit(pick)(take) if kind == "traced" else pick(kind(take))
    expected = NEW if take else OLD
    np.testing.assert_array_equal(picked["x"], expected["x"])
    assert picked["count"] == expected["count"]
    assert (jax.random.key_data(picked["key"]) == jax.random.key_data(expected["key"])).all()


def test_select_tree_never_mixes_in_what_it_does_not_pick():
    good, bad = {"x": jnp.ones(3)}, {"x": jnp.full(3, jnp.nan)}
    np.testing.assert_array_equal(jmpx.select_tree(True, good, bad)["x"], np.ones(3))
    np.testing.assert_array_equal(jmpx.select_tree(False, bad, good)["x"], np.ones(3))


def test_select_tree_of_a_number_and_an_array():
    picked = jmpx.select_tree(False, {"step": jnp.int32(4)}, {"step": 3})
    assert picked["step"] == 3 and picked["step"].dtype == jnp.int32  # pyright: ignore[reportAttributeAccessIssue]


OUTSIDE = {
    "text": (np.array(["a", "b"]), np.array(["c", "long"])),
    "bytes": (np.array([b"a"]), np.array([b"b"])),
    "dates": (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
    "durations": (np.timedelta64(1, "s"), np.timedelta64(2, "h")),
    "objects": (np.array([print, None]), np.array([None, print])),
    "long doubles": (np.longdouble(1), np.longdouble(2)),
    "a number and a text": (np.float32(1), np.str_("1")),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_select_tree_of_what_jax_cannot_hold(name):
    a, b = ({"w": jnp.full(2, float(w)), "x": x} for w, x in enumerate(OUTSIDE[name]))
    for true, false in ((True, False), (np.True_, np.False_), (jnp.array(True), jnp.array(False))):
        assert jmpx.select_tree(true, a, b)["x"] is a["x"]
        picked = jmpx.select_tree(false, a, b)
        assert picked["x"] is b["x"] and (picked["w"] == 1).all()
    picked = []

    def step(w, flag):
        picked.append(jmpx.select_tree(False, {**a, "w": w}, b)["x"])  # no tracer
        return jmpx.select_tree(flag, a, b)["w"]

    with pytest.raises(TypeError, match=r"by a traced flag between .* at tree\['x'\]"):
        jax.jit(step)(jnp.ones(2), True)
    assert picked[0] is b["x"]
    if name in ("objects", "a number and a text"):
        return
    # Equal leaves are no conflict.
    leaf, found = OUTSIDE[name][0], []
    equal = pickle.loads(pickle.dumps(leaf))
    jax.eval_shape(lambda flag: found.append(jmpx.select_tree(flag, leaf, equal)), True)
    assert found[0] is leaf and equal is not leaf
