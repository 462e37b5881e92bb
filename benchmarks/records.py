"""The lines of JSON that all benchmarks print: their figures, and where these were measured."""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

import jmpx

Record = dict[str, Any]  # what a line of JSON holds

PACKAGES = {name: name for name in ("jax", "jaxlib", "optax", "jmp")}
PACKAGES["mpx"] = "mixed-precision-for-JAX"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is a benchmark's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw)


def emit(benchmark: str, **fields: Any) -> None:
    """Prints one line."""
    print(json.dumps({"benchmark": benchmark, **fields, **surroundings()}), flush=True)


def read(path: Path) -> list[Record]:
    """Returns the lines of a file; there are none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line]


def surroundings() -> Record:
    """Returns the day, the device and the versions."""
    device = jax.devices()[0]
    cuda = re.search(r"cuda (\d+)", device.client.platform_version)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "cores": os.cpu_count(),
        "cuda": int(cuda[1]) if cuda else None,
        "python": platform.python_version(),
        "versions": {**{n: version(p) for n, p in PACKAGES.items()}, "jmpx": jmpx.__version__},
    }


def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None
