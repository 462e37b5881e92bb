"""Compiles a program for chips that are not there, in a process of its own.

It reads a line of JSON, which `compiling.py` writes, and an exported program from its standard
input, and prints what the compiler says as a line of JSON.
"""

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
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, _shardings(request, devices), strict=True)
    ]
    traced = jax.jit(exported.call, donate_argnums=request["donated"]).trace(*arguments)
    lowered, start = traced.lower(lowering_platforms=exported.platforms), time.perf_counter()
    try:
        program = lowered.compile(compiler_options=request["options"])
    except jax.errors.JaxRuntimeError as error:
        return {"chips": len(devices), **_refused(str(error))}
    sent = dict[str, float]()
    for one in collectives(program).collectives:
        kind = f"{one.kind} {one.dtype}"
        sent[kind] = sent.get(kind, 0.0) + one.sent
    return {
        "chips": len(devices),
        "fits": True,
        "peak": program.memory_analysis().peak_memory_in_bytes,
        "accessed": (program.cost_analysis() or {}).get("bytes accessed"),
        "sent": sent,
        "seconds": time.perf_counter() - start,
    }


def _refused(text: str) -> dict[str, Any]:
    """Returns why a compiler refuses a program, and what it needs where that is too much."""
    error = {"error": " ".join(text.split())[:300]}
    if "RESOURCE_EXHAUSTED" not in text:
        return error
    found = _NEEDED.search(text)
    return error | {"fits": False, "peak": found and int(float(found[1]) * _UNITS[found[2]])}


def _shardings(request: dict[str, Any], devices: Sequence[Any]) -> list[NamedSharding | None]:
    """Returns the shardings of the arguments; of all on all devices where none has one."""
    if request["mesh"] is None:
        whole = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec())
        return [whole for _ in request["specs"]]
    names, sizes, types = request["mesh"]
    kinds = tuple(AxisType[each] for each in types)
    mesh = Mesh(np.array(devices).reshape(sizes), names, axis_types=kinds)
    return [
        None if spec is None else NamedSharding(mesh, PartitionSpec(*map(_axes, spec)))
        for spec in request["specs"]
    ]


def _axes(axes: Any) -> Any:
    return tuple(axes) if isinstance(axes, list) else axes


if __name__ == "__main__":
    head = json.loads(sys.stdin.buffer.readline())
    program = jax.export.deserialize(bytearray(sys.stdin.buffer.read()))
    print(json.dumps(compiled(head, program)))
