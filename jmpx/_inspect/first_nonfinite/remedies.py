"""Which rules may mend an infinity or a NaN, those for what made it first; a replay tries them."""

from collections.abc import Iterator

from jmpx._inspect.first_nonfinite.search import HAND_ON
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.running import is_narrow
from jmpx._inspect.where import selector, where
from jmpx._policies.map_strings import parse_rule

_MOST = 6  # rules that are tried; for each the program is compiled once more
_FARTHEST = 32  # how many operations before it are looked at
_AUTOCAST = "jmpx.autocast"


def rules_for(graph: Graph, node: Node) -> list[str]:
    """Returns rules for a node and for what computed its operands, the nearest first.

    There are none for a program without a function that takes a policy map.
    """
    takers, outermost = graph.program.takers, graph.outermost()
    behind = Graph.back(node.results[:1], lambda each: each.operands, _FARTHEST)
    narrow = (n for n in behind if any(is_narrow(v.dtype) for v in (*n.operands, *n.results)))
    rules = (rule for each in narrow for rule in _of_node(each, _AUTOCAST in takers))
    found = {text: parse_rule(text) for text in rules} if takers else {}
    return [
        text
        for text, rule in found.items()
        if not any(rule.matches(*module) for module in outermost)
    ][:_MOST]


def _of_node(node: Node, is_autocast: bool) -> Iterator[str]:
    select, module = selector(node.scope), where(node.scope).module
    if select is not None and (module is not None or is_autocast):
        yield f"{select}: f32"
        # Without `o=` it returns the output dtype of the map, in which its result may overflow.
        if module is not None and not is_autocast and not node.is_backward:
            yield f"{select}: c=f32,o=f32"
    # Rules for operations are for those that autocast computes, in the forward pass.
    is_computed = node.name not in HAND_ON | {"convert_element_type"} and not node.is_structure
    if is_autocast and is_computed and not node.is_backward:
        yield f"op.{node.name}: f32"
