"""What a step sends between devices: `jmpx.inspect.collectives`."""

import collections
import dataclasses
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from jmpx._base.messages import describe
from jmpx._inspect.collectives.data import Collective
from jmpx._inspect.collectives.hlo import read_hlo
from jmpx._inspect.collectives.stablehlo import read_stablehlo
from jmpx._jaxprs.places import Place

_WIDTH, _PROSE, _PLACE, _ROWS = 100, 80, 16, 20  # characters, and lines
_NONE_YET = "no collectives until XLA partitions it: give lowered.compile()"
_MORE = (
    "XLA's partitioner may insert more collectives: `jmpx.inspect.collectives(lowered.compile())` "
    "shows them."
)
_WIDENED = (
    "Compiled for a CPU, for which XLA widens collectives of bfloat16 to float32, and of float8 to "
    "float16: the dtypes and bytes are this machine's, not the program's. Under shard_map, "
    "`jmpx.inspect.collectives(lowered)` shows those of the program. Under jit, read what XLA's "
    "partitioner made: `lowered.compile(compiler_options={'xla_dump_to': folder, "
    "'xla_dump_hlo_pass_re': 'spmd'})` writes it into folder, and `jmpx.inspect.collectives` takes "
    "the text of *after_spmd-partitioning*.txt."
)
_IN_WHILE = "A + after the times: in a while loop whose trips are not known; one trip is counted."
_IN_BRANCH = "All branches of conditionals are counted."


