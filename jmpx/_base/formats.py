"""Formats of fewer than 32 bits: rounding to them, and the devices that multiply them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._base.dtypes import EightBits, eight_bits

# To 8 bits, products round their operands and their cotangents.
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
Device: TypeAlias = Any  # type checkers do not take JAX's own name for it


def rounded_to(wide: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns an array of float32, rounded to the numbers of a format; no compiler leaves it out.

    In 8 bits, no number may be larger than the largest one of the format.
    """
    info = jnp.finfo(dtype)
    # The largest numbers of e4m3 have the exponent that stands for infinity in other formats.
    exponent_bits = 8 if dtype.itemsize == 1 else info.nexp
    low = lax.reduce_precision(wide, exponent_bits, info.nmant)
    if dtype == jnp.bfloat16:
        return low
    # `reduce_precision` flushes subnormal numbers to zero.
    unit = float(info.smallest_subnormal)
    units = lax.round(wide * (1 / unit), lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.abs(wide) < float(info.smallest_normal), units * unit, low)


# From these compute capabilities on, tensor cores of NVIDIA's GPUs multiply a format.
_CAPABILITIES = {"float16": 7.0, "bfloat16": 8.0, "fp8": 8.9, "mxfp8": 10.0}
_UNITS = {
    "fp8": "GPUs of NVIDIA since compute capability 8.9, such as L4, H100 and B200, and TPUs since "
    "v7 have units for fp8",
    "mxfp8": "GPUs of NVIDIA since compute capability 10.0, such as B200, have units for mxfp8",
}


def formats(platform: str, kind: str, capability: str = "") -> tuple[str, ...]:
    """Returns the formats that a device multiplies, as far as they are known.

    Args:
        platform: as JAX names it, such as `"tpu"`.
        kind: the `device_kind`, such as `"TPU v5 lite"`.
        capability: the compute capability of a GPU, such as `"9.0"`; of AMD's it is a word.
    """
    if platform == "tpu":
        generation = re.search(r"\d+", kind)
        return ("bfloat16", "fp8") if generation and int(generation[0]) >= 7 else ("bfloat16",)
    if not re.fullmatch(r"\d+\.\d+", capability):
        return ()
    return tuple(name for name, least in _CAPABILITIES.items() if float(capability) >= least)


def formats_of(device: Device) -> tuple[str, ...]:
    """Returns `formats` of a device of JAX."""
    capability = str(getattr(device, "compute_capability", ""))
    return formats(device.platform, device.device_kind, capability)


def default_device() -> Device:
    """Returns the device for which JAX traces here. This starts its backend."""
    given: Any = getattr(jax.config, "jax_default_device", None)
    if isinstance(given, str) or given is None:
        return jax.local_devices(backend=given)[0]
    return given


def lacking(bits: EightBits, name: str, known: tuple[str, ...]) -> str:
    """Returns why a device has no units for products in 8 bits, "" if it has them.

    Args:
        bits: the products.
        name: the name of the device.
        known: the formats that the device multiplies.
    """
    word = "mxfp8" if bits.blocks else "fp8"
    if word in known or bits.emulate:
        return ""
    return (
        f"{name} has no units for matmul={word}: {_UNITS[word]}; write matmul={word}+emulate to "
        "compute the same numbers here, slower than in 16 bits"
    )


def lacking_for(rules: Iterable[Any], name: str, known: tuple[str, ...]) -> list[str]:
    """Returns a sentence for each rule whose products in 8 bits a device has no units for."""
    found = ((rule, eight_bits(rule.matmul)) for rule in rules)
    reasons = ((rule, bits and lacking(bits, name, known)) for rule, bits in found)
    return [f"Cannot follow rule {str(rule)!r}: {reason}." for rule, reason in reasons if reason]


def listed(known: Sequence[str]) -> str:
    """Returns formats in words, such as `float16, bfloat16 and fp8`."""
    return " and ".join(filter(None, [", ".join(known[:-1]), *known[-1:]]))
