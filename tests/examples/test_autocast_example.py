"""`examples/equinox/autocast.py`, run as a user runs it."""

import re

import pytest
from helpers import LESS_OPTIMIZED, ROOT, finish, start_python

SCRIPT = ROOT / "examples" / "equinox" / "autocast.py"


def start(*arguments):
    # Without excess precision: XLA:CPU else leaves out most roundings to bfloat16, and on some
    # processors a run in bfloat16 cannot be told from one in float32.
    flags = f"--xla_allow_excess_precision=false {LESS_OPTIMIZED}"
    return start_python("-W", "error", str(SCRIPT), *arguments, xla_flags=flags)


@pytest.mark.slow  # two trainings in full
def test_it_reaches_the_accuracy_of_float32():
    policies = ["c=bf16", "full"]
    processes = {policy: start(f"--mp_policy={policy}", "--epochs=8") for policy in policies}
    reached, losses = {}, set()
    for policy, process in processes.items():
        result = finish(process)
        assert result.returncode == 0, result.stderr
        lines = re.findall(r"epoch +(\d+)  loss ([\d.]+)  test accuracy ([\d.]+)%\n", result.stdout)
        assert [int(epoch) for epoch, _, _ in lines] == list(range(1, 9))
        assert "step/s" in result.stderr  # the progress bar
        reached[policy] = float(lines[-1][2])
        losses.add(tuple(loss for _, loss, _ in lines))
    assert reached["full"] >= 97
    assert min(reached.values()) >= reached["full"] - 1
    assert len(losses) == 2  # two precisions, not one


@pytest.mark.slow  # a training
def test_a_rule_that_matches_nothing_is_warned_of():
    result = finish(start("--mp_policy=c=bf16; op.tahn: full", "--epochs=1"))
    assert "matched no operation; did you mean 'op.tanh'" in result.stderr
    assert "epoch" not in result.stdout  # -W error
