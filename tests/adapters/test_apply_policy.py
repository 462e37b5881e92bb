"""`apply_policy`, and `policy=` of the gradient functions, which differentiate it."""

import contextlib
import warnings

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from helpers import BF16, F32, assert_same_bits, dtypes, enable_x64, leniently, normal
from helpers.jaxprs import dots, program

import jmpx
import jmpx.haiku

NET = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 2], name="net")(x)))


def model(params, x):
    return NET.apply(params, x)


def loss_fn(params, x, y):
    return jnp.mean((model(params, x) - y) ** 2)


@pytest.fixture
def problem(rng):
    x, y = normal(rng, 4, 3), normal(rng, 4, 2)
    shapes = jax.eval_shape(NET.init, jax.random.key(0), x)
    return jax.tree.map(lambda leaf: normal(rng, *leaf.shape) / 2, shapes), x, y


def by_arguments(params, x):
    return model(*jmpx.cast_tree((params, x), "bfloat16"))


def by_modules(params, x):
    with jmpx.haiku.policies(ISLAND):
        return model(params, x)


ISLAND = "c=bf16,o=f32; */linear_1: full"
# A policy, and the model with the same casts by hand.
WAYS = {
    "by=arguments,c=bf16": by_arguments,
    "by=arguments,c=bf16,o=f32": lambda *args: by_arguments(*args).astype(F32),
    f"by=modules,{ISLAND}": by_modules,
    "by=operations,c=bf16": jmpx.autocast(model, "c=bf16"),
    "c=bf16,o=f32": jmpx.autocast(model, "c=bf16"),
    "c=bf16; */linear_1: full": jmpx.autocast(model, "c=bf16; */linear_1: full"),
    "c=bf16,save=products": jmpx.autocast(model, "c=bf16", save="products"),
    "c=bf16; op.max: bf16": jmpx.autocast(model, "c=bf16; op.max: bf16"),
    "full": model,
}


@pytest.mark.parametrize("policy", WAYS)
def test_each_way_casts_as_it_does_by_hand(policy, problem):
    applied, args = jmpx.apply_policy(model, policy), problem[:2]
    assert program(applied, *args) == program(WAYS[policy], *args)
    assert dots(jmpx.apply_policy(JITTED, policy), *args) == dots(WAYS[policy], *args)


JITTED = jax.jit(model)  # JAX traces it anew for each way


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["c=bf16", f"by=modules,{ISLAND}", "c=bf16; */linear_1: full"])
def test_the_gradient_function_differentiates_it(policy, problem):
    applied = jmpx.apply_policy(loss_fn, policy)
    expected = jax.jit(jax.value_and_grad(lambda *args: applied(*args).astype(F32)))(*problem)
    grad_fn = jmpx.value_and_grad(loss_fn, jmpx.StaticLossScale(2**10), policy=policy)
    result = jax.jit(grad_fn)(*problem)
    assert_same_bits((result.value, result.grads), expected)


@pytest.mark.parametrize("by", ["arguments", "modules"])
def test_what_is_saved_changes_no_dtype_in_any_way(by, problem):
    plain, saving = (f"by={by},c=bf16,o=f32{save}" for save in ("", ",save=products"))
    results = [jmpx.apply_policy(model, policy)(*problem[:2]) for policy in (plain, saving)]
    assert_same_bits(*results)
    grads = [jax.grad(jmpx.apply_policy(loss_fn, policy))(*problem) for policy in (plain, saving)]
    assert_same_bits(*grads)
    programs = [program(jax.grad(jmpx.apply_policy(loss_fn, p)), *problem) for p in (plain, saving)]
    assert ["jmpx_saved" in text for text in programs] == [False, True]


def test_whatever_a_policy_is(problem):
    args = problem[:2]
    mapping = {"policy": "c=bf16", "rules": [{"select": "*/linear_1", "compute": "f32"}]}
    expected = program(jmpx.autocast(model, "c=bf16; */linear_1: full"), *args)
    for policy in (
        mapping,
        jmpx.get_policy_map(ISLAND),
        jmpx.MixedPrecision(ISLAND),
        jmpx.get_mixed_precision(f"{ISLAND} | static=1024"),
    ):
        assert program(jmpx.apply_policy(model, policy), *args) == expected
        grad_fn = jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy=policy)
        assert set(dtypes(jax.eval_shape(grad_fn, *problem).grads)) == {"float32"}
    bf16 = jmpx.get_policy("c=bf16"), {"compute": "bf16"}, jmpx.Policy(*["bf16"] * 3), jnp.bfloat16
    for policy in bf16:
        assert set(dots(jmpx.apply_policy(model, policy), *args)) == {"bfloat16xbfloat16"}


def test_as_a_decorator(problem):
    params, x, _ = problem

    @jmpx.apply_policy(policy="by=arguments,c=bf16", uncast="x")
    def seen(params, x):
        """Returns the dtypes."""
        return dtypes((params, x))

    assert seen(params, x) == seen(params, x=x) == ["bfloat16"] * 4 + ["float32"]
    assert seen.__doc__ == "Returns the dtypes."


