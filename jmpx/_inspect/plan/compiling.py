"""What a chip's compiler says of a traced program: asked in another process, and kept in files."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.sharding import NamedSharding

from jmpx._base.leaves import PyTree
from jmpx._inspect.plan.chips import Chip
from jmpx._inspect.programs import Program
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import any_holds
from jmpx._jaxprs.types import Array, Equation

_VERSIONS = (
    "jmpx jax jaxlib libtpu jax-cuda12-plugin jax-cuda13-plugin nvidia-cuda-nvcc-cu12".split()
)
_TARGET = re.compile(r'custom_call @"?([\w.$-]+)')


def donations(program: Program) -> list[int]:
    """Returns the numbers of the arguments that the step, as it is jitted, donates."""
    return [n for n, each in enumerate(_given(program, "donated_invars")) if any(each)]


def _given(program: Program, name: str) -> list[list[object]]:
    """Returns what the jitted functions that a step calls say of each of its arguments."""
    found: dict[object, list[object]] = {var: [] for var in program.jaxpr.jaxpr.invars}
    for eqn in program.jaxpr.eqns:
        for atom, value in zip(eqn.invars, eqn.params.get(name, ()), strict=False):
            if not core.is_literal(atom) and atom in found:
                found[atom].append(value)
    return list(found.values())


def _calls_python(eqn: Equation) -> bool:
    return "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print"


def _shardings(program: Program) -> list[NamedSharding | None]:
    """Returns the shardings of the arguments: their own, or those of the jitted step."""
    both = zip(program.arrays, _given(program, "in_shardings"), strict=True)
    known = [(getattr(array, "sharding", None), *given) for array, given in both]
    return [next((s for s in each if isinstance(s, NamedSharding)), None) for each in known]


def compiled(program: Program, chip: Chip) -> dict[str, Any]:
    """Returns what `child.py` prints of a program on a chip, or an `error` if its process died."""
    shardings, donated = _shardings(program), donations(program)
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(program.jaxpr.in_avals, shardings, strict=True)
    ]

    def step(*arrays: Array) -> PyTree:
        return core.evaluate(program.jaxpr, arrays)

    if any_holds(program.jaxpr, _calls_python):
        return {"error": "It calls Python, as jax.debug.print does, which no file can hold."}
    platform, jitted = chip.platform, jax.jit(step, donate_argnums=donated)
    text = jitted.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    mesh = next((each.mesh for each in shardings if each is not None), None)
    request: dict[str, Any] = {
        "options": chip.options,
        "donated": donated,
        "mesh": mesh and [mesh.axis_names, mesh.axis_sizes, [t.name for t in mesh.axis_types]],
        "specs": [each if each is None else tuple(each.spec) for each in shardings],
    }
    parts = text, json.dumps(request), repr(chip), *map(_version, _VERSIONS)
    path = _folder() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    # JAX promises nothing for most kernels; but it is this JAX that reads the program.
    kernels = map(jax.export.DisabledSafetyCheck.custom_call, set(_TARGET.findall(text)))
    export = jax.export.export(jitted, platforms=(platform,), disabled_checks=[*kernels])
    exported = export(*shapes)
    request["topology"] = chip.topology(exported.nr_devices)
    found = _asked(request, exported, chip)
    if "chips" in found:
        _write(path, json.dumps(found))
    return found


def _asked(request: dict[str, Any], exported: jax.export.Exported, chip: Chip) -> dict[str, Any]:
    """Returns what the other process prints; without `chips` if it died."""
    settings = chip.settings | {
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # which holds nothing for chips that are not there
        "JAX_ENABLE_X64": str(jax.config.read("jax_enable_x64")),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    result = subprocess.run(
        [sys.executable, "-m", "jmpx._inspect.plan.child"],
        input=json.dumps(request).encode() + b"\n" + bytes(exported.serialize()),
        capture_output=True,
        env=os.environ | settings,
    )
    lines = result.stdout.decode(errors="replace").splitlines()
    if result.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
    return {"error": f"the compiler ended with status {result.returncode}: {said}"}


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "jmpx" / "plan"


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with contextlib.suppress(OSError):  # such as a home that cannot be written to
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(path)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions(chip: Chip) -> str:
    """Returns the versions of JAX and of the compiler, such as `jax 0.10.2, libtpu 0.0.42.1`."""
    own = ("jax", "libtpu") if chip.platform == "tpu" else ("jax", *_VERSIONS[4:6])
    return ", ".join(f"{name} {_version(name)}" for name in own if _version(name))
