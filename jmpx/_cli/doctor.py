"""`python -m jmpx doctor`: versions, devices, settings, and which of them do not fit together.

It imports no framework.
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np

from jmpx._base.dtypes import check_computes, dtype_name, half_dtype
from jmpx._base.formats import Device, formats_of, lacking_for, listed
from jmpx._base.messages import did_you_mean
from jmpx._inspect.audit.hardware import MULTIPLIES_IN
from jmpx._inspect.text import columns
from jmpx._policies.map_strings import get_policy_map
from jmpx._scales.strings import get_loss_scale

_PACKAGES = "jax jaxlib numpy optax absl-py dm-haiku equinox flax orbax-checkpoint".split()
_SETTINGS = """
    jax_platforms jax_enable_x64 jax_default_matmul_precision jax_numpy_dtype_promotion
    jax_debug_nans jax_debug_infs
""".split()
_POLICY, _LOSS_SCALE = _VARIABLES = ["JMPX_POLICY", "JMPX_LOSS_SCALE"]
_Rows: TypeAlias = Iterator[tuple[str, str]]


def doctor() -> int:
    """Prints what there is here, and what does not fit together. This starts JAX's backend.

    Returns:
        The exit code: 1 if there is a warning.
    """
    device, warnings = None, list[str]()
    try:
        device = jax.local_devices()[0]
    except Exception as error:  # RuntimeError, AssertionError, and what plugins raise
        text = " ".join([f"{type(error).__name__}:", *str(error).split()])
        warnings.append(f"JAX cannot start, so that no program runs here: {text}")
    variables = {name: text for name, text in os.environ.items() if name.startswith("JMPX_")}
    variables = {name: text for name, text in variables.items() if text.strip()}  # as flags do
    settings = {name: getattr(jax.config, name, None) for name in _SETTINGS}
    sections = {
        "versions": list(_versions()),
        "device": [("devices", "none")] if device is None else list(_about(device)),
        "settings": [(name, str(value)) for name, value in settings.items()],
        "environment": sorted(variables.items()),
    }
    for title, rows in sections.items():
        print(title, *(f"  {line}" for line in columns(rows or [("none", "")])), "", sep="\n")
    for name in ("jax_debug_nans", "jax_debug_infs"):
        if settings[name]:
            warnings.append(
                f"{name} stops at each overflow, and a dynamic loss scale overflows on purpose: "
                "turn it off, and find what goes wrong by python -m jmpx first-nonfinite."
            )
    warnings += _misfits(variables, device)
    print("warnings", *(f"  {text}" for text in warnings or ["none"]), sep="\n")
    return int(bool(warnings))


def _versions() -> _Rows:
    # The folder shows which jmpx runs: it may not be the installed one.
    yield "jmpx", f"{sys.modules['jmpx'].__version__} in {Path(__file__).parents[1]}"
    yield "python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _about(device: Device) -> _Rows:
    """Yields the defaults of jmpx on a device, and what the device multiplies."""
    kinds = [each.device_kind for each in jax.devices()]
    yield "devices", ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    yield "half", dtype_name(half_dtype())
    yield "multiplies", listed(formats_of(device)) or "unknown for this device"
    setting = getattr(jax.config, "jax_default_matmul_precision", None)
    yield "float32 products", setting or _of_float32(device) or "unknown for this device"


def _of_float32(device: Device) -> str:
    """Returns in what a device multiplies float32; empty if it is not known."""
    if "bfloat16" in formats_of(device):  # of GPUs, those that have TF32
        return MULTIPLIES_IN[device.platform]
    is_nvidia = "." in str(getattr(device, "compute_capability", ""))  # of AMD's it is a word
    return "float32" if is_nvidia or device.platform == "cpu" else ""


def _misfits(variables: dict[str, str], device: Device) -> Iterator[str]:
    """Yields errors in the variables, and what they ask for that the device does not multiply."""
    for name in variables.keys() - {*_VARIABLES}:
        near = did_you_mean(name, _VARIABLES)
        yield f"The variable {name} does nothing: jmpx reads {' and '.join(_VARIABLES)}{near}"
    if device is None:  # `half` depends on it
        return
    try:
        policy_map = get_policy_map(variables.get(_POLICY, "full"))
        get_loss_scale(variables.get(_LOSS_SCALE, "none"), policy=policy_map)
        given = (policy_map.default.compute_dtype, *(rule.compute for rule in policy_map.rules))
        dtypes = dict.fromkeys(np.dtype(dtype) for dtype in given if dtype is not None)
        for dtype in dtypes:
            check_computes(dtype)
    except ValueError as error:
        yield f"The variables JMPX_* are wrong: {' '.join(str(error).split())}"
        return
    native = formats_of(device)
    yield from lacking_for(policy_map.rules, device.device_kind, native)
    for dtype in dtypes:
        if native and dtype.itemsize == 2 and dtype.name not in native:
            yield (
                f"{_POLICY} computes in {dtype.name}, and this device multiplies "
                f"{listed(native)}: write compute={native[0]}."
            )
