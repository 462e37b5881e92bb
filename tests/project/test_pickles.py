"""Public classes are pickled by their public names, and what 0.2 pickled still loads."""

import base64
import importlib
import json
import pickle
from pathlib import Path

import pytest

import jmpx

# By the name that each class had in 0.2, whose pickles hold the files that defined them.
OLD = json.loads(Path(__file__).with_name("pickles_of_0_2.json").read_text())
EXPECTED = {
    "DynamicLossScale": "dynamic,init=8,period=5,counter=3",
    "StaticLossScale": "static=8",
    "NoOpLossScale": "none",
    "Policy": "params=float32,compute=bfloat16,output=float32",
    "PolicyMap": jmpx.get_policy_map("c=bf16; LayerNorm: full; op.exp: f32"),
    "Rule": "*/head: compute=float32",
    "MixedPrecision": jmpx.get_mixed_precision("c=f16 | dynamic,init=8"),
    "NonfiniteCounts": "NonfiniteCounts(inf=array(0, dtype=int32), nan=array(1, dtype=int32))",
}
ROOMS = ("jmpx", "jmpx.inspect", "jmpx.mpx", "jmpx.optim", "jmpx.types", "jmpx.flags")
CLASSES = [
    (room, name)
    for room in ROOMS
    for name in importlib.import_module(room).__all__
    if not name.isupper()  # a dtype
    if isinstance(getattr(importlib.import_module(room), name), type)
]


@pytest.mark.parametrize("name", OLD)
def test_a_pickle_of_0_2_loads(name):
    found = pickle.loads(base64.b64decode(OLD[name]))
    room, new = type(found).__module__, type(found).__name__
    assert (room, new) in CLASSES and new in (name, "Collectives")
    assert f"{room}\n{new}" in str(pickle.dumps(found, protocol=0), "latin-1")
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is type(found) and str(again) == str(found)
    if name in EXPECTED:
        assert EXPECTED[name] in (found, str(found))


@pytest.mark.parametrize(("room", "name"), CLASSES)
def test_a_public_class_says_its_room(room, name):
    cls = getattr(importlib.import_module(room), name)
    assert (cls.__module__, cls.__qualname__) == (room, name)
