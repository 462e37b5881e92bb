"""Finds the products and collectives of a program, and counts their FLOPs and bytes.

A collective's bytes are those of the whole array, which a gather returns and a reduction reads.
In a ring of n devices, each of them sends

    all-gather, reduce-scatter, all-to-all: (n - 1) / n of the bytes, if ragged at most
    all-reduce: twice that, because it is a reduce-scatter and an all-gather
    collective-permute, collective-broadcast: the bytes
"""

import math
import re
from typing import NamedTuple

from jmpx._inspect.hlo.module import Instruction, Module
from jmpx._jaxprs.equations import Place, taps

COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast".split()
)
PRODUCTS = ("dot", "ragged-dot", "scaled-dot", "convolution")
KERNEL = "kernel"  # written by Pallas or by a compiler
CALLS = {  # products among the custom calls, by the start of their targets
    "__cublas$gemm": "dot",
    "__cublas$lt$": "dot",
    "__cudnn$conv": "convolution",
    "__cudnn$fmha": "attention",
    **dict.fromkeys(("__cudnn$blockScaledDot", "__op$block_scaled_dot"), "scaled-dot"),
    **dict.fromkeys(("tpu_custom_call", "__gpu$xla.gpu.triton", "triton", "mosaic"), KERNEL),
}


class Product(NamedTuple):
    """A matrix product, convolution or fused attention, as `jmpx.inspect.Compiled` describes it."""

    kind: str
    operands: tuple[str, ...]
    result: str
    algorithm: str
    kernel: str
    flops_each: int
    times: int = 1
    parameters: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    is_backward: bool = False
    in_while: bool = False
    in_branch: bool = False
    scope: str = ""
    place: Place | None = None

    @property
    def flops(self) -> int:
        """The FLOPs of all its runs."""
        return self.times * self.flops_each

    @property
    def dtypes(self) -> str:
        """The dtypes of operands and result, and the algorithm if it is not the default."""
        dtypes = f"{' x '.join(self.operands)} -> {self.result}"
        return f"{dtypes}, {self.algorithm}" if self.algorithm else dtypes


class Collective(NamedTuple):
    """A collective of one array, as `jmpx.inspect.Compiled` describes it."""

    kind: str
    dtype: str
    bytes: int
    group: int
    times: int = 1
    parameter: str = ""
    results: tuple[str, ...] = ()
    is_backward: bool = False
    in_while: bool = False
    in_branch: bool = False
    place: Place | None = None

    @property
    def sent(self) -> float:
        """The bytes that a device sends."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.times * self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * rounds * self.bytes * (self.group - 1) / self.group

    @property
    def is_scalar(self) -> bool:
        """Whether it exchanges a loss or a flag rather than an array."""
        return self.bytes * 8 <= _bits(self.dtype)


def _bits(dtype: str) -> int:
    """Returns the size of a dtype of HLO, such as `bf16`, `f8e4m3fn` or `pred`."""
    return 8 if dtype == "pred" else int(re.sub(r"^\D*(\d+).*", r"\1", dtype))


Found = Product | Collective
_FUSION = re.compile(r'"kind":"(__\w+)"')


def candidates(module: Module) -> dict[str, list[Found]]:
    """Returns the product of an instruction, or a collective for each of its arrays, by its key.

    The list of an instruction is empty if another one is counted instead.
    """
    fusions = [one for one in module.instructions.values() if one.kind == "fusion"]
    searched = ((one.called[0], _FUSION.search(one.rest)) for one in fusions)
    kernels = {computation: found[1] for computation, found in searched if found}
    result, chains = dict[str, list[Found]](), set[str]()
    for key, one in module.instructions.items():
        if (kind := one.kind.removesuffix("-start")) in COLLECTIVES:
            # The TPU compiler splits a gather that overlaps products over their fusions, which have
            # one `chain_id`.
            chain = one.attributes.get("chain_id", key)
            result[key] = [] if chain in chains else _collectives(kind, one, module.devices)
            chains.add(chain)
        elif kind := kind_of(one):
            arrays = [operand[0] for operand in module.operands(one)[:2] if operand]
            product = Product(
                kind,
                tuple(dtype for dtype, _ in arrays),
                one.arrays[0][0] if one.arrays else "",
                _algorithm(one.rest),
                one.target or kernels.get(one.computation, ""),
                0 if kind == KERNEL else _flops(kind, one, *(shape for _, shape in arrays)),
                scope=one.scope,
            )
            result[key] = [product]
    return result


# --- Collectives ---


def _collectives(kind: str, one: Instruction, devices: int) -> list[Found]:
    arrays, group = one.arrays, _group(one.rest, devices)
    if one.kind == "collective-permute-start":
        arrays = arrays[1:2]  # the operand, the result and, on TPUs, semaphores
    elif one.kind.endswith("-start") and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # the operands, then the results
    parts = group if kind == "reduce-scatter" else 1
    if one.computation.startswith("%all-reduce-scatter"):
        # The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a slice.
        parts, kind = 1, "reduce-scatter"
    return [
        Collective(kind, dtype, parts * math.prod(shape) * _bits(dtype) // 8, group)
        for dtype, shape in arrays
    ]


# Groups of devices have three forms: lists `{{0,1},{2,3}}`, a range in the shape
# `[groups,devices]<=[...]` and, since JAX 0.10, axes of a mesh.
_LISTS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_RANGE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=@?mesh\[([^]]*)\] ?\{([^}]*)\}")


def _group(rest: str, devices: int) -> int:
    """Returns the size of a collective's groups of devices; without groups, it is all devices."""
    if found := _LISTS.search(rest):
        return found[1].count(",") + 1
    if found := _RANGE.search(rest):
        return int(found[1])
    if found := _MESH.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


