"""Draws docs/images/loss_scales.png, for a light and a dark page: the run of docs/logging.md.

    python benchmarks/loss_scales.py

The second run is the same one, whose parameters become NaN at step 300.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import optax

import jmpx

matplotlib.use("agg")
import matplotlib.pyplot as plt

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STEPS, BROKEN = 600, 300
optimizer = jmpx.skip_nonfinite(optax.adam(0.1))


def loss_fn(params, x, y):
    """Returns the squared error of a layer."""
    prediction = jnp.tanh(x @ params["w"])
    return jnp.mean((prediction - y).astype(jnp.float32) ** 2)


def batch(step):
    """Makes the batch of a step, with noise."""
    key, noise_key = jax.random.split(jax.random.key(step))
    x = jax.random.normal(key, (64, 3))
    y = jnp.tanh(x @ jnp.array([[0.5], [-1.0], [2.0]]))
    return x, y + 0.3 * jax.random.normal(noise_key, y.shape)


@jax.jit
def train_step(params, opt_state, loss_scale, x, y):
    """Takes a step in float16."""
    grad_fn = jmpx.value_and_grad(loss_fn, loss_scale, policy="by=arguments,c=f16")
    _, loss_scale, finite, grads = grad_fn(params, x, y)
    params, opt_state = jmpx.optimizer_update(params, optimizer, opt_state, grads, finite)
    return params, opt_state, loss_scale, jmpx.metrics(opt_state, loss_scale)


def run(broken):
    """Returns the metrics of all steps."""
    params = {"w": jnp.zeros((3, 1))}
    state = params, optimizer.init(params), jmpx.DynamicLossScale(2.0**18, period=50)
    logged = []
    for step in range(STEPS):
        if step == broken:
            state = {"w": jnp.full((3, 1), jnp.nan)}, *state[1:]
        *state, metrics = train_step(*state, *batch(step))
        logged.append(jax.device_get(metrics))
    return logged


def draw(runs, path, ink, paper):
    """Writes the picture in two colors for text and background."""
    colors: dict[Any, Any] = {
        name: ink for name in ("text.color", "axes.labelcolor", "axes.edgecolor")
    }
    colors |= {"xtick.color": ink, "ytick.color": ink, "figure.facecolor": paper}
    with plt.rc_context({**colors, "axes.facecolor": paper, "font.size": 9}):
        figure, axes = plt.subplots(2, 2, figsize=(8, 4), sharex=True, sharey="row", dpi=150)
        for (above, below), (title, logged) in zip(axes.T, runs.items(), strict=True):
            above.plot([each["loss_scale"] for each in logged], color="#2F8FD0", lw=1.6)
            above.set_yscale("log", base=2)
            above.set_title(title, fontsize=10)
            for name, color in (("total_skipped", "#E69F00"), ("consecutive_skipped", "#D55E00")):
                below.plot([each[name] for each in logged], color=color, lw=1.6, label=name)
            below.set_yscale("symlog", linthresh=10)
            below.set_yticks([0, 5, 10, 100, 300], ["0", "5", "10", "100", "300"])
            below.set_xlabel("step")
            for axis in (above, below):
                axis.grid(alpha=0.25)
                axis.spines[["top", "right"]].set_visible(False)
        axes[0, 0].set_ylabel("loss_scale")
        axes[1, 0].set_ylabel("skipped steps")
        axes[1, 0].legend(frameon=False, loc="upper left")
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    runs = {"healthy": run(None), "diverged at step 300": run(BROKEN)}
    draw(runs, IMAGES / "loss_scales.png", "#222222", "#ffffff")
    draw(runs, IMAGES / "loss_scales-dark.png", "#ced6dd", "#14181e")
