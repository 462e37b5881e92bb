"""Provisional: branch flops has the real one."""

from jmpx._audit.data import Products
from jmpx._audit.flops import flops_of, is_product


def products(graph):
    found = {}
    for node in graph.nodes:
        if not node.is_structure and is_product(node.eqn):
            key = " x ".join(value.dtype.name for value in node.operands[:2])
            flops, count = found.get(key, (0, 0))
            found[key] = flops + node.times * flops_of(node.eqn), count + node.times
    return tuple(sorted((Products(k, *v) for k, v in found.items()), key=lambda p: -p.flops))


def other_flops(graph):
    nodes = (n for n in graph.nodes if not n.is_structure and not is_product(n.eqn))
    return sum(n.times * flops_of(n.eqn) for n in nodes)


def saved(graph):
    return {}


def casts(graph):
    return ()


def scopes(graph):
    return ()
