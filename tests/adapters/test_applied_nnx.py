"""Models of NNX under `by=modules`: the models among the arguments run as views of themselves."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import BF16, F32, assert_same_bits, normal
from helpers.nnx_net import Net, assert_same_state, make, squares

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")

RULES = "c=bf16,o=f32; BatchNorm: full"


def apply_policy(func, policy):
    return jmpx.apply_policy(func, f"by=modules,{policy}")


class TrainState(nnx.Module):
    def __init__(self, model):
        self.model = model
        self.optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        self.metrics = nnx.metrics.Average()
        self.rngs = nnx.Rngs(3)


class Pair(nnx.Module):
    """Holds models, and is never called."""

    def __init__(self, model):
        self.model = model


ARGUMENTS = {
    "model": (lambda m: m, lambda m, x: m(x)),
    "tuple": (lambda m: (m, 3), lambda t, x: t[0](x)),
    "dict": (lambda m: {"a": [m]}, lambda t, x: t["a"][0](x)),
    "nnx.List": (lambda m: nnx.List([m]), lambda t, x: t[0](x)),
    "nnx.Dict": (lambda m: nnx.Dict(a=m), lambda t, x: t.a(x)),
    "train state": (TrainState, lambda t, x: t.model(x)),
    "model and optimizer": (
        lambda m: nnx.ModelAndOptimizer(m, optax.sgd(0.1)),
        lambda t, x: t.model(x),
    ),
    "holder": (Pair, lambda t, x: t.model(x)),
    "same model twice": (lambda m: (m, m), lambda t, x: t[0].head(t[1].encode(x)).astype(F32)),
    "part and whole": (lambda m: (m.head, m), lambda t, x: t[0](t[1].encode(x)).astype(F32)),
    "method": (lambda m: m.__call__, lambda f, x: f(x)),
    "partial": (lambda m: functools.partial(lambda m, x: m(x), m), lambda f, x: f(x)),
    "partial of a method": (lambda m: functools.partial(m.__call__), lambda f, x: f(x)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_models_are_found(rng, kind):
    model, x = make(rng), normal(rng, 6, 3)
    reference = nnx.clone(model)
    put, call = ARGUMENTS[kind]
    given = put(model)

    def loss_fn(given, x):
        assert model.inner.kernel.dtype == F32
        y = call(given, x)
        assert y.dtype == F32
        return (y**2).mean()

    loss = apply_policy(loss_fn, RULES)(given, x)
    expected = squares(jmpx.flax.with_policies(reference, RULES), x)
    assert_same_bits(loss, expected)
    assert type(model) is Net
    assert type(model.inner) is nnx.Linear
    assert type(given) is type(put(nnx.clone(model)))
    assert model.calls == 1
    assert model.between[...].dtype == BF16
    assert_same_state(model.norm, reference.norm)
    assert_same_state(model.dropout, reference.dropout)
    assert_same_bits(nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param))


def gradients(loss_fn, policy, **options):
    scaling = jmpx.NoOpLossScale()

    def run(model, x):
        results = jmpx.filter_value_and_grad(loss_fn, scaling, policy=policy, **options)(model, x)
        return results.value, results.grads

    return run


def viewed(model, x):
    return squares(jmpx.flax.with_policies(model, RULES), x)


def program(run, model, x):
    graph, state = nnx.split(model)

    def pure(state, x):
        model = nnx.merge(graph, state)
        result = run(model, x)
        model.calls = 0
        vars(model).pop("between", None)  # is set on a view alone
        return result, nnx.state(model)

    return jax.jit(pure).lower(state, x).as_text()


def test_gradients_and_programs_are_those_of_a_view(rng):
    model, x = make(rng), normal(rng, 6, 3)
    steps = gradients(viewed, "full"), gradients(squares, f"by=modules,{RULES}")
    models = [nnx.clone(model) for _ in steps]
    results = [nnx.jit(run)(each, x) for run, each in zip(steps, models, strict=True)]
    assert_same_bits(*results)
    del models[1].between
    assert_same_state(models[0], models[1])
    assert models[1].dropout.rngs.count[...] == 1  # pyright: ignore[reportOptionalMemberAccess]
    first, second = (program(run, nnx.clone(model), x) for run in steps)
    assert first == second


@pytest.mark.thorough
def test_microbatches_of_a_model_with_remat(rng):
    model, x = make(rng), normal(rng, 6, 3)
    model.encode(x)
    batch = jmpx.Batch(microbatches=2)

    def loss_fn(model, x):
        h = nnx.remat(lambda part, x: part(x))(model.inner, x)
        return (model.head(model.dropout(model.norm(h))).astype(F32) ** 2).mean()

    def in_view(model, x):
        return loss_fn(jmpx.flax.with_policies(model, RULES), x)

    steps = (
        gradients(in_view, "full", batch=batch),
        gradients(loss_fn, f"by=modules,{RULES}", batch=batch),
    )
    models = [nnx.clone(model) for _ in steps]
    results = [nnx.jit(run)(each, x) for run, each in zip(steps, models, strict=True)]
    assert_same_bits(*results)
    assert_same_state(models[0], models[1])


TRANSFORMS = {
    "nnx.jit": lambda f: nnx.jit(f),
    "nnx.remat": lambda f: nnx.remat(f),
    "nnx.grad": lambda f: lambda m, x: nnx.value_and_grad(f)(m, x)[0],
    "filter_grad": lambda f: lambda m, x: gradients(f, "full")(m, x)[0],
    "nnx.vmap": lambda f: (
        lambda m, x: nnx.vmap(f, in_axes=(nnx.StateAxes({nnx.RngState: None, ...: None}), 0))(
            m, x
        ).mean()
    ),
}


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(rng, name, place):
    model, x = Plain(nnx.Rngs(0)), normal(rng, 6, 3)
    before = nnx.state(nnx.clone(model))
    transform = TRANSFORMS[name]
    if place == "outside":
        run = transform(apply_policy(squares, "c=bf16,o=f32"))
    else:
        run = apply_policy(transform(squares), "c=bf16,o=f32")
    loss = run(model, x)
    view = jmpx.flax.with_policies(model, "c=bf16,o=f32")
    assert jnp.allclose(loss, squares(view, x), rtol=1e-2)
    assert type(model.first) is nnx.Linear
    assert_same_bits(nnx.state(model), before)


def test_what_a_function_hands_back_is_stored(rng):
    model, x = make(rng), normal(rng, 6, 3)
    stored = nnx.state(nnx.clone(model), nnx.Param)

    def fn(model, x):
        model(x)
        assert model.head.kernel.dtype == BF16
        return model, model.head, model.head.kernel, nnx.state(model, nnx.Param)

    whole, head, kernel, state = apply_policy(fn, RULES)(model, x)
    assert whole is model
    assert head is model.head
    assert kernel is model.head.kernel
    assert_same_bits(state, stored)
    assert_same_bits(nnx.state(model, nnx.Param), stored)
    nnx.update(model, state)
    model.head.kernel[...] = jnp.zeros((8, 2))  # no hook of jmpx is left


def test_gradients_taken_inside_can_be_handed_back(rng):
    model, x = make(rng), normal(rng, 6, 3)
    _, grads = apply_policy(nnx.value_and_grad(squares), RULES)(model, x)
    grads.head.kernel[...] = jnp.zeros((8, 2), BF16)  # no hook of jmpx is left
    assert grads.inner.kernel.dtype == BF16


def test_a_copy_of_a_view_is_refused(rng):
    with pytest.raises(ValueError, match="got a copy of a Net, whose parameters are cast"):
        apply_policy(nnx.clone, RULES)(make(rng))


def test_what_the_function_makes_of_parts_holds_those_of_the_model(rng):
    model = make(rng)
    inner = model.inner

    def fn(model):
        setattr(model, "extra", Pair(model.inner))  # noqa: B010
        return Pair(nnx.List([model.inner, Pair(model.head.kernel)]))

    made = apply_policy(fn, RULES)(model)
    assert made.model[0] is vars(model)["extra"].model is model.inner is inner
    assert type(inner) is nnx.Linear and made.model[1].model is model.head.kernel
    assert model.head.kernel.dtype == inner.kernel.dtype == F32


def test_what_a_function_sets_reaches_the_model(rng):
    model, other = make(rng), make(rng)
    values = nnx.state(other, nnx.Param)

    def fn(model, values):
        model.eval()
        model.calls = 7
        setattr(model, "extra", nnx.Variable(jnp.zeros(2)))  # noqa: B010
        setattr(model, "added", nnx.Linear(2, 2, rngs=nnx.Rngs(0)))  # noqa: B010
        model.inner.bias = nnx.Param(jnp.ones(8))
        nnx.update(model, values)

    values = jax.tree.map(lambda leaf: leaf + 1, values)
    apply_policy(fn, RULES)(model, values)
    assert model.calls == 7
    assert model.norm.use_running_average
    assert model.dropout.deterministic
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
    model = make(rng)
    with pytest.raises(ValueError, match=r"Cannot set a parameter .* copy in bfloat16"):
        apply_policy(set_kernel, RULES)(model)
    head = model.head.kernel[...]
    apply_policy(set_kernel, "c=bf16; */head: full")(model)
    assert_same_bits(model.head.kernel[...], 2 * head)


@pytest.mark.parametrize("kind", ["train state", "model and optimizer", "arguments"])
def test_an_update_inside_is_refused(rng, kind):
    model = make(rng)
    tx = optax.sgd(0.1)
    given, update = {
        "train state": (
            TrainState(model),
            lambda s: s.optimizer.update(s.model, nnx.state(s.model, nnx.Param)),
        ),
        "model and optimizer": (
            nnx.ModelAndOptimizer(model, tx),
            lambda s: s.update(nnx.state(s.model, nnx.Param)),
        ),
        "arguments": (
            (model, nnx.Optimizer(model, tx, wrt=nnx.Param)),
            lambda s: s[1].update(s[0], nnx.state(s[0], nnx.Param)),
        ),
    }[kind]
    with pytest.raises(ValueError, match=r"Cannot update an nnx.Optimizer .* return the gradients"):
        apply_policy(update, RULES)(given)
    apply_policy(update, "c=f32")(given)


def test_optimizer_states_are_left_alone(rng):
    model, tx = Plain(nnx.Rngs(0)), optax.adam(0.1)
    states = tx.init(nnx.state(model, nnx.Param)), tx.init(model)  # pyright: ignore[reportArgumentType]

    def fn(model, states, x):
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(states)}
        assert BF16 not in dtypes
        return model(x)

    apply_policy(fn, RULES.split(";")[0])(model, states, normal(rng, 6, 3))


def test_rules_by_class_and_path_and_class_policies(rng):
    model, x = Plain(nnx.Rngs(0)), normal(rng, 6, 3)
    model.last.dtype = jnp.bfloat16

    def dtypes(model, x):
        assert model(x).dtype == F32
        return tuple(m.kernel.dtype for m in (model.first, model.last)), model.norm.scale.dtype

    run = lambda policy: apply_policy(lambda m, x: dtypes(m, x), policy)(model, x)  # noqa: E731
    with jmpx.push_policy(nnx.LayerNorm, "full"):
        assert run("c=bf16,o=f32") == ((BF16, BF16), F32)
        assert run("c=bf16,o=f32; Linear: full") == ((F32, F32), F32)
        assert run("c=bf16,o=f32; */last: full; LayerNorm: c=bf16") == ((BF16, F32), BF16)
    assert model.last.dtype is jnp.bfloat16


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.head = nnx.Linear(4, 5, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.embedding

    def __call__(self, x):
        return self.embed(x) @ self.head.kernel[...].T


def test_tied_weights_of_two_policies(rng):
    model = Tied(nnx.Rngs(0))

    def fn(model):
        assert model.embed.embedding.dtype == BF16
        assert model.head.kernel.dtype == F32
        return nnx.grad(lambda m: m(jnp.arange(5)).astype(F32).sum())(model)

    apply_policy(fn, "c=bf16; */head: full")(model)
    assert model.head.kernel is model.embed.embedding


def test_a_map_inside_of_itself_and_inside_of_another(rng):
    model, x = make(rng), normal(rng, 6, 3)
    expected = squares(jmpx.flax.with_policies(nnx.clone(model), RULES), x)
    inside = apply_policy(squares, RULES)
    view = lambda model, x: squares(jmpx.flax.with_policies(model, RULES), x)  # noqa: E731
    for fn in inside, view:
        assert_same_bits(apply_policy(fn, RULES)(nnx.clone(model), x), expected)
    apply_policy(nnx.jit(inside), RULES)(nnx.clone(model), x)
    with pytest.raises(ValueError, match="a Net that is a view already, under"):
        apply_policy(apply_policy(squares, "c=f32"), RULES)(model, x)
    view = jmpx.flax.with_policies(model, RULES)
    assert jmpx.flax.with_policies(view) is view
    with pytest.raises(ValueError, match="view already, under"):
        jmpx.flax.with_policies(view, "c=f16")


def test_rules_without_effect_are_warned_of_once(rng):
    models = make(rng), Plain(nnx.Rngs(0))
    fn = lambda models, x: models[0](x) + models[1](x)  # noqa: E731
    policy = "c=bf16,o=f32; LayerNorm: full; BatchNorm: full; Cov: full"
    with pytest.warns(UserWarning, match="Cov") as caught:
        apply_policy(fn, policy)(models, normal(rng, 6, 3))
    assert len(caught) == 1


class Wrapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.LayerNorm()(nn.Dense(8)(x)))  # the last one is Dense_0


class Both(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.wrapped = nnx.bridge.ToNNX(Wrapped(), rngs=rngs)
        self.last = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.wrapped(self.first(x)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("", [BF16, BF16, BF16, BF16]),
        ("; Dense: full; */Dense_0: c=bf16", [BF16, F32, BF16, BF16]),
        ("; Dense: full; LayerNorm: full", [BF16, F32, F32, BF16]),
    ],
)
def test_linen_modules_inside_of_a_model(rng, rules, expected):
    """They get the stored parameters, and are models of their own."""
    model, x = Both(nnx.Rngs(0)), normal(rng, 5, 3)
    nnx.bridge.lazy_init(model, x)
    graph, state = nnx.split(model)

    def fn(state, x):
        model = nnx.merge(graph, state)
        return apply_policy(lambda model, x: model(x), f"c=bf16,o=f32{rules}")(model, x)

    jaxpr = jax.make_jaxpr(fn)(state, x)
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.dtype for eqn in products] == expected
    casts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type"]
    kernels = {id(var) for var in jaxpr.jaxpr.invars[:-1]}
    rounded = {id(eqn.outvars[0]) for eqn in casts if id(eqn.invars[0]) in kernels}
    assert not any(id(eqn.invars[0]) in rounded for eqn in casts)  # nothing is widened again
