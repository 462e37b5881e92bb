"""Trains as `train.py` does, and draws loss, accuracy and loss scale.

python examples/haiku/plot.py --plot=training.png --mp_policy=16-mixed \
        --mp_loss_scale=dynamic,init=2**24,period=50
"""

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import train
from absl import app

import jmpx

sys.path.append(str(Path(__file__).parents[1] / "equinox"))
history: Any = importlib.import_module("history")  # the plot of both examples

PLOT = history.define_plot(required=True)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")
    data, test_data = train.load_digits()
    optimizer = jmpx.skip_nonfinite(train.make_adam(data))
    step = functools.partial(train.train_step, optimizer)
    state = train.make_state(optimizer, data.images)
    steps = train.train(step, state, data, test_data)

    drawn = history.History()
    drawn.losses = [float(metrics["loss"]) for metrics in steps]
    scales = [state.loss_scale.loss_scale, *(metrics["loss_scale"] for metrics in steps)]
    drawn.scales = [float(scale) for scale in scales[:-1]]  # before each step
    drawn.skipped = [i for i, metrics in enumerate(steps) if metrics["consecutive_skipped"]]
    drawn.accuracies = [metrics["accuracy"] for metrics in steps if "accuracy" in metrics]
    history.draw(drawn, f"digits, {train.MP.policy_map}", PLOT.value)
    print(f"wrote {PLOT.value}")


if __name__ == "__main__":
    app.run(main)
