"""Public classes are pickled by their public names."""

import importlib

import pytest

ROOMS = ("jmpx", "jmpx.inspect", "jmpx.mpx", "jmpx.optim", "jmpx.types", "jmpx.flags")
CLASSES = [
    (room, name)
    for room in ROOMS
    for name in importlib.import_module(room).__all__
    if not name.isupper()  # a dtype
    if isinstance(getattr(importlib.import_module(room), name), type)
]


@pytest.mark.parametrize(("room", "name"), CLASSES)
def test_a_public_class_says_its_room(room, name):
    cls = getattr(importlib.import_module(room), name)
    assert (cls.__module__, cls.__qualname__) == (room, name)
