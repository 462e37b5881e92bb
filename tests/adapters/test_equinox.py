"""Views of Equinox models: casts as by hand, and what a view keeps of a module's class."""

import abc
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, dtypes, normal
from helpers.equinox_models import Around, compiled, drawn

import jmpx
from jmpx.equinox import with_policies

KEY = jax.random.key(0)


def randomized(model, rng):
    """The same model with random parameters, biases and scales too."""
    return jax.tree.map(lambda w: normal(rng, *w.shape) if eqx.is_inexact_array(w) else w, model)


class Probe(eqx.Module):
    """Notes the dtypes that it sees."""

    weight: jax.Array
    name: str = eqx.field(static=True, default="probe")

    def __call__(self, x):
        LOG.append((self.name, x.dtype.name, self.weight.dtype.name))
        return x * self.weight


class Special(Probe):
    """A subclass, for rules by a base's name."""


class Net(eqx.Module):
    """Two layers, a norm, and a head, in a list, a dict and a field."""

    layers: list
    parts: dict
    head: eqx.nn.Linear
    calls: jax.Array
    key: jax.Array
    activation: Callable
    rate: float
    name: str = eqx.field(static=True)

    def __init__(self):
        self.layers = [eqx.nn.Linear(6, 6, key=KEY), eqx.nn.Linear(6, 6, key=KEY)]
        self.parts = {"norm": eqx.nn.LayerNorm(6), "pair": (Probe(jnp.ones(6)), None)}
        self.head = eqx.nn.Linear(6, 2, key=KEY)
        self.calls, self.key = jnp.arange(3), KEY
        self.activation, self.rate, self.name = jax.nn.gelu, 0.5, "net"

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.head(self.parts["pair"][0](self.parts["norm"](x) * self.rate))


def by_hand(model, x, layers=BF16, norm=BF16, head=BF16, output=F32, around=BF16):
    """`Net` with every cast written out, from the stored parameters."""

    def run(module, x, dtype):
        return jmpx.cast_tree(module, dtype)(x.astype(dtype)).astype(around)

    x = x.astype(around)
    for layer in model.layers:
        x = jax.nn.gelu(run(layer, x, layers))
    x = run(model.parts["norm"], x, norm) * model.rate
    x = x * model.parts["pair"][0].weight.astype(around)
    return run(model.head, x, head).astype(output)


@pytest.fixture(scope="module")
def made():
    return eqx.filter_jit(Net)()


@pytest.fixture
def net(made, rng):
    return randomized(made, rng)


ISLANDS = {
    MIXED: {},
    f"{MIXED}; */norm: full; /head: f16": {"norm": F32, "head": F16},
    f"{MIXED}; Linear: full; /head: bf16": {"layers": F32},
    f"{MIXED}; /head: bf16; Linear: full": {"layers": F32, "head": F32},
    "full; layers/*: bf16": {"layers": BF16, "norm": F32, "head": F32, "around": F32},
    "c=f16; parts/norm: full": dict.fromkeys(("layers", "head", "around", "output"), F16)
    | {"norm": F32},
}


@pytest.mark.parametrize("policy_map", ISLANDS)
def test_it_computes_what_the_casts_written_by_hand_do(net, rng, policy_map):
    def both(net, x):
        return with_policies(net, policy_map)(x), by_hand(net, x, **ISLANDS[policy_map])

    assert_same_bits(*compiled(both, net, normal(rng, 6)))


