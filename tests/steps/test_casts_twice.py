"""The gradient functions: casts inside of casts, uncast arguments, policies found at the call."""

import contextlib
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import run_python

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
import jmpx.mpx as mpx

SCALE = jmpx.StaticLossScale(1)  # float16 without one is another warning
ROUNDED = 1 + 2**-12  # neither float16 nor bfloat16 holds it
RULES = "c=bf16,o=f32; Linear: full"


def haiku_loss(params, x):
    return hk.transform(lambda x: hk.Linear(1, with_bias=False)(x)).apply(params, None, x).sum()


def haiku_inside(params, x):
    with jmpx.haiku.policies(RULES):
        return haiku_loss(params, x)


DENSE = nn.Dense(1, use_bias=False)


def linen_inside(params, x):
    with jmpx.flax.policies("c=bf16,o=f32; Dense: full"):
        return DENSE.apply(params, x).sum()  # pyright: ignore[reportAttributeAccessIssue]


def nnx_inside(model, x):
    return jmpx.flax.with_policies(model, RULES)(x).sum()


def equinox_inside(model, x):
    return jax.vmap(jmpx.equinox.with_policies(model, RULES))(x).sum()


def autocast_inside(w, x):
    return jmpx.autocast(lambda w, x: x.astype(w.dtype) @ w, "c=bf16; op.dot_general: f32")(
        w, x
    ).sum()


WEIGHT = np.full((1, 1), ROUNDED, np.float32)


def equinox_model():
    model = eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
    return eqx.tree_at(lambda m: m.weight, model, jnp.asarray(WEIGHT))


def nnx_model():
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(WEIGHT)
    return model


CASES = {
    "jmpx.haiku.policies": (haiku_inside, lambda: {"linear": {"w": jnp.asarray(WEIGHT)}}),
    "jmpx.flax.policies": (linen_inside, lambda: {"params": {"kernel": jnp.asarray(WEIGHT)}}),
    "jmpx.flax.with_policies": (nnx_inside, nnx_model),
    "jmpx.equinox.with_policies": (equinox_inside, equinox_model),
    "jmpx.autocast": (autocast_inside, lambda: jnp.asarray(WEIGHT)),
}
X = np.ones((1, 1), np.float32)


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", [None, "half", "c=bf16", "c=f16,o=f32"])
@pytest.mark.parametrize("name", CASES)
def test_a_cast_inside_of_a_cast_warns_once(name, policy):
    loss, make = CASES[name]
    with one_warning(name):
        value, *_ = jmpx.filter_value_and_grad(loss, SCALE, policy=policy)(make(), X)
    assert value == 1  # the weight is rounded, though its module runs in float32
    with one_warning(name):
        jmpx.filter_grad(loss, SCALE, policy=policy)(make(), X)


@pytest.mark.parametrize(
    "options",
    [{"policy": "full"}, {"policy": "p=bf16,c=f32"}, {"use_mixed_precision": False}],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_the_remedy_is_silent_and_right(name, options):
    loss, make = CASES[name]
    value, *_ = mpx.filter_value_and_grad(loss, SCALE, **options)(make(), X)
    assert value == np.float32(ROUNDED)


@pytest.mark.parametrize("numbers", [0, (0, 1), -2])
@pytest.mark.parametrize("name", CASES)
def test_parameters_that_are_left_uncast_are_right(name, numbers):
    loss, make = CASES[name]
    loss_fn = jmpx.filter_value_and_grad(loss, SCALE, policy="c=f16", uncast=numbers)
    value, *_ = loss_fn(make(), X)
    assert value == np.float32(ROUNDED)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["jmpx.haiku.policies", "jmpx.flax.policies"])
def test_a_context_outside_of_the_gradient_function_warns_too(name):
    policies = {
        "jmpx.haiku.policies": jmpx.haiku.policies,
        "jmpx.flax.policies": jmpx.flax.policies,
    }
    loss = haiku_loss if "haiku" in name else lambda params, x: DENSE.apply(params, x).sum()  # pyright: ignore[reportAttributeAccessIssue]
    with policies[name](RULES.partition(";")[0]):
        with one_warning(name):
            jmpx.filter_grad(loss, SCALE)(CASES[name][1](), X)
        jmpx.filter_grad(loss, SCALE, policy="full")(CASES[name][1](), X)


