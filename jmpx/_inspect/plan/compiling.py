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

from jmpx._inspect.plan.chips import Chip
from jmpx._inspect.programs import Program
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import any_holds
from jmpx._jaxprs.marks import Equation

_PACKAGES = "jmpx jaxlib nvidia-cuda-nvcc-cu12 jax libtpu jax-cuda12-plugin".split()
_KERNEL = re.compile(r'custom_call @"?([\w.$-]+)')


def placed(program: Program) -> tuple[list[int], list[NamedSharding | None]]:
    """Returns which arguments a step donates, as it is jitted, and the shardings of all."""
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


def compiled(program: Program, chip: Chip) -> dict[str, Any]:
    """Returns what `child.py` prints of a program on a chip, or an `error` if its process died."""
    if any_holds(program.jaxpr, _calls_python):
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
    path = _folder() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    # JAX promises nothing for most kernels; but it is this JAX that reads the program.
    kernels = map(jax.export.DisabledSafetyCheck.custom_call, set(_KERNEL.findall(text)))
    exported = jax.export.export(jitted, platforms=platforms, disabled_checks=[*kernels])(*shapes)
    request["topology"] = chip.topology(exported.nr_devices)
    found = _asked(request, exported, chip)
    if "chips" in found:
        _write(path, json.dumps(found))
    return found


def _calls_python(eqn: Equation) -> bool:
    return "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print"


def _asked(request: dict[str, Any], exported: jax.export.Exported, chip: Chip) -> dict[str, Any]:
    """Returns what the other process prints; without `chips` if it died."""
    config: Any = jax.config  # Any, because JAX does not annotate its settings
    settings = {
        **chip.settings,
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # which holds nothing for chips that are not there
        "JAX_ENABLE_X64": str(config.jax_enable_x64),
        "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path),
    }
    result = subprocess.run(
        [sys.executable, "-P", "-m", "jmpx._inspect.plan.child"],
        input=json.dumps(request).encode() + b"\n" + bytes(exported.serialize()),
        capture_output=True,
        env=os.environ | settings,
    )
    if result.returncode == 0:
        return json.loads(result.stdout.splitlines()[-1])
    said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
    return {"error": f"The compiler ended with status {result.returncode}: {said}"}


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
    """Returns the versions of JAX and of a compiler, such as `jax 0.10.2, libtpu 0.0.42.1`."""
    names = "jax", "libtpu" if chip.platform == "tpu" else "jax-cuda12-plugin"
    return ", ".join(f"{name} {_version(name)}" for name in names if _version(name))
