"""`jmpx.haiku.policies`: a policy map over Haiku modules."""

import functools
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leniently

import jmpx
import jmpx.haiku

BF16, F16, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
SEEN = {}


def numbers(shape, dtype):
    """Random parameters by NumPy: Haiku's would be compiled under each policy map anew."""
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


class Dense(hk.Module):
    """Records in which dtypes it runs; strict promotion refuses any mix of them."""

    def __init__(self, size, name=None):
        super().__init__(name=name)
        self.size = size

    def __call__(self, x):
        w = hk.get_parameter("w", (x.shape[-1], self.size), jnp.float32, numbers)
        SEEN[self.module_name] = (x.dtype, w.dtype, w)
        return x @ w


class Net(hk.Module):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.early = Dense(5, "early")

    def __call__(self, x):
        x = self.early(x)
        x = jax.nn.relu(Dense(6, "body")(x))
        SEEN["between"] = x.dtype
        return self.head(x)

    def head(self, x):
        return Dense(2, "logits")(x)


NET = hk.transform(lambda x: Net()(x))


@pytest.fixture
def x(rng):
    return rng.normal(size=(4, 3)).astype(np.float32)


def run(policy_map, x, network=NET):
    """Returns the parameters, the result, and what each module saw while applied."""
    with jmpx.haiku.policies(policy_map):
        params = network.init(jax.random.key(0), x)
        SEEN.clear()
        y = network.apply(params, None, x)
    return params, y


