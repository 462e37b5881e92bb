"""`make` and `--audit` of the examples: their steps compute in 16 bits, and nothing leaks."""

import functools
import os
import sys

import pytest
from helpers import ROOT, start_python
from helpers.examples import answer

# Keeps the logits in float32; the product multiplies in bfloat16.
HEAD = "product=float32"
# A script, its flags, the share of products that is to be in bfloat16.
EXAMPLES = {
    "haiku/reports.py": ([f"--mp_policy=by=modules,c=bf16,o=f32; */head: {HEAD}"], 1.0),
    "equinox/train_vit.py": (["--depth=2", "--accumulate=2"], 0.999),  # the head is in float32
    "equinox/autocast.py": ([f"--mp_policy=c=bf16; */layers/1: {HEAD}"], 1.0),
}
PROBE = """
import contextlib, importlib, io, json, sys
import jax, jmpx
from absl import flags

name, at_least, *arguments = sys.argv[1:]
script = importlib.import_module(name)
is_light = not any(each.startswith("jmpx._inspect.audit") for each in sys.modules)
prints = hasattr(script, "main")  # the audit
flags.FLAGS([script.__file__, *arguments, *["--audit"] * prints])
with contextlib.redirect_stdout(io.StringIO()) as printed:
    if prints:
        script.main([script.__file__])
loads_no_data = "sklearn" not in sys.modules
step, args = script.make()
report = jmpx.inspect.audit(step)(*args)
report.check(compute="bfloat16", at_least=float(at_least))
failed = ""
try:
    report.check(compute="float16")
except AssertionError as error:
    failed = str(error)

def shapes(args):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args) if hasattr(leaf, "dtype")]

is_same = True
if hasattr(script, "make_arrays"):  # traced, so that nothing is computed
    is_same = shapes(args) == shapes(jax.eval_shape(lambda: script.make_arrays()[1]))
right = printed.getvalue() == (f"{report}\\n" if prints else "")
print(json.dumps([is_light, loads_no_data, right, failed, is_same]))
"""


@functools.cache
def probes():
    """Starts all at once."""
    started = {}
    for path, (arguments, at_least) in EXAMPLES.items():
        script = ROOT / "examples" / path
        started[path] = start_python(
            *("-W", "error", "-c", PROBE, script.stem, str(at_least), *arguments),
            PYTHONPATH=os.pathsep.join([str(script.parent), *sys.path]),
        )
    return started


@pytest.mark.thorough  # processes
@pytest.mark.parametrize("path", EXAMPLES)
def test_the_step_of_an_example_computes_in_bfloat16_and_has_no_findings(path):
    is_light, loads_no_data, prints_report, failed, is_same = answer(probes()[path])
    assert is_light and loads_no_data and prints_report and is_same
    assert "0 % of the FLOPs of matrix products and convolutions are float16" in failed
