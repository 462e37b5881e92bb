"""The registry of rules: its names are JAX's, and it is the way to teach autocast a primitive."""

import sys

import equinox as eqx
import haiku as hk
import jax
import jax.extend.core.primitives
import jax.extend.random
import jax.lax.linalg
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax
from jax.extend.core import Primitive, primitives

import jmpx

# Private: the registry is not public yet, and marks are shown by no public name.
from jmpx._autocast import binding, neighbours, rules
from jmpx._autocast.kinds import low, promote
from jmpx._jaxprs import marks
from jmpx._jaxprs.core import operation_name

# Primitives that not all supported versions of JAX have. Keys are versions that the tests run (0.7,
# 0.10, 0.12): in SINCE the first that has the primitives, in BEFORE the first that lacks them.
SINCE = {
    "0.10": "all_gather_reduced mulhi ormqr stack tile unstack",
    "0.12": "log2 one_minus_square polynomial",
}


BEFORE = {"0.12": "call closed_call"}


def version(text):
    return tuple(map(int, text.split(".")[:2]))


LINES = ("0.7", "0.10", "0.12")


THIS_LINE = version(jax.__version__)


def primitives_of_jax():
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "jax"]
    values = [value for module in modules for value in list(vars(module).values())]
    return {operation_name(value.name) for value in values if isinstance(value, Primitive)}


@pytest.mark.skipif(THIS_LINE not in map(version, LINES), reason=f"names are those of {LINES}")
def test_rules_are_for_primitives_that_this_line_of_jax_has():
    not_yet = [names for line, names in SINCE.items() if version(line) > THIS_LINE]
    no_more = [names for line, names in BEFORE.items() if version(line) <= THIS_LINE]
    missing = {*rules.ENTRIES} - primitives_of_jax()
    assert missing == set(" ".join(not_yet + no_more).split())


def test_tables_name_primitives_with_rules():
    tables = neighbours.POWERS, neighbours.EXPONENTIALS, neighbours.CHOOSERS, binding.ELEMENTWISE
    for names in tables:
        assert names and {*names} <= {*rules.ENTRIES}


def test_a_primitive_has_one_rule():
    with pytest.raises(ValueError, match="Two rules for the primitive 'exp'"):
        rules.register("exp")(promote)


double = Primitive("double-it")
double.def_abstract_eval(lambda x: x)


def dtype_of_double(policy="compute=bf16"):
    @jmpx.autocast(policy=policy)
    def f(x):
        return double.bind(x @ x)

    jaxpr = jax.make_jaxpr(f)(jnp.ones((2, 2)))
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive is double)
    return eqn.invars[0].aval.dtype.name


def test_a_rule_for_a_new_primitive(monkeypatch):
    monkeypatch.setattr(rules, "ENTRIES", dict(rules.ENTRIES))
    assert dtype_of_double() == "float32"  # without a rule it runs as it was traced
    assert dtype_of_double("compute=bf16; op.double_it: f16") == "float16"
    rules.register("double_it")(promote)
    assert dtype_of_double() == "bfloat16"
    assert dtype_of_double("compute=bf16; op.double_it: full") == "float32"
    assert dtype_of_double("compute=full") == "float32"


def test_a_rule_reads_what_holds_there(monkeypatch):
    monkeypatch.setattr(rules, "ENTRIES", dict(rules.ENTRIES))
    seen = []

    @rules.register("double_it", everywhere=True)
    def rule(operation):
        seen.append((operation.scope, operation.region.dtype.name, operation.override))
        return low(operation)

    def f(x):
        with jax.named_scope("head"):
            y = double.bind(x)
        with jmpx.full_precision():
            return double.bind(y)  # of which no rule is asked

    for policy in ("compute=f16", "compute=bf16; head: full", "compute=bf16; op.double_it: f16"):
        jax.eval_shape(jmpx.autocast(f, policy), jnp.ones(2))
    assert seen == [
        ("head", "float16", None),
        ("head", "float32", None),
        ("head", "bfloat16", jnp.float16),
    ]


# These need no rule: they compute nothing in floating numbers, or run as they were traced.
WITHOUT_RULE = set(
    """
    after_all and axis_index clz create_token custom_lin dce_sink eval_jaxpr
    not or population_count ragged_all_to_all reduce_and reduce_or reduce_xor shift_left
    shift_right_arithmetic shift_right_logical stage xla_pmap xor
    """.split()
)


def test_each_operation_of_jax_has_a_rule():
    found = {
        operation_name(value.name)
        for module in (lax, primitives)
        for key, value in vars(module).items()
        if key.endswith("_p") and hasattr(value, "bind")
    }
    assert len(found) > 150
    assert found - {*rules.ENTRIES} <= WITHOUT_RULE
    assert not WITHOUT_RULE & {*rules.ENTRIES}


class Attending(nn.Dense):
    pass


# A module of a path, the name of a scope beside its mark, and whether its framework named it so.
NAMES = [
    ("net/block/linear", hk.Linear, "linear", True),
    ("net/block/linear", hk.Linear, "block", False),
    ("net/block/linear", hk.Linear, "Linear", True),
    ("block/Dense_0", nn.Dense, "Dense_0.attend", True),
    ("block/Dense_0", nn.Dense, "Dense_1.attend", False),
    ("", Attending, "Attending", True),
    ("", Attending, "Dense", True),
    ("layers/0", eqx.nn.Linear, "eqx.nn.Linear", True),
    ("layers/0", eqx.nn.Linear, "eqx.nn.Conv", False),
]


@pytest.mark.parametrize(("path", "cls", "name", "is_own"), NAMES)
def test_which_scopes_beside_a_mark_are_the_modules_own(path, cls, name, is_own):
    assert marks.is_own_name(marks.Module(cls, path), name) == is_own


def test_a_mark_means_its_module_as_soon_as_other_threads_can_find_it(monkeypatch):
    class Names(dict):
        def setdefault(self, mark, name):
            assert (marks.module_of(name), marks.class_policy_of(name)) == mark
            return super().setdefault(mark, name)

    monkeypatch.setattr(marks, "_names", Names())
    module = marks.Module(eqx.nn.Linear, "layer")
    names = [marks._name(marks._Mark(module, policy)) for policy in (None, "full") * 2]
    assert names[:2] == names[2:] and names[0] != names[1]
    assert {marks.module_of(name) for name in names} == {module}
