"""Runs a program in float32, and counts its numbers by magnitude, in bins for four formats."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._base.axes import as_whole
from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name
from jmpx._base.messages import describe
from jmpx._base.trees import is_floating_dtype
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.programs import Program
from jmpx._inspect.running import CompileCache, run_widened, widened
from jmpx._inspect.text import paths_around
from jmpx._inspect.watched import Constant, Site, Watcher, sites
from jmpx._jaxprs.equations import EXCHANGES, IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES
from jmpx._jaxprs.marks import Array
from jmpx._policies.maps import Rule
from jmpx._scales.scaling import LARGEST_FLOAT16

# --- Formats, and the bins that their edges make ---

MANTISSA_BITS = 23  # of float32
LOWEST, HIGHEST = -149, 127  # the exponents of float32, with those of subnormal numbers


class Format(NamedTuple):
    """The edges from which a dtype holds float32 numbers that are rounded to it.

    A number `2**e * (1 + m / 2**23)` has the key `e * 2**23 + m`, in which keys are ordered as the
    numbers are, and a factor of `2**k` adds `k * 2**23`.
    """

    kept: int  # the lowest key that is not rounded to zero
    normal: int  # the lowest key that is rounded to a normal number
    overflows: int  # the lowest key that is rounded to infinity, or to NaN in `float8_e4m3fn`


def _format(name: str) -> Format:
    info = jnp.finfo(name)
    lowest, bits, largest = int(info.minexp), int(info.nmant), float(info.max)
    # Rounding is to nearest. A tie goes to the even number, whose last bit is 0.
    exponent = math.frexp(largest)[1] - 1
    last = round(largest * 2.0 ** (bits - exponent)) % 2
    return Format(
        kept=_key(2.0 ** (lowest - bits - 1)) + 1,  # half of the smallest number is a tie with 0
        normal=_key(2.0**lowest) - (1 << MANTISSA_BITS - bits),  # a tie with the smallest normal
        overflows=_key(largest + 2.0 ** (exponent - bits - 1)) + (1 - last),
    )


def _key(number: float) -> int:
    mantissa, exponent = math.frexp(number)
    return ((exponent - 1) << MANTISSA_BITS) + round((2 * mantissa - 1) * 2**MANTISSA_BITS)


FORMATS = {name: _format(name) for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")}


def as_format(dtype: DTypeLike) -> Format:
    """Returns the format of a dtype or of its name; raises a ValueError if it is another one."""
    known = FORMATS.get(dtype_name(as_dtype(dtype)))
    if known is None:
        raise ValueError(
            f"Expected one of the formats {', '.join(FORMATS)}, got {describe(dtype)}."
        )
    return known


# Numbers are counted by exponent, and in each exponent by the parts of the mantissa between the
# edges of all formats. So shares are exact at all scales that are powers of two.
CUTS = sorted({key % (1 << MANTISSA_BITS) for edges in FORMATS.values() for key in edges} - {0})
PARTS = len(CUTS) + 1
BINS = (HIGHEST - LOWEST + 1) * PARTS


def bin_of(key: int) -> int:
    """Returns the first bin whose numbers have at least this key; the key is an edge of a bin."""
    exponent, mantissa = key >> MANTISSA_BITS, key % (1 << MANTISSA_BITS)
    return (exponent - LOWEST) * PARTS + sum(mantissa >= cut for cut in CUTS)


# --- Histograms ---


class Shares(NamedTuple):
    """The shares of the numbers that are not zero which a format does not hold.

    Attributes:
        lost: those that become zero.
        subnormal: those that become subnormal numbers, which have fewer digits.
        overflowing: those that become infinite, or NaN in `float8_e4m3fn`.
    """

    lost: float
    subnormal: float
    overflowing: float


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many numbers have which magnitude.

    Attributes:
        bins: pairs of a bin and a count, in the order of the magnitudes; `exponents` sums them.
        zeros: how many numbers are zero.
        infinite: how many are infinite.
        nan: how many are NaN.
        masked: how many are masks; see `Ranges.masks`.
    """

    bins: tuple[tuple[int, int], ...] = ()
    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    masked: int = 0

    @classmethod
    def of(cls, counts: np.ndarray) -> "Histogram":
        """Makes a histogram of the counts of all bins."""
        (indices,) = np.nonzero(counts[:BINS])
        bins = tuple((int(i), int(counts[i])) for i in indices)
        return cls(bins, *map(int, counts[BINS:]))

    @property
    def numbers(self) -> int:
        """How many numbers are finite, not zero and not masked."""
        return sum(count for _, count in self.bins)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.numbers + self.zeros + self.infinite + self.nan + self.masked

    @property
    def exponents(self) -> dict[int, int]:
        """How many numbers have a magnitude from `2**e` to below `2**(e + 1)`, for each e."""
        found = collections.Counter[int]()
        for index, count in self.bins:
            found[index // PARTS + LOWEST] += count
        return dict(found)

    def shares(self, dtype: DTypeLike, scale: float = 1) -> Shares:
        """Returns which shares of these numbers a format does not hold: see `Ranges.shares`."""
        shift = exponent_of(scale) * PARTS
        kept, normal, overflows = (bin_of(key) - shift for key in as_format(dtype))
        ranges = ((-math.inf, kept), (kept, normal), (overflows, math.inf))
        counts = (sum(n for i, n in self.bins if low <= i < high) for low, high in ranges)
        return Shares(*(count / max(self.numbers, 1) for count in counts))

    def head_room(self, dtype: DTypeLike) -> int:
        """Returns the exponent of the largest scale with which no number overflows in a format."""
        return (bin_of(as_format(dtype).overflows) - 1 - self.bins[-1][0]) // PARTS


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Returns the histogram of all numbers of several histograms."""
    bins, others = collections.Counter[int](), np.zeros(4, int)
    for each in histograms:
        others += [each.zeros, each.infinite, each.nan, each.masked]
        bins.update(dict(each.bins))
    return Histogram(tuple(sorted(bins.items())), *map(int, others))


def exponent_of(scale: float) -> int:
    """Returns the exponent of a scale; raises a ValueError if it is not a power of two."""
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise ValueError(
            f"Expected a scale that is a power of two, so that it changes exponents only, got "
            f"{describe(scale)}: give for example 2**13."
        )
    return exponent - 1


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that the operations of one scope computed.

    Attributes:
        scope: the path of the module, or the names of scopes; empty outside of them.
        histogram: how many numbers have which magnitude.
    """

    scope: str
    histogram: Histogram = Histogram()

    def is_in(self, scope: str) -> bool:
        """Whether this is a scope, or inside of it, or inside of a scope that it selects."""
        if not scope:
            return not self.scope
        rule, around = Rule(scope), paths_around(self.scope)
        return any(path == scope or rule.matches_scope(path) for path in around)


# --- The equations that count, and their scopes ---

# Numbers count when they are computed, not when these move them. Casts move them here, as all runs
# in float32. Gathers count, so that embeddings do: their table is an argument.
_MOVES = IDENTITIES | PLACEMENTS | RESHAPES | (PICKS - {"gather"}) | JOINS | EXCHANGES
_MOVES |= {"convert_element_type"}
_RECOMPUTED = "rematted_computation"  # JAX's scope of the recomputed part of a checkpoint


class Rows:
    """The rows of the table of counts: scopes, and whether they are of the backward pass."""

    def __init__(self, graph: Graph) -> None:
        # The magnitudes beyond float16 that `jnp.where` puts into arrays.
        selects = (node for node in graph.nodes if node.name == "select_n")
        values = (v for n in selects for v in n.operands[1:] if is_floating_dtype(v.dtype))
        constants = {abs(value.number or 0.0) for value in values}
        self.masks = tuple(sorted(c for c in constants if LARGEST_FLOAT16 < c < math.inf))
        rows = {
            n.key: (n.path, n.is_backward and _RECOMPUTED not in n.scope.split("/"))
            for n in graph.nodes
            if _is_counted(n)
        }
        self.table = list(dict.fromkeys(rows.values()))
        self.of = {key: self.table.index(row) for key, row in rows.items()}  # by keys of sites


def _is_counted(node: Node) -> bool:
    if node.is_structure or node.name in _MOVES:
        return False
    if not any(is_floating_dtype(value.dtype) for value in node.results):
        return False
    # Single numbers outside of modules and scopes, such as the loss, a loss scale and the numbers
    # of an optimizer, are float32 whatever the policy says.
    return node.selector is not None or any(value.shape for value in node.results)


# --- Counting ---

_FEW = 2000  # a program with more equations that count is not compiled as a whole
_MOST = 1 << 24  # how many numbers may wait to be counted
_ZERO, _INFINITE, _NAN, _MASKED = range(BINS, BINS + 4)  # the bins after those of numbers
_SIZE = BINS + 4
_INFINITY = 0x7F800000
_NEAR = 1 << 14  # a masked number is a mask plus a score, which is smaller by 2**9 or more


def counted(program: Program, rows: Rows) -> np.ndarray:
    """Runs a program once in float32, and returns the count in each bin of each row.

    A large program runs equation by equation, as outside of `jax.jit`, and only its loops and
    branches are compiled: XLA would compile the equal counts of each layer anew.
    """

    def run(constant: Constant, arrays: list[Array]) -> Array:
        state = _State(rows, jnp.zeros((len(rows.table), _SIZE, 2), jnp.uint32))
        wide, constants = list(map(widened, arrays)), lambda array: widened(constant(array))
        watcher = Watcher(_watch, run_widened, constants)
        return watcher.evaluate(program.jaxpr, wide, state)[1].updated().totals

    arrays = list(program.arrays)
    if len(rows.of) > _FEW:
        return as_integers(run(lambda array: array, arrays))
    of = tuple(rows.of.get(site.key) for site in sites(program.jaxpr))
    key = ("ranges", len(rows.table), of, rows.masks)
    return as_integers(CompileCache(program.jaxpr).run(run, (arrays,), *key))


@jax.tree_util.register_pytree_node_class
class _State:
    """The counts so far, and the arrays that wait to be counted.

    XLA takes long to compile counts for each array. So while JAX traces, arrays wait until there
    are many, or until JAX flattens the state at the start or the end of a loop.
    """

    def __init__(self, rows: Rows, totals: Array) -> None:
        self.rows, self.totals = rows, totals  # the latter are sums of `add_counts`, by row
        self.waiting: list[tuple[int, Array]] = []  # the positions of rows, and arrays

    def updated(self) -> "_State":
        """Returns the state with all arrays counted."""
        if not self.waiting:
            return self
        positions, arrays = zip(*self.waiting, strict=True)
        changed, row_of = np.unique(positions, return_inverse=True)
        whole, row_of = list(map(as_whole, arrays)), row_of.astype(np.int32)
        counts = _counts(whole, row_of, size=len(changed), masks=self.rows.masks)
        return _State(self.rows, _added(self.totals, changed.astype(np.int32), counts))

    def tree_flatten(self) -> tuple[tuple[Array], Rows]:
        return (self.updated().totals,), self.rows

    @classmethod
    def tree_unflatten(cls, rows: Rows, tables: Sequence[Array]) -> "_State":
        return cls(rows, *tables)


def _watch(state: _State, site: Site, operands: list[Array], results: list[Array]) -> _State:
    """Counts the results of an equation, or lets them wait."""
    row = state.rows.of.get(site.key)
    if row is None:
        return state
    state.waiting += [(row, array) for array in results if is_floating_dtype(array.dtype)]
    is_traced = any(isinstance(array, jax.core.Tracer) for _, array in state.waiting)
    is_full = sum(array.size for _, array in state.waiting) > _MOST
    return state if is_traced and not is_full else state.updated()


@functools.partial(jax.jit, static_argnames=("size", "masks"))
def _counts(
    arrays: Sequence[Array], row_of: np.ndarray, *, size: int, masks: tuple[float, ...]
) -> Array:
    """Returns the count in each bin of some rows, given the row of each array."""
    bits = list(map(magnitudes, arrays))
    if len(bits) == 1:
        return count(bins_of(bits[0], masks), row_of[0], size)
    parts = [jnp.full(array.shape, i, np.uint16) for i, array in enumerate(arrays)]
    return count(bins_of(_joined(bits), masks), row_of[_joined(parts)], size)


def _joined(arrays: Sequence[Array]) -> Array:
    joined = jnp.concatenate([jnp.reshape(array, -1) for array in arrays])
    # Without the barrier, XLA compiles the operations that read the numbers once for each array.
    return lax.optimization_barrier(joined)


def count(bins: Array, rows: Array, size: int) -> Array:
    """Returns how many numbers are in each bin of each row, given the bin and row of each."""
    counts = jnp.zeros((size, _SIZE), jnp.uint32)
    return counts.at[rows, bins].add(np.uint32(1), mode="promise_in_bounds")


@jax.jit
def _added(totals: Array, rows: np.ndarray, counts: Array) -> Array:
    return totals.at[rows].set(add_counts(totals[rows], counts))


def add_counts(total: Array, counts: Array) -> Array:
    """Adds counts to a sum of shape (..., 2), the low and the high 32 bits, as JAX lacks 64."""
    low = total[..., 0] + counts
    high = total[..., 1] + (low < counts).astype(jnp.uint32)
    return jnp.stack([low, high], -1)


def as_integers(total: Array) -> np.ndarray:
    """Returns the sums of `add_counts` as integers of 64 bits."""
    pairs = np.asarray(total).astype(np.int64)
    return pairs[..., 0] + (pairs[..., 1] << 32)


# Counts read the bits of float32 numbers as integers, because processors may flush subnormal
# numbers to zero.


def magnitudes(array: Array) -> Array:
    """Returns the bits of the magnitudes of numbers in float32, whose order is the same."""
    bits = lax.bitcast_convert_type(lax.convert_element_type(array, jnp.float32), jnp.uint32)
    return bits & np.uint32(0x7FFFFFFF)


def bins_of(bits: Array, masks: Sequence[float] = ()) -> Array:
    """Returns the bin of each magnitude, in 16 bits."""
    low = np.uint32((1 << MANTISSA_BITS) - 1)
    exponent, mantissa = bits >> MANTISSA_BITS, bits & low
    is_subnormal = exponent == 0
    zeros = lax.clz(mantissa)  # the leading zeros of a subnormal number determine its exponent
    normalized = (mantissa << (zeros - np.uint32(31 - MANTISSA_BITS))) & low
    mantissa = jnp.where(is_subnormal, normalized, mantissa)
    above = jnp.where(is_subnormal, np.uint32(31) - zeros, exponent + np.uint32(-127 - LOWEST))
    part = sum((mantissa >= np.uint32(cut)).astype(jnp.uint32) for cut in CUTS)
    bins = above * np.uint32(PARTS) + part
    bins = jnp.where(_is_mask(bits, masks), np.uint32(_MASKED), bins) if masks else bins
    bins = jnp.where(bits == 0, np.uint32(_ZERO), bins)
    bins = jnp.where(bits == _INFINITY, np.uint32(_INFINITE), bins)
    bins = jnp.where(bits > _INFINITY, np.uint32(_NAN), bins)
    return bins.astype(jnp.uint16)


def _is_mask(bits: Array, masks: Sequence[float]) -> Array:
    """Whether magnitudes are masks, such as 1e9, up to a score that was added."""
    found = jnp.zeros(bits.shape, bool)
    for mask in masks:
        low = max(int(np.float32(mask).view(np.uint32)) - _NEAR, 0)
        found |= bits - np.uint32(low) <= np.uint32(2 * _NEAR)  # below `low`, it wraps around
    return found
