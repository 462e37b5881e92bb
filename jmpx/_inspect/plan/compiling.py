"""Compiles programs for chips that are not there, in another process; keeps answers in files.

The other process runs this file: it reads a line of JSON and an exported program from its standard
input, and prints a line of JSON.
"""

import collections
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jmpx._inspect.hlo.report import compiled
from jmpx._inspect.plan.chips import Chip
from jmpx._inspect.programs import Program
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import any_holds

_PACKAGES = "jmpx jaxlib nvidia-cuda-nvcc-cu12 jax libtpu jax-cuda12-plugin".split()
# How a TPU's compiler says that a program does not fit.
_NEEDED = re.compile(r"([\d.]+)([KMGT])\)? (?:exceeds|of) ")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BROKEN = "The compiler does not start"
_KERNEL = re.compile(r'custom_call @"?([\w.$-]+)')


def placed(program: Program) -> tuple[list[int], list[NamedSharding | None]]:
    """Returns the arguments that a jitted step donates, and the shardings of all arguments."""
    inputs = {var: n for n, var in enumerate(program.jaxpr.jaxpr.invars)}
    donated, shardings = set[int](), [_named(getattr(x, "sharding", None)) for x in program.arrays]
    for eqn in program.jaxpr.eqns:
        of_jit = (eqn.params.get(name, ()) for name in ("donated_invars", "in_shardings"))
        for atom, is_donated, sharding in zip(eqn.invars, *of_jit, strict=False):
            if not core.is_literal(atom) and atom in inputs:
                donated |= {inputs[atom]} if is_donated else set()
                shardings[inputs[atom]] = shardings[inputs[atom]] or _named(sharding)
    return sorted(donated), shardings


def _named(sharding: object) -> NamedSharding | None:
    return sharding if isinstance(sharding, NamedSharding) else None


def ask(program: Program, chip: Chip) -> dict[str, Any]:
    """Returns the `answer` of a program on a chip, or an `error` if its process died."""
    python = re.compile("callback|^debug_print$")
    if any_holds(program.jaxpr, lambda eqn: bool(python.search(eqn.primitive.name))):
        return {"error": "It calls Python, as jax.debug.print does, which no file can hold."}
    donated, shardings = placed(program)
    both = zip(program.jaxpr.in_avals, shardings, strict=True)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in both]
    step = lambda *arrays: core.evaluate(program.jaxpr, arrays)  # noqa: E731
    platforms, jitted = (chip.platform,), jax.jit(step, donate_argnums=donated)
    text = jitted.trace(*shapes).lower(lowering_platforms=platforms).as_text()
    mesh = next((each.mesh for each in shardings if each), None)
    request: dict[str, Any] = {
        "options": chip.options,
        "donated": donated,
        "mesh": mesh and [mesh.axis_names, mesh.axis_sizes, [t.name for t in mesh.axis_types]],
        "specs": [each and tuple(each.spec) for each in shardings],
    }
    parts = text, json.dumps(request), repr(chip), *map(_version, _PACKAGES)
    name = f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.json"
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jmpx", "plan", name)
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    # JAX exports most kernels only for its own version, which the other process has, too.
    kernels = map(jax.export.DisabledSafetyCheck.custom_call, set(_KERNEL.findall(text)))
    exported = jax.export.export(jitted, platforms=platforms, disabled_checks=[*kernels])(*shapes)
    request["topology"] = chip.topology(exported.nr_devices)
    found = _asked(request, exported, chip)
    if "chips" in found:
        with contextlib.suppress(OSError):  # such as a home that cannot be written to
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")  # so that the file is whole or absent
            part.write_text(json.dumps(found))
            part.replace(path)
    return found


