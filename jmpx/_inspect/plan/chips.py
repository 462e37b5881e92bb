"""The chips whose compilers need no chip, and the settings and options of each compiler.

Benchmarks use `CHIPS`, and the `settings`, `options` and `topology` of a chip, too.
"""

import dataclasses
import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import jax

from jmpx._base.formats import formats
from jmpx._base.messages import describe, did_you_mean

# Without these, libtpu asks the network which Google machine this is, and only one process can load
# it.
_TPU_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
# The properties of GPUs, which XLA would otherwise ask the driver for.
_COMMON = """
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  shared_memory_per_block: 49152  device_address_bits: 64  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"  runtime_version: "12.9.0"  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
"""
_H100 = """
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98  memory_bandwidth: 3352320000000
  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448  l2_cache_size: 52428800
  device_interconnect_info { active_links: 18 }
"""
_A100 = """
  cuda_compute_capability { major: 8 feature_extension: NONE }
  core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41  memory_bandwidth: 2039040000000
  shared_memory_per_core: 167936  shared_memory_per_block_optin: 166912  l2_cache_size: 41943040
"""
# What NVIDIA's driver says of a B200 with 180 GB, of which programs get 178 GiB.
_B200 = """
  cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }
  core_count: 148  fpus_per_core: 128  clock_rate_ghz: 1.965  memory_bandwidth: 7672320000000
  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448  l2_cache_size: 132644864
  device_interconnect_info { active_links: 18 }
"""
# Without a GPU nothing is timed, and Triton's products would take the first legal tiling.
_UNTUNED = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
# Versions of JAX. Others fail without the GPU, or were not tried. JAX 0.9.2 compiles for a target
# of the fields that it knows, but its peak of memory counts the arguments only.
GPU_VERSIONS = ("0.10.2",)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip that a compiler knows."""

    name: str  # as users write it
    platform: str  # as JAX names it, `"tpu"` or `"cuda"`
    device: str  # its full name
    memory: int  # the bytes that a program may use: what a TPU's compiler allows, all of a GPU's
    layouts: str = ""  # how TPUs are connected, the smallest first
    hardware: str = ""  # the properties of a GPU
    capability: str = ""  # the compute capability of a GPU

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that it multiplies."""
        return formats(self.platform, self.device, self.capability)

    @property
    def settings(self) -> Mapping[str, str]:
        """The environment variables to set before JAX is imported."""
        cpu = {"JAX_PLATFORMS": "cpu"}  # else JAX asks the driver of a GPU
        return cpu | _TPU_SETTINGS if self.platform == "tpu" else cpu

    @property
    def options(self) -> Mapping[str, Any]:
        """The compiler's options."""
        return _UNTUNED if self.platform == "cuda" else {}

    def topology(self, count: int = 1) -> dict[str, str]:
        """Returns the arguments of `get_topology_desc` for that many chips, or for a few more."""
        if self.platform == "cuda":
            machines, each = (1, count) if count <= 8 else (math.ceil(count / 8), 8)
            layout = {"topology": f"1x{machines}x{each}", "target_config": self.target()}
            return {"platform": self.platform, **layout}
        for layout in self.layouts.split():
            if math.prod(map(int, layout.split("x"))) >= count:
                return {"platform": self.platform, "topology_name": f"{self.name}:{layout}"}
        raise ValueError(
            f"Expected at most as many chips as {layout} of {self.name}, got {count}: make the "
            "mesh smaller, or take another chip."
        )

    def target(self) -> str:
        """Returns the description of a GPU in the format of XLA."""
        return (
            f'gpu_device_info {{ {_COMMON} {self.hardware} name: "{self.device}" '
            f'device_memory_size: {self.memory} }} platform_name: "CUDA" dnn_version_info '
            f'{{ major: 9 minor: 10 patch: 0 }} device_description_str: "{self.device}"'
        )


_2D = "2x4 4x4 4x8 8x8 8x16 16x16"
_3D = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
_CHIPS = (
    Chip("v5e", "tpu", "TPU v5 lite", int(15.75 * 2**30), _2D),
    Chip("v5p", "tpu", "TPU v5", int(95.74 * 2**30), _3D),
    Chip("v6e", "tpu", "TPU v6 lite", int(31.25 * 2**30), _2D),
    Chip("h100", "cuda", "NVIDIA H100 80GB HBM3", 84942979072, hardware=_H100, capability="9.0"),
    Chip("a100", "cuda", "NVIDIA A100-SXM4-80GB", 85100068864, hardware=_A100, capability="8.0"),
    Chip("b200", "cuda", "NVIDIA B200", 191514411008, hardware=_B200, capability="10.0"),
)
CHIPS = {chip.name: chip for chip in _CHIPS}


def get_chip(name: object) -> Chip:
    """Returns the chip of a name; raises a `ValueError` for another one."""
    found = CHIPS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"Expected chip= to be one of {', '.join(CHIPS)}, got {describe(name)}"
            f"{did_you_mean(str(name), list(CHIPS))}"
        )
    return found


def missing(chip: Chip) -> str:
    """Returns why there is no compiler, with the remedy, as a sentence; "" if there is one."""
    is_gpu = chip.platform == "cuda"
    if is_gpu and jax.__version__ not in GPU_VERSIONS:
        return (
            f"JAX {jax.__version__} cannot compile for an {chip.name} that is not there: use JAX "
            f"{' or '.join(GPU_VERSIONS)}."
        )
    compilers = ("jax_cuda12_plugin",) if is_gpu else ("libtpu",)
    if all(map(find_spec, (*compilers, "flatbuffers"))):
        return ""
    return f"The compiler of {chip.name} is missing: pip install 'jmpx[{chip.platform}]'."
