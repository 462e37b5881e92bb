"""Which products a program multiplies in which dtype: `jmpx.inspect.products`."""

import collections
import dataclasses
from collections.abc import Iterator

from jmpx._inspect.hlo.programs import ProgramReport, read
from jmpx._inspect.hlo.tables import Tables, end_of, wrapped
from jmpx._inspect.products.data import Product
from jmpx._inspect.products.hlo import KERNEL, finder
from jmpx._inspect.text import count_text, flop_text

_WIDENED = (
    "Compiled for a CPU, for which XLA multiplies in float32 what a program multiplies in 16 bits: "
    "the dtypes are this machine's. jmpx.inspect.products(lowered) shows those of the program."
)


@dataclasses.dataclass(frozen=True)
class Products(ProgramReport):
    """The matmuls and convolutions of a program, by dtype; `print` shows a table.

    Attributes:
        program: the name of the program, such as `jit_step`.
        devices: how many run it; the numbers are those of one device.
        platform: the target of the compiler, such as `"tpu"`; None if it was not compiled.
        products: each with `kind` (`"dot"`, `"convolution"` or a fused `"attention"`), `operands`
            and `result`, their dtypes as HLO spells them, `algorithm` (or precision, `""` if it is
            the default), `dtypes` (these three as one text), `kernel` (what multiplies: a function
            of cuBLAS or cuDNN, or a kind of fusion, such as Triton's; `""` is XLA's own code),
            `flops`, `flops_each` (of one of its runs), `times` (how often it runs), `parameters`
            (the inputs that its operands are copies of), `results` (the outputs that its result
            becomes by elementwise operations), `is_backward`, `in_while` (in a loop of unknown
            length, of which one trip is counted), `in_branch` (of a conditional), `scope` (the name
            that JAX gave it) and `place` (the user's line).
        notes: limits of these numbers, in sentences.
    """

    __module__ = "jmpx.inspect"

    program: str
    devices: int
    platform: str | None
    products: tuple[Product, ...]
    notes: tuple[str, ...] = ()
    _found, _amount = "products", "flops"

    @property
    def flops(self) -> int:
        """The FLOPs of all products."""
        return sum(one.flops for one in self.products)

    def counts(self) -> dict[str, int]:
        """Returns how many products run in which dtypes, such as `{"bf16 x bf16 -> f32": 12}`."""
        found = collections.Counter[str]()
        for one in self.products:
            found[one.dtypes] += one.times
        return dict(sorted(found.items()))

    def __str__(self) -> str:
        """Returns tables: FLOPs by dtypes, and the largest products."""
        return "\n".join(_lines(self._title, self))


def products(step: object) -> Products:
    """Returns the matmuls and convolutions of a step: their dtypes, kernels and FLOPs.

    It runs nothing. A lowered step has what the program asks for, on the platform that it is
    lowered for. A compiled step has what the machine's own program multiplies. The inside of
    Pallas kernels and of a compiler's own cannot be read; a note says how many there are.

    Args:
        step: the result of `jax.jit(f).lower(...)`, or of its `.compile()`, also of Equinox and
            Flax NNX; or the text of a module of HLO.

    Returns:
        The products, with notes on their limits.

    See Also:
        `jmpx.inspect.audit` takes a function and names the line to change.

    Raises:
        TypeError: if `step` is something else, such as a function that is not lowered.
        ValueError: if `step` is a text of another language, or a compiled step without HLO.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(w, x):
        ...     return jnp.mean((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) ** 2)
        >>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 8), (32, 64)))
        >>> lowered = jax.jit(jax.grad(loss_fn)).trace(w, x).lower(lowering_platforms=("cuda",))
        >>> report = jmpx.inspect.products(lowered)
        >>> report.counts(), report.flops
        ({'bf16 x bf16 -> bf16': 2}, 65536)
    """
    name, devices, platform, found, limits, _ = read(step, finder, "products")
    widened = platform == "cpu" and any(one.result == "f32" for one in found)
    if kernels := [one for one in found if one.kind == KERNEL]:
        many = count_text(sum(one.times for one in kernels), "call")
        names = ", ".join(sorted({one.kernel for one in kernels}))
        limits = (
            f"{many} of kernels ({names}) cannot be read: their products are missing.",
            *limits,
        )
    found = tuple(one for one in found if one.kind != KERNEL)
    return Products(name, devices, platform, found, (*[_WIDENED] * widened, *limits))


def _lines(title: str, report: Products) -> Iterator[str]:
    """Yields the lines of a report: a title, tables of products, and sentences."""
    found = report.products
    tables = Tables(found, lambda one: one.flops, flop_text, lambda one: one.times, "product")
    many = f"{tables.many(found)}, {tables.sum(found)}" if found else "no products"
    yield f"{title}: {many}"
    if found:
        header = "FLOPs", "kind", "dtypes", "kernel", "products"
        yield from ("", *tables.shares(header, lambda one: (one.kind, one.dtypes, one.kernel)))
        header = "FLOPs", "kind", "dtypes", "times", "of", "place"
        cells = lambda one: (one.kind, one.dtypes)  # noqa: E731
        yield from ("", *tables.largest(header, cells, _name, right=(0, 3)))
    yield from wrapped(report.notes)


def _name(one: Product) -> str:
    """Returns the inputs or the output of a product, as far as they are known, else its scope."""
    return " x ".join(one.parameters) or (end_of(one) if one.results else one.scope)