# --- Products ---

Shape = tuple[int, ...]
_PRECISION = re.compile(r'operand_precision(?:":\[|=\{)([\w",]+)')
_ALGORITHM = re.compile(r'\balgorithm(?:":"ALG_(?:DOT_)?|=dot_)(\w+)')
# In attributes, such as `rhs_batch_dims={0}`, and in the configuration of cuBLAS.
_JOINED = re.compile(r'rhs_(?:contracting|batch|group)_dim(?:ension)?s"?[=:] *[\[{]([^]}]*)')
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions": *\[([^]]*)')
# The fields of a window for each axis, and their defaults.
_WINDOW = {"lhs_dilate": 9 * "1x", "rhs_dilate": 9 * "1x", "stride": 9 * "1x", "pad": 9 * "0_0x"}


def kind_of(one: Instruction) -> str:
    """Returns the kind of product that an instruction is; "" if it is none."""
    if one.kind in PRODUCTS:
        return one.kind
    return next((kind for start, kind in CALLS.items() if one.target.startswith(start)), "")


def _algorithm(rest: str) -> str:
    """Returns the algorithm or precision that a product asks for; "" if it is the default."""
    if (found := _ALGORITHM.search(rest)) and found[1] != "UNSET":
        return found[1].lower()
    found = _PRECISION.search(rest)
    words = {*re.findall(r"\w+", found[1].lower())} if found else set()
    return "" if words <= {"default"} else ", ".join(sorted(words))


def _flops(kind: str, one: Instruction, lhs: Shape, rhs: Shape) -> int:
    """Returns the FLOPs of one run: two for each multiplication with its addition."""
    result = one.arrays[0][1]
    if kind == "convolution":
        if "BackwardInput" in one.target:
            return _convolution(one, result, rhs, lhs)
        swaps = "BackwardFilter" in one.target
        return _convolution(one, lhs, result, rhs) if swaps else _convolution(one, lhs, rhs, result)
    if kind == "attention":  # masked scores count; the backward pass makes one product again
        keys = _integers((_SCORES.findall(one.rest) or ["0"])[0])[-1]
        return (5 if "Backward" in one.target else 2) * 2 * math.prod(lhs) * keys
    if kind == "scaled-dot" and one.target:  # of the rows and summed axes of both, maybe batched
        return 2 * math.prod(lhs) * rhs[-2]
    joined = {axis for axes in _JOINED.findall(one.rest) for axis in _integers(axes)}
    columns = math.prod(size for axis, size in enumerate(rhs) if axis not in joined)
    return 2 * math.prod(lhs) * columns


def _integers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"-?\d+", text)]


def _convolution(one: Instruction, inputs: Shape, kernel: Shape, outputs: Shape) -> int:
    """Counts FLOPs without padding. A grouped kernel has the inputs of one group only."""
    of_inputs, of_kernel, of_outputs = re.split("_|->", one.attributes["dim_labels"])
    count = outputs[of_outputs.index("b")] * outputs[of_outputs.index("f")]
    count *= kernel[of_kernel.index("i")]
    for index, axis in enumerate(sorted(filter(str.isdigit, of_outputs))):
        lhs, rhs, stride, pad = (
            _integers(one.attributes.get(name, default).split("x")[index])[0]
            for name, default in _WINDOW.items()
        )
        count *= taps(
            (inputs[of_inputs.index(axis)], lhs),
            (kernel[of_kernel.index(axis)], rhs),
            (outputs[of_outputs.index(axis)], stride),
            pad,
        )
    return 2 * count
