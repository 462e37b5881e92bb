"""A plain Python model of a program: its operations one by one, each compiled by itself."""

import jax
import jax.core
import jax.numpy as jnp

# Private: they say how an equation runs what it holds, in all versions of JAX.
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import inner_of


def one_by_one(f, *args, note=lambda eqn: None):
    """Returns what the operations of a function give, loops and branches by Python's own.

    `note` is told of each operation that runs.
    """
    jaxpr, shapes = jax.make_jaxpr(lambda *args: f(*args), return_shape=True)(*args)
    results = run(jaxpr, jax.tree.leaves(args), note)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def run(jaxpr, arrays, note):
    env = dict(zip(jaxpr.invars, arrays, strict=True))
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    env.update(zip(inner.constvars, core.consts_of(jaxpr), strict=True))

    def read(atom):
        return jnp.asarray(atom.val, atom.aval.dtype) if core.is_literal(atom) else env[atom]

    for eqn in inner.eqns:
        env.update(zip(eqn.outvars, step(eqn, [*map(read, eqn.invars)], note), strict=True))
    return [*map(read, inner.outvars)]


def step(eqn, operands, note):
    inner = inner_of(eqn)
    if inner is None:
        note(eqn)
        return core.bind(eqn, operands)
    if inner.kind == "call":
        return run(inner.jaxprs[0], operands, note)
    if inner.kind == "cond":
        index, *operands = operands
        return run(eqn.params["branches"][int(index)], operands, note)
    consts, carry, xs = inner.split(operands)
    if inner.kind == "while":
        while run(inner.condition, [*operands[: inner.first], *carry], note)[0]:
            carry = run(inner.jaxprs[0], [*consts, *carry], note)
        return carry
    assert inner.kind == "scan"
    stacked = []
    turns = range(eqn.params["length"])
    for i in reversed(turns) if eqn.params["reverse"] else turns:
        results = run(inner.jaxprs[0], [*consts, *carry, *(x[i] for x in xs)], note)
        carry = results[: len(carry)]
        stacked.append(results[len(carry) :])
    stacked = stacked[::-1] if eqn.params["reverse"] else stacked
    return [*carry, *(jnp.stack(ys) for ys in zip(*stacked, strict=True))]
