"""Models of NNX under `by=modules`: the models among the arguments run as views of themselves."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BF16, F32, MIXED, assert_same_bits, exactly, nnx_net, normal, zoo
from helpers.jaxprs import LOW, dots
from helpers.nnx_net import Small, assert_same_state, linear, pure, squares, state_of

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")

make: Any = nnx_net.make

RULES = "c=bf16,o=f32; BatchNorm: full"
X = normal(np.random.default_rng(0), 6, 3)


def apply_policy(func, policy):
    return jmpx.apply_policy(func, f"by=modules,{policy}")


class TrainState(nnx.Module):
    def __init__(self, model):
        self.model = model
        self.optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        self.metrics = nnx.metrics.Average()
        self.rngs = nnx.Rngs(3)


class Holder(nnx.Module):
    """Holds models, and is never called."""

    def __init__(self, model):
        self.model = model


of_model = lambda t, x: t.model(x)  # noqa: E731
ARGUMENTS = {
    "model": (lambda m: m, lambda m, x: m(x)),
    "dict": (lambda m: {"a": [m]}, lambda t, x: t["a"][0](x)),
    "nnx.List": (lambda m: nnx.List([m]), lambda t, x: t[0](x)),
    "nnx.Dict": (lambda m: nnx.Dict(a=m), lambda t, x: t.a(x)),
    "train state": (TrainState, of_model),
    "model and optimizer": (lambda m: nnx.ModelAndOptimizer(m, optax.sgd(0.1)), of_model),
    "holder": (Holder, of_model),
    "part and whole": (lambda m: (m.head, m), lambda t, x: t[0](t[1].encode(x)).astype(F32)),
    "method": (lambda m: m.__call__, lambda f, x: f(x)),
    "partial": (lambda m: functools.partial(lambda m, x: m(x), m), lambda f, x: f(x)),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_models_are_found(kind):
    model = make(np.random.default_rng(0), Small)
    reference = nnx.clone(model)
    put, call = ARGUMENTS[kind]
    given = put(model)

    def loss_fn(given, x):
        assert model.inner.kernel.dtype == F32
        y = call(given, x)
        assert y.dtype == F32
        return (y**2).mean()

    loss = apply_policy(loss_fn, MIXED)(given, X)
    assert_same_bits(loss, squares(jmpx.flax.with_policies(reference, MIXED), X))
    assert type(model) is Small and type(model.inner) is nnx.Linear
    assert type(given) is type(put(nnx.clone(model)))
    assert model.calls == 1
    assert model.between[...].dtype == BF16
    del model.between
    assert_same_state(model, reference)


def program(loss_fn, policy, **options):
    """The text of a gradient's program, with the state that the model has after it."""

    def run(model, x):
        scaling = jmpx.NoOpLossScale()
        grads = jmpx.value_and_grad(loss_fn, scaling, policy=policy, **options)(model, x)
        vars(model).pop("between", None)  # is set on a view alone
        return grads.value, grads.grads, nnx.state(model)

    run, state = pure(run, make(np.random.default_rng(0)))  # pyright: ignore[reportAssignmentType]
    return jax.jit(run).lower(state, X).as_text()


def with_remat(model, x):
    h = nnx.remat(lambda part, x: part(x))(model.inner, x)
    return (model.head(model.dropout(model.norm(h))).astype(F32) ** 2).mean()


@pytest.mark.versions
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loss_fn", "batch"), [(squares, None), (with_remat, jmpx.Batch(microbatches=2))]
)
def test_gradients_and_programs_are_those_of_a_view(loss_fn, batch):
    def viewed(model, x):
        return loss_fn(jmpx.flax.with_policies(model, RULES), x)

    by_view = program(viewed, "full", batch=batch)
    assert program(loss_fn, f"by=modules,{RULES}", batch=batch) == by_view


def filter_grad(f):
    grad_fn = jmpx.value_and_grad(f, jmpx.NoOpLossScale(), policy="bf16")
    return lambda model, x: grad_fn(model, x).value


TRANSFORMS = {
    "nnx.jit": lambda f: nnx.jit(f),
    "nnx.remat": lambda f: nnx.remat(f),
    "nnx.grad": lambda f: lambda m, x: nnx.value_and_grad(f)(m, x)[0],
    "filter_grad": filter_grad,
    "nnx.vmap": lambda f: lambda m, x: nnx.vmap(f, in_axes=(None, 0))(m, x).mean(),
}


