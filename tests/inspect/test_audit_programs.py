"""The program that an audit reads: a loss with its gradient, or a step that contains one."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import BF16, F32, zoo
from helpers.findings_of import found, line_of, shape
from jax.core import Tracer

import jmpx

pytestmark = pytest.mark.versions
W, X = shape(3, 2), shape(4, 3)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def with_aux(params, x):
    return loss_fn(params, x), {"norm": jnp.sum(x), "name": "aux"}


def step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda w, g: w - g, params, grads), loss


def with_penalty(params, x):
    grads = jax.grad(loss_fn)(params, x)
    return loss_fn(params, x) + jnp.sum(grads["w"] ** 2)


def with_forces(params, x):
    energy = lambda x: jnp.sum(jnp.tanh(x @ params["w"]))  # noqa: E731
    forces = jax.vmap(jax.grad(energy))(x)
    return jnp.mean(forces**2), {"forces": forces}


def solved(params, x):
    return jnp.mean(jnp.linalg.solve(params["w"].T @ params["w"], x.T[:2]))


def first_the_loss(params, x):
    return step(params, x)[::-1]


def accumulated(params, x):
    def add(carry, x):
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_fn)(params, x)), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.mean(x), params))
    loss, grads = jax.lax.scan(add, zeros, x[:, None])[0]
    return loss, jax.tree.map(jnp.subtract, params, grads)


def trained(params, x):
    params, losses = jax.lax.scan(step, params, x[:, None])
    return losses[-1], params


def trained_from(params, x):
    return trained({"w": jnp.sin(params["w"])}, x)[0]


def of_gradient_function(params, x):
    scale = jmpx.DynamicLossScale()
    result = jmpx.value_and_grad(loss_fn, scale, policy="c=f32")(params, x)
    return result.grads, result.loss_scale


def forward(params, x):
    return x @ params["w"]


@pytest.mark.parametrize(
    "fn, is_step, products",
    [
        # The gradient of a loss is in its first argument: two products, not three. One that is
        # dropped is no work.
        (loss_fn, False, 2),
        (with_aux, False, 2),
        (jax.jit(loss_fn), False, 2),
        (step, True, 2),
        (jax.jit(step), True, 2),
        (lambda *args: step(*args)[1], True, 1),
        (first_the_loss, True, 2),
        (accumulated, True, 2 * 4),
        (trained, True, 2 * 4),
        # Losses that depend on a gradient inside of them.
        (with_penalty, False, 6),
        (with_forces, False, 5),
        (jax.jit(jax.checkpoint(with_forces)), False, 7),
        (trained_from, False, 4 * 4),
        (solved, False, 4),
        (of_gradient_function, True, 2),
        (forward, True, 1),
    ],
)
def test_a_loss_is_differentiated_and_a_step_is_looked_at_as_it_is(fn, is_step, products):
    report = jmpx.inspect.audit(fn)({"w": W}, X)
    assert report.is_step == is_step and sum(row.count for row in report.products) == products

    def call(*args):
        return fn(*args)

    call.__name__ = "loss_fn"  # The name of a function decides nothing.
    named = dataclasses.replace(jmpx.inspect.audit(call)({"w": W}, X), title=report.title)
    assert named == report


def test_the_title_says_if_a_loss_may_be_a_step():
    titles = [jmpx.inspect.audit(fn)({"w": W}, X).title for fn in (trained, accumulated, loss_fn)]
    assert titles == ["trained (a step, or a loss with new parameters)", "accumulated", "loss_fn"]


def test_arguments_have_names():
    def loss(params, z, a):
        h = (z @ params["w"]).astype(BF16)
        first = (h + a) @ h.T
        second = (h + params["b"]) @ h.T
        return jnp.mean(first + second)

    def named(fn, *args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            findings = jmpx.inspect.audit(fn)(*args, **kwargs).findings
        assert {each.name for each in findings} <= {"promotion", "mixed-product"}
        return re.findall(r"argument `(.*?)`", " ".join(each.message for each in findings))

    params = {"w": shape(3, 2, dtype=BF16), "b": shape(2)}
    z, a = shape(4, 3, dtype=BF16), shape(2)
    assert {*named(loss, params, z, a)} == {"a", "params['b']"}
    assert {*named(loss, params, z=z, a=a)} == {"a", "params['b']"}
    assert {*named(lambda *args: loss(*args), params, z, a)} == {"args[2]", "args[0]['b']"}


def test_arguments_that_are_no_arrays_go_in_as_they_are():
    def loss(params, power, name, fn):
        assert (power, name) == (2, "mean")
        return fn(params["w"] ** power)

    assert not jmpx.inspect.audit(loss)({"w": W}, 2, "mean", jnp.mean).is_step


def test_an_error_of_the_function_is_seen():
    def loss(params, x):
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        jmpx.inspect.audit(loss)({"w": W}, X)
    assert caught.value.__context__ is None


def test_modules_of_nnx_stay_as_they_are(rng):
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(8, 3)), F32)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    assert not jmpx.inspect.audit(lambda model, x: jnp.mean(model(x) ** 2))(model, x).is_step
    assert all(map(jnp.array_equal, jax.tree.leaves(nnx.state(model)), jax.tree.leaves(before)))
    assert not isinstance(model.mean[...], Tracer)


def test_no_array_is_made():
    huge = shape(2**20, 2**20)
    assert jmpx.inspect.audit(step)({"w": huge}, huge).is_step


# Lines and paths.


def located(x):
    y = jnp.where(x > 0, x, -1e4)
    z = jnp.where(x > 1, y, -1e9)  # <-
    return jnp.sum(z)


def test_places_are_lines_of_the_user():
    with jax.numpy_dtype_promotion("standard"):
        ones = jnp.ones((3, 3), jnp.float16)
        jnp.where(ones > 0, ones, -1e9)  # JAX has traced it before, elsewhere
        x = shape(3, 3, dtype=jnp.float16)
        (finding,) = found(jax.jit(located), x, names=("constant-range",))
    assert (finding.place.line, finding.place.function) == (line_of(located), "located")
    assert finding.place.file == __file__
    assert str(finding.place).endswith(f"{line_of(located)} (located)")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "framework, road",
    [("haiku", "modules"), ("linen", "autocast"), ("equinox", "modules"), ("nnx", "autocast")],
)
def test_each_product_is_in_its_module_and_its_rule_selects_no_other(framework, road):
    net = zoo.outlined(framework, zoo.nested, jnp.ones((2, 3)))
    root = net.words("<net/>")
    paths = [root + path for path in ("block/inner", "block/outer", "first", "head")]

    def wide(policy):
        """Findings about products in float32, beside one in 16 bits."""
        run = jmpx.autocast(net.apply, policy) if road == "autocast" else net.under(policy)

        def loss(model, x, low):
            return jnp.mean(run(model, x)) + jnp.sum(low @ low).astype(F32)

        args, names = (net.model, shape(2, 3), shape(2, 2, dtype=BF16)), ("platform-product",)
        return sorted(found(loss, *args, names=names, platform="tpu"), key=lambda each: each.scope)

    policy = "c=bf16,o=f32; */first: full; */block/*: full; */head: full"
    findings = wide(policy)
    assert [each.scope for each in findings] == paths
    policy = "; ".join([policy, *(each.rule for each in findings[::2])])
    assert [each.scope for each in wide(policy)] == paths[1::2]


POLICIES = ["c=bf16", "c=bf16; */head: full", "by=modules,c=bf16", "by=arguments,c=bf16"]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_jitted_step_that_makes_the_model_names_its_modules(framework, policy):
    x = jnp.ones((2, 3))
    net = zoo.build(framework, zoo.mlp, x)
    loss = lambda model, x: jnp.mean(net.apply(model, x) ** 2)  # noqa: E731
    leaves, treedef = jax.tree.flatten(net.model)
    if framework == "nnx":
        graph, state = nnx.split(net.model)
        leaves, make = state, lambda state: nnx.merge(graph, state)
    elif framework == "equinox":
        leaves, static = eqx.partition(net.model, eqx.is_array)
        make = lambda leaves: eqx.combine(leaves, static)  # noqa: E731
    else:
        make = treedef.unflatten

    @jax.jit
    def step(leaves, x):
        return jmpx.value_and_grad(loss, jmpx.NoOpLossScale(), policy=policy)(make(leaves), x)

    def paths(fn, *args):
        scopes = jmpx.inspect.audit(fn)(*args).scopes
        return {(scope.path, scope.flops) for scope in scopes if scope.module}

    names = paths(jmpx.apply_policy(loss, policy), net.model, x)
    assert any(path.endswith("head") for path, _ in names)
    assert paths(step, leaves, x) == names
