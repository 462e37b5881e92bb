import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import enable_x64, normal

import jmpx
from jmpx._base.casts import at_least_float32
from jmpx._base.nnx_objects import is_object, is_whole

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32]


class Box:
    """A pytree of a class of the user's own."""

    def __init__(self, content):
        self.content = content


jax.tree_util.register_pytree_node(
    Box, lambda box: ((box.content,), None), lambda _, children: Box(children[0])
)

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


@pytest.mark.parametrize("dtype", [*FLOATS, jnp.float8_e4m3fn])
def test_cast_tree_leaves_other_leaves_as_the_same_objects(dtype):
    cast = jmpx.cast_tree({**UNTOUCHED, "none": None}, dtype)
    assert cast["none"] is None
    for name, leaf in UNTOUCHED.items():
        assert cast[name] is leaf, name


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("kind", ["jax", "numpy", "numpy scalar", "structure", "tracer"])
def test_cast_tree_casts_every_kind_of_floating_array(kind, source, target, rng):
    array = np.asarray(rng.normal(size=()) if kind == "numpy scalar" else rng.normal(size=4))
    array = array.astype(source)
    if kind == "tracer":
        shapes = jax.eval_shape(functools.partial(jmpx.cast_tree, dtype=target), array)
        assert shapes.dtype == target
        return
    leaf = {
        "jax": jnp.asarray,
        "numpy": np.asarray,
        "numpy scalar": lambda x: x[()],
        "structure": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    }[kind](array)
    box = jmpx.cast_tree(Box([leaf, (leaf,)]), target)
    cast = box.content[0]
    assert cast.dtype == target and cast.shape == leaf.shape  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(cast, type(leaf) if kind != "numpy scalar" else np.generic)
    assert (cast is leaf) == (source == target)
    if kind != "structure":
        expected = array.astype(target)
        np.testing.assert_array_equal(np.asarray(cast), expected)
        np.testing.assert_array_equal(np.asarray(box.content[1][0]), expected)


def test_cast_of_a_structure_keeps_its_sharding():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    assert jmpx.cast_tree(leaf, "bf16").sharding == sharding


def test_numpy_overflow_is_inf_without_a_warning():
    assert np.isinf(jmpx.cast_tree(np.array([1e6], np.float32), jnp.float16)).all()


MESH = jax.sharding.Mesh(jax.devices(), "d")
PLACES = {
    "uncommitted": lambda x: x,
    "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    "another device": lambda x: jax.device_put(x, jax.devices()[1]),
    "replicated": lambda x: jax.device_put(x, named_sharding()),
    "sharded": lambda x: jax.device_put(x, named_sharding("d")),
    "sharded columns": lambda x: jax.device_put(x, named_sharding(None, "d")),
}


def named_sharding(*axes):
    return jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec(*axes))


def test_leaves_stay_where_they_are(rng):
    copies = 2
    x = rng.normal(size=(copies, 8, 8)).astype(np.float32)
    tree = [[put(jnp.asarray(x[i])) for put in PLACES.values()] for i in range(copies)]
    cast = jmpx.cast_tree((tree, {"numpy": x}), jnp.float16)
    assert type(cast[1]["numpy"]) is np.ndarray
    for i, row in enumerate(cast[0]):
        for before, after in zip(tree[i], row, strict=True):
            assert after.dtype == jnp.float16
            assert (after.sharding, after.committed) == (before.sharding, before.committed)
            np.testing.assert_array_equal(after, x[i].astype(np.float16))


def test_under_tracing_each_leaf_is_cast_by_itself(rng):
    leaves = [normal(rng, 3) for _ in range(70)]
    cast = functools.partial(jmpx.cast_tree, dtype="f16")
    jaxpr = jax.make_jaxpr(cast)(leaves)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["convert_element_type"] * 70
    constants = jax.jit(lambda x: cast([x, *leaves]))(leaves[0])
    np.testing.assert_array_equal(jnp.stack(constants[1:]), jnp.stack(cast(leaves)))


NAMED = [
    (jmpx.cast_to_full, jnp.float32),
    (jmpx.mpx.cast_to_full_precision, jnp.float32),
    (jmpx.cast_to_full, jnp.float32),
    (jmpx.mpx.cast_to_float16, jnp.float16),
    (jmpx.mpx.cast_to_bfloat16, jnp.bfloat16),
    (jmpx.cast_to_half, jmpx.half_dtype()),
    (jmpx.mpx.cast_to_half_precision, jmpx.half_dtype()),
]


