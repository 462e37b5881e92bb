"""What a step sends between devices: `jmpx.inspect.collectives`."""

import dataclasses

from jmpx._inspect.collectives.data import Collective
from jmpx._inspect.collectives.hlo import Finder
from jmpx._inspect.collectives.text import lines
from jmpx._inspect.hlo.programs import ProgramReport, read

_MORE = "Outside of shard_map, XLA may insert more: lowered.compile() has them."
_WIDENED = (
    "Compiled for a CPU, for which XLA widens collectives of bfloat16 to float32, and of float8 to "
    "float16: the dtypes and bytes are this machine's, not the program's. Under shard_map, "
    "jmpx.inspect.collectives(lowered) shows those of the program; under jit, give it the text "
    "that XLA writes after its partitioner, as docs/collectives.md shows."
)


@dataclasses.dataclass(frozen=True)
class Collectives(ProgramReport):
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
    _found, _amount = "collectives", "sent"

    @property
    def sent(self) -> float:
        """The bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives)

    def __str__(self) -> str:
        """Returns tables: bytes by kind and dtype, and the largest arrays."""
        return "\n".join(lines(self._title, self.collectives, self.notes))


Wire = Collectives  # its name in the pickles of 0.2


def collectives(step: object) -> Collectives:
    """Returns what a step sends between devices: each collective's dtype, bytes and parameter.

    It runs nothing. A lowered step has the collectives that the program calls itself, under
    `jax.shard_map` or `jax.pmap`. A compiled step has those of the machine's own program, which
    XLA's partitioner inserts under `jax.jit` with shardings.

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
    name, devices, platform, found, limits, is_partitioned = read(
        step, lambda module: Finder(module.devices), "collectives"
    )
    widened = platform == "cpu" and any(one.dtype in ("f32", "f16") for one in found)
    limits = (*[_WIDENED] * widened, *[_MORE] * (not is_partitioned), *limits)
    return Collectives(name, devices, platform, found, limits)
