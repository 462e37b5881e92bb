"""Facts about equations: which primitives only move numbers, FLOPs, and the user's lines."""

import functools
import linecache
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Collection
from types import CodeType
from typing import NamedTuple

import numpy as np

from jmpx._jaxprs.core import inner_jaxprs, operation_name
from jmpx._jaxprs.marks import Equation, Jaxpr

# The result has the numbers of the operand.
IDENTITIES = frozenset("copy copy_p name stop_gradient optimization_barrier device_put".split())
# The same, by primitives that change where an array is, or along which axes it varies.
PLACEMENTS = frozenset("sharding_constraint reshard mesh_cast pvary pbroadcast pcast".split())
# The result has the numbers of the operand in another shape, broadcast or in another order.
RESHAPES = frozenset("broadcast_in_dim reshape transpose squeeze expand_dims rev".split())
# The result has some numbers of the first operand; other operands are indices.
PICKS = frozenset("slice split unstack tile dynamic_slice gather".split())
# The result has numbers of several operands.
JOINS = frozenset("concatenate stack pad dynamic_update_slice".split())
# The result has numbers of other devices.
EXCHANGES = frozenset(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute
    """.split()
)
# The result has the numbers of the operand, rounded.
ROUNDINGS = frozenset("convert_element_type reduce_precision".split())

# Linear algebra, which has no kernels of 16 bits: a rounded matrix is cast up before it.
DECOMPOSITIONS = frozenset("cholesky eig eigh lu qr schur svd triangular_solve".split())

# Primitives whose computation no jaxpr shows, or only the jaxpr of a kernel; names begin like this.
HIDING = ("pure_callback", "io_callback", "ffi_call", "pallas_call", "custom_partitioning")
# The same, and the kernels of cuDNN, Triton and TPUs, which have primitives of their own.
KERNELS = (*HIDING, "dot_product_attention", "triton_kernel_call", "tpu_custom_call")
FOREIGN = "ffi_call"  # calls a compiled function, which may be a kernel


# FLOPs of products, from shapes alone: two for each multiplication with its addition.
#
# Padding of convolutions does not count.


def flops_of(jaxpr: Jaxpr, chosen: Collection[Equation]) -> tuple[int, int]:
    """Returns the FLOPs of all products of a jaxpr, and of the products in `chosen` equations.

    A loop counts with all its trips, if their number is known, a kernel with its whole grid, and a
    conditional with the branch that has most FLOPs in the chosen equations.
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
    """Returns how often an equation runs the jaxprs that it holds; 1 if that is unknown."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    sizes = (eqn.params.get("length", 1), *grid)
    return math.prod(size for size in sizes if isinstance(size, int))


def _dot(eqn: Equation) -> int:
    lhs, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    contracted = eqn.params["dimension_numbers"][0][0]
    return 2 * math.prod(result) * math.prod(lhs[axis] for axis in contracted)


def _scaled_dot(eqn: Equation) -> int:
    """JAX moves the axes to (batch, rows, summed) first."""
    return 2 * math.prod(eqn.outvars[0].aval.shape) * eqn.invars[0].aval.shape[-1]


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
    # Holds with groups, too: the kernel has the inputs of one group, the result its batch.
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
    """Returns how often one axis of a kernel meets a number of the input, not padding or a hole.

    Each axis is given by its size and the distance of its elements. Padding may be negative.
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
    "scaled_dot": _dot,
    "scaled_matmul": _scaled_dot,
    "scaled_matmul_wrapper": _scaled_dot,
    "conv_general_dilated": _convolution,
}  # primitive -> the FLOPs of its equation


# The lines of the user's code that equations come from.


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str  # around the line
    caller: "Place | None" = None  # the user's own line, if this one is in an installed package

    def __str__(self) -> str:
        """Returns for example `model.py:12 (apply)`; in an installed package, with the caller."""
        file = self.file
        for folder in (os.getcwd() + os.sep, *(_packages() if self.caller else ())):
            file = file.removeprefix(folder)
        called = f", called at {self.caller}" if self.caller else ""
        return f"{file}:{self.line} ({self.function}){called}"


FRAMEWORKS = ("flax", "haiku", "equinox")
_LIBRARIES = ("jax", "jaxlib", "jmpx", *FRAMEWORKS, "jaxtyping", "optax", "chex")
_BETWEEN = ("jax", "jaxlib", "jaxtyping", "chex", "python")  # between a caller and an equation
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
        if not library_of(frame.file_name):
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


def call_of(eqn: Equation) -> tuple[CodeType, int] | None:
    """Returns a key of the call in the user's code that traced an equation, or None.

    Operations of one call, such as a promotion and the product that needs it, have equal keys; two
    calls on one line have different ones.
    """
    traceback = eqn.source_info.traceback
    for code, at in () if traceback is None else zip(*traceback.raw_frames(), strict=True):
        if not library_of(code.co_filename):
            return code, at
    return None


def source_of(eqn: Equation) -> str:
    """Returns the lines of the call in the user's code that traced an equation, as in a file."""
    for code, at in filter(None, [call_of(eqn)]):
        first, last, *_ = list(code.co_positions())[at // 2]
        return "".join(linecache.getlines(code.co_filename)[(first or 1) - 1 : last])
    return ""


def writer_of(eqn: Equation) -> str:
    """Returns which package called the function of JAX that made an equation: see `library_of`."""
    traceback = eqn.source_info.traceback
    files = [each.file_name for each in (traceback.frames if traceback else ())]
    # This room runs in place of JAX's own gathers.
    names = (library_of(file) for file in files if not file.startswith(os.path.dirname(__file__)))
    return next((name for name in names if name not in _BETWEEN), "")


@functools.cache
def library_of(file: str) -> str:
    """Returns the package that a file is of: `jax`, `flax`, `python`; empty for the user's code."""
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        if module and file.startswith(os.path.dirname(module.__file__ or "") + os.sep):
            return name
    is_python = file.startswith(sysconfig.get_path("stdlib")) and not file.startswith(_packages())
    return "python" if is_python or file.startswith("<frozen") else ""


def note_source(error: Exception, eqn: Equation) -> None:
    """Adds the user's line to an error of an equation, unless an inner equation has done so."""
    if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    place = place_of(eqn)
    if place is not None:
        source = f"{place.file}:{place.line} ({place.function})"
        error.add_note(f"{_NOTE} `{eqn.primitive.name}` of {source}.")
