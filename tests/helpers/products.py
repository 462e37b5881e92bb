"""Reads from StableHLO how each matrix product and convolution of a program multiplies."""

import re
from typing import Any, NamedTuple

import jax


class Product(NamedTuple):
    """A product, as the compiler gets it.

    `how` is DEFAULT, HIGH, HIGHEST or, under a dot algorithm, the dtypes that it multiplies and
    sums and how often it multiplies, such as `bf16 f32 x3`. `sizes` has those of the operands and
    the result.
    """

    operation: str
    dtypes: frozenset[str]
    how: str
    sizes: frozenset[int]


def products_of(f, *args):
    """All products of a function's program, those of its inner functions once each."""
    text = jax.jit(lambda *args: f(*args)).lower(*args).as_text()
    return [
        _parse(*found) for found in re.findall(r"stablehlo\.(dot_general|convolution)\b(.*)", text)
    ]


def _parse(operation, line):
    operands = line.rpartition(" : (")[2].partition("->")[0]
    tensors = re.findall(r"tensor<([^>]*)>", line.rpartition(" : (")[2])
    dtypes = re.findall(r"<(?:\d+x)*(\w+)>", operands)
    precision = line.partition("precision")[2]
    words = set(re.findall(r"DEFAULT|HIGHEST|HIGH", precision))
    (how,) = words or {"DEFAULT"}
    if "algorithm = <" in line:
        assert how == "DEFAULT"
        multiplies, sums = re.findall(r"(?:lhs_precision|accumulation)_type = (\w+)", line)
        (times,) = re.findall(r"num_primitive_operations = (\d+)", line)
        how = f"{multiplies} {sums} x{times}"
    sizes = {int(size) for tensor in tensors for size in re.findall(r"(\d+)x", tensor)}
    return Product(operation, frozenset(dtypes), how, frozenset(sizes))


def default_precision():
    """JAX's setting for products without a precision of their own."""
    config: Any = jax.config  # Any, because JAX does not annotate its settings
    return config.jax_default_matmul_precision
