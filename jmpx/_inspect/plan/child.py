"""Compiles a program for chips that are not there, in a process of its own.

It reads a line of JSON, which `compiling.py` writes, and an exported program from its standard
input, and prints what the compiler says as a line of JSON.
"""

import collections
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jmpx._inspect.collectives.report import collectives

# What a TPU's compiler says of a program that does not fit.
_NEEDED = re.compile(r"([\d.]+)([KMGT])\)? (?:exceeds|of) ")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compiled(request: dict[str, Any], exported: jax.export.Exported) -> dict[str, Any]:
    """Returns what a compiler says of a program: its memory, bytes, collectives and seconds."""
    devices = topologies.get_topology_desc(**request["topology"]).devices[: exported.nr_devices]
    both = zip(exported.in_avals, _shardings(request, devices), strict=True)
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in both]
    traced = jax.jit(exported.call, donate_argnums=request["donated"]).trace(*arguments)
    lowered, start = traced.lower(lowering_platforms=exported.platforms), time.perf_counter()
    found: dict[str, Any] = {"chips": len(devices)}
    try:
        program = lowered.compile(compiler_options=request["options"])
    except jax.errors.JaxRuntimeError as error:
        return found | _refused(" ".join(str(error).split()))
    sent = collections.Counter[str]()
    for one in collectives(program).collectives:
        sent[f"{one.kind} {one.dtype}"] += one.sent  # pyright: ignore[reportArgumentType]
    memory: Any = program.memory_analysis()
    return found | {
        "fits": True,
        "peak": memory.peak_memory_in_bytes,
        "accessed": (program.cost_analysis() or {}).get("bytes accessed"),
        "sent": sent,
        "seconds": time.perf_counter() - start,
    }


def _refused(text: str) -> dict[str, Any]:
    """Returns why a compiler refuses a program, and what it needs where that is too much."""
    if "RESOURCE_EXHAUSTED" not in text:
        return {"error": text[:300]}
    needed = _NEEDED.search(text)
    peak = needed and int(float(needed[1]) * _UNITS[needed[2]])
    return {"error": text[:300], "fits": False, "peak": peak}


def _shardings(request: dict[str, Any], devices: Sequence[Any]) -> list[NamedSharding | None]:
    """Returns the shardings of the arguments: where none has one, all are on all devices."""
    names, sizes, kinds = request["mesh"] or (["all"], [len(devices)], ["Auto"])
    mesh = Mesh(np.array(devices).reshape(sizes), names, tuple(AxisType[kind] for kind in kinds))
    specs = request["specs"] if request["mesh"] else [[]] * len(request["specs"])
    axes = lambda each: tuple(each) if isinstance(each, list) else each  # noqa: E731
    named = lambda spec: NamedSharding(mesh, PartitionSpec(*map(axes, spec)))  # noqa: E731
    return [None if spec is None else named(spec) for spec in specs]


if __name__ == "__main__":
    head = json.loads(sys.stdin.buffer.readline())
    program = jax.export.deserialize(bytearray(sys.stdin.buffer.read()))
    print(json.dumps(compiled(head, program)))
