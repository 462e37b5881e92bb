"""NNX objects keep their state through autocast and gradients, as through NNX's transformations."""

import functools
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BF16, F16, F32, assert_same_bits, nnx_net, normal
from helpers.nnx_net import Small, assert_same_state, linear, pure, squares, state_of
from helpers.policies import by_arguments

import jmpx
import jmpx.flax
import jmpx.mpx as mpx

pytestmark = pytest.mark.usefixtures("standard_promotion")

make: Any = nnx_net.make

X = normal(np.random.default_rng(0), 6, 3)


def gradient(f, policy="full", scaling=None, **options):
    scaling = scaling or jmpx.NoOpLossScale()
    return jmpx.value_and_grad(f, scaling, policy=by_arguments(policy), **options)


# Autocast

full = functools.partial(jmpx.autocast, policy="full")  # casts nothing: the same numbers
POSITIONS = {
    "callable": lambda model, x: full(model)(x),
    "argument": lambda model, x: full(lambda model, x: model(x))(model, x),
    "keyword": lambda model, x: full(lambda x, *, of: of["m"][0](x))(x, of={"m": (model,)}),
    "part and whole": lambda model, x: full(lambda a, b, x: b(a.encode(x)))(model, model.head, x),
    "bound method": lambda model, x: full(model.__call__)(x),
    "partial": lambda model, x: full(functools.partial(lambda m, x: m(x), model))(x),
    "partial of a method": lambda model, x: full(functools.partial(model.encode, x))(),
    "method of the wrapper": lambda model, x: model.head(full(model).encode(x)),
    "function among arguments": lambda model, x: full(lambda f, x: f(x))(model.__call__, x),
    "nested autocast": lambda model, x: full(lambda m, x: full(m)(x))(model, x),
    "around a gradient": lambda model, x: full(nnx.grad(squares))(model, x)["head"]["bias"][...],
    "inside a gradient": lambda model, x: nnx.grad(lambda m, x: squares(full(m), x))(model, x),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("position", POSITIONS)
def test_autocast_gives_the_state_back(position):
    model = make(np.random.default_rng(0), Small)
    reference = nnx.clone(model)
    run = POSITIONS[position]
    y = (nnx.jit(run) if position == "part and whole" else run)(model, X)
    reference(X)
    assert model.calls == reference.calls == 1
    assert_same_state(model, reference, exactly=False)
    assert int(model.rngs.default.count[...]) == 1
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(y))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "wrap",
    [
        functools.partial(jmpx.autocast, policy="c=f16", output=None),
        lambda f: jmpx.mpx.cast_function(f, "bf16"),
        jmpx.force_full_precision,
    ],
)
def test_functions_that_cast_keep_the_dtype_of_state(rng, wrap):
    """A momentum of 1 keeps the averages as they are, to the bit, unless they are rounded."""
    model = make(rng, momentum=1.0)

    before = state_of(model)
    y = nnx.jit(lambda model, x: wrap(model)(x))(model, X)
    after = state_of(model)
    if isinstance(wrap, functools.partial):
        assert after["between"].dtype == F32 and y.dtype == F16
    del after["between"]
    assert int(after.pop("dropout/rngs/count")) == 1 + int(before.pop("dropout/rngs/count"))
    assert_same_bits(after, before)


def test_state_that_is_only_read_yields(rng):
    """In evaluation the averages are constants: activations stay in 16 bits."""
    model = make(rng, Small)
    read = jmpx.autocast(lambda m, x: m.inner(x) + m.mean[...], output=None)
    run, state = pure(read, model)
    assert jax.eval_shape(run, state, X).dtype == BF16


def test_what_is_shared_stays_shared(rng):
    rngs = nnx.Rngs(0)
    a, b, c = nnx.Dropout(0.5, rngs=rngs), linear(3, 3), linear(3, 3)
    b.kernel = c.kernel
    b.stream = c.stream = a.rngs  # pyright: ignore[reportAttributeAccessIssue]
    variable, stream = c.kernel, a.rngs

    def f(b, c, x):
        c.kernel[...] = 2 * c.kernel[...]
        c.stream()
        b.stream()
        return b(x) - c(x)

    kernel = c.kernel[...]
    y = full(f)(b, c, X)
    assert b.kernel is c.kernel is variable and b.stream is c.stream is stream  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_bits(variable[...], 2 * kernel)
    assert int(stream.count[...]) == 2  # pyright: ignore[reportOptionalMemberAccess]
    np.testing.assert_allclose(y, 0, atol=1e-6)


