"""Contexts of Haiku and Linen that `jmpx.apply_policy` opens, and contexts inside of each other."""

import contextlib
import functools
import itertools
import threading
import warnings

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F16, F32, LOG

import jmpx
import jmpx.flax
import jmpx.haiku
from jmpx._adapters.scopes import listening, pooled
from jmpx._policies.frameworks import imported_adapters

P = "c=bf16,o=f32; */norm?: full"
OTHER = "c=f16,o=f16"


@contextlib.contextmanager
def applied(policy):
    """Opens what `jmpx.apply_policy` opens by modules that report their calls."""
    with contextlib.ExitStack() as stack:
        policy_map = stack.enter_context(pooled(policy, "jmpx.apply_policy"))
        assert policy_map is not None
        for adapter in imported_adapters():
            stack.enter_context(adapter.applied(policy_map))
        yield


class HaikuLog(hk.Module):
    def __call__(self, x):
        if self.name == "log":
            LOG.append(x.dtype)
        return x * hk.get_parameter("scale", (), init=hk.initializers.Constant(2))


class HaikuBlock(hk.Module):
    """A module that enters a context around a part of its call."""

    def __init__(self, context):
        super().__init__(name="block")
        self.context = context

    def __call__(self, x):
        x = hk.Linear(4, name="inner")(x)
        with self.context():
            x = HaikuLog(name="log")(HaikuLog(name="norm")(x))
        return hk.Linear(3, name="head")(x)


class LinenLog(nn.Module):
    @nn.compact
    def __call__(self, x):
        if self.name == "log":
            LOG.append(x.dtype)
        return x * self.param("scale", nn.initializers.constant(2), ())


class LinenBlock(nn.Module):
    """A module that enters a context around a part of its call."""

    context: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="inner")(x)
        with self.context():  # pyright: ignore[reportCallIssue]
            x = LinenLog(name="log")(LinenLog(name="norm")(x))
        return nn.Dense(3, name="head")(x)


class Haiku:
    policies = staticmethod(jmpx.haiku.policies)
    log = HaikuLog

    def __init__(self, context=contextlib.nullcontext):
        self.network = hk.transform(lambda x: HaikuBlock(context)(x))

    def init(self, x):
        return self.network.init(jax.random.key(0), x)

    def apply(self, params, x):
        return self.network.apply(params, None, x)


class Linen:
    policies = staticmethod(jmpx.flax.policies)
    log = LinenLog

    def __init__(self, context=contextlib.nullcontext):
        self.network = LinenBlock(context)

    def init(self, x):
        return self.network.init(jax.random.key(0), x)

    def apply(self, params, x):
        return self.network.apply(params, x)


both = pytest.mark.parametrize("framework", [Haiku, Linen])


def contexts(framework):
    """Returns the contexts that mean the same, by name."""
    return {
        "policies": lambda: framework.policies(P),
        "by": lambda: framework.policies(f"by=modules,{P}"),
        "applied": lambda: applied(f"by=modules,{P}"),
    }


pairs = pytest.mark.parametrize(
    "pair", list(itertools.product(("policies", "by", "applied"), repeat=2)), ids="-".join
)


@pytest.fixture
def x(rng):
    return rng.normal(size=(5, 2)).astype(np.float32)


def program(func, *args):
    """Returns the program of a function that JAX has not traced before."""
    return str(jax.make_jaxpr(lambda *args: func(*args))(*args))


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


@both
@pytest.mark.parametrize("policy", [P, "c=f16,o=f32; */inner: f32; */head: bf16", "bf16", "p=bf16"])
def test_it_does_what_the_context_of_the_framework_does(framework, policy, x):
    policy = policy.replace("p=", "params=")
    model = framework()
    params = model.init(x)

    def programs():
        return program(model.init, x), program(model.apply, params, x)

    with framework.policies(policy):
        expected = programs()
    with applied(f"by=modules,{policy}"):
        assert programs() == expected