@dataclasses.dataclass(frozen=True)
class Collectives:
    """What a step sends between devices; `print` shows it as a table.

    Attributes:
        program: the name of the program, such as `jit_step`.
        devices: how many run it.
        platform: what it was compiled for, such as `"tpu"`; None if it was not compiled.
        collectives: one for each array that it exchanges, with `kind`, `dtype`, `bytes` (of the
            whole array), `sent` (bytes that a device sends), `group` (devices that take part),
            `times`, `parameter`, `results`, `is_backward`, `in_while`, `in_branch` and `place`.
        notes: what to know about these numbers, in sentences.
    """

    __module__ = "jmpx.inspect"

    program: str
    devices: int
    platform: str | None
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def sent(self) -> float:
        """The bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives)

    def __str__(self) -> str:
        """Returns tables of 100 columns: what is sent by kind and dtype, and the largest arrays."""
        return "\n".join(_lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them."""
        fields = {"program": self.program, "devices": self.devices, "platform": self.platform}
        rows: list[dict[str, Any]] = []
        for one in self.collectives:
            place = None if one.place is None else one.place._asdict()
            rows.append(one._asdict() | {"sent": one.sent, "place": place})
        return fields | {"sent": self.sent, "collectives": rows, "notes": list(self.notes)}

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict()` as JSON.

        Args:
            indent: as in `json.dumps`; None puts all into one line.
        """
        return json.dumps(self.to_dict(), indent=indent)


Wire = Collectives  # its name in the pickles of 0.2


def collectives(step: Any) -> Collectives:
    """Returns what a step sends between devices: each collective's dtype, bytes and parameter.

    Nothing runs. A lowered step shows the collectives that the program calls itself, under
    `jax.shard_map` or `jax.pmap`; a compiled step those of the machine's own program, which XLA's
    partitioner inserts under `jax.jit` with shardings.

    Args:
        step: what `jax.jit(f).lower(...)` returns, or its `.compile()`, those of Equinox and Flax
            NNX, too; or the text of a module of HLO.

    Returns:
        The collectives, and what is to know about them.

    Raises:
        TypeError: if `step` is something else, such as a function that is not lowered.
        ValueError: if `step` is a text that is no HLO, or a program that has none.

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
        >>> for each in jmpx.inspect.collectives(lowered).collectives:
        ...     print(each.kind, each.dtype, each.bytes, each.parameter or each.results)
        all-gather bf16 512 params['w']
        reduce-scatter bf16 512 ("result['w']",)
    """
    if isinstance(step, str):
        return _of_text(step)
    step = next(filter(_is_stage, (getattr(step, name, None) for name in _WRAPPED)), step)
    if isinstance(step, jax.stages.Lowered):
        return _of_lowered(step)
    if isinstance(step, jax.stages.Compiled):
        return _of_compiled(step)
    raise TypeError(
        f"jmpx.inspect.collectives takes a lowered or compiled step, and got {_other(step)}."
    )


_WRAPPED = ("lowered", "compiled")  # how Equinox and Flax NNX keep those of JAX


def _is_stage(value: Any) -> bool:
    return isinstance(value, jax.stages.Lowered | jax.stages.Compiled)


def _other(step: Any) -> str:
    """Returns what a wrong argument is, and what to pass instead."""
    name = getattr(step, "__name__", "")
    name = name if name.isidentifier() else "step"
    if isinstance(step, jax.stages.Traced):
        return "a traced one: pass what its `.lower()` returns"
    if callable(step) and hasattr(step, "lower"):
        return f"a jitted function that is not lowered: pass `{name}.lower(*args)`"
    if callable(step):
        return f"a function: pass `jax.jit({name}).lower(*args)`"
    return f"{describe(step)}: pass `jax.jit(step).lower(*args)`, or what its `.compile()` returns"


def _of_text(text: str) -> Collectives:
    if not text.startswith("HloModule"):
        raise ValueError(
            "jmpx.inspect.collectives reads texts of HLO, which begin with `HloModule`, and got "
            f"{describe(text)}: pass the lowered or compiled step itself."
        )
    name, devices, found = read_hlo(text)
    return Collectives(name, devices, None, tuple(found), tuple(_about(found)))


def _of_lowered(lowered: jax.stages.Lowered) -> Collectives:
    name, devices, found, is_final = read_stablehlo(lowered.compiler_ir("stablehlo"))
    notes = [] if is_final else [_MORE if found else _NONE_YET]
    return Collectives(name, devices, None, tuple(found), (*notes, *_about(found)))


def _of_compiled(compiled: jax.stages.Compiled) -> Collectives:
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "jmpx.inspect.collectives cannot read this compiled step, as it has no HLO: pass the "
            "lowered."
        )
    # Until JAX 0.9, what `jax.pmap` compiles has no `out_info`.
    paths, _ = jax.tree_util.tree_flatten_with_path(getattr(compiled, "out_info", None))
    outputs = [f"result{jax.tree_util.keystr(path)}" for path, _ in paths]
    name, devices, found = read_hlo(text, outputs)
    platform = _platform(compiled)
    widened = platform == "cpu" and any(one.dtype in ("f32", "f16") for one in found)
    notes = [_WIDENED] if widened else []
    return Collectives(name, devices, platform, tuple(found), (*notes, *_about(found)))


def _platform(compiled: Any) -> str | None:
    """Returns what a program was compiled for, also if these devices are not there."""
    client = getattr(compiled.runtime_executable(), "client", None)
    if client is not None:
        return client.platform
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((device.platform for each in shardings for device in each.device_set), None)


def _about(found: Iterable[Collective]) -> Iterator[str]:
    if any(one.in_while for one in found):
        yield _IN_WHILE
    if any(one.in_branch for one in found):
        yield _IN_BRANCH


# As text.


def _lines(wire: Collectives) -> Iterator[str]:
    arrays = [one for one in wire.collectives if not one.is_scalar]
    scalars = [one for one in wire.collectives if one.is_scalar]
    on = f" on {wire.devices} device{'s' * (wire.devices != 1)}"
    on += f", compiled for {wire.platform}" if wire.platform else ""
    if wire.collectives:
        on += f": a device sends {_size(wire.sent)} a step"
    else:
        on += f": {' '.join(wire.notes) or 'no collectives'}"
    yield _end(wire.program, _WIDTH - len(on)) + on
    if not wire.collectives:
        return
    if arrays:
        yield from ("", *_by_kind(arrays), "", *_largest(arrays, wire.devices))
    if scalars:
        what = "a single number" if len(scalars) == 1 else "single numbers"
        total = _size(sum(one.sent for one in scalars))
        yield from ("", f"{_counted(scalars)} of {what}, such as a loss or a flag: {total}")
    for note in wire.notes:
        yield from ("", *_wrapped(note))


def _by_kind(arrays: list[Collective]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Collective]] = collections.defaultdict(list)
    for one in arrays:
        groups[one.kind, one.dtype].append(one)
    sums = {key: sum(one.sent for one in group) for key, group in groups.items()}
    total = sum(sums.values()) or 1
    rows = [("share", "sent", "kind", "dtype", "arrays")]
    for key in sorted(sums, key=lambda key: -sums[key]):
        count = str(len(groups[key]))
        rows.append((f"{sums[key] / total:.0%}", _size(sums[key]), *key, count))
    return _table(rows, right=(0, 1, 4))


def _largest(arrays: list[Collective], devices: int) -> Iterator[str]:
    groups: dict[Any, list[Collective]] = collections.defaultdict(list)
    for one in arrays:  # parameters of layers, whose names differ in numbers alone, have one row
        name = re.sub(r"\d+", "*", "".join(_carried(one)))
        groups[name, one.kind, one.dtype, one.bytes, one.group, one.in_while, one.place].append(one)
    ordered = sorted(groups.values(), key=lambda group: -sum(one.sent for one in group))
    shown, others = ordered[:_ROWS], sum(ordered[_ROWS:], [])
    rows = [("sent", "kind", "dtype", "array", "times", "group")]
    for group in shown:
        one, times = group[0], sum(each.times for each in group)
        sizes = _size(sum(each.sent for each in group)), _size(one.bytes)
        counts = f"{times}{'+' * one.in_while}", str(one.group)
        rows.append((sizes[0], one.kind, one.dtype, sizes[1], *counts))
    if all(one.group == devices for one in arrays):
        rows = [row[:-1] for row in rows]
    numbers = list(_table(rows, right=(0, 3, 4, 5)))
    yield from _with_names(numbers, shown)
    if others:
        total = _size(sum(one.sent for one in others))
        yield f"and {_counted(others)} more, {total}: `to_json()` has them"


def _with_names(numbers: list[str], groups: list[list[Collective]]) -> Iterator[str]:
    """Adds what collectives carry, and their places, to lines of numbers."""
    carried = [("", "carries"), *(_common([_carried(one) for one in group]) for group in groups)]
    longest = max(len(what) + len(name) for what, name in carried)
    left = _WIDTH - len(numbers[0]) - 4
    # Places are shortened first, then the names of parameters.
    for places in zip(*(_places(group[0].place) for group in groups), strict=True):
        if longest + max(map(len, places)) <= left:
            break
    width = min(longest, left - min(_PLACE, max(map(len, places))))
    for number, (what, name), place in zip(numbers, carried, ("place", *places), strict=True):
        cell = what + _end(name, width - len(what))
        yield f"{number}  {cell.ljust(width)}  {_end(place, left - width)}".rstrip()


def _common(carried: list[tuple[str, str]]) -> tuple[str, str]:
    """Returns one name for names that differ in numbers: `params[*]['w']`."""
    parts = zip(*(re.split(r"(\d+)", name) for _, name in carried), strict=True)
    return carried[0][0], "".join(each[0] if len({*each}) == 1 else "*" for each in parts)


def _carried(one: Collective) -> tuple[str, str]:
    """Returns what a collective carries, as far as it is known, and the name of that."""
    if one.parameter:
        return "", one.parameter
    if not one.results:
        return "", "in the backward pass" if one.is_backward else ""
    return "grad -> " if one.is_backward else "-> ", one.results[0]


def _places(place: Place | None) -> list[str]:
    """Returns a place, from the longest text to the shortest."""
    if place is None:
        return [""] * 3
    file = os.path.basename(place.file)
    texts = [str(place), f"{file}:{place.line} ({place.function})", f"{file}:{place.line}"]
    return [text.removesuffix(" ()") for text in texts]


def _table(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells)


def _end(text: str, width: int) -> str:
    """Returns a path or place in at most some characters: its end, which says most."""
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _wrapped(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, _PROSE, break_long_words=False, break_on_hyphens=False)


def _counted(found: list[Collective]) -> str:
    return f"{len(found)} collective{'s' * (len(found) != 1)}"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"