def test_other_objects_among_the_arguments_and_results(rng):
    model = make(rng, Small)
    objects = [nnx.metrics.Average(), nnx.Rngs(3), nnx.Variable(jnp.array(0))]

    def step(model, metric, rngs, count, x):
        y = model(x + jax.random.normal(rngs(), x.shape))
        metric.update(values=y)
        count[...] += 1
        return {"same": model, "part": model.inner, "new": nnx.Param(y), "y": y}

    out = full(step)(model, *objects, X)  # pyright: ignore[reportCallIssue]
    metric, rngs, count = objects
    assert int(count[...]) == int(rngs.default.count[...]) == 1
    np.testing.assert_allclose(metric.compute(), out["y"].mean(), rtol=1e-6)
    assert out["same"] is model and out["part"] is model.inner
    assert isinstance(out["new"], nnx.Param)
    assert_same_bits(out["new"][...], out["y"])


@pytest.mark.thorough
@pytest.mark.versions
def test_aux_and_keywords(rng):
    models, teacher = {"a": make(rng, Small), "b": make(rng, Small)}, make(rng, Small)

    def loss(models, x, *, teacher):
        y = models["a"](x) + models["b"](x)
        aux = {"x": x, "model": models["a"], "note": "text"}
        return ((y - teacher(x)) ** 2).mean(), aux

    (value, aux), _, _, grads = gradient(loss, "c=f16", has_aux=True)(models, X, teacher=teacher)
    assert value.dtype == F32 and aux["x"].dtype == F16 and aux["note"] == "text"
    assert aux["model"] is models["a"]
    assert {m.calls for m in (*models.values(), teacher)} == {1}
    assert all(isinstance(grads[name], nnx.State) for name in models)