def _asked(request: dict[str, Any], exported: jax.export.Exported, chip: Chip) -> dict[str, Any]:
    """Returns the answer that the other process prints; it has no `chips` if the process died."""
    config: Any = jax.config  # Any, because JAX does not annotate its settings
    settings = {
        **chip.settings,
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # it holds nothing for chips that are not there
        "JAX_ENABLE_X64": str(config.jax_enable_x64),
        "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),
    }
    result = subprocess.run(
        [sys.executable, "-P", "-m", "jmpx._inspect.plan.compiling"],
        input=json.dumps(request).encode() + b"\n" + bytes(exported.serialize()),
        capture_output=True,
        env=os.environ | settings,
    )
    if result.returncode == 0:
        return json.loads(result.stdout.splitlines()[-1])
    said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
    return {"error": f"The compiler ended with status {result.returncode}: {said}"}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions(chip: Chip) -> str:
    """Returns the versions of JAX and of a compiler, such as `jax 0.10.2, libtpu 0.0.42.1`."""
    names = "jax", "libtpu" if chip.platform == "tpu" else "jax-cuda12-plugin"
    return ", ".join(f"{name} {_version(name)}" for name in names if _version(name))


# --- In the other process ---


def answer(request: dict[str, Any], exported: jax.export.Exported) -> dict[str, Any]:
    """Returns the memory, bytes, collectives and seconds of a program, by its compiler."""
    try:
        devices = topologies.get_topology_desc(**request["topology"]).devices
    except Exception as error:  # of a plugin
        remedy = f"pip install 'jmpx[{exported.platforms[0]}]' into an environment of its own"
        return {"error": f"{BROKEN} ({line_of(error)}): {remedy}."}
    devices = devices[: exported.nr_devices]
    both = zip(exported.in_avals, _shardings(request, devices), strict=True)
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in both]
    traced = jax.jit(exported.call, donate_argnums=request["donated"]).trace(*arguments)
    lowered, start = traced.lower(lowering_platforms=exported.platforms), time.perf_counter()
    found: dict[str, Any] = {"chips": len(devices)}
    try:
        program = lowered.compile(compiler_options=request["options"])
    except jax.errors.JaxRuntimeError as error:
        return found | _refused(" ".join(str(error).split()))
    report, sent = compiled(program), collections.Counter[str]()
    for one in report.collectives:
        sent[f"{one.kind} {one.dtype}"] += one.sent  # pyright: ignore[reportArgumentType]
    return found | {
        "fits": True,
        "peak": report.memory and report.memory.peak,
        "accessed": (program.cost_analysis() or {}).get("bytes accessed"),
        "sent": sent,
        "seconds": time.perf_counter() - start,
    }


def _refused(text: str) -> dict[str, Any]:
    """Returns why a compiler refused a program, and the memory that it needs if it is too much."""
    if "RESOURCE_EXHAUSTED" not in text:
        return {"error": text[:300]}
    needed = _NEEDED.search(text)
    peak = needed and int(float(needed[1]) * _UNITS[needed[2]])
    return {"error": text[:300], "fits": False, "peak": peak}


def _shardings(request: dict[str, Any], devices: Sequence[Any]) -> list[NamedSharding | None]:
    """Returns the shardings of the arguments; if none has one, all are replicated."""
    names, sizes, kinds = request["mesh"] or (["all"], [len(devices)], ["Auto"])
    mesh = Mesh(np.array(devices).reshape(sizes), names, tuple(AxisType[kind] for kind in kinds))
    specs = request["specs"] if request["mesh"] else [[]] * len(request["specs"])
    axes = lambda each: tuple(each) if isinstance(each, list) else each  # noqa: E731
    named = lambda spec: NamedSharding(mesh, PartitionSpec(*map(axes, spec)))  # noqa: E731
    return [None if spec is None else named(spec) for spec in specs]


def line_of(error: Exception) -> str:
    """Returns an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    head = json.loads(sys.stdin.buffer.readline())
    program = jax.export.deserialize(bytearray(sys.stdin.buffer.read()))
    try:
        said = answer(head, program)
    except Exception as failure:
        said = {"error": line_of(failure)}
    print(json.dumps(said))
