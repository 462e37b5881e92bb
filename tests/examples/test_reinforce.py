"""`examples/equinox/reinforce.py`, run as a user runs it."""

import re

import pytest
from helpers import ROOT, run_python

SCRIPT = ROOT / "examples" / "equinox" / "reinforce.py"


@pytest.mark.slow  # it compiles a sampler and a step for each precision
def test_sampler_and_trainer_part_in_16_bits_and_not_in_float32(tmp_path):
    picture = tmp_path / "reinforce.png"
    arguments = "--steps=3", "--seeds=2", f"--plot={picture}"
    result = run_python("-W", "error", str(SCRIPT), *arguments)
    assert result.returncode == 0, result.stderr
    assert "step/s" in result.stderr  # the progress bar
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = re.findall(r"^(.*): rewards 0\.\d+, 0\.\d+, KL (\S+)$", result.stdout, re.MULTILINE)
    kl = {name: float(number) for name, number in found}
    assert kl["float32"] < 1e-10 < kl["float16"] / 10
    assert kl["float16"] < kl["bfloat16, */head: product=f32"] / 5 < kl["bfloat16"] / 5
