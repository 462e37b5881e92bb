"""Contexts of Haiku and Linen that `jmpx.apply_policy` opens, and contexts inside of each other."""

import contextlib
import functools
import itertools
import threading
import warnings
from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F16, F32, LOG, dtypes, zoo
from helpers.jaxprs import program

import jmpx
import jmpx.flax
import jmpx.haiku

# Private: `applied` opens what `jmpx.apply_policy` opens, as a context that may end in any order.
from jmpx._adapters.scopes import for_modules, listening, pooled
from jmpx._policies.frameworks import imported_adapters

P = "c=bf16,o=f32; */norm?: full"
OTHER = "c=f16,o=f16"
KEY = jax.random.key(0)
X: Any = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
POLICIES = {"haiku": jmpx.haiku.policies, "linen": jmpx.flax.policies}
both = pytest.mark.parametrize("framework", POLICIES)


@contextlib.contextmanager
def applied(policy):
    """Opens what `jmpx.apply_policy` opens by modules that report their calls."""
    with contextlib.ExitStack() as stack:
        policy_map = for_modules(policy, "jmpx.apply_policy")
        stack.enter_context(pooled(policy_map, "jmpx.apply_policy"))
        for adapter in imported_adapters():
            stack.enter_context(adapter.applied(policy_map))
        yield


INSIDE = [contextlib.nullcontext]  # the context that blocks enter around a part of their call


def scaled(m, x, log=False):
    if log:
        LOG.append(x.dtype)
    return x * m.param("scale")


def block(m, x):
    x = m.linear("inner", 4)(x)
    norm = m.inner("norm", scaled)
    log = m.inner("log", functools.partial(scaled, log=True))
    with INSIDE[-1]():
        x = log(norm(x))
    return m.linear("head", 3)(x)


def net(framework):
    return zoo.drawn(framework, block, *X.shape)


def init(framework):
    """Returns the `init` of a block, as a function of inputs alone."""
    if framework == "linen":
        return lambda x: zoo.LinenNet(block).init(KEY, x)
    return lambda x: hk.transform(lambda x: zoo.HaikuNet(block)(x)).init(KEY, x)


def runs(framework, context: Any = contextlib.nullcontext):
    """Returns a function of parameters and inputs, in which the block enters a context."""

    def run(*args):
        INSIDE.append(context)
        try:
            return net(framework).apply(*args)
        finally:
            INSIDE.pop()

    return run


def result(func, framework):
    """Runs a function on shapes alone, traced anew; returns the dtype of its result."""
    return jax.eval_shape(lambda *args: func(*args), net(framework).model, X).dtype


def seen(framework):
    """Returns the dtype that a block's `log` is called with."""
    result(runs(framework), framework)
    return LOG[-1]


def contexts(framework):
    """Returns the contexts that mean the same, by name."""
    return {
        "policies": lambda: POLICIES[framework](P),
        "by": lambda: POLICIES[framework](f"by=modules,{P}"),
        "applied": lambda: applied(f"by=modules,{P}"),
    }


def program_in(context, func, *args):
    with context():
        return program(func, *args)


@contextlib.contextmanager
def caught():
    """Collects the beginnings of the warnings that are raised while the context lasts."""
    texts = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    assert {each.filename for each in found} <= {__file__}
    texts += [" ".join(str(each.message).split()[:3]) for each in found]


# What apply_policy opens is the context of the framework


@pytest.mark.parametrize(
    ("framework", "policy"),
    [("haiku", P), ("linen", "c=f16,o=f32; */inner: f32; */head: bf16"), ("haiku", "params=bf16")],
)
def test_it_does_what_the_context_of_the_framework_does(framework, policy):
    def programs():
        args = net(framework).model, X
        return program(init(framework), X), program(runs(framework), *args)

    with POLICIES[framework](policy):
        expected = programs()
    with applied(f"by=modules,{policy}"):
        assert programs() == expected


# Each way: what init creates, and class policies


@both
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("by=arguments,params=bf16,c=bf16", BF16),
        ("by=arguments,c=f16,o=f32", F32),
        ("by=modules,params=bf16,c=bf16", BF16),
        ("by=operations,params=bf16,c=f16", BF16),
    ],
)
def test_init_creates_the_same_dtypes_in_each_way(framework, policy, dtype):
    jitted = jax.jit(init(framework))
    for func in (init(framework), jitted):
        params = jax.eval_shape(jmpx.apply_policy(func, policy), X)
        assert set(dtypes(params)) == {dtype.name}
    assert set(dtypes(jax.eval_shape(jitted, X))) == {"float32"}


