"""What a rule makes of the `dtype` fields of layers, and the count of what they keep."""

import types
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from jmpx._adapters.dtype_fields import (
    FieldCensus,
    Selected,
    dtype_field,
    field_in_call,
    reading_policy,
    spelled_as,
)
from jmpx._jaxprs.marks import Module
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.strings import get_policy

F32, BF16, F16 = (np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))


def layer(**fields):
    return types.SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.float32, F32),
        ("bfloat16", BF16),
        (np.dtype("float16"), F16),
        (None, None),
        (jnp.int32, None),
        (jnp.complex64, None),
        (jnp.float8_e4m3fn, None),
        (object(), None),
    ],
)
def test_floating_dtypes_are_fields(value, expected):
    assert dtype_field(layer(dtype=value)) == expected
    assert dtype_field(layer(param_dtype=value)) is None


@pytest.mark.parametrize(
    ("field", "rule", "around", "value", "is_ruled"),
    [
        (F32, None, None, F32, False),  # no rule: the layer's own
        (F32, "c=bf16", None, BF16, True),  # selected
        (None, "c=bf16", None, None, True),
        (F32, None, Selected(F32, BF16), BF16, True),  # handed down before
        (BF16, None, Selected(F32, BF16), BF16, True),  # handed down in the call
        (F16, None, Selected(F32, BF16), F16, False),  # another one stays
        (F32, None, Selected(None, BF16), F32, False),
        (F32, "c=f16", Selected(F32, BF16), F16, True),  # the innermost rule
    ],
)
def test_field_in_call(field, rule, around, value, is_ruled):
    policy = None if rule is None else get_policy(rule)
    found = field_in_call(layer(dtype=field), policy, around)
    assert (found.value, found.is_ruled) == (value, is_ruled)


def test_the_field_is_the_dtype_in_which_a_layer_reads():
    policy = get_policy("c=bf16,o=f32")
    assert reading_policy(policy, None) is policy
    assert reading_policy(policy, BF16) is policy
    assert reading_policy(policy, F32) == get_policy("c=f32,o=f32")


@pytest.mark.parametrize(
    ("written", "expected"),
    [(jnp.float32, jnp.bfloat16), (F32, BF16), ("float32", "bfloat16"), (np.float32, jnp.bfloat16)],
)
def test_a_field_is_set_in_the_form_in_which_it_was_written(written, expected):
    found = spelled_as(written, BF16)
    assert found == expected and type(found) is type(expected)


class Dense: ...


class Block: ...


class Model: ...


def census(layers):
    """Counts layers: their class, path, size and field."""
    counted = FieldCensus()
    for cls, path, size, field in layers:
        module = Module(cls, path)
        counted.note_layer(module, field_in_call(layer(dtype=field), None, None))
        if size:
            counted.note_parameter(module, "kernel", np.ones(size, np.float32))
    return counted


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            [(Model, "", 0, F32), (Dense, "a", 30, F32), (Block, "b", 10, None)],
            ("1 of 2 layers", "'Dense: compute=bfloat16'"),
        ),
        (
            [(Model, "", 0, None), (Dense, "a", 30, F32), (Block, "b", 20, F32)],
            ("2 of 2 layers", "'Dense: compute=bfloat16; Block: compute=bfloat16'"),
        ),
    ],
)
def test_the_warning_has_a_rule(layers, words):
    with pytest.warns(UserWarning) as caught:
        census(layers).warn(get_policy_map("c=bf16,o=f32"), "policies", stacklevel=1)
    assert all(word in str(caught[0].message) for word in words)


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [(Dense, "a", 30, BF16)],
        [(Dense, "a", 30, None)],
        [(Dense, "a", 20, F32), (Dense, "b", 20, None)],  # half, not most
    ],
)
def test_no_warning_where_the_policy_map_holds(layers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        census(layers).warn(get_policy_map("c=bf16,o=f32"), "policies", stacklevel=1)