def test_results_are_widened_and_never_narrowed():
    def results(x):
        return {"same": x, "wide": x.astype(F32), "count": jnp.arange(2), "text": "text"}

    for policy, found in {
        "by=arguments,c=bf16": ("bfloat16", "float32"),
        "by=arguments,c=bf16,o=f32": ("float32", "float32"),
        "by=arguments,c=f32,o=bf16": ("float32", "float32"),
        "c=bf16": ("bfloat16", "float32"),
        "c=bf16,o=f32": ("float32", "float32"),
        "c=bf16,o=f64": ("float64", "float64"),
    }.items():
        with enable_x64() if "64" in policy else contextlib.nullcontext():
            x = jnp.ones(3, BF16 if policy.startswith("c=") else F32)
            result = jmpx.apply_policy(results, policy)(x)
        assert (result["same"].dtype.name, result["wide"].dtype.name) == found
        assert jnp.issubdtype(result["count"].dtype, jnp.integer) and result["text"] == "text"


def test_casts_of_a_subclass_are_used():
    class WideCast(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jmpx.cast_tree(tree, F32)

    policy = WideCast("float32", "bfloat16", "float32")
    assert jmpx.apply_policy(jnp.sin, policy)(jnp.ones(2, BF16)).dtype == F32


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("by=arguments,c=bf16,o=f32", "c=bf16,o=f32"), ("by=arguments,c=bf16", "c=bf16")],
)
def test_the_same_map_inside_is_no_second_cast_and_no_warning(outer, inner, problem):
    def in_context(params, x):
        with jmpx.haiku.policies(inner):
            return model(params, x)

    args = problem[:2]  # the context returns the model's result in its output dtype
    expected = program(lambda *args: in_context(*jmpx.cast_tree(args, "bfloat16")), *args)
    assert program(jmpx.apply_policy(in_context, outer), *args) == expected


@pytest.mark.parametrize("policy", [f"by=modules,{ISLAND}", "by=arguments,c=bf16", "c=bf16"])
def test_apply_policy_inside_of_the_same_policy(policy, problem):
    inner = jmpx.apply_policy(model, policy)
    twice = jmpx.apply_policy(lambda *args: inner(*args), policy)
    once = jmpx.apply_policy(model, policy)
    assert dots(jax.grad(lambda *args: twice(*args).astype(F32).sum()), *problem[:2]) == dots(
        jax.grad(lambda *args: once(*args).astype(F32).sum()), *problem[:2]
    )


def test_what_is_not_warned_of():
    """tests/messages has what is."""
    w = jnp.ones(3)
    jmpx.apply_policy(lambda i: w[i] * 2, "by=arguments,full")(jnp.arange(2))  # nothing to say
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        draw = lambda key, i: jax.random.normal(key, (2,))  # noqa: E731
        jmpx.apply_policy(draw, "by=arguments,c=bf16")(key, 3)


@pytest.mark.parametrize("policy", ["c=bf16", "c=bf16,o=f32", "c=f16", "full"])
def test_a_class_policy_casts_again_only_to_another_dtype(policy, problem):
    with jmpx.push_policy(hk.Linear, policy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(jmpx.apply_policy(NET.apply, "by=arguments,c=bf16"), *problem[:2])
    texts = [str(warning.message) for warning in caught]
    again = [] if policy.startswith("c=bf16") else [True]
    assert ["casts them again" in text for text in texts] == again


def test_a_step_of_flax_is_the_hand_written_one_to_the_last_bit(rng):
    n, features, scale = rng.integers(2, 40), rng.integers(1, 9), 1000.0
    x, y = normal(rng, n, features), normal(rng, n)
    params = {"kernel": normal(rng, features, 1), "bias": normal(rng, 1)}
    tx = optax.sgd(rng.uniform(0.01, 0.5))
    ours = theirs = TrainState.create(apply_fn=nn.Dense(1).apply, params=params, tx=tx)

    def squared_error(params, x, y):
        return jnp.mean((ours.apply_fn({"params": params}, x).reshape(-1) - y) ** 2)

    def with_policy(params):
        loss_scale = jmpx.StaticLossScale(scale)
        return jmpx.grad(squared_error, loss_scale, policy="by=arguments,c=bf16")(
            params, x, y
        ).grads

    def by_hand(params):
        def scaled_loss(params):
            args = jax.tree.map(lambda leaf: leaf.astype(BF16), (params, x, y))
            return squared_error(*args).astype(F32) * scale

        return jax.tree.map(lambda grad: grad / scale, jax.grad(scaled_loss)(params))

    def stepping(grads_of):
        return jax.jit(leniently(lambda s: s.apply_gradients(grads=grads_of(s.params))))

    step, reference = stepping(with_policy), stepping(by_hand)
    for _ in range(3):
        ours, theirs = step(ours), reference(theirs)
        assert_same_bits(ours.params, theirs.params)
        assert ours.params["kernel"].dtype == F32
    assert ours.step == theirs.step == 3
