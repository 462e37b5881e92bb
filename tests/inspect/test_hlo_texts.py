"""How `products` and `collectives` read HLO that compilers for GPUs and TPUs wrote."""

from pathlib import Path

import jmpx

FOLDER = Path(__file__).parent

# Products

GPU = (FOLDER / "gpu.hlo").read_text()
TAPS = (8 * 3 - 1) ** 2  # the first of each row and column meets one line of padding
SCORES = 2 * 4 * 128 * 2 * 64 * 256


def test_products_of_cublas_cudnn_and_triton_are_read():
    found = jmpx.inspect.products(GPU).products
    half = "f16 x f16 -> f16"
    assert [(one.kernel, one.kind, one.dtypes, one.flops) for one in found] == [
        ("__triton_gemm", "dot", "bf16 x bf16 -> f32", 2 * 2 * 8 * 64 * 32),
        ("__cublas$lt$matmul$f8", "dot", "f8e4m3fn x f8e5m2 -> bf16", 2 * 16 * 32 * 8),
        ("__cublas$gemm", "dot", "f32 x f32 -> f32, highest", 2 * 2 * 64 * 32 * 32),
        ("__cudnn$fmhaSoftmax", "attention", half, 2 * SCORES),
        ("__cudnn$fmhaSoftmaxBackward", "attention", half, 5 * SCORES),
        ("__cudnn$convForward", "convolution", half, 2 * 2 * 8 * 32 * TAPS),
        ("__cudnn$convBackwardInput", "convolution", half, 2 * 2 * 8 * 32 * TAPS),
        ("__cudnn$convBackwardFilter", "convolution", half, 2 * 2 * 8 * 32 * TAPS),
    ]
    assert found[0].parameters == ("params['a']", "params['b']")
    assert found[0].scope == "jit(step)/net/dot_general" and found[0].results == ("output 0",)
    assert found[0].place is not None and found[0].place[:2] == ("/home/me/net.py", 7)


def test_kernels_that_cannot_be_read_are_told():
    hlo = GPU.replace("__cudnn$fmhaSoftmaxBackward", "tpu_custom_call")
    hlo = hlo.replace("__cudnn$convForward", "__gpu$xla.gpu.triton")
    report = jmpx.inspect.products(hlo)
    assert [one for one in report.products if one.kernel in ("", "tpu_custom_call")] == []
    told = "2 calls of kernels (__gpu$xla.gpu.triton, tpu_custom_call) cannot be read"
    assert len(report.products) == 6 and report.notes[0].startswith(told)


def test_a_product_of_a_tpu_counts_no_holes():
    """A batched product of a TPU is a convolution whose kernel meets one part of its input."""
    (one,) = jmpx.inspect.products((FOLDER / "tpu_product.hlo").read_text()).products
    assert one.dtypes == "bf16 x bf16 -> bf16" and one.flops == 3 * 2 * 16 * 32 * 8


# Collectives

TPU = (FOLDER / "tpu.hlo").read_text()


def test_what_the_compiler_of_tpus_writes():
    # One gather in the fusions that overlap with it, a reduce-scatter as an all-reduce and a
    # slice, asynchronous collectives, and several arrays in one collective.
    found = jmpx.inspect.collectives(TPU).collectives
    assert sorted((*one[:4], one.results) for one in found) == [
        ("all-gather", "bf16", 256, 8, ()),
        ("all-gather", "f32", 32, 4, ()),
        ("all-reduce", "f32", 4, 8, ()),
        ("all-reduce", "f32", 256, 8, ()),
        ("all-reduce", "pred", 1, 8, ()),
        ("collective-permute", "f32", 16, 8, ()),
        ("reduce-scatter", "f32", 512, 4, ("output 0",)),
    ]
    assert [one.dtype for one in found if one.is_scalar] == ["pred", "f32"]
    assert {(one.times, one.in_while, one.in_branch, one.parameter) for one in found} == {
        (1, False, False, "")
    }
