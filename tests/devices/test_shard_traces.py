"""The search for shards leaves the program as it is, and is not there without an axis."""

import compiled_step
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.maps import AXIS, DEVICES, MAPS, mesh_of, over_devices
from helpers.shards import gradients
from jax.sharding import PartitionSpec as P

import jmpx._steps.differentiation
from jmpx._devices.exchanges import Source

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")


@jax.custom_vjp
def tenfold_backwards(x):
    return x


tenfold_backwards.defvjp(lambda x: (x, None), lambda _, g: (10 * g,))


@jax.custom_jvp
def hundredfold_tangents(x):
    return x


hundredfold_tangents.defjvp(lambda x, t: (x[0], 100 * t[0]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", MAPS)
def test_custom_derivatives_hold(how, rng):
    w, batch = normal(rng, 8, 3), normal(rng, 12, 8)

    def loss_fn(w, x, first=tenfold_backwards, second=hundredfold_tangents):
        h = jax.checkpoint(lambda x: jax.jit(first)(x @ w))(x)
        return jax.lax.scan(lambda c, row: (c + second(row).sum(), None), 0 * h[0, 0], h)[0]

    plain = lambda x: x  # noqa: E731
    *_, grads = over_devices(gradients(loss_fn), how, w, batch, specs=(P(), P(AXIS)))
    expected = 1000 * jax.grad(loss_fn)(w, batch, plain, plain) / DEVICES
    np.testing.assert_allclose(grads, np.stack([expected] * 4), rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("vma", [True, False])
def test_it_compiles_to_the_same_and_calls_the_function_once(vma, rng, monkeypatch):
    calls = []

    def loss_fn(params, x):
        calls.append(x)
        for w in params:
            x = jax.nn.gelu(jax.nn.softmax(x @ w))
        return (x.astype(jnp.float32) ** 2).mean(), {"x": x, "name": "aux", "n": 3}

    def run(params, x):
        (value, aux), _, finite, grads = gradients(loss_fn, policy="c=f16", has_aux=True)(params, x)
        assert aux["name"] == "aux" and aux["n"] == 3
        return value, aux["x"], finite, grads

    mapped = jax.shard_map(
        run,
        mesh=mesh_of(4),
        in_specs=(P(), P(AXIS)),
        out_specs=(P(), P(AXIS), P(), P()),
        check_vma=vma,
    )
    params = [normal(rng, 8, 8) for _ in range(3)]
    batch = normal(rng, 12, 8)

    def compile_and_run():
        calls.clear()
        compiled = jax.jit(lambda *args: mapped(*args)).lower(params, batch).compile()
        return compiled_step.count(compiled.as_text()), compiled(params, batch), len(calls)  # pyright: ignore[reportArgumentType]

    counts, results, times = compile_and_run()
    nothing = Source(None)
    monkeypatch.setattr(
        jmpx._steps.differentiation, "find_exchanges", lambda func, *_: (func, nothing)
    )
    plain_counts, plain_results, plain_times = compile_and_run()
    assert counts == plain_counts and times == plain_times == 1
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(plain_results), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_an_axis_nothing_is_searched(rng, monkeypatch):
    def refuse(*args):
        raise AssertionError("searched")

    monkeypatch.setattr(jmpx._steps.differentiation, "find_exchanges", refuse)
    w, batch = normal(rng, 8, 3), normal(rng, 12, 8)
    gradients(lambda w, x: (x @ w).mean(), axis_name=None)(w, batch)
