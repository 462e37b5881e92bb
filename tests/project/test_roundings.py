"""The benchmark of roundings: those of an emulated function are there, on every compiler."""

import pytest
import records
import roundings
from helpers import compilers

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
HLO = """HloModule jit_f

ENTRY %fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %low = bf16[4]{0} convert(%p)
  %wide = f32[4]{0} convert(%low)
  %reduced = f32[4]{0} reduce-precision(%wide), exponent_bits=8, mantissa_bits=7
  %square = bf16[4]{0} multiply(%low, %low)
  ROOT %sum = f32[4]{0} add(%wide, %wide)
}
"""


def test_what_rounds_is_counted():
    assert roundings.roundings(HLO, reductions=False) == 3
    assert roundings.roundings(HLO, reductions=True) == 1


def test_every_point_has_a_line():
    lines = records.read(roundings.RESULTS)
    keys = {(line["case"], line["chip"], line["dtype"]) for line in lines}
    assert keys == {tuple(point.values()) for point in roundings.POINTS}
    assert all(line["kept"] for line in lines if line["case"].endswith(roundings.EMULATED))


MISSING = {"CPU": "", "TPU v5e": compilers.MISSING["v5e"], "H100": compilers.MISSING["h100"]}


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "dtype"), roundings.CHIPS)
@pytest.mark.parametrize("case", [c for c in roundings.CASES if c.endswith(roundings.EMULATED)])
def test_an_emulated_function_is_rounded_as_it_is_written(case, chip, dtype):
    if MISSING[chip]:
        pytest.skip(MISSING[chip])
    assert roundings.measure(case, chip, dtype)["kept"]
