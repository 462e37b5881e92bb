"""One policy map string means the same under autocast as in the adapters of all frameworks."""

import dataclasses
import functools
import threading
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, warns_once, zoo
from helpers.autocast import assert_ran, dtypes_of
from helpers.jaxprs import FULL, LOW, dots, equations, equations_of, stacks, trace
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

# The layers of `zoo.nested`. Each has other widths, so that the shapes of a product name its layer.
WIDTHS = {"first": (3, 4), "inner": (4, 5), "outer": (5, 6), "head": (6, 7)}
BATCH, ALL = 2, " ".join(WIDTHS)
X = np.ones((BATCH, 3), np.float32)


def net_of(framework):
    return zoo.drawn(framework, zoo.nested, *X.shape)


def products(f, *args):
    """Returns, for each layer, the dtypes in which its products run, forward and backward."""
    found = {}
    for eqn in equations(trace(f, *args)):
        if eqn.primitive.name != "dot_general":
            continue
        dims = {n for var in (*eqn.invars, *eqn.outvars) for n in var.aval.shape} - {1, BATCH}
        (name,) = [name for name, widths in WIDTHS.items() if set(widths) == dims]
        found.setdefault(name, set()).update(var.aval.dtype.name for var in eqn.invars)
    assert set(found) == set(WIDTHS)
    return found


def assert_selected(found, full):
    expected = {name: {"float32" if name in full else "bfloat16"} for name in WIDTHS}
    assert found == expected


STRINGS = {
    "c=bf16; <Linear>: full": ALL,
    "c=bf16; <module.Linear>: full; *head: bf16": "first inner outer",
    "c=bf16; <Net>: full; *first: bf16": "inner outer head",  # also the class of the block's base
    "c=bf16; *first: full; <net/>block/outer: full": "first outer",
    "c=bf16; *block/*: full": "inner outer",
    "c=bf16; *: full": ALL,
    "c=bf16; <Inner>: full; */inner: bf16": "outer",
    "c=bf16; */inner: bf16; <Inner>: full": "outer",
    "c=bf16; <Net>: full; <Inner>: bf16; */inner: full": "first inner head",
    "c=bf16; *head: bf16; <Linear>: full": ALL,
    "c=full; <Inner>: bf16": "first head",
}


@pytest.mark.parametrize(
    "policy, framework", [(policy, zoo.FRAMEWORKS[i % 4]) for i, policy in enumerate(STRINGS)]
)
def test_one_string_means_the_same(framework, policy):
    net = net_of(framework)
    string = net.words(policy)
    found = products(lambda x: jmpx.autocast(net.apply, string)(net.model, x), X)
    assert_selected(found, STRINGS[policy])
    by_modules = dataclasses.replace(jmpx.get_policy_map(string), by="modules")
    applied = jmpx.apply_policy(net.apply, by_modules)
    assert products(lambda x: applied(net.model, x), X) == found


def of_scan(f):
    return lambda model, x: lax.scan(lambda c, _: (c, f(model, x + c)), 0.0, None, 3)[1]


def of_vmap(f):
    return lambda model, x: jax.vmap(lambda x: f(model, x[None]))(x)


def of_gradient(f):
    def value_and_grads(model, x):
        arrays, rest = eqx.partition(model, eqx.is_array)
        loss, grads = jax.value_and_grad(lambda a: f(eqx.combine(a, rest), x).sum())(arrays)
        return loss, jax.tree.leaves(grads)

    return value_and_grads


@pytest.mark.parametrize(
    "framework, transform, outside",
    [
        ("haiku", lambda f: jax.jit(of_gradient(jax.checkpoint(f))), False),
        ("equinox", lambda f: of_scan(of_vmap(f)), False),
        ("nnx", lambda f: of_scan(of_vmap(f)), True),
        ("haiku", of_gradient, True),
    ],
)
def test_selectors_under_transformations(framework, transform, outside):
    _, apply, model = net = net_of(framework)
    policy = net.words("c=bf16; <Inner>: full; */inner: bf16; *head: full")
    cast = functools.partial(jmpx.autocast, policy=policy)
    f = transform(cast(apply)) if outside else cast(transform(apply))
    assert_selected(products(lambda x: f(model, x), X), "outer head")


class EquinoxLinear(eqx.Module):  # one's own: its calls have no scope
    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


class Local(eqx.Module):
    linear: EquinoxLinear

    def __call__(self, x):
        return self.linear(x)

    def encode(self, x):
        return self.linear(x)

    @eqx.filter_jit
    def jitted(self, x):
        return self.encode(x)