def test_what_init_creates_in_another_context_and_under_a_class_policy():
    policy: Any = jmpx.get_policy("params=f16,c=f16,o=bf16")
    with hk.mixed_precision.push_policy(zoo.HaikuInner, policy):
        func = lambda _, x: init("haiku")(x)  # noqa: E731
        func = jmpx.apply_policy(func, "by=arguments,params=bf16,c=bf16,o=bf16")
        params = jax.eval_shape(func, None, X)
        assert params["haiku_net/log"]["scale"].dtype == F16
        assert params["haiku_net/inner"]["w"].dtype == BF16
    for framework, policies in POLICIES.items():

        def inside(x, framework=framework, policies=policies):
            with policies("params=f16"):
                return init(framework)(x)

        with pytest.warns(UserWarning, match="policies inside of it casts them again"):
            func = jmpx.apply_policy(inside, "by=arguments,params=bf16,c=bf16")
            assert set(dtypes(jax.eval_shape(func, X))) == {"float16"}


@both
def test_class_policies_under_each_way(framework):
    cls = zoo.HaikuInner if framework == "haiku" else zoo.LinenInner
    apply = functools.partial(jmpx.apply_policy, net(framework).apply)
    with jmpx.push_policy(cls, "c=f32,o=bf16"):
        assert result(apply("by=modules,c=bf16,o=f32"), framework) == LOG[-1] == F32
        warned = (
            pytest.warns(UserWarning, match="hk.mixed_precision inside .* write by=modules into")
            if framework == "haiku"
            else contextlib.nullcontext()  # Linen itself knows no class policies
        )
        with warned:
            assert result(apply("by=arguments,c=bf16,o=f32"), framework) == F32
        assert LOG[-1] == (F32 if framework == "haiku" else BF16)
    with jmpx.push_policy(cls, "full"):
        assert result(apply("by=operations,c=bf16,o=f32"), framework) == LOG[-1] == F32


# An equal map inside of a map


@both
@pytest.mark.parametrize(
    ("outer", "inner"),
    [("policies", "applied"), ("applied", "policies"), ("by", "policies"), ("applied", "applied")],
)
def test_an_equal_map_inside_is_no_second_cast(framework, outer, inner):
    outer, inner = (contexts(framework)[name] for name in (outer, inner))
    args = net(framework).model, X
    expected = program_in(outer, runs(framework), *args)
    assert expected != program(runs(framework), *args)

    def around(params, x):
        with inner():
            return net(framework).apply(params, x)

    assert program_in(outer, around, *args) == expected
    assert program_in(outer, runs(framework, inner), *args) == expected
    assert LOG[-1] == BF16  # what the norm returns to the context around it


@both
def test_another_map_inside_is_an_island(framework):
    policies = POLICIES[framework]

    def back():
        stack = contextlib.ExitStack()
        stack.enter_context(policies(OTHER))
        stack.enter_context(applied(P))  # of an equal map, but not the innermost one
        return stack

    for inner, dtype in [
        (lambda: policies(OTHER), F16),
        (lambda: applied(OTHER), F16),
        (back, BF16),
    ]:
        with applied(P):
            assert result(runs(framework, inner), framework) == F32
        assert LOG[-1] == dtype


@both
@pytest.mark.parametrize("rule, warned", [("<Inner>?: f32", []), ("Lag: f32", ["The rule 'Lag:"])])
def test_the_outermost_context_warns_once(framework, rule, warned):
    policy = net(framework).words(f"{P}; {rule}")
    for outer, inner in itertools.product([POLICIES[framework], applied], repeat=2):
        with caught() as texts, outer(policy):
            run = runs(framework, functools.partial(inner, f"by=modules,{policy}"))
            result(run, framework)
            assert not texts
        assert texts == warned


def test_rules_are_warned_of_once_for_all_frameworks():
    used = "haiku.Linear: full; Dense: full; LinenInner: f16"
    for rules, warned in [(used, []), ("Lag: f32; */norm: full", ["The rule 'Lag:"])]:
        with caught() as texts, applied(f"c=bf16; {rules}"):
            for framework in POLICIES:
                seen(framework)
        assert texts == warned
    with caught() as texts, applied("c=bf16; Lag: f32"), applied("c=f16; Lig: f32"):
        seen("haiku")
    assert texts == ["The rule 'Lig:"]  # the map of the calls


def test_a_framework_that_runs_nothing_is_silent():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with caught() as texts:
        with applied("c=bf16; Log?: f16"):
            model(X)
        with applied("c=bf16; Log?: f32"), jmpx.flax.policies("c=bf16; Log?: f32"):
            model(X)
        with jmpx.flax.policies("c=bf16; Linear: f32"), applied("c=bf16; Linear: f32"):
            jmpx.flax.with_policies(model, "c=bf16; Linear: f32")(X)
    assert not texts