@pytest.mark.thorough
@pytest.mark.versions
def test_arrays_that_do_not_change_stay_the_same_arrays(rng):
    model = make(rng, Small)
    before = {path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
    variable = model.inner.kernel
    jmpx.autocast(lambda m, x: m.head(m.inner(x) + m.mean[...]))(model, X)
    after = dict(nnx.to_flat_state(nnx.state(model)))
    assert all(after[path][...] is before[path] for path in before)
    jmpx.grad(squares, jmpx.NoOpLossScale(), policy="c=f16")(model, X)
    assert model.inner.kernel is variable and variable[...] is before["inner", "kernel"]


# Closed over.


def differentiated(f, x, *args):
    return jmpx.grad(f, jmpx.NoOpLossScale(), policy="full")(*args, x)


CLOSURES = {
    "autocast": lambda model, x: jmpx.autocast(lambda x: model(x))(x),
    "gradient": lambda model, x: differentiated(lambda w: (model(x) * w).sum(), jnp.ones(())),
    "under grad": lambda model, x: jax.grad(lambda x: jmpx.autocast(model)(x).sum())(x),
    "a teacher": lambda model, x: differentiated(
        lambda student, x: (model(x) - student(x)).sum(), x, nnx.clone(model)
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", CLOSURES)
def test_a_model_that_is_closed_over_may_not_change(rng, way):
    model = make(rng, Small)
    before = nnx.clone(model)
    with pytest.raises(flax.errors.TraceContextError, match="different trace level"):
        CLOSURES[way](model, X)
    assert not hasattr(model, "between")
    assert_same_state(model, before)  # nothing half-changed
    CLOSURES[way](model.inner, X)


# Gradients


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mixed", [True, False])
def test_value_gradients_and_state_are_those_of_nnx(rng, mixed):
    model = make(rng)
    reference = nnx.clone(model)
    plain = mpx.filter_value_and_grad(squares, jmpx.NoOpLossScale(), use_mixed_precision=False)
    ours, theirs = gradient(squares) if mixed else plain, nnx.value_and_grad(squares)
    value, _, finite, grads = nnx.jit(ours)(model, X)
    expected_value, expected = nnx.jit(theirs)(reference, X)
    assert finite and isinstance(grads, nnx.State)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_same_state(model, reference, exactly=False)
    assert model.calls == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("policy", "around"), [("c=f16", nnx.jit), ("c=bf16", lambda f: f)])
def test_only_parameters_are_cast(rng, policy, around):
    seen = {}
    low = jmpx.get_policy(policy).compute_dtype
    others = (nnx.Variable, nnx.Cache, nnx.BatchStat, nnx.Intermediate)

    class Stateful(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(normal(rng, 3))
            self.lora = nnx.LoRAParam(normal(rng, 3))
            for cls in others:
                setattr(self, cls.__name__, cls(normal(rng, 3)))
            self.set = nnx.Variable(jnp.zeros(3))

        def __call__(self, x):
            for name in ("w", "lora", *(cls.__name__ for cls in others)):
                seen[name] = getattr(self, name)[...].dtype
            self.Cache[...] = self.Cache[...] * 1  # pyright: ignore[reportAttributeAccessIssue]
            nnx.update(self, {"set": self.w[...].astype(low)})  # `self.set[...] =` keeps its dtype
            assert self.set.dtype == low
            return x * self.w[...] * self.lora[...]

    model = Stateful()
    before = state_of(model)
    _, _, _, grads = around(gradient(lambda m, x: (m(x) ** 2).mean(), policy))(model, X)
    assert seen.pop("w") == seen.pop("lora") == low
    assert len(seen) == 4 and set(seen.values()) == {F32}
    after = state_of(model)
    assert after.pop("set").dtype == F32  # set in 16 bits, it comes back as it was stored
    assert (model.set[...] != before.pop("set")).any()
    assert_same_bits(after, before)  # not rounded, and not in 16 bits
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {F32}
    assert set(state_of(nnx.merge(*nnx.split(grads)))) == {"w", "lora"}


def test_a_module_as_the_function(rng):
    class Loss(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.array(0))

        def __call__(self, model, x):
            self.count[...] += 1
            return squares(model, x)

        def method(self, model, x):
            return self(model, x)

    @nnx.jit
    def run(loss, model, x):
        gradient(loss, "c=bf16")(model, x)
        gradient(loss.method, "c=bf16")(model, x)
        gradient(functools.partial(loss.method, x=x), "c=bf16")(model)

    loss = Loss()
    run(loss, linear(3, 2), X)
    assert int(loss.count[...]) == 3


def test_a_state_is_a_value(rng):
    """What a user split stays as it is, arrives by the same rule, and is differentiated whole."""
    graph, params, rest = nnx.split(make(rng, Small), nnx.Param, ...)
    before = jax.tree.map(lambda leaf: leaf, rest)

    def loss(params, rest, x):
        assert params.inner.kernel[...].dtype == F16 and rest["mean"][...].dtype == F32
        model = nnx.merge(graph, params, rest)
        return squares(model, x), nnx.state(model, nnx.BatchStat)

    (_, stats), _, _, grads = jax.jit(gradient(loss, "c=f16", has_aux=True))(params, rest, X)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert (stats["mean"][...] != before["mean"][...]).all()
    for ours, theirs in zip(jax.tree.leaves(rest), jax.tree.leaves(before), strict=True):
        assert ours is theirs


@pytest.mark.parametrize("finite", [True, False])
def test_optimizer_update_updates_in_place(rng, finite):
    model = linear(3, 2)
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.5))
    state = optimizer.init(nnx.state(model, nnx.Param))
    _, _, _, grads = gradient(squares)(model, X)
    before = jax.tree.map(lambda leaf: leaf, nnx.state(model))

    @nnx.jit
    def step(model, state, grads, finite):
        return jmpx.optimizer_update(model, optimizer, state, grads, finite)

    same, state = step(model, state, grads, jnp.array(finite))
    assert same is model and int(state.total_skipped) == 1 - finite
    stepped = jax.tree.map(lambda p, g: p - finite * 0.5 * g, before, grads)
    for ours, theirs in zip(*map(jax.tree.leaves, (nnx.state(model), stepped)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_gradients_that_are_a_module_are_a_pytree_like_any_other(rng):
    model, optimizer = linear(3, 2), optax.sgd(1.0)
    grads = jax.grad(squares)(model, X)
    new, _ = jmpx.optimizer_update(model, optimizer, optimizer.init(model), grads, True)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(new.kernel[...], model.kernel[...] - grads.kernel[...], rtol=1e-5)