@both
def test_a_step_is_that_of_a_context_inside_of_the_loss(framework, x):
    model = framework()
    params = model.init(x)

    def loss(params, x):
        return jnp.mean(jnp.square(model.apply(params, x)))

    def step(value_and_grad):
        compiled = jax.jit(lambda params, x: value_and_grad(params, x))
        return compiled.lower(params, x).as_text(), compiled(params, x)

    def inside(params, x):
        with framework.policies(P):
            return loss(params, x)

    none = jmpx.NoOpLossScale()
    expected = step(jmpx.filter_value_and_grad(inside, none, policy="full"))
    found = step(jmpx.filter_value_and_grad(loss, none, policy=f"by=modules,{P}"))
    assert found[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
    plain = step(jax.value_and_grad(inside))[0]
    assert step(jax.value_and_grad(jmpx.apply_policy(loss, P)))[0] == plain


# Each way: what init creates, and class policies


@both
@pytest.mark.parametrize("by", ["arguments", "modules", "operations"])
@pytest.mark.parametrize("policy", ["c=bf16", "c=f16,o=f32", "params=bf16,c=bf16"])
def test_init_creates_the_same_dtypes_in_each_way(framework, by, policy, x):
    init = framework().init
    for func in (init, jax.jit(init)):
        params = jax.eval_shape(jmpx.apply_policy(func, f"by={by},{policy}"), x)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
            jnp.dtype(jmpx.get_policy(policy).param_dtype)
        }
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(jax.jit(init), x))} == {F32}


def test_what_init_creates_in_another_context_and_under_a_class_policy(x):
    init = Haiku().init
    with hk.mixed_precision.push_policy(HaikuLog, jmpx.get_policy("params=f16,c=f16,o=bf16")):  # pyright: ignore[reportArgumentType]
        func = jmpx.apply_policy(lambda _, x: init(x), "by=arguments,params=bf16,c=bf16,o=bf16")
        params = func(None, x)
        assert params["block/log"]["scale"].dtype == F16
        assert params["block/inner"]["w"].dtype == BF16
    for framework in (Haiku, Linen):

        def inside(x, framework=framework):
            with framework.policies("params=f16"):
                return framework().init(x)

        with pytest.warns(UserWarning, match="policies inside of it casts them again"):
            params = jmpx.apply_policy(inside, "by=arguments,params=bf16,c=bf16")(x)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {F16}


def by_hand(leaves, x):
    """Returns the result of a block in bfloat16, its two scales applied in float32."""
    (b, w), (head_b, head_w), *scales = (jax.tree.map(jnp.asarray, leaf) for leaf in leaves)
    h = x.astype(BF16) @ w.astype(BF16) + b.astype(BF16)
    for scale in scales:
        h = (h.astype(F32) * scale).astype(BF16)
    return (h @ head_w.astype(BF16) + head_b.astype(BF16)).astype(F32)


def parts(framework, params):
    params = params if framework is Haiku else params["params"]
    at = (lambda name: params[f"block/{name}"]) if framework is Haiku else params.__getitem__
    w, b = ("w", "b") if framework is Haiku else ("kernel", "bias")
    pairs = [(at(name)[b], at(name)[w]) for name in ("inner", "head")]
    return [*pairs, at("log")["scale"], at("norm")["scale"]]


@both
def test_class_policies_under_each_way(framework, x):
    model = framework()
    params = model.init(x)
    apply = functools.partial(jmpx.apply_policy, model.apply)
    with jmpx.push_policy(framework.log, "c=f32,o=bf16"):
        y = apply("by=modules,c=bf16,o=f32")(params, x)
        np.testing.assert_array_equal(y, by_hand(parts(framework, params), x))
        assert (y.dtype, LOG[-1]) == (F32, F32)
        warned = (
            pytest.warns(UserWarning, match="hk.mixed_precision inside .* write by=modules into")
            if framework is Haiku
            else contextlib.nullcontext()  # Linen itself knows no class policies
        )
        with warned:
            assert apply("by=arguments,c=bf16,o=f32")(params, x).dtype == F32
        assert LOG[-1] == (F32 if framework is Haiku else BF16)
    with jmpx.push_policy(framework.log, "full"):
        y = apply("by=operations,c=bf16,o=f32")(params, x)
        assert (y.dtype, LOG[-1]) == (F32, F32)
        np.testing.assert_allclose(y, model.apply(params, x), rtol=0.05, atol=0.05)


