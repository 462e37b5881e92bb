"""The page of the train step in four frameworks, which differs in their own lines alone."""

import re

from helpers import ROOT

PAGE = (ROOT / "docs" / "train_step.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
STEPS = [block for block in BLOCKS if block.startswith(">>> def loss_fn") and "state_" not in block]
OWN = {"@jax.jit": "@jit", "@eqx.filter_jit": "@jit", "@nnx.jit": "@jit", "model": "params"}


def test_a_step_has_at_most_twelve_lines_and_one_text_in_all_frameworks():
    steps = []
    for block in STEPS:
        lines = block.strip().splitlines()
        assert len(lines) <= 12
        for own, common in OWN.items():
            block = re.sub(rf"(?<!\w){own}\b", common, block)
        steps.append(block.strip().splitlines()[2:])  # without the loss, which calls the model
    assert len(steps) == 4 and all(step == steps[0] for step in steps)


def test_nobody_needs_a_context_a_view_or_a_second_policy():
    for word in ("with ", "policies(", "with_policies", '"full"', "autocast("):
        assert not any(word in block for block in STEPS)
