"""Autocast marks the operations of modules: no mark is left outside of it."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from helpers.four_frameworks import (
    ALL,
    BATCH,
    FRAMEWORKS,
    HAIKU,
    WIDTHS,
    EquinoxBlock,
    EquinoxLinear,
    EquinoxNet,
    NNXBlock,
    NNXNet,
    X,
    assert_selected,
    equinox_net,
    in_words_of,
    products,
)
from helpers.jaxprs import stacks, trace
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from jmpx._jaxprs.marks import Module, is_own_name


def hidden(net, differentiable=True):
    """Calls a network in every kind of inner function that autocast enters."""

    rule = jax.custom_jvp(lambda params, x: net(params, x))
    rule.defjvp(lambda primals, tangents: jax.jvp(net, primals, tangents))
    rule = net if differentiable else rule

    def f(params, x):
        fixed = jax.tree.map(lax.stop_gradient, params)
        with jax.named_scope("mine"):
            y = net(params, x) + rule(params, x)
            y += jax.checkpoint(net)(params, x) + jax.jit(net)(params, x)
            y += lax.scan(lambda c, _: (c + net(params, x), None), y, None, 2)[0]
            y += lax.while_loop(
                lambda c: c[0, 0] > 1e9, lambda c: c + net(fixed, x), jnp.zeros((BATCH, 7))
            )
            y += lax.cond(x[0, 0] > 0, net, lambda p, x: -net(p, x), params, x)
        return y

    return f


@pytest.mark.filterwarnings("ignore:JAX cannot trace")  # other tests are about that
@pytest.mark.thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_mark_leaves_autocast(framework):
    apply, model, _, _ = FRAMEWORKS[framework]
    policy = in_words_of(framework, "c=bf16; <Own>Block: full; <Linear>: bf16")
    f = jmpx.autocast(hidden(apply), policy)
    both = jax.value_and_grad(lambda model, x: f(model, x).sum())
    for g in (jmpx.autocast(hidden(apply, differentiable=False), policy), both):
        found = stacks(jax.make_jaxpr(g)(model, X))
        assert any("mine" in stack for stack in found)
        assert not [stack for stack in found if "jmpx.module" in stack]
    lowered = jax.jit(both).lower(model, X)
    text = lowered.as_text(debug_info=True)
    assert "mine" in text
    assert "jmpx.module" not in text
    if framework == "haiku":
        compiled = jax.jit(jmpx.autocast(apply, policy)).lower(model, X).compile()
        assert "jmpx.module" not in compiled.as_text()  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_caches_keep_marks_apart(framework):
    apply, model, _, _ = FRAMEWORKS[framework]
    jitted = jax.jit(lambda model, x: lax.scan(lambda c, _: (c, apply(model, x)), 0.0, None, 2)[1])
    policy = in_words_of(framework, "c=bf16; <Own>Block: full")
    plain, cast = {name: {"float32"} for name in WIDTHS}, {"bfloat16"}
    for _ in range(2):  # traced before, under two maps, and after
        assert products(jitted, model, X) == plain
        assert not [s for s in stacks(trace(jitted, model, X)) if "jmpx" in s]
        assert_selected(products(jmpx.autocast(jitted, policy), model, X), "inner outer")
        assert set().union(*products(jmpx.autocast(jitted), model, X).values()) == cast


@pytest.mark.sampled(4)
@pytest.mark.parametrize("outer, inner", [("full", "bf16"), ("bf16", "full"), ("bf16", None)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_autocast_within_autocast(framework, outer, inner):
    apply, model, _, _ = FRAMEWORKS[framework]
    inner_policy = in_words_of(framework, f"c=bf16; <Own>Block: {inner}" if inner else "c=full")
    outer_policy = in_words_of(framework, f"c=bf16; <Own>Block: {outer}")

    def f(model, x):
        return jmpx.autocast(apply, inner_policy)(model, x) + 0 * apply(model, x)

    g = jmpx.autocast(f, outer_policy)
    found = stacks(jax.make_jaxpr(g)(model, X))
    assert not [stack for stack in found if "jmpx.module" in stack]
    within = jmpx.autocast(lambda m, x: jmpx.autocast(apply, inner_policy)(m, x), outer_policy)
    full = {"bf16": "", "full": "inner outer", None: ALL}[inner]  # the inner one has decided
    assert_selected(products(within, model, X), full)


# The modules that the user's function gets and returns.


def test_equinox_modules_come_back_as_they_were():
    model = equinox_net()
    seen = []

    def step(model, other, x):
        seen.append(model.block)
        loss, grads = eqx.filter_value_and_grad(lambda m: m(x).sum())(model)
        new = jax.tree.map(lambda p, g, o: p - 0.1 * g + 0 * o, model, grads, other)
        return loss, new, {"grads": grads, "part": model.block.inner}, model.block

    policy = "c=bf16; EquinoxLinear: full; EquinoxBlock: bf16"
    _, new, parts, block = jax.eval_shape(jmpx.autocast(step, policy), model, model, X)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert jax.tree.structure(parts["grads"]) == jax.tree.structure(model)
    assert type(parts["part"]) is type(block.inner) is EquinoxLinear
    assert type(block) is EquinoxBlock
    assert isinstance(seen[0], EquinoxBlock)
    assert type(seen[0]).__name__ == "EquinoxBlock"


def test_equinox_state_passes():
    class Normalized(eqx.Module):
        linear: EquinoxLinear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    norm = functools.partial(eqx.nn.BatchNorm, 4, "batch", mode="batch")
    model, state = eqx.nn.make_with_state(
        lambda: Normalized(EquinoxLinear(jnp.ones((3, 4))), norm())
    )()
    f = jmpx.autocast(lambda *args: args[0](*args[1:]), "c=bf16; EquinoxLinear: full")
    call = jax.vmap(f, axis_name="batch", in_axes=(None, 0, None), out_axes=(0, None))
    _, new = call(model, X, state)
    assert float(new.get(model.norm.batch_state_index)[0][0]) == pytest.approx(0.03)


@pytest.mark.thorough
def test_nnx_modules_come_back_as_they_were():
    model = NNXNet(nnx.Rngs(0))
    model.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))  # pyright: ignore[reportAttributeAccessIssue]
    classes = {type(node) for _, node in nnx.iter_graph(model)}

    def f(model, x):
        assert isinstance(model.block, NNXBlock)
        model.copy = nnx.clone(model.head)
        return model(model.norm(x)), nnx.clone(model)

    policy = "c=bf16; NNXBlock: full; Linear: full; BatchNorm: full"
    y, clone = jmpx.autocast(f, policy)(model, X)
    assert y.shape == (BATCH, 7)
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0  # pyright: ignore[reportAttributeAccessIssue]  # its state has moved
    for module in (model, clone, model.copy):  # pyright: ignore[reportAttributeAccessIssue]
        assert {type(node) for _, node in nnx.iter_graph(module)} <= classes
    with pytest.raises(ZeroDivisionError):
        jmpx.autocast(lambda model, x: 1 / 0, policy)(model, X)
    assert {type(node) for _, node in nnx.iter_graph(model)} <= classes


def test_no_rule_of_modules_no_marks():
    model = equinox_net()
    for policy in ("c=bf16", "c=bf16; op.tanh: full"):
        names = []

        def f(model, x, names=names):
            assert type(model) is EquinoxNet
            names += stacks(jax.make_jaxpr(HAIKU.apply)(FRAMEWORKS["haiku"][1], x))
            return model(x)

        jax.make_jaxpr(jmpx.autocast(f, policy))(model, X)
        assert any("block" in name for name in names)
        assert not any("jmpx" in name for name in names)


class Attending(nn.Dense):
    pass


# A module of a path, the name of a scope beside its mark, and whether its framework named it so.
NAMES = [
    ("net/block/linear", hk.Linear, "linear", True),
    ("net/block/linear", hk.Linear, "block", False),
    ("net/block/linear", hk.Linear, "Linear", True),
    ("block/Dense_0", nn.Dense, "Dense_0.attend", True),
    ("block/Dense_0", nn.Dense, "Dense_1.attend", False),
    ("", Attending, "Attending", True),
    ("", Attending, "Dense", True),
    ("layers/0", eqx.nn.Linear, "eqx.nn.Linear", True),
    ("layers/0", eqx.nn.Linear, "eqx.nn.Conv", False),
]


@pytest.mark.parametrize(("path", "cls", "name", "is_own"), NAMES)
def test_which_scopes_beside_a_mark_are_the_modules_own(path, cls, name, is_own):
    assert is_own_name(Module(cls, path), name) == is_own


@pytest.mark.parametrize("order", ["plain first", "autocast first"])
def test_a_jitted_model_is_traced_with_marks_and_without(order):
    _, params, _, _ = FRAMEWORKS["haiku"]
    jitted = jax.jit(lambda params, x: HAIKU.apply(params, x))
    cast = jmpx.autocast(jitted, "c=bf16; HaikuHead: full")

    def plain():
        assert not any("jmpx.module" in stack for stack in stacks(trace(jitted, params, X)))

    def under_autocast():
        assert_selected(products(cast, params, X), ["head"])

    calls = [plain, under_autocast]
    for call in calls if order == "plain first" else calls[::-1]:
        call()