# An equal map inside of a map


@pytest.mark.sampled(5)
@both
@pairs
def test_an_equal_map_inside_is_no_second_cast(framework, pair, x):
    outer, inner = (contexts(framework)[name] for name in pair)
    model = framework()
    params = model.init(x)
    expected = program_in(outer, model.apply, params, x)
    assert expected != program(model.apply, params, x)

    def around(params, x):
        with inner():
            return model.apply(params, x)

    assert program_in(outer, around, params, x) == expected
    assert program_in(outer, framework(inner).apply, params, x) == expected
    assert LOG[-1] == BF16  # what the LayerNorm returns to the context around it


@both
def test_another_map_inside_is_an_island(framework, x):
    model = framework()
    params = model.init(x)
    for inner, dtype in [(lambda: framework.policies(OTHER), F16), (lambda: applied(OTHER), F16)]:
        with applied(P):
            framework(inner).apply(params, x)
        assert LOG[-1] == dtype

    def back():
        stack = contextlib.ExitStack()
        stack.enter_context(framework.policies(OTHER))
        stack.enter_context(applied(P))  # of an equal map, but not the innermost one
        return stack

    with applied(P):
        assert framework(back).apply(params, x).dtype == F32
    assert LOG[-1] == BF16


@both
@pytest.mark.parametrize("rule, warned", [("Log?: f32", []), ("Lag: f32", ["The rule 'Lag:"])])
def test_the_outermost_context_warns_once(framework, rule, warned, x):
    policy = f"{P}; {rule}"
    params = framework().init(x)
    for outer, inner in itertools.product([framework.policies, applied], repeat=2):
        with caught() as texts, outer(policy):
            framework(functools.partial(inner, f"by=modules,{policy}")).apply(params, x)
            assert not texts
        assert texts == warned


def test_rules_are_warned_of_once_for_all_frameworks(x):
    models = Haiku(), Linen()
    params = [model.init(x) for model in models]
    used = "haiku.Linear: full; Dense: full; LinenLog: f16"
    for rules, warned in [(used, []), ("Lag: f32; */norm: full", ["The rule 'Lag:"])]:
        with caught() as texts, applied(f"c=bf16; {rules}"):
            for model, stored in zip(models, params, strict=True):
                model.apply(stored, x)
        assert texts == warned


def test_a_framework_that_runs_nothing_is_silent(x):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with caught() as texts:
        with applied("c=bf16; Log?: f16"):
            model(x)
        with applied("c=bf16; Log?: f32"), jmpx.flax.policies("c=bf16; Log?: f32"):
            model(x)
        with jmpx.flax.policies("c=bf16; Linear: f32"), applied("c=bf16; Linear: f32"):
            jmpx.flax.with_policies(model, "c=bf16; Linear: f32")(x)
    assert not texts


def test_dtype_fields_are_warned_of_once():
    image = np.ones((1, 4, 4, 2), np.float32)
    layer = nn.Conv(3, (2, 2), dtype=jnp.float32)
    variables = layer.init(jax.random.key(0), image)
    for outer, inner in itertools.product([jmpx.flax.policies, applied], repeat=2):
        with caught() as texts, outer("c=bf16"), inner("c=bf16"):
            layer.apply(variables, image)
        assert texts == ["The dtype field"]


# Ends in any order, generators, threads, audits


def check(framework, params, x, is_open):
    """Checks which of a list of dtypes' contexts is in force: the last one that is open."""
    framework().apply(params, x)
    assert LOG[-1] == (is_open[-1] if is_open else F32)


