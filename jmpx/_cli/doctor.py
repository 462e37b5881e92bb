"""What `python -m jmpx doctor` prints: versions, devices, settings, and what does not fit together.

It imports no framework.
"""

import functools
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from jmpx._base.dtypes import check_computes, dtype_name, half_dtype
from jmpx._base.leaves import PyTree
from jmpx._base.messages import did_you_mean
from jmpx._inspect.audit.hardware import DIGITS, MULTIPLIES_IN
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap
from jmpx._scales.strings import get_loss_scale

T = TypeVar("T")

# Distributions -> what pip installs them by.
_PACKAGES = {
    **{name: name for name in ("jax", "jaxlib", "numpy", "optax", "absl-py")},
    "dm-haiku": "'jmpx[haiku]'",
    "equinox": "'jmpx[equinox]'",
    "flax": "'jmpx[flax]'",
    **{name: name for name in ("orbax-checkpoint", "matplotlib", "pyyaml")},
}
_SETTINGS = (
    "jax_platforms",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
)
_VARIABLES = ("JMPX_POLICY", "JMPX_LOSS_SCALE")
Device: TypeAlias = Any  # type checkers do not take JAX's own name for it

_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
_UNKNOWN = "unknown for this device"


class Row(NamedTuple):
    """A fact.

    Args:
        name: what it is about.
        value: what it is, as JSON has it; None for what is not there or not known.
        text: what is printed in place of the value.
    """

    name: str
    value: Any
    text: str | None = None


class Report(NamedTuple):
    """What `python -m jmpx doctor` prints.

    Args:
        sections: facts by the title above them.
        warnings: sentences about what does not fit together.
    """

    sections: dict[str, list[Row]]
    warnings: list[str]

    def to_json(self) -> str:
        """Returns an object with an object per section, and the list of the warnings."""
        sections = {
            title: {row.name.replace(" ", "_"): row.value for row in rows}
            for title, rows in self.sections.items()
        }
        return json.dumps({**sections, "warnings": self.warnings}, indent=2)

    def __str__(self) -> str:
        """Returns aligned lines, the warnings last."""
        rows = [row for rows in self.sections.values() for row in rows]
        width = max(len(row.name) for row in rows)
        blocks = [
            [title, *(f"  {row.name:<{width}}  {_text(row)}" for row in rows or [Row("none", "")])]
            for title, rows in self.sections.items()
        ]
        blocks.append(["warnings", *(f"  {text}" for text in self.warnings or ["none"])])
        return "\n\n".join("\n".join(block).rstrip() for block in blocks)


def _text(row: Row) -> str:
    if row.text is not None:
        return row.text
    return ", ".join(row.value) if isinstance(row.value, tuple) else str(row.value)


def report() -> Report:
    """Returns what there is here, and what does not fit together.

    This starts JAX's backend. Nothing fails where it cannot start.
    """
    warnings: list[str] = []
    device = _device(warnings)
    sections = {
        "versions": [_of_jmpx(), Row("python", platform.python_version()), *_versions()],
        "device": [Row("devices", None, "none")] if device is None else list(_about(device)),
        "settings": list(_settings(warnings)),
        "environment": list(_environment(device, warnings)),
    }
    return Report(sections, warnings)


def _of_jmpx() -> Row:
    """Returns the version of jmpx that runs, and its folder, perhaps not the installed one."""
    version = sys.modules["jmpx"].__version__
    return Row("jmpx", version, f"{version} in {Path(__file__).parents[1]}")


def _versions() -> Iterator[Row]:
    """Yields the installed versions of what jmpx works with; pip compares them with its needs."""
    for name, by in _PACKAGES.items():
        try:
            yield Row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Row(name, None, f"not installed: pip install {by}")


def _device(warnings: list[str]) -> PyTree:
    """Returns the first device of this process; None if JAX cannot start."""
    try:
        return jax.local_devices()[0]
    except Exception as error:  # RuntimeError, AssertionError, and what plugins raise
        text = " ".join([f"{type(error).__name__}:", *str(error).split()]).rstrip(":")
        asked = _setting("jax_platforms")
        remedy = f": install JAX for JAX_PLATFORMS={asked}, or leave that out" if asked else ""
        warnings.append(f"JAX cannot start, so that no program runs here ({text}){remedy}.")
        return None


def _about(device: Device) -> Iterator[Row]:
    """Yields what jmpx does on a device, and what the device does."""
    kinds = [each.device_kind for each in jax.devices()]
    counts = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    yield Row("devices", tuple(counts))
    yield Row("platform", device.platform)
    yield Row("half", dtype_name(half_dtype()))
    for bits, formats in zip((16, 8), _multiplied(device), strict=True):
        text = None if formats else _UNKNOWN if formats is None else "none"
        yield Row(f"native {bits} bits", formats, text)
    yield _float32_products(device)
    # As `_skipping.take_or_keep` has it.
    yield Row("skip_by", "where" if device.platform == "tpu" else "cond")


