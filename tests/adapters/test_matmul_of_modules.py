"""`matmul=` in the adapters: how the products of a region multiply, read from StableHLO."""

import collections
import contextlib
import functools
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import enable_x64, zoo
from helpers.products import default_precision, products_of
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

every_framework = pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
KEY = jax.random.key(0)
X3 = "bf16 f32 x3"
BATCH = 2
# The inputs and outputs of the layers of `zoo.nested`.
WIDTHS = {"first": {3, 4}, "inner": {4, 5}, "outer": {5, 6}, "head": {6, 7}}
# The policy map -> the dtype of the products of the layers first, inner, outer and head, and how
# they multiply. The layers inner and outer are in the block.
MAPS = {
    "c=bf16,o=f32; */block: c=f32,m=highest; */head: full": (
        "bf16 DEFAULT, f32 HIGHEST, f32 HIGHEST, f32 DEFAULT"
    ),
    "c=bf16,o=f32; <Inner>: c=f32,m=highest": (
        "bf16 DEFAULT, f32 HIGHEST, f32 HIGHEST, bf16 DEFAULT"
    ),
    # A rule for matmul alone makes a boundary, too: the dtypes are inherited.
    "c=bf16,o=f32; */block: m=highest": "bf16 DEFAULT, bf16 HIGHEST, bf16 HIGHEST, bf16 DEFAULT",
    "full; */outer: m=high": "f32 DEFAULT, f32 DEFAULT, f32 HIGH, f32 DEFAULT",
    # The default, and rules that inherit it.
    "c=bf16,o=f32,m=float32; */block: full; */outer: bf16": (
        "bf16 HIGHEST, f32 HIGHEST, bf16 HIGHEST, bf16 HIGHEST"
    ),
    # Nested rules.
    "p=f32,m=highest; */block: m=high; */outer: m=default": (
        "f32 HIGHEST, f32 HIGH, f32 DEFAULT, f32 HIGHEST"
    ),
    "full; */block: m=tensorfloat32; */outer: bf16; */inner: m=HIGHEST": (
        "f32 DEFAULT, f32 HIGHEST, bf16 HIGH, f32 DEFAULT"
    ),
    # Dot algorithms: products in 16 bits have none, also in a float32 region that has one, and
    # a float32 region in a 16-bit one inherits it.
    "c=bf16,o=f32,m=BF16_BF16_F32_X3; */block: full; */outer: bf16": (
        f"bf16 DEFAULT, f32 {X3}, bf16 DEFAULT, bf16 DEFAULT"
    ),
    "p=f32,m=bf16_bf16_f32_x3; */block: c=bf16; */inner: full; */head: m=highest": (
        f"f32 {X3}, f32 {X3}, bf16 DEFAULT, f32 HIGHEST"
    ),
    "p=f32,m=highest; */block: m=BF16_BF16_F32_X3; */outer: bf16": (
        f"f32 HIGHEST, f32 {X3}, bf16 HIGHEST, f32 HIGHEST"
    ),
}


def squares(apply):
    """Returns the gradient, in the model and the inputs, of a loss of results in float32."""
    return jax.grad(lambda *args: jnp.sum(apply(*args).astype(jnp.float32) ** 2), (0, 1))


@functools.cache
def nested(framework):
    return zoo.build(framework, zoo.nested, jnp.ones((BATCH, 3)), rng=np.random.default_rng(0))


def layers_of(framework, policy_map):
    """Returns, for each layer, how its three products multiply: forward and twice backward."""
    net, found = nested(framework), collections.defaultdict(list)
    apply, model = net.split(net.under(net.words(policy_map)))
    for product in products_of(squares(apply), model, jnp.ones((BATCH, 3))):
        (name,) = [n for n, widths in WIDTHS.items() if widths == product.sizes - {BATCH}]
        found[name].append(f"{' '.join(sorted(product.dtypes))} {product.how}")
    assert {name: len(products) for name, products in found.items()} == dict.fromkeys(WIDTHS, 3)
    assert all(len(set(products)) == 1 for products in found.values()), found
    return ", ".join(found[name][0] for name in WIDTHS)


