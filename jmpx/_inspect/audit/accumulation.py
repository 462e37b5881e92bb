"""Findings: sums and moving averages that are kept in 16 bits while a loop or training goes on."""

from collections.abc import Iterator

from jmpx._inspect.audit.data import Finding
from jmpx._inspect.audit.dependence import Dependence, Loop
from jmpx._inspect.audit.low_values import full_rule_or, largest_count, scopes_of_products
from jmpx._inspect.audit.recurrences import Recurrence, recurrences
from jmpx._inspect.graph import Graph


def accumulation(graph: Graph) -> Iterator[Finding]:
    """Yields `low-carry` and `low-average`."""
    found = list(recurrences(graph))
    if not found:
        return
    loops = [each.loop for each in found if each.loop is not None and not each.is_average]
    dependence = Dependence(graph, loops, [each.way.value for each in found])
    with_products = scopes_of_products(graph)
    for each in found:
        # What a layer adds to a residual stream depends on the stream, in this trip or the next;
        # what is averaged may depend on the average in later ones, as gradients do on momentum.
        depends = dependence.in_one_trip if each.is_average else dependence.in_any_trip
        if any(depends(addend, each.way.value) for addend in each.way.addends):
            continue
        if each.is_average:
            yield _average(graph, each, with_products)
        elif each.loop is not None and each.loop.trips not in (0, 1):
            yield from _carry(graph, each, each.loop)


def _carry(graph: Graph, found: Recurrence, loop: Loop) -> Iterator[Finding]:
    node, name, limit = found.node, found.dtype.name, largest_count(found.dtype)
    is_long = loop.trips is None or loop.trips > limit
    is_short = loop.trips is not None and loop.trips <= limit // 16
    if node.is_backward:
        if not is_long:  # Each scan over layers sums the gradients of what it closes over.
            return
        what = f"The gradient of a value that the loop closes over is summed in {name}"
        rule = (
            "cast the value to 16 bits inside of the loop: its gradient is then summed in float32"
        )
        node = loop.carries[0]  # JAX's versions give the addition itself different lines.
    else:
        what = f"The loop sums in a carry in {name}"
        rule = "start the carry in float32, as jnp.zeros(shape, jnp.float32), and add in float32"
    trips = "an unknown number of" if loop.trips is None else f"{loop.trips:,}"
    yield Finding(
        "low-carry",
        "high" if is_long else "low" if is_short else "medium",
        f"{what} over {trips} trips: a term below 1/{limit} of the sum so far may be lost.",
        graph.place(node),
        graph.path(node),
        rule,
        nbytes=found.way.value.nbytes * (loop.trips or 1),
    )


def _average(graph: Graph, found: Recurrence, with_products: set[str]) -> Finding:
    node, decay = found.node, found.way.decay
    lost = 1 / (largest_count(found.dtype) * (1 - decay))
    what = f"A moving average with decay {decay:.4g} is kept in {found.dtype.name}"
    advice = "keep it in float32: accumulator_dtype or mu_dtype=jnp.float32 in optax"
    return Finding(
        "low-average",
        "high" if lost > 0.1 else "medium" if lost > 0.01 else "low",
        f"{what}: it may stay where it is if new values differ by less than {lost:.1%}.",
        graph.place(node),
        graph.path(node),
        full_rule_or(graph, node, with_products, advice),
        nbytes=found.way.value.nbytes * node.times,
    )
