"""Cuts of a jaxpr into pieces to be checkpointed; casts of inputs move to their readers."""

import enum
import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jmpx._base.trees import is_floating_dtype
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr
from jmpx._jaxprs.inner import CHANGEABLE, CHECKPOINT, once_per_jaxpr, variables
from jmpx._jaxprs.rewriting import casting, new_variable, renamed, replaced, with_jaxprs
from jmpx._remat.saving import Saving, holds_product, holds_saved, is_named, keeps_residuals, length

# A part with more products than this is more than one block of a model, such as a decoder in which
# the encoder's output is live throughout.
_MANY = 16

# The share of a piece's recomputed bytes that are live together, as measured in plans of the TPU
# compiler, which fuses most of them into their readers. So a transformer, whose attention makes
# many bytes from each activation, is cut more often than a ResNet.
_AGAIN = 1 / 16


class Role(enum.Enum):
    """The role of an equation in the pieces of a jaxpr, and of a piece of such equations."""

    ORDINARY = "it joins the equations next to it"
    PRODUCT = "it joins them, and the piece is checkpointed"
    INSIDE = "it holds jaxprs that are cut themselves"
    ALONE = "it runs outside of pieces"
    LEFT = "it is left alone: it is the user's checkpoint, or has effects"
    LATER = "it has an effect and no results, and runs after its piece"


SINGLE = frozenset({Role.INSIDE, Role.ALONE, Role.LEFT})  # each is a piece
_HOLDERS = SINGLE | {Role.PRODUCT}  # equations that may hold products


class Life(NamedTuple):
    """The lifetime of an array."""

    start: int  # the index of the equation that makes it
    end: int  # the index of the last equation that reads it
    size: int  # in bytes
    is_saved: bool  # whether it is saved anyway, as the result of a product

    def is_at(self, place: int) -> bool:
        """Whether the array is live before an equation."""
        return self.start < place <= self.end


Lives: TypeAlias = tuple[list[Life], list[int]]  # second, the bytes that each equation makes


@once_per_jaxpr
def find_activations(jaxpr: Jaxpr, saving: Saving) -> tuple[set[Atom], set[int]]:
    """Returns the variables of a jaxpr that depend on a product or on a loop's carry.

    Also returns the indices of the equations whose results are saved by name.
    """
    operands = zip(reversed(jaxpr.invars), reversed(saving.activations), strict=False)
    found = core.reached(jaxpr, [var for var, flag in operands if flag], holds_product)
    return found, {i for i, eqn in enumerate(jaxpr.eqns) if is_named(eqn, saving, found)}


def find_cuts(
    equations: Sequence[Equation], roles: Sequence[Role], lives: Lives, saving: Saving
) -> set[int]:
    """Returns the indices of equations before which the jaxpr is best cut.

    At most one array is live there. Between two equations that hold products, at most one place is
    considered: the one where the fewest bytes have to be saved. `Part` chooses among these. A loop
    saves arrays for each trip, and recomputes one trip at a time.
    """
    holders = [i for i, role in enumerate(roles) if role in _HOLDERS]
    (large, sizes), trips = lives, max(saving.trips, 1)
    size = trips * (1 / 2 if saving.is_cast_later else 1)  # of a saved product
    alive = _alive(len(equations), large)
    kept = [trips * _saved(found) for found in alive]
    places = sorted(set(_cuts(holders, large, alive)))
    # Equal for equations that may do the same.
    marks = [(each.primitive, *(var.aval for var in each.outvars)) for each in equations]
    made = list(zip(sizes, roles, strict=True))
    products, again = (  # the bytes that these make before each equation and before the end
        list(itertools.accumulate((size * (role is each) for size, role in made), initial=0))
        for each in (Role.PRODUCT, Role.ORDINARY)
    )
    alone = [i for i in holders if roles[i] is not Role.PRODUCT]
    chosen: set[int] = set()
    for start, stop in itertools.pairwise([0, *alone, len(equations)]):
        within = [place for place in places if start < place < stop]
        span, repeated = find_repeated(within, marks)
        within = [p for p in within if p not in span or p in repeated or not kept[p]]
        ends = (*within, stop)
        part = Part(
            within,
            [kept[place] for place in within],
            [size * products[end] for end in ends],
            [_AGAIN * (again[end] - again[start]) for end in ends],
        )
        chosen.update(part.cuts(), repeated)
    return chosen