def test_methods_and_wrappers_of_equinox():
    model = Local(EquinoxLinear(jnp.ones((3, 4))))
    partials = functools.partial(model.encode), jax.tree_util.Partial(model.encode)
    for method in (model.encode, model.jitted, *partials, eqx.filter_vmap(model.encode)):
        for policy in ("c=bf16; Local: full", "c=bf16; linear*: full"):
            cast = jmpx.autocast(method, policy)
            assert dots(lambda x, cast=cast: cast(x), X) == [FULL]


class Store(eqx.Module):  # a container: its modules are called, it is not
    a: EquinoxLinear
    b: EquinoxLinear


class Holder(eqx.Module):
    store: Store
    last: EquinoxLinear

    def __call__(self, x):
        return self.last(self.store.b(self.store.a(x)))


@pytest.mark.parametrize("policy", ["c=bf16; Store: full", "c=bf16; store*: full; last*: bf16"])
def test_the_policy_of_a_container_is_that_of_its_modules(policy):
    w = jnp.ones((3, 3))
    model = Holder(Store(EquinoxLinear(w), EquinoxLinear(w)), EquinoxLinear(w))
    for wrap in (jmpx.autocast, jmpx.equinox.with_policies):
        assert dots(lambda x, wrap=wrap: wrap(model, policy)(x), X) == [FULL, FULL, LOW]


def test_a_view_within_autocast():
    model = Local(EquinoxLinear(jnp.ones((3, 4))))
    with jmpx.push_policy(Local, "full"):  # which is kept by the class itself
        f = jmpx.autocast(lambda m, x: jmpx.equinox.with_policies(m)(x), "c=bf16; Local: bf16")
        jaxpr = jax.make_jaxpr(lambda x: f(model, x))(X)
    assert "f32[2,4] = dot_general" in str(jaxpr)  # a float32 policy is an island
    assert not [stack for stack in stacks(jaxpr) if "jmpx.module" in stack]


def test_full_precision_goes_before_classes():
    _, apply, params = net_of("haiku")
    f = jmpx.autocast(jmpx.full_precision(apply), "c=bf16; Linear: bf16; *: bf16")  # pyright: ignore[reportArgumentType, reportCallIssue]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rules match nothing
        assert_selected(products(f, params, X), ALL)


def test_a_framework_names_modules_that_are_closed_over():
    linear = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    called = jmpx.autocast(lambda x: linear(x), "c=bf16; Linear: full")
    assert "bf16" not in str(jax.make_jaxpr(called)(X[0]))


# The marks of modules: none is left outside of autocast.


def hidden(net):
    """Calls a network in every kind of inner function that autocast enters."""

    def f(params, x):
        fixed = jax.tree.map(lax.stop_gradient, params)
        with jax.named_scope("mine"):
            y = net(params, x) + jax.checkpoint(net)(params, x) + jax.jit(net)(params, x)
            y += lax.scan(lambda c, _: (c + net(params, x), None), y, None, 2)[0]
            zeros = jnp.zeros((BATCH, 7))
            y += lax.while_loop(lambda c: c[0, 0] > 1e9, lambda c: c + net(fixed, x), zeros)
            return y + lax.cond(x[0, 0] > 0, net, lambda p, x: -net(p, x), params, x)

    return f


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:JAX cannot trace")  # other tests are about that
def test_no_mark_leaves_autocast():
    _, apply, model = net_of("haiku")
    f = jmpx.autocast(hidden(apply), "c=bf16; HaikuInner: full; Linear: bf16")
    both = jax.value_and_grad(lambda model, x: f(model, x).sum())
    for g in (f, both):
        found = stacks(jax.make_jaxpr(g)(model, X))
        assert any("mine" in stack for stack in found)
        assert not [stack for stack in found if "jmpx.module" in stack]
    text = jax.jit(f).lower(model, X).as_text(debug_info=True)
    assert "mine" in text and "jmpx.module" not in text


def test_caches_keep_marks_apart():
    _, apply, model = net_of("linen")
    jitted = jax.jit(lambda model, x: lax.scan(lambda c, _: (c, apply(model, x)), 0.0, None, 2)[1])
    plain, cast = {name: {"float32"} for name in WIDTHS}, {"bfloat16"}
    for _ in range(2):  # traced before, under two maps, and after
        assert products(jitted, model, X) == plain
        assert not [s for s in stacks(trace(jitted, model, X)) if "jmpx" in s]
        low = products(jmpx.autocast(jitted, "c=bf16; LinenInner: full"), model, X)
        assert_selected(low, "inner outer")
        assert set().union(*products(jmpx.autocast(jitted), model, X).values()) == cast