@pytest.mark.sampled(7)
@both
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_contexts_of_equal_maps_may_end_in_any_order(framework, order, x):
    params = framework().init(x)
    policies, by, in_call = contexts(framework).values()
    opened = [make() for make in (policies, lambda: framework.policies(OTHER), by, in_call)]
    still_open = dict(enumerate([BF16, F16, BF16, BF16]))
    for context in opened:
        context.__enter__()
    for i in order:
        check(framework, params, x, list(still_open.values()))
        opened[i].__exit__(None, None, None)
        del still_open[i]
    check(framework, params, x, [])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_haikus_class_policies_come_back_with_the_last_context(order, x):
    params = Haiku().init(x)
    policy = jmpx.get_policy("c=f16")
    with hk.mixed_precision.push_policy(HaikuLog, policy):  # pyright: ignore[reportArgumentType]
        opened = [make() for make in contexts(Haiku).values()]
        for context in opened:
            context.__enter__()
        for i in order:
            check(Haiku, params, x, [F16])
            assert hk.mixed_precision.get_policy(HaikuLog) is None
            assert jmpx.policy_of(HaikuLog) == policy
            opened[i].__exit__(None, None, None)
        assert hk.mixed_precision.get_policy(HaikuLog) is policy


@both
def test_generators_and_threads(framework, x):
    params = framework().init(x)
    seen = {}

    def steps(name):
        with contexts(framework)[name]():
            for _ in range(2):
                yield framework().apply(params, x) is None

    def alone():
        check(framework, params, x, [])
        with applied(P):
            check(framework, params, x, [BF16])
        seen["alone"] = True

    first, second = steps("policies"), steps("applied")
    next(first)
    next(second)
    first.close()
    check(framework, params, x, [BF16])
    thread = threading.Thread(target=alone)
    thread.start()
    thread.join()
    assert seen
    next(second)
    second.close()
    check(framework, params, x, [])


@both
def test_jitted_functions_are_traced_once_for_maps_that_mean_the_same(framework, x):
    params = framework().init(x)
    apply = jax.jit(framework().apply)
    apply(params, x)
    for make in (*contexts(framework).values(), lambda: framework.policies(OTHER)):
        with make():
            apply(params, x)
            with make():
                apply(params, x)
    with framework.policies(OTHER), applied(P):
        apply(params, x)
    # Init, and the traces: apply_policy says what holds in the other framework, too.
    assert LOG == [F32, F32, BF16, BF16, F16]


@both
def test_what_listens_hears_a_session_that_goes_on(framework, x):
    params = framework().init(x)
    with applied(P), listening() as sessions:
        framework(lambda: framework.policies(P)).apply(params, x)
    with applied(P), listening() as heard:
        with framework.policies(P):
            framework().apply(params, x)
    for each in (sessions, heard):
        (session,) = (session for session in each if session.met)
        assert {met.module.path.rpartition("/")[2] for met in session.met} > {"log"}


# Haiku's own transformations


@pytest.mark.parametrize("form", ["transform", "lift", "layer_stack"])
def test_haikus_transformations_inside(form, x):
    def outer(context, x):
        def inner(x):
            with context():
                return HaikuLog(name="log")(x)

        x = hk.Linear(4, name="first")(x)
        inside = hk.transform(inner)
        if form == "transform":
            stored = hk.get_parameter("p", (), init=hk.initializers.Constant(3))
            return inside.apply({"log": {"scale": stored}}, None, x)
        if form == "lift":
            return inside.apply(hk.lift(inside.init, name="lifted")(None, x), None, x)
        stack = hk.experimental.layer_stack  # pyright: ignore[reportPrivateImportUsage]
        return stack(2)(inner)(x)

    networks = [
        hk.transform(functools.partial(outer, context))
        for context in (contextlib.nullcontext, *contexts(Haiku).values())
    ]
    params = networks[0].init(jax.random.key(0), x)
    with applied(P):
        inits = {program(network.init, jax.random.key(0), x) for network in networks}
        programs = {program(network.apply, params, None, x) for network in networks}
    assert len(inits) == len(programs) == 1 and LOG[-1] == BF16
