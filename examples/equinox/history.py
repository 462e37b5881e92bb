"""The numbers of a training, and a plot of them, for these examples and the one with Haiku."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

FORMATS = (".pdf", ".png", ".svg")


def define_plot(required: bool = False) -> flags.FlagHolder[str | None]:
    """Defines `--plot`, the path of a file that can be drawn into."""
    help_text = "The file to draw loss, accuracy and loss scale into."
    plot = flags.DEFINE_string("plot", None, help_text, required=required)
    flags.register_validator(
        "plot",
        lambda path: (
            path is None or Path(path).suffix in FORMATS and os.access(Path(path).parent, os.W_OK)
        ),
        f"must be a file ending in {', '.join(FORMATS)} in a directory that can be written to",
    )
    return plot


class History:
    """Lists with one number a step; `accuracies` has one an epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []  # the loss scale before the step
        self.skipped: list[int] = []  # the numbers of the skipped steps, from 0
        self.seconds: list[float] = []
        self.accuracies: list[float] = []


def end_if_diverged(mp: Any, opt_state: Any, loss_scale: Any) -> None:
    """Ends the program with one line where --mp_max_skips says that training has diverged."""
    try:
        mp.check_progress(opt_state, loss_scale)
    except FloatingPointError as error:
        sys.exit(f"Training diverged. {error}")


def draw(history: History, title: str, path: str) -> None:
    """Plots loss and test accuracy, and the loss scale if it changed or a step was skipped."""
    from matplotlib.figure import Figure

    with_scale = len(set(history.scales)) > 1 or bool(history.skipped)
    panels = 2 + with_scale
    figure = Figure(figsize=(7, 1 + 2 * panels), dpi=120, layout="constrained")
    axes = figure.subplots(panels, sharex=True)
    figure.suptitle(title, fontsize="small", wrap=True)
    steps = np.arange(len(history.losses))
    epoch_ends = np.arange(1, len(history.accuracies) + 1) * len(steps) / len(history.accuracies)

    axes[0].plot(steps, history.losses, linewidth=1.2)
    axes[0].set(ylabel="training loss", yscale="log")
    axes[1].plot(epoch_ends, 100 * np.array(history.accuracies), marker="o", markersize=3)
    axes[1].set(ylabel="test accuracy (%)")
    if with_scale:
        draw_scale(axes[2], history)
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[-1].set(xlabel="step")
    figure.savefig(path)


def draw_scale(axis: Any, history: History) -> None:
    """Plots the loss scale, with a cross at each skipped step."""
    axis.step(np.arange(len(history.scales)), history.scales, where="post", linewidth=1.5)
    axis.set(ylabel="loss scale")
    axis.set_yscale("log", base=2)
    if history.skipped:
        skipped_at = [history.scales[step] for step in history.skipped]
        label = f"skipped steps ({len(history.skipped)})"
        axis.plot(history.skipped, skipped_at, "x", color="#D55E00", label=label)
        axis.legend()