@pytest.mark.parametrize(("cast", "dtype"), NAMED)
def test_named_casts(cast, dtype, rng):
    tree = {"x": rng.normal(size=3), "n": 1}
    assert cast(tree)["x"].dtype == dtype
    assert cast(tree)["n"] == 1


def test_float64_needs_x64(rng):
    x = rng.normal(size=3).astype(np.float32)
    with pytest.raises(ValueError, match="jax_enable_x64"):
        jmpx.cast_tree(x, "float64")
    with pytest.raises(ValueError, match="jax_enable_x64"):
        jmpx.get_policy("float64").cast_to_compute(x)
    with enable_x64():
        assert jmpx.cast_tree(jnp.asarray(x), "float64").dtype == np.float64


@pytest.mark.parametrize("dtype", [None, 3, float])
def test_cast_tree_refuses_what_is_no_dtype(dtype):
    with pytest.raises(TypeError, match="Unknown dtype"):
        jmpx.cast_tree({}, dtype)


# cast_function, force_full_precision


def structured(x, *, factor=1.0, n=2):
    return {"y": [x * factor], "n": n, "name": "result", "list": (x + 1, None)}


@pytest.mark.parametrize("return_dtype", [None, "f32", jnp.float16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cast_function_casts_arguments_and_any_result(dtype, return_dtype, rng):
    seen = []

    def func(x, *, scale):
        seen.append((x["a"].dtype, scale.dtype))
        return structured(x["a"] * scale)

    run = jmpx.mpx.cast_function(func, dtype, return_dtype)
    x = {"a": rng.normal(size=3).astype(np.float32)}
    result = run(x, scale=np.float32(2))
    expected = dtype if return_dtype is None else jmpx.Policy(*[return_dtype] * 3).output_dtype
    assert seen == [(dtype, dtype)]
    assert result["y"][0].dtype == result["list"][0].dtype == expected
    assert (result["n"], result["name"], result["list"][1]) == (2, "result", None)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_force_full_precision_computes_in_float32(dtype, rng):
    x = jnp.asarray(rng.uniform(1, 2, size=70_000), dtype)
    total = jmpx.force_full_precision(lambda x: x.sum() / x.size, jnp.float32)(x)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, np.asarray(x).astype(np.float64).mean(), rtol=1e-5)


def test_force_full_precision_gives_back_the_dtype_that_came_in(rng):
    f16, bf16 = (jnp.asarray(rng.normal(size=3), d) for d in (jnp.float16, jnp.bfloat16))
    f32 = normal(rng, 3)
    add = jmpx.force_full_precision(lambda *xs: {"sum": sum(xs)})  # pyright: ignore[reportArgumentType, reportCallIssue]
    cases = [((f16,), f16), ((bf16, bf16), bf16), ((bf16, f32), f32), ((f16, bf16), f32)]
    for inputs, like in cases:
        assert add(*inputs)["sum"].dtype == like.dtype
    ones = jmpx.force_full_precision(lambda n: jnp.ones(n, jnp.float16))
    assert ones(3).dtype == jnp.float16  # no floating input: as it is


@pytest.mark.thorough
def test_force_full_precision_as_decorator_and_under_transformations(rng):
    @jmpx.force_full_precision
    def softmax(x, axis=-1):
        """Sums to one."""
        assert x.dtype == jnp.float32
        return jax.nn.softmax(x, axis=axis)

    x = jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16)
    assert softmax.__name__ == "softmax" and softmax.__doc__ == "Sums to one."
    for run in (softmax, jax.jit(softmax), jax.vmap(softmax)):
        y = run(x)
        assert y.dtype == jnp.bfloat16
        expected = jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(jnp.bfloat16)
        np.testing.assert_array_equal(y, expected)
    grad = jax.grad(lambda x: softmax(x)[0, 0].astype(jnp.float32))(x)
    assert grad.dtype == jnp.bfloat16 and bool(jnp.isfinite(grad).all())


