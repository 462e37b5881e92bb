"""What a step sends between devices: `jmpx.inspect.collectives`."""

import dataclasses
import json
from collections.abc import Iterable, Iterator

import jax

from jmpx._base.messages import describe
from jmpx._inspect.collectives.data import Collective
from jmpx._inspect.collectives.hlo import read_hlo
from jmpx._inspect.collectives.stablehlo import read_stablehlo
from jmpx._inspect.collectives.text import lines

_NONE_YET = "no collectives until XLA partitions it: give lowered.compile()"
_MORE = (
    "XLA's partitioner may insert more collectives: `jmpx.inspect.collectives(lowered.compile())` "
    "shows them."
)
_WIDENED = (
    "Compiled for a CPU, for which XLA widens collectives of bfloat16 to float32, and of float8 to "
    "float16: the dtypes and bytes are this machine's, not the program's. Under shard_map, "
    "`jmpx.inspect.collectives(lowered)` shows those of the program. Under jit, read the program "
    "after XLA's partitioner: `lowered.compile(compiler_options={'xla_dump_to': folder, "
    "'xla_dump_hlo_pass_re': 'spmd'})` writes it into folder, and `jmpx.inspect.collectives` takes "
    "the text of *after_spmd-partitioning*.txt."
)
_IN_WHILE = "A + after the times marks a while loop of unknown length: one trip is counted."
_IN_BRANCH = "All branches of conditionals are counted."


@dataclasses.dataclass(frozen=True)
class Collectives:
    """What a step sends between devices; `print` shows it as a table.

    Attributes:
        program: the name of the program, such as `jit_step`.
        devices: how many run it.
        platform: the target of the compiler, such as `"tpu"`; None if it was not compiled.
        collectives: one for each array that it exchanges, with `kind`, `dtype`, `bytes` (of the
            whole array), `sent` (bytes that a device sends), `group` (devices that take part),
            `times`, `parameter`, `results`, `is_backward`, `in_while`, `in_branch` and `place`.
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
        """Returns tables of 100 columns: bytes by kind and dtype, and the largest arrays."""
        title = f"{self.program} on {self.devices} device{'s' * (self.devices != 1)}"
        title += f", compiled for {self.platform}" if self.platform else ""
        return "\n".join(lines(title, self.devices, self.collectives, self.notes))

    def to_dict(self) -> dict[str, object]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them."""
        fields = {"program": self.program, "devices": self.devices, "platform": self.platform}
        rows: list[dict[str, object]] = []
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


def _is_stage(value: object) -> bool:
    return isinstance(value, jax.stages.Lowered | jax.stages.Compiled)


def _other(step: object) -> str:
    """Returns a description of a wrong argument, and of the right one."""
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


def _platform(compiled: jax.stages.Compiled) -> str | None:
    """Returns the platform that a program was compiled for, which may be absent here."""
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