def test_gradients_have_the_models_structure_and_are_those_by_hand(net, rng):
    policy_map, casts = list(ISLANDS.items())[1]

    def gradients(net, x):
        def gradient(forward):
            return eqx.filter_value_and_grad(lambda net: jnp.mean(forward(net) ** 2))(net)

        of_view = gradient(lambda net: with_policies(net, policy_map)(x))
        return of_view, gradient(lambda net: by_hand(net, x, **casts))

    (value, grads), expected = compiled(gradients, net, normal(rng, 6))
    assert value.dtype == F32
    assert_same_bits((value, grads), expected)
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
    assert (view.name, view.rate, view.parts["pair"][1]) == ("net", 0.5, None)
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

    x, policy_map = normal(rng, 6), f"{MIXED}; LayerNorm: full"
    first, second = (forward(with_policies(net, policy_map), x) for _ in range(2))
    assert_same_bits(first, second)
    view = with_policies(net, policy_map)
    leaves, structure = jax.tree.flatten(view)
    for same in (jax.tree.unflatten(structure, leaves), eqx.nn.inference_mode(view)):
        assert_same_bits(forward(same, x), first)
    assert len(traces) == 1
    shapes = eqx.filter_eval_shape(lambda net: net, net)
    out = eqx.filter_eval_shape(lambda net, x: with_policies(net, "f16")(x), shapes, x)
    assert out.dtype == F16 and out.shape == (2,)


def test_what_each_layer_sees():
    class Outer(eqx.Module):
        probes: dict

        def __call__(self, x):
            for probe in self.probes.values():
                x = probe(x)
            return x

    model = Outer({name: Probe(jnp.ones(2), name) for name in "abc"} | {"d": Special(jnp.ones(2))})
    policy_map = "c=bf16,o=f32; Probe: f16; Special: full; probes/a: o=f16; */c: f32"
    assert with_policies(model, policy_map)(jnp.ones(2)).dtype == F32
    assert LOG == [
        ("a", "bfloat16", "bfloat16"),  # computes in what surrounds it
        ("b", "float16", "float16"),
        ("c", "float32", "float32"),
        ("probe", "float32", "float32"),
    ]


def test_rules_go_before_the_registry_and_that_before_the_default(net, rng):
    x = normal(rng, 6)
    assert jax.tree.structure(with_policies(net)) == jax.tree.structure(net)

    def results(net, x):
        with jmpx.push_policy(eqx.nn.LayerNorm, "c=f32,o=bf16"):
            with jmpx.push_policy(Net, MIXED):
                view = with_policies(net)  # which keeps the policies that it was made with
            mixed, ruled = (with_policies(net, MIXED + rule) for rule in ("", "; LayerNorm: f16"))
            found = [mixed(x), ruled(x)]
        with jmpx.push_policy(Net, "c=bf16,o=f16"):
            dtypes = [with_policies(net, MIXED + rule)(x).dtype for rule in ("", "; Net: o=f32")]
        assert dtypes == [F16, F32]
        return [view(x), *found], [by_hand(net, x, norm=norm) for norm in (F32, F32, F16)]

    assert_same_bits(*compiled(results, net, x))
    with jmpx.push_policy(Probe, "bf16"):  # subclasses do not inherit it
        assert with_policies(Special(x)).weight is x


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
    assert_same_bits(*compiled(lambda net, x: (view(x), by_hand(net, x)), net, x))
    assert set(calls) == {"compute", "output"}


# Methods and classes


class Coder(eqx.Module):
    """Methods of many kinds."""

    weight: jax.Array
    function: Callable = jax.nn.relu  # a field, though it binds as a method does
    limit: ClassVar[float] = 3.0

    @property
    def norm(self):
        return jnp.sum(self.weight)

    @property
    def alias(self):
        return self.encode

    def encode(self, x):
        LOG.append(("encode", x.dtype.name, self.weight.dtype.name))
        return x * self.weight

    def decode(self, x, *, shift=None):
        y = x / self.weight
        return {"y": y if shift is None else y + shift, "n": 3, "f": 0.5, "i": jnp.arange(2)}

    decode_by_one = functools.partialmethod(decode, shift=1.0)

    @eqx.filter_jit
    def jitted(self, x):
        return self.encode(x)

    @staticmethod
    def static(x):
        return x

    @classmethod
    def make(cls, x):
        return x

    def _private(self, x):
        return x

    def register(self, x):  # also a method of the class of abstract classes
        return x

    class Inner:
        pass

    def __getitem__(self, i):
        return self.weight[i]

    def __call__(self, x):
        outs = [self.encode(x), jax.vmap(self.encode)(x[None])[0], self.alias(x), self.jitted(x)]
        outs += [eqx.filter_vmap(self.encode)(x[None])[0], eqx.filter_checkpoint(self.encode)(x)]
        assert type(self) is Coder
        LOG.append({out.dtype.name for out in outs})
        return self.decode(outs[0])["y"]


