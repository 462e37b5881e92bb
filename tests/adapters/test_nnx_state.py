"""NNX objects keep their state through autocast, as through NNX's own transformations."""

import functools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BF16, F32, assert_same_bits, normal
from helpers.nnx_net import Average, assert_same_state, make, squares, state_of

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")


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


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("position", "around"),
    [*((p, "") for p in POSITIONS), *((p, a) for p in COMPILED for a in ("nnx.jit", "jax.jit"))],
)
def test_autocast_gives_the_state_back(position, around):
    # The same inputs for all cases: a batch whose variance is small would make roundings larger.
    rng = np.random.default_rng(0)
    model, x = make(rng), normal(rng, 6, 3)
    reference = nnx.clone(model)
    y = AROUND[around](POSITIONS[position])(model, x)
    reference(x)
    if around != "jax.jit":
        assert model.calls == reference.calls == 1
    else:
        del reference.between
    assert_same_state(model, reference, exactly=False)
    assert int(model.dropout.rngs.count[...]) == 1  # pyright: ignore[reportOptionalMemberAccess]
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(y))  # pyright: ignore[reportAttributeAccessIssue]


def test_dropout_draws_anew(rng):
    dropout, x = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.ones(64)
    reference = nnx.clone(dropout)
    wrapped = jmpx.autocast(dropout)
    for _ in range(3):
        assert_same_bits(wrapped(x), reference(x))


@pytest.mark.sampled(2)
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


@pytest.mark.thorough
def test_other_objects_among_the_arguments(rng):
    # Many rows, so that no unit has a small variance, by which BatchNorm divides the rounding.
    model, x = make(rng), normal(rng, 64, 3)
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
        full(step)(*objects, x)  # pyright: ignore[reportCallIssue]
        step(*references, x)  # pyright: ignore[reportCallIssue]
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
    b.stream = c.stream = a.rngs  # pyright: ignore[reportAttributeAccessIssue]
    variable, stream = c.kernel, a.rngs

    def f(b, c, x):
        c.kernel[...] = 2 * c.kernel[...]
        c.stream()
        b.stream()
        return b(x) - c(x)

    x, kernel = normal(rng, 2, 3), c.kernel[...]
    y = full(f)(b, c, x)
    assert b.kernel is c.kernel is variable and b.stream is c.stream is stream  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_bits(variable[...], 2 * kernel)
    assert int(stream.count[...]) == 2  # pyright: ignore[reportOptionalMemberAccess]
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


@pytest.mark.thorough
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
    with pytest.raises(flax.errors.TraceContextError, match="different trace level"):
        CLOSURES[way](model, x)
    assert model.calls == 0 and not hasattr(model, "between")
    assert_same_state(model, before)  # nothing half-changed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", CLOSURES)
def test_a_model_that_is_closed_over_and_does_not_change(rng, way):
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    model.eval()
    before = nnx.clone(model)
    CLOSURES[way](model, normal(rng, 6, 3))
    assert_same_state(model, before)
