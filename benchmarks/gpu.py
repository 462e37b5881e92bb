"""The compiler of NVIDIA's H100, A100 and B200, which needs neither a GPU nor its driver.

python benchmarks/gpu.py          # names the packages that go with this JAX
"""

import functools
import sys
from typing import Any

import jax
import tpu

from jmpx._inspect.plan.chips import CHIPS, GPU_VERSIONS, missing

PACKAGES = "jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0} nvidia-cuda-nvcc-cu12==12.9.86 flatbuffers"
ESTIMATED = {"xla_gpu_collect_cost_model_stats": True}  # XLA has no measured products of an A100
UNTUNED = dict(CHIPS["h100"].options)
OPTIONS = {"H100": UNTUNED | ESTIMATED, "A100": UNTUNED, "B200": UNTUNED}


@functools.cache
def devices(chip: str = "H100", count: int = 1) -> list[Any]:
    """Returns descriptions of some GPUs of one machine."""
    return tpu.absent(chip.lower(), count)


def on(chip: str = "H100") -> Any:
    """Returns the sharding of what one GPU has."""
    return jax.sharding.SingleDeviceSharding(devices(chip)[0])


if __name__ == "__main__":
    if jax.__version__ not in GPU_VERSIONS:
        sys.exit(missing(CHIPS["h100"]))
    print(PACKAGES.format(jax.__version__))
