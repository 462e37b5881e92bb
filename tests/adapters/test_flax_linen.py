"""Policy maps of Linen modules, against the same layers with everything cast by hand."""

# Flax types the result of `apply` as a union with the state that it updated.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32, LOG, MIXED, assert_same_bits, dtypes, normal, run_python, warns_once
from helpers.jaxprs import FULL, LOW, dots
from helpers.linen import Watched, cast, init

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, name="inner")(x))
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(3, name="head")(x)


class Setup(nn.Module):
    def setup(self):
        self.inner = nn.Dense(8)
        self.norm = nn.LayerNorm()
        self.head = nn.Dense(3)

    def encode(self, x):
        return self.norm(nn.relu(self.inner(x)))

    def decode(self, h):
        return self.head(h)

    def __call__(self, x):
        return self.decode(self.encode(x))


def by_hand(params, x, norm=F32, head=BF16):
    """`Compact` and `Setup` in bfloat16, but for the norm and the head."""
    run = nn.Dense(8).apply
    x = nn.relu(run({"params": cast(params["inner"], BF16)}, x.astype(BF16)))
    x = nn.LayerNorm().apply({"params": cast(params["norm"], norm)}, x.astype(norm)).astype(BF16)
    y = nn.Dense(3).apply({"params": cast(params["head"], head)}, x.astype(head))
    return y.astype(BF16).astype(F32)


RULES = [
    ("", BF16, BF16),
    ("; LayerNorm: full", F32, BF16),
    ("; */norm: full", F32, BF16),
    ("; flax.linen.LayerNorm: full", F32, BF16),
    ("; */head: full; norm/*: full", F32, F32),
    ("; Dense: f16; LayerNorm: full; Dense: bf16", F32, BF16),  # of two the last one wins
    ("; */inner: f32; */norm: f16; Dense: bf16; LayerNorm: bf16", BF16, BF16),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("model", [Compact(), Setup()], ids=["compact", "setup"])
@pytest.mark.parametrize(("rules", "norm", "head"), RULES)
def test_it_is_the_hand_cast_computation_to_the_bit(rng, model, rules, norm, head):
    x = normal(rng, 5, 4)
    variables = init(rng, model, x)
    plain = model.apply(variables, x)
    with jmpx.flax.policies(MIXED + rules):
        y = model.apply(variables, x)
    assert_same_bits(y, by_hand(variables["params"], x, norm, head))
    assert_same_bits(model.apply(variables, x), plain)  # and nothing is left behind


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Compact(), Setup()], ids=["compact", "setup"])
def test_gradients_are_those_of_the_hand_cast_computation(rng, model):
    x = normal(rng, 5, 4)
    params = init(rng, model, x)["params"]

    def loss(params):
        with jmpx.flax.policies(f"{MIXED}; LayerNorm: full"):
            return (model.apply({"params": params}, x) ** 2).mean()

    grads = jax.grad(loss)(params)
    assert set(dtypes(grads)) == {"float32"}
    assert_same_bits(grads, jax.grad(lambda params: (by_hand(params, x) ** 2).mean())(params))
    full = jax.grad(lambda params: (model.apply({"params": params}, x) ** 2).mean())(params)
    for grad, reference in zip(jax.tree.leaves(grads), jax.tree.leaves(full), strict=True):
        assert np.linalg.norm(grad - reference) < 0.05 * np.linalg.norm(reference)


@pytest.mark.thorough
def test_with_the_gradient_functions(rng):
    x = normal(rng, 5, 4)
    params = init(rng, Compact(), x)["params"]

    def loss(params):
        with jmpx.flax.policies(f"{MIXED}; LayerNorm: full"):
            return Compact().apply({"params": params}, x).mean()

    scaling = jmpx.DynamicLossScale(2.0**10)
    _, finite, grads = jmpx.filter_grad(loss, scaling, policy="full")(params)
    assert finite
    assert_same_bits(grads, jax.grad(loss)(params))


def test_what_each_layer_sees(rng, log):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Watched(name="first")(x)
            x = Watched(name="island")(x)
            LOG.append(("between", x.dtype.name))
            return Watched(name="last")(x)

    variables = init(rng, Net(), normal(rng, 2, 4))
    with jmpx.flax.policies(f"{MIXED}; */island: full"):
        y = Net().apply(variables, normal(rng, 2, 4))
    assert y.dtype == F32
    assert log == [
        ("first", "bfloat16", "bfloat16"),
        ("island", "float32", "float32"),
        ("between", "bfloat16"),
        ("last", "bfloat16", "bfloat16"),
    ]


