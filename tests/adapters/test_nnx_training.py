"""NNX objects keep their state through gradients and in training, as in NNX itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import F16, F32, assert_same_bits, normal
from helpers.nnx_net import Average, assert_same_state, make, squares, state_of

import jmpx
import jmpx.flax
import jmpx.mpx as mpx

pytestmark = pytest.mark.usefixtures("standard_promotion")


def gradient(f, policy="full", scaling=None, **options):
    scaling = scaling or jmpx.NoOpLossScale()
    return mpx.filter_value_and_grad(f, scaling, policy=policy, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("jit", "mixed"), [(False, True), (True, True), (True, False)])
def test_value_gradients_and_state_are_those_of_nnx(rng, jit, mixed):
    model, x = make(rng), normal(rng, 6, 3)
    reference = nnx.clone(model)
    ours, theirs = gradient(squares, use_mixed_precision=mixed), nnx.value_and_grad(squares)
    if jit:
        ours, theirs = nnx.jit(ours), nnx.jit(theirs)
    value, _, finite, grads = ours(model, x)
    expected_value, expected = theirs(reference, x)
    assert finite and isinstance(grads, nnx.State)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_same_state(model, reference, exactly=False)
    assert model.calls == 1
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    before = model.head.kernel[...]
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.head.kernel[...], before - 0.5 * grads.head.kernel[...])  # pyright: ignore[reportOperatorIssue]


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "jit"), [("c=bf16", False), ("c=f16", True)])
def test_only_parameters_are_cast(rng, policy, jit):
    seen = {}
    low = jmpx.get_policy(policy).compute_dtype

    class Stateful(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(normal(rng, 3))
            self.lora = nnx.LoRAParam(normal(rng, 3))
            self.kept = {}
            for cls in (nnx.Variable, nnx.Cache, nnx.BatchStat, nnx.Intermediate):
                setattr(self, cls.__name__, cls(normal(rng, 3)))
            self.norm = nnx.BatchNorm(3, momentum=1.0, rngs=nnx.Rngs(0))
            self.norm.mean[...] = normal(rng, 3)

        def __call__(self, x):
            seen.update(
                {
                    type(v).__name__: v[...].dtype
                    for _, v in nnx.iter_graph(self)
                    if isinstance(v, nnx.Variable)
                }
            )
            self.Cache[...] = self.Cache[...] * 1  # pyright: ignore[reportAttributeAccessIssue]
            return self.norm(x * self.w[...] * self.lora[...])

    model, x = Stateful(), normal(rng, 6, 3)
    before = state_of(model)
    grad_fn = gradient(lambda m, x: (m(x) ** 2).mean(), policy)
    _, _, _, grads = (nnx.jit(grad_fn) if jit else grad_fn)(model, x)
    assert seen.pop("Param") == seen.pop("LoRAParam") == low
    assert len(seen) == 4 and set(seen.values()) == {jnp.dtype(F32)}
    assert_same_bits(state_of(model), before)  # not rounded, and not in 16 bits
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(F32)}
    assert set(state_of(nnx.merge(*nnx.split(grads)))) == {"w", "lora", "norm/scale", "norm/bias"}


@pytest.mark.thorough
def test_state_set_in_16_bits_comes_back_as_it_was_stored(rng):
    def loss(model, x):
        model.mean[...] = model.linear(x)[0].astype(F16)
        return model.linear(x).sum()

    model, x = Average(nnx.Rngs(0)), normal(rng, 1, 3)
    gradient(loss, "c=f16")(model, x)
    assert model.mean[...].dtype == F32 and (model.mean[...] != 0).any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("where", ["inside", "around", "view"])
def test_autocast_views_and_gradients_nest(rng, where):
    model, x = make(rng, momentum=1.0), normal(rng, 6, 3)
    before = state_of(model)
    inside = {
        "inside": lambda m, x: squares(jmpx.autocast(m), x),
        "around": squares,
        "view": lambda m, x: squares(jmpx.flax.with_policies(m, "c=bf16,o=f32"), x),
    }[where]
    grad_fn = gradient(inside, scaling=jmpx.DynamicLossScale(2.0**10))
    if where == "around":
        grad_fn = jmpx.autocast(grad_fn)
    value, scaling, finite, grads = nnx.jit(grad_fn)(model, x)
    assert finite and float(scaling.loss_scale) == 2**10
    after = state_of(model)
    assert int(after.pop("dropout/rngs/count")) == 1 + int(before.pop("dropout/rngs/count"))
    assert after.pop("between", None) is not None or where == "view"
    assert_same_bits(after, before)
    reference = nnx.clone(model)
    reference.dropout.rngs.count[...] -= 1  # pyright: ignore[reportOptionalMemberAccess]
    expected = nnx.grad(squares)(reference, x)
    flat = [jnp.concatenate(list(map(jnp.ravel, jax.tree.leaves(g)))) for g in (grads, expected)]
    assert np.linalg.norm(flat[0] - flat[1]) < 0.03 * np.linalg.norm(flat[1])


@pytest.mark.thorough
def test_aux_keywords_and_containers(rng):
    models, x = {"a": make(rng), "b": make(rng)}, normal(rng, 6, 3)
    teacher = make(rng)

    def loss(models, x, *, teacher):
        y = models["a"](x) + models["b"](x)
        aux = {"x": x, "model": models["a"], "note": "text"}
        return ((y - teacher(x)) ** 2).mean(), aux

    (value, aux), _, _, grads = gradient(loss, "c=f16", has_aux=True)(models, x, teacher=teacher)
    assert value.dtype == F32 and aux["x"].dtype == F16 and aux["note"] == "text"
    assert aux["model"] is models["a"]
    assert {m.calls for m in (*models.values(), teacher)} == {1}
    assert all(isinstance(grads[name], nnx.State) for name in models)
    plain = jmpx.filter_grad(loss, jmpx.NoOpLossScale(), True, policy="full")
    _, _, _, aux = plain(models, x, teacher=teacher)
    assert aux["model"] is models["a"] and teacher.calls == 2


def test_a_module_as_the_function(rng):
    model, x = make(rng), normal(rng, 6, 3)
    model.eval()

    class Loss(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.array(0))

        def __call__(self, model, x):
            self.count[...] += 1
            return squares(model, x)

        def method(self, model, x):
            return self(model, x)

    loss = Loss()
    for f in (loss, loss.method, functools.partial(loss.method, x=x)):
        args = (model,) if isinstance(f, functools.partial) else (model, x)
        gradient(f, "c=bf16")(*args)
    assert int(loss.count[...]) == 3


def test_an_axis(rng):
    """Each replica has the state of its part of the batch; gradients are averaged."""
    graph, state = nnx.split(make(rng))
    x = normal(rng, 4, 6, 3)

    def step(x):
        model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
        model.dropout.deterministic = True
        _, _, finite, grads = gradient(squares, over=jmpx.Over("d"))(model, x)
        return finite, grads, model.norm.mean[...]

    finite, grads, means = jax.jit(jax.vmap(step, axis_name="d"))(x)
    assert finite.all()
    for part in range(4):
        model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
        model.dropout.deterministic = True
        model(x[part])
        np.testing.assert_allclose(means[part], model.norm.mean[...], rtol=1e-5)
    assert all((leaf[0] == leaf[1]).all() for leaf in jax.tree.leaves(grads))


def test_a_state_is_a_value(rng):
    """What a user split stays as it is, arrives by the same rule, and is differentiated whole."""
    model, x = make(rng), normal(rng, 6, 3)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    before = jax.tree.map(lambda leaf: leaf, rest)

    def loss(params, rest, x):
        assert params.inner.kernel[...].dtype == F16 and rest.norm.mean[...].dtype == F32
        model = nnx.merge(graph, params, rest)
        return squares(model, x), nnx.state(model, nnx.BatchStat)

    (_, stats), _, _, grads = gradient(loss, "c=f16", has_aux=True)(params, rest, x)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert (stats.norm.mean[...] != before.norm.mean[...]).all()
    for ours, theirs in zip(jax.tree.leaves(rest), jax.tree.leaves(before), strict=True):
        assert ours is theirs


@pytest.mark.parametrize(
    "wrap", [lambda f: jmpx.mpx.cast_function(f, "bf16"), jmpx.force_full_precision]
)
def test_functions_that_cast(rng, wrap):
    model, x = make(rng, momentum=1.0), normal(rng, 6, 3)
    before = state_of(model)
    for run in (wrap(model), lambda x: wrap(lambda m, x: m(x))(model, x)):
        run(x)
    after = state_of(model)
    assert int(after.pop("dropout/rngs/count")) == 2 + int(before.pop("dropout/rngs/count"))
    after.pop("between")
    assert_same_bits(after, before)


@pytest.mark.parametrize("finite", [True, False])
def test_optimizer_update_updates_in_place(rng, finite):
    model, x = make(rng), normal(rng, 6, 3)
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.5))
    state = optimizer.init(nnx.state(model, nnx.Param))
    _, _, _, grads = gradient(squares)(model, x)
    before = jax.tree.map(lambda leaf: leaf, nnx.state(model))

    @nnx.jit
    def step(model, state, grads, finite):
        return jmpx.optimizer_update(model, optimizer, state, grads, finite)

    same, state = step(model, state, grads, jnp.array(finite))
    assert same is model and int(state.total_skipped) == 1 - finite
    stepped = jax.tree.map(lambda p, g: p - finite * 0.5 * g, nnx.state(before, nnx.Param), grads)
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(stepped), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_an_optimizer_state_of_the_module_itself_is_refused(rng):
    model, x, optimizer = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), normal(rng, 6, 3), optax.adam(0.1)
    _, _, _, grads = gradient(squares)(model, x)
    with pytest.raises(TypeError, match=r"optimizer.init\(nnx.state\(model, nnx.Param\)\)"):
        jmpx.optimizer_update(model, optimizer, optimizer.init(model), grads, True)  # pyright: ignore[reportArgumentType]
    as_tree = jax.grad(squares)(model, x)  # gradients that are a module: a pytree like any other
    new, _ = jmpx.optimizer_update(model, optax.sgd(1.0), optax.sgd(1.0).init(model), as_tree, True)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(new.kernel[...], model.kernel[...] - grads.kernel[...], rtol=1e-5)


# The recipe.

VIEW = "c=f16,o=f32; BatchNorm: full"


def train_step(model, optimizer, loss_scale, x, y, viewed=True):
    """The page's step, with and without a view."""

    def loss_fn(model, x, y):
        run = jmpx.flax.with_policies(model, VIEW) if viewed else model
        return jnp.mean((run(x) - y).astype(F32) ** 2)

    keep = nnx.Not(nnx.RngState)
    before = jax.tree.map(lambda leaf: leaf, nnx.state((model, optimizer), keep))
    policy = "full" if viewed else "c=f16"
    grad_fn = jmpx.filter_value_and_grad(loss_fn, loss_scale, policy=policy)
    loss, loss_scale, finite, grads = grad_fn(model, x, y)
    optimizer.update(model, grads)
    after = jax.tree.map(lambda leaf: leaf, nnx.state((model, optimizer), keep))
    nnx.update((model, optimizer), jmpx.select_tree(finite, after, before))
    return loss_scale, loss, finite