@pytest.mark.parametrize(
    ("framework", "policy_map"), [(zoo.FRAMEWORKS[i % 4], text) for i, text in enumerate(MAPS)]
)
def test_the_products_of_a_region_and_no_others_use_the_algorithm(framework, policy_map):
    assert layers_of(framework, policy_map) == MAPS[policy_map]


@pytest.mark.parametrize("framework", ["linen", "equinox"])
def test_without_matmul_what_surrounds_holds(framework):
    with jax.default_matmul_precision("highest"):
        found = layers_of(framework, "c=bf16,o=f32; */block: full; */inner: m=high")
        assert found == "bf16 HIGHEST, f32 HIGH, f32 HIGHEST, bf16 HIGHEST"
        # Products in 16 bits get it back.
        found = layers_of(framework, "p=f32,m=BF16_BF16_F32_X3; */block: bf16")
        assert found == f"f32 {X3}, bf16 HIGHEST, bf16 HIGHEST, f32 {X3}"
    assert default_precision() is None


# A net that calls its router by the code of a test, and the router that computes by the code of a
# test.


def dot(x, w):
    return x @ w


XS, CODE = jnp.ones((2, 3)), {"compute": dot, "call": lambda router, x: router(x)}


def router_body(m, x):
    return CODE["compute"](x, m.param("w", 3, 3))


@functools.cache
def routing(framework):
    def body(m, x):
        return CODE["call"](m.inner("router", router_body), x)

    return zoo.build(framework, body, XS, rng=np.random.default_rng(0))


@pytest.fixture
def routed(monkeypatch):
    """Makes a function of an input: a net under a policy map; None for class policies alone."""

    def make(framework, policy_map, **code):
        net = routing(framework)
        for name, function in code.items():
            monkeypatch.setitem(CODE, name, function)
        apply = net.within(*filter(None, [policy_map]))
        return lambda x: apply(net.model, x)

    return make


def ways(f, *args):
    """Returns how the products of a function multiply, in their order."""
    return [
        f"{' '.join(sorted(product.dtypes))} {product.how}" for product in products_of(f, *args)
    ]


@every_framework
def test_what_ones_own_code_says_goes_before_the_policy(framework, routed):
    def compute(x, w):
        return jnp.dot(x, w) + jnp.dot(x, w, precision="high")

    def call(router, x):
        with jax.default_matmul_precision("default"):
            return router(x)

    assert ways(routed(framework, "p=f32,m=highest", compute=compute), XS) == [
        "f32 HIGHEST",
        "f32 HIGH",
    ]
    run = functools.partial(routed, framework, compute=dot, call=call)
    assert ways(run("p=f32,m=BF16_BF16_F32_X3"), XS) == ["f32 DEFAULT"]
    assert ways(run("p=f32,m=highest; */router: full"), XS) == ["f32 DEFAULT"]
    assert ways(run("p=f32,m=highest; */router: m=high"), XS) == ["f32 HIGH"]


@every_framework
def test_a_jitted_function_is_traced_anew_in_another_region(framework, routed):
    jitted = jax.jit(dot)
    with_own_cast = jax.jit(jmpx.force_full_precision(dot))

    def both(x, w):
        return jitted(x, w) + with_own_cast(x, w)

    for policy_map, expected in {
        "c=bf16,m=highest": ["bf16 HIGHEST", "f32 HIGHEST"],
        "bf16": ["bf16 DEFAULT", "f32 DEFAULT"],
        "c=bf16,m=BF16_BF16_F32_X3": ["bf16 DEFAULT", f"f32 {X3}"],
        "c=bf16,m=high": ["bf16 HIGH", "f32 HIGH"],
    }.items():
        assert ways(routed(framework, policy_map, compute=both), XS) == expected


@every_framework
def test_an_exception_ends_the_region_and_eager_calls_are_in_it(framework, routed):
    seen = []

    def compute(x, w):
        seen.append(default_precision())
        raise RuntimeError("on purpose")

    for policy_map in ("full; */router: m=highest", "p=f32,m=BF16_BF16_F32_X3"):
        with pytest.raises(RuntimeError, match="on purpose"):
            routed(framework, policy_map, compute=compute)(XS)
        assert default_precision() is None
    assert seen == ["highest", "BF16_BF16_F32_X3"]
    assert ways(jmpx.force_full_precision(dot), XS, jnp.ones((3, 3))) == ["f32 DEFAULT"]


