"""Arguments and results of a function under autocast, its caches and its errors."""

import functools
import gc
import pathlib
import re
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, assert_same_bits, dtypes, enable_x64, normal
from helpers.autocast import assert_near, assert_ran, check, dtypes_of, eleven, seven
from jax import lax

import jmpx

# Other tests are about these warnings.
pytestmark = pytest.mark.filterwarnings(
    "ignore:JAX cannot trace", "ignore:No product runs in 16 bits"
)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_output(rng, compute):
    w, x = normal(rng, 3, 2), normal(rng, 4, 3)
    f = functools.partial(jmpx.autocast, lambda w, x: (x @ w, jnp.argmax(x), "text", 3.5, None))
    assert dtypes(f(f"c={compute}")(w, x)[:2]) == ["float32", "int32"]
    assert dtypes(f(f"c={compute}", output=None)(w, x)[:2]) == [compute, "int32"]
    assert dtypes(f(f"c={compute}", output="bf16")(w, x)[:2]) == ["bfloat16", "int32"]
    assert f(f"c={compute}")(w, x)[2:] == ("text", 3.5, None)


def test_it_decorates(rng):
    @jmpx.autocast(policy="c=f16; op.tanh: f32", output=None)
    def f(x):
        """Squares."""
        return x @ x, jnp.tanh(x @ x)

    assert [y.dtype for y in f(normal(rng, 2, 2))] == [F16, F32]
    assert (f.__name__, f.__doc__) == ("f", "Squares.")
    assert jmpx.autocast(f).__name__ == "f"


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


NUMPY = {
    "take": (lambda x, i: jnp.take(x, i, axis=0), [np.eye(3), np.array([1, 0])]),
    "matmul": (lambda x, w: x @ w, [np.eye(3), np.full((3, 3), 0.5, np.float32).astype(float)]),
    "uint64": (lambda x: x + x, [np.array([2**40 + 1, 7], np.uint64)]),
    "complex128": (lambda x: x * x, [np.array([1j, 2.0])]),
    "numpy.int64": (lambda n: n * n, [np.int64(7)]),
    "in a tree": (lambda tree: tree["i"] + 1, [{"i": np.arange(3), "name": "a", "n": 3}]),
}


@pytest.mark.parametrize("name", NUMPY)
def test_arguments_of_numpy_are_as_wide_as_jax_makes_them(name):
    fn, args = NUMPY[name]
    for x64, policy in ((False, "c=full"), (True, "c=bf16")):
        with enable_x64() if x64 else jax.numpy_dtype_promotion("strict"):
            arrays = jax.tree.map(lambda a: a if isinstance(a, str) else jnp.asarray(a), args)
            expected, got = fn(*arrays), jmpx.autocast(fn, policy)(*args)
            assert got.dtype == expected.dtype
            if policy == "c=full" or name != "matmul":
                np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


# What is traced again, what is kept, and what is freed.


def test_a_jitted_function_is_called_often_and_in_several_dtypes(pair):
    shared = jax.jit(lambda x, w: x @ w)

    def many(x, w):
        others = [shared(x.astype(d), w.astype(d)) for d in (BF16, F16)]
        return shared(x, w), shared(w, x), shared(shared(x, w), w), others, shared(x, w)

    check(many, *pair, dot_general="bfloat16 float16")
    cast = jmpx.autocast(lambda x, w: shared(x, w) + shared(w, x))
    calls = [e for e in jax.make_jaxpr(cast)(*pair).eqns if "jaxpr" in e.params]
    assert len(calls) == 2 and calls[0].params["jaxpr"] is calls[1].params["jaxpr"]
    outside = jax.jit(jmpx.autocast(shared))
    for dtype in (F32, BF16, F16, jnp.int32, F32):
        assert jax.eval_shape(outside, *(v.astype(dtype) for v in pair)).dtype == dtype


