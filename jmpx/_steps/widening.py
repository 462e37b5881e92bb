"""Gradients that are not rounded to 16 bits on their way, by a pass over a gradient's program.

The gradient of a float32 parameter that was cast to bfloat16 leaves its product, whose sums are in
float32, rounded to bfloat16, and is widened later. Devices, micro-batches and turns of a loop then
add up rounded numbers. The pass goes backwards from the gradients: values that only they depend on
become float32, up to the products, which return their float32 sums. Operands of products, and
values that anything else reads, such as the loss, do not change.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jmpx._base.axes import vary, varying_axes
from jmpx._base.trees import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr
from jmpx._jaxprs.equations import FLOPS, IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES
from jmpx._jaxprs.inner import CHANGEABLE, once_per_jaxpr
from jmpx._jaxprs.marks import ROUNDED, SCALED
from jmpx._jaxprs.rewriting import (
    by_platform,
    casting,
    may_fail,
    new_variable,
    replaced,
    with_jaxprs,
)

Flags = tuple[bool, ...]

# A sum of 16-bit numbers that other operations read, too, as the gradient of a bias is, stays in
# 16 bits if it reads more bytes than this in float32, on each device of the mesh that is set here:
# compilers may write them to memory. (Sums of 32,000 logits cost 640 MiB on a TPU v5e.)
LARGEST_SUM = 2**28

_CAST, _BARRIER = "convert_element_type", "optimization_barrier"
_FLOAT32 = np.dtype(np.float32)
# A gradient of 8 bits is meant to be so: it was scaled for them.
_NARROW = frozenset({np.dtype(jnp.bfloat16), np.dtype(np.float16)})
# Sums of gradients: an operand that was rounded before is marked as a loss; in other sums it is
# not.
_OF_GRADIENTS = frozenset("add add_any sub neg reduce_scatter".split())
_SUMS = _OF_GRADIENTS | frozenset("reduce_sum cumsum scatter_add mul div".split())
# Each result of these depends on the operand at the same position.
_EACH = frozenset({_BARRIER, "psum", "psum_invariant"})
_MOVES = (IDENTITIES - {_BARRIER, "stop_gradient", "device_put"}) | PLACEMENTS | RESHAPES
_MOVES |= PICKS | JOINS | frozenset("select_n all_gather all_to_all ppermute".split())
# The operands that hold numbers; the others are indices or a predicate.
_NUMBERS = {
    "dynamic_slice": slice(0, 1),
    "gather": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "scatter_add": slice(0, None, 2),
    "select_n": slice(1, None),
}


def value_and_wide_gradients(
    run: Callable[[list[jax.Array]], tuple[jax.Array, PyTree]], params: list[jax.Array]
) -> tuple[tuple[jax.Array, PyTree], list[jax.Array]]:
    """Returns the result of `jax.value_and_grad(run, has_aux=True)`, with gradients in float32.

    Wider gradients keep their dtype. Only the derivative is traced, not the loss.
    """
    value, pullback, aux = jax.vjp(run, params, has_aux=True)
    (one,) = vary([jnp.ones_like(value)], varying_axes(value))
    traced = core.trace(pullback, (one,), {})
    all_out, none_in = (True,) * len(traced.jaxpr.outvars), (False,) * len(traced.jaxpr.invars)
    wide, _ = _rewritten(traced.jaxpr, all_out, none_in, all_out)
    jaxpr = traced.jaxpr if wide is None else wide
    (grads,) = traced.rebuild(core.evaluate(jaxpr, traced.arrays))
    return (value, aux), grads


# Which variables may be float32.


@once_per_jaxpr
def _demanded(jaxpr: Jaxpr, outs: Flags) -> tuple[frozenset[Atom], Flags]:
    """Returns the variables on which only marked results depend, and which inputs are such."""
    read, refused = set[Atom](), set[Atom]()

    def note(atoms: Sequence[Atom], flags: Sequence[bool]) -> None:
        for atom, flag in zip(atoms, flags, strict=True):
            if not core.is_literal(atom):
                (read if flag else refused).add(atom)

    note(jaxpr.outvars, outs)
    for eqn in reversed(jaxpr.eqns):
        if read.isdisjoint(eqn.outvars):
            refused.update(atom for atom in eqn.invars if not core.is_literal(atom))
            continue
        read.update(eqn.outvars)  # a result that nothing reads may be anything
        flags = tuple(var not in refused for var in eqn.outvars)
        note(eqn.invars, _accepted(eqn, flags) if any(flags) else (False,) * len(eqn.invars))
    wide = frozenset(read - refused)
    return wide, tuple(var in wide for var in jaxpr.invars)


def _accepted(eqn: Equation, outs: Flags) -> Sequence[bool]:
    """Returns which operands of an equation may be wide, if these results may."""
    name = eqn.primitive.name
    if name == _CAST or name in _EACH:
        return outs
    if name in CHANGEABLE:
        return _settled(eqn, outs)[1]
    numbers = _numbers(eqn) if all(outs) else frozenset()
    is_scaled = core.scope_of(eqn).endswith(SCALED)
    if name in ("mul", "div") and all(atom.aval.shape for atom in eqn.invars) and not is_scaled:
        numbers = frozenset()  # two arrays, each of which may be as large as an activation
    return [i in numbers for i in range(len(eqn.invars))]


def _numbers(eqn: Equation) -> frozenset[int]:
    """Returns the operands whose numbers a sum or a move reads."""
    name = core.operation_name(eqn.primitive.name)
    if name not in _SUMS | _MOVES:
        return frozenset()
    return frozenset(range(len(eqn.invars))[_NUMBERS.get(name, slice(None))])


def _settled(eqn: Equation, outs: Flags) -> tuple[Flags, Flags]:
    """Returns which results of an equation that runs a jaxpr can be wide, and which operands."""
    jaxprs = core.inner_jaxprs(eqn.params)
    if eqn.primitive.name == "cond":
        inputs = zip(*(_demanded(jaxpr, outs)[1] for jaxpr in jaxprs), strict=True)
        return outs, (False, *map(all, inputs))
    (jaxpr,) = jaxprs
    if eqn.primitive.name != "scan":
        return outs, _demanded(jaxpr, outs)[1]
    consts, carry = core.scan_counts(eqn)
    while True:  # a carry is wide as a result and as an operand, or as neither
        ins = _demanded(jaxpr, outs)[1]
        carried = tuple(a and b for a, b in zip(ins[consts:], outs[:carry], strict=False))
        if carried == outs[:carry]:
            return outs, ins
        outs = carried + outs[carry:]


# The same program, with these variables in float32.


@once_per_jaxpr
def _rewritten(jaxpr: Jaxpr, outs: Flags, ins: Flags, forced: Flags) -> tuple[Jaxpr | None, Flags]:
    """Returns a jaxpr whose marked results `outs` are computed in float32; None if nothing changes.

    The inputs of `ins` come in float32, and the results of `forced` leave in it. Second: which
    results leave in float32 and were narrower.
    """
    rewriting = _Rewriting(jaxpr, outs, ins)
    for eqn in jaxpr.eqns:
        rewriting.add(eqn)
    results = []
    for var, is_forced, may_be_wide in zip(jaxpr.outvars, forced, outs, strict=True):
        get = rewriting.read if may_be_wide else rewriting.as_it_was
        results.append(rewriting.widen(var, True) if is_forced else get(var))
    is_wide = tuple(
        new.aval.dtype != var.aval.dtype if _is_narrow(var) else False
        for new, var in zip(results, jaxpr.outvars, strict=True)
    )
    if not rewriting.changed and not any(ins) and not any(is_wide):
        return None, is_wide
    return replaced(jaxpr, invars=rewriting.invars, outvars=results, eqns=rewriting.eqns), is_wide


class _Rewriting:
    """The equations of a jaxpr that is rewritten, and the new variables in place of its own."""

    def __init__(self, jaxpr: Jaxpr, outs: Flags, ins: Flags) -> None:
        self.wide, _ = _demanded(jaxpr, outs)
        self.eqns: list[Equation] = []
        self.changed = False
        self.names: dict[Atom, Atom] = {}
        self.casts: dict[tuple[int, np.dtype], Atom] = {}
        self.invars = [
            self._new(var) if is_wide else var
            for var, is_wide in zip(jaxpr.invars, ins, strict=True)
        ]

    def read(self, atom: Atom) -> Atom:
        """Returns the atom in place of an operand, in its new dtype."""
        return atom if core.is_literal(atom) else self.names.get(atom, atom)

    def widen(self, atom: Atom, is_gradient: bool) -> Atom:
        """Returns an operand in float32; a scope marks the cast of a gradient that was narrower."""
        atom = self.read(atom)
        return self._cast(atom, _FLOAT32, is_gradient) if _is_narrow(atom) else atom

    def as_it_was(self, atom: Atom) -> Atom:
        """Returns an operand in its own dtype."""
        new = self.read(atom)
        is_same = not _is_narrow(atom) or new.aval.dtype == atom.aval.dtype
        return new if is_same else self._cast(new, atom.aval.dtype, False)

    def add(self, eqn: Equation) -> None:
        """Adds the equation in place of another."""
        self.place = eqn
        name = core.operation_name(eqn.primitive.name)
        marks = tuple(var in self.wide for var in eqn.outvars)
        wants = [mark and _is_narrow(var) for var, mark in zip(eqn.outvars, marks, strict=True)]
        if name in CHANGEABLE and any(marks):
            self._add_call(eqn, marks)
        elif name == _CAST and any(marks):
            self._add_cast(eqn)
        elif any(wants) and name in FLOPS and all(map(_is_narrow, eqn.invars[:2])):
            self._add_product(eqn)
        elif any(wants) and self._is_worth_it(eqn, wants):
            numbers = _numbers(eqn)
            is_gradient = name in _OF_GRADIENTS
            atoms = [
                self.widen(atom, is_gradient) if i in numbers else self.as_it_was(atom)
                for i, atom in enumerate(eqn.invars)
            ]
            self._add(eqn, atoms, list(map(self._new, eqn.outvars)), **_in_float32(eqn))
        elif any(wants) and name in _EACH:
            self._add_each(eqn, wants)
        else:
            self._add(eqn, list(map(self.as_it_was, eqn.invars)), eqn.outvars)

    def _is_worth_it(self, eqn: Equation, wants: Sequence[bool]) -> bool:
        """Whether an equation moves wide numbers, or is a sum that is not too large."""
        numbers = [eqn.invars[i] for i in _numbers(eqn)] if all(wants) else []
        if any(_is_narrow(atom) and not _is_narrow(self.read(atom)) for atom in numbers):
            return True
        size = max((math.prod(atom.aval.shape) for atom in numbers), default=math.inf)
        is_sum = core.operation_name(eqn.primitive.name) in _SUMS
        return is_sum and _FLOAT32.itemsize * size <= LARGEST_SUM * _devices()

    def _add_each(self, eqn: Equation, wants: Sequence[bool]) -> None:
        operands, outvars = list(map(self.as_it_was, eqn.invars)), list(eqn.outvars)
        for i, want in enumerate(wants):
            atom = self.read(eqn.invars[i])
            if want and not (eqn.primitive.name == _BARRIER and _is_narrow(atom)):
                operands[i] = self.widen(atom, True)
                outvars[i] = self._new(outvars[i])
        self._add(eqn, operands, outvars)

    def _add_cast(self, eqn: Equation) -> None:
        (atom,), (var,) = eqn.invars, eqn.outvars
        source, dtype = self.read(atom), _FLOAT32 if _is_narrow(var) else var.aval.dtype
        if _is_narrow(source):  # the equation before it could not be widened
            self.changed |= not _is_narrow(var)
            self._add(eqn if _is_narrow(var) else core.with_scope(eqn, ROUNDED), [source], [var])
        elif source.aval == core.with_dtype(var.aval, dtype):
            self.names[var] = source
            self.changed = True
        else:
            new = var if dtype == var.aval.dtype else self._new(var)
            self._add(eqn, [source], [new], new_dtype=dtype)

    def _add_product(self, eqn: Equation) -> None:
        outvars = list(map(self._new, eqn.outvars))
        params = {**eqn.params, "preferred_element_type": _FLOAT32}
        operands = list(map(self.as_it_was, eqn.invars))
        product = eqn.replace(invars=operands, outvars=outvars, params=params)
        self.eqns += by_platform(product) if may_fail(product) else [product]
        self.changed = True

    def _add_call(self, eqn: Equation, marks: Flags) -> None:
        outs, ins = _settled(eqn, marks)
        jaxprs, name = core.inner_jaxprs(eqn.params), eqn.primitive.name
        first = 1 if name == "cond" else 0
        arrives = [
            is_in and _is_narrow(atom) and not _is_narrow(self.read(atom))
            for atom, is_in in zip(eqn.invars, ins, strict=True)
        ]
        forced = [False] * len(outs)
        if name == "scan":
            consts, carry = core.scan_counts(eqn)
            for i in range(carry):
                forced[i] = outs[i] and _is_narrow(jaxprs[0].outvars[i])
                arrives[consts + i] = forced[i]

        def rewritten() -> list[tuple[Jaxpr | None, Flags]]:
            given = outs, tuple(arrives[first:]), tuple(forced)
            return [_rewritten(jaxpr, *given) for jaxpr in jaxprs]

        found = rewritten()
        if name == "cond":  # its branches return the same dtypes
            forced = list(map(any, zip(*(wide for _, wide in found), strict=True)))
            found = rewritten()
        _, are_wide = found[0]
        pairs = zip(jaxprs, found, strict=True)
        new = {id(old): old if made is None else made for old, (made, _) in pairs}
        operands = [
            self.widen(atom, False) if comes_wide else self.as_it_was(atom)
            for atom, comes_wide in zip(eqn.invars, arrives, strict=True)
        ]
        outvars = [
            self._new(var) if is_wide else var
            for var, is_wide in zip(eqn.outvars, are_wide, strict=True)
        ]
        params = with_jaxprs(eqn.params, lambda jaxpr: new[id(jaxpr)])
        self._add(eqn.replace(params=params), operands, outvars)
        self.changed |= params is not eqn.params

    def _add(
        self, eqn: Equation, operands: list[Atom], outvars: Sequence[Atom], **params: object
    ) -> None:
        pairs = zip((*operands, *outvars), (*eqn.invars, *eqn.outvars), strict=True)
        if params or any(new is not old for new, old in pairs):
            self.changed = True
            params = {**eqn.params, **params}
            eqn = eqn.replace(invars=operands, outvars=list(outvars), params=params)
        self.eqns.append(eqn)

    def _new(self, var: Atom) -> Atom:
        """Returns a float32 variable in place of another from now on."""
        aval = core.with_dtype(var.aval, _FLOAT32) if _is_narrow(var) else var.aval
        self.names[var] = new_variable(aval)
        return self.names[var]

    def _cast(self, atom: Atom, dtype: np.dtype, is_gradient: bool) -> Atom:
        key = id(atom), dtype  # a literal has no hash
        if key not in self.casts:
            var = new_variable(core.with_dtype(atom.aval, dtype))
            cast = casting(atom, var, self.place)
            self.eqns.append(core.with_scope(cast, ROUNDED) if is_gradient else cast)
            self.casts[key] = var
            self.changed = True
        return self.casts[key]


def _devices() -> int:
    """Returns over how many devices an array may be split, as far as it is known."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in axes if kind != AxisType.Manual)


def _is_narrow(atom: Atom) -> bool:
    return getattr(atom.aval, "dtype", None) in _NARROW


def _in_float32(eqn: Equation) -> dict[str, object]:
    """Returns the parameters of an equation that depend on the dtype, for float32."""
    if "update_jaxpr" not in eqn.params:
        return {}
    return {"update_jaxpr": _scatter_add().params["update_jaxpr"]}


@functools.cache
def _scatter_add() -> Equation:
    """Returns an equation that adds up in float32."""
    dimensions = jax.lax.ScatterDimensionNumbers((), (0,), (0,))
    add = functools.partial(jax.lax.scatter_add, dimension_numbers=dimensions)
    x, index = np.zeros(1, np.float32), np.zeros((1, 1), np.int32)
    return jax.make_jaxpr(add)(x, index, x).eqns[-1]