@every_framework
def test_an_algorithm_is_for_float32_alone(framework, routed):
    # JAX would cast the operands to the dtypes of the algorithm, and lose digits in silence.
    with enable_x64():
        run = routed(framework, "p=f64,m=BF16_BF16_F32_X3; */router: m=F32_F32_F32")
        assert ways(run, jnp.ones((2, 3), jnp.float64)) == ["f64 DEFAULT"]


# Class policies


def class_of_router(framework):
    if framework == "equinox":
        return type(routing(framework).model.router)
    return {"haiku": zoo.HaikuInner, "linen": zoo.LinenInner, "nnx": zoo.NNXInner}[framework]


@contextlib.contextmanager
def set_and_cleared(cls, policy):
    said = contextlib.nullcontext()
    if issubclass(cls, hk.Module):
        said = pytest.warns(UserWarning, match="holds in jmpx's contexts alone.*push_policy")
    with said:
        jmpx.set_policy(cls, policy)
    try:
        yield
    finally:
        jmpx.clear_policy(cls)


@pytest.mark.parametrize(
    ("framework", "attached", "policy", "policy_map", "found"),
    [
        ("haiku", jmpx.push_policy, "c=bf16,m=BF16_BF16_F32_X3", None, "bf16 DEFAULT"),
        ("haiku", set_and_cleared, "p=f32,m=BF16_BF16_F32_X3", "full", f"f32 {X3}"),
        ("linen", jmpx.push_policy, "c=f32,m=highest", "full", "f32 HIGHEST"),
        ("linen", set_and_cleared, "c=bf16,m=highest", None, "bf16 HIGHEST"),
        ("nnx", jmpx.push_policy, "p=f32,m=BF16_BF16_F32_X3", None, f"f32 {X3}"),
        ("nnx", set_and_cleared, "c=bf16,m=BF16_BF16_F32_X3", "full", "bf16 DEFAULT"),
        ("equinox", jmpx.push_policy, "c=bf16,m=highest", "full", "bf16 HIGHEST"),
        ("equinox", set_and_cleared, "c=f32,m=highest", None, "f32 HIGHEST"),
    ],
)
def test_a_class_policy_sets_the_algorithm(framework, attached, policy, policy_map, found, routed):
    def outside(router, x):
        y = router(x).astype(jnp.float32)
        return y @ jnp.ones((3, 3), y.dtype)

    run = routed(framework, policy_map, call=outside)
    with attached(class_of_router(framework), policy):
        assert ways(run, XS) == [found, "f32 DEFAULT"]
    assert ways(run, XS) == ["f32 DEFAULT", "f32 DEFAULT"]


def test_outside_of_contexts_haiku_alone_casts_by_a_class_policy_that_is_set():
    net = routing("haiku")
    with set_and_cleared(zoo.HaikuInner, "c=bf16,m=highest"):
        assert ways(net.apply, net.model, XS) == ["bf16 DEFAULT"]
    with jmpx.push_policy(zoo.HaikuInner, "c=bf16,m=highest"):
        assert ways(net.apply, net.model, XS) == ["bf16 HIGHEST"]


@every_framework
def test_a_class_policy_without_matmul_inherits_it(framework, routed):
    def compute(x, w):
        return x @ w + jmpx.force_full_precision(dot)(x, w)

    run = functools.partial(routed, framework, compute=compute)
    with jmpx.push_policy(class_of_router(framework), "c=bf16"):
        assert ways(run("p=f32,m=highest"), XS) == ["bf16 HIGHEST", "f32 HIGHEST"]
        assert ways(run("p=f32,m=BF16_BF16_F32_X3"), XS) == ["bf16 DEFAULT", f"f32 {X3}"]
        # A rule goes before it.
        assert ways(run("full; */router: m=high"), XS) == ["f32 HIGH", "f32 HIGH"]
    with jmpx.push_policy(class_of_router(framework), "c=f32,m=high"):
        assert ways(run("p=f32,m=highest"), XS) == ["f32 HIGH", "f32 HIGH"]


