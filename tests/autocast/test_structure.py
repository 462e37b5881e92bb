"""Structure does not matter: a program and parts of it in a call, a branch or a loop are equal.

Each operation runs in the same dtype and gives the same bits. Operations run one by one, so that
XLA fuses none. No parameter is read twice, because the cotangents of one cast are summed in its
dtype, and those of two casts in float32.
"""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32, assert_same_bits, normal
from helpers.op_by_op import one_by_one
from hypothesis import example, given, settings, strategies as st
from jax import lax

import jmpx
from jmpx._remat import cuts


def first(results):
    return jax.tree.map(lambda array: array[0], results)


def with_derivative(part):
    """A function whose derivative rule is its derivative."""
    call = jax.custom_jvp(lambda *args: part(*args))
    call.defjvp(lambda primals, tangents: jax.jvp(part, primals, tangents))
    return call


WRAPPED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    # The predicate reads nothing: an operation in float32 that read `x` would be another program.
    "cond": lambda part: lambda x, *w: lax.cond(True, part, part, x, *w),
    "scan": lambda part: (
        lambda *args: first(
            lax.scan(lambda _, x: (None, part(*x)), None, [jnp.asarray(x)[None] for x in args])[1]
        )
    ),
    "scan of constants": lambda part: (
        lambda *args: first(lax.scan(lambda *_: (None, part(*args)), None, None, length=1)[1])
    ),
    "vmap": lambda part: lambda *args: first(jax.vmap(part)(*[jnp.asarray(x)[None] for x in args])),
    "custom_jvp": with_derivative,
}

# The arguments after the first are parameters or numbers.
PARTS = {
    "product": (lambda x, w: x @ w, "matrix"),
    "bias": (lambda x, b: x + b, "vector"),
    "gain": (lambda x, g: x * g, "vector"),
    "number": (lambda x, n: x * n, 0.1),
    "divided": (lambda x, n: x / n, 3.0),
    "root": (lambda x, eps: lax.rsqrt(jnp.abs(x) + 1e-3 + eps), 1e-7),
    "relu": (jax.nn.relu,),
    "gelu": (lambda x: jax.nn.gelu(x),),
    "tanh": (jnp.tanh,),
    "sigmoid": (jax.nn.sigmoid,),
    "less the largest": (lambda x: x - x.max(-1, keepdims=True),),
    "exponential": (lambda x: jnp.exp(jnp.minimum(x, 3.0)),),
    "shares": (lambda x: x / x.sum(-1, keepdims=True),),
    "norm": (lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5),),
    "softmax": (lambda x: jax.nn.softmax(x),),
    "squares": (lambda x: x * x,),
    "sum": (lambda x: jnp.zeros_like(x) + x.sum(-1, keepdims=True),),
    "logarithm": (lambda x, eps: jnp.log(1 - jnp.clip(x, eps, 1 - eps)), 1e-7),
    "masked": (lambda x, low: jnp.where(jnp.tri(*x.shape) > 0, x, low), -1e9),
    "joined": (
        lambda x, b: jnp.concatenate([x[:, :2], jnp.zeros_like(x[:, 2:]) + b[2:]], 1),
        "vector",
    ),
}
SHAPES = {"matrix": (4, 4), "vector": (4,)}
COMPUTES = "dot_general add sub mul div exp log tanh logistic max rsqrt erf square".split()


def loss_of(program):
    """Returns the function of parameters and an input that runs a program's parts."""

    def loss_fn(parameters, x):
        parameters = iter(parameters)
        for names, wrapper in program:
            parts = [PARTS[name] for name in names]
            given = [next(parameters) if word in SHAPES else word for _, *w in parts for word in w]

            def part(x, *given, parts=parts):
                given = iter(given)
                for call, *words in parts:
                    x = call(x, *(next(given) for _ in words))
                return x

            x = (WRAPPED[wrapper](part) if wrapper else part)(x, *given)
        return jnp.tanh(x).sum()

    return loss_fn


def inputs_of(program):
    """Returns parameters for a program, and an input."""
    rng = np.random.default_rng(0)
    words = [word for names, _ in program for name in names for word in PARTS[name][1:]]
    return [normal(rng, *SHAPES[word]) for word in words if word in SHAPES], normal(rng, 4, 4)


def run(program, parameters, x, policy):
    """Returns value and gradients of a program's parts, and how often what ran in which dtypes."""
    ran = collections.Counter()

    def note(eqn):
        is_number = eqn.outvars[0].aval.size == 1
        if eqn.primitive.name in COMPUTES and not is_number:
            ran[eqn.primitive.name, *(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars))] += 1

    cast = jmpx.apply_policy(loss_of(program), policy)
    one_by_one(cast, parameters, x, note=note)
    return one_by_one(jax.value_and_grad(cast), parameters, x), ran


