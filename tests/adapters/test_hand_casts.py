"""Policy maps over Haiku, Linen and NNX, against the same layers with everything cast by hand."""

import contextlib
import functools

import haiku as hk
import jax
import numpy as np
import pytest
from flax import linen as nn, nnx
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, normal, zoo
from helpers.jaxprs import FULL, LOW, dots

import jmpx
import jmpx.flax
import jmpx.haiku

FRAMEWORKS = pytest.mark.parametrize("framework", ["haiku", "linen", "nnx"])
CONTEXTS = {"haiku": jmpx.haiku.policies, "linen": jmpx.flax.policies}  # NNX has views
LINEAR = {"haiku": hk.Linear, "linen": nn.Dense, "nnx": nnx.Linear}
HALF = "float16xfloat16"
X = normal(np.random.default_rng(0), 5, 4)


def net(m, x):
    x = m.norm("norm")(jax.nn.relu(m.linear("inner", 8)(x)))
    return m.linear("head", 3)(x)


def by_hand(m, x, norm, head):
    """`net` in bfloat16, but for the norm and the head."""
    x = jax.nn.relu(m.linear("inner", 8)(x.astype(BF16)))
    x = m.norm("norm")(x.astype(norm)).astype(BF16)
    return m.linear("head", 3)(x.astype(head)).astype(BF16).astype(F32)


def applied_by_hand(framework, norm, head):
    """A function of a model and of an input, which casts both."""
    body = functools.partial(by_hand, norm=norm, head=head)
    apply = zoo.drawn(framework, body, *X.shape).apply

    def cast(path, leaf):
        names = jax.tree_util.keystr(path)
        return leaf.astype(norm if "norm" in names else head if "head" in names else BF16)

    def run(model, x):
        model = jax.tree_util.tree_map_with_path(cast, model)
        if framework == "nnx":
            model.body = body
        return apply(model, x)

    return run


# The policy map, and the dtypes of the norm and of the head; of two rules the last one wins.
RULES = {
    MIXED: (BF16, BF16),
    f"{MIXED}; */inner: f32; *norm*: full; <Linear>: bf16; */head: full": (F32, F32),
}


@pytest.mark.usefixtures("standard_promotion")
@FRAMEWORKS
def test_it_is_the_hand_cast_computation_to_the_bit(framework):
    found = zoo.drawn(framework, net, *X.shape)
    before = jax.tree.map(np.array, found.model)

    def all_rules(functions):
        """The results under each rule, and gradients under the last one."""

        def loss(model):
            return (functions[-1](model, X) ** 2).mean()

        def all_of(model):
            return [run(model, X) for run in functions], jax.value_and_grad(loss)(model)

        return jax.jit(all_of)(found.model)

    ours = all_rules([found.under(found.words(policy_map)) for policy_map in RULES])
    hand = all_rules([applied_by_hand(framework, *dtypes) for dtypes in RULES.values()])
    for policy_map, y, expected in zip(RULES, ours[0], hand[0], strict=True):
        assert y.dtype == F32, policy_map
        assert_same_bits(y, expected)
    pairs = zip(jax.tree.leaves(ours[1]), jax.tree.leaves(hand[1]), strict=True)
    for grad, expected in pairs:
        assert grad.dtype == F32
        assert_same_bits(grad, expected)
    assert_same_bits(jax.tree.map(np.array, found.model), before)
    assert set(dots(found.apply, found.model, X)) == {FULL}  # and nothing is left behind


def noting(m, x):
    for name in ("first", "island"):
        x = m.linear(name, 4)(x)
        LOG.append(x.dtype)
    x = m.inner("block", noting_inside)(x)
    LOG.append(x.dtype)
    return x


def noting_inside(m, x):
    for name in ("flat", "deep"):
        x = m.linear(name, 4)(x)
        LOG.append(x.dtype)
    return x


