"""What a view keeps of a module's class: methods, inheritance, wrappers, containers."""

import abc
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, LOG, MIXED, assert_same_bits, normal, warns_once
from helpers.equinox_net import Around, Probe, randomized

import jmpx
from jmpx.equinox import with_policies


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

    def __getitem__(self, i):
        return self.weight[i]

    def __call__(self, x):
        outs = [self.encode(x), jax.vmap(self.encode)(x[None])[0], self.alias(x), self.jitted(x)]
        outs += [eqx.filter_vmap(self.encode)(x[None])[0], eqx.filter_checkpoint(self.encode)(x)]
        assert type(self) is Coder
        LOG.append({out.dtype.name for out in outs})
        return self.decode(outs[0])["y"]


def test_methods_are_cast_once_at_the_outermost_entry(rng):
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


def test_all_else_of_a_class_is_left_alone(rng):
    model = Coder(normal(rng, 4))
    view, x = with_policies(model, MIXED), normal(rng, 4)
    assert view.norm.dtype == view[0].dtype == view.weight.dtype == BF16
    assert view.function is jax.nn.relu and view.limit == 3.0
    assert view.static(x) is view.make(x) is view._private(x) is x
    assert view.encode.__name__ == "encode" and view.decode.__doc__ is None


def test_inheritance_converters_checks_and_hooks(rng):
    made = []

    class Base(eqx.Module):
        weight: jax.Array = eqx.field(
            converter=lambda w: made.append("converter") or jnp.asarray(w)
        )

        def __init_subclass__(cls, *, label, **kwargs):
            super().__init_subclass__(**kwargs)
            made.append(label)

        def __check_init__(self):
            made.append("check")

        def __call__(self, x):
            return x * self.weight

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Equinox's, of the two kinds of __init__

        class Derived(Base, label="derived"):
            shift: jax.Array

            def __init__(self, weight):
                made.append("init")
                self.weight, self.shift = weight, jnp.ones(3)

            def __post_init__(self):
                raise AssertionError

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


def test_wrappers_of_equinox_as_fields_and_as_the_model(rng, key):
    linear = eqx.nn.Linear(3, 2, key=key)
    x, cast = normal(rng, 4, 3), jmpx.cast_tree(linear, jnp.bfloat16)
    expected = jax.vmap(cast)(x.astype(BF16)).astype(F32)
    for model in eqx.filter_vmap(linear), Around(eqx.filter_vmap(linear)):
        assert_same_bits(with_policies(model, MIXED)(x), expected)
    scaled = eqx.Partial(lambda weight, x: x * weight, x[0])
    expected = (x[1].astype(BF16) * x[0].astype(BF16)).astype(F32)
    assert_same_bits(with_policies(scaled, MIXED)(x[1]), expected)
    coder = Coder(x[0])
    assert_same_bits(with_policies(coder.encode, MIXED)(x[1]), expected)


def test_a_module_in_two_places_has_the_policies_of_both(rng):
    class Twice(eqx.Module):
        first: Probe
        second: Probe

        def __call__(self, x):
            return self.first(x) + self.second(x)

    probe = Probe(normal(rng, 3))
    with_policies(Twice(probe, probe), f"{MIXED}; /second: full")(jnp.ones(3))
    assert [dtypes[1:] for dtypes in LOG] == [("bfloat16",) * 2, ("float32",) * 2]


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

    model = randomized(Outer(Inner(jnp.ones(3)), eqx.nn.LayerNorm(3), jax.nn.relu), rng)
    data = Data(normal(rng, 3), jnp.array([True, False, True]))
    result = with_policies(model, f"{MIXED}; /inner: f16; /norm: c=f32,o=f16")(data)
    expected = model.norm(data.x.astype(BF16).astype(F16).astype(F32)).astype(F16)
    assert_same_bits(result, Data(expected.astype(BF16).astype(F32), data.mask))


class Container(eqx.Module):
    encoder: eqx.nn.Linear
    parts: list
    offset: jax.Array


def test_of_a_mere_container_the_default_is_that_of_the_modules_in_it(rng, key):
    parts = [eqx.nn.LayerNorm(4), np.ones(2, np.float32), 3.0]
    model = randomized(Container(eqx.nn.Linear(4, 4, key=key), parts, jnp.ones(2)), rng)
    view, x = with_policies(model, f"{MIXED}; LayerNorm: full"), normal(rng, 4)
    assert view.offset.dtype == view.parts[1].dtype == BF16 and view.parts[2] == 3.0
    expected = jmpx.cast_tree(model.encoder, jnp.bfloat16)(x.astype(BF16)).astype(F32)
    assert_same_bits(view.encoder(x), expected)
    assert_same_bits(view.parts[0](x), model.parts[0](x))
    assert isinstance(view, Container)


def test_a_container_hands_its_policy_on_to_the_modules_in_it(rng, key):
    class Model(eqx.Module):
        box: Container

        def __call__(self, x):
            return self.box.parts[0](self.box.encoder(x)) * self.box.offset

    box = Container(eqx.nn.Linear(4, 4, key=key), [eqx.nn.LayerNorm(4)], jnp.ones(4))
    model, x = randomized(Model(box), rng), normal(rng, 4)
    view = with_policies(model, f"{MIXED}; Container: full; LayerNorm: f16")
    assert view.box.offset.dtype == F32
    view = with_policies(model, f"{MIXED}; Linear: f16; /box: full; /box/encoder: f16")
    view = eqx.tree_at(lambda view: view.box.offset, view, jnp.ones(4, BF16))
    inside = jmpx.cast_tree(model.box.encoder, jnp.float16)(x.astype(BF16).astype(F16)).astype(BF16)
    inside = model.box.parts[0](inside.astype(F32)).astype(BF16)
    assert_same_bits(view(x), inside.astype(F32))


def test_an_outermost_container_hands_its_policy_on(rng, key):
    box = Container(eqx.nn.Linear(4, 4, key=key), [eqx.nn.LayerNorm(4)], jnp.ones(4))
    box, x = randomized(box, rng), normal(rng, 4)
    outer: Any = Container(box, [], jnp.ones(1))  # pyright: ignore[reportArgumentType]
    for model, rule in ((box, "Container"), (outer, "/encoder")):
        view = with_policies(model, f"c=bf16; {rule}: c=f32,o=f16; LayerNorm: bf16")
        view = view if model is box else view.encoder
        assert view.offset.dtype == view.encoder.weight.dtype == F32
        assert_same_bits(view.encoder(x), box.encoder(x).astype(F16))
        assert view.parts[0].weight.dtype == BF16


def test_rules_that_match_nothing_are_told_once():
    model = Coder(jnp.ones(2))
    with warns_once(__file__, r"'Codr: .*' .* matched no class; did you mean 'Coder'"):
        with_policies(model, "c=bf16; Codr: full")
    nested = eqx.nn.Sequential([model])
    with pytest.warns(UserWarning, match="did you mean 'layers/0'"):
        with_policies(nested, "c=bf16; layer/0: full")
    with pytest.warns(
        UserWarning, match="'op.exp: .*' .* hold by=operations and in jmpx.autocast alone"
    ):
        with_policies(nested, "c=bf16; layers/0: full; op.exp: full")
