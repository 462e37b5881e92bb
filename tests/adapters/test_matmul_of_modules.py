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


def layers_of(framework, policy_map):
    """Returns, for each layer, how its three products multiply: forward and twice backward."""
    net, found = zoo.drawn(framework, zoo.nested, BATCH, 3), collections.defaultdict(list)
    apply, model = net.split(net.under(net.words(policy_map)))
    loss = lambda *args: jnp.sum(apply(*args).astype(jnp.float32) ** 2)  # noqa: E731
    for product in products_of(jax.grad(loss, (0, 1)), model, jnp.ones((BATCH, 3))):
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


@every_framework
def test_an_algorithm_is_for_float32_alone(framework, routed):
    # JAX would cast the operands to the dtypes of the algorithm, and lose digits in silence.
    routing(framework)  # kept for other tests: made in float32
    with enable_x64():
        run = routed(framework, "p=f64,m=BF16_BF16_F32_X3; */router: m=F32_F32_F32")
        assert ways(run, jnp.ones((2, 3), jnp.float64)) == ["f64 DEFAULT"]


# Class policies


def class_of_router(framework):
    return zoo.INNER.get(framework) or type(routing(framework).model.router)


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


@every_framework
def test_a_region_in_16_bits_inside_of_float32_code_with_a_dot_algorithm(framework, routed):
    run = routed(framework, "c=bf16,o=f32")

    def loss(x):
        return (run(x) @ jnp.ones((3, 3))).sum()

    scaling = jmpx.NoOpLossScale()
    gradient = jmpx.value_and_grad(loss, scaling, policy="p=f32,m=BF16_BF16_F32_X3")
    assert sorted(ways(gradient, XS)) == ["bf16 DEFAULT"] * 2 + [f"f32 {X3}"] * 2
    marked = jmpx.full_precision(loss, matmul="BF16_BF16_F32_X3")
    assert ways(marked, XS) == ["bf16 DEFAULT", f"f32 {X3}"]


# The transformations of the frameworks: each calls the router, which is `highest`.


def twice(f, x):
    return lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0]


def in_haiku(router, x):
    x = hk.vmap(hk.remat(router), split_rng=False)(x[None])[0]
    x = hk.scan(lambda carry, _: (router(carry), None), x, None, length=2)[0]
    return hk.map(router, hk.cond(x[0, 0] > 0, router, lambda x: x, x)[None])[0]


def in_linen(router, x):
    def call_it(router, x, _=None):
        return router(x), None

    once: dict[str, Any] = {"split_rngs": {"params": False}}
    for lift in (nn.remat, nn.jit, lambda f: f):
        x = lift(call_it)(router, x)[0]
    x = nn.scan(call_it, variable_broadcast="params", length=2, **once)(router, x, None)[0]
    return nn.vmap(call_it, {"params": None}, **once)(router, x[None])[0][0]


def in_nnx(router, x):
    for lifted in (nnx.remat(router), nnx.jit(router), functools.partial(twice, router)):
        x = lifted(x)
    return nnx.vmap(router)(x[None])[0]


def in_equinox(router, x):
    x = eqx.filter_checkpoint(router)(eqx.filter_jit(router)(x))
    x = eqx.filter_closure_convert(router, x)(eqx.filter_vmap(router)(x[None])[0])
    for kind in ("bounded", "checkpointed"):
        step = lambda carry: (router(carry[0]), carry[1] + 1)  # noqa: E731
        x = eqxi.while_loop(lambda c: c[1] < 2, step, (x, 0), kind=kind, max_steps=2)[0]
    return twice(router, x)


LIFTED = {"haiku": (in_haiku, 4), "linen": (in_linen, 5), "nnx": (in_nnx, 4)}
LIFTED["equinox"] = in_equinox, 7


@every_framework
def test_a_region_holds_through_the_transforms_of_a_framework(framework, routed):
    lift, calls = LIFTED[framework]

    def call(router, x):
        return lift(router, x) @ jnp.ones((3, 3))

    run = routed(framework, "c=f32; */router: m=highest", call=call)
    found = ways(jax.value_and_grad(lambda x: run(x).sum()), XS)
    assert found.count("f32 DEFAULT") == 2  # of what surrounds the router
    assert found.count("f32 HIGHEST") >= 2 * calls
    assert set(found) == {"f32 DEFAULT", "f32 HIGHEST"}


def test_parameters_are_created_in_the_region():
    def product(*args):
        shape, dtype = args[-2:]
        return jnp.eye(3, dtype=dtype) @ jnp.ones(shape, dtype)

    linear = hk.transform(lambda x: hk.Linear(3, w_init=product)(x))
    dense = nn.Dense(3, kernel_init=product)
    for net, policies in (linear, jmpx.haiku.policies), (dense, jmpx.flax.policies):

        def init(key, net=net, policies=policies):
            with policies("full; Linear?: m=highest; Dense?: m=highest"):
                return net.init(key, XS)

        assert ways(init, jax.random.key(0)) == ["f32 HIGHEST"]