@pytest.mark.parametrize(
    "framework, outer, inner, expected",
    [
        ("haiku", "full", "c=bf16; <Inner>: bf16", ""),
        ("nnx", "bf16", "c=bf16; <Inner>: full", "inner outer"),
        ("equinox", "bf16", "c=full", ALL),
    ],
)
def test_autocast_within_autocast(framework, outer, inner, expected):
    _, apply, model = net = net_of(framework)
    cast = jmpx.autocast(apply, net.words(inner))
    policy = net.words(f"c=bf16; <Inner>: {outer}")
    within = jmpx.autocast(lambda model, x: cast(model, x), policy)
    assert_selected(products(within, model, X), expected)  # the inner one has decided
    beside = jmpx.autocast(lambda model, x: cast(model, x) + 0 * apply(model, x), policy)
    found = stacks(jax.make_jaxpr(beside)(model, X))
    assert not [stack for stack in found if "jmpx.module" in stack]


def test_equinox_modules_come_back_as_they_were():
    model = net_of("equinox").model

    def step(model, other, x):
        assert type(model.block).__name__ == "EquinoxInner"
        grads = eqx.filter_grad(lambda m: m(x).sum())(model)
        new = jax.tree.map(lambda p, g, o: p - 0.1 * g + 0 * o, model, grads, other)
        return new, grads, model.block, model.block.inner

    policy = "c=bf16; Linear: full; EquinoxInner: bf16"
    *trees, block, inner = jax.eval_shape(jmpx.autocast(step, policy), model, model, X)
    assert [*map(jax.tree.structure, trees)] == [jax.tree.structure(model)] * 2
    assert type(inner) is type(block.inner) is eqx.nn.Linear
    assert type(block) is type(model.block)


class Normalized(eqx.Module):
    linear: EquinoxLinear
    norm: eqx.nn.BatchNorm

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def test_equinox_state_passes():
    linear = EquinoxLinear(jnp.ones((3, 4)))
    make = lambda: Normalized(linear, eqx.nn.BatchNorm(4, "batch", mode="batch"))  # noqa: E731
    model, state = eqx.nn.make_with_state(make)()
    f = jmpx.autocast(lambda m, *args: m(*args), "c=bf16; EquinoxLinear: full")
    call = jax.vmap(f, axis_name="batch", in_axes=(None, 0, None), out_axes=(0, None))
    _, new = call(model, X, state)
    assert float(new.get(model.norm.batch_state_index)[0][0]) == pytest.approx(0.03)


@pytest.mark.thorough
@pytest.mark.versions
def test_nnx_modules_come_back_as_they_were():
    model = zoo.build("nnx", zoo.nested, X).model
    model.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))  # pyright: ignore[reportAttributeAccessIssue]
    classes = {type(node) for _, node in nnx.iter_graph(model)}

    def f(model, x):
        assert isinstance(model.block, zoo.NNXInner)
        model.copy = nnx.clone(model.head)
        return model(model.norm(x)), nnx.clone(model)

    policy = "c=bf16; NNXInner: full; Linear: full; BatchNorm: full"
    y, clone = jmpx.autocast(f, policy)(model, X)
    assert y.shape == (BATCH, 7)
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0  # pyright: ignore[reportAttributeAccessIssue]  # its state has moved
    for module in (model, clone, model.copy):  # pyright: ignore[reportAttributeAccessIssue]
        assert {type(node) for _, node in nnx.iter_graph(module)} <= classes
    with pytest.raises(ZeroDivisionError):
        jmpx.autocast(lambda model, x: 1 / 0, policy)(model, X)
    assert {type(node) for _, node in nnx.iter_graph(model)} <= classes


def test_no_rule_of_modules_no_marks():
    (_, call, model), (_, apply, params) = net_of("nnx"), net_of("haiku")
    for policy in ("c=bf16", "c=bf16; op.tanh: full"):
        names = []

        def f(model, x, names=names):
            assert type(model) is zoo.NNXNet
            names += stacks(jax.make_jaxpr(apply)(params, x))
            return call(model, x)

        jax.make_jaxpr(jmpx.autocast(f, policy))(model, X)
        assert any("block" in name for name in names)
        assert not any("jmpx" in name for name in names)


# Autocast inside of autocast: the same policies change nothing, others make an island.


def model(x, w):
    return jnp.tanh(x @ w)