def _multiplied(device: Device) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Returns the formats of 16 and of 8 bits that a device multiplies; None where it is not known.

    Tensor cores multiply float16 from compute capability 7.0 on, bfloat16 from 8.0 on, and 8 bits
    from 8.9 on.
    """
    if device.platform == "tpu":
        return ("bfloat16",), None
    capability = _capability(device)
    if capability is None or capability < (7,):
        return None, None
    sixteen = ("float16", "bfloat16") if capability >= (8,) else ("float16",)
    return sixteen, _EIGHT_BITS if capability >= (8, 9) else ()


def _capability(device: Device) -> tuple[int, ...] | None:
    """Returns the compute capability of a GPU of NVIDIA, None for any other device."""
    text = str(getattr(device, "compute_capability", ""))  # of AMD's it is a word
    is_number = device.platform in ("gpu", "cuda") and re.fullmatch(r"\d+\.\d+", text)
    return tuple(map(int, text.split("."))) if is_number else None


def _float32_products(device: Device) -> Row:
    """Returns in what products of float32 are multiplied, unless a setting or policy says it."""
    name, setting = "float32 products", _setting("jax_default_matmul_precision")
    if setting is not None:
        return Row(name, setting, f"{setting}, by jax_default_matmul_precision")
    if device.platform == "cpu":
        return Row(name, "float32")
    capability = _capability(device)
    if device.platform != "tpu" and capability is None:
        return Row(name, None, _UNKNOWN)
    if capability is not None and capability < (8,):
        return Row(name, "float32")
    inside = MULTIPLIES_IN["tpu" if capability is None else "gpu"]
    digits = f"factors keep {DIGITS[inside]} of 24 bits, without matmul=highest"
    return Row(name, inside, f"{inside} ({digits})")


def _setting(name: str) -> PyTree:
    """Returns a setting of JAX, which adds them to its configuration at run time."""
    return getattr(jax.config, name, None)


def _settings(warnings: list[str]) -> Iterator[Row]:
    for name in _SETTINGS:
        value = _setting(name)
        yield Row(name, value, "not set" if value in (None, "") else None)
        if name.startswith("jax_debug") and value:
            warnings.append(
                f"{name} stops at each overflow, and a dynamic loss scale overflows on purpose: "
                "turn it off, and find what goes wrong by python -m jmpx first-nonfinite."
            )


def _environment(device: Device, warnings: list[str]) -> Iterator[Row]:
    """Yields the environment variables of jmpx, which set the defaults of a program's flags."""
    given = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("JMPX_")}
    given = {name: text for name, text in given.items() if text.strip()}  # as flags read them
    for name, text in given.items():
        yield Row(name, text)
        if name not in _VARIABLES:
            near = did_you_mean(name, list(_VARIABLES))
            known = " and ".join(_VARIABLES)
            warnings.append(f"The variable {name} does nothing: jmpx reads {known}{near}")
    policy, loss_scale = map(given.get, _VARIABLES)
    policy_map = None if policy is None else _read(_VARIABLES[0], policy, get_policy_map, warnings)
    if policy_map is not None:
        yield Row("applied by", policy_map.way)
        warnings += _misfits(policy_map, device)
    if loss_scale is not None:
        read = functools.partial(get_loss_scale, policy=policy_map or "full")
        _read(_VARIABLES[1], loss_scale, read, warnings)


def _read(name: str, text: str, read: Callable[[str], T], warnings: list[str]) -> T | None:
    """Returns what a variable says; None with a warning if that is wrong."""
    try:
        return read(text)
    except ValueError as error:
        warnings.append(f"The variable {name} is wrong: {' '.join(str(error).split())}")
    except Exception:  # of JAX, which cannot start to find what `half` is: there is a warning of it
        pass
    return None


def _misfits(policy_map: PolicyMap, device: Device) -> Iterator[str]:
    """Yields what of `JMPX_POLICY` cannot be computed here, or is slow."""
    native = None if device is None else _multiplied(device)[0]
    given = (policy_map.default.compute_dtype, *(rule.compute for rule in policy_map.rules))
    for dtype in dict.fromkeys(np.dtype(dtype) for dtype in given if dtype is not None):
        try:
            check_computes(dtype)
        except ValueError as error:
            yield f"The variable {_VARIABLES[0]} does not fit: {error}"
        if native is not None and dtype.itemsize == 2 and dtype.name not in native:
            yield (
                f"The variable {_VARIABLES[0]} computes in {dtype.name}, and this device "
                f"multiplies {' and '.join(native)}: write compute={native[0]}."
            )


def doctor(as_json: bool) -> int:
    """Prints what there is here, and what does not fit together.

    Args:
        as_json: whether to print JSON.

    Returns:
        The exit code: 1 if there is a warning.
    """
    found = report()
    print(found.to_json() if as_json else found)
    return int(bool(found.warnings))