def test_an_island_within_an_island(rng, log):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Watched(name="deep")(Watched(name="flat")(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = Inner(name="inner")(x)
            LOG.append(("outside", y.dtype.name))
            return y

    variables = init(rng, Net(), normal(rng, 2, 4))
    with jmpx.flax.policies("c=bf16; Inner: c=f16; inner/deep: full"):
        y = Net().apply(variables, normal(rng, 2, 4))
    assert log == [
        ("flat", "float16", "float16"),
        ("deep", "float32", "float32"),
        ("outside", "bfloat16"),
    ]
    assert y.dtype == BF16


@pytest.mark.parametrize("around", [False, True])
def test_jit_inside_and_around(rng, around):
    x = normal(rng, 5, 4)
    variables = init(rng, Compact(), x)
    policy_map = f"{MIXED}; LayerNorm: full"

    def inside(variables, x):
        with jmpx.flax.policies(policy_map):
            return Compact().apply(variables, x)

    reference = jax.jit(lambda v, x: by_hand(v["params"], x))(variables, x)
    if around:
        with jmpx.flax.policies(policy_map):
            y = jax.jit(Compact().apply)(variables, x)
    else:
        y = jax.jit(inside)(variables, x)
    assert_same_bits(y, reference)


def test_a_trace_belongs_to_its_policy_map(rng):
    x = normal(rng, 5, 4)
    variables = init(rng, Compact(), x)
    step = jax.jit(Compact().apply)
    plain = step(variables, x)
    for policy_map in ("c=bf16", "c=f16", "f32"):
        with jmpx.flax.policies(policy_map):
            assert step(variables, x).dtype == jmpx.get_policy(policy_map).output_dtype
    assert_same_bits(step(variables, x), plain)


def test_any_public_method(rng):
    x = normal(rng, 5, 4)
    variables = init(rng, Setup(), x)
    with jmpx.flax.policies(f"{MIXED}; LayerNorm: full"):
        whole = Setup().apply(variables, x)
        encoded = Setup().apply(variables, x, method="encode")
        y = Setup().apply(variables, encoded, method=Setup.decode)
        one = Setup().apply(variables, x, method=lambda model, x: model.inner(x))
    assert encoded.dtype == one.dtype == F32
    # Outermost both, so what passes between them is of the output dtype: the same numbers here.
    assert_same_bits(y, whole)


def test_own_methods_are_part_of_the_call(rng):
    class Net(nn.Module):
        def part(self, x):
            return x

        @nn.compact
        def __call__(self, x):
            LOG.append(self.part(x).dtype.name)
            return Watched()(self.part(x))

    class Derived(Net):
        def __call__(self, x):
            y = super().__call__(x)
            LOG.append(y.dtype.name)
            return y

    variables = init(rng, Net(), normal(rng, 2, 4))
    with jmpx.flax.policies("c=bf16,o=f16"):
        Derived().apply(variables, normal(rng, 2, 4))
    assert LOG == ["bfloat16", ("Watched_0", "bfloat16", "bfloat16"), "bfloat16"]


def test_private_methods_and_setup_are_not_cast_but_read_by_the_policy(rng):
    class Net(nn.Module):
        def setup(self):
            self.w = self.param("w", nn.initializers.ones, (4,))

        def _help(self, x):
            LOG.append(("help", x.dtype.name, self.w.dtype.name))
            return x

        def __call__(self, x):
            return self._help(x.astype(F32)) * self.w

    variables = init(rng, Net(), normal(rng, 2, 4))
    with jmpx.flax.policies("c=bf16"):
        Net().apply(variables, normal(rng, 2, 4))
    assert LOG == [("help", "float32", "bfloat16")]


def test_init_creates_in_the_param_dtype(rng):
    x = normal(rng, 5, 4)
    plain = Compact().init(jax.random.key(3), x)
    with jmpx.flax.policies(f"{MIXED}; LayerNorm: full"):
        assert_same_bits(Compact().init(jax.random.key(3), x), plain)
    with jmpx.flax.policies("p=bf16,c=bf16; norm/*: p=f32"):
        params = Compact().init(jax.random.key(3), x)["params"]
    assert set(dtypes(params["norm"])) == {"float32"} and set(dtypes(params["head"])) == {
        "bfloat16"
    }
    assert_same_bits(params["head"], cast(plain["params"]["head"], BF16))


def test_partitioned_parameters_keep_their_boxes(rng):
    dense = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.normal(), (None, "x")))
    x = normal(rng, 5, 4)
    with jmpx.flax.policies(MIXED):
        variables = dense.init(jax.random.key(0), x)
        y = dense.apply(variables, x)
    kernel = variables["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) and kernel.value.dtype == F32
    expected = dense.apply(cast(variables, BF16), x.astype(BF16)).astype(F32)
    assert_same_bits(y, expected)


def test_custom_policies_cast_by_their_own_casts(rng, log):
    class Clipped(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jax.tree.map(lambda x: jnp.clip(x, -0.5, 0.5), super().cast_to_compute(tree))

    x = normal(rng, 3, 4)
    variables = init(rng, Watched(), x)
    with jmpx.flax.policies(Clipped(F32, BF16, F32)):
        y = Watched().apply(variables, x)
    x, w = jnp.clip(x.astype(BF16), -0.5, 0.5), variables["params"]["w"].astype(BF16)
    assert_same_bits(y, (x @ jnp.clip(w, -0.5, 0.5)).astype(F32))


def test_of_nested_contexts_the_inner_one_holds(rng, log):
    x = normal(rng, 3, 4)
    variables = init(rng, Watched(), x)
    with jmpx.flax.policies("c=bf16"):
        with jmpx.flax.policies("c=f16"):
            inner = Watched().apply(variables, x)
        outer = Watched().apply(variables, x)
    plain = Watched().apply(variables, x)
    assert [y.dtype for y in (inner, outer, plain)] == [jnp.float16, BF16, F32]


def test_a_bound_module_outlives_the_context(rng, log):
    x = normal(rng, 3, 4)
    bound = Watched().bind(init(rng, Watched(), x))
    plain = bound(x)
    with jmpx.flax.policies("c=bf16"):
        assert bound(x).dtype == BF16
    assert_same_bits(bound(x), plain)


@pytest.mark.thorough
def test_it_promotes_nothing_itself(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="head")(nn.relu(nn.Dense(8)(x)))

    x = normal(rng, 5, 4)
    with jax.numpy_dtype_promotion("strict"), jmpx.flax.policies(f"{MIXED}; */head: full"):
        variables = Net().init(jax.random.key(0), x)
        jax.grad(lambda params: Net().apply(params, x).mean())(variables)


@pytest.mark.thorough
def test_rules_that_matched_nothing():
    x = jnp.ones((2, 4))
    with warns_once(__file__, "'LayerNom: .*did you mean 'LayerNorm'"):
        with jmpx.flax.policies("c=bf16; LayerNom: full"):
            Compact().init(jax.random.key(0), x)
    with pytest.warns(UserWarning, match="'norn/.*did you mean 'norm'"):
        with jmpx.flax.policies("c=bf16; norn/*: full"):
            Compact().init(jax.random.key(0), x)


def test_no_warning_without_modules_or_after_an_exception():
    with jmpx.flax.policies("c=bf16; LayerNom: full"):
        pass
    with pytest.raises(ZeroDivisionError), jmpx.flax.policies("c=bf16; LayerNom: full"):
        Compact().init(jax.random.key(0), jnp.ones((2, 4)))
        raise ZeroDivisionError
    y = Compact().apply(Compact().init(jax.random.key(0), jnp.ones((2, 4))), jnp.ones((2, 4)))
    assert y.dtype == F32


def test_bad_policy_maps():
    with pytest.raises(ValueError, match="Unknown dtype 'bf61'"):
        with jmpx.flax.policies("c=bf61"):
            pass
    with pytest.raises(TypeError, match="Expected a policy map string"):
        with jmpx.flax.policies(3):
            pass


def test_a_missing_flax_says_how_to_install_it():
    code = "import sys; sys.modules['flax'] = None; import jmpx.flax"
    result = run_python("-c", code)
    message = result.stderr.splitlines()[-1]
    assert message.endswith(
        "jmpx.flax needs Flax, which is not installed: pip install 'jmpx[flax]'."
    )


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
def test_public_methods_of_the_class_are_boundaries(name):
    with jmpx.flax.policies("c=bf16,o=f32; Dense?: c=f16"):
        Methods().apply({}, jnp.ones((3, 3)), method=name)
    expected = {"given_by_setup": "bfloat16", **RECEIVED[name][0]}
    assert dict(LOG) == expected


@pytest.mark.parametrize("name", RECEIVED)
def test_public_methods_of_the_class_are_marked_for_rules(name):
    run = jmpx.autocast(lambda x: Methods().apply({}, x, method=name), "c=bf16; Methods?: full")
    assert {*dots(run, jnp.ones((3, 3)))} == RECEIVED[name][1]
