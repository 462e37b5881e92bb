"""Facts about equations: what moves values as they are, FLOPs, and the user's line."""

import functools
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from jmpx._jaxprs.core import inner_jaxprs, operation_name
from jmpx._jaxprs.marks import Equation, Jaxpr

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


# FLOPs of products, from shapes alone: two for each multiplication with its addition.
#
# A convolution multiplies only what is not padding.


def flops_of(jaxpr: Jaxpr, chosen: Collection[Equation]) -> tuple[int, int]:
    """Returns the FLOPs of the products of a jaxpr, and of those in some of its equations.

    Those of a loop are of all trips that are known, those of a kernel of its whole grid, and those
    of a conditional of the branch with most in these equations.
    """
    total = part = 0
    for eqn in jaxpr.eqns:
        name = operation_name(eqn.primitive.name)
        if name in FLOPS:
            own, inside = FLOPS[name](eqn), 0
        else:
            each = [flops_of(inner, chosen) for inner in inner_jaxprs(eqn.params)]
            if name == "cond":
                each = [max(each, key=lambda pair: pair[::-1])]
            own, inside = (_trips(eqn) * sum(column) for column in zip((0, 0), *each, strict=True))
        total += own
        part += own if eqn in chosen else inside
    return total, part


def _trips(eqn: Equation) -> int:
    """Returns how often an equation runs the jaxprs that it holds, as far as it is known."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    sizes = (eqn.params.get("length", 1), *grid)
    return math.prod(size for size in sizes if isinstance(size, int))


def _dot(eqn: Equation) -> int:
    lhs, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    contracted = eqn.params["dimension_numbers"][0][0]
    return 2 * math.prod(result) * math.prod(lhs[axis] for axis in contracted)


def _ragged_dot(eqn: Equation) -> int:
    """Each row of the left operand meets the columns of one group alone."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    others = {*contracted, *batch, *numbers.rhs_group_dimensions}
    lhs, rhs = (var.aval.shape for var in eqn.invars[:2])
    columns = math.prod(size for axis, size in enumerate(rhs) if axis not in others)
    return 2 * math.prod(lhs) * columns


def _convolution(eqn: Equation) -> int:
    lhs, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    rhs, params = eqn.invars[1].aval.shape, eqn.params
    lhs_axes, rhs_axes, out_axes = params["dimension_numbers"]
    # Groups need no look: the kernel has the inputs of one group, the result the batch of one.
    count = result[out_axes[0]] * result[out_axes[1]] * rhs[rhs_axes[1]]
    steps = (params["window_strides"], params["lhs_dilation"], params["rhs_dilation"])
    sizes = zip(lhs_axes[2:], rhs_axes[2:], out_axes[2:], params["padding"], *steps, strict=True)
    for lhs_axis, rhs_axis, out_axis, padding, stride, lhs_dilation, rhs_dilation in sizes:
        count *= taps(
            (lhs[lhs_axis], lhs_dilation),
            (rhs[rhs_axis], rhs_dilation),
            (result[out_axis], stride),
            padding[0],
        )
    return 2 * count


@functools.lru_cache(maxsize=4096)
def taps(
    inputs: tuple[int, int], kernel: tuple[int, int], outputs: tuple[int, int], padding: int
) -> int:
    """Returns how often one axis of a kernel meets a number of an input, not padding or a hole.

    Each axis has a size and the distance of its elements. The padding may be negative.
    """
    dilation, last = inputs[1], (inputs[0] - 1) * inputs[1]
    (few, far), (many, step) = sorted((kernel, outputs))
    # Output o and tap k meet input place o * stride + k * distance - padding.
    places = step * np.arange(many) - padding
    each = (places + far * tap for tap in range(few))
    is_met = ((at >= 0) & (at <= last) & (at % dilation == 0) for at in each)
    return int(sum(map(np.count_nonzero, is_met)))


FLOPS: dict[str, Callable[[Equation], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}  # by the names of products, of their equations


# The lines of the user's code in which equations were traced.


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str  # which holds the line
    caller: "Place | None" = None  # the user's own line, if this one is in an installed package

    def __str__(self) -> str:
        """Returns for example `model.py:12 (apply)`; in an installed package, with the caller."""
        file = self.file
        for folder in (os.getcwd() + os.sep, *(_packages() if self.caller else ())):
            file = file.removeprefix(folder)
        called = f", called at {self.caller}" if self.caller else ""
        return f"{file}:{self.line} ({self.function}){called}"


_LIBRARIES = ("jax", "jaxlib", "jmpx", "flax", "haiku", "equinox", "jaxtyping", "optax", "chex")
_NOTE = "jmpx's autocast was running"


def place_of(eqn: Equation, called: str = "") -> Place | None:
    """Returns the innermost line of the user's code in which an equation was traced, if any.

    `called` names the jitted function whose jaxpr holds the equation: JAX traces `jnp.where`, for
    example, once for all calls, and until JAX 0.8 its equations have the lines of the first one.
    """
    traceback = eqn.source_info.traceback
    found: Place | None = None
    for frame in () if traceback is None else traceback.frames:
        name = frame.function_name.rpartition(".")[2]
        if not is_of_library(frame.file_name):
            place = Place(frame.file_name, frame.line_num, name)
            if not place.file.startswith(_packages()):
                return place if found is None else found._replace(caller=place)
            found = found or place
        if called and name == called:
            break
    return found


@functools.cache
def _packages() -> tuple[str, ...]:
    """Returns the folders of installed packages, with a separator at their ends."""
    return tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))


def call_of(eqn: Equation) -> object:
    """Returns what identifies the call in the user's code that traced an equation, or None.

    It is equal for the operations of one call, such as a promotion and the product that needs it,
    and differs for two calls on one line.
    """
    traceback = eqn.source_info.traceback
    for code, at in () if traceback is None else zip(*traceback.raw_frames(), strict=True):
        if not is_of_library(code.co_filename):
            return code, at
    return None


@functools.cache
def is_of_library(file: str) -> bool:
    """Returns whether a file is of JAX, jmpx, a framework, or Python itself."""
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = [os.path.dirname(module.__file__ or "") for module in modules]
    if file.startswith(tuple(folder + os.sep for folder in folders)) or file.startswith("<frozen"):
        return True
    return file.startswith(sysconfig.get_path("stdlib")) and not file.startswith(_packages())


def note_source(error: Exception, eqn: Equation) -> None:
    """Adds the line of the user's code to an error of an equation, unless one inside of it has."""
    if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    place = place_of(eqn)
    if place is not None:
        source = f"{place.file}:{place.line} ({place.function})"
        error.add_note(f"{_NOTE} `{eqn.primitive.name}` of {source}.")
