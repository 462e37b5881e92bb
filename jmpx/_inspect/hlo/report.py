"""`jmpx.inspect.compiled`: the products, collectives and memory of a lowered or compiled step."""

import collections
import dataclasses
import operator
import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jmpx._base.messages import share_text
from jmpx._inspect.hlo.found import KERNEL, Collective, Found, Product, run
from jmpx._inspect.hlo.module import Module
from jmpx._inspect.reports import Report, Table
from jmpx._inspect.text import bytes_text, count_text, flop_text, starred

_COUNTS = "partitions", "replicas"
_SIZES = "argument_size output_size alias_size temp_size peak_memory".split()  # of JAX
_WIDTH, _NAME, _ROWS = 100, 36, 20  # characters of a note and of a name, and rows of a table
_PRODUCTS_ON_CPU = (
    "Compiled for a CPU, for which XLA multiplies in float32 what a program multiplies in 16 bits: "
    "the dtypes are this machine's. jmpx.inspect.compiled(lowered) shows those of the program."
)
_COLLECTIVES_ON_CPU = (
    "Compiled for a CPU, for which XLA widens collectives of bfloat16 to float32, and of float8 to "
    "float16: the dtypes and bytes are this machine's, not the program's. "
    "jmpx.inspect.compiled(lowered, partitioned=True) shows those of the program."
)
_MORE = "Outside of shard_map, XLA may insert more collectives: partitioned=True has them."
_PARTITIONED = "The program as XLA's partitioner made it, before it is compiled for a machine."
_IN_WHILE = "A + after the times marks a while loop of unknown length: one trip is counted."
_IN_BRANCH = "All branches of conditionals are counted."


class Memory(NamedTuple):
    """Bytes of one device, as `jmpx.inspect.Compiled` describes them."""

    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Compiled(Report):
    """The products, collectives and memory of a step; `print` shows them as tables.

    Attributes:
        program: the name of the program, such as `jit_step`.
        devices: how many run it; the numbers are those of one device.
        platform: the target of the compiler, such as `"tpu"`; None if it was not compiled.
        products: the matmuls and convolutions, each with `kind` (`"dot"`, `"convolution"`, a
            `"scaled-dot"` of blocks, or a fused `"attention"`), `operands` and `result`, their
            dtypes as HLO spells them, `algorithm` (or precision, `""` if it is the default),
            `dtypes` (these three as one text), `kernel` (a function of cuBLAS or cuDNN, or a kind
            of fusion, such as Triton's; `""` is XLA's own code), `flops`, `flops_each` (of one of
            its runs), `parameters` (the inputs that its operands are copies of) and `scope` (the
            name that JAX gave it).
        collectives: one for each array that devices exchange, with `kind` and `dtype` as HLO spells
            them, `bytes` (of the whole array), `sent` (bytes that a device sends), `group` (how
            many devices take part) and `parameter` (the input that it carries a copy of, such as
            `params['w']`). Products and collectives both have `times` (how often it runs),
            `results` (the outputs that its result becomes by elementwise operations),
            `is_backward`, `in_while` (in a loop of unknown length, of which one trip is counted),
            `in_branch` (of a conditional) and `place` (the user's line; until JAX 0.8 that of the
            call around it).
        memory: the bytes of one device, as its compiler plans them: `arguments`, `outputs`,
            `aliases` (outputs in the place of donated arguments), `temporaries`, and `peak` (the
            most that is held at once, with the arguments). None if the step was not compiled, or
            the compiler does not say.
        notes: limits of these numbers, in sentences.
    """

    __module__ = "jmpx.inspect"

    program: str
    devices: int
    platform: str | None
    products: tuple[Product, ...]
    collectives: tuple[Collective, ...]
    memory: Memory | None = None
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """The FLOPs of all products."""
        return sum(one.flops for one in self.products)

    @property
    def sent(self) -> float:
        """The bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives)

    def counts(self) -> dict[str, int]:
        """Returns how many products run in which dtypes, such as `{"bf16 x bf16 -> f32": 12}`."""
        found = collections.Counter[str]()
        for one in self.products:
            found[one.dtypes] += one.times
        return dict(sorted(found.items()))

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them.

        The keys are names of attributes, and `"version"`, which changes when their meaning does.
        """
        data = super().to_dict()
        for name, amount in ("products", "flops"), ("collectives", "sent"):
            data[amount] = getattr(self, amount)
            for row, one in zip(data[name], getattr(self, name), strict=True):
                row[amount] = getattr(one, amount)
        return data

    def _blocks(self) -> Iterator[str | Table]:
        devices = f"{self.devices} device{'s' * (self.devices != 1)}"
        compiled = f", compiled for {self.platform}" if self.platform else ""
        yield f"{self.program} on {devices}{compiled}"
        yield from _product_blocks(self.products)
        yield from _collective_blocks(self.collectives)
        if self.memory:
            parts = (f"{name} {bytes_text(size)}" for name, size in self.memory._asdict().items())
            yield f"memory of a device: {', '.join(parts)}"
        yield from (textwrap.fill(note, _WIDTH) for note in self.notes)


