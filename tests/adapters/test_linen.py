"""Policy maps over Linen: methods, parameters, `dtype` fields, arrays that are made inside."""

# Flax types the result of `apply` as a union with the state that it updated.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, dtypes, normal, warns_once
from helpers.jaxprs import FULL, LOW, dots, equations_of
from helpers.linen import Watched, cast, init, under

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = normal(np.random.default_rng(0), 3, 4)


def assert_same_results(run, by_hand, variables):
    """Compares two functions to the bit, in one program: XLA may leave a rounding out of both."""
    assert_same_bits(*jax.jit(lambda variables: (run(variables), by_hand(variables)))(variables))


def products(fn, *args):
    """Returns the dtypes in which products run, by the number of columns of the second operand."""
    eqns = [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name == "dot_general"]
    return {eqn.invars[1].aval.shape[-1]: eqn.invars[0].aval.dtype.name for eqn in eqns}


# Methods


class Methods(nn.Module):
    """Notes what each of its methods gets, by the method's name."""

    def setup(self):
        self.of_setup = self.given_by_setup(jnp.ones((3, 3)))
        self.inner = nn.Dense(2)

    def __call__(self, x):
        return self.note("__call__", x)

    def given_by_setup(self, x):
        return self.note("given_by_setup", x)

    def _encode(self, x):
        return self.note("_encode", x)

    def lifted(self, x):
        def branch(inner, x):
            return self.note("branch", x)

        return nn.cond(True, branch, branch, self.inner, self.note("lifted", x).astype(F32))

    @nn.nowrap
    def note(self, name, x):
        LOG.append((name, x.dtype.name))
        return x @ jnp.eye(3, dtype=x.dtype)


# What a method of each name gets, and the products of its call under autocast: one is of `setup`,
# through a public method.
RECEIVED = {
    "__call__": ({"__call__": "bfloat16"}, {FULL}),
    "_encode": ({"_encode": "float32"}, {LOW, FULL}),
    "lifted": ({"lifted": "bfloat16", "branch": "float32"}, {FULL}),
}


@pytest.mark.parametrize("name", RECEIVED)
def test_public_methods_of_the_class_are_boundaries_and_marked_for_rules(name, log):
    received, marked = RECEIVED[name]
    x = jnp.ones((3, 3))
    run = under("c=bf16,o=f32; Dense?: c=f16", Methods(), x, method=name)
    jax.eval_shape(run, {})
    assert dict(log) == {"given_by_setup": "bfloat16", **received}
    run = jmpx.autocast(lambda x: Methods().apply({}, x, method=name), "c=bf16; Methods?: full")
    assert {*dots(run, x)} == marked


class Coder(nn.Module):
    def setup(self):
        self.inner = Watched()
        self.w = self.param("w", nn.initializers.ones, (4,))

    def _help(self, x):
        LOG.append(("help", x.dtype.name, self.w.dtype.name))
        return x

    def encode(self, x):
        x = self.inner(x)
        LOG.append(("encoded", x.dtype.name))
        return self._help(x.astype(F32)).astype(x.dtype)

    def decode(self, h):
        return h * self.w

    def __call__(self, x):
        return self.decode(self.encode(x))


class Derived(Coder):
    def __call__(self, x):
        y = super().__call__(x)
        LOG.append(("derived", y.dtype.name))
        return y


def test_own_methods_are_part_of_the_call_and_any_public_one_is_a_boundary(rng, log):
    variables = init(rng, Coder(), X)
    seen = [
        ("inner", "bfloat16", "bfloat16"),
        ("encoded", "bfloat16"),
        ("help", "float32", "bfloat16"),
    ]
    whole = under("c=bf16,o=f32", Derived(), X)
    assert jax.eval_shape(whole, variables).dtype == F32
    assert log == [*seen, ("derived", "bfloat16")]
    log.clear()

    for method in ("encode", lambda model, x: model.inner(x)):
        piece = under("c=bf16,o=f32", Coder(), X, method=method)
        assert jax.eval_shape(piece, variables).dtype == F32
    assert log == [*seen, seen[0]]


# Parameters and other arrays


