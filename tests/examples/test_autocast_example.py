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


@pytest.mark.slow  # a few steps of a training
def test_a_run_that_diverges_ends_with_one_line():
    floor = "--mp_loss_scale=dynamic,init=2**100,min=2**99"
    result = finish(start("--mp_policy=c=f16", floor, "--mp_max_skips=2"))
    assert result.returncode == 1 and result.stdout == ""
    line = re.split(r"[\r\n]", result.stderr.strip())[-1].strip()  # after the progress bar
    assert line.startswith(
        "Training diverged. Skipped 3 optimizer steps in a row, more than max_consecutive=2, "
        "with the loss scale 'dynamic,init=2**99,min=2**99': "
    )
    assert "Traceback" not in result.stderr
