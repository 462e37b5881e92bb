"""Parameters of which each device holds a shard."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmpx._devices.gather import gather as gather

    __all__: tuple[str, ...]
else:
    from jmpx._base.later import later

    __getattr__, __dir__, __all__ = later(__name__, {"_devices.gather": "gather"})
