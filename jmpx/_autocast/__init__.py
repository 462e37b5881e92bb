"""Autocast: mixed precision per operation, of any function, without a cast in it."""

# These fill the registry of rules.
from jmpx._autocast import control_flow, custom_vjp, kinds, primitives  # noqa: F401
from jmpx._autocast.api import autocast as autocast
from jmpx._autocast.wrapped import Autocast as Autocast
