"""Arguments and results of a function under autocast: NumPy, numbers, weak types, no arrays."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, assert_same_bits, dtypes, enable_x64, normal
from helpers.autocast import assert_near, check
from jax import lax

import jmpx


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_output(rng, compute):
    w, x = normal(rng, 3, 2), normal(rng, 4, 3)
    f = functools.partial(jmpx.autocast, lambda w, x: (x @ w, jnp.argmax(x), "text", 3.5, None))
    assert dtypes(f(f"c={compute}")(w, x)[:2]) == ["float32", "int32"]
    assert dtypes(f(f"c={compute}", output=None)(w, x)[:2]) == [compute, "int32"]
    assert dtypes(f(f"c={compute}", output="bf16")(w, x)[:2]) == ["bfloat16", "int32"]
    assert f(f"c={compute}")(w, x)[2:] == ("text", 3.5, None)


def test_it_keeps_name_and_docstring():
    @jmpx.autocast
    def f(x):
        """Squares."""
        return x * x

    assert (f.__name__, f.__doc__) == ("f", "Squares.")


def test_it_decorates_with_arguments(rng):
    @jmpx.autocast(policy="c=f16; op.tanh: f32", output=None)
    def f(x):
        """Squares."""
        return x @ x, jnp.tanh(x @ x)

    assert [y.dtype for y in f(normal(rng, 2, 2))] == [jnp.float16, F32]
    assert (f.__name__, f.__doc__) == ("f", "Squares.")


def test_static_arguments(pair):
    @functools.partial(jax.jit, static_argnums=2, static_argnames="name")
    def f(x, w, function, *, name):
        return {name: function(x @ w)}

    check(lambda x, w: f(x, w, jnp.tanh, name="tanh"), *pair)
    cast = jax.jit(jmpx.autocast(f), static_argnums=2, static_argnames="name")
    assert_near(cast(*pair, jnp.tanh, name="y"), f(*pair, jnp.tanh, name="y"))


def test_leaves_that_are_no_arrays_pass(pair):
    def f(x, config, scale=2.0):
        y = (x @ x) * scale * config["rate"]
        return y, config, scale, None, "text", 7, jnp.tanh

    x, _ = pair
    config = {"rate": 0.5, "n": 3, "flag": True, "name": "a", "none": None, "object": object()}
    result, reference = jmpx.autocast(f)(x, config), f(x, config)
    assert result[1:] == reference[1:]
    assert all(type(a) is type(b) for a, b in zip(result[1:], reference[1:], strict=True))
    assert_near(result[0], reference[0])


@pytest.mark.parametrize(
    "x",
    [np.ones((2, 2), np.float32), np.float32(3), np.ones((2, 2)), np.int32(3), np.array(True)],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_numpy_inputs(x):
    def f(x):
        x = jnp.asarray(x)
        return x, x + x, jnp.eye(2, dtype=F32) @ jnp.ones((2, 2), F32)

    assert_same_bits(jmpx.autocast(f)(x), jax.tree.map(jnp.asarray, f(x)))


def test_arrays_of_no_size():
    def f(x):
        y = x @ x.T
        return y, y.sum(), jax.nn.softmax(x), jnp.concatenate([x, x])

    check(f, jnp.ones((0, 4), F32))
    x = jnp.ones((4, 0), F32)
    assert [y.shape for y in jax.eval_shape(jmpx.autocast(f), x)] == [(4, 4), (), (4, 0), (8, 0)]
    assert jax.grad(jmpx.autocast(lambda x: (x @ x.T).sum()))(x).shape == (4, 0)


def test_results_are_as_weakly_typed_as_before(pair):
    def f(x):
        return x @ x, jnp.asarray(2.0), jnp.tanh(jnp.asarray(2.0)), x * 2

    results = (jax.eval_shape(g, pair[0]) for g in (jmpx.autocast(f), f))
    assert [y.weak_type for y in next(results)] == [y.weak_type for y in next(results)]


def test_weakly_typed_numbers_stay_so_inside(pair):
    def f(n, x):
        low = n * x.astype(BF16) * jnp.asarray(2.0)  # strict promotion lets a weak type alone do so
        return low, lax.fori_loop(0, 3, lambda i, c: c * 0.5 + x[0, 0], 0.0), n * (x @ x)

    check(f, jnp.asarray(0.5), pair[0], dot_general="bfloat16")


# Arguments of NumPy.

NUMPY = {
    "one_hot": (lambda i: jax.nn.one_hot(i, 3, dtype=F32), [np.array([0, 2])]),
    "take": (lambda x, i: jnp.take(x, i, axis=0), [np.eye(3), np.array([1, 0])]),
    "relu": (jax.nn.relu, [np.linspace(-1, 1, 5)]),
    "matmul": (lambda x, w: x @ w, [np.eye(3), np.full((3, 3), 0.5, np.float32).astype(float)]),
    "with float32": (
        lambda x, n: x * n.astype(x.dtype),
        [np.array([1, 2], np.float32), np.array([3, 4])],
    ),
    "uint64": (lambda x: x + x, [np.array([2**40 + 1, 7], np.uint64)]),
    "complex128": (lambda x: x * x, [np.array([1j, 2.0])]),
    "numpy.int64": (lambda n: n * n, [np.int64(7)]),
    "numpy.float64": (lambda x: jnp.tanh(x), [np.float64(0.5)]),
    "numpy.bool": (lambda b: ~b, [np.bool_(True)]),
    "untouched": (lambda x: x, [np.arange(3)]),
    "in a tree": (lambda tree: tree["i"] + 1, [{"i": np.arange(3), "name": "a", "n": 3}]),
    "under grad": (
        lambda x, i: jax.grad(lambda x: (x[i] ** 2).sum())(x),
        [np.arange(3.0), np.array([0, 2])],
    ),
}


@pytest.mark.filterwarnings("ignore:No product runs in 16 bits")  # of float64
@pytest.mark.sampled(9)
@pytest.mark.parametrize("policy", ["c=bf16", "c=full"])
@pytest.mark.parametrize("name", NUMPY)
def test_arguments_of_numpy_are_as_wide_as_jax_makes_them(name, policy):
    fn, args = NUMPY[name]
    for x64 in (False, True):
        with enable_x64() if x64 else jax.numpy_dtype_promotion("strict"):
            arrays = [jax.tree.map(lambda a: a if isinstance(a, str) else jnp.asarray(a), args)]
            expected = fn(*arrays[0])
            got = jmpx.autocast(fn, policy)(*args)
            assert got.dtype == expected.dtype
            np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-2)
            if policy == "c=full":
                np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("policy", ["c=bf16", "c=full"])
def test_an_embedding_of_numpy_integers(policy):
    module, tokens = nn.Embed(5, 2), np.array([[1, 4], [0, 1]])
    params = module.init(jax.random.key(0), tokens)
    got = jmpx.autocast(module.apply, policy)(params, tokens)
    np.testing.assert_allclose(got, module.apply(params, tokens), rtol=1e-2)  # pyright: ignore[reportArgumentType, reportCallIssue]
