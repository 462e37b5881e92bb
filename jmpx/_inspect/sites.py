"""Which node of a graph is which equation of a program that runs: both have the same key."""

from jmpx._inspect.graph import Node


def key_of(node: Node) -> tuple[int, ...]:
    """Returns the key of a node; the site of the same equation has an equal one."""
    key, around = [id(node.eqn)], node.around
    while around is not None:
        key.append(id(around.eqn))
        around = around.around
    return tuple(reversed(key))
