"""Finds the products of a program in the instructions of HLO, and counts their FLOPs."""

import math
import re
from collections.abc import Callable

from jmpx._inspect.hlo.module import Instruction, Module
from jmpx._inspect.products.data import Product
from jmpx._jaxprs.equations import taps

KINDS = ("dot", "ragged-dot", "scaled-dot", "convolution")
KERNEL = "kernel"  # of Pallas, or one that a compiler wrote
CALLS = {  # what custom calls are, by how the names of their targets start
    "__cublas$gemm": "dot",
    "__cublas$lt$": "dot",
    "__cudnn$conv": "convolution",
    "__cudnn$fmha": "attention",
    **dict.fromkeys(("tpu_custom_call", "__gpu$xla.gpu.triton", "triton", "mosaic"), KERNEL),
}
_PRECISION = re.compile(r'operand_precision(?:":\[|=\{)([\w",]+)')
_ALGORITHM = re.compile(r'\balgorithm(?:":"ALG_(?:DOT_)?|=dot_)(\w+)')
_FUSION = re.compile(r'"kind":"(__\w+)"')

Shape = tuple[int, ...]
# In attributes, as `rhs_batch_dims={0}`, and in what cuBLAS is told.
_JOINED = re.compile(r'rhs_(?:contracting|batch|group)_dim(?:ension)?s"?[=:] *[\[{]([^]}]*)')
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions": *\[([^]]*)')
# What a window may say of each axis, and what holds otherwise.
_WINDOW = {"lhs_dilate": 9 * "1x", "rhs_dilate": 9 * "1x", "stride": 9 * "1x", "pad": 9 * "0_0x"}


def kind_of(one: Instruction) -> str:
    """Returns what kind of product an instruction is; "" if it is none."""
    if one.kind in KINDS:
        return one.kind
    return next((kind for start, kind in CALLS.items() if one.target.startswith(start)), "")


def finder(module: Module) -> Callable[[Instruction], list[Product] | None]:
    """Returns a function that finds the product of an instruction."""
    fusions = [one for one in module.instructions.values() if one.kind == "fusion"]
    kernels = {one.called[0]: found[1] for one in fusions if (found := _FUSION.search(one.rest))}

    def find(one: Instruction) -> list[Product] | None:
        if not (kind := kind_of(one)):
            return None
        arrays = [operand[0] for operand in module.operands(one)[:2] if operand]
        return [
            Product(
                kind,
                tuple(dtype for dtype, _ in arrays),
                one.arrays[0][0] if one.arrays else "",
                _algorithm(one.rest),
                one.target or kernels.get(one.computation, ""),
                0 if kind == KERNEL else _flops(kind, one, *(shape for _, shape in arrays)),
                scope=one.scope,
            )
        ]

    return find


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
    if kind == "attention":  # what is masked counts; backward, a product is made again
        keys = _integers((_SCORES.findall(one.rest) or ["0"])[0])[-1]
        return (5 if "Backward" in one.target else 2) * 2 * math.prod(lhs) * keys
    joined = {axis for axes in _JOINED.findall(one.rest) for axis in _integers(axes)}
    columns = math.prod(size for axis, size in enumerate(rhs) if axis not in joined)
    return 2 * math.prod(lhs) * columns


def _integers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"-?\d+", text)]


def _convolution(one: Instruction, inputs: Shape, kernel: Shape, outputs: Shape) -> int:
    """Counts what is not padding. Groups need no look: the kernel has the inputs of one."""
    of_inputs, of_kernel, of_outputs = re.split("_|->", one.attributes["dim_labels"])
    count = outputs[of_outputs.index("b")] * outputs[of_outputs.index("f")]
    count *= kernel[of_kernel.index("i")]
    for index, axis in enumerate(sorted(filter(str.isdigit, of_outputs))):
        lhs, rhs, stride, pad = (
            _integers(one.attributes.get(name, many).split("x")[index])[0]
            for name, many in _WINDOW.items()
        )
        count *= taps(
            (inputs[of_inputs.index(axis)], lhs),
            (kernel[of_kernel.index(axis)], rhs),
            (outputs[of_outputs.index(axis)], stride),
            pad,
        )
    return 2 * count
