"""Primitives that only move numbers, in groups, and those that hide what they compute.

Whoever follows numbers through a program names the groups that matter to it, and says why it leaves
out a group or a primitive of one.
"""

# Results that hold the numbers of the operand, as they are.
IDENTITIES = frozenset("copy copy_p name stop_gradient optimization_barrier device_put".split())
# The same, by primitives that change what JAX knows of the devices of an array.
PLACEMENTS = frozenset("sharding_constraint reshard mesh_cast pvary pbroadcast pcast".split())
# Results that hold each number of the operand, once unless it is broadcast, in another shape.
RESHAPES = frozenset("broadcast_in_dim reshape transpose squeeze expand_dims rev".split())
# Results that hold some numbers of the first operand; other operands are indices.
PICKS = frozenset("slice split unstack tile dynamic_slice gather".split())
# Results that hold numbers of several operands.
JOINS = frozenset("concatenate stack pad dynamic_update_slice".split())
# Results that hold numbers of other devices.
EXCHANGES = frozenset(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute
    """.split()
)
# Results that hold the numbers of the operand, rounded.
ROUNDINGS = frozenset("convert_element_type reduce_precision".split())

# The beginnings of the names of primitives that compute what no jaxpr shows, or that of a kernel.
HIDING = ("pure_callback", "io_callback", "ffi_call", "pallas_call", "custom_partitioning")
FOREIGN = "ffi_call"  # of these, that of a compiled function, which may be a kernel