@pytest.mark.thorough
def test_methods_are_cast_once_at_the_outermost_entry_and_all_else_is_left_alone(rng):
    model = Coder(normal(rng, 4))
    view, x = with_policies(model, MIXED), normal(rng, 4)
    rounded, weight = x.astype(BF16), model.weight.astype(BF16)
    assert_same_bits(view(x), ((rounded * weight) / weight).astype(F32))
    assert LOG.pop() == {"bfloat16"}  # no result was cast to float32 in between
    assert set(LOG) == {("encode", "bfloat16", "bfloat16")}
    for encode in view.encode, view.alias, view.jitted:
        assert_same_bits(encode(x), (rounded * weight).astype(F32))
    assert_same_bits(jax.vmap(view.encode)(x[None])[0], (rounded * weight).astype(F32))
    assert eqx.filter_jit(view.encode)(x).dtype == F32
    decoded = view.decode(x, shift=x)
    assert_same_bits(decoded["y"], (rounded / weight + rounded).astype(F32))
    assert (decoded["n"], decoded["f"], decoded["i"].dtype) == (3, 0.5, jnp.int32)
    assert_same_bits(view.decode_by_one(x)["y"], (rounded / weight + jnp.bfloat16(1)).astype(F32))
    assert view.register(x).dtype == F32 and view.register(x) is not x
    assert view.norm.dtype == view[0].dtype == view.weight.dtype == BF16
    assert view.function is jax.nn.relu and view.limit == 3.0 and view.Inner is Coder.Inner
    assert view.static(x) is view.make(x) is view._private(x) is x
    assert view.encode.__name__ == "encode" and view.decode.__doc__ is None


def test_inheritance_converters_checks_and_hooks(rng):
    made = []

    class Base(eqx.Module):
        weight: jax.Array = eqx.field(
            converter=lambda w: made.append("converter") or jnp.asarray(w)
        )

        def __init_subclass__(cls, *, label, **kwargs):
            made.append(label)

        def __check_init__(self):
            made.append("check")

        def __call__(self, x):
            return x * self.weight

    class Derived(Base, label="derived"):
        shift: jax.Array

        def __init__(self, weight):
            made.append("init")
            self.weight, self.shift = weight, jnp.ones(3)

        def __call__(self, x):
            return super().__call__(x) + self.shift

    model, x = Derived([1.0, 2.0, 3.0]), normal(rng, 3)
    before = list(made)
    view = with_policies(model, MIXED)
    assert_same_bits(
        view(x), (x.astype(BF16) * model.weight.astype(BF16) + jnp.bfloat16(1)).astype(F32)
    )
    assert made == before == ["derived", "init", "converter", "check"]


T = TypeVar("T")


class Abstract(eqx.Module, Generic[T]):
    size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def __call__(self, x):
        raise NotImplementedError

    @property
    def double(self):
        return 2 * self.size


class Concrete(Abstract[int]):
    weight: jax.Array
    size: int = eqx.field(static=True, kw_only=True)
    bias: float = 0.5
    label: str = eqx.field(init=False, static=True, default="b")
    missing: None = None
    pair: tuple = dataclasses.field(default_factory=lambda: (1, {"a b": jnp.ones(2)}))

    def __call__(self, x):
        assert self.pair[1]["a b"].dtype == BF16
        return x * self.weight + self.bias


class Metaclass(type(eqx.Module)):
    """A user's own."""


class Meta(Concrete, metaclass=Metaclass):
    class Config:
        factor = 2