def compiled(step: object, *, partitioned: bool = False) -> Compiled:
    """Returns the products, the collectives and the memory of a step.

    It runs nothing. A lowered step has the products of the program, on the platform that it is
    lowered for, and the collectives that the program calls itself, under `jax.shard_map` or
    `jax.pmap`. A compiled step has the products of the machine's program, the collectives, to which
    XLA's partitioner adds some under `jax.jit` with shardings, and the memory. Kernels, of Pallas
    or of the compiler, cannot be read; a note says how many there are.

    Args:
        step: the result of `jax.jit(f).lower(...)`, or of its `.compile()`, also of Equinox and
            Flax NNX; or the text of a module of HLO.
        partitioned: whether to compile a lowered step, and to read what XLA's partitioner made of
            it: all collectives, in the program's dtypes, of which a CPU's compiler widens many.

    Returns:
        The products, the collectives and the memory, with notes on their limits.

    See Also:
        `jmpx.inspect.audit` takes a function and names the line to change.

    Raises:
        TypeError: if `step` is something else, or `partitioned` is given for a compiled one.
        ValueError: if `step` is a text of another language, or a compiled step without HLO.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> import jmpx
        >>> mesh = Mesh(np.array(jax.devices()), "data")
        >>> def loss_fn(params, x):
        ...     w = jax.lax.all_gather(params["w"].astype(jnp.bfloat16), "data", tiled=True)
        ...     return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ w))
        >>> rows = {"in_specs": P("data"), "out_specs": P("data")}
        >>> step = jax.jit(jax.shard_map(jax.grad(loss_fn), mesh=mesh, **rows))
        >>> lowered = step.lower({"w": jnp.ones((64, 4))}, jnp.ones((16, 64)))
        >>> report = jmpx.inspect.compiled(lowered)
        >>> report.counts()
        {'bf16 x bf16 -> bf16': 2}
        >>> for each in report.collectives:
        ...     print(each.kind, each.dtype, each.bytes, each.parameter or each.results)
        all-gather bf16 512 params['w']
        reduce-scatter bf16 512 ("result['w']",)
    """
    for name in "lowered", "compiled":  # Equinox and Flax NNX keep JAX's objects in these
        kept = getattr(step, name, None)
        step = kept if isinstance(kept, jax.stages.Lowered | jax.stages.Compiled) else step
    outputs, platform, devices, memory, is_partitioned = [], None, None, None, True
    if isinstance(step, jax.stages.Lowered):
        stablehlo: Any = step.compiler_ir("stablehlo")  # Any, as JAX does not annotate it
        hlo: Any = step.compiler_ir("hlo")
        counts = (stablehlo.operation.attributes[f"mhlo.num_{name}"] for name in _COUNTS)
        partitions, replicas = (int(str(count).partition(" ")[0]) for count in counts)
        devices, is_partitioned = partitions * replicas, partitioned or partitions == 1
        partitioned = partitioned and partitions > 1
        text = _partitioned(step) if partitioned else hlo.get_hlo_module().to_string()
        outputs = _outputs(step)
    elif isinstance(step, jax.stages.Compiled) and not partitioned:
        text, outputs, platform = step.as_text() or "", _outputs(step), _platform(step)
        said = step.memory_analysis()  # None, or fields that differ by backend
        sizes: list[Any] = [getattr(said, f"{name}_in_bytes", None) for name in _SIZES]
        memory = None if None in sizes else Memory(*sizes)
    elif isinstance(step, str) and not partitioned:
        text = step
    else:
        raise TypeError(
            f"jmpx.inspect.compiled takes a lowered {'' if partitioned else 'or compiled '}step, "
            f"and got a {type(step).__name__}: pass jax.jit(step).lower(*args)"
            f"{'' if partitioned else ', or what compile() returns'}."
        )
    module = Module(text, devices)
    found = run(module, outputs)
    collectives = tuple(one for one in found if isinstance(one, Collective))
    products = [one for one in found if isinstance(one, Product)]
    kernels = [one for one in products if one.kind == KERNEL]
    names = ", ".join(sorted({one.kernel for one in kernels}))
    unread = f"{count_text(sum(one.times for one in kernels), 'call')} of kernels ({names})"
    is_cpu = platform == "cpu"
    notes = {
        _PRODUCTS_ON_CPU: is_cpu and any(one.result == "f32" for one in products),
        f"{unread} cannot be read: their products are missing.": bool(kernels),
        _COLLECTIVES_ON_CPU: is_cpu and any(one.dtype in ("f32", "f16") for one in collectives),
        _MORE: not is_partitioned,
        _PARTITIONED: partitioned,
        _IN_WHILE: any(one.in_while for one in found),
        _IN_BRANCH: any(one.in_branch for one in found),
    }
    found = tuple(one for one in products if one.kind != KERNEL), collectives, memory
    shown = tuple(note for note, holds in notes.items() if holds)
    return Compiled(module.name, module.devices, platform, *found, shown)


