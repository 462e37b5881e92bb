"""Micro-batches: the gradients of a whole batch, summed in float32, with one scale and one flag."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, enable_x64, normal
from helpers.jaxprs import equations_of
from helpers.training import LOSS_SCALES, loss_fn, make_params, value

import jmpx
import jmpx.mpx as mpx
from jmpx._jaxprs.core import scan_counts

TOLERANCE = {"f16": 5e-3, "bf16": 4e-2, "f32": 5e-6}  # against float64
NO_SCALE = jmpx.NoOpLossScale()
# Their options come from tables, whose types pyright does not follow.
filter_grad: Any = jmpx.filter_grad
filter_value_and_grad: Any = jmpx.filter_value_and_grad


def in_float64(params, x):
    """The loss and its gradients of a whole batch, by NumPy and by hand."""
    w, b, x = (np.asarray(a, np.float64) for a in (params["w"], params["b"], x))
    hidden = np.tanh(x @ w + b)
    slope = 2 * hidden * (1 - hidden**2) / hidden.size
    return (hidden**2).mean(), {"w": x.T @ slope, "b": slope.sum(0)}


def carries(func, *args):
    """The dtypes of what the loops of a function carry."""
    return [
        var.aval.dtype.name
        for eqn in equations_of(func, *args)
        if eqn.primitive.name == "scan"
        for var in eqn.outvars[: scan_counts(eqn)[1]]
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", LOSS_SCALES)
@pytest.mark.parametrize("policy", TOLERANCE)
def test_they_give_the_gradients_of_the_whole_batch(policy, kind, rng):
    params, x = make_params(rng), normal(rng, 24, 6)
    loss, grads = in_float64(params, x)
    for count in 1, 2, 3, 4, 8:
        got = jax.jit(
            filter_value_and_grad(
                loss_fn,
                LOSS_SCALES[kind](),
                policy=f"c={policy}",
                batch=jmpx.Batch(microbatches=count),
            )
        )(params, x)
        assert got.value.dtype == F32 and bool(got.grads_finite)
        np.testing.assert_allclose(got.value, loss, rtol=TOLERANCE[policy])
        for name, grad in grads.items():
            assert got.grads[name].dtype == F32
            error = np.abs(got.grads[name] - grad).max() / np.abs(grad).max()
            assert error < TOLERANCE[policy], (count, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{"policy": "c=bf16"}, {"use_mixed_precision": False}])
@pytest.mark.parametrize("params", [F32, BF16, F16])
def test_their_gradients_are_summed_in_float32_and_rounded_once(params, options, rng):
    """Sums in bfloat16 would stay at 256, whatever is added to it."""
    w = jnp.ones(3, params)
    x = np.ones((128, 3), np.float32)
    x[0] = 256
    x[:, 2] = rng.choice([0.5, 1, 2], 128)
    grad_fn = mpx.filter_grad(
        lambda w, x: jnp.mean(x.astype(F32) @ w.astype(F32)),
        NO_SCALE,
        batch=jmpx.Batch(microbatches=128),
        **options,
    )
    grads = grad_fn(w, x).grads
    assert carries(grad_fn, w, x) == ["float32"]
    assert grads.dtype == params
    np.testing.assert_array_equal(grads, x.astype(np.float64).mean(0).astype(params))


def test_rounding_does_not_grow_with_their_number(rng):
    w, x = jnp.ones(64), normal(rng, 512, 64)
    grads_of = functools.partial(
        filter_grad, lambda w, x: jnp.mean(x @ w), NO_SCALE, policy="c=bf16"
    )
    each = jax.jit(jax.vmap(lambda x: grads_of()(w, x).grads))(x[:, None])
    exact = np.asarray(each, np.float64).mean(0)
    together = jax.jit(grads_of(batch=jmpx.Batch(microbatches=512)))(w, x).grads
    assert np.linalg.norm(together - exact) < 1e-6 * np.linalg.norm(exact)


@pytest.mark.thorough
def test_wide_and_complex_parameters_keep_their_dtype(rng):
    with enable_x64():
        params = {
            "wide": jnp.asarray(rng.normal(size=3)),
            "complex": jnp.asarray(rng.normal(size=3) + 1j * rng.normal(size=3)),
            "narrow": jnp.asarray(rng.normal(size=3), BF16),
            "count": 3,
        }
        x = jnp.asarray(rng.normal(size=(8, 3)))

        def loss(params, x):
            wide = params["wide"].astype(x.dtype) + params["narrow"].astype(x.dtype)
            plain = params["complex"].astype(jnp.complex128)
            return jnp.mean((x @ wide) ** 2) + jnp.mean(jnp.abs(x.astype(plain.dtype) @ plain) ** 2)

        options = {"policy": "c=f64"}
        whole = jax.jit(filter_grad(loss, NO_SCALE, **options))(params, x).grads
        grad_fn = filter_grad(loss, NO_SCALE, **options, batch=jmpx.Batch(microbatches=4))
        parts = grad_fn(params, x).grads
        assert sorted(carries(grad_fn, params, x)) == ["complex128", "float32", "float64"]
        assert parts["count"] is None
        for name, rtol in {"wide": 1e-12, "complex": 1e-12, "narrow": 0.05}.items():
            assert parts[name].dtype == params[name].dtype
            np.testing.assert_allclose(
                *(np.asarray(grads[name], complex) for grads in (parts, whole)), rtol=rtol
            )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("where", [None, 0, 1, 3])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_there_is_one_scale_one_flag_and_one_adjustment(where, bad, rng):
    params, x = make_params(rng), np.array(normal(rng, 8, 6))
    if where is not None:
        x[2 * where] = bad
    scaling = jmpx.DynamicLossScale(2.0**10, counter=3)
    got = filter_value_and_grad(loss_fn, scaling, policy="c=f16", batch=jmpx.Batch(microbatches=4))(
        params, x
    )
    good = where is None
    assert bool(got.grads_finite) is good
    assert value(got.scaling) == (2.0**10 if good else 2.0**9)
    assert int(got.scaling.counter) == (4 if good else 0)
    assert all(bool(jnp.isfinite(grad).all()) is good for grad in jax.tree.leaves(got.grads))


def test_infinities_that_cancel_are_seen():
    x = jnp.array([1e30, -1e30, 0.0, 0.0])
    grad_fn = filter_grad(
        lambda w, x: (w * x).mean(), NO_SCALE, policy="c=f16", batch=jmpx.Batch(microbatches=4)
    )
    assert not grad_fn(jnp.ones(()), x).grads_finite


class Batch(NamedTuple):
    x: jax.Array
    more: dict


def nested_loss(params, batch, key, noise=0.0, *, shift):
    hidden = batch.x @ params + batch.more["y"] + shift
    return jnp.mean(hidden**2) + noise * jax.random.uniform(key).astype(hidden.dtype)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("argnums", [None, 1, [1], -3])
def test_batches_may_be_nested_and_other_arguments_go_whole(argnums, as_array, rng, key):
    batch = Batch(as_array(normal(rng, 12, 3)), {"y": as_array(normal(rng, 12)), "name": "train"})
    w, shift = normal(rng, 3), normal(rng)
    grad_fn = functools.partial(filter_value_and_grad, nested_loss, NO_SCALE, policy="full")
    whole = grad_fn()(w, batch, key, 0.5, shift=shift)
    split = jmpx.Batch(argnums=argnums, microbatches=3)
    parts = grad_fn(batch=split)(w, batch, key, 0.5, shift=shift)
    np.testing.assert_allclose(parts.value, whole.value, rtol=1e-6)
    np.testing.assert_allclose(parts.grads, whole.grads, rtol=1e-5)


@pytest.mark.thorough
def test_a_key_for_each_example_is_split(key):
    """A key that goes whole draws the same numbers in each micro-batch."""

    def loss(w, x, keys):
        draws = jax.random.uniform(keys) if not keys.ndim else jax.vmap(jax.random.uniform)(keys)
        return (w * draws).mean(), draws

    grad_fn = filter_grad(
        loss, NO_SCALE, has_aux=True, policy="full", batch=jmpx.Batch(microbatches=2)
    )
    keys = jax.random.split(key, 4)
    assert len(np.unique(grad_fn(jnp.ones(()), jnp.ones(4), key).aux)) == 1
    split = grad_fn(jnp.ones(()), jnp.ones(4), keys).aux
    np.testing.assert_array_equal(split.ravel(), jax.vmap(jax.random.uniform)(keys))


def test_aux_gets_a_leading_axis_and_other_leaves_stay(rng):
    def loss(w, x):
        hidden = x @ w
        return (hidden**2).mean(), {
            "mean": hidden.mean(),
            "hidden": hidden,
            "count": np.arange(3),
            "rate": 0.5,
            "name": "loss",
            "none": None,
        }

    w, x = normal(rng, 3), normal(rng, 8, 3)
    grad_fn = filter_grad(
        loss, NO_SCALE, has_aux=True, policy="full", batch=jmpx.Batch(microbatches=4)
    )
    aux = grad_fn(w, x).aux
    hidden = loss(w, x)[1]["hidden"].reshape(4, 2)
    assert (aux["rate"], aux["name"], aux["none"]) == (0.5, "loss", None)
    np.testing.assert_allclose(aux["hidden"], hidden, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(aux["mean"], hidden.mean(1), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(aux["count"], np.tile(np.arange(3), (4, 1)))


@pytest.mark.parametrize("policy", ["c=bf16", "c=bf16; op.tanh: full"])
def test_casts_are_those_of_a_whole_batch(policy, rng):
    func = jmpx.autocast(loss_fn, policy) if ";" in policy else loss_fn
    params, x = make_params(rng), normal(rng, 8, 6)

    def dtypes_of(count):
        grad_fn = filter_grad(func, NO_SCALE, policy=policy, batch=jmpx.Batch(microbatches=count))
        return [
            (eqn.primitive.name, *(var.aval.dtype.name for var in eqn.invars))
            for eqn in equations_of(grad_fn, params, x)
            if eqn.primitive.name in ("dot_general", "tanh")
        ]

    assert len(dtypes_of(1)) >= 3
    assert dtypes_of(4) == dtypes_of(1)


def test_arguments_that_are_not_cast_are_split_too():
    def loss(w, x, target):
        assert (w.dtype, x.dtype, target.dtype) == (F16, F16, F32)
        return jnp.mean((w * x).astype(F32) - target)

    target = jnp.array([1e6, 2e6, 3e6, 4e6])  # beyond float16
    for uncast in -1, "target":
        got = filter_value_and_grad(
            loss, NO_SCALE, policy="c=f16", batch=jmpx.Batch(microbatches=2), uncast=uncast
        )(jnp.ones(()), jnp.ones(4), target)
        assert float(got.value) == 1 - 2.5e6 and float(got.grads) == 1


def test_without_mixed_precision_the_gradient_is_the_plain_one(rng):
    params, x = make_params(rng), normal(rng, 8, 6)
    plain = jax.jit(jax.value_and_grad(loss_fn))(params, x)
    loss, _, finite, grads = mpx.filter_value_and_grad(
        loss_fn,
        jmpx.DynamicLossScale(),
        use_mixed_precision=False,
        batch=jmpx.Batch(microbatches=4),
    )(params, x)
    assert bool(finite)
    for got, expected in zip(jax.tree.leaves((loss, grads)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


STATE = {"mean": np.zeros(3, np.float32), "steps": np.int32(0), "name": "ema"}


def stateful_loss(w, x, state, change=lambda state: {}):
    mean = 0.5 * state["mean"] + x.astype(F32).mean(0)
    new = {**state, "mean": mean, "steps": state["steps"] + 1}
    return jnp.mean((x @ w) ** 2), {**new, **change(new)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("aux", ["state", "pair", "triple"])
def test_model_state_goes_from_one_to_the_next(aux, count, rng):
    w, x = normal(rng, 3), normal(rng, 8, 3)

    def loss(w, x, state):
        value, new = stateful_loss(w, x, state)
        assert w.dtype == x.dtype == BF16 and state["mean"].dtype == F32  # it is not cast
        rest = {"state": (), "pair": (value,), "triple": (value, None)}[aux]
        return value, (new, *rest) if rest else new

    got = filter_grad(
        loss,
        NO_SCALE,
        has_aux=True,
        policy="c=bf16",
        batch=jmpx.Batch(microbatches=count),
        state_argnum=2,
    )(w, x, STATE).aux
    state, *rest = [got] if aux == "state" else got
    mean = np.zeros(3, np.float32)
    for part in np.asarray(x.astype(BF16).astype(F32)).reshape(count, -1, 3):
        mean = 0.5 * mean + part.mean(0)
    np.testing.assert_allclose(state["mean"], mean, rtol=1e-5, atol=1e-6)
    assert (int(state["steps"]), state["name"]) == (count, "ema")
    assert len(rest) == ("state", "pair", "triple").index(aux)
    assert not rest or rest[0].shape == ((count,) if count > 1 else ())


ONES = np.ones((8, 3), np.float32)


def run(count: Any = 4, argnums=None, args=(ONES,), loss=None, **options):
    loss = loss or (lambda w, x, *others: jnp.mean((x @ w) ** 2))
    grad_fn = filter_value_and_grad(
        loss,
        NO_SCALE,
        policy="full",
        batch=jmpx.Batch(argnums=argnums, microbatches=count),
        **options,
    )
    return grad_fn(jnp.ones(3), *args)


def run_state(state=STATE, state_argnum=2, has_aux=True, change=lambda state: {}):
    return run(
        args=(ONES, state),
        loss=functools.partial(stateful_loss, change=change),
        state_argnum=state_argnum,
        has_aux=has_aux,
    )


BAD = {
    "no divisor": (lambda: run(3), ValueError, "make 3 divide them"),
    "more than examples": (lambda: run(16), ValueError, "make 16 divide them"),
    "zero": (lambda: run(0), ValueError, "between 1 and .* got 0"),
    "negative": (lambda: run(-2), ValueError, "between 1 and .* got -2"),
    "bool": (lambda: run(True), TypeError, "to be a whole number, got True"),
    "float": (lambda: run(2.0), TypeError, "to be a whole number, got 2.0"),
    "text": (lambda: run("2"), TypeError, "to be a whole number, got '2'"),
    "traced": (lambda: jax.jit(run)(2), TypeError, "microbatches to be a whole number, got"),
    "no batch": (lambda: run(args=(), loss=lambda w: w.mean()), TypeError, "hold no array"),
    "numbers": (lambda: run(args=(2.0,), loss=lambda w, x: w.mean()), TypeError, "hold no array"),
    "scalar": (lambda: run(args=(ONES, jnp.ones(()))), TypeError, "has no axis of examples"),
    "lengths": (lambda: run(args=(ONES, ONES[:4])), ValueError, "differ in their number"),
    "position": (lambda: run(argnums=2), ValueError, "with 2 positional arguments"),
    "parameters": (lambda: run(argnums=0), ValueError, "holds the parameters"),
    "also by -2": (lambda: run(argnums=-2), ValueError, "the first after the parameters"),
    "bool position": (lambda: run(argnums=True), TypeError, "to be an int or several"),
    "state split": (lambda: run(argnums=1, state_argnum=1, has_aux=True), ValueError, "the model"),
    "state without aux": (lambda: run_state(has_aux=False), ValueError, "say has_aux=True"),
    "state at 0": (
        lambda: run_state(state_argnum=0),
        ValueError,
        "between 1 and .* give the position of the model state",
    ),
    "state at -1": (lambda: run_state(state_argnum=-1), ValueError, "between 1 and .* got -1"),
    "state at 3": (lambda: run_state(state_argnum=3), ValueError, "with 3 positional arguments"),
    "state at True": (lambda: run_state(state_argnum=True), TypeError, "a whole number, got True"),
    "other structure": (lambda: run_state(change=lambda s: {"new": 1}), TypeError, "structure"),
    "other shape": (
        lambda: run_state(change=lambda s: {"mean": s["mean"][:2]}),
        TypeError,
        "the shapes of argument 2",
    ),
    "other dtype": (
        lambda: run_state(change=lambda s: {"steps": s["steps"].astype(F32)}),
        ValueError,
        r"changes its \['steps'\] from int32\[\] to float32\[\]",
    ),
    "a number": (
        lambda: run_state({**STATE, "steps": 0}),
        ValueError,
        r"changes its \['steps'\] from 0 to 1: keep an array there",
    ),
    "a number and an array": (
        lambda: run_state({**STATE, "steps": 0.0}, change=lambda s: {"steps": jnp.ones(())}),
        ValueError,
        r"changes its \['steps'\] from 0.0 to float32\[\]",
    ),
    "text changed": (lambda: run_state(change=lambda s: {"name": "new"}), ValueError, "'ema' to"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and ". " not in text
