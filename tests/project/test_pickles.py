"""Public classes are pickled by their public names."""

import importlib

import pytest

MODULES = ("jmpx", "jmpx.inspect", "jmpx.mpx", "jmpx.optim", "jmpx.types", "jmpx.flags")
CLASSES = [
    (module, name)
    for module in MODULES
    for name in importlib.import_module(module).__all__
    if not name.isupper()  # a dtype
    if isinstance(getattr(importlib.import_module(module), name), type)
]


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_a_public_class_says_its_module(module, name):
    cls = getattr(importlib.import_module(module), name)
    assert (cls.__module__, cls.__qualname__) == (module, name)
