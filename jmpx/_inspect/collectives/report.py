"""What a step sends between devices: `jmpx.inspect.collectives`."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from jmpx._inspect.collectives.data import Collective
from jmpx._inspect.collectives.hlo import read_hlo
from jmpx._inspect.collectives.text import lines
from jmpx._inspect.reports import Report, plain

_MORE = "Outside of shard_map, XLA may insert more: lowered.compile() has them."
_WIDENED = (
    "Compiled for a CPU, for which XLA widens collectives of bfloat16 to float32, and of float8 to "
    "float16: the dtypes and bytes are this machine's, not the program's. Under shard_map, "
    "jmpx.inspect.collectives(lowered) shows those of the program; under jit, give it the text "
    "that XLA writes after its partitioner, as docs/collectives.md shows."
)
_IN_WHILE = "A + after the times marks a while loop of unknown length: one trip is counted."
_IN_BRANCH = "All branches of conditionals are counted."


@dataclasses.dataclass(frozen=True)
class Collectives(Report):
    """What a step sends between devices; `print` shows it as a table.

    Attributes:
        program: the name of the program, such as `jit_step`.
        devices: how many run it.
        platform: the target of the compiler, such as `"tpu"`; None if it was not compiled.
        collectives: one for each array that it exchanges, with `kind` and `dtype` as HLO spells
            them, `bytes` (of the whole array), `sent` (bytes that a device sends), `group` (how
            many devices take part), `times` (how often it runs), `parameter` (the input that it
            carries a copy of, such as `params['w']`), `results` (the outputs that its result
            becomes by elementwise operations), `is_backward`, `in_while` (in a loop of unknown
            length, of which one trip is counted), `in_branch` (of a conditional) and `place` (the
            user's line; until JAX 0.8 that of the call around it).
        notes: limits of these numbers, in sentences.
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
        """Returns tables: bytes by kind and dtype, and the largest arrays."""
        title = f"{self.program} on {self.devices} device{'s' * (self.devices != 1)}"
        title += f", compiled for {self.platform}" if self.platform else ""
        return "\n".join(lines(title, self.collectives, self.notes))

    def to_dict(self) -> dict[str, object]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them."""
        fields = {"program": self.program, "devices": self.devices, "platform": self.platform}
        rows = [plain(one) | {"sent": one.sent} for one in self.collectives]
        return fields | {"sent": self.sent, "collectives": rows, "notes": list(self.notes)}


Wire = Collectives  # its name in the pickles of 0.2


def collectives(step: object) -> Collectives:
    """Returns what a step sends between devices: each collective's dtype, bytes and parameter.

    Nothing runs. A lowered step shows the collectives that the program calls itself, under
    `jax.shard_map` or `jax.pmap`; a compiled step those of the machine's own program, which XLA's
    partitioner inserts under `jax.jit` with shardings.

    Args:
        step: the result of `jax.jit(f).lower(...)`, or of its `.compile()`, also of Equinox and
            Flax NNX; or the text of a module of HLO.

    Returns:
        The collectives, with notes on their limits.

    Raises:
        TypeError: if `step` is something else, such as a function that is not lowered.
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
        >>> for each in jmpx.inspect.collectives(lowered).collectives:
        ...     print(each.kind, each.dtype, each.bytes, each.parameter or each.results)
        all-gather bf16 512 params['w']
        reduce-scatter bf16 512 ("result['w']",)
    """
    if isinstance(step, str):
        name, devices, found = read_hlo(step)
        return Collectives(name, devices, None, found, _notes(found))
    for name in "lowered", "compiled":  # how Equinox and Flax NNX keep those of JAX
        kept = getattr(step, name, None)
        step = kept if isinstance(kept, jax.stages.Lowered | jax.stages.Compiled) else step
    if isinstance(step, jax.stages.Lowered):
        return _of_lowered(step)
    if isinstance(step, jax.stages.Compiled):
        return _of_compiled(step)
    raise TypeError(
        "jmpx.inspect.collectives takes a lowered or compiled step, and got a "
        f"{type(step).__name__}: pass jax.jit(step).lower(*args), or what its compile() returns."
    )


def _of_lowered(lowered: jax.stages.Lowered) -> Collectives:
    stablehlo: Any = lowered.compiler_ir("stablehlo")  # JAX does not annotate what these are
    hlo: Any = lowered.compiler_ir("hlo")
    attributes = stablehlo.operation.attributes
    names = "mhlo.num_partitions", "mhlo.num_replicas"
    partitions, replicas = (int(str(attributes[name]).partition(" ")[0]) for name in names)
    text = hlo.get_hlo_module().to_string()
    name, devices, found = read_hlo(text, _outputs(lowered), partitions * replicas)
    return Collectives(name, devices, None, found, _notes(found, *[_MORE] * (partitions > 1)))


def _of_compiled(compiled: jax.stages.Compiled) -> Collectives:
    name, devices, found = read_hlo(compiled.as_text() or "", _outputs(compiled))
    platform = _platform(compiled)
    widened = platform == "cpu" and any(one.dtype in ("f32", "f16") for one in found)
    notes = _notes(found, *[_WIDENED] * widened)
    return Collectives(name, devices, platform, found, notes)


def _outputs(stage: jax.stages.Lowered | jax.stages.Compiled) -> list[str]:
    """Returns the names of the results."""
    try:
        paths, _ = jax.tree_util.tree_flatten_with_path(stage.out_info)
    except (AttributeError, KeyError):  # of `jax.pmap` until JAX 0.9
        return []
    return [f"result{jax.tree_util.keystr(path)}" for path, _ in paths]


def _platform(compiled: jax.stages.Compiled) -> str | None:
    """Returns the platform that a program was compiled for, which may be absent here."""
    client = getattr(compiled.runtime_executable(), "client", None)
    if client is not None:
        return client.platform
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((device.platform for each in shardings for device in each.device_set), None)


def _notes(found: Iterable[Collective], *first: str) -> tuple[str, ...]:
    in_while = [_IN_WHILE] * any(one.in_while for one in found)
    return (*first, *in_while, *[_IN_BRANCH] * any(one.in_branch for one in found))
