"""Counts of programs of TPUs are those of a text that is counted by hand."""

import tpu_counts

HLO = """HloModule jit_step, is_scheduled=true

%fused (p.1: bf16[8,4], w.1: f32[4,2]) -> f32[8,2] {
  %p.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %w.1 = f32[4,2]{1,0:T(8,128)} parameter(1)
  %convert.1 = bf16[4,2]{1,0:T(8,128)(2,1)} convert(%w.1)
  ROOT %dot.1 = f32[8,2]{1,0:T(8,128)} convolution(%p.1, %convert.1), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[8,4], w: f32[4,2]) -> (f32[8,2], bf16[8,8]) {
  %a = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %w = f32[4,2]{1,0:T(8,128)} parameter(1)
  %copy-start = (f32[4,2]{1,0:T(8,128)S(1)}, f32[4,2]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  %copy-done = f32[4,2]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %copy = bf16[8,4]{0,1:T(8,128)(2,1)} copy(%a)
  %dot.2 = bf16[8,8]{1,0:T(8,128)(2,1)} dot(%copy, %a)
  %fusion = f32[8,2]{1,0:T(8,128)} fusion(%a, %copy-done), kind=kOutput, calls=%fused
  ROOT %pair = (f32[8,2]{1,0}, bf16[8,8]{1,0:T(8,128)(2,1)}) tuple(%fusion, %dot.2)
}
"""


def test_instructions_are_counted_in_fusions_too():
    assert tpu_counts.counts(HLO) == {
        "instructions": 12,
        "entry_ops": 8,
        "fusions": 1,
        "converts": 1,
        "copies": 1,
        "fetches": 1,
    }


def test_products_are_counted_by_the_dtypes_of_their_operands():
    assert tpu_counts.dots(HLO) == {"bf16 x bf16": 2}
    wide = HLO.replace("(%p.1, %convert.1)", "(%p.1, %w.1)")
    assert tpu_counts.dots(wide) == {"bf16 x bf16": 1, "bf16 x f32": 1}