def _partitioned(lowered: jax.stages.Lowered) -> str:
    """Compiles a step; returns the HLO that XLA's partitioner made of it."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd"}
        # There is no such pass. It has JAX compile, and not load a program that it has kept.
        lowered.compile({**dump, "xla_disable_hlo_passes": folder})
        (file,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return file.read_text()


def _outputs(stage: jax.stages.Lowered | jax.stages.Compiled) -> list[str]:
    """Returns the names of the results."""
    try:
        paths, _ = jax.tree_util.tree_flatten_with_path(stage.out_info)
    except (AttributeError, KeyError):  # of `jax.pmap` until JAX 0.9
        return []
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in paths]


def _platform(program: jax.stages.Compiled) -> str | None:
    """Returns the platform that a program was compiled for, which may be absent here."""
    client = getattr(program.runtime_executable(), "client", None)
    if client is not None:
        return client.platform
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    return next((device.platform for each in shardings for device in each.device_set), None)


# --- Sections of the text ---


def _product_blocks(found: Sequence[Product]) -> Iterator[str | Table]:
    if not found:
        yield "no products"
        return

    def cells(one: Product) -> dict[str, str]:
        of = " x ".join(one.parameters) or (_end_of(one) if one.results else one.scope)
        return {"kind": one.kind, "dtypes": one.dtypes, "times": "", "of": of}

    tables = _Tables(found, "FLOPs", lambda one: one.flops, flop_text)
    yield f"{count_text(sum(one.times for one in found), 'product')}, {tables.sum(found)}"
    count = lambda group: sum(one.times for one in group)  # noqa: E731
    yield tables.shares(("kind", "dtypes", "kernel"), "products", count)
    yield tables.largest(cells, right=(0, 3))


def _collective_blocks(found: Sequence[Collective]) -> Iterator[str | Table]:
    if not found:
        yield "no collectives"
        return

    def cells(one: Collective) -> dict[str, str]:
        shown = {"kind": one.kind, "dtype": one.dtype, "array": bytes_text(one.bytes), "times": ""}
        return shown | {"group": str(one.group), "carries": one.parameter or _end_of(one)}

    arrays = [one for one in found if not one.is_scalar]
    scalars = [one for one in found if one.is_scalar]
    tables = _Tables(arrays, "sent", lambda one: one.sent, bytes_text)
    yield f"a device sends {tables.sum(found)} a step"
    if arrays:
        yield tables.shares(("kind", "dtype"), "arrays", len)
        yield tables.largest(cells, right=(0, 3, 4, 5))
    if scalars:
        many = count_text(len(scalars), "collective")
        yield f"{many} of single numbers, such as a loss or a flag: {tables.sum(scalars)}"


def _end_of(one: Found) -> str:
    """Returns the output that a result becomes, if it is known."""
    if not one.results:
        return "in the backward pass" if one.is_backward else ""
    return f"{'grad ' * one.is_backward}-> {one.results[0]}"


class _Tables(NamedTuple):
    """Tables of products or of collectives, by an amount: FLOPs or bytes."""

    found: Sequence[Any]
    header: str
    amount: Callable[[Any], float]
    text: Callable[[int], str]

    def sum(self, found: Sequence[Any]) -> str:
        return self.text(round(sum(map(self.amount, found))))

    def groups(self, key: Callable[[Any], object]) -> list[list[Any]]:
        """Groups products or collectives by a key, the largest amounts first."""
        groups: dict[object, list[Any]] = collections.defaultdict(list)
        for one in self.found:
            groups[key(one)].append(one)
        return sorted(groups.values(), key=lambda group: -sum(map(self.amount, group)))

    def shares(self, names: Sequence[str], noun: str, count: Callable[[Any], int]) -> Table:
        """Returns a table of shares by the attributes of these names."""
        rows, whole = [["share", self.header, *names, noun]], sum(map(self.amount, self.found))
        for group in self.groups(operator.attrgetter(*names)):
            share = share_text(sum(map(self.amount, group)), whole)
            cells = (getattr(group[0], name) for name in names)
            rows.append([share, self.sum(group), *cells, str(count(group))])
        return Table(rows, (0, 1, len(names) + 2))

    def largest(self, cells: Callable[[Any], dict[str, str]], right: tuple[int, ...]) -> Table:
        """Returns a table of `cells`, dicts by column, the last of which is a name.

        Layers whose names differ in numbers alone share a row.
        """

        def alike(one: Any) -> object:
            *rest, name = cells(one).values()
            return tuple(rest), starred(name), one.in_while, one.place

        *names, last = cells(self.found[0])
        rows = [[self.header, *names, last, "place"]]
        for group in self.groups(alike):
            one, shown = group[0], cells(group[0])
            name = shown[last] if len(group) == 1 else starred(shown[last])
            shown[last] = name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"
            shown["times"] = f"{sum(each.times for each in group)}{'+' * one.in_while}"
            place = f"{os.path.basename(one.place.file)}:{one.place.line}" if one.place else ""
            rows.append([self.sum(group), *shown.values(), place])
        return Table(rows, right, _ROWS)