def test_the_default_applies_to_the_outermost_call_as_a_whole(x):
    params, y = run("c=bf16,o=f16", x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {F32}
    assert y.dtype == F16 and SEEN["between"] == BF16
    for name in ("net/~/early", "net/body", "net/~head/logits"):
        assert SEEN[name][:2] == (BF16, BF16)
    half = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    h = jax.nn.relu(half(x) @ half(params["net/~/early"]["w"]) @ half(params["net/body"]["w"]))
    expected = (h @ half(params["net/~head/logits"]["w"])).astype(F16)
    np.testing.assert_array_equal(y, expected)


def test_parameters_are_created_in_the_param_dtype(x):
    params, _ = run("p=bf16,c=f32", x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {BF16}
    assert SEEN["net/body"][:2] == (F32, F32)


ISLANDS = ["*/body: full", "net/body: c=f32", "*body*: full", "Dense: c=bf16; */body: full"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", ISLANDS)
def test_one_instance_among_many_is_an_island_of_master_weights(rule, x):
    params, y = run(f"c=bf16,o=f32; {rule}", x)
    assert SEEN["net/~/early"][:2] == (BF16, BF16)
    assert SEEN["net/body"][:2] == (F32, F32)
    assert SEEN["between"] == BF16 and y.dtype == F32
    np.testing.assert_array_equal(SEEN["net/body"][2], params["net/body"]["w"])


def test_a_class_rule_is_about_all_instances_and_the_last_one_wins(x):
    run("c=bf16; Dense: c=f16", x)
    assert {SEEN[name][0] for name in SEEN if name != "between"} == {F16}
    run("c=bf16; */body: c=f16; Dense: full", x)
    assert SEEN["net/body"][0] == F32
    run("c=bf16; Module: full; */body: c=f16", x)
    assert (SEEN["net/body"][0], SEEN["net/~/early"][0]) == (F16, F32)


def test_an_island_may_say_its_output(x):
    _, y = run("c=bf16,o=f16; */logits: c=f32,o=f32", x)
    assert y.dtype == F16  # the root has the last word
    with jmpx.haiku.policies("c=bf16; Dense: o=f32; Net: c=f32,o=bf16"):
        assert NET.apply(NET.init(jax.random.key(0), x), None, x).dtype == BF16


def test_what_is_inside_an_island_belongs_to_it(x):
    network = hk.transform(lambda x: Outer()(x))

    class Outer(hk.Module):
        def __call__(self, x):
            y = Net()(x)
            SEEN["outer"] = y.dtype
            return y

    _, y = run("c=bf16,o=f32; Net: c=f16", x, network)
    assert {SEEN[name][0] for name in SEEN if "net" in name} == {F16}
    assert SEEN["outer"] == BF16 and y.dtype == F32
    run("c=bf16,o=f32; Net: c=f16; */body: c=f32", x, network)
    assert SEEN["outer/net/body"][0] == F32 and SEEN["between"] == F16


# policies of classes


@pytest.mark.parametrize("set_policy", [jmpx.set_policy, hk.mixed_precision.set_policy])
def test_class_policies_hold_where_no_rule_matches(set_policy, x):
    set_policy(Dense, jmpx.get_policy("p=f32,c=f16,o=bf16"))
    params, _ = run("c=bf16,o=f32; */body: full", x)
    assert SEEN["net/~/early"][:2] == (F16, F16)
    assert SEEN["net/body"][:2] == (F32, F32)
    np.testing.assert_array_equal(SEEN["net/body"][2], params["net/body"]["w"])
    for registry in (jmpx.policy_of, hk.mixed_precision.get_policy):
        assert registry(Dense) == jmpx.get_policy("p=f32,c=f16,o=bf16")
    jmpx.clear_policy(Dense)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("set_policy", [jmpx.set_policy, hk.mixed_precision.set_policy])
def test_an_island_in_a_class_with_a_policy_reads_the_master_weights(set_policy, x):
    set_policy(Net, jmpx.get_policy("p=f32,c=bf16,o=f16"))
    params, y = run("full; */body: full", x)
    assert SEEN["net/~/early"][:2] == (BF16, BF16) and y.dtype == F16
    assert SEEN["net/body"][:2] == (F32, F32) and SEEN["between"] == BF16
    np.testing.assert_array_equal(SEEN["net/body"][2], params["net/body"]["w"])
    jmpx.clear_policy(Net)


def test_a_map_agrees_with_the_same_policies_by_class(x):
    params, by_map = run("c=bf16,o=f32; Dense: p=f32,c=f16,o=bf16", x)
    with jmpx.push_policy(Net, "c=bf16,o=f32"):
        with hk.mixed_precision.push_policy(Dense, jmpx.get_policy("p=f32,c=f16,o=bf16")):  # pyright: ignore[reportArgumentType]
            by_class = NET.apply(params, None, x)
    np.testing.assert_array_equal(by_map, by_class)


def test_inside_of_the_context_both_registries_answer_through_jmpx(x):
    answers = []

    class Asks(hk.Module):
        def __call__(self, x):
            answers.append((jmpx.policy_of(Asks), jmpx.current_policy()))
            return x

    policy = jmpx.get_policy("c=f16")
    with jmpx.push_policy(Asks, policy), jmpx.haiku.policies("c=bf16"):
        hk.transform(lambda x: Asks()(x)).apply({}, None, x)
        assert jmpx.policy_of(Asks) == policy
        assert jmpx.current_policy() is None
    assert answers == [(policy, policy)]
    assert jmpx.policy_of(Asks) is None


def test_the_context_ends_cleanly_after_an_error(x):
    def fail(x):
        raise RuntimeError("in the middle")

    class Fails(hk.Module):
        def __call__(self, x):
            return Dense(2)(fail(x))

    with jmpx.push_policy(Dense, "f16"):
        with pytest.raises(RuntimeError, match="in the middle"):
            with jmpx.haiku.policies("c=bf16; NoSuchClass: full"):  # and no warning
                hk.transform(lambda x: Fails()(x)).init(jax.random.key(0), x)
        assert jmpx.policy_of(Dense) == jmpx.get_policy("f16")
        assert jmpx.current_policy() is None
    run("c=bf16", x)
    assert SEEN["net/body"][0] == BF16


def test_the_innermost_context_holds(x):
    with jmpx.haiku.policies("c=f16"):
        run("c=bf16", x)
        assert SEEN["net/body"][0] == BF16
        NET.apply(NET.init(jax.random.key(0), x), None, x)
        assert SEEN["net/body"][0] == F16


# transformations, state, gradients


@pytest.mark.parametrize("where", ["around", "inside"])
def test_jit(where, x):
    params, expected = run("c=bf16,o=f32; */body: full", x)

    def inside(params, x):
        with jmpx.haiku.policies("c=bf16,o=f32; */body: full"):
            return NET.apply(params, None, x)

    if where == "inside":
        y = jax.jit(inside)(params, x)
    else:
        with jmpx.haiku.policies("c=bf16,o=f32; */body: full"):
            y = jax.jit(NET.apply)(params, None, x)
    assert y.dtype == F32
    np.testing.assert_allclose(y, expected, rtol=2e-2, atol=2e-2)


def test_a_jitted_function_is_traced_anew_under_another_map(x):
    params, _ = run("c=bf16", x)
    apply = jax.jit(NET.apply)
    for dtype in (BF16, F16, BF16):
        with jmpx.haiku.policies(f"c={dtype.name}"):
            assert apply(params, None, x).dtype == dtype
    assert apply(params, None, x).dtype == F32


def test_gradients_come_in_the_masters_dtype(x):
    params, _ = run("c=bf16,o=f32; */body: full", x)

    def loss(params, x):
        with jmpx.haiku.policies("c=bf16,o=f32; */body: full"):
            return (NET.apply(params, None, x) ** 2).mean()

    grads = jax.grad(loss)(params, x)
    expected = jax.grad(lambda p: (NET.apply(p, None, x) ** 2).mean())(params)
    for module, leaves in grads.items():
        assert leaves["w"].dtype == F32
        scale = np.abs(expected[module]["w"]).max()
        np.testing.assert_allclose(leaves["w"], expected[module]["w"], atol=3e-2 * scale)


def test_public_methods_are_boundaries_and_private_ones_are_not(x):
    class Methods(hk.Module):
        def encode(self, x):
            SEEN["encode"] = x.dtype
            return self._inner(x)

        def _inner(self, x):
            SEEN["inner"] = x.dtype
            return x * 2

        def __call__(self, x):
            y = self.encode(x)
            SEEN["after"] = y.dtype  # a call within the module: no cast in its middle
            return y

    for method in ("encode", "__call__"):
        network = hk.transform(lambda x, method=method: getattr(Methods(), method)(x))
        with jmpx.haiku.policies("c=bf16,o=f16"):
            assert network.apply({}, None, x).dtype == F16
        assert SEEN["encode"] == SEEN["inner"] == BF16
    assert SEEN["after"] == BF16


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", ["", "; BatchNorm: full", "; batch_norm/*: full"])
@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_moving_averages_are_kept_and_taken_in_float32(decay, rule, rng):
    def net(x, is_training):
        class Block(hk.Module):
            def __call__(self, x):
                x = hk.BatchNorm(True, True, decay)(x, is_training)
                SEEN["normed"] = x.dtype
                return x

        return Block()(x)

    rule = rule.replace("batch_norm", "block/batch_norm")
    network = hk.transform_with_state(net)
    init, apply = leniently(network.init), leniently(network.apply)
    x = rng.normal(3, 2, size=(64, 3)).astype(np.float32)
    with jmpx.haiku.policies(f"c=bf16,o=f32{rule}"):
        params, state = init(jax.random.key(0), x, True)
        for _ in range(3):
            y, state = apply(params, state, None, x, True)
        assert SEEN["normed"] == BF16 and y.dtype == F32
        inference, _ = apply(params, state, None, x, False)
        assert SEEN["normed"] == BF16 and inference.dtype == F32
    floats = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.int32]
    assert floats and {leaf.dtype for leaf in floats} == {F32}
    (name,) = [name for name in state if "mean_ema" in name]
    np.testing.assert_allclose(state[name]["average"][0], x.mean(0), rtol=2e-2)
    np.testing.assert_allclose(inference, y, atol=0.1)


def test_loops_keep_their_carry_and_remat_runs(x):
    def net(x):
        block = Dense(3, "block")

        def body(carry, _):
            return carry + block(carry), None

        return hk.scan(body, x, None, length=3)[0]

    class Loop(hk.Module):
        def __call__(self, x):
            return hk.remat(net)(x)

    _, y = run("c=bf16,o=f32; */block: full", x, hk.transform(lambda x: Loop()(x)))
    assert SEEN["loop/block"][0] == F32 and y.dtype == F32


# rules that match nothing


def test_a_rule_that_matched_nothing_is_warned_of_with_the_nearest_name(x):
    with pytest.warns(UserWarning) as caught:
        run("c=bf16; Dence: full; */boddy: full; */body: full", x)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2 and {w.filename for w in caught} == {__file__}
    assert "'Dence: compute=float32'" in texts[0] and "did you mean 'Dense'?" in texts[0]
    assert "did you mean 'net/body'?" in texts[1]


def test_a_cached_call_meets_nothing_and_warns_of_nothing(x):
    policy_map = jmpx.get_policy_map("c=bf16; */body: full")
    params, _ = run(policy_map, x)
    apply = jax.jit(NET.apply)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with jmpx.haiku.policies(policy_map):
                apply(params, None, x)


def test_bad_maps_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="Unknown dtype 'bf61'"):
        with jmpx.haiku.policies("c=bf61"):
            raise RuntimeError
    with pytest.raises(TypeError, match="Expected a policy map string"):
        with jmpx.haiku.policies(None):  # pyright: ignore[reportArgumentType]
            raise RuntimeError
