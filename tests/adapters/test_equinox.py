"""Views of Equinox models, against the same layers with everything cast by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, dtypes, normal, run_python
from helpers.equinox_net import Net, Probe, Special, by_hand, randomized

import jmpx
from jmpx.equinox import with_policies


@pytest.fixture
def net(key, rng):
    return randomized(Net(key), rng)


ISLANDS = {
    MIXED: {},
    f"{MIXED}; LayerNorm: full": {"norm": F32},
    f"{MIXED}; */norm: full; /head: f16": {"norm": F32, "head": F16},
    f"{MIXED}; Linear: full; /head: bf16": {"layers": F32},
    f"{MIXED}; /head: bf16; Linear: full": {"layers": F32, "head": F32},
    "full; layers/*: bf16": {"layers": BF16, "norm": F32, "head": F32, "around": F32},
    "c=f16; parts/norm: full": dict.fromkeys(("layers", "head", "around", "output"), F16)
    | {"norm": F32},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy_map", ISLANDS)
def test_it_computes_what_the_casts_written_by_hand_do(net, rng, policy_map):
    x = normal(rng, 6)
    assert_same_bits(with_policies(net, policy_map)(x), by_hand(net, x, **ISLANDS[policy_map]))


@pytest.mark.thorough
@pytest.mark.parametrize("wrap", [jax.vmap, eqx.filter_vmap, eqx.filter_checkpoint])
def test_a_view_goes_through_transformations(net, rng, wrap):
    policy_map = list(ISLANDS)[2]
    x = normal(rng, 5, 6) if "vmap" in wrap.__name__ else normal(rng, 6)
    expected = wrap(lambda x: by_hand(net, x, **ISLANDS[policy_map]))(x)
    assert_same_bits(wrap(with_policies(net, policy_map))(x), expected)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("policy_map", ISLANDS)
@pytest.mark.parametrize("jit", [eqx.filter_jit, lambda f: f], ids=["jit", "eager"])
def test_gradients_have_the_models_structure_and_are_those_by_hand(net, rng, policy_map, jit):
    x = normal(rng, 4, 6)

    def loss(net, forward):
        return jnp.mean(jax.vmap(forward)(x).astype(F32) ** 2)

    @jit
    @eqx.filter_value_and_grad
    def actual(net):
        return loss(net, with_policies(net, policy_map))

    @jit
    @eqx.filter_value_and_grad
    def expected(net):
        return loss(net, lambda x: by_hand(net, x, **ISLANDS[policy_map]))

    (value, grads), (expected_value, expected_grads) = actual(net), expected(net)
    if jit is eqx.filter_jit:  # XLA may fuse the two in other ways
        np.testing.assert_allclose(value, expected_value, rtol=0.02)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
            assert jnp.linalg.norm(a - b) <= 0.05 * jnp.linalg.norm(b)
    else:
        assert_same_bits((value, grads), (expected_value, expected_grads))
    assert type(grads) is Net and type(grads.head) is eqx.nn.Linear
    assert jax.tree.structure(grads) == jax.tree.structure(eqx.filter(net, eqx.is_inexact_array))
    assert set(dtypes(grads)) == {"float32"}


def test_the_model_is_left_as_it_is_and_the_view_looks_like_it(net):
    leaves, structure = jax.tree.flatten(net)
    view = with_policies(net, f"{MIXED}; LayerNorm: full; layers/1: f16")
    assert all(a is b for a, b in zip(jax.tree.leaves(net), leaves, strict=True))
    assert jax.tree.structure(net) == structure and type(net) is Net
    assert isinstance(view, Net) and isinstance(view.parts["norm"], eqx.nn.LayerNorm)
    assert all(isinstance(layer, eqx.nn.Linear) for layer in view.layers)
    assert repr(type(view)) == repr(Net) and type(view).__doc__ == Net.__doc__
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(net)]
    assert [path for path, _ in jax.tree_util.tree_leaves_with_path(view)] == paths
    assert (view.name, view.scale, view.rate, view.parts["pair"][1]) == ("net", 2.0, 0.5, None)
    assert isinstance(view.rate, float) and view.activation is jax.nn.gelu
    assert view.calls is net.calls and view.key is net.key
    assert view.parts["norm"].weight is net.parts["norm"].weight  # float32 already
    expected = ["bfloat16", "bfloat16", "float16", "float16", "float32", "float32", "bfloat16"]
    assert [name for name in dtypes(view) if "float" in name] == [*expected, *["bfloat16"] * 2]


def test_two_views_have_one_tree_definition_so_that_jit_does_not_trace_again(net, rng):
    traces = []

    @eqx.filter_jit
    def forward(view, x):
        traces.append(1)
        return view(x)

    x, maps = normal(rng, 6), [f"{MIXED}; LayerNorm: full"] * 2
    first, second = (forward(with_policies(net, policy_map), x) for policy_map in maps)
    assert_same_bits(first, second)
    assert len(traces) == 1
    view = with_policies(net, maps[0])
    assert_same_bits(first, eqx.filter_jit(view)(x))
    leaves, structure = jax.tree.flatten(view)
    assert_same_bits(jax.tree.unflatten(structure, leaves)(x), view(x))
    assert_same_bits(eqx.nn.inference_mode(view)(x), view(x))


def test_what_each_layer_sees():
    class Outer(eqx.Module):
        probes: dict

        def __call__(self, x):
            for probe in self.probes.values():
                x = probe(x)
            return x

    model = Outer({name: Probe(jnp.ones(2), name) for name in "abc"} | {"d": Special(jnp.ones(2))})
    x = jnp.ones(2)
    result = with_policies(
        model, "c=bf16,o=f32; Probe: f16; Special: full; probes/a: o=f16; */c: f32"
    )
    assert result(x).dtype == F32
    assert LOG == [
        ("a", "bfloat16", "bfloat16"),  # computes in what surrounds it
        ("b", "float16", "float16"),
        ("c", "float32", "float32"),
        ("probe", "float32", "float32"),
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seen_through", ["call", "vmap", "filter_vmap", "scan", "checkpoint"])
def test_an_island_inside_a_method_is_a_boundary_under_transformations(rng, seen_through):
    class Outer(eqx.Module):
        norm: eqx.nn.LayerNorm
        probe: Probe

        def __call__(self, x):
            if seen_through == "scan":
                params, static = eqx.partition(self.norm, eqx.is_array)
                step = lambda carry, x: (carry, eqx.combine(params, static)(x))  # noqa: E731
                x = jax.lax.scan(step, x[0], x)[1]
            else:
                wrap = eqx.filter_checkpoint if seen_through == "checkpoint" else lambda f: f
                vmap = eqx.filter_vmap if seen_through == "filter_vmap" else jax.vmap
                x = vmap(wrap(self.norm))(x) if seen_through != "call" else self.norm(x[0])
            return self.probe(x)

    model = randomized(Outer(eqx.nn.LayerNorm(4), Probe(jnp.ones(4))), rng)
    x = normal(rng, 3, 4)
    result = with_policies(model, f"{MIXED}; /norm: full")(x)
    inside = jax.vmap(model.norm)(x.astype(BF16).astype(F32)).astype(BF16)
    expected = (inside * model.probe.weight.astype(BF16)).astype(F32)
    assert_same_bits(result, expected[0] if seen_through == "call" else expected)
    assert LOG == [("probe", "bfloat16", "bfloat16")]


@pytest.mark.thorough
def test_none_reads_the_registry_only(net, rng):
    x = normal(rng, 6)
    assert_same_bits(with_policies(net)(x), net(x))
    assert jax.tree.structure(with_policies(net)) == jax.tree.structure(net)
    with jmpx.push_policy(eqx.nn.Linear, "c=bf16,o=f32"):
        view = with_policies(net)
        expected = by_hand(net, x, layers=BF16, norm=F32, head=BF16, around=F32)
        assert_same_bits(view(x), expected)
    assert_same_bits(view(x), expected)  # a view keeps the policies that it was made with
    with jmpx.push_policy(Net, MIXED), jmpx.push_policy(eqx.nn.LayerNorm, "c=f32,o=bf16"):
        assert_same_bits(with_policies(net)(x), by_hand(net, x, norm=F32))
    with jmpx.push_policy(Probe, "bf16"):  # subclasses do not inherit it
        assert with_policies(Special(x)).weight is x


def test_rules_go_before_the_registry_and_that_before_the_default(net, rng):
    x = normal(rng, 6)
    with jmpx.push_policy(eqx.nn.LayerNorm, "c=f32,o=bf16"):
        assert_same_bits(with_policies(net, MIXED)(x), by_hand(net, x, norm=F32))
        view = with_policies(net, f"{MIXED}; LayerNorm: f16")
        assert_same_bits(view(x), by_hand(net, x, norm=F16))
    with jmpx.push_policy(Net, "c=bf16,o=f16"):
        assert with_policies(net, MIXED)(x).dtype == F16
        assert with_policies(net, f"{MIXED}; Net: o=f32")(x).dtype == F32


def test_casts_go_through_the_policy(net, rng):
    calls = []

    class Loud(jmpx.Policy):
        def cast_to_compute(self, tree):
            calls.append("compute")
            return super().cast_to_compute(tree)

        def cast_to_output(self, tree):
            calls.append("output")
            return super().cast_to_output(tree)

    x, view = normal(rng, 6), with_policies(net, Loud(F32, BF16, F32))
    assert set(calls) == {"compute"}
    calls.clear()
    assert_same_bits(view(x), by_hand(net, x))
    assert set(calls) == {"compute", "output"}


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [2.0**10, 2.0**20])
def test_a_float16_train_step_with_a_dynamic_loss_scale(net, rng, scale):
    x, y = normal(rng, 16, 6), normal(rng, 16, 2)

    def loss_fn(net, x, y):
        return jnp.mean((jax.vmap(with_policies(net, "c=f16,o=f32; LayerNorm: full"))(x) - y) ** 2)

    def reference(net, x, y):
        options = dict.fromkeys(("layers", "head", "around"), F16)
        return jnp.mean((jax.vmap(lambda x: by_hand(net, x, **options, norm=F32))(x) - y) ** 2)

    scaling = jmpx.DynamicLossScale(scale)
    step = jmpx.filter_value_and_grad(loss_fn, scaling, policy="full")
    value, new_scaling, finite, grads = step(net, x, y)
    expected, _, expected_finite, expected_grads = jmpx.filter_value_and_grad(
        reference, scaling, policy="full"
    )(net, x, y)
    assert_same_bits((value, finite, grads), (expected, expected_finite, expected_grads))
    assert bool(finite) == (scale == 2.0**10)
    assert float(new_scaling.loss_scale) == (scale if finite else scale / 2)
    assert type(grads) is Net and set(dtypes(grads)) == {"float32"}


def test_abstract_shapes(net):
    shapes = eqx.filter_eval_shape(lambda net: net, net)
    assert dtypes(eqx.filter_eval_shape(with_policies(net, "f16"), jnp.ones(6))) == ["float16"]
    out = eqx.filter_eval_shape(lambda net, x: with_policies(net, "f16")(x), shapes, jnp.ones(6))
    assert out.dtype == F16 and out.shape == (2,)


@pytest.mark.parametrize(
    "model", [None, {"w": jnp.ones(2)}, [Probe(jnp.ones(2))], jax.nn.relu, Probe]
)
def test_a_model_of_no_equinox(model):
    with pytest.raises(TypeError, match=r"Expected an equinox.Module .*: pass the model itself"):
        with_policies(model, "bf16")


def test_bad_input(net):
    view = with_policies(net, f"{MIXED}; /head: full")
    for model in view, eqx.nn.Sequential([view.head]):
        with pytest.raises(ValueError, match="a Net|a Linear that is a view already"):
            with_policies(model, MIXED)
    with pytest.raises(TypeError, match="policy map"):
        with_policies(net, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="bf61"):
        with_policies(net, "c=bf61")


def test_a_missing_equinox_says_how_to_install_it():
    code = "import sys; sys.modules['equinox'] = None; import jmpx.equinox"
    result = run_python("-c", code)
    assert result.returncode == 1
    message = "jmpx.equinox needs Equinox, which is not installed: pip install 'jmpx[equinox]'."
    assert result.stderr.splitlines()[-1] == f"ModuleNotFoundError: {message}"