programs = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=3).map(tuple),
        st.sampled_from([None, *WRAPPED]),
    ),
    min_size=1,
    max_size=4,
)


@example([(("product",), None), (("less the largest",), "jit"), (("exponential",), None)], "c=bf16")
@example([(("product", "squares"), "cond"), (("sum",), None)], "c=bf16")
@example([(("product",), None), (("number",), "jit")], "c=f16")
@example([(("product", "norm"), "jit"), (("gain",), "checkpoint"), (("product",), None)], "c=bf16")
@example([(("product", "sigmoid"), None), (("logarithm",), "checkpoint")], "c=bf16")
@given(programs, st.sampled_from(["c=bf16", "c=f16"]))
@settings(max_examples=25 if settings().derandomize else 200, deadline=None)
def test_a_call_a_branch_or_a_loop_around_a_part_changes_no_bit(program, policy):
    policy, (parameters, x) = f"by=operations,{policy}", inputs_of(program)
    (value, gradients), ran = run(program, parameters, x, policy)
    plain = [(names, None) for names, _ in program]
    (expected, expected_gradients), expected_ran = run(plain, parameters, x, policy)
    np.testing.assert_array_equal(value, expected)
    assert ran == expected_ran
    # The derivative rule of a `custom_jvp` is a program of its own.
    if all(wrapper != "custom_jvp" for _, wrapper in program):
        jax.tree.map(np.testing.assert_array_equal, gradients, expected_gradients)


@example([(("product", "softmax", "product"), "jit"), (("norm", "product"), None)], "c=bf16", "")
@example([(("product", "tanh", "product"), "scan"), (("product",), "checkpoint")], "full", "")
@given(
    programs,
    st.sampled_from(["c=bf16", "c=f16", "by=arguments,c=bf16", "full"]),
    st.sampled_from(["", "+mixed", "+attention"]),
)
@settings(max_examples=15 if settings().derandomize else 200, deadline=None)
def test_what_the_backward_pass_keeps_changes_no_bit(program, policy, word):
    parameters, x = inputs_of(program)
    (expected, gradients), ran = run(program, parameters, x, policy)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(cuts, "_AGAIN", 1)  # cuts in a small program, too
        warnings.filterwarnings("ignore", "save= leaves")  # the checkpoints of the program
        (value, found), ran_saving = run(program, parameters, x, f"{policy},save=products{word}")
    assert ran_saving == ran
    assert_same_bits((value, found), (expected, gradients))


@example([(("bias", "logarithm"), None)], "by=arguments,c=bf16")  # NaN
@example([(("product", "squares"), None), (("bias",), "cond")], "c=bf16")
@given(programs, st.sampled_from(["c=bf16", "c=f16", "by=arguments,c=bf16"]))
@settings(max_examples=15 if settings().derandomize else 200, deadline=None)
def test_wide_gradients_are_the_same_around_a_call_a_branch_or_a_loop(program, policy):
    program = [(names, None if wrapper == "custom_jvp" else wrapper) for names, wrapper in program]
    parameters, x = inputs_of(program)

    def gradients(program, policy):
        grad_fn = jmpx.value_and_grad(loss_of(program), jmpx.NoOpLossScale(), policy=policy)
        return one_by_one(lambda *args: tuple(grad_fn(*args)[::3]), parameters, x)

    if parameters:
        value, _ = gradients(program, policy)
        wide = gradients(program, f"{policy},r=f32")
        _, of_parts = gradients([(names, None) for names, _ in program], f"{policy},r=f32")
        jax.tree.map(np.testing.assert_array_equal, wide, (value, of_parts))


@pytest.mark.parametrize("policy", ["c=bf16", "c=f16"])
def test_the_result_of_a_branch_is_weak_if_that_of_each_branch_is(policy):
    def f(w, b, x):
        h = x @ w
        total = lax.cond(x.sum() < 9e9, lambda: h.sum() * 1e6, lambda: h.sum())  # in float32
        bias = lax.switch(0 * x.astype(int)[0, 0], [lambda: b, lambda: b * 2, lambda: 0 * b])
        return h * 1e-3 + total, h + bias

    w, b, x = np.eye(2, dtype=F32), np.ones(2, F32), np.ones((2, 2), F32)
    wide, low = jmpx.autocast(f, policy, output=None)(w, b, x)
    assert wide.dtype == F32 and low.dtype.itemsize == 2
    np.testing.assert_allclose(wide, 4e6, rtol=1e-6)
    np.testing.assert_array_equal(low, 2)
