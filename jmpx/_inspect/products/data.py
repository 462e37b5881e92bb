"""Products: their fields."""

from collections.abc import Sequence
from typing import NamedTuple

from jmpx._jaxprs.equations import Place


class Product(NamedTuple):
    """A matrix product, convolution or fused attention, as `jmpx.inspect.Products` describes it."""

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

    is_scalar = False  # so that its result is followed to outputs

    def at(self, sources: Sequence[str], is_backward: bool, place: Place | None) -> "Product":
        """Returns it with the inputs that its operands are copies of, and where it is."""
        parameters = tuple(filter(None, sources[: len(self.operands)]))
        return self._replace(parameters=parameters, is_backward=is_backward, place=place)

    @property
    def flops(self) -> int:
        """The FLOPs of all its runs."""
        return self.times * self.flops_each

    @property
    def dtypes(self) -> str:
        """The dtypes of operands and result, and the algorithm if it is not the default."""
        dtypes = f"{' x '.join(self.operands)} -> {self.result}"
        return f"{dtypes}, {self.algorithm}" if self.algorithm else dtypes