# What the page says of derivatives that the user's code defines.


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def test_jax_does_not_hand_it_on_to_a_custom_vjp(routed):
    run = routed("haiku", "full; */router: m=highest", compute=with_vjp)
    assert ways(run, XS) == ["f32 HIGHEST"]
    assert ways(jax.value_and_grad(lambda x: run(x).sum()), XS) == ["f32 HIGHEST", "f32 DEFAULT"]


@every_framework
def test_a_region_in_16_bits_inside_of_float32_code_with_a_dot_algorithm(framework, routed):
    run = routed(framework, "c=bf16,o=f32")

    def loss(x):
        return (run(x) @ jnp.ones((3, 3))).sum()

    scaling = jmpx.NoOpLossScale()
    gradient = jmpx.filter_value_and_grad(loss, scaling, policy="p=f32,m=BF16_BF16_F32_X3")
    assert sorted(ways(gradient, XS)) == ["bf16 DEFAULT"] * 2 + [f"f32 {X3}"] * 2
    marked = jmpx.full_precision(loss, matmul="BF16_BF16_F32_X3")
    assert ways(marked, XS) == ["bf16 DEFAULT", f"f32 {X3}"]


# Convolutions follow the words, and JAX ignores dot algorithms for them.


@pytest.mark.parametrize(
    ("framework", "policy_map", "dtype", "how"),
    [
        ("haiku", "p=f32,m=BF16_BF16_F32_X3", "f32", "DEFAULT"),
        ("linen", "p=f32,m=BF16_BF16_F32_X3; *: m=highest", "f32", "HIGHEST"),
        ("nnx", "c=bf16,m=BF16_BF16_F32_X3", "bf16", "DEFAULT"),
        ("equinox", "c=bf16,m=high", "bf16", "HIGH"),
    ],
)
def test_convolutions_use_the_words(framework, policy_map, dtype, how):
    x = jnp.ones((1, 4, 4, 3))
    net = zoo.build(framework, lambda m, x: m.conv("conv", 3)(x), x, rng=np.random.default_rng(0))
    apply, model = net.split(net.under(policy_map))
    found = products_of(squares(apply), model, x)
    assert {product.operation for product in found} == {"convolution"}
    assert [(*product.dtypes, product.how) for product in found] == [(dtype, how)] * 3


# The transformations of the frameworks: each net calls its routers by all of them.

POLICY = "c=bf16,o=f32; *router: c=f32,m=highest; *head: full"
OUTSIDE, INSIDE = "f32 DEFAULT", "f32 HIGHEST"


def made(*args):
    """An initializer with a product in it."""
    shape, dtype = args[-2:]
    return jnp.eye(3, dtype=dtype) @ jnp.ones(shape, dtype)


def twice(f, x):
    return lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0]


class HaikuLinear(hk.Module):
    def __call__(self, x):
        return x @ hk.get_parameter("w", (3, 3), init=made)


HAIKU = {
    "remat": lambda router, x: hk.remat(router)(x),
    "vmap": lambda router, x: hk.vmap(router, split_rng=False)(x[None])[0],
    "scan": lambda router, x: hk.scan(lambda c, _: (router(c), None), x, None, length=2)[0],
    "cond": lambda router, x: hk.cond(x[0, 0] > 0, router, lambda x: x, x),
    "map": lambda router, x: hk.map(router, x[None])[0],
    # JAX has no gradient of it, so it is the last one, and is left out.
    "fori_loop": lambda router, x: hk.fori_loop(0, 2, lambda _, x: router(x), x),
}


def haiku_net(lifts):
    def net(x):
        router, head = HaikuLinear("router"), HaikuLinear("head")
        x = router(x)  # creates its parameter
        for lift in lifts:
            x = HAIKU[lift](router, x)
        return head(x)

    return hk.without_apply_rng(hk.transform(net))


class LinenLinear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", made, (3, 3), jnp.float32)