def test_partitioned_parameters_keep_their_boxes():
    dense = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.normal(), (None, "x")))

    with jmpx.flax.policies(MIXED):
        variables = jax.jit(dense.init)(jax.random.key(0), X)
    kernel = variables["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) and kernel.value.dtype == F32
    by_hand = lambda v: dense.apply(cast(v, BF16), X.astype(BF16)).astype(F32)  # noqa: E731
    assert_same_results(under(MIXED, dense, X), by_hand, variables)


def test_custom_policies_cast_by_their_own_casts(rng):
    class Clipped(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jax.tree.map(lambda x: jnp.clip(x, -0.5, 0.5), super().cast_to_compute(tree))

    def by_hand(variables):
        x, w = (jnp.clip(v.astype(BF16), -0.5, 0.5) for v in (X, variables["params"]["w"]))
        return (x @ w).astype(F32)

    run = under(Clipped(F32, BF16, F32), Watched(), X)
    assert_same_results(run, by_hand, init(rng, Watched(), X))


def test_a_bound_module_outlives_the_context(rng, log):
    bound = Watched().bind(init(rng, Watched(), X))
    plain = bound(X)
    with jmpx.flax.policies("c=bf16"):
        assert bound(X).dtype == BF16
    assert_same_bits(bound(X), plain)


def test_shared_modules_and_modules_as_attributes(rng):
    class Twice(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            x = self.inner(x)
            return Other(self.inner, name="other")(x)

    class Other(nn.Module):
        shared: nn.Module

        def __call__(self, x):
            return self.shared(x)

    model = Twice(Watched())
    variables = init(rng, model, X)
    jax.eval_shape(under(f"{MIXED}; Other: full", model, X), variables)
    # One module in two surroundings reads its stored parameter in each of them.
    assert LOG == [("inner", *2 * ("bfloat16",)), ("inner", *2 * ("float32",))]


def test_what_is_not_a_parameter_is_as_stored(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, flag, index):
            state = self.variable("state", "sum", jnp.zeros, (4,))
            w = self.param("w", nn.initializers.ones, (4,))
            stored = self.variables["params"]["w"].dtype.name
            LOG.append((state.value.dtype.name, w.dtype.name, stored, flag, index.dtype.name))
            state.value = state.value + x.sum(0).astype(F32)
            return {"y": x * w, "n": index, "name": "net"}

    index = jnp.arange(3)
    variables = init(rng, Net(), X, True, index)
    run = under("c=bf16", Net(), X, True, index=index, mutable=["state"])
    result, state = run(variables)
    assert LOG == [("float32", "bfloat16", "float32", True, "int32")]
    assert result["y"].dtype == BF16 and result["n"].dtype == jnp.int32 and result["name"] == "net"
    assert set(dtypes(state)) == {"float32"}


# A rule sets the field


class Block(nn.Module):
    """A block as public code writes it; a layer of it has another field, and one has none."""

    dtype: Any = jnp.float32
    other: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(5, dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.Dense(6, dtype=self.other)(x)
        return nn.Dense(7)(x)


class SetupBlock(nn.Module):
    dtype: Any = jnp.float32
    other: Any = jnp.float32

    def setup(self):
        self.one = nn.Dense(5, dtype=self.dtype)
        self.norm = nn.LayerNorm(dtype=self.dtype)
        self.two = nn.Dense(6, dtype=self.other)
        self.three = nn.Dense(7)
        self.kind = jnp.dtype(self.dtype).name

    def __call__(self, x):
        assert self.kind == jnp.dtype(self.dtype).name
        return self.three(self.two(self.norm(self.one(x))))


# The block, its fields, the rule, and what the second layer computes in: it follows the rule only
# if its field has the value that was handed down.
FIELDS = [
    (Block, F32, F32, "bf16", "bfloat16"),
    (SetupBlock, F32, F32, "f16", "float16"),
    (Block, BF16, BF16, "f32", "float32"),
    (Block, F32, F16, "bf16", "float16"),
    (SetupBlock, F32, BF16, "bf16", "bfloat16"),
]


@pytest.mark.parametrize(("block", "field", "other", "rule", "second"), FIELDS)
def test_a_rule_sets_the_field_and_those_that_were_handed_down(
    rng, block, field, other, rule, second
):
    model, ruled = block(field, other), np.dtype(jmpx.get_policy(rule).compute_dtype)
    variables = init(rng, model, X)
    run = under(f"f32; {block.__name__}: c={rule}", model, X)
    assert products(run, variables) == {5: ruled.name, 6: second, 7: ruled.name}
    assert (model.dtype, model.other) == (field, other)
    if other == field:
        by_hand = lambda v: block(ruled, ruled).apply(cast(v, ruled), X.astype(ruled))  # noqa: E731
        assert_same_results(run, lambda v: by_hand(v).astype(F32), variables)


def test_the_field_is_put_back_after_an_error(log):
    class Layer(nn.Module):
        dtype: Any

        def __call__(self, x):
            LOG.append(self.dtype)
            raise ZeroDivisionError

    model = Layer("float32")
    with pytest.raises(ZeroDivisionError), jmpx.flax.policies("f32; Layer: bf16"):
        bound = model.bind({})
        bound(X)
    assert log == ["bfloat16"] and model.dtype == bound.dtype == "float32"


@pytest.mark.parametrize(
    ("lift", "block"), [(nn.remat, SetupBlock), (lambda cls: nn.remat(nn.jit(cls)), Block)]
)
def test_fields_of_lifted_modules(rng, lift, block):
    model = lift(block)()
    variables = init(rng, model, X)
    run = under(f"f32; {block.__name__}: bf16", model, X)
    assert set(products(run, variables).values()) == {"bfloat16"}
    full = products(lambda v: model.apply(v, X), variables)  # nn.jit has not kept the trace
    assert set(full.values()) == {"float32"}


def test_policies_of_classes_set_the_field_too(rng):
    model = nn.Dense(4, dtype=F32)
    variables = init(rng, model, X)
    with jmpx.push_policy(nn.Dense, "c=bf16"):
        assert products(under(None, model, X), variables) == {4: "bfloat16"}


@pytest.mark.parametrize("field", [F32, F16])
@pytest.mark.filterwarnings("ignore:The dtype field of")
def test_without_a_rule_parameters_are_cast_once_to_the_field(rng, field):
    model = nn.Dense(3, dtype=field)
    variables = init(rng, model, X)
    run = under(MIXED, model, X)
    by_hand = lambda v: model.apply(cast(v, field), X.astype(field)).astype(F32)  # noqa: E731
    # No other rounding before.
    assert_same_results(run, by_hand, variables)


# Arrays that are made inside


@pytest.mark.parametrize(
    ("made", "dtype"), [(jnp.ones, "float32"), (np.ones, "float16"), (np.ones, "bfloat16")]
)
def test_floating_inputs_alone_are_cast(rng, made, dtype):
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x, text, *, index):
            assert self.is_initializing() or x.dtype == BF16
            assert text == "text" and index.dtype == jnp.int32
            return (x * self.param("w", nn.initializers.ones, (4,)))[index]

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Wide()(made((3, 4), dtype), "text", index=jnp.arange(2)), x

    numbers = jnp.arange(3)
    with jmpx.flax.policies("c=bf16"):
        create = lambda: Net().init_with_output(jax.random.key(0), numbers)  # noqa: E731
        created, variables = jax.eval_shape(create)
    for y, x in (created, jax.eval_shape(under("c=bf16", Net(), numbers), variables)):
        assert (y.dtype, x.dtype) == (BF16, jnp.int32)


def test_rules_and_parents_that_own_nothing_keep_theirs(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            noise = jnp.ones(x.shape, F32)
            island = nn.Dense(4, name="island")(x + noise)
            assert self.is_initializing() or (island.dtype, noise.dtype) == (BF16, F32)
            return nn.Dense(5, name="layer")(noise)

    run = under("c=bf16; */island: full", Net(), X)
    assert products(run, init(rng, Net(), X)) == {4: "float32", 5: "bfloat16"}


@pytest.mark.parametrize("made_in_context", [False, True])
def test_a_cache_keeps_its_dtype(rng, made_in_context):
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(x + jnp.ones(x.shape, F32))
            return nn.MultiHeadDotProductAttention(2, decode=True)(x)

    model, x = Decoder(), normal(rng, 2, 5, 4)
    create = lambda: model.init(jax.random.key(0), x)  # noqa: E731
    variables = jax.eval_shape(create)
    if made_in_context:
        with jmpx.flax.policies("c=bf16"):
            variables = jax.eval_shape(create)
    y, state = jax.eval_shape(under("c=bf16", model, x[:, :1], mutable=["cache"]), variables)
    floats = {name for name in dtypes(state) if "float" in name}
    assert y.dtype == BF16 and floats == {"bfloat16" if made_in_context else "float32"}


# A model of NNX


@pytest.mark.filterwarnings("error:No Linen module ran")
def test_a_context_around_a_model_of_nnx_says_so_once(rng):
    model, dense, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nn.Dense(2), normal(rng, 3, 4)
    params, apply = init(rng, dense, x), jax.jit(dense.apply)
    with warns_once(__file__, "No Linen module ran .*apply_policy"):
        with jmpx.flax.policies("c=bf16; Dense: c=bf16"):
            assert model(x).dtype == F32
    with jmpx.flax.policies("c=bf16; Dense: c=bf16"):
        model(x)
    for _ in range(2):  # the second one runs compiled
        with jmpx.flax.policies("c=bf16; Dense: c=f32,o=bf16"):
            assert apply(params, x).dtype == BF16
    with jmpx.flax.policies("c=f16; Dense: c=f32,o=f16"), jmpx.flax.policies("c=f16"):
        apply(params, x)  # the outer one casts nothing, but a Linen module ran
    with pytest.raises(KeyError), jmpx.flax.policies("c=f16; Dense: c=f32,o=bf16"):
        raise KeyError


# Float8 layers, whose new state comes as gradients


@pytest.mark.parametrize("policy", ["full", "by=modules,full", "by=operations,full"])
def test_state_of_float8_layers_comes_as_it_is_or_is_refused(policy):
    model = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    x = jnp.full((8, 16), 330.0).at[4:].set(2.0)
    params = model.init(jax.random.key(0), x)
    loss = lambda *given: jnp.mean(jnp.asarray(model.apply(*given)) ** 2)  # noqa: E731
    expected, none = jax.jit(jax.grad(loss))(params, x), jmpx.NoOpLossScale()
    grads = jax.jit(jmpx.grad(loss, none, policy=policy))(params, x).grads
    assert_same_bits(grads["_overwrite_with_gradient"], expected["_overwrite_with_gradient"])
    for scaling, options in (
        (jmpx.StaticLossScale(1024), {}),
        (jmpx.DynamicLossScale(), {}),
        (none, {"batch": jmpx.Batch(microbatches=2)}),
        (none, {"over": jmpx.Over("data")}),
    ):
        with pytest.raises(ValueError, match="new state of a float8 layer of Flax at .*amax_hist"):
            jmpx.grad(loss, scaling, policy=policy, **options)(params, x)


# Tied embeddings: what docs/language_models.md and docs/findings.md say of rules for the logits.


class Tied(nn.Module):
    def setup(self):
        self.embed, self.dense = nn.Embed(64, 8), nn.Dense(8)

    def __call__(self, tokens):
        h = self.embed(tokens)
        return self.embed.attend(h + self.dense(h))


class TiedNNX(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(64, 8, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        h = self.embed(tokens)
        return self.embed.attend(h + self.dense(h))


@pytest.mark.parametrize(
    "policy, frameworks, residual",
    [
        ("c=bf16; */embed.attend: product=f32", "linen", BF16),
        ("c=bf16; Embed: product=f32", "linen nnx", F32),
        ("by=modules,c=bf16; Embed: product=f32", "linen nnx", F32),
    ],
)
def test_rules_for_the_logits_of_tied_embeddings(policy, frameworks, residual):
    tokens = jnp.zeros((2, 3), int)
    for framework in frameworks.split():
        model = TiedNNX() if framework == "nnx" else Tied()
        variables = model if framework == "nnx" else model.init(jax.random.key(0), tokens)
        f = (lambda m, t: m(t)) if framework == "nnx" else model.apply
        applied = jmpx.apply_policy(f, policy)
        eqns = equations_of(lambda t, f=applied, v=variables: f(v, t), tokens)
        products = [eqn.outvars[0].aval for eqn in eqns if eqn.primitive.name == "dot_general"]
        logits = [aval.dtype for aval in products if aval.shape[-1] == 64]
        assert logits == [F32] and BF16 in [aval.dtype for aval in products]
        sums = [eqn.outvars[0].aval.dtype for eqn in eqns if eqn.primitive.name == "add"]
        assert (F32 in sums) is (residual == F32)  # the bias, and the residual stream
