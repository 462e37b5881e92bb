"""What users have of a program: a lowered or compiled step, or a text."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jmpx._inspect.hlo.dataflow import run
from jmpx._inspect.hlo.module import Instruction, Module
from jmpx._inspect.reports import Report, plain

_IN_WHILE = "A + after the times marks a while loop of unknown length: one trip is counted."
_IN_BRANCH = "All branches of conditionals are counted."


class ProgramReport(Report):
    """What reports on a program share: their fields, and how these become data."""

    program: str
    devices: int
    platform: str | None
    notes: tuple[str, ...]
    _found = _amount = ""  # the names of the field with what was found, and of its amount

    @property
    def _title(self) -> str:
        devices = f"{self.devices} device{'s' * (self.devices != 1)}"
        compiled = f", compiled for {self.platform}" if self.platform else ""
        return f"{self.program} on {devices}{compiled}"

    def to_dict(self) -> dict[str, object]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them."""
        fields: dict[str, object] = {"program": self.program, "devices": self.devices}
        rows, amount = list[object](), self._amount
        for one in getattr(self, self._found):
            rows.append(plain(one) | {amount: getattr(one, amount)})
        found = {amount: getattr(self, amount), self._found: rows}
        return fields | {"platform": self.platform} | found | {"notes": list(self.notes)}


class Program(NamedTuple):
    """A program, and what was found in it."""

    name: str
    devices: int
    platform: str | None  # None if it was not compiled
    found: tuple[Any, ...]
    limits: tuple[str, ...]  # of its numbers, in sentences
    is_partitioned: bool  # whether XLA's partitioner will add nothing


def read(
    step: object, finder: Callable[[Module], Callable[[Instruction], Any]], caller: str
) -> Program:
    """Returns what is found in a program.

    Args:
        step: a lowered or compiled step, or a text.
        finder: returns, for a module, what `run` takes.
        caller: the name of the function that users call, for its errors.
    """
    for name in "lowered", "compiled":  # how Equinox and Flax NNX keep those of JAX
        kept = getattr(step, name, None)
        step = kept if isinstance(kept, jax.stages.Lowered | jax.stages.Compiled) else step
    outputs, platform, count, partitions = [], None, None, 1
    if isinstance(step, jax.stages.Lowered):
        partitions, replicas = _partitions(step)
        hlo: Any = step.compiler_ir("hlo")  # JAX does not annotate what it is
        text, outputs, count = (
            hlo.get_hlo_module().to_string(),
            _outputs(step),
            partitions * replicas,
        )
    elif isinstance(step, jax.stages.Compiled):
        text, outputs, platform = step.as_text() or "", _outputs(step), _platform(step)
    elif isinstance(step, str):
        text = step
    else:
        raise TypeError(
            f"jmpx.inspect.{caller} takes a lowered or compiled step, and got a "
            f"{type(step).__name__}: pass jax.jit(step).lower(*args), or what compile() returns."
        )
    module = Module(text, count)
    found = run(module, finder(module), outputs)
    limits = [_IN_WHILE] * any(one.in_while for one in found)
    limits += [_IN_BRANCH] * any(one.in_branch for one in found)
    return Program(module.name, module.devices, platform, found, tuple(limits), partitions == 1)


def _partitions(lowered: jax.stages.Lowered) -> list[int]:
    """Returns how many partitions and replicas a program has."""
    stablehlo: Any = lowered.compiler_ir("stablehlo")
    attributes = stablehlo.operation.attributes
    names = "mhlo.num_partitions", "mhlo.num_replicas"
    return [int(str(attributes[name]).partition(" ")[0]) for name in names]


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