def plain():
    def body(m, x):
        return m.linear("last", 2)(m.norm("norm")(m.linear("first", 8)(x)))

    return zoo.build("nnx", body, X, rng=np.random.default_rng(0)).model


@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, place):
    transform = TRANSFORMS[name]
    if place == "outside":
        applied = transform(apply_policy(squares, MIXED))
    else:
        applied = apply_policy(transform(squares), MIXED)

    def run(model):
        loss = applied(model, X)
        assert type(model.first) is nnx.Linear and model.first.kernel.dtype == F32
        return loss, nnx.state(model)

    run, state = pure(run, plain())  # pyright: ignore[reportAssignmentType]
    assert set(dots(run, state)) == {LOW}


def test_what_a_function_hands_back_is_stored(rng):
    model = make(rng, Small)
    stored = nnx.state(nnx.clone(model), nnx.Param)

    def fn(model, x):
        model(x)
        assert model.head.kernel.dtype == BF16
        return model, model.head, model.head.kernel, nnx.state(model, nnx.Param)

    whole, head, kernel, state = apply_policy(fn, MIXED)(model, X)
    assert whole is model
    assert head is model.head
    assert kernel is model.head.kernel
    assert_same_bits(state, stored)
    assert_same_bits(nnx.state(model, nnx.Param), stored)
    nnx.update(model, state)
    model.head.kernel[...] = jnp.zeros((4, 2))  # no hook of jmpx is left


def test_gradients_taken_inside_can_be_handed_back():
    def run(model):
        grads = apply_policy(nnx.grad(squares), MIXED)(model, X)
        grads.last.kernel[...] = jnp.zeros((8, 2), BF16)  # no hook of jmpx is left
        return grads.first.kernel[...]

    run, state = pure(run, plain())  # pyright: ignore[reportAssignmentType]
    assert jax.eval_shape(run, state).dtype == BF16


def test_what_the_function_makes_of_parts_holds_those_of_the_model(rng):
    model = make(rng, Small)
    inner = model.inner

    def fn(model):
        setattr(model, "extra", Holder(model.inner))  # noqa: B010
        return Holder(nnx.List([model.inner, Holder(model.head.kernel)]))

    made = apply_policy(fn, MIXED)(model)
    assert made.model[0] is vars(model)["extra"].model is model.inner is inner
    assert type(inner) is nnx.Linear and made.model[1].model is model.head.kernel
    assert model.head.kernel.dtype == inner.kernel.dtype == F32


def test_what_a_function_sets_reaches_the_model(rng):
    model = make(rng)
    values = jax.tree.map(lambda leaf: leaf + 1, nnx.state(model, nnx.Param))

    def fn(model, values):
        model.eval()
        model.calls = 7
        setattr(model, "extra", nnx.Variable(jnp.zeros(2)))  # noqa: B010
        setattr(model, "added", linear(2, 2))  # noqa: B010
        model.inner.bias = nnx.Param(jnp.ones(8))
        nnx.update(model, values)

    apply_policy(fn, RULES)(model, values)
    assert model.calls == 7
    assert model.norm.use_running_average and model.dropout.deterministic
    assert type(vars(model)["added"]) is nnx.Linear
    assert vars(model)["extra"].shape == (2,)
    del model.extra, model.added  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_bits(nnx.state(model, nnx.Param), values)


def set_by_value(model):
    model.head.kernel.value = 2 * model.head.kernel.value


def set_in_a_part(model):
    @nnx.jit
    def run(head):
        head.kernel[...] = 2 * head.kernel[...]

    run(model.head)


@pytest.mark.filterwarnings("ignore:'.value':DeprecationWarning")
@pytest.mark.parametrize("set_kernel", [set_by_value, set_in_a_part])
def test_a_cast_parameter_cannot_be_set(rng, set_kernel):
    model = make(rng, Small)
    head = model.head.kernel[...]
    with pytest.raises(ValueError, match=r"Cannot set a parameter .* copy in bfloat16"):
        apply_policy(set_kernel, MIXED)(model)
    assert_same_bits(model.head.kernel[...], head)
    apply_policy(set_kernel, "c=bf16; */head: full")(model)
    assert_same_bits(model.head.kernel[...], 2 * head)


