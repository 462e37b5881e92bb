"""The compiler of NVIDIA's H100 and A100, which needs neither a GPU nor its driver.

python benchmarks/gpu.py          # names the packages that go with this JAX
"""

import functools
import importlib.util
import sys
from typing import Any

import jax
import records
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

VERSIONS = ("0.10.2",)  # of JAX
PACKAGES = "jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0} nvidia-cuda-nvcc-cu12==12.9.86"
PACKAGES = PACKAGES.format(jax.__version__)
INSTALL = f"The compiler of GPUs is missing: pip install --no-deps --target=DIR {PACKAGES}, then \
run this with PYTHONPATH=DIR and JAX_PLATFORMS=cpu"
OTHER_JAX = f"JAX {jax.__version__} cannot compile for an absent GPU: use {' or '.join(VERSIONS)}"

# What each chip has, as XLA wants to be told where it cannot ask a driver.

COMMON = """
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  shared_memory_per_block: 49152  device_address_bits: 64  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"  runtime_version: "12.9.0"  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
"""
NAMES = {"H100": "NVIDIA H100 80GB HBM3", "A100": "NVIDIA A100-SXM4-80GB"}
CHIPS = {
    "H100": """
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000  device_memory_size: 84942979072  l2_cache_size: 52428800
  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  device_interconnect_info { active_links: 18 }
""",
    "A100": """
  cuda_compute_capability { major: 8 feature_extension: NONE }
  core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41
  memory_bandwidth: 2039040000000  device_memory_size: 85100068864  l2_cache_size: 41943040
  shared_memory_per_core: 167936  shared_memory_per_block_optin: 166912
""",
}
BANDWIDTH = 3.352e12  # bytes a second, of an H100
# Without a GPU nothing is timed: Triton's products would take the first tiling that is legal.
UNTUNED = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
ESTIMATED = {"xla_gpu_collect_cost_model_stats": True}  # XLA has no measured products of an A100
OPTIONS = {"H100": UNTUNED | ESTIMATED, "A100": UNTUNED}


def target(chip: str) -> str:
    """Returns a chip as XLA reads it."""
    return (
        f'gpu_device_info {{ {COMMON} {CHIPS[chip]} name: "{NAMES[chip]}" }} platform_name: "CUDA" '
        f"dnn_version_info {{ major: 9 minor: 10 patch: 0 }} "
        f'device_description_str: "{NAMES[chip]}"'
    )


def missing() -> str:
    """Returns why there is no compiler, and the remedy; nothing if there is one."""
    if jax.__version__ not in VERSIONS:
        return OTHER_JAX
    return "" if importlib.util.find_spec("jax_cuda12_plugin") else INSTALL


@functools.cache
def devices(chip: str = "H100", count: int = 1) -> list[Any]:
    """Returns descriptions of some GPUs of one machine."""
    if why := missing():
        print(why, file=sys.stderr)
        sys.exit(2)
    jax.config.update("jax_platforms", "cpu")  # else the plugin asks the driver
    # JAX cannot load from its cache what it compiled for a GPU that is not there.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    where = {"target_config": target(chip), "topology": f"1x1x{count}"}
    return list(topologies.get_topology_desc(platform="cuda", **where).devices)


def compiler(chip: str) -> records.Record:
    """Returns the fields of a line that say what it was compiled for, and by what."""
    return {"target": devices(chip)[0].device_kind, "plugin": records.version("jax-cuda12-plugin")}


if __name__ == "__main__":
    if jax.__version__ not in VERSIONS:
        sys.exit(OTHER_JAX)
    print(PACKAGES)
