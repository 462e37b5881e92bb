"""The program that an audit looks at: a loss with its gradient, or a step that contains one."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers.four_frameworks import FRAMEWORKS
from jax.core import Tracer

import jmpx
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program

POLICY = "c=bf16,o=f32; */inner: full"
W, X = jax.ShapeDtypeStruct((3, 2), "float32"), jax.ShapeDtypeStruct((4, 3), "float32")


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def with_aux(params, x):
    return loss_fn(params, x), {"norm": jnp.sum(x), "name": "aux"}


def step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda w, g: w - g, params, grads), loss


def forward(params, x):
    return x @ params["w"]


def accuracy(labels, guesses):
    return jnp.mean(labels == guesses, dtype=jnp.float32)


@pytest.mark.parametrize("fn", [loss_fn, with_aux, jax.jit(loss_fn)])
def test_a_loss_is_differentiated_in_its_first_argument(fn):
    program = traced_program(fn, ({"w": W}, X))
    assert program.is_differentiated and program.has_backward
    assert (3, 2) in [aval.shape for aval in program.jaxpr.out_avals]
    assert (4, 3) not in [aval.shape for aval in program.jaxpr.out_avals]


@pytest.mark.parametrize("fn", [step, jax.jit(step), lambda *args: step(*args)[1]])
def test_a_step_that_contains_its_gradient_is_not_differentiated(fn):
    program = traced_program(fn, ({"w": W}, X))
    assert not program.is_differentiated and program.has_backward


def with_penalty(params, x):
    grads = jax.grad(loss_fn)(params, x)
    return loss_fn(params, x) + jnp.sum(grads["w"] ** 2)


def scaled(params, x):
    def scan(total, _):
        return total + jax.checkpoint(loss_fn)(params, x), None

    return jax.lax.scan(scan, jnp.float32(0), length=2)[0]


@pytest.mark.parametrize(
    "fn", [loss_fn, with_aux, step, forward, with_penalty, jax.jit(with_penalty), scaled]
)
def test_the_name_of_a_function_decides_nothing(fn):
    def as_named(name):
        def call(*args):
            return fn(*args)

        call.__name__ = name
        return traced_program(call, ({"w": W}, X))

    by_name, plain = as_named("loss_fn"), as_named("fn")
    assert str(by_name.jaxpr) == str(plain.jaxpr)
    assert by_name.is_differentiated == plain.is_differentiated
    assert by_name.has_backward == plain.has_backward
    assert by_name.policies == plain.policies


def test_a_step_of_the_gradient_functions_is_not_differentiated():
    def step(params, scale, x):
        result = jmpx.filter_value_and_grad(loss_fn, scale, policy="c=f16")(params, x)
        return result.grads, result.scaling

    program = traced_program(step, ({"w": W}, jmpx.DynamicLossScale(), X))
    assert not program.is_differentiated and program.has_backward


def test_any_other_function_is_looked_at_as_it_is():
    program = traced_program(forward, ({"w": W}, X))
    assert not program.is_differentiated and not program.has_backward


def test_inputs_have_the_names_of_arguments():
    assert traced_program(loss_fn, ({"w": W}, X)).names == ["params['w']", "x"]
    assert traced_program(loss_fn, ({"w": W},), {"x": X}).names == ["params['w']", "x"]

    def unordered(params, z, a):
        return loss_fn(params, z) + jnp.sum(a)

    program = traced_program(unordered, ({"w": W},), {"z": X, "a": jnp.ones(5)})
    shapes = {name: aval.shape for name, aval in zip(program.names, program.arrays, strict=True)}
    assert shapes == {"params['w']": W.shape, "z": X.shape, "a": (5,)}
    named = traced_program(lambda *args: loss_fn(*args), ({"w": W}, X))
    assert named.names == ["args[0]['w']", "args[1]"]


def test_arguments_that_are_no_arrays_go_in_as_they_are():
    def loss(params, power, name, fn):
        assert (power, name) == (2, "mean")
        return fn(params["w"] ** power)

    assert traced_program(loss, ({"w": W}, 2, "mean", jnp.mean)).is_differentiated


def test_a_loss_without_parameters_is_refused():
    with pytest.raises(ValueError, match="one without a floating array in it: pass the parameters"):
        traced_program(accuracy, (jnp.arange(3), jnp.arange(3)))
    with pytest.raises(TypeError, match="Expected a loss or a train step"):
        traced_program(3, ())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_policies_that_held_are_known(name):
    _, model, adapted, _ = FRAMEWORKS[name]
    policies = traced_program(lambda *args: jnp.mean(adapted(POLICY)(*args)), (model, X)).policies
    by_name = {path.rpartition("/")[2]: policy for path, policy in policies.items()}
    assert by_name["inner"] == "params=float32,compute=float32,output=bfloat16"
    assert by_name["head"] == "params=float32,compute=bfloat16,output=bfloat16"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_program_with_further_rules_is_the_one_whose_map_has_them(name):
    _, model, adapted, _ = FRAMEWORKS[name]
    rule = jmpx.get_policy_map(f"{POLICY}; */head: c=f16,o=f32").rules[-1]

    def traced(policy_map):
        run = jax.jit(lambda *args: jnp.mean(adapted(policy_map)(*args)))
        return run, traced_program(run, (model, X))

    (run, program), (_, expected) = traced(POLICY), traced(f"{POLICY}; {rule}")
    before = jax.make_jaxpr(run)(model, jnp.ones((4, 3)))
    tried = program.with_rules(rule)
    assert str(tried.jaxpr) == str(expected.jaxpr) != str(program.jaxpr)
    assert tried.policies == expected.policies and program.takers
    assert str(jax.make_jaxpr(run)(model, jnp.ones((4, 3)))) == str(before)


def test_autocast_takes_further_rules_too():
    def traced(policy_map):
        return traced_program(jmpx.autocast(loss_fn, policy_map), ({"w": W}, X))

    (rule,) = jmpx.get_policy_map("op.dot_general: f32").rules
    program, expected = traced("c=bf16"), traced("c=bf16; op.dot_general: f32")
    assert program.takers == {"jmpx.autocast"}
    assert str(program.with_rules(rule).jaxpr) == str(expected.jaxpr) != str(program.jaxpr)


def test_a_model_may_be_joined_with_a_part_that_is_closed_over():
    model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params, x):
        return jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)

    graph = Graph(traced_program(loss, (params, X)))
    paths = {graph.path(node) for node in graph.nodes if node.name == "dot_general"}
    assert len(paths) == 1 and "Linear" in paths.pop()  # the names that Equinox gives its layers


def test_an_error_of_the_function_is_seen():
    def loss(params, x):
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        traced_program(loss, ({"w": W}, X))
    assert caught.value.__context__ is None


def test_modules_of_nnx_stay_as_they_are(rng):
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    program = traced_program(lambda model, x: jnp.mean(model(x) ** 2), (model, x))
    assert program.is_differentiated
    assert all(map(jnp.array_equal, jax.tree.leaves(nnx.state(model)), jax.tree.leaves(before)))
    assert not isinstance(model.mean[...], Tracer)


def test_no_array_is_made():
    huge = jax.ShapeDtypeStruct((2**20, 2**20), "float32")
    module = nn.Dense(2**20)
    params = jax.eval_shape(module.init, jax.random.key(0), huge)

    def step(params, state, x):
        grads = jax.grad(lambda params: jnp.asarray(module.apply(params, x)).mean())(params)
        return optax.sgd(1e-3, momentum=0.9).update(grads, state, params)

    state = jax.eval_shape(optax.sgd(1e-3, momentum=0.9).init, params)
    assert traced_program(step, (params, state, huge)).has_backward
