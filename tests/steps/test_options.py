"""The options of the gradient functions: `jmpx.Batch`, `jmpx.Over`, and what is refused."""

import dataclasses
import inspect
import pickle
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jmpx
import jmpx.mpx as mpx

NOOP = jmpx.NoOpLossScale()
MAKERS = [
    jmpx.filter_grad,
    jmpx.filter_value_and_grad,
    mpx.filter_grad,
    mpx.filter_value_and_grad,
]
REFUSED = [
    ({"batch": 8}, r"got 8: write for example batch=jmpx\.Batch\(microbatches=8\)\.$"),
    ({"batch": jmpx.Over("data")}, r"for example batch=jmpx\.Batch\("),
    ({"over": "data"}, r'got .data.: write for example over=jmpx\.Over\("data"\)\.$'),
    ({"over": jmpx.Batch()}, r'write for example over=jmpx\.Over\("data"\)\.$'),
    ({"axis_name": "data"}, r'got axis_name: write over=jmpx\.Over\("data"\) instead\.$'),
    ({"sharded": True}, r'got sharded: write over=jmpx\.Over\("data", sharded=\.\.\.\)'),
    ({"batch_sharding": P("data")}, r"write batch=jmpx\.Batch\(sharding=\.\.\.\) instead"),
    ({"microbatches": 8}, r"write batch=jmpx\.Batch\(microbatches=\.\.\.\) instead"),
    ({"batch_argnums": 1}, r"write batch=jmpx\.Batch\(argnums=\.\.\.\) instead"),
    ({"uncast_argnums": 1}, r"got uncast_argnums: write uncast=\.\.\. instead"),
    ({"uncast_argnames": "y"}, r"got uncast_argnames: write uncast=\.\.\. instead"),
    ({"polcy": "bf16"}, r"got polcy; did you mean 'policy'\?$"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("options", "match"), REFUSED)
def test_what_is_no_option_is_refused_in_one_sentence(options, match, make):
    with pytest.raises(TypeError, match=match) as error:
        make(jnp.sum, NOOP, **options)
    assert str(error.value).startswith("Expected ") and "\n" not in str(error.value)


def test_mixed_precision_is_turned_off_in_the_functions_of_mpx_alone():
    with pytest.raises(TypeError, match=r"use_mixed_precision: write jmpx\.mpx\.filter_value_and"):
        jmpx.filter_grad(jnp.sum, NOOP, use_mixed_precision=False)  # pyright: ignore[reportCallIssue]
    assert list(inspect.signature(mpx.filter_grad).parameters)[:4] == [
        "func",
        "scaling",
        "has_aux",
        "use_mixed_precision",
    ]


def test_a_batch_that_contradicts_an_axis():
    batch, over = jmpx.Batch(sharding=P("data")), jmpx.Over("rows")
    with pytest.raises(ValueError, match=r"both batch=.*over=jmpx.Over\('rows'\): .* one of them"):
        jmpx.filter_grad(jnp.sum, NOOP, batch=batch, over=over)
    jmpx.filter_grad(jnp.sum, NOOP, batch=jmpx.Batch(microbatches=2), over=over)


BAD: list[Any] = [
    (jmpx.Over, (None,), r'got None: give it, as in jmpx\.Over\("data"\), or leave over'),
    (jmpx.Over, ((),), r"got \(\): give it"),
    (jmpx.Over, ("data", {"w": 1}), "bool or a pytree of bools, got the leaf 1"),
    (jmpx.Batch, ("1",), "argnums of jmpx.Batch to be an int or several, got '1'"),
    (jmpx.Batch, (None, 2.0), "microbatches to be a whole number, got 2.0"),
    (jmpx.Batch, (None, 1, "data"), "sharding of a jmpx.Batch .* got 'data'"),
]


@pytest.mark.parametrize(("make", "args", "match"), BAD)
def test_they_check_themselves_when_they_are_made(make, args, match):
    with pytest.raises(TypeError, match=match):
        make(*args)


VALUES: list[Any] = [
    jmpx.Batch(argnums=(1, 2), microbatches=4, sharding=P("data")),
    jmpx.Over(("data", "model"), sharded={"w": True, "b": "own"}),
]


@pytest.mark.parametrize("value", VALUES, ids=["Batch", "Over"])
def test_they_are_values(value):
    assert pickle.loads(pickle.dumps(value)) == value == dataclasses.replace(value)
    assert type(value).__module__ == "jmpx" and repr(value).startswith(f"{type(value).__name__}(")
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.sharding = None


@pytest.mark.parametrize("make", MAKERS[:2])
def test_a_gradient_function_can_be_held(make):
    parameters = list(inspect.signature(make).parameters.values())
    names = "func scaling has_aux policy grad_dtype uncast state_argnum batch over"
    assert [p.name for p in parameters] == names.split()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(names.split()[3:])
    assert len(str(make.__doc__).splitlines()) <= 60