@pytest.mark.parametrize("cls", [Concrete, Meta])
def test_classes_with_abstract_bases_generics_defaults_and_a_metaclass(cls, rng):
    model, x = cls(normal(rng, 3), size=7), normal(rng, 3)
    view = with_policies(model, MIXED)
    expected = (x.astype(BF16) * model.weight.astype(BF16) + 0.5).astype(F32)
    assert_same_bits(view(x), expected)
    assert (view.size, view.double, view.bias, view.missing, view.pair[0]) == (7, 14, 0.5, None, 1)
    assert isinstance(view, Abstract) and type(view).__name__ == cls.__name__
    assert_same_bits(copy.deepcopy(view)(x), expected)
    assert_same_bits(dataclasses.replace(model, weight=x).weight, x)
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.weight = x  # pyright: ignore[reportAttributeAccessIssue]


def test_wrappers_of_equinox_as_fields_and_as_the_model(rng):
    def of_linear(linear, x):
        expected = jax.vmap(jmpx.cast_tree(linear, BF16))(x.astype(BF16)).astype(F32)
        models = eqx.filter_vmap(linear), Around(eqx.filter_vmap(linear))
        return [with_policies(model, MIXED)(x) for model in models], [expected] * 2

    def of_products(w, x):
        scaled = eqx.Partial(lambda weight, x: x * weight, w)
        expected = (x.astype(BF16) * w.astype(BF16)).astype(F32)
        models = scaled, Coder(w).encode
        return [with_policies(model, MIXED)(x) for model in models], [expected] * 2

    x = normal(rng, 4, 3)
    assert_same_bits(*compiled(of_linear, drawn(lambda: eqx.nn.Linear(3, 2, key=KEY)), x))
    assert_same_bits(*compiled(of_products, x[0], x[1]))


def test_a_module_in_two_places_has_the_policies_of_both():
    class Twice(eqx.Module):
        first: Probe
        second: Probe

        def __call__(self, x):
            return self.first(x) + self.second(x)

    probe = Probe(jnp.ones(3))
    with_policies(Twice(probe, probe), f"{MIXED}; /second: full")(jnp.ones(3))
    assert [seen[1:] for seen in LOG] == [("bfloat16",) * 2, ("float32",) * 2]


def test_an_argument_in_which_nothing_is_cast_is_the_same_object():
    """A module may append to a list, or fill a dictionary."""

    class Noting(eqx.Module):
        def __call__(self, x, notes, sums):
            notes.append(x.dtype.name)
            sums["x"] = x.sum()

    notes, sums = [], {}
    with_policies(Noting(), "c=bf16")(jnp.ones(3), notes, sums=sums)
    assert notes == ["bfloat16"] and sums["x"].dtype == BF16


def test_modules_and_data_as_arguments_and_results(rng):
    class Data(eqx.Module):
        x: jax.Array
        mask: jax.Array

    class Outer(eqx.Module):
        inner: eqx.Module
        norm: eqx.nn.LayerNorm
        rule: Callable

        def __call__(self, data):
            assert isinstance(data, Data) and data.x.dtype == BF16
            return self.inner(data, self.norm, self.rule)  # pyright: ignore[reportCallIssue]

    class Inner(eqx.Module):
        weight: jax.Array

        def __call__(self, data, norm, rule):
            assert norm.weight.dtype == F32 and self.weight.dtype == F16 == data.x.dtype
            assert rule is jax.nn.relu
            return Data(norm(data.x), data.mask)

    def both(model, data):
        result = with_policies(model, f"{MIXED}; /inner: f16; /norm: c=f32,o=f16")(data)
        expected = model.norm(data.x.astype(BF16).astype(F16).astype(F32)).astype(F16)
        return result, Data(expected.astype(BF16).astype(F32), data.mask)

    model = drawn(lambda: Outer(Inner(jnp.ones(3)), eqx.nn.LayerNorm(3), jax.nn.relu))
    assert_same_bits(*compiled(both, model, Data(normal(rng, 3), jnp.array([True, False, True]))))
