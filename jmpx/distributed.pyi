from jmpx._devices.gather import gather as gather

__all__: tuple[str, ...]