class LinenSetup(nn.Module):
    def setup(self):
        self.w = self.param("w", made, (3, 3), jnp.float32)

    def __call__(self, x):
        return x @ self.w


class LinenStep(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x @ self.param("w", made, (3, 3), jnp.float32), None


class LinenLifted(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name, lift in [("call", lambda cls: cls), ("remat", nn.remat), ("jit", nn.jit)]:
            x = lift(LinenLinear)(name=f"{name}_router")(x)
        x = LinenSetup(name="setup_router")(x)
        once = {"split_rngs": {"params": False}}
        scan = nn.scan(LinenStep, variable_broadcast="params", length=2, **once)
        x = scan(name="scan_router")(x, None)[0]
        vmap = nn.vmap(LinenLinear, {"params": None}, **once)
        return LinenLinear(name="head")(vmap(name="vmap_router")(x[None])[0])


class NNXLinear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((3, 3)))

    def __call__(self, x):
        return x @ self.w[...]


def call_it(router, x):
    return router(x)


class NNXLifted(nnx.Module):
    def __init__(self):
        self.router, self.head = NNXLinear(), NNXLinear()

    def __call__(self, x):
        x = self.router(x)
        x = nnx.remat(call_it)(self.router, x)
        x = nnx.jit(call_it)(self.router, x)
        x = nnx.vmap(call_it, in_axes=(None, 0))(self.router, x[None])[0]
        carried = {"in_axes": (nnx.Carry, None), "out_axes": nnx.Carry, "length": 2}
        x = nnx.scan(lambda x, router: router(x), **carried)(x, self.router)
        return self.head(twice(self.router, x))


class EquinoxLinear(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return x @ self.w


class EquinoxLifted(eqx.Module):
    router: EquinoxLinear
    head: EquinoxLinear

    def __call__(self, x):
        router = self.router
        for lifted in (router, eqx.filter_checkpoint(router), eqx.filter_jit(router)):
            x = lifted(x)
        x = eqx.filter_jit(router.__call__)(x)
        x = eqx.filter_vmap(router)(x[None])[0]
        x = eqx.filter_closure_convert(router, x)(x)
        for kind in ("bounded", "checkpointed"):
            step = lambda c: (router(c[0]), c[1] + 1)  # noqa: E731
            x = eqxi.while_loop(lambda c: c[1] < 2, step, (x, 0), kind=kind, max_steps=2)[0]
        return self.head(twice(router, x))


def lifted(framework):
    """Returns a net, and the number of its calls of routers."""
    if framework == "haiku":
        params: Any = {name: {"w": jnp.ones((3, 3))} for name in ("router", "head")}
        return zoo.Net(framework, haiku_net(list(HAIKU)[:-1]).apply, params), 6
    if framework == "linen":
        shapes = jax.eval_shape(LinenLifted().init, KEY, XS)
        return zoo.Net(framework, LinenLifted().apply, shapes), 6
    if framework == "nnx":
        return zoo.Net(framework, lambda model, x: model(x), NNXLifted()), 6
    linear = EquinoxLinear(jnp.ones((3, 3)))
    return zoo.Net(framework, lambda model, x: model(x), EquinoxLifted(linear, linear)), 9


@every_framework
def test_a_region_holds_through_the_transforms_of_a_framework(framework):
    net, calls = lifted(framework)
    apply, model = net.split(net.under(POLICY))
    found = ways(squares(apply), model, XS)
    assert found.count(OUTSIDE) == 3  # of the head
    assert found.count(INSIDE) >= calls and set(found) == {OUTSIDE, INSIDE}


def test_parameters_are_created_in_the_region():
    def init_of(net, policies):
        def init(key):
            with policies(POLICY):
                return net.init(key, XS)

        return init

    for net, policies, routers in (
        (haiku_net(HAIKU), jmpx.haiku.policies, 1),
        (LinenLifted(), jmpx.flax.policies, 6),
    ):
        found = ways(init_of(net, policies), KEY)
        assert set(found) == {OUTSIDE, INSIDE} and found.count(INSIDE) >= routers
        assert found.count(OUTSIDE) == 1  # made for the head; the result of its call is not read