def test_dtype_fields_are_warned_of_once():
    layer = nn.Dense(3, dtype=jnp.float32)
    for outer, inner in itertools.product([jmpx.flax.policies, applied], repeat=2):
        with caught() as texts, outer("c=bf16"), inner("c=bf16"):
            jax.eval_shape(layer.init, KEY, X)
        assert texts == ["The dtype field"]


# Ends in any order, generators, threads, audits


@pytest.mark.parametrize(
    ("framework", "order"),
    [
        ("haiku", (0, 2, 1, 3)),
        ("linen", (2, 3, 1, 0)),
        ("haiku", (1, 3, 0, 2)),
        ("linen", (3, 0, 2, 1)),
    ],
)
def test_contexts_of_equal_maps_may_end_in_any_order(framework, order):
    policies, by, in_call = contexts(framework).values()
    opened = [make() for make in (policies, lambda: POLICIES[framework](OTHER), by, in_call)]
    still_open = dict(enumerate([BF16, F16, BF16, BF16]))
    for context in opened:
        context.__enter__()
    for i in order:
        assert seen(framework) == list(still_open.values())[-1]
        opened[i].__exit__(None, None, None)
        del still_open[i]
    assert seen(framework) == F32


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)], ids=str)
def test_haikus_class_policies_come_back_with_the_last_context(order):
    policy: Any = jmpx.get_policy("c=f16")
    with hk.mixed_precision.push_policy(zoo.HaikuInner, policy):
        opened = [make() for make in contexts("haiku").values()]
        for context in opened:
            context.__enter__()
        for i in order:
            assert seen("haiku") == F16
            assert hk.mixed_precision.get_policy(zoo.HaikuInner) is None
            assert jmpx.policy_of(zoo.HaikuInner) == policy
            opened[i].__exit__(None, None, None)
        assert hk.mixed_precision.get_policy(zoo.HaikuInner) is policy


@both
def test_generators_and_threads(framework):
    done = []

    def steps(name):
        with contexts(framework)[name]():
            for _ in range(2):
                yield seen(framework)

    def alone():
        assert seen(framework) == F32
        with applied(P):
            assert seen(framework) == BF16
        done.append(True)

    first, second = steps("policies"), steps("applied")
    assert next(first) == next(second) == BF16
    first.close()
    assert seen(framework) == BF16
    thread = threading.Thread(target=alone)
    thread.start()
    thread.join()
    assert done and next(second) == BF16
    second.close()
    assert seen(framework) == F32


@both
def test_jitted_functions_are_traced_once_for_maps_that_mean_the_same(framework):
    jitted = jax.jit(runs(framework))
    apply = functools.partial(jax.eval_shape, jitted, net(framework).model, X)
    apply()
    for make in (*contexts(framework).values(), lambda: POLICIES[framework](OTHER)):
        with make():
            apply()
            with make():
                apply()
    with POLICIES[framework](OTHER), applied(P):
        apply()
    # The traces: apply_policy says what holds in the other framework, too.
    assert LOG == [F32, BF16, BF16, F16]


@both
def test_what_listens_hears_a_session_that_goes_on(framework):
    policies = POLICIES[framework]
    with applied(P), listening() as sessions:
        result(runs(framework, lambda: policies(P)), framework)
    with applied(P), listening() as heard, policies(P):
        seen(framework)
    for each in (sessions, heard):
        (session,) = (session for session in each if session.met)
        assert {met.module.path.rpartition("/")[2] for met in session.met} > {"log"}


# Haiku's own transformations


@pytest.mark.parametrize("form", ["lift", "layer_stack"])
def test_haikus_transformations_inside(form):
    def outer(context, x):
        def inner(x):
            with context():
                return zoo.HaikuInner(functools.partial(scaled, log=True), name="log")(x)

        x = hk.Linear(4, name="first")(x)
        inside = hk.transform(inner)
        if form == "lift":
            return inside.apply(hk.lift(inside.init, name="lifted")(KEY, x), None, x)
        stack = hk.experimental.layer_stack  # pyright: ignore[reportPrivateImportUsage]
        return stack(2)(inner)(x)

    networks = [
        hk.without_apply_rng(hk.transform(functools.partial(outer, context)))
        for context in (contextlib.nullcontext, *contexts("haiku").values())
    ]
    params = jax.eval_shape(networks[0].init, KEY, X)
    with applied(P):
        inits = {program(network.init, KEY, X) for network in networks}
        programs = {program(network.apply, params, X) for network in networks}
    assert len(inits) == len(programs) == 1 and LOG[-1] == BF16