def test_an_update_inside_is_refused(rng):
    state, both = (
        TrainState(make(rng, Small)),
        nnx.ModelAndOptimizer(make(rng, Small), optax.sgd(1)),
    )

    def update(optimizer, *models):
        optimizer.update(*models, nnx.state(both.model, nnx.Param))

    for arguments in ((state.optimizer, state.model), (both,)):
        before = state_of(arguments)
        with pytest.raises(ValueError, match="Cannot update an nnx.Optimizer"):
            apply_policy(update, MIXED)(*arguments)
        assert_same_bits(state_of(arguments), before)
        apply_policy(update, "c=f32")(*arguments)


def test_optimizer_states_are_left_alone():
    model, tx = linear(3, 2), optax.adam(0.1)
    states = tx.init(nnx.state(model, nnx.Param)), tx.init(model)  # pyright: ignore[reportArgumentType]

    def fn(model, states, x):
        assert BF16 not in {leaf.dtype for leaf in jax.tree.leaves(states)}
        return model(x)

    assert apply_policy(fn, "c=bf16")(model, states, X).dtype == BF16


def test_rules_by_class_and_path_and_class_policies():
    model = plain()
    model.last.dtype = jnp.bfloat16

    def run(policy):
        def dtypes(model):
            return model.first.kernel.dtype, model.last.kernel.dtype, model.norm.scale.dtype

        return apply_policy(dtypes, policy)(model)

    with jmpx.push_policy(nnx.LayerNorm, "full"):
        assert run(MIXED) == (BF16, BF16, F32)
        assert run(f"{MIXED}; Linear: full") == (F32, F32, F32)
        assert run(f"{MIXED}; */last: full; LayerNorm: c=bf16") == (BF16, F32, BF16)
    assert model.last.dtype is jnp.bfloat16


def test_tied_weights_of_two_policies():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(5, 4, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(4, 5, use_bias=False, rngs=nnx.Rngs(0))
            self.head.kernel = self.embed.embedding

        def __call__(self, x):
            return self.embed(x) @ self.head.kernel[...].T

    def fn(model):
        assert model.embed.embedding.dtype == BF16
        assert model.head.kernel.dtype == F32
        return nnx.grad(lambda m: m(jnp.arange(5)).astype(F32).sum())(model)

    def run(model):
        grads = apply_policy(fn, "c=bf16; */head: full")(model)
        assert model.head.kernel is model.embed.embedding
        return grads

    run, state = pure(run, Tied())  # pyright: ignore[reportAssignmentType]
    jax.eval_shape(run, state)


def test_a_map_inside_of_itself_and_inside_of_another(rng):
    model = make(rng, Small)
    inside = apply_policy(squares, MIXED)
    in_view = lambda model, x: squares(jmpx.flax.with_policies(model, MIXED), x)  # noqa: E731
    around = [apply_policy(f, MIXED) for f in (inside, in_view, nnx.jit(inside))]
    run, state = pure(lambda model: [f(nnx.clone(model), X) for f in (in_view, *around)], model)
    expected, *found = exactly(run)(state)
    for each in found:
        assert_same_bits(each, expected)
    view = jmpx.flax.with_policies(model, MIXED)
    assert jmpx.flax.with_policies(view) is view


class Wrapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.LayerNorm()(nn.Dense(8)(x)))  # the last one is Dense_0


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("; Dense: full; */Dense_0: c=bf16", [BF16, F32, BF16, BF16]),
        ("; Dense: full; LayerNorm: full", [BF16, F32, F32, BF16]),
    ],
)
def test_linen_modules_inside_of_a_model(rules, expected):
    """They get the stored parameters, and are models of their own."""
    wrapped = nnx.bridge.ToNNX(Wrapped(), rngs=nnx.Rngs(0))
    model = nnx.Sequential(linear(3, 8), wrapped, linear(2, 2))
    nnx.bridge.lazy_init(model, X)
    run, state = pure(apply_policy(lambda model, x: model(x), f"{MIXED}{rules}"), model)
    jaxpr = jax.make_jaxpr(run)(state, X)
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.dtype for eqn in products] == expected
    casts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type"]
    kernels = {id(var) for var in jaxpr.jaxpr.invars[:-1]}
    rounded = {id(eqn.outvars[0]) for eqn in casts if id(eqn.invars[0]) in kernels}
    assert not any(id(eqn.invars[0]) in rounded for eqn in casts)  # nothing is widened again
