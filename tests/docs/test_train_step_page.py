"""The page of the train step in every framework, which differs in their own lines alone."""

import re

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs" / "train_step.md").read_text()
TABS = re.findall(
    r"^:::\{tab-item\} (.*?)\n:sync: \w+\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)
PROGRAMS = [block for _, block in TABS]
OWN = {"@jax.jit": "@jit", "@eqx.filter_jit": "@jit", "model": "params"}
STEP = re.compile(r"^>>> (@[\w.]+\n\.\.\. def train_step.*?)^>>>$", re.MULTILINE | re.DOTALL)


def steps():
    """Returns the train step of each program."""
    found = [STEP.findall(block) for block in PROGRAMS]
    assert all(len(each) == 1 for each in found)
    return [step for (step,) in found]


def test_each_framework_has_a_whole_program():
    labels = ["Haiku", "Linen", "NNX", "Equinox", "Plain JAX"]
    assert [label for label, _ in TABS] == labels
    for block in PROGRAMS:
        lines = [line[4:] for line in block.splitlines() if line[:3] in (">>>", "...")]
        assert lines[0].startswith(("import ", "from ")) and "import jmpx" in lines
        compile("\n".join(lines), "train.py", "exec")


def test_a_step_has_at_most_twelve_lines_and_one_text_in_all_frameworks():
    common = []
    for step in steps():
        assert len(step.splitlines()) <= 12
        for own, name in OWN.items():
            step = re.sub(rf"(?<!\w){own}\b", name, step)
        common.append(step)
    nnx = common.pop(2)  # its model and its optimizer change in place
    assert "optimizer.update(params, grads)\n" in nnx and "opt_state" not in nnx
    assert len(common) == 4 and len(set(common)) == 1


@pytest.mark.parametrize("word", ["with ", "policies(", "with_policies", '"full"', "autocast("])
def test_nobody_needs_a_context_a_view_or_a_second_policy(word):
    losses = re.findall(r"^>>> def loss_fn.*?^>>>$", "".join(PROGRAMS), re.MULTILINE | re.DOTALL)
    assert len(losses) == 5
    assert not any(word in text for text in (*steps(), *losses))