def loss_of(model):
    return lambda x, w: (model(x, w) @ w).sum()


def scanned(f):
    return lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0]


@pytest.mark.filterwarnings("ignore:save= leaves")  # what the test checkpoints
@pytest.mark.parametrize(
    "through, policy, save",
    [
        (jax.jit, "c=bf16; op.tanh: f32", None),
        (scanned, "c=bf16", "products"),
        (jax.checkpoint, "c=bf16,m=highest; op.dot_general: f32", None),
    ],
)
def test_the_same_map_inside_changes_nothing(pair, through, policy, save):
    inner = through(jmpx.autocast(model, policy, save=save))
    outer = jmpx.autocast(loss_of(inner), policy, save=save)
    plain = jmpx.autocast(loss_of(through(model)), policy, save=save)
    assert dtypes_of(jax.grad(outer), *pair) == dtypes_of(jax.grad(plain), *pair)
    assert_same_bits(outer(*pair), plain(*pair))


def test_rules_are_counted_once(pair):
    """No warning of the inner call: its rule is met outside of it."""
    policy = "c=bf16; head: f32; op.sin: f32"
    head = jax.named_scope("head")(lambda x, w: jmpx.autocast(model, policy)(x, jnp.sin(w)))
    jax.eval_shape(jmpx.autocast(head, policy), *pair)
    with warns_once(__file__, "'op.cos: f32'"):
        inner = jmpx.autocast(model, "c=bf16; op.cos: f32")
        jax.eval_shape(jmpx.autocast(loss_of(inner), "c=bf16; op.cos: f32"), *pair)


def test_other_maps_are_islands(pair):
    """Another map, another save= or an output of its own is no plain call."""
    cast, other = jmpx.autocast(model, "c=bf16"), jmpx.autocast(model, "c=f16")
    for island, dtypes in (
        (loss_of(other), "bfloat16 float16"),
        (loss_of(jmpx.autocast(model, "full")), "bfloat16 float32"),
        (jmpx.autocast(lambda x, w: cast(x, w) @ w, "c=f16"), "bfloat16 float16"),
    ):
        assert_ran(jmpx.autocast(island, "c=bf16"), *pair, dot_general=dtypes)
    narrow = jmpx.autocast(model, "c=bf16", output="f16")
    outer = jmpx.autocast(lambda x, w: narrow(x, w), "c=bf16")
    assert jax.eval_shape(outer, *pair).dtype == jnp.float16
    saving = jmpx.autocast(lambda x, w: jnp.sin(model(x, w) @ w), "c=bf16", save="products")
    names = {eqn.primitive.name for eqn in equations_of(jmpx.autocast(saving, "c=bf16"), *pair)}
    assert names & {"checkpoint", "remat2"}


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_jitted_functions_are_not_shared_with_the_outside(pair, first):
    jitted = jax.jit(jmpx.autocast(model, "c=bf16", output="traced"))
    outer = jmpx.autocast(loss_of(jitted), "c=bf16")
    calls = {"inside": (outer, "bfloat16"), "outside": (loss_of(jitted), "bfloat16 float32")}
    for name in sorted(calls, key=lambda name: name != first):
        assert_ran(calls[name][0], *pair, dot_general=calls[name][1])


def test_other_threads_are_outside(pair):
    found = []
    inner = jmpx.autocast(model, "c=bf16")

    def loss_fn(x, w):
        other = threading.Thread(target=lambda: found.append(dtypes_of(inner, *pair)))
        other.start()
        other.join()
        return inner(x, w)

    jmpx.autocast(loss_fn, "c=bf16")(*pair)
    assert found[0]["dot_general"] == {"bfloat16"}


def test_after_an_error_it_is_over(pair):
    def broken(x, w):
        raise KeyError

    with pytest.raises(KeyError):
        jmpx.autocast(broken, "c=bf16")(*pair)
    assert_ran(jmpx.autocast(model, "c=bf16"), *pair, dot_general="bfloat16")


def test_a_part_of_a_model_under_the_same_map(pair):
    """The wrapped part of a model that is an argument has the marks of the outer call."""
    mlp = eqx.nn.MLP(4, 4, 4, 2, key=jax.random.key(0))
    policy = "c=bf16; Linear: f32"
    part = eqx.tree_at(lambda m: m.layers[1], mlp, jmpx.autocast(mlp.layers[1], policy))
    run = jmpx.autocast(lambda model, x: jax.vmap(model)(x), policy)
    assert_ran(lambda x: run(part, x), pair[0], dot_general="float32")
