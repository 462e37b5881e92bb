"""Each operation of JAX has a rule."""

from jax import lax
from jax.extend.core import primitives

from jmpx._operations import HIGHER_ORDER, KINDS, operation_name

# These need no rule: they compute nothing in floating numbers, or run as they were traced.
WITHOUT_RULE = set(
    """
    after_all and axis_index clz convert_element_type create_token custom_lin dce_sink eval_jaxpr
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
    assert found - set(KINDS) - HIGHER_ORDER - WITHOUT_RULE == set()
    assert not WITHOUT_RULE & set(KINDS) | WITHOUT_RULE & HIGHER_ORDER