def test_what_changed_since_the_last_call_is_seen(pair):
    state = {"scale": 1.0}
    cast = jmpx.autocast(lambda x, w: (x @ w) * state["scale"])
    before = cast(*pair)
    state["scale"] = 3.0
    assert_near(cast(*pair), 3 * before)
    assert_ran(cast, *pair, dot_general="bfloat16")
    inner = jax.jit(jnp.matmul)
    cast = jmpx.autocast(lambda x, w: inner(x, w))
    assert_ran(cast, *pair, dot_general="bfloat16")
    with jax.default_matmul_precision("highest"):
        assert_ran(cast, *pair, dot_general="float32")
        assert_same_bits(jax.jit(cast)(*pair), jax.jit(lambda x, w: inner(x, w))(*pair))
    assert_ran(cast, *pair, dot_general="bfloat16")


def many_things(x, w):
    """jit, scan, cond, custom rules, a checkpoint and a mask in one function."""

    @jax.jit
    def layer(x):
        return jax.nn.relu(x @ w)

    x, _ = lax.scan(lambda c, _: (jax.checkpoint(layer)(c), None), x, None, length=2)
    x = lax.cond(x[0, 0] > 0, lambda: seven(x, w), lambda: eleven(x, w))
    return jnp.where(w > 0, x, -1e9).sum()


def test_no_tracer_leaks_and_jax_checks_its_own_invariants(pair):
    gc.freeze()  # the search for leaks collects garbage at each trace: only that of this test
    try:
        for check_of_jax, slope in (
            (jax.checking_leaks(), jax.grad(jmpx.autocast(many_things))),
            (jax.enable_checks(True), jmpx.autocast(jax.grad(many_things))),
        ):
            with check_of_jax:
                assert "bfloat16" in dtypes_of(slope, *pair)["dot_general"]
    finally:
        gc.unfreeze()


@pytest.mark.thorough
@pytest.mark.versions
def test_what_a_function_captured_is_freed(pair):
    def call():
        captured = jnp.array(pair[1])
        jax.jit(jmpx.autocast(jax.jit(lambda x: jax.nn.relu(x @ captured))))(pair[0])
        return weakref.ref(captured)

    captured = call()
    gc.collect()
    assert captured() is None


def test_a_captured_constant_stays_a_constant(pair):
    big = np.ones((4, 1000), np.float32)
    x, _ = pair
    result = check(lambda x: jax.jit(lambda x: x @ big + x @ jnp.asarray(big))(x), x)
    assert result.shape == (4, 1000)
    assert "1.0, 1.0" not in str(jax.make_jaxpr(jmpx.autocast(lambda x: x @ big))(x))


# Errors name the line of the user.

HERE = pathlib.Path(__file__)


def log_of(h):
    return jnp.log(h)  # the culprit


def in_scan(h):
    return lax.scan(lambda c, row: (c, log_of(row)), 0, h)[1]


# How autocast meets the line: the function of a product, and whether its line is known. JAX loses
# that of an operation in a loop, a branch or a checkpoint.
CASES = {
    "eager": (lambda f: jmpx.autocast(f), log_of, True),
    "jit": (lambda f: jax.jit(jax.value_and_grad(jmpx.autocast(f))), log_of, True),
    "jit within": (jmpx.autocast, lambda h: jax.jit(lambda h: jax.jit(log_of)(h))(h), True),
    "scan": (jmpx.autocast, in_scan, False),
    "checkpoint": (jmpx.autocast, jax.checkpoint(log_of), False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_nan_names_the_line_that_made_it(name):
    transform, inner, is_known = CASES[name]
    f = transform(lambda x: inner(-(x @ x)).sum())
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        jax.block_until_ready(f(jnp.ones((2, 2), jnp.float32)))
    (note,) = [note for note in caught.value.__notes__ if note.startswith("jmpx's autocast was ")]
    assert str(HERE) in note
    if is_known:
        match = re.search(rf" `log` of {re.escape(str(HERE))}:(\d+) \(log_of\)\.$", note)
        assert match and "the culprit" in HERE.read_text().splitlines()[int(match[1]) - 1]


def test_modules_are_joined_before_the_call_or_in_it():
    layer, x = eqx.nn.Linear(3, 4, key=jax.random.key(0)), jnp.ones(3)
    arrays, rest = eqx.partition(layer, eqx.is_array)
    joined = jmpx.autocast(lambda a, r, x: eqx.combine(a, r)(x), "c=bf16; Linear: full")
    np.testing.assert_array_equal(joined(arrays, rest, x), layer(x))
