"""One policy map string means the same under autocast as in the adapters of all frameworks."""

import functools
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

# One model in four frameworks: first, block/inner, block/outer and head, of other widths each, so
# that a product tells of itself whose it is, forward and backward.
WIDTHS = {"first": (3, 4), "inner": (4, 5), "outer": (5, 6), "head": (6, 7)}
BATCH = 2


class HaikuBase(hk.Module):
    pass


class HaikuHead(hk.Linear):
    pass


class HaikuBlock(HaikuBase):
    def __call__(self, x):
        return hk.Linear(6, name="outer")(jnp.tanh(hk.Linear(5, name="inner")(x)))


class HaikuNet(hk.Module):
    def __call__(self, x):
        x = HaikuBlock(name="block")(hk.Linear(4, name="first")(x))
        return HaikuHead(7, name="head")(x)


class LinenBase(nn.Module):
    pass


class LinenHead(nn.Dense):
    pass


class LinenBlock(LinenBase):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(6, name="outer")(jnp.tanh(nn.Dense(5, name="inner")(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = LinenBlock(name="block")(nn.Dense(4, name="first")(x))
        return LinenHead(7, name="head")(x)


class NNXBase(nnx.Module):
    pass


class NNXHead(nnx.Linear):
    pass


class NNXBlock(NNXBase):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 6, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.block = nnx.Linear(3, 4, rngs=rngs), NNXBlock(rngs)
        self.head = NNXHead(6, 7, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block(self.first(x)))


class EquinoxLinear(eqx.Module):  # one's own: its calls have no scope
    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


class EquinoxBase(eqx.Module):
    pass


class EquinoxHead(EquinoxLinear):
    pass


class EquinoxBlock(EquinoxBase):
    inner: EquinoxLinear
    outer: EquinoxLinear

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


class EquinoxNet(eqx.Module):
    first: EquinoxLinear
    block: EquinoxBlock
    head: EquinoxHead

    def __call__(self, x):
        return self.head(self.block(self.first(x)))


HAIKU = hk.without_apply_rng(hk.transform(lambda x: HaikuNet(name="net")(x)))
LINEN = LinenNet()


def equinox_net():
    first, inner, outer, head = (jnp.full(shape, 0.1) for shape in WIDTHS.values())
    linears = [EquinoxLinear(w) for w in (first, inner, outer)]
    return EquinoxNet(linears[0], EquinoxBlock(*linears[1:]), EquinoxHead(head))


def call(model, x):
    return model(x)


def within(policies, apply, policy_map):
    def wrapper(*args):
        with policies(policy_map):
            return apply(*args)

    return wrapper


def viewing(with_policies, policy_map):
    return lambda model, x: with_policies(model, policy_map)(x)


X = jnp.ones((BATCH, 3))
# Framework: what is called, its parameters or model, the adapter, and the names of its layers.
FRAMEWORKS = {
    "haiku": (
        HAIKU.apply,
        HAIKU.init(jax.random.key(0), X),
        functools.partial(within, jmpx.haiku.policies, HAIKU.apply),
        {"Linear": "Linear", "module.Linear": "haiku.Linear", "net/": "net/", "Own": "Haiku"},
    ),
    "linen": (
        LINEN.apply,
        LINEN.init(jax.random.key(0), X),
        functools.partial(within, jmpx.flax.policies, LINEN.apply),
        {"Linear": "Dense", "module.Linear": "flax.linen.Dense", "net/": "", "Own": "Linen"},
    ),
    "nnx": (
        call,
        NNXNet(nnx.Rngs(0)),
        functools.partial(viewing, jmpx.flax.with_policies),
        {"Linear": "Linear", "module.Linear": "flax.nnx.Linear", "net/": "", "Own": "NNX"},
    ),
    "equinox": (
        call,
        equinox_net(),
        functools.partial(viewing, jmpx.equinox.with_policies),
        {
            "Linear": "EquinoxLinear",
            "module.Linear": f"{__name__}.EquinoxLinear",
            "net/": "",
            "Own": "Equinox",
        },
    ),
}


def in_words_of(framework, policy):
    """A policy map string with the names that a framework has for it."""
    for name, own in reversed(FRAMEWORKS[framework][3].items()):
        policy = policy.replace(f"<{name}>", own)
    return policy


def equations(jaxpr):
    """All equations of a jaxpr, those of inner ones too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def trace(f, *args):
    """A function's jaxpr, traced anew: JAX would give back what it knows of the same function."""
    return jax.make_jaxpr(lambda *args: f(*args))(*args)


def products(f, *args):
    """Whose products run in which dtypes."""
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


ALL = "first inner outer head"
STRINGS = {
    "c=bf16": "",
    "c=bf16; <Linear>: full": ALL,
    "c=bf16; <module.Linear>: full": ALL,
    "c=bf16; <Own>Head: full": "head",
    "c=bf16; <Own>Block: full": "inner outer",
    "c=bf16; <Own>Base: full": "inner outer",
    "c=bf16; *first: full; <net/>block/outer: full": "first outer",
    "c=bf16; */inner: full": "inner",
    "c=bf16; *block/*: full": "inner outer",
    "c=bf16; *: full": ALL,
    "c=bf16; <Own>Block: full; */inner: bf16": "outer",
    "c=bf16; */inner: bf16; <Own>Block: full": "outer",
    "c=bf16; <Own>Net: full; <Own>Block: bf16; */inner: full": "first inner head",
    "c=bf16; <Linear>: full; <Own>Head: bf16": "first inner outer",
    "c=bf16; <Own>Head: bf16; <Linear>: full": ALL,
    "c=bf16; <Linear>: full; */inner: bf16": "first outer head",
    "c=bf16; */inner: bf16; <Linear>: full": ALL,
    "c=full; <Own>Block: bf16": "first head",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("policy", STRINGS)
def test_one_string_means_the_same(framework, policy):
    apply, model, adapter, _ = FRAMEWORKS[framework]
    string = in_words_of(framework, policy)
    found = products(lambda x: jmpx.autocast(apply, string)(model, x), X)
    assert_selected(found, STRINGS[policy])
    assert products(lambda x: adapter(string)(model, x), X) == found


SELECTORS = "<Linear> <Own>Head <Own>Block <Own>Base <Own>Net */inner *outer *block/* *".split()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_any_string_means_the_same(framework, seed, rng):
    apply, model, adapter, _ = FRAMEWORKS[framework]
    rules = [f"{rng.choice(SELECTORS)}: {rng.choice(['full', 'bf16'])}" for _ in range(seed + 2)]
    policy = in_words_of(framework, "; ".join([str(rng.choice(["c=bf16", "c=full"])), *rules]))
    found = products(lambda x: jmpx.autocast(apply, policy)(model, x), X)
    assert found == products(lambda x: adapter(policy)(model, x), X)


def scanned(f):
    return lambda model, x: lax.scan(lambda c, _: (c, f(model, x + c)), 0.0, None, 3)[1]


def differentiated(f):
    def value_and_grads(model, x):
        arrays, rest = eqx.partition(model, eqx.is_array)
        loss, grads = jax.value_and_grad(lambda a: f(eqx.combine(a, rest), x).sum())(arrays)
        return loss, jax.tree.leaves(grads)

    return value_and_grads


TRANSFORMS = {
    "jit": jax.jit,
    "grad": differentiated,
    "remat": jax.checkpoint,
    "scan": scanned,
    "vmap": lambda f: lambda model, x: jax.vmap(lambda x: f(model, x[None]))(x),
    "jit of grad of remat": lambda f: jax.jit(differentiated(jax.checkpoint(f))),
    "scan of vmap": lambda f: scanned(TRANSFORMS["vmap"](f)),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "transform, place",
    [*((name, "inside") for name in TRANSFORMS), ("grad", "outside"), ("scan of vmap", "outside")],
)
def test_selectors_under_transformations(framework, transform, place):
    apply, model, _, _ = FRAMEWORKS[framework]
    transform = TRANSFORMS[transform]
    policy = in_words_of(framework, "c=bf16; <Own>Block: full; */inner: bf16; <Own>Head: full")
    if place == "inside":
        f = jmpx.autocast(transform(apply), policy)
    else:
        f = transform(jmpx.autocast(apply, policy))
    assert_selected(products(lambda x: f(model, x), X), "outer head")


# Marks stay inside.


def stacks(jaxpr):
    return [str(eqn.source_info.name_stack) for eqn in equations(jaxpr)]


def hidden(net, differentiable=True):
    """Calls a network in all places of a function that autocast does not enter, and others."""

    @jax.custom_vjp
    def by_hand(params, x):
        return net(params, x)

    by_hand.defvjp(lambda p, x: jax.vjp(net, p, x), lambda pull, g: pull(g))

    rule = jax.custom_jvp(lambda params, x: net(params, x))
    rule.defjvp(lambda primals, tangents: jax.jvp(net, primals, tangents))
    rule = net if differentiable else rule

    def f(params, x):
        fixed = jax.tree.map(lax.stop_gradient, params)
        with jax.named_scope("mine"):
            y = net(params, x) + by_hand(params, x) + rule(params, x)
            y += jax.checkpoint(net)(params, x) + jax.jit(net)(params, x)
            y += lax.scan(lambda c, _: (c + net(params, x), None), y, None, 2)[0]
            y += lax.while_loop(
                lambda c: c[0, 0] > 1e9, lambda c: c + net(fixed, x), jnp.zeros((BATCH, 7))
            )
            y += lax.cond(x[0, 0] > 0, net, lambda p, x: -net(p, x), params, x)
        with jmpx.full_precision():  # bound as it was traced, with all that is inside
            y += jax.jit(lambda p, x: lax.map(lambda x: net(p, x[None])[0], x))(params, x)
            y += lax.cond(x[0, 0] > 0, net, lambda p, x: -net(p, x), params, x)
            y += by_hand(params, x) + rule(params, x)
        solve = functools.partial(lax.custom_linear_solve, lambda v: v, symmetric=True)
        return solve(y, lambda _, b: b + 0 * net(fixed, x))

    return f


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
        assert "jmpx.module" not in compiled.as_text()


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


# What the user's function sees, and gives back.


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


def test_nnx_modules_come_back_as_they_were():
    model = NNXNet(nnx.Rngs(0))
    model.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    classes = {type(node) for _, node in nnx.iter_graph(model)}

    def f(model, x):
        assert isinstance(model.block, NNXBlock)
        model.copy = nnx.clone(model.head)
        return model(model.norm(x)), nnx.clone(model)

    policy = "c=bf16; NNXBlock: full; Linear: full; BatchNorm: full"
    y, clone = jmpx.autocast(f, policy)(model, X)
    assert y.shape == (BATCH, 7)
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0  # its state has moved
    for module in (model, clone, model.copy):
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


class Methods(eqx.Module):
    linear: EquinoxLinear

    def encode(self, x):
        return self.linear(x)

    @eqx.filter_jit
    def jitted(self, x):
        return self.encode(x)


@pytest.mark.parametrize(
    "of",
    [
        lambda m: m.encode,
        lambda m: m.jitted,
        lambda m: functools.partial(m.encode),
        lambda m: jax.tree_util.Partial(m.encode),
        lambda m: eqx.filter_vmap(m.encode),
    ],
)
@pytest.mark.parametrize("policy", ["c=bf16; Methods: full", "c=bf16; linear*: full"])
def test_methods_and_wrappers_of_equinox(of, policy):
    method = of(Methods(EquinoxLinear(jnp.ones((3, 4)))))
    jaxpr = jax.make_jaxpr(lambda x: jmpx.autocast(method, policy)(x))(X)
    (dot,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert dot.invars[0].aval.dtype == jnp.float32


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
    jaxpr = jax.make_jaxpr(lambda x: jmpx.autocast(model, policy)(x))(X)
    dots = [e.invars[0].aval.dtype for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert dots == [jnp.float32, jnp.float32, jnp.bfloat16]
    view = jax.make_jaxpr(lambda x: jmpx.equinox.with_policies(model, policy)(x))(X)
    assert dots == [
        e.invars[0].aval.dtype for e in equations(view) if e.primitive.name == "dot_general"
    ]


def test_a_view_within_autocast():
    class Local(eqx.Module):  # whose policy is kept by the class itself
        linear: EquinoxLinear

        def __call__(self, x):
            return self.linear(x)

    model = Local(EquinoxLinear(jnp.ones((3, 4))))
    with jmpx.push_policy(Local, "full"):
        f = jmpx.autocast(lambda m, x: jmpx.equinox.with_policies(m)(x), "c=bf16; Local: bf16")
        jaxpr = jax.make_jaxpr(lambda x: f(model, x))(X)
    assert "f32[2,4] = dot_general" not in str(jaxpr)  # autocast decides about products
    assert not [stack for stack in stacks(jaxpr) if "jmpx.module" in stack]


def test_full_precision_goes_before_classes():
    apply, params, _, _ = FRAMEWORKS["haiku"]
    f = jmpx.autocast(jmpx.full_precision(apply), "c=bf16; Linear: bf16; *: bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rules match nothing
        assert_selected(products(f, params, X), ALL)


def test_modules_that_are_closed_over_match_by_their_scopes_alone():
    linear = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    own = EquinoxLinear(jnp.ones((3, 4)))
    for f, policy in ((linear, "c=bf16; Linear: full"), (own, "c=bf16; EquinoxLinear: full")):
        called = jmpx.autocast(lambda x, f=f: f(x), policy)
        if f is linear:
            assert "bf16" not in str(jax.make_jaxpr(called)(X[0]))
        else:
            with pytest.warns(UserWarning, match="'EquinoxLinear: .* matched no scope"):
                called(X)


# Rules that matched nothing.


def deep(transform):
    def f(x):
        with jax.named_scope("encoder"):
            return transform(inner)(x)

    def inner(x):
        with jax.named_scope("attention"):
            return jnp.tanh(x @ x)

    return f


def custom(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.checkpoint,
        custom,
        lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
        lambda f: lambda x: lax.cond(x[0, 0] > 0, f, f, x),
        lambda f: jax.jit(jax.jit(f)),
    ],
)
def test_what_is_near_is_found_inside_of_inner_functions(transform):
    f = jmpx.autocast(deep(transform), "c=bf16; */atention: full; op.tanhh: full")
    for _ in range(2):  # the second one finds the inner function retraced
        with pytest.warns(UserWarning) as record:
            trace(f, jnp.ones((2, 2)))
        scope, operation = [str(warning.message) for warning in record]
        assert "matched no scope; did you mean 'encoder/attention'?" in scope
        assert "matched no operation; did you mean 'op.tanh'?" in operation


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "selector, near",
    [
        ("<Own>Blok", "<Own>Block"),
        ("<Own>Bas", "<Own>Base"),
        ("*/iner", "<net/>block/inner"),
    ],
)
def test_what_is_near_to_a_class_or_path(framework, selector, near):
    apply, model, _, _ = FRAMEWORKS[framework]
    f = jmpx.autocast(jax.jit(apply), in_words_of(framework, f"c=bf16; {selector}: full"))
    for _ in range(2):  # the second one finds the inner function traced
        with pytest.warns(UserWarning, match="matched no module or scope") as record:
            trace(f, model, X)
        assert f"; did you mean {in_words_of(framework, near)!r}?" in str(record[0].message)


def test_the_warning_is_about_the_call():
    with pytest.warns(UserWarning, match="matched no module or scope") as record:
        jmpx.autocast(equinox_net(), "c=bf16; EquinoxBlok: full")(X)
    assert record[0].filename == __file__


def test_a_class_that_ran_inside_a_cached_function_is_no_unused_rule():
    for framework in FRAMEWORKS:
        apply, model, _, _ = FRAMEWORKS[framework]
        f = jmpx.autocast(jax.jit(apply), in_words_of(framework, "c=bf16; <Own>Base: full"))
        for _ in range(2):
            trace(f, model, X)
