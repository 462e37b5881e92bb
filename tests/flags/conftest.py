"""Flags as programs define and parse them."""

import pytest
from absl import flags

import jmpx.flags


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("JMPX_POLICY", "JMPX_LOSS_SCALE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def define():
    def define(*arguments, **options):
        values = flags.FlagValues()
        mp = jmpx.flags.define_mp_flags(flag_values=values, **options)
        values(["program", *arguments])
        return mp, values

    return define


@pytest.fixture
def saved():
    """Flags of the program itself, which alone `flagsaver` knows: --saved_policy and its kin."""
    before = set(flags.FLAGS)
    mp = jmpx.flags.define_mp_flags("saved", default_policy="bf16-mixed")
    was_parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.mark_as_parsed()
    yield mp
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
    if not was_parsed:
        flags.FLAGS.unparse_flags()