class Plain(nnx.Module):
    """`Net`, whose structure does not change."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.inner(x)))))


@pytest.mark.thorough
@pytest.mark.parametrize("viewed", [True, False])
def test_a_skipped_step_leaves_random_streams_alone_advanced(rng, viewed):
    model = Plain(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    loss_scale = jmpx.DynamicLossScale(2.0**10)
    step = nnx.jit(functools.partial(train_step, viewed=viewed))
    for _ in range(3):
        x = normal(rng, 32, 3)
        loss_scale, _, finite = step(model, optimizer, loss_scale, x, x[:, :1])
        assert finite
    before = state_of((model, optimizer))
    bad = normal(rng, 32, 3).at[0, 0].set(1e6)  # inf in float16
    loss_scale, _, finite = step(model, optimizer, loss_scale, bad, bad[:, 1:2])
    after = state_of((model, optimizer))
    assert not finite and float(loss_scale.loss_scale) == 2**9
    assert (
        int(after.pop("0/dropout/rngs/count")) == 4 == 1 + int(before.pop("0/dropout/rngs/count"))
    )
    assert_same_bits(after, before)
    loss_scale, loss, finite = step(model, optimizer, loss_scale, x, x[:, :1])
    assert finite and jnp.isfinite(loss)
    moved = state_of((model, optimizer))
    assert all((moved[p] != before[p]).any() for p in ("0/norm/mean", "0/head/kernel", "1/step"))


@pytest.mark.thorough
def test_it_converges_as_float32_does(rng):
    x = normal(rng, 128, 3)
    y = jnp.tanh(x @ normal(rng, 3, 1))
    model, reference = Plain(nnx.Rngs(0)), Plain(nnx.Rngs(0))
    optimizer, other = (
        nnx.Optimizer(m, optax.adam(2e-2), wrt=nnx.Param) for m in (model, reference)
    )

    @nnx.jit
    def by_hand(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    step, scale, losses = nnx.jit(train_step), jmpx.DynamicLossScale(2.0**15), []
    for _ in range(100):
        scale, loss, finite = step(model, optimizer, scale, x, y)
        if finite:  # the same steps; those that are skipped draw random numbers, too
            losses.append((float(loss), float(by_hand(reference, other, x, y))))
    ours, theirs = np.array(losses).T
    assert len(losses) > 80 and ours[-10:].mean() < 0.3 * ours[0]
    np.testing.assert_allclose(ours[-20:].mean(), theirs[-20:].mean(), rtol=0.3)
    for m in (model, reference):
        m.eval()
    np.testing.assert_allclose(model(x), reference(x), atol=0.25)
