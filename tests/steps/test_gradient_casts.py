"""Casts of gradient functions: casts inside of casts, arguments left uncast, policy maps."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import F16, F32, normal, warns_once, zoo
from helpers.maps import AXIS, mesh_of
from jax.sharding import PartitionSpec as P

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
import jmpx.mpx as mpx

SCALE = jmpx.StaticLossScale(1)  # float16 without one is another warning
NO_SCALE = jmpx.NoOpLossScale()
HALF = "by=arguments,c=f16"
ROUNDED = 1 + 2**-12  # neither float16 nor bfloat16 holds it
X = np.ones((2, 3), np.float32)
NAMES = {  # -> what casts inside
    "haiku": "jmpx.haiku.policies",
    "linen": "jmpx.flax.policies",
    "nnx": "jmpx.flax.with_policies",
    "equinox": "jmpx.equinox.with_policies",
    "autocast": "jmpx.autocast",
}


def one_layer(m, x):
    return m.linear("only", 1)(x[:1, :1])


def inside(name) -> tuple[Any, Any]:
    """Returns a loss that casts by a map of its own, and its parameters: the weight is ROUNDED."""
    if name == "autocast":
        multiply = lambda w, x: x[:1, :1].astype(w.dtype) @ w  # noqa: E731
        run = jmpx.autocast(multiply, "c=bf16; op.dot_general: f32")
        return lambda w, x: run(w, x).sum(), jnp.full((1, 1), ROUNDED)
    net = zoo.drawn(name, one_layer, 2, 3)
    fill = lambda leaf: jnp.full_like(leaf, ROUNDED if leaf.ndim == 2 else 0)  # noqa: E731
    apply = net.under(net.words("c=bf16,o=f32; <Net>: full"))
    run, model = net.split(apply)
    model = jax.tree.map(fill, model)
    return lambda model, x: run(model, x).sum(), model


@contextlib.contextmanager
def one_warning(name):
    """Holds that one warning comes, from this file, which names what casts and what to do."""
    with pytest.warns(UserWarning) as caught:
        yield
    (warning,) = caught
    text = str(warning.message)
    way = "operations" if name == "jmpx.autocast" else "modules"
    assert f"before {name} inside" in text and f"write by={way} into its policy" in text
    assert warning.filename == __file__


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "policy", "remedy"),
    [
        ("haiku", "f16", {"policy": "by=arguments,p=bf16,c=f32"}),
        ("linen", "half", {"use_mixed_precision": False}),
        ("nnx", "c=bf16", {"policy": HALF, "uncast": 0}),
        ("equinox", "c=f16,o=f32", {"policy": HALF, "uncast": (0, 1)}),
        ("autocast", "half", {"policy": HALF, "uncast": -2}),
    ],
)
def test_a_cast_inside_of_a_cast_warns_once_and_the_remedies_are_right(name, policy, remedy):
    loss, model = inside(name)
    with one_warning(NAMES[name]):
        value, *_ = jmpx.value_and_grad(loss, SCALE, policy=f"by=arguments,{policy}")(model, X)
    assert value == 1  # the weight is rounded, though its module runs in float32
    remedies: list[Any] = [{"policy": "by=arguments,full"}, remedy]
    for options in remedies:
        make: Any = jmpx.value_and_grad if "policy" in options else mpx.filter_value_and_grad
        value, *_ = make(loss, SCALE, **options)(model, X)
        assert value == np.float32(ROUNDED)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["haiku", "linen"])
def test_a_context_outside_of_the_gradient_function_warns_too(name):
    net = zoo.drawn(name, one_layer, 2, 3)
    policies = jmpx.haiku.policies if name == "haiku" else jmpx.flax.policies
    loss = lambda params, x: net.apply(params, x).sum()  # noqa: E731
    with policies("c=bf16,o=f32"):
        with one_warning(NAMES[name]):
            jmpx.grad(loss, SCALE, policy=HALF)(net.model, X)
        jmpx.grad(loss, SCALE, policy="full")(net.model, X)


def test_a_view_that_is_an_argument_warns():
    model = zoo.drawn("equinox", one_layer, 2, 3).model
    view = jmpx.equinox.with_policies(model, "c=f32")
    with one_warning("jmpx.equinox.with_policies"):
        jmpx.grad(lambda view, x: view(x).sum(), SCALE, policy=HALF)(view, X)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_jitted_and_traced_outside_warns_inside(name):
    loss, model = inside(name)
    jitted = jax.jit(loss)
    half = jax.tree.map(lambda leaf: leaf.astype(F16), model)
    jitted(half, X.astype(F16))  # of the dtypes that it is to be called with
    with one_warning(NAMES[name]):
        jmpx.grad(jitted, SCALE, policy=HALF)(model, X)
    jitted(half, X.astype(F16))  # and no warning outlives the gradient function


def test_two_kinds_of_casts_are_named_in_one_warning():
    loss, model = inside("equinox")
    with one_warning("jmpx.autocast and jmpx.equinox.with_policies"):
        run = lambda model, x: jmpx.autocast(loss)(model, x)  # noqa: E731
        jmpx.grad(run, SCALE, policy=HALF)(model, X)


@pytest.mark.thorough
def test_of_nested_gradient_functions_the_outermost_that_casts_warns():
    loss, model = inside("equinox")

    def outer(model, x, inner_policy):
        of_x = lambda x: loss(model, x)  # noqa: E731
        return jmpx.grad(of_x, SCALE, policy=inner_policy)(x)[2].astype(F32).sum()

    for outer_policy, inner_policy, warns in [
        (
            HALF,
            "by=arguments,full",
            True,
        ),  # what the outer one rounded, the inner one does not restore
        (HALF, HALF, True),
        ("full", HALF, True),
        ("full", "full", False),
    ]:
        context = one_warning("jmpx.equinox.with_policies") if warns else contextlib.nullcontext()
        with context:
            jmpx.grad(outer, SCALE, policy=outer_policy)(model, X, inner_policy)


@pytest.mark.thorough
def test_what_rounds_nothing_warns_of_nothing():
    loss, model = inside("equinox")
    half = jmpx.cast_tree(model, jnp.bfloat16)  # in 16 bits already
    jmpx.grad(loss, SCALE, policy="by=arguments,p=bf16,c=bf16")(half, X.astype(jnp.bfloat16))
    plain = lambda model, x: model(x).sum()  # noqa: E731
    others: list[Any] = [
        jmpx.force_full_precision(plain),
        mpx.cast_function(plain, F32),
        lambda *args: plain(*jmpx.cast_to_full(args)),
        lambda model, x: plain(jmpx.equinox.with_policies(model), x),  # no policy at all
    ]
    for other in others:
        jmpx.grad(other, SCALE, policy=HALF)(model, X)


# Arguments that are left uncast


UNCAST = [
    ({}, 3, (), set()),
    ({"uncast": 2}, 3, (), {"y"}),
    ({"uncast": -3}, 3, (), {"params"}),
    ({"uncast": (1, -1)}, 3, (), {"x", "y"}),
    ({"uncast": [np.int64(1)]}, 3, (), {"x"}),
    ({"uncast": 2}, 2, ("y",), {"y"}),
    ({"uncast": 2}, 2, (), set()),
    ({"uncast": "y"}, 2, ("y",), {"y"}),
    ({"uncast": "y"}, 3, (), {"y"}),
    ({"uncast": "y"}, 2, (), set()),
    ({"uncast": ["positions", "x"]}, 2, ("positions",), {"positions", "x"}),
    ({"uncast": "extra"}, 2, ("extra",), {"extra"}),
    ({"uncast": (1, "positions")}, 2, ("positions",), {"positions", "x"}),
]


def test_arguments_are_left_uncast():
    seen = {}

    def loss(params, x, y=None, *, positions=None, **more):
        given = {"params": params, "x": x, "y": y, "positions": positions, **more}
        seen.update({name: v.dtype.name for name, v in given.items() if v is not None})
        return params.astype(F32).sum()

    ones = np.ones(2, np.float32)
    for options, count, keywords, expected in UNCAST:
        seen.clear()
        grad_fn = jmpx.grad(loss, SCALE, policy=HALF, **options)
        *_, grads = grad_fn(*[ones] * count, **dict.fromkeys(keywords, ones))
        assert grads.dtype == np.float32
        assert {name for name, dtype in seen.items() if dtype == "float32"} == expected, options


def test_callables_without_a_signature_name_what_is_passed():
    grad = jmpx.grad(jnp.add, SCALE, policy=HALF, uncast=1)
    with jax.numpy_dtype_promotion("standard"):
        assert grad(jnp.ones(()), jnp.ones(()))[2] == 1


# A whole policy map


RULES = "by=modules,c=bf16,o=f32; */head: f32"
NO_CAST = "casts nothing by policy map .* or pass the whole model as an argument"


def plain_loss(params, x):
    return jnp.exp(jnp.tanh(x @ params["w"])).sum()


PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4)}


def case_of(name) -> tuple[Any, Any, str]:
    """Returns a loss, its parameters, and a map for it."""
    if name == "autocast":
        return plain_loss, PARAMS, "c=bf16; op.tanh: f32"
    net = zoo.drawn(name, zoo.mlp, 2, 3)
    return lambda model, x: net.apply(model, x).sum(), net.model, RULES


@pytest.mark.parametrize(
    ("policy", "make", "jit"),
    [
        ("by=modules,c=half,o=f32; Second: full", jmpx.value_and_grad, True),
        (jmpx.get_policy_map("by=modules,c=bf16"), jmpx.grad, False),
    ],
    ids=["a string", "a map"],
)
def test_one_warning_where_nothing_casts(policy, make, jit):
    grad_fn = make(plain_loss, SCALE, policy=policy)
    step = lambda params, x: tuple(grad_fn(params, x))  # noqa: E731
    with warns_once(__file__, NO_CAST):
        (jax.jit(step) if jit else step)(PARAMS, X)
    mpx.filter_grad(plain_loss, SCALE, use_mixed_precision=False)(PARAMS, X)


@pytest.mark.thorough
def test_each_function_warns_for_itself():
    """What cast in one function, or failed there, says nothing of another under the same map."""
    loss, model, _ = case_of("haiku")
    jmpx.grad(loss, NO_SCALE, policy=RULES)(model, X)

    def fail(w):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        jmpx.grad(fail, NO_SCALE, policy=RULES)(jnp.ones(1))
    with warns_once(__file__, NO_CAST):
        jmpx.grad(plain_loss, NO_SCALE, policy=RULES)(PARAMS, X)
    with pytest.raises(RuntimeError, match="in the middle"):
        jmpx.grad(fail, SCALE, policy=HALF)(jnp.ones(1))
    casting, model = inside("equinox")
    jmpx.grad(casting, SCALE, policy="full")(model, X)
    # Other casts do not follow a map.
    cast = mpx.cast_function(plain_loss, jnp.bfloat16)
    with warns_once(__file__, NO_CAST):
        jmpx.grad(lambda p, x: cast(p, x).astype(F32), NO_SCALE, policy=RULES)(PARAMS, X)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_jitted_function_that_is_not_traced_again(name):
    loss, model, policy = case_of(name)
    jitted = nnx.jit(loss) if name == "nnx" else jax.jit(loss)
    jitted(model, X)  # traced outside of any gradient function
    grad_fn = jmpx.grad(jitted, NO_SCALE, policy=policy)
    for _ in range(2):  # and a new gradient function, and a new lambda, in each step
        grad_fn(model, X)
        jmpx.grad(jitted, NO_SCALE, policy=policy)(model, X)
        jmpx.grad(lambda m, x: jitted(m, x), NO_SCALE, policy=policy)(model, X)


def test_a_jitted_function_is_traced_once_for_all_steps():
    loss, model, _ = case_of("haiku")
    traces = []

    @jax.jit
    def inner(params, x):
        traces.append(1)
        return loss(params, x)

    for _ in range(3):
        step = jmpx.grad(lambda p, x: inner(p, x), NO_SCALE, policy=RULES)
        jax.eval_shape(step, model, X)
    assert len(traces) == 1


def test_an_inner_gradient_function_is_told_apart():
    loss, params, _ = case_of("haiku")

    def outer(policy, inner_policy):
        def inner(params, x):
            grads = jmpx.grad(loss, NO_SCALE, policy=inner_policy)(params, x).grads
            return jax.tree.leaves(grads)[0].astype(F32).sum()

        grad_fn = jmpx.grad(inner, NO_SCALE, policy=policy)
        jax.eval_shape(lambda x: grad_fn(params, x)[1], X)

    for policies in ((RULES, RULES), ("full", RULES), (RULES, "full")):
        outer(*policies)
    for policies in ((RULES, "by=arguments,c=bf16"), ("by=arguments,c=bf16", RULES)):
        with warns_once(__file__, "has cast its arguments to 16 bits before jmpx.haiku.policies"):
            outer(*policies)


@pytest.mark.parametrize(
    ("name", "reduce", "short"),
    [("haiku", None, "f32"), ("linen", "bfloat16", "bf16"), ("equinox", "float16", "f16")],
)
def test_the_reduce_of_the_default_counts(name, reduce, short):
    loss, model, rules = case_of(name)
    text = rules if reduce is None else rules.replace("o=f32", f"o=f32,reduce={reduce}")
    grad_fn = jmpx.value_and_grad(loss, NO_SCALE, policy=text, over=jmpx.Over(AXIS))
    run = lambda model, x: tuple(grad_fn(model, x))[1:]  # noqa: E731
    mapped = jax.shard_map(run, mesh=mesh_of(2), in_specs=(P(), P(AXIS)), out_specs=P())
    lowered = jax.jit(mapped).lower(model, X).as_text()
    assert "stablehlo.all_reduce" in lowered and "bf16>" in lowered
    sums = [line for line in lowered.splitlines() if "}) : (tensor<" in line and "x" in line]
    assert sums and all(f"x{short}>" in line for line in sums), sums


# float16 without a loss scale


NO_SCALE_WARNS = "computes in float16 without a loss scale, .* jmpx.DynamicLossScale.. "


def mean_square(w, x):
    return jnp.mean((x @ w).astype(F32) ** 2)


@pytest.mark.thorough
@pytest.mark.filterwarnings("error:The gradient function computes in float16:UserWarning")
@pytest.mark.parametrize(("policy", "jit"), [("c=f16", True), ("16-mixed", False), (F16, False)])
def test_float16_without_a_loss_scale(policy, jit, rng):
    arguments = normal(rng, 3, 2), normal(rng, 4, 3)
    make = lambda scale: jmpx.value_and_grad(mean_square, scale, policy=policy)  # noqa: E731
    step = lambda w, x: tuple(make(NO_SCALE)(w, x))  # noqa: E731
    with warns_once(__file__, NO_SCALE_WARNS):
        value, _, _, grads = (jax.jit(step) if jit else step)(*arguments)
    same = make(SCALE)(*arguments)  # what the warning says to write is silent
    np.testing.assert_array_equal(same.grads, grads)
    np.testing.assert_array_equal(same.value, value)
    make(jmpx.DynamicLossScale(2.0**10))(*arguments)


@pytest.mark.thorough
@pytest.mark.filterwarnings("error:The gradient function computes in float16:UserWarning")
def test_which_policies_need_a_scale(rng):
    arguments = normal(rng, 3, 2), normal(rng, 4, 3)

    def loss(w, x):
        return mean_square(*jmpx.autocast(lambda w, x: (w * 1.0, x), "c=f16")(w, x))

    for policy in ("by=modules,c=f16; Linear: full", "by=modules,c=bf16; Linear: f16"):
        with pytest.warns(UserWarning) as caught:
            jmpx.grad(loss, NO_SCALE, policy=policy)(*arguments)
        assert any("in float16 without a loss scale" in str(w.message) for w in caught)
    for policy in ("c=bf16", "full", "by=arguments,params=f16,c=f32,o=f16"):
        jmpx.grad(mean_square, NO_SCALE, policy=policy)(*arguments)
    mpx.filter_grad(mean_square, NO_SCALE, use_mixed_precision=False)(*arguments)


# Parameters that are stored in 16 bits though the policy says params=float32


def in_16_bits(framework, dtype=jnp.bfloat16):
    """Returns a loss and its parameters, of which a kernel of 12 is stored in 16 bits."""
    net = zoo.drawn(framework, lambda m, x: m.linear("only", 4)(x), 2, 3)
    run, model = net.split()
    model = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim == 2 else leaf, model)
    return lambda model, x: jnp.sum(run(model, x)), model


@pytest.mark.parametrize("way", ["arguments", "modules", "operations"])
@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("error")
def test_parameters_in_16_bits_are_warned_of_unless_they_are_meant(framework, way):
    loss, model = in_16_bits(framework)

    def step(policy, loss=loss, model=model, **options):
        grad_fn = jmpx.grad(loss, NO_SCALE, policy=f"by={way},{policy}", **options)
        jax.eval_shape(lambda x: grad_fn(model, x)[1:], X)

    with warns_once(
        __file__, r"32 bits, 75 % of all, such as bfloat16\[[34], [34]\] at .*says params=f"
    ):
        step("c=bf16,o=f32")
    step("c=bf16,o=f32", grad_dtype=jnp.float32)
    step("p=bf16,c=bf16,o=f32")
    if way == "modules":
        step("c=bf16,o=f32; */only: p=bf16")
    if way == "arguments":  # a frozen base, which is closed over or another argument
        step("c=bf16,o=f32", lambda scale, x: loss(model, x * scale), jnp.ones(()))
        step("c=bf16,o=f32", lambda scale, x, m=model: loss(m, x * scale), jnp.ones(()))
        apply = jmpx.apply_policy(loss, "by=arguments,c=bf16,o=f32")
        jax.eval_shape(apply, model, X)


# Arguments that modules are called with, and that are left uncast

TIMES = np.array([[998.39], [3.2]], np.float32)


NOTED: dict[str, Any] = {}


def waves(m, x, times):
    def inner(m, x, times):
        NOTED["inner"] = times
        return m.linear("only", 4)(x)

    NOTED["outer"] = times
    x = m.inner("inner", inner)(x, times)
    NOTED["layer"] = m.linear("time", 4)(times)
    return x + NOTED["layer"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("by_name", [False, True], ids=["position", "keyword"])
@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
@pytest.mark.usefixtures("standard_promotion")
def test_the_outermost_module_gets_uncast_arguments_as_they_are(framework, by_name):
    x = np.ones((2, 1), np.float32)
    net = zoo.build(framework, waves, x, TIMES)
    policy = net.words("by=modules,c=bf16; <Inner>: c=f16")
    loss = lambda model, x, times: net.apply(model, x, times).astype(F32).sum()  # noqa: E731
    args, named = ((x,), {"times": TIMES}) if by_name else ((x, TIMES), {})
    for uncast in (), "times" if by_name else 2:
        for function in (
            jmpx.apply_policy(loss, policy, uncast=uncast),
            jmpx.grad(loss, SCALE, policy=policy, uncast=uncast),
        ):
            NOTED.clear()
            function(net.model, *args, **named)
            found = {name: array.dtype.name for name, array in NOTED.items()}
            outer = "bfloat16" if uncast == () else "float32"
            assert found == {"outer": outer, "inner": "float16", "layer": "bfloat16"}
            np.testing.assert_array_equal(NOTED["outer"], TIMES.astype(NOTED["outer"].dtype))


def test_uncast_arguments_that_a_transformation_hands_on_are_warned_of():
    net = zoo.drawn("equinox", lambda m, x: m.linear("only", 1)(x), 1)
    loss = lambda model, x: jax.vmap(net.apply, (None, 0))(model, x).sum()  # noqa: E731
    run = jmpx.apply_policy(loss, "by=modules,c=bf16", uncast=1)
    with warns_once(__file__, r"hands on, also those that uncast= names"):
        run(net.model, np.ones((2, 1), np.float32))