# What the layers multiply; what their results are where they are used, then those of the block and
# of the model. Strict promotion refuses any mix of dtypes.
SEEN = {
    f"{MIXED}; */island: full": ([LOW, FULL, LOW, LOW], [*5 * [BF16], F32]),
    "c=bf16; <Inner>: c=f16; */block/deep: full": (
        [LOW, LOW, HALF, FULL],
        [BF16, BF16, F16, F16, BF16, BF16],
    ),
    "c=bf16; *block/*: c=f16": (  # the block, and all that is inside of it
        [LOW, LOW, HALF, HALF],
        [BF16, BF16, F16, F16, BF16, BF16],
    ),
    "c=bf16,o=f16; */deep: c=f32,o=f32; <Inner>: o=f32": (
        [LOW, LOW, LOW, FULL],
        [BF16, BF16, BF16, F32, F32, F16],
    ),
}


@pytest.mark.parametrize("policy_map", SEEN)
@FRAMEWORKS
def test_what_each_layer_sees(framework, policy_map, log):
    found = zoo.drawn(framework, noting, *X.shape)
    log.clear()
    run = found.under(found.words(policy_map))
    assert dots(run, found.model, X) == SEEN[policy_map][0]
    assert [*log, jax.eval_shape(run, found.model, X).dtype][:6] == SEEN[policy_map][1]


@FRAMEWORKS
def test_rules_go_before_the_policies_of_classes(framework):
    found = zoo.drawn(framework, noting, *X.shape)
    with jmpx.push_policy(LINEAR[framework], "c=f16,o=bf16"):
        policy_map = f"{MIXED}; */island: full; */deep: c=bf16"
        assert dots(found.under(policy_map), found.model, X) == [HALF, FULL, HALF, LOW]


def one_layer(m, x):
    return m.linear("head", 3)(x)


@pytest.mark.parametrize("framework", CONTEXTS)
def test_a_trace_belongs_to_its_policy_map_and_the_innermost_context_holds(framework):
    found, context = zoo.drawn(framework, one_layer, *X.shape), CONTEXTS[framework]
    step = jax.jit(found.apply)
    plain = step(found.model, X)
    with context("c=f16"):
        for policy_map, dtype in (("c=bf16", BF16), ("f32", F32), ("c=bf16", BF16)):
            with context(policy_map):
                assert step(found.model, X).dtype == dtype
        assert step(found.model, X).dtype == F16
    assert_same_bits(step(found.model, X), plain)


@pytest.mark.parametrize("framework", CONTEXTS)
def test_parameters_are_created_in_the_param_dtype(framework):
    def created(policy_map):
        with CONTEXTS[framework](policy_map) if policy_map else contextlib.nullcontext():
            return zoo.build(framework, one_layer, X).model

    maps = None, MIXED, "p=bf16,c=f32", "p=bf16; */head: p=f32"
    plain, mixed, low, ruled = jax.jit(lambda: [*map(created, maps)])()
    assert_same_bits(mixed, plain)
    assert_same_bits(ruled, plain)
    if framework == "linen":  # Haiku's initializers draw in the dtype itself
        assert_same_bits(low, jmpx.cast_tree(plain, BF16))
    assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {BF16}


@pytest.mark.parametrize("framework", CONTEXTS)
def test_a_context_ends_cleanly_after_an_error(framework):
    found, context = zoo.drawn(framework, one_layer, *X.shape), CONTEXTS[framework]

    def fail(m, x):
        raise ZeroDivisionError

    with jmpx.push_policy(LINEAR[framework], "f16"):
        with contextlib.suppress(ZeroDivisionError), context("c=bf16; NoSuchClass: full"):
            zoo.build(framework, fail, X)  # and no warning
        assert jmpx.policy_of(LINEAR[framework]) == jmpx.get_policy("f16")
        assert jmpx.current_policy() is None
    assert dots(found.apply, found.model, X) == [FULL]
    assert dots(found.under("c=bf16"), found.model, X) == [LOW]