def test_a_view_that_is_an_argument_warns():
    view = jmpx.equinox.with_policies(equinox_model(), "c=f32")
    with one_warning("jmpx.equinox.with_policies"):
        jmpx.filter_grad(lambda view, x: view(x).sum(), SCALE)(view, X[0])


@pytest.mark.parametrize("name", CASES)
def test_what_was_jitted_and_traced_outside_warns_inside(name):
    loss, make = CASES[name]
    if name == "jmpx.flax.with_policies":
        model = make()
        jitted, make = jax.jit(lambda w, x: nnx_inside(set_kernel(w), x)), lambda: model.kernel[...]
    else:
        jitted = jax.jit(loss) if name != "jmpx.equinox.with_policies" else eqx.filter_jit(loss)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), make())
    jitted(half, X.astype(jnp.float16))  # of the dtypes that it is to be called with
    with one_warning(name):
        jmpx.filter_grad(jitted, SCALE, policy="c=f16")(make(), X)
    jitted(half, X.astype(jnp.float16))  # and no warning outlives the gradient function


def set_kernel(w):
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(w)
    return model


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_many_modules_warn_once_per_traced_call(wrap):
    model = eqx.nn.MLP(1, 1, 1, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)

    @wrap
    def step(params, x):
        def loss(params, x):
            view = jmpx.equinox.with_policies(eqx.combine(params, static), "c=bf16; Linear: full")
            return jax.vmap(view)(x).astype(jnp.float32).sum()

        return jmpx.filter_grad(loss, SCALE)(params, x)[2]

    with one_warning("jmpx.equinox.with_policies"):
        step(params, X)
    if wrap is jax.jit:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(params, X)


def test_two_kinds_of_casts_are_named_in_one_warning():
    def loss(model, x):
        return jmpx.autocast(lambda m, x: equinox_inside(m, x))(model, x)

    with one_warning("jmpx.autocast and jmpx.equinox.with_policies"):
        jmpx.filter_grad(loss, SCALE)(equinox_model(), X)


def test_of_nested_gradient_functions_the_outermost_that_casts_warns():
    def outer(model, x, inner_policy):
        loss = lambda x: equinox_inside(model, x)  # noqa: E731
        return jmpx.filter_grad(loss, SCALE, policy=inner_policy)(x)[2].astype(jnp.float32).sum()

    for outer_policy, inner_policy, warns in [
        ("c=f16", "full", True),  # what the outer one rounded, the inner one does not restore
        ("c=f16", "c=f16", True),
        ("full", "c=f16", True),
        ("full", "full", False),
    ]:
        context = one_warning("jmpx.equinox.with_policies") if warns else contextlib.nullcontext()
        with context:
            grad = jmpx.filter_grad(outer, SCALE, policy=outer_policy)
            grad(equinox_model(), X, inner_policy)


def test_arguments_in_16_bits_already_are_not_rounded_and_warn_of_nothing():
    model = jmpx.cast_tree(equinox_model(), jnp.bfloat16)
    jmpx.filter_grad(equinox_inside, SCALE, policy="c=bf16")(model, X.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "inside",
    [
        jmpx.force_full_precision,
        lambda f: jmpx.mpx.cast_function(f, jnp.float32),
        lambda f: lambda *args: f(*jmpx.cast_to_full(args)),
        lambda f: lambda model, x: f(jmpx.equinox.with_policies(model), x),  # no policy at all
    ],
)
def test_other_casts_warn_of_nothing(inside):
    loss = inside(lambda model, x: jax.vmap(model)(x).sum())
    jmpx.filter_grad(loss, SCALE)(equinox_model(), X)


def test_an_error_inside_leaves_no_mark():
    def fail(w):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        jmpx.filter_grad(fail, SCALE)(jnp.ones(1))
    equinox_inside(equinox_model(), X)
    jmpx.filter_grad(equinox_inside, SCALE, policy="full")(equinox_model(), X)


# arguments that are left uncast


def dtypes_seen(options, args=(), kwargs=None):
    seen = {}

    def loss(params, x, y=None, *, positions=None, **more):
        given = {"params": params, "x": x, "y": y, "positions": positions, **more}
        seen.update({name: v.dtype.name for name, v in given.items() if v is not None})
        return params.astype(jnp.float32).sum()

    ones = np.ones(2, np.float32)
    args, kwargs = [ones] * args, {name: ones for name in kwargs or ()}
    *_, grads = jmpx.filter_grad(loss, SCALE, policy="c=f16", **options)(*args, **kwargs)
    assert grads.dtype == np.float32
    return {name for name, dtype in seen.items() if dtype == "float32"}


