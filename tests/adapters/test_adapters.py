"""What adapters share, and what they offer: also an adapter of a framework that is made up here."""

import contextlib
import functools
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import run_python

import jmpx
import jmpx.equinox
import jmpx.flax
from jmpx._adapters.boundaries import run_cast
from jmpx._adapters.proxies import public_methods
from jmpx._jaxprs.marks import in_module
from jmpx._policies import frameworks
from jmpx._policies.frameworks import Adapter
from jmpx._policies.registry import running

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


def test_every_adapter_of_the_table_is_one():
    adapters = list(frameworks.imported_adapters())
    assert len(adapters) == len(frameworks._ADAPTERS) == 4
    assert all(isinstance(adapter, Adapter) for adapter in adapters)


@pytest.mark.thorough
def test_asking_the_adapters_imports_no_framework():
    result = run_python(
        "-c",
        "import flax.linen, sys, jmpx\n"
        "jmpx.set_policy(flax.linen.Dense, 'c=bf16')\n"
        "jmpx.autocast(lambda x: x, 'c=bf16; Dense?: full')(1.0)\n"
        "names = {'jmpx._adapters.linen.adapter', 'flax.nnx'}\n"
        "print(jmpx.current_policy(), names & set(sys.modules))\n"
        "print({'equinox', 'haiku'} & set(sys.modules))",
    )
    assert result.stdout == "None {'jmpx._adapters.linen.adapter'}\nset()\n", result.stderr


class Methods:
    field = 3

    def __init__(self):
        pass

    def __call__(self):
        pass

    def method(self):
        pass

    partial = functools.partialmethod(method)
    jitted = jax.jit(method)

    def _private(self):
        pass

    @staticmethod
    def static():
        pass

    @classmethod
    def of_class(cls):
        pass

    @property
    def value(self):
        return 1

    class Inner:
        pass


class Derived(Methods):
    def method(self):
        pass

    def added(self):
        pass

    def register(self):  # also a method of the class of abstract classes
        pass


def test_public_methods_are_those_of_instances():
    assert set(public_methods(Methods, object)) == {"__call__", "method", "partial", "jitted"}
    assert set(public_methods(Derived, Methods)) == {"added", "register"}


class EquinoxDoubling(eqx.Module):
    def times(self, x, factor):
        assert x.dtype == jnp.bfloat16
        return x * factor

    twice = functools.partialmethod(times, factor=2)


class NNXDoubling(nnx.Module):
    times = EquinoxDoubling.times
    twice = functools.partialmethod(times, factor=2)


@pytest.mark.parametrize(
    "view",
    [
        jmpx.equinox.with_policies(EquinoxDoubling(), "c=bf16,o=f32"),
        jmpx.flax.with_policies(NNXDoubling(), "c=bf16,o=f32"),
    ],
    ids=["equinox", "nnx"],
)
def test_partial_methods_are_boundaries(view):
    y = view.twice(jnp.ones(2))
    assert y.dtype == jnp.float32 and y.tolist() == [2, 2]


def results(args, shapes, in_loop=True, carry=None, policy="c=bf16", echo=False):
    """The dtypes of the results of a call that reads, in a branch of JAX or outside.

    The results are the arguments if it is to echo them, else arrays in bfloat16.
    """
    policy, dtypes = jmpx.get_policy(policy), []

    def read():
        out = tuple(jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
        method = lambda *args: args if echo else out  # noqa: E731
        run = functools.partial(
            run_cast, policy, method, args, {}, by="", is_boundary=False, carry=carry
        )
        dtypes.extend(leaf.dtype.name for leaf in jax.tree.leaves(run()))
        return 0

    def model():
        with running(policy, "with_policies"):
            return jax.lax.cond(True, read, lambda: 0) if in_loop else read()

    jax.eval_shape(model)
    return dtypes


B, F = jnp.zeros(3, "bfloat16"), jnp.zeros(3)


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        ((F,), {"in_loop": False}, ["bfloat16", "bfloat16"]),
        ((F,), {}, ["float32", "float32"]),
        ((B,), {}, ["bfloat16", "bfloat16"]),
        ((B, F), {}, ["float32", "float32"]),
        ((B, jnp.zeros(5)), {}, ["bfloat16", "float32"]),  # a mask, or a cache, beside `x`
        ((F, jnp.zeros(2, "bfloat16")), {}, ["float32", "bfloat16"]),
        ((np.zeros(3),), {}, ["float32", "float32"]),  # NumPy's float64
        ((jnp.arange(3),), {}, ["bfloat16", "bfloat16"]),
        ((F, B), {"in_loop": False, "carry": (F, B[:2])}, ["float32", "bfloat16"]),
        ((B,), {"policy": "full", "echo": True}, ["bfloat16"]),
        ((B, F), {"policy": "full"}, ["bfloat16", "bfloat16"]),  # as without the call
        ((B,), {"policy": "full", "echo": True, "in_loop": False}, ["float32"]),
    ],
)
def test_a_call_that_reads_keeps_the_widest_dtype_in_a_loop(args, options, expected):
    assert results(args, ((3,), (2,)), **options) == expected


def test_an_argument_in_which_nothing_is_cast_is_the_same_object():
    """A module may append to a list, or fill a dictionary."""
    notes, sums = [], {}

    def method(x, notes, sums):
        notes.append(x.dtype.name)
        sums["x"] = x.sum()

    kwargs = {"sums": sums}
    run_cast(jmpx.get_policy("c=bf16"), method, (F, notes), kwargs, by="", is_boundary=False)
    assert notes == ["bfloat16"] and sums["x"].dtype == jnp.bfloat16