def find_repeated(places: Sequence[int], marks: Sequence[Hashable]) -> tuple[range, list[int]]:
    """Returns where a block repeats, and the last place in each: cuts there give equal pieces.

    A block must repeat at least three times, and over more than half of the places.
    """
    segments = [tuple(marks[start:stop]) for start, stop in itertools.pairwise(places)]
    best = range(0), 1
    for period in range(1, len(segments) // 3 + 1):
        pairs = zip(segments, segments[period:], strict=False)
        start = 0
        for is_equal, run in itertools.groupby(a == b for a, b in pairs):
            end = start + len(list(run))
            if is_equal and end + period - start > max(
                len(best[0]), len(segments) / 2, 3 * period - 1
            ):
                best = range(start, end + period), period
            start = end
    found, period = best
    if not found:
        return found, []
    last = [places[i] for i in range(found.stop, found.start - 1, -period)]
    return range(places[found.start], places[found.stop] + 1), last[::-1]


def _alive(count: int, lives: Sequence[Life]) -> list[list[Life]]:
    """Returns the arrays that are live before each equation, and before the end."""
    alive: list[list[Life]] = [[] for _ in range(count + 1)]
    for life in lives:
        for place in range(life.start + 1, life.end + 1):
            alive[place].append(life)
    return alive


def _saved(lives: Sequence[Life]) -> int:
    """Returns the bytes that a cut has to save where these are live, apart from saved products."""
    return sum(life.size for life in lives if not life.is_saved)


class Part(NamedTuple):
    """A part of a jaxpr, and the costs of cuts in it, in bytes."""

    places: Sequence[int]  # where cuts are possible
    kept: Sequence[int]  # the bytes that each of them keeps
    products: Sequence[float]  # of the products before each of them, and before the end
    again: Sequence[float]  # live together if everything before is recomputed

    def cuts(self) -> list[int]:
        """Returns the places to cut at, so that the peak of memory is the lowest.

        A cut keeps the arrays that are live there. A piece is recomputed as a whole when its
        backward pass begins; a share of its arrays is then live, besides the products and cuts of
        all earlier pieces, whose backward passes come later. So the first pieces may be long. There
        is a cut wherever it keeps nothing.
        """
        highest = self.products[-1] + self.again[-1] + sum(self.kept)
        low, high, best = 0.0, highest, list(self.places)
        while high - low > highest / 1000:
            peak = (low + high) / 2
            found = self._below(peak)
            low, high, best = (peak, high, best) if found is None else (low, peak, found)
        free = [place for place, size in zip(self.places, self.kept, strict=True) if not size]
        return sorted({*best, *free})

    def _below(self, peak: float) -> list[int] | None:
        """Returns the cuts that keep the least of those with memory below a peak; None without."""
        least: list[tuple[int, list[int]] | None] = [(0, [])]  # before each place and the end
        before = [0.0, *self.again]  # recomputed before each beginning of a piece
        for end, made in enumerate(self.products):
            found: list[tuple[int, list[int]]] = []
            for start in range(end, -1, -1):
                needed = made + self.again[end] - before[start]
                if needed > peak:
                    break
                so_far = least[start]
                if so_far is not None and so_far[0] + needed <= peak:
                    found.append(so_far)
            if end == len(self.places):
                return min(found)[1] if found else None
            sums = [(total + self.kept[end], [*cuts, self.places[end]]) for total, cuts in found]
            least.append(min(sums) if sums else None)
        return None


def find_head(
    jaxpr: Jaxpr, roles: Sequence[Role], lives: Sequence[Life], active: Collection[Atom]
) -> int | None:
    """Returns the index of the last product if its results are larger than its operands."""
    # Logits of a language model, for example. The backward pass begins with their cotangent, and
    # needs only the operands of the head. A checkpoint around it would save nothing, and keep XLA
    # from computing the cotangent in 16 bits, because it has to pass into the checkpoint as it is.
    head = max((i for i, role in enumerate(roles) if role in _HOLDERS), default=None)
    if head is None or roles[head] is not Role.PRODUCT:
        return None
    equation = jaxpr.eqns[head]
    if core.inner_jaxprs(equation.params):
        return None
    made = {var for later in jaxpr.eqns[head:] for var in later.outvars}
    results = [_size(var) for var in jaxpr.outvars if not core.is_literal(var) and var in made]
    size = sum(map(_size, equation.outvars))
    if size > max(results, default=0):
        return None
    carried = [var for var in variables(equation) if var in active and var in jaxpr.invars]
    read = sum(life.size for life in lives if life.is_at(head)) + sum(map(_size, carried))
    return head if read < size else None


def find_lives(
    equations: Sequence[Equation], roles: Sequence[Role], active: Collection[Atom]
) -> Lives:
    """Returns the lives of large activations, and the bytes that each equation makes.

    Operands of the jaxpr do not count: their readers keep them, wherever the cuts are.
    """
    made: dict[Atom, tuple[int, int, bool]] = {}  # the place, the bytes, whether it is saved
    ends: dict[Atom, int] = {}
    sizes = [0] * len(equations)
    for i, (equation, role) in enumerate(zip(equations, roles, strict=True)):
        if role is Role.LATER:
            continue
        ends.update((var, i) for var in variables(equation))
        if role is not Role.ORDINARY or any(var in active for var in equation.outvars):
            is_product = role is Role.PRODUCT
            if is_product and core.inner_jaxprs(equation.params):
                is_product = keeps_residuals(equation)
            made.update((var, (i, _size(var), is_product)) for var in equation.outvars)
            sizes[i] = sum(made[var][1] for var in equation.outvars)
    bound = max((size for _, size, _ in made.values()), default=0) / 100
    large = [(var, *each) for var, each in made.items() if each[1] > bound and var in ends]
    return [Life(start, ends[var], size, is_saved) for var, start, size, is_saved in large], sizes


def _size(atom: Atom) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or not is_floating_dtype(dtype):
        return 0
    return math.prod(map(length, atom.aval.shape)) * dtype.itemsize


def _cuts(
    holders: Sequence[int], lives: Sequence[Life], alive: Sequence[Sequence[Life]]
) -> Iterator[int]:
    """Yields the best place between equations that hold products, given the lives that count."""
    # An array that lives through half of a long part without a cut, such as the output of an
    # encoder in the decoder or the skip connection of a U-Net, has to be saved anyway.
    parts = [list(holders[:1])]
    for before, after in itertools.pairwise(holders):
        places = [place for place in range(before + 1, after + 1) if len(alive[place]) <= 1]
        if places:
            yield min(places, key=lambda place: _saved(alive[place]))
            parts.append([])
        parts[-1].append(after)
    for part in parts:
        if len(part) > _MANY:
            counting = [life for life in lives if 2 * sum(map(life.is_at, part)) < len(part)]
            if len(counting) < len(lives):
                yield from _cuts(part, counting, _alive(len(alive) - 1, counting))


# Groups: the equations of each piece, which one `jax.checkpoint` will run.


# Their jaxprs are cut as the one around them is.
CUT_INSIDE = CHANGEABLE - {CHECKPOINT}
# Equations with such an effect may run twice or later.
_HARMLESS = frozenset({"NamedAxisEffect"})


class Group(NamedTuple):
    """Equations of a piece, by their indices."""

    role: Role  # of all its equations; `PRODUCT` has it checkpointed
    indices: Sequence[int]
    inside: Saving  # for the jaxprs of an equation that is `INSIDE`


def inside_of(equation: Equation, saving: Saving, active: Collection[Atom]) -> Saving | None:
    """Returns the saving of the jaxprs in an equation, which get its last operands.

    None if these jaxprs are not to be changed.
    """
    if equation.primitive.name not in CUT_INSIDE:
        return None
    flags = [not core.is_literal(atom) and atom in active for atom in equation.invars]
    if equation.primitive.name != "scan":
        return saving._replace(activations=tuple(flags))
    consts, carry = core.scan_counts(equation)
    flags[consts : consts + carry] = [True] * carry
    trips = max(saving.trips, 1) * length(equation.params["length"])
    return saving._replace(trips=trips, activations=tuple(flags))


@once_per_jaxpr
def find_groups(jaxpr: Jaxpr, saving: Saving) -> list[Group]:
    """Returns the groups of the equations of a jaxpr, in order, cut where little is live."""
    active, named = find_activations(jaxpr, saving)
    inside = [inside_of(equation, saving, active) for equation in jaxpr.eqns]
    pairs = enumerate(zip(jaxpr.eqns, inside, strict=True))
    roles = [Role.PRODUCT if i in named else _role(eqn, saving, to) for i, (eqn, to) in pairs]
    lives = find_lives(jaxpr.eqns, roles, active)
    head = find_head(jaxpr, roles, lives[0], active)
    cuts = set()
    if head is not None:  # it is in no piece, and the last piece ends before it
        roles[head] = Role.ORDINARY
        cuts.add(head)
    cuts |= find_cuts(jaxpr.eqns, roles, lives, saving)
    groups = _grouped(roles, cuts)
    return [Group(role, group, inside[group[0]] or saving) for role, group in groups]


def _has_pieces(jaxpr: Jaxpr, saving: Saving) -> bool:
    """Whether a jaxpr has more than one piece, or one that cannot join the equations around it."""
    roles = [group.role for group in find_groups(jaxpr, saving)]
    return Role.INSIDE in roles or Role.LEFT in roles or roles.count(Role.PRODUCT) > 1


def _role(equation: Equation, saving: Saving, inside: Saving | None) -> Role:
    name, is_holder = equation.primitive.name, holds_saved(equation, saving)
    has_effect = any(type(effect).__name__ not in _HARMLESS for effect in equation.effects)
    if has_effect and not equation.outvars:
        return Role.LATER
    if not (has_effect or is_holder):
        return Role.ORDINARY
    if inside is not None:
        jaxprs = core.inner_jaxprs(equation.params)
        is_cut = has_effect or name == "scan" or any(_has_pieces(each, inside) for each in jaxprs)
        return Role.INSIDE if is_cut else Role.PRODUCT
    if name == "while" or not is_holder:  # a while loop has no backward pass
        return Role.ALONE
    return Role.LEFT if has_effect or name == CHECKPOINT else Role.PRODUCT


def _grouped(roles: Sequence[Role], cuts: Collection[int]) -> Iterator[tuple[Role, Sequence[int]]]:
    """Yields the groups of equations between cuts, and the equations that are alone."""
    alone = [i for i, role in enumerate(roles) if role in SINGLE]
    ends = sorted({0, *cuts, *alone, *(i + 1 for i in alone), len(roles)})
    for start, end in itertools.pairwise(ends):
        if roles[start] in SINGLE:
            yield roles[start], [start]
        else:
            yield from _together(range(start, end), roles)


def _together(indices: Sequence[int], roles: Sequence[Role]) -> Iterator[tuple[Role, list[int]]]:
    """Yields the group of some equations, and after it those that are `LATER`."""
    now = [i for i in indices if roles[i] is not Role.LATER]
    later = [i for i in indices if roles[i] is Role.LATER]
    if now:
        yield Role.PRODUCT if any(roles[i] is Role.PRODUCT for i in now) else Role.ORDINARY, now
    if later:
        yield Role.LATER, later


# Casts of inputs move to their readers, so that a piece casts an input again and keeps no copy.
#
# By arguments, all parameters are cast first. If the casts stayed there, each 16-bit copy would be
# live until the backward pass of its layer. An input with two readers is cast twice, so that its
# cotangents are summed in its own dtype, as by operations.


def sunk(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr with casts of its inputs before each reader, or in the reader's jaxpr.

    Casts of a scan's constants do not move into it: their cotangents would be summed in another
    dtype, trip by trip.
    """
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    casts: dict[Atom, Equation] = {}  # by their results
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        if _is_cast(eqn) and eqn.invars[0] in inputs:
            casts[eqn.outvars[0]] = eqn
            continue
        read = {i: a for i, a in enumerate(eqn.invars) if not core.is_literal(a) and a in casts}
        inside = {i: casts[atom] for i, atom in read.items() if _takes(eqn, i)}
        outside = {atom: new_variable(atom.aval) for i, atom in read.items() if i not in inside}
        for atom, new in outside.items():
            cast = casts[atom].replace(outvars=[new])
            # In the scopes of the reader, so that layers stay equal.
            eqns.append(core.with_stack(cast, core.marked_stack_of(eqn)))
        if outside:
            eqn = eqn.replace(invars=renamed(eqn.invars, outside))
        eqns.append(_casting(eqn, inside) if inside else eqn)
    returned = {atom for atom in jaxpr.outvars if not core.is_literal(atom)}
    eqns += (cast for var, cast in casts.items() if var in returned)
    return replaced(jaxpr, eqns=eqns) if casts else jaxpr


def _is_cast(eqn: Equation) -> bool:
    """Whether an equation casts a variable to another floating dtype."""
    if eqn.primitive.name != "convert_element_type" or not variables(eqn):
        return False
    dtypes = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    is_floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return is_floating and dtypes[0] != dtypes[1] and eqn.params.get("sharding") is None


def _takes(eqn: Equation, i: int) -> bool:
    """Whether a cast of an operand may move into the jaxpr of an equation."""
    if eqn.primitive.name == "scan":
        return i >= sum(core.scan_counts(eqn))
    return eqn.primitive.name in CUT_INSIDE and i >= (eqn.primitive.name == "cond")


def _casting(eqn: Equation, casts: dict[int, Equation]) -> Equation:
    """Returns an equation whose jaxprs cast some operands."""
    operands = list(eqn.invars)
    for i, cast in casts.items():
        operands[i] = cast.invars[0]
    first = int(eqn.primitive.name == "cond")  # its first operand chooses a branch
    wide = tuple((i - first, cast.invars[0].aval.dtype) for i, cast in casts.items())
    params = with_jaxprs(eqn.params, lambda jaxpr: _taking(jaxpr, wide))
    return eqn.replace(invars=operands, params=params)


@once_per_jaxpr
def _taking(jaxpr: Jaxpr, wide: Sequence[tuple[int, np.dtype]]) -> Jaxpr:
    """Returns a jaxpr that takes some operands in other dtypes, and casts them."""
    invars, casts = list(jaxpr.invars), list[Equation]()
    for i, dtype in wide:
        var = invars[i]
        invars[i] = new_variable(core.with_dtype(var.aval, dtype))
        casts.append(casting(invars[i], var))
    return replaced(jaxpr, invars=invars, eqns=[*casts, *jaxpr.eqns])