UNCAST = [
    ({}, 3, (), set()),
    ({"uncast": 2}, 3, (), {"y"}),
    ({"uncast": -1}, 3, (), {"y"}),
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
    ({"uncast": "params"}, 2, (), {"params"}),
    ({"uncast": (1, "positions")}, 2, ("positions",), {"positions", "x"}),
]


@pytest.mark.parametrize(("options", "args", "kwargs", "expected"), UNCAST)
def test_arguments_are_left_uncast(options, args, kwargs, expected):
    assert dtypes_seen(options, args, kwargs) == expected


def test_a_target_of_1e5_survives_float16():
    def loss(w, x, y):
        return ((x * w).astype(jnp.float32) - y.astype(jnp.float32)).sum()

    args = jnp.ones(()), jnp.ones(1), jnp.full(1, 1e5)
    options = {"policy": "c=f16", "uncast": 2}
    value, *_ = jax.jit(jmpx.filter_value_and_grad(loss, SCALE, **options))(*args)
    assert value == 1 - 1e5
    assert not np.isfinite(jmpx.filter_value_and_grad(loss, SCALE, policy="c=f16")(*args)[0])


BAD_AT_ONCE = [
    ({"uncast": b"x"}, "Expected uncast to be the position or the name"),
    ({"uncast": 1.0}, "Expected uncast .* got 1.0: write uncast=2"),
    ({"uncast": [0, None]}, "Expected uncast"),
    ({"uncast": True}, "Expected uncast"),
    ({"uncast": None}, "Expected uncast"),
    ({"uncast": ["x", 2.0]}, "Expected uncast"),
]


@pytest.mark.parametrize("make", [jmpx.filter_grad, jmpx.filter_value_and_grad])
@pytest.mark.parametrize(("options", "message"), BAD_AT_ONCE)
def test_what_is_no_argument_is_refused_at_once(make, options, message):
    with pytest.raises(TypeError, match=message):
        make(lambda w, x: w.sum(), SCALE, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uncast": 5}, "argument 5 uncast"),
        ({"uncast": -4}, "argument -4 uncast"),
        ({"uncast": "z"}, r"argument 'z' uncast.*\['params', 'positions', 'x', 'y'\]"),
    ],
)
def test_what_is_out_of_range_is_refused_at_the_call(options, message):
    with pytest.raises(ValueError, match=message):
        dtypes_seen(options, 2)


def test_callables_without_a_signature_name_what_is_passed():
    grad = jmpx.filter_grad(jnp.add, SCALE, policy="c=f16", uncast=1)
    with jax.numpy_dtype_promotion("standard"):
        assert grad(jnp.ones(()), jnp.ones(()))[2] == 1


# the policy is found at the call


@pytest.mark.thorough
def test_making_a_gradient_function_starts_no_backend():
    result = run_python(
        "-c",
        """if True:
        import jax
        started = []
        devices = jax.local_devices
        jax.local_devices = lambda *a, **k: started.append(1) or devices(*a, **k)
        import jmpx
        jmpx.filter_grad(lambda w: w.sum(), jmpx.NoOpLossScale())
        grad = jmpx.filter_value_and_grad(
            lambda w: (w.sum(), w.dtype), jmpx.NoOpLossScale(), True)
        print(len(started))
        jax.distributed.initialize("localhost:9911", 1, 0)  # refuses where a backend runs
        import jax.numpy as jnp
        print(grad(jnp.ones(2))[0][1], len(started) > 0)
        jmpx.get_policy("half")
        """,
    )
    assert result.stdout == "0\nfloat16 True\n", result.stderr


@pytest.mark.parametrize("policy", ["c=f17", "half,", "c=half,q=f16", "HALF=2"])
def test_bad_strings_are_refused_when_the_function_is_made(policy):
    with pytest.raises(ValueError) as error:
        jmpx.filter_grad(jnp.sum, SCALE, policy=policy)
    with pytest.raises(ValueError) as expected:
        jmpx.get_policy_map(policy)
    assert str(error.value) == str(expected.value) and repr(policy) in str(error.value)