@jax.tree_util.register_pytree_node_class
class Scale:
    """A callable pytree, as the modules of Equinox are."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x * self.weight  # strict promotion: an error unless both dtypes agree

    def tree_flatten(self):
        return (self.weight,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_callable_pytree_is_cast_with_its_arguments(rng):
    module = Scale(jnp.asarray(rng.normal(size=3), jnp.bfloat16))
    x = jnp.asarray(rng.normal(size=3), jnp.bfloat16)
    y = jmpx.force_full_precision(module, jnp.float32)(x)
    np.testing.assert_array_equal(y, x.astype(jnp.float32) * module.weight.astype(jnp.float32))
    assert module.weight.dtype == jnp.bfloat16
    assert jmpx.mpx.cast_function(module, "f16")(x).dtype == jnp.float16


def test_wrappers_refuse_what_cannot_be_called():
    with pytest.raises(TypeError, match="Expected a function to wrap, got 3"):
        jmpx.mpx.cast_function(3, "f32")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Expected a function to wrap"):
        jmpx.force_full_precision(None)  # pyright: ignore[reportArgumentType]


# all_finite


@pytest.mark.sampled(8)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [*FLOATS, jnp.complex64, jnp.float8_e5m2])
@pytest.mark.parametrize("leaves", [1, 7])
def test_all_finite_finds_one_bad_entry_anywhere(leaves, dtype, bad, rng):
    tree = [jnp.asarray(rng.normal(size=(3, 2)), dtype) for _ in range(leaves)]
    assert jmpx.all_finite(tree).dtype == jnp.bool_ and jmpx.all_finite(tree).shape == ()
    assert jmpx.all_finite(tree) and jax.jit(jmpx.all_finite)(tree)
    which = rng.integers(leaves)
    tree[which] = tree[which].at[tuple(rng.integers((3, 2)))].set(bad)
    assert not jmpx.all_finite(tree) and not jax.jit(jmpx.all_finite)(tree)


def test_all_finite_of_other_leaves():
    assert jmpx.all_finite(None) and jmpx.all_finite({}) and jmpx.all_finite(UNTOUCHED)
    assert jmpx.all_finite([1.0, 2]) and not jmpx.all_finite([1.0, float("nan")])
    assert not jmpx.all_finite([np.ones(2), np.float32(np.inf)])
    assert not jmpx.all_finite(ml_dtypes.bfloat16(np.inf))


def test_all_finite_under_vmap_is_per_element(rng):
    tree = [rng.normal(size=(4, 3)).astype(np.float32) for _ in range(3)]
    tree[1][2, 0] = np.nan
    flags = jax.vmap(jmpx.all_finite)(tree)
    np.testing.assert_array_equal(flags, [True, True, False, True])
    together = jax.vmap(functools.partial(jmpx.all_finite, axis_name="i"), axis_name="i")
    np.testing.assert_array_equal(together(tree), [False] * 4)


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


@pytest.mark.parametrize("pred", [jnp.ones(1, bool), 1, 1.0, None, jnp.int32(1), "yes"])
def test_select_tree_refuses_a_pred_that_is_no_scalar_bool(pred):
    with pytest.raises(TypeError, match="Expected pred to be a scalar bool"):
        jmpx.select_tree(pred, None, None)


@pytest.mark.parametrize("other", [jnp.ones(3, jnp.bfloat16), jnp.ones(2)])
def test_select_tree_says_where_trees_differ(other):
    with pytest.raises(TypeError, match=r"at tree\['a'\]\[1\]"):
        jmpx.select_tree(True, {"a": [1, jnp.ones(3)]}, {"a": [1, other]})


@pytest.mark.parametrize("leaf", ["jax", "numpy"])
def test_constants_of_a_traced_function_are_cast_once_while_it_is_traced(leaf, rng):
    weights = rng.normal(size=(3, 3)).astype(np.float32)
    tree = {"w": jnp.asarray(weights) if leaf == "jax" else weights}

    def product(x):
        return x @ jmpx.cast_tree(tree, jnp.bfloat16)["w"]

    x = jnp.asarray(rng.normal(size=(2, 3)), jnp.bfloat16)
    for func in (
        product,
        jax.jit(product),
        jax.vmap(product),
        jax.grad(lambda x: product(x).sum()),
    ):
        assert "f32[3,3]" not in str(jax.make_jaxpr(func)(x))
    np.testing.assert_array_equal(
        jax.jit(product)(x), jax.jit(jnp.matmul)(x, weights.astype(x.dtype))
    )


@pytest.mark.parametrize("dtype", [*FLOATS, jnp.float8_e4m3fn, np.float64])
def test_what_is_narrower_than_float32_is_widened_to_it(dtype):
    leaf = np.ones(2, dtype)
    wide = at_least_float32(leaf)
    assert wide.dtype == max(leaf.dtype, np.dtype(np.float32), key=lambda dtype: dtype.itemsize)
    assert (wide is leaf) == (leaf.dtype.itemsize >= 4)


def test_a_state_of_nnx_is_told_from_its_module():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    assert is_whole(state) and not is_object(state) and is_object(model)
    assert not is_whole({"w": 1})
