"""What travels between devices, from StableHLO."""

import math
import re


def collectives(text, kind):
    """The dtypes and numbers of elements of the whole arrays of a kind, scalars left out.

    That is what a gather makes, and what a reduction takes.
    """
    found = re.findall(
        rf'"stablehlo\.{kind}".*?: \(tensor<([^>]*)>\) -> tensor<([^>]*)>', text, re.DOTALL
    )
    types = [(after if kind == "all_gather" else before).split("x") for before, after in found]
    return [(shape[-1], math.prod(map(int, shape[:-1]))) for shape in types if shape[:-1]]
