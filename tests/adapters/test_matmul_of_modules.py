"""`matmul=` in the adapters: how the products of a region multiply, read from StableHLO."""

import collections
import contextlib
from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import enable_x64
from helpers.four_frameworks import BATCH, FRAMEWORKS, WIDTHS, gradients, in_words_of
from helpers.products import default_precision, products_of

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)

X3 = "bf16 f32 x3"
# The policy map -> the dtype of the products of the layers first, inner, outer and head, and how
# they multiply. The layers inner and outer are in the block.
MAPS = {
    "c=bf16,o=f32; */block: c=f32,m=highest; */head: full": (
        "bf16 DEFAULT, f32 HIGHEST, f32 HIGHEST, f32 DEFAULT"
    ),
    "c=bf16,o=f32; <Own>Block: c=f32,m=highest": (
        "bf16 DEFAULT, f32 HIGHEST, f32 HIGHEST, bf16 DEFAULT"
    ),
    # A rule for matmul alone makes a boundary, too: the dtypes are inherited.
    "c=bf16,o=f32; */block: m=highest": "bf16 DEFAULT, bf16 HIGHEST, bf16 HIGHEST, bf16 DEFAULT",
    "full; */block: m=highest": "f32 DEFAULT, f32 HIGHEST, f32 HIGHEST, f32 DEFAULT",
    "full; */outer: m=high": "f32 DEFAULT, f32 DEFAULT, f32 HIGH, f32 DEFAULT",
    # The default, and rules that inherit it.
    "p=f32,m=highest": "f32 HIGHEST, f32 HIGHEST, f32 HIGHEST, f32 HIGHEST",
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


def layers_of(f, *args):
    """Returns, for each layer, how its three products multiply: forward and twice backward."""
    found = collections.defaultdict(list)
    for product in products_of(f, *args):
        sizes = product.sizes - {BATCH}
        (name,) = [name for name, widths in WIDTHS.items() if set(widths) == sizes]
        found[name].append(f"{' '.join(sorted(product.dtypes))} {product.how}")
    assert {name: len(products) for name, products in found.items()} == dict.fromkeys(WIDTHS, 3)
    assert all(len(set(products)) == 1 for products in found.values()), found
    return ", ".join(found[name][0] for name in WIDTHS)


@pytest.mark.sampled(5)
@every_framework
@pytest.mark.parametrize("policy_map", MAPS)
def test_the_products_of_a_region_and_no_others_use_the_algorithm(framework, policy_map):
    _, model, adapter, _ = FRAMEWORKS[framework]
    program = gradients(adapter(in_words_of(framework, policy_map)), model)
    assert layers_of(*program) == MAPS[policy_map]


@pytest.mark.sampled(2)
@every_framework
def test_without_matmul_what_surrounds_holds(framework):
    _, model, adapter, _ = FRAMEWORKS[framework]
    program = gradients(adapter("c=bf16,o=f32; */block: full; */inner: m=high"), model)
    with jax.default_matmul_precision("highest"):
        found = layers_of(*program)
    assert found == "bf16 HIGHEST, f32 HIGH, f32 HIGHEST, bf16 HIGHEST"
    with jax.default_matmul_precision("highest"):  # products in 16 bits get it back
        program = gradients(adapter("p=f32,m=BF16_BF16_F32_X3; */block: bf16"), model)
        assert layers_of(*program) == f"f32 {X3}, bf16 HIGHEST, bf16 HIGHEST, f32 {X3}"
    assert default_precision() is None


# One model in four frameworks: a net that calls its router by the code of a test, and the router
# that computes by the code of a test.


def dot(x, w):
    return x @ w


class HaikuRouter(hk.Module):
    def __init__(self, compute):
        super().__init__(name="router")
        self.compute = compute

    def __call__(self, x):
        return self.compute(x, hk.get_parameter("w", (3, 3), init=jnp.ones))


class HaikuNet(hk.Module):
    def __init__(self, compute, call):
        super().__init__(name="net")
        self.compute, self.call = compute, call

    def __call__(self, x):
        return self.call(HaikuRouter(self.compute), x)


class LinenRouter(nn.Module):
    compute: Callable

    @nn.compact
    def __call__(self, x):
        return self.compute(x, self.param("w", nn.initializers.ones, (3, 3)))


class LinenNet(nn.Module):
    compute: Callable
    call: Callable

    @nn.compact
    def __call__(self, x):
        return self.call(LinenRouter(self.compute, name="router"), x)


class NNXRouter(nnx.Module):
    def __init__(self, compute):
        self.w, self.compute = nnx.Param(jnp.ones((3, 3))), compute

    def __call__(self, x):
        return self.compute(x, self.w[...])


class NNXNet(nnx.Module):
    def __init__(self, compute, call):
        self.router, self.call = NNXRouter(compute), call

    def __call__(self, x):
        return self.call(self.router, x)


class EquinoxRouter(eqx.Module):
    w: jax.Array
    compute: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.compute(x, self.w)


class EquinoxNet(eqx.Module):
    router: EquinoxRouter
    call: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.call(self.router, x)


ROUTERS = {
    "haiku": HaikuRouter,
    "linen": LinenRouter,
    "nnx": NNXRouter,
    "equinox": EquinoxRouter,
}
XS = jnp.ones((2, 3))


def call_it(router, x):
    return router(x)


def haiku_net(compute, call, x, policy_map):
    network = hk.transform(lambda x: HaikuNet(compute, call)(x))
    with jmpx.haiku.policies(policy_map) if policy_map else contextlib.nullcontext():
        return network.apply({"net/router": {"w": jnp.ones((3, 3))}}, None, x)


def linen_net(compute, call, x, policy_map):
    with jmpx.flax.policies(policy_map):
        params = {"router": {"w": jnp.ones((3, 3))}}
        return LinenNet(compute, call).apply({"params": params}, x)


def nnx_net(compute, call, x, policy_map):
    return jmpx.flax.with_policies(NNXNet(compute, call), policy_map)(x)


def equinox_net(compute, call, x, policy_map):
    net = EquinoxNet(EquinoxRouter(jnp.ones((3, 3)), compute), call)
    return jmpx.equinox.with_policies(net, policy_map)(x)


NETS = {"haiku": haiku_net, "linen": linen_net, "nnx": nnx_net, "equinox": equinox_net}


def routed(framework, policy_map, compute=dot, call=call_it):
    """Returns a function of an input: a net under a policy map; None for class policies alone."""
    return lambda x: NETS[framework](compute, call, x, policy_map)


def ways(f, *args):
    """Returns how the products of a function multiply, in their order."""
    return [
        f"{' '.join(sorted(product.dtypes))} {product.how}" for product in products_of(f, *args)
    ]


@every_framework
def test_a_precision_of_ones_own_goes_before_the_policy(framework):
    def compute(x, w):
        return jnp.dot(x, w) + jnp.dot(x, w, precision="high")

    run = routed(framework, "p=f32,m=highest", compute)
    assert ways(run, XS) == ["f32 HIGHEST", "f32 HIGH"]


@pytest.mark.sampled(3)
@every_framework
@pytest.mark.parametrize("rule", ["", "; */router: full", "; */router: m=high"])
@pytest.mark.parametrize("matmul", ["highest", "BF16_BF16_F32_X3"])
def test_a_context_of_ones_own_inside_a_region_holds_unless_a_rule_says_otherwise(
    framework, matmul, rule
):
    def call(router, x):
        with jax.default_matmul_precision("default"):
            return router(x)

    run = routed(framework, f"p=f32,m={matmul}{rule}", call=call)
    assert ways(run, XS) == ["f32 HIGH" if "m=" in rule else "f32 DEFAULT"]


@pytest.mark.sampled(2)
@every_framework
def test_a_jitted_function_is_traced_anew_in_another_region(framework):
    jitted = jax.jit(dot)
    with_own_cast = jax.jit(jmpx.force_full_precision(dot))

    def both(x, w):
        return jitted(x, w) + with_own_cast(x, w)

    found = [
        ways(routed(framework, policy_map, both), XS)
        for policy_map in ("c=bf16,m=highest", "bf16", "c=bf16,m=BF16_BF16_F32_X3", "c=bf16,m=high")
    ]
    assert found == [
        ["bf16 HIGHEST", "f32 HIGHEST"],
        ["bf16 DEFAULT", "f32 DEFAULT"],
        ["bf16 DEFAULT", f"f32 {X3}"],
        ["bf16 HIGH", "f32 HIGH"],
    ]


@pytest.mark.sampled(2)
@every_framework
def test_an_exception_ends_the_region(framework):
    def compute(x, w):
        raise RuntimeError("on purpose")

    for policy_map in ("p=f32,m=highest", "p=f32,m=BF16_BF16_F32_X3"):
        with pytest.raises(RuntimeError, match="on purpose"):
            routed(framework, policy_map, compute)(XS)
        assert default_precision() is None
        assert ways(dot, XS, jnp.ones((3, 3))) == ["f32 DEFAULT"]
        assert ways(jmpx.force_full_precision(dot), XS, jnp.ones((3, 3))) == ["f32 DEFAULT"]


@every_framework
def test_eager_calls_are_in_the_region_too(framework):
    seen = []

    def compute(x, w):
        seen.append(default_precision())
        return x @ w

    routed(framework, "full; */router: m=highest", compute)(XS)
    assert seen == ["highest"]


@every_framework
def test_an_algorithm_is_for_float32_alone(framework):
    # JAX would cast the operands to the dtypes of the algorithm, and lose digits in silence.
    with enable_x64():
        run = routed(framework, "p=f64,m=BF16_BF16_F32_X3; */router: m=F32_F32_F32")
        assert ways(run, jnp.ones((2, 3), jnp.float64)) == ["f64 DEFAULT"]


# Class policies


def pushed(cls, policy):
    return jmpx.push_policy(cls, policy)


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


@pytest.mark.sampled(7)
@every_framework
@pytest.mark.parametrize("attached", [pushed, set_and_cleared])
@pytest.mark.parametrize(
    ("policy", "found"),
    [
        ("c=f32,m=highest", "f32 HIGHEST"),
        ("c=bf16,m=highest", "bf16 HIGHEST"),
        ("p=f32,m=BF16_BF16_F32_X3", f"f32 {X3}"),
        ("c=bf16,m=BF16_BF16_F32_X3", "bf16 DEFAULT"),
    ],
)
@pytest.mark.parametrize("policy_map", [None, "full"])
def test_a_class_policy_sets_the_algorithm(framework, attached, policy, found, policy_map):
    def outside(router, x):
        y = router(x).astype(jnp.float32)
        return y @ jnp.ones((3, 3), y.dtype)

    run = routed(framework, policy_map, call=outside)
    if (framework, attached, policy_map) == ("haiku", set_and_cleared, None):
        found = f"{found.split()[0]} DEFAULT"  # Haiku alone casts, as the warning says
    with attached(ROUTERS[framework], policy):
        assert ways(run, XS) == [found, "f32 DEFAULT"]
    assert ways(run, XS) == ["f32 DEFAULT", "f32 DEFAULT"]


@every_framework
def test_a_class_policy_without_matmul_inherits_it(framework):
    def compute(x, w):
        return x @ w + jmpx.force_full_precision(dot)(x, w)

    with jmpx.push_policy(ROUTERS[framework], "c=bf16"):
        run = routed(framework, "p=f32,m=highest", compute)
        assert ways(run, XS) == ["bf16 HIGHEST", "f32 HIGHEST"]
        run = routed(framework, "p=f32,m=BF16_BF16_F32_X3", compute)
        assert ways(run, XS) == ["bf16 DEFAULT", f"f32 {X3}"]
        run = routed(framework, "full; */router: m=high", compute)  # a rule goes before it
        assert ways(run, XS) == ["f32 HIGH", "f32 HIGH"]


# What the page says of derivatives that the user's code defines.


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@every_framework
def test_jax_does_not_hand_it_on_to_a_custom_vjp(framework):
    run = routed(framework, "full; */router: m=highest", with_vjp)
    assert ways(run, XS) == ["f32 HIGHEST"]
    assert ways(jax.value_and_grad(lambda x: run(x).sum()), XS) == ["f32 HIGHEST", "f32 DEFAULT"]


@every_framework
def test_a_region_in_16_bits_inside_of_float32_code_with_a_dot_algorithm(framework):
    run = routed(framework, "c=bf16,o=f32")

    def loss(x):
        return (run(x) @ jnp.ones((3, 3))).sum()

    scaling = jmpx.NoOpLossScale()
    gradient = jmpx.filter_value_and_grad(loss, scaling, policy="p=f32,m=BF16_BF16_F32_X3")
    assert sorted(ways(gradient, XS)) == ["bf16 DEFAULT"] * 2 + [f"f32 {X3}"] * 2
    marked = jmpx.full_precision(loss, matmul="BF16_BF16_F32_X3")
    assert ways(marked, XS) == ["bf16 DEFAULT", f"f32 {X3}"]
