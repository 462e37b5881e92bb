"""What adapters share, and what they offer: also an adapter of a framework that is made up here."""

import contextlib
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32

import jmpx
import jmpx.equinox  # so that its adapter is among the imported ones
import jmpx.flax

# Private: a fifth framework is written against these files, and what two of the four adapters make
# of `dtype` fields has no other table of all cases.
from jmpx._adapters import boundaries
from jmpx._jaxprs.marks import Module, in_module
from jmpx._policies import frameworks
from jmpx._policies.frameworks import Adapter

# A made-up framework: its modules run through `interceptors`, and it has a store of its own.

interceptors = []
store = {}


class Dense:
    path = "net/dense"

    def __call__(self, x):
        run = functools.partial(jnp.dot, x, x)
        for intercept in interceptors:
            run = functools.partial(intercept, self, run)
        return run()


Dense.__module__ = "toy.layers"


@contextlib.contextmanager
def appended(values, value):
    values.append(value)
    try:
        yield
    finally:
        values.remove(value)


class ToyPolicies:
    get, set = staticmethod(store.get), staticmethod(store.__setitem__)
    interception = contextlib.nullcontext

    def clear(self, cls):
        store.pop(cls, None)

    def check_push(self, cls, policy):
        if policy.compute_dtype == jnp.float16:
            raise ValueError("toys do not push float16")


class ToyAdapter(Adapter):
    class_policies = ToyPolicies()  # pyright: ignore[reportAssignmentType]

    def current_policy(self):
        return jmpx.get_policy("c=f16") if interceptors else None

    def marked_calls(self):
        def intercept(module, run):
            with in_module(type(module), module.path):
                return run()

        return appended(interceptors, intercept)


@pytest.fixture(params=["line", "no line"])
def has_line(request, monkeypatch):
    """The framework is imported; its adapter has a line in the table, or has none."""
    monkeypatch.setitem(sys.modules, "toy", types.ModuleType("toy"))
    module = types.ModuleType("toy_adapter")
    vars(module)["adapter"] = ToyAdapter()
    monkeypatch.setitem(sys.modules, "toy_adapter", module)
    if request.param == "line":
        monkeypatch.setitem(frameworks._ADAPTERS, "toy", "toy_adapter")
    yield request.param == "line"
    assert not interceptors
    store.clear()


def test_class_policies_are_in_the_frameworks_store(has_line):
    policy = jmpx.get_policy("c=bf16")
    jmpx.set_policy(Dense, policy)
    assert store == ({Dense: policy} if has_line else {})
    assert jmpx.policy_of(Dense) == policy
    with jmpx.push_policy(Dense, "full"):
        assert jmpx.policy_of(Dense) == jmpx.get_policy("full")
    assert jmpx.policy_of(Dense) == policy
    refused = (
        pytest.raises(ValueError, match="do not push") if has_line else contextlib.nullcontext()
    )
    with refused, jmpx.push_policy(Dense, "c=f16"):
        pass
    jmpx.clear_policy(Dense)
    assert jmpx.policy_of(Dense) is None and not store


def test_class_rules_of_autocast_find_marked_calls(has_line):
    seen = []

    def f(x):
        seen.append(jmpx.current_policy())
        return Dense()(x) + x @ x

    warned = contextlib.nullcontext() if has_line else pytest.warns(UserWarning, match="matched no")
    with warned:
        cast = jax.make_jaxpr(jmpx.autocast(f, "c=bf16; Dense: full; net/*: full"))(
            jnp.ones((2, 2))
        )
    products = [eqn for eqn in cast.eqns if eqn.primitive.name == "dot_general"]
    dtypes = [eqn.outvars[0].aval.dtype.name for eqn in products]
    assert dtypes == ["float32" if has_line else "bfloat16", "bfloat16"]
    assert seen == [jmpx.get_policy("c=f16") if has_line else None]


# The `dtype` fields of layers


def layer(**fields):
    return types.SimpleNamespace(**fields)


def test_floating_dtypes_are_fields():
    for value, expected in [
        (jnp.float32, F32),
        ("bfloat16", BF16),
        (np.dtype("float16"), F16),
        *((other, None) for other in (None, jnp.int32, jnp.complex64, jnp.float8_e4m3fn, object())),
    ]:
        assert boundaries.dtype_field(layer(dtype=value)) == expected
        assert boundaries.dtype_field(layer(param_dtype=value)) is None


@pytest.mark.parametrize(
    ("field", "rule", "around", "value", "is_ruled"),
    [
        (F32, None, None, F32, False),  # no rule: the layer's own
        (F32, "c=bf16", None, BF16, True),  # selected
        (None, "c=bf16", None, None, True),
        (F32, None, (F32, BF16), BF16, True),  # handed down before
        (BF16, None, (F32, BF16), BF16, True),  # handed down in the call
        (F16, None, (F32, BF16), F16, False),  # another one stays
        (F32, None, (None, BF16), F32, False),
        (F32, "c=f16", (F32, BF16), F16, True),  # the innermost rule
    ],
)
def test_the_field_in_a_call(field, rule, around, value, is_ruled):
    ruled = None if rule is None else jmpx.get_policy(rule).compute_dtype
    around = None if around is None else boundaries.Selected(*around)
    found = boundaries.field_in_call(layer(dtype=field), ruled, around)
    assert (found.value, found.is_ruled) == (value, is_ruled)


def test_the_field_is_the_dtype_in_which_a_layer_reads():
    policy = jmpx.get_policy("c=bf16,o=f32")
    assert boundaries.reading_policy(policy, None) is policy
    assert boundaries.reading_policy(policy, BF16) is policy
    assert boundaries.reading_policy(policy, F32) == jmpx.get_policy("c=f32,o=f32")


@pytest.mark.parametrize(
    "layers", [[], [("a", 30, BF16)], [("a", 30, None)], [("a", 20, F32), ("b", 20, None)]]
)
def test_nothing_is_said_of_fields_that_keep_half_of_the_parameters_or_less(layers):
    """tests/messages has what is said of those that keep most."""
    counted = boundaries.FieldCensus()
    for path, size, field in layers:  # a class, a path, a size and a field
        module = Module(type(path.upper(), (), {}), path)
        found = boundaries.field_in_call(layer(dtype=field), None, None)
        counted.note_layer(module, found)
        counted.note_parameter(module, "kernel", np.ones(size, np.float32))
    counted.warn(jmpx.get_policy_map("c=bf16,o=f32"), "policies", stacklevel=1)
