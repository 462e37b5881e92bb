"""NNX objects keep their state through jmpx's functions, as through NNX's own transformations."""

import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, run_python, run_python_blocks

import jmpx
import jmpx.flax

PAGE = Path(__file__).parents[2] / "docs" / "flax_nnx.md"
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own layers promote inside."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), F32)


class Net(nnx.Module):
    """BatchNorm and Dropout; it counts its calls and keeps what is between its layers."""

    def __init__(self, rngs, momentum=0.9):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=momentum, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)
        self.calls = 0

    def encode(self, x):
        self.calls += 1
        h = self.norm(self.inner(x))
        self.between = nnx.Intermediate(h)  # structure that is new
        return self.dropout(h)

    def __call__(self, x):
        return self.head(self.encode(x))


def make(rng, **options):
    """A model with random parameters and statistics that 16 bits would round."""
    model = Net(nnx.Rngs(0), **options)
    state = nnx.state(model, (nnx.Param, nnx.BatchStat))
    values = jax.tree.map(lambda a: jnp.abs(normal(rng, *a.shape)) + 0.5, state)
    nnx.update(model, values)
    return model


def state_of(model):
    """All variables by their paths; random keys as numbers."""
    flat = {"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(nnx.state(model))}
    is_key = lambda v: jnp.issubdtype(v.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {path: jax.random.key_data(v) if is_key(v) else v for path, v in flat.items()}


def assert_same_state(a, b, exactly=True, atol=1e-6):
    a, b = state_of(a), state_of(b)
    assert a.keys() == b.keys()
    if exactly:
        assert_same_bits(a, b)
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        np.testing.assert_allclose(a[path], b[path], rtol=1e-5, atol=atol, err_msg=path)


def squares(model, x):
    return (model(x) ** 2).mean()


# Autocast: where the model comes from, and what is around.

full = functools.partial(jmpx.autocast, policy="full")  # casts nothing: the same numbers
POSITIONS = {
    "callable": lambda model, x: full(model)(x),
    "argument": lambda model, x: full(lambda model, x: model(x))(model, x),
    "keyword": lambda model, x: full(lambda x, *, model: model(x))(x, model=model),
    "nested": lambda model, x: full(lambda tree: tree["m"][0](tree["x"]))({"m": (model,), "x": x}),
    "twice": lambda model, x: full(lambda a, b, x: a.head(b.encode(x)))(model, model, x),
    "part and whole": lambda model, x: full(lambda a, b, x: b(a.encode(x)))(model, model.head, x),
    "bound method": lambda model, x: full(model.__call__)(x),
    "partial": lambda model, x: full(functools.partial(lambda m, x: m(x), model))(x),
    "partial of a method": lambda model, x: full(functools.partial(model.encode, x))() @ jnp.eye(8),
    "method of the wrapper": lambda model, x: model.head(full(model).encode(x)),
    "function among arguments": lambda model, x: full(lambda f, x: f(x))(model.__call__, x),
    "nested autocast": lambda model, x: full(lambda m, x: full(m)(x))(model, x),
    "around a gradient": lambda model, x: full(nnx.grad(squares))(model, x)["head"]["bias"][...],
    "inside a gradient": lambda model, x: nnx.grad(lambda m, x: squares(full(m), x))(model, x),
    "inside remat": lambda model, x: nnx.remat(lambda m, x: full(m)(x))(model, x),
}


def with_jax_jit(f):
    """Split and merged by the user."""

    def run(model, x):
        graph, state = nnx.split(model)

        @jax.jit
        def inside(state, x):
            model = nnx.merge(graph, state)
            y = f(model, x)
            model.calls = 0  # as it was: what is static must not change here
            del model.between
            return y, nnx.state(model)

        y, state = inside(state, x)
        nnx.update(model, state)
        return y

    return run


AROUND = {"": lambda f: f, "nnx.jit": nnx.jit, "jax.jit": with_jax_jit}
COMPILED = ["callable", "part and whole", "partial of a method", "inside a gradient"]


@pytest.mark.parametrize(
    ("position", "around"),
    [*((p, "") for p in POSITIONS), *((p, a) for p in COMPILED for a in ("nnx.jit", "jax.jit"))],
)
def test_autocast_gives_the_state_back(rng, position, around):
    model, x = make(rng), normal(rng, 6, 3)
    reference = nnx.clone(model)
    y = AROUND[around](POSITIONS[position])(model, x)
    reference(x)
    if around != "jax.jit":
        assert model.calls == reference.calls == 1
    else:
        del reference.between
    assert_same_state(model, reference, exactly=False)
    assert int(model.dropout.rngs.count[...]) == 1
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(y))


def test_dropout_draws_anew(rng):
    dropout, x = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.ones(64)
    reference = nnx.clone(dropout)
    wrapped = jmpx.autocast(dropout)
    for _ in range(3):
        assert_same_bits(wrapped(x), reference(x))


@pytest.mark.parametrize(
    ("policy", "output"), [("c=bf16", "traced"), ("c=f16", None), ("c=f16", "bf16")]
)
def test_autocast_keeps_the_dtype_of_state(rng, policy, output):
    """A momentum of 1 keeps the averages as they are, to the bit, unless they are rounded."""
    model, x = make(rng, momentum=1.0), normal(rng, 6, 3)
    before = state_of(model)
    y = jmpx.autocast(model, policy, output=output)(x)
    after = state_of(model)
    assert after.pop("between").dtype == F32
    assert int(after.pop("dropout/rngs/count")) == 1 + int(before.pop("dropout/rngs/count"))
    assert_same_bits(after, before)
    low = jmpx.get_policy(policy).compute_dtype
    assert y.dtype == {"traced": F32, None: low, "bf16": BF16}[output]


class Average(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.mean = nnx.Variable(jnp.zeros(4))

    def __call__(self, x):
        h = self.linear(x)
        self.mean[...] = 0.999 * self.mean[...] + 0.001 * h[0]
        return h


def test_an_average_does_not_stall(rng):
    """In bfloat16 it would stop to move long before."""
    model, x = Average(nnx.Rngs(0)), normal(rng, 1, 3)
    step = nnx.jit(lambda model, x: jmpx.autocast(model)(x))
    for _ in range(1500):
        step(model, x)
    expected = (1 - 0.999**1500) * model.linear(x)[0]
    np.testing.assert_allclose(model.mean[...], expected, rtol=0.02, atol=0.01)
    text = str(jax.make_jaxpr(lambda x: jmpx.autocast(nnx.clone(model))(x))(x))
    assert "bf16" in text


def test_state_that_is_only_read_yields(rng):
    """In evaluation the averages are constants: activations stay in 16 bits."""
    model, x = make(rng), normal(rng, 6, 3)
    model.eval()
    read = jmpx.autocast(lambda m, x: m.inner(x) + m.norm.mean[...], output=None)
    assert read(model, x).dtype == BF16


def test_other_objects_among_the_arguments(rng):
    model, x = make(rng), normal(rng, 6, 3)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    metric, rngs, count = nnx.metrics.Average(), nnx.Rngs(3), nnx.Variable(jnp.array(0))
    objects = [model, optimizer, metric, rngs, count]
    references = nnx.clone(objects)

    def step(model, optimizer, metric, rngs, count, x):
        loss, grads = nnx.value_and_grad(squares)(model, x + jax.random.normal(rngs(), x.shape))
        optimizer.update(model, grads)
        metric.update(values=loss)
        count[...] += 1
        return loss

    for _ in range(2):
        full(step)(*objects, x)
        step(*references, x)
    for ours, theirs in zip(objects, references, strict=True):
        if not isinstance(ours, nnx.Variable):
            # The gradient of a bias before BatchNorm is 0 but for rounding.
            assert_same_state(ours, theirs, exactly=False, atol=1e-4)
    assert int(count[...]) == int(references[-1][...]) == 2 and int(optimizer.step[...]) == 2


def test_what_is_shared_stays_shared(rng):
    rngs = nnx.Rngs(0)
    a, b = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
    c = nnx.Linear(3, 3, rngs=rngs)
    b.kernel = c.kernel
    b.stream = c.stream = a.rngs
    variable, stream = c.kernel, a.rngs

    def f(b, c, x):
        c.kernel[...] = 2 * c.kernel[...]
        c.stream()
        b.stream()
        return b(x) - c(x)

    x, kernel = normal(rng, 2, 3), c.kernel[...]
    y = full(f)(b, c, x)
    assert b.kernel is c.kernel is variable and b.stream is c.stream is stream
    assert_same_bits(variable[...], 2 * kernel)
    assert int(stream.count[...]) == 2
    np.testing.assert_allclose(y, 0, atol=1e-6)


def test_objects_that_are_returned(rng):
    model, x = make(rng), normal(rng, 6, 3)

    def f(model, x):
        y = model(x)
        return {"same": model, "part": model.norm, "new": nnx.Param(y), "y": y}

    for run in (full(f), nnx.jit(full(f))):
        out = run(model, x)
        assert out["same"] is model and out["part"] is model.norm
        assert isinstance(out["new"], nnx.Param)
        assert_same_bits(out["new"][...], out["y"])


def test_arrays_that_do_not_change_stay_the_same_arrays(rng):
    model, x = make(rng), normal(rng, 6, 3)
    kernel, variable = model.inner.kernel[...], model.inner.kernel
    jmpx.autocast(model)(x)
    jmpx.filter_grad(squares, jmpx.NoOpLossScale(), policy="c=f16")(model, x)
    assert model.inner.kernel is variable and model.inner.kernel[...] is kernel
    model.eval()
    before = {path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
    jmpx.autocast(lambda m, x: m.head(m.norm(m.inner(x))))(model, x)
    after = {path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
    assert all(after[path] is before[path] for path in before)


@pytest.mark.skipif(not hasattr(nnx.Param(0), "ref"), reason="Flax has such variables since 0.12.1")
def test_a_variable_that_is_a_reference_is_refused(rng):
    variable = nnx.Variable(jnp.zeros(()), ref=True)
    for run in (
        jmpx.autocast(lambda v: v[...]),
        jmpx.filter_grad(lambda v: v[...], jmpx.NoOpLossScale(), policy="full"),
    ):
        with pytest.raises(TypeError, match="without ref=True"):
            run(variable)


# Closed over.

SENTENCE = "made outside of the function .* pass the module as an argument"
CLOSURES = {
    "autocast": lambda model, x: jmpx.autocast(lambda x: model(x))(x),
    "gradient": lambda model, x: jmpx.filter_grad(
        lambda w: (model(x) * w).sum(), jmpx.NoOpLossScale(), policy="full"
    )(jnp.ones(())),
    "under jit": lambda model, x: jax.jit(lambda x: jmpx.autocast(model)(x))(x),
    "under grad": lambda model, x: jax.grad(lambda x: jmpx.autocast(model)(x).sum())(x),
    "a function under autocast": lambda model, x: jmpx.filter_grad(
        jmpx.autocast(lambda w: (model(x) * w).sum()), jmpx.NoOpLossScale(), policy="full"
    )(jnp.ones(())),
    "a teacher": lambda model, x: jmpx.filter_grad(
        lambda student, x: (model(x) - student(x)).sum(), jmpx.NoOpLossScale(), policy="full"
    )(nnx.clone(model), x),
}


@pytest.mark.parametrize("way", CLOSURES)
def test_a_model_that_is_closed_over(rng, way):
    model, x = make(rng), normal(rng, 6, 3)
    before = nnx.clone(model)
    with pytest.raises(ValueError, match=SENTENCE):
        CLOSURES[way](model, x)
    assert model.calls == 0 and not hasattr(model, "between")
    assert_same_state(model, before)  # nothing half-changed


@pytest.mark.parametrize("way", CLOSURES)
def test_a_model_that_is_closed_over_and_does_not_change(rng, way):
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    model.eval()
    before = nnx.clone(model)
    CLOSURES[way](model, normal(rng, 6, 3))
    assert_same_state(model, before)


# The gradient functions.


def gradient(f, policy="full", scaling=None, **options):
    scaling = scaling or jmpx.NoOpLossScale()
    return jmpx.filter_value_and_grad(f, scaling, policy=policy, **options)


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
    np.testing.assert_allclose(model.head.kernel[...], before - 0.5 * grads.head.kernel[...])


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
            self.Cache[...] = self.Cache[...] * 1
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


def test_state_set_in_16_bits_comes_back_as_it_was_stored(rng):
    def loss(model, x):
        model.mean[...] = model.linear(x)[0].astype(F16)
        return model.linear(x).sum()

    model, x = Average(nnx.Rngs(0)), normal(rng, 1, 3)
    gradient(loss, "c=f16")(model, x)
    assert model.mean[...].dtype == F32 and (model.mean[...] != 0).any()


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
    reference.dropout.rngs.count[...] -= 1
    expected = nnx.grad(squares)(reference, x)
    flat = [jnp.concatenate(list(map(jnp.ravel, jax.tree.leaves(g)))) for g in (grads, expected)]
    assert np.linalg.norm(flat[0] - flat[1]) < 0.03 * np.linalg.norm(flat[1])


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
        _, _, finite, grads = gradient(squares, axis_name="d")(model, x)
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
    "wrap", [lambda f: jmpx.cast_function(f, "bf16"), jmpx.force_full_precision]
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
        jmpx.optimizer_update(model, optimizer, optimizer.init(model), grads, True)
    as_tree = jax.grad(squares)(model, x)  # gradients that are a module: a pytree like any other
    new, _ = jmpx.optimizer_update(model, optax.sgd(1.0), optax.sgd(1.0).init(model), as_tree, True)
    np.testing.assert_allclose(new.kernel[...], model.kernel[...] - grads.kernel[...], rtol=1e-5)


# The recipe.

VIEW = "c=f16,o=f32; BatchNorm: full"


def test_the_page_runs():
    assert PAGE.read_text().count("```python") == 5
    run_python_blocks(PAGE)


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


# `policies` casts Linen modules alone.


def test_policies_around_an_nnx_model_say_so_once(rng):
    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), normal(rng, 4, 3)
    with pytest.warns(UserWarning, match="No Linen module ran .*with_policies") as caught:
        with jmpx.flax.policies("c=bf16; Dense: c=bf16"):
            model(x)
    assert len(caught) == 1 and caught[0].filename == __file__
    with jmpx.flax.policies("c=bf16; Dense: c=bf16"):
        model(x)


@pytest.mark.filterwarnings("error:No Linen module ran")
def test_policies_of_a_linen_program_say_nothing(rng):
    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), normal(rng, 4, 3)  # it exists, that is all
    params = nn.Dense(2).init(jax.random.key(0), x)
    apply = jax.jit(nn.Dense(2).apply)
    for _ in range(3):  # the second one runs compiled
        with jmpx.flax.policies("c=bf16; Dense: c=f32,o=bf16"):
            assert apply(params, x).dtype == BF16
    with jmpx.flax.policies("c=f16; Dense: c=f32,o=f16"), jmpx.flax.policies("c=f16"):
        apply(params, x)  # the outer one casts nothing, but a Linen module ran
    with pytest.raises(KeyError), jmpx.flax.policies("c=f16; Dense: c=f32,o=bf16"):
        raise KeyError
    assert model is not None


def test_without_flax_nothing_is_imported():
    program = """
import sys, jax.numpy as jnp, jmpx
jmpx.autocast(lambda x: x @ x)(jnp.eye(2))
jmpx.filter_grad(lambda x: x.sum(), jmpx.NoOpLossScale(), policy="c=bf16")(jnp.ones(2))
jmpx.cast_function(lambda x: x, "bf16")(jnp.ones(2))
assert not any(name.partition(".")[0] == "flax" for name in sys.modules)
"""
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
