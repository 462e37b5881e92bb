"""Compiles seven kinds of networks for an H100, cast by hand and by a policy.

    pip install --no-deps --target=DIR $(python benchmarks/gpu.py)
    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/over_by_hand.py      # what is missing
    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/over_by_hand.py --only UNet

They are a ResNet-50, a UNet with GroupNorm, a ViT, a language model, a scanned GPT with rotary
embedding and SwiGLU, a mixture of experts, and a state-space model with an associative scan, in
plain `jax.numpy`. A network computes in the dtype of its parameters and inputs. Norms, softmax and
the state of the scan are islands: cast to float32, computed, rounded to the dtype of the input,
as Flax does it. In float32 these casts do nothing, so a policy casts a model that has none.

`low_params` makes the program by hand. Its embedding's gradient is summed in bfloat16, because the
table is cast before its rows are taken, which is how it is usually written.

The optimizer is Adam; the state is donated. A line has the fields of `gpu_compile.py`. The table
has, over the program by hand, the peak of memory and the compiler's estimate of the time, which
leaves out convolutions; these are the same in all programs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import gpu
import gpu_compile
import jax
import jax.numpy as jnp
import models
import numpy as np
import records
import steps
from jax import lax
from llama import Llama
from model_steps import LOW
from models import affine, cross_entropy, integers, linear, norm_of, normal, wide
from records import PyTree, Record
from steps import Step

import jmpx

RESULTS = records.RESULTS / "over_by_hand.jsonl"
CARRY = "; op.scan: bf16"  # a scan hands bfloat16 on
POLICIES = ("c=bf16", f"c=bf16{CARRY}", "c=bf16,save=products", f"c=bf16,save=products{CARRY}")
POLICIES += ("c=bf16,save=products+mixed", f"c=bf16,save=products+mixed{CARRY}")
IN_FLOAT32 = ("norm", "decay")  # the parameters that stay float32 by hand


def low_params(params: PyTree) -> PyTree:
    """Casts parameters, except those that islands read."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        names = jax.tree_util.keystr(path)
        return x if any(name in names for name in IN_FLOAT32) else x.astype(LOW)

    return jax.tree_util.tree_map_with_path(one, params)


Moments = tuple[jax.Array, jax.Array]  # mean and variance


def moments(x: jax.Array, axes: Any) -> Moments:
    x = wide(x)
    mean = x.mean(axes, keepdims=True)
    return mean, jnp.maximum((x**2).mean(axes, keepdims=True) - mean**2, 0)


def normalized(norm: PyTree, x: jax.Array, found: Moments) -> jax.Array:
    mean, variance = found
    scaled = (wide(x) - mean) * (lax.rsqrt(variance + 1e-5) * norm["scale"])
    return (scaled + norm["bias"]).astype(x.dtype)


def weight(rng: np.random.Generator, *shape: int) -> jax.Array:
    return normal(rng, *shape, deviation=math.prod(shape[:-1]) ** -0.5)


def convolve(w: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=layout)


# --- Convolutions ---


@dataclasses.dataclass(frozen=True)
class ResNet:
    """A ResNet-50, whose BatchNorms keep running averages."""

    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    side: int = 224

    def init(self, rng: np.random.Generator) -> PyTree:
        params = {"stem": weight(rng, 7, 7, 3, self.width), "norm": norm_of(self.width)}
        blocks, inputs = [], self.width
        for stage, depth in enumerate(self.depths):
            width = self.width * 2**stage
            for _ in range(depth):
                blocks.append(self._block_of(rng, inputs, width))
                inputs = 4 * width
        return params | {"blocks": blocks, "head": linear(rng, inputs, self.classes)}

    def _block_of(self, rng: np.random.Generator, inputs: int, width: int) -> PyTree:
        kernels = ((1, inputs, width), (3, width, width), (1, width, 4 * width))
        block: PyTree = {f"w{i}": weight(rng, k, k, *io) for i, (k, *io) in enumerate(kernels)}
        block |= {f"norm{i}": norm_of(outputs) for i, (*_, outputs) in enumerate(kernels)}
        if inputs != 4 * width:
            block["w_skip"] = weight(rng, 1, 1, inputs, 4 * width)
            block["norm_skip"] = norm_of(4 * width)
        return block

    def averages(self, params: PyTree) -> PyTree:
        """Returns the running averages of the norms, in the order in which these run."""
        blocks = params["blocks"]
        norms = [block[name] for block in blocks for name in sorted(block) if "norm" in name]
        return [{"mean": n["bias"], "variance": n["scale"]} for n in (params["norm"], *norms)]

    def batch(self, rng: np.random.Generator, size: int) -> tuple[jax.Array, jax.Array]:
        return normal(rng, size, self.side, self.side, 3), integers(rng, self.classes, size)

    def loss(
        self, params: PyTree, averages: PyTree, x: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        found: list[PyTree] = []

        def norm(params: PyTree, x: jax.Array) -> jax.Array:
            mean, variance = moments(x, (0, 1, 2))
            found.append({"mean": mean.ravel(), "variance": variance.ravel()})
            return normalized(params, x, (mean, variance))

        def block(params: PyTree, x: jax.Array, stride: int) -> jax.Array:
            h = jax.nn.relu(norm(params["norm0"], convolve(params["w0"], x)))
            h = jax.nn.relu(norm(params["norm1"], convolve(params["w1"], h, stride)))
            h = norm(params["norm2"], convolve(params["w2"], h))
            if "w_skip" in params:
                x = norm(params["norm_skip"], convolve(params["w_skip"], x, stride))
            return jax.nn.relu(x + h)

        x = jax.nn.relu(norm(params["norm"], convolve(params["stem"], x, 2)))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        firsts = np.cumsum(self.depths)[:-1]
        for number, one in enumerate(params["blocks"]):
            x = block(one, x, 2 if number in firsts else 1)
        loss = cross_entropy(affine(params["head"], x.mean((1, 2))), labels)
        return loss, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, averages, found)


@dataclasses.dataclass(frozen=True)
class UNet:
    """A UNet that predicts the noise in images, as diffusion models train it."""

    widths: tuple[int, ...] = (64, 128, 256)
    groups: int = 32
    side: int = 64

    def init(self, rng: np.random.Generator) -> PyTree:
        times, (first, *_) = 4 * self.widths[0], self.widths
        block = lambda i, o: self._block_of(rng, i, o, times)  # noqa: E731
        down, up, last = [], [], first
        for width in self.widths:
            down.append({"blocks": [block(last, width), block(width, width)]})
            down[-1]["shrink"] = weight(rng, 3, 3, width, width)
            up.insert(0, {"grow": weight(rng, 3, 3, width, width), "blocks": []})
            up[0]["blocks"] = [block(2 * width, width), block(2 * width, last)]
            last = width
        return {
            "times": [linear(rng, first, times), linear(rng, times, times)],
            "first": weight(rng, 3, 3, 3, first),
            "down": down,
            "middle": block(last, last),
            "up": up,
            "norm": norm_of(first),
            "last": weight(rng, 3, 3, first, 3),
        }

    def _block_of(self, rng: np.random.Generator, inputs: int, outputs: int, times: int) -> PyTree:
        block = {"norm0": norm_of(inputs), "w0": weight(rng, 3, 3, inputs, outputs)}
        block |= {"norm1": norm_of(outputs), "w1": weight(rng, 3, 3, outputs, outputs)}
        block["times"] = linear(rng, times, outputs)
        return block | ({"skip": weight(rng, 1, 1, inputs, outputs)} if inputs != outputs else {})

    def batch(self, rng: np.random.Generator, size: int) -> tuple[jax.Array, ...]:
        """Returns noisy images, the times of the diffusion, and the noise."""
        images = size, self.side, self.side, 3
        times = integers(rng, 1000, size).astype(jnp.float32)
        return normal(rng, *images), times, normal(rng, *images)

    def loss(self, params: PyTree, x: jax.Array, times: jax.Array, noise: jax.Array) -> jax.Array:
        time = self._embedded(params, times, x.dtype)
        x = convolve(params["first"], x)
        kept = []
        for level in params["down"]:
            for block in level["blocks"]:
                x = self._block(block, x, time)
                kept.append(x)
            x = convolve(level["shrink"], x, 2)
        x = self._block(params["middle"], x, time)
        for level in params["up"]:
            x = convolve(level["grow"], x.repeat(2, 1).repeat(2, 2))
            for block in level["blocks"]:
                x = self._block(block, jnp.concatenate([x, kept.pop()], -1), time)
        x = convolve(params["last"], jax.nn.silu(self._norm(params["norm"], x)))
        return jnp.mean((wide(x) - noise) ** 2)

    def _embedded(self, params: PyTree, times: jax.Array, dtype: Any) -> jax.Array:
        half = self.widths[0] // 2
        angles = times[:, None] * 1e4 ** -(np.arange(half, dtype=np.float32) / half)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)
        first, second = params["times"]
        return jax.nn.silu(affine(second, jax.nn.silu(affine(first, time))))

    def _norm(self, norm: PyTree, x: jax.Array) -> jax.Array:
        """Returns GroupNorm: the last axis has as many groups as go into it."""
        grouped = x.reshape(*x.shape[:3], self.groups, -1)
        by_group = jax.tree.map(lambda p: p.reshape(self.groups, -1), norm)
        return normalized(by_group, grouped, moments(grouped, (1, 2, 4))).reshape(x.shape)

    def _block(self, params: PyTree, x: jax.Array, time: jax.Array) -> jax.Array:
        h = convolve(params["w0"], jax.nn.silu(self._norm(params["norm0"], x)))
        h = h + affine(params["times"], time)[:, None, None]
        h = convolve(params["w1"], jax.nn.silu(self._norm(params["norm1"], h)))
        return h + (convolve(params["skip"], x) if "skip" in params else x)


# --- Sequences ---


class Normalized:
    """LayerNorm as Flax computes it, in place of a transformer's own."""

    def normalized(self, norm: PyTree, x: jax.Array) -> jax.Array:
        return normalized(norm, x, moments(x, -1))


class VisionTransformer(Normalized, models.ViT):
    pass


class TextModel(Normalized, models.LanguageModel):
    pass


class GPT(Llama):
    """A GPT whose layers are scanned, with rotary embedding, SwiGLU and RMSNorm."""

    def normalized(self, norm: jax.Array, x: jax.Array) -> jax.Array:
        x32 = wide(x)
        factor = lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-5) * norm
        return (x32 * factor).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Experts(TextModel):
    """A language model in which each token takes one expert, if that has a place left."""

    experts: int = 8

    def _layer(self, rng: np.random.Generator) -> PyTree:
        layer = super()._layer(rng)
        sizes = {"mlp1": (self.width, self.hidden), "mlp2": (self.hidden, self.width)}
        layer |= {name: weight(rng, self.experts, *size) for name, size in sizes.items()}
        return layer | {"router": weight(rng, self.width, self.experts)}

    def _block(self, layer: PyTree, x: jax.Array) -> jax.Array:
        x = x + self._attention(layer, self.normalized(layer["norm1"], x))
        return x + self._mixed(layer, self.normalized(layer["norm2"], x))

    def _mixed(self, layer: PyTree, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(wide(x @ layer["router"]))
        chosen = gates.argmax(-1)[..., None] == jnp.arange(self.experts)
        places = jnp.cumsum(chosen, axis=1) - 1
        free = jnp.arange(x.shape[1] * 5 // 4 // self.experts)
        dispatched = (chosen[..., None] & (places[..., None] == free)).astype(x.dtype)
        combined = dispatched * gates[..., None].astype(x.dtype)
        h = jnp.einsum("btec,btd->ebcd", dispatched, x)
        h = jax.nn.gelu(jnp.einsum("ebcd,edh->ebch", h, layer["mlp1"]))
        h = jnp.einsum("ebch,ehd->ebcd", h, layer["mlp2"])
        return jnp.einsum("btec,ebcd->btd", combined, h)


class StateSpace(TextModel):
    """A language model that mixes positions by a gated linear recurrence, scanned in parallel."""

    def _layer(self, rng: np.random.Generator) -> PyTree:
        layer = {"norm1": norm_of(self.width), "in": linear(rng, self.width, 2 * self.width)}
        layer |= {"steps": linear(rng, self.width, self.width), "decay": jnp.zeros(self.width)}
        return layer | {"out": linear(rng, self.width, self.width)}

    def _block(self, layer: PyTree, x: jax.Array) -> jax.Array:
        h = affine(layer["in"], self.normalized(layer["norm1"], x))
        u, gate = jnp.split(h, 2, axis=-1)
        steps = jax.nn.softplus(wide(affine(layer["steps"], u)))
        decays = jnp.exp(-steps * jnp.exp(layer["decay"]))
        both = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        _, states = lax.associative_scan(both, (decays, steps * wide(u)), axis=1)
        return x + affine(layer["out"], states.astype(x.dtype) * jax.nn.gelu(gate))


WIDE: Any = {"width": 768, "heads": 12, "hidden": 3072, "scaled_low": True}
TINY: Any = {"layers": 2, "width": 128, "heads": 2, "hidden": 256, "scaled_low": True}
TEXT: Any = {"layers": 4, **WIDE, "classes": 256, "length": 1024}
SHORT: Any = TINY | {"classes": 256, "length": 64}
GPT_TEXT = TEXT | {"layers": 8, "hidden": 2048, "groups": 12, "checkpointed": False}
# The batch, the network, and a small one to try.
ARCHITECTURES: dict[str, tuple[int, Any, Any]] = {
    "ResNet-50": (32, ResNet(), ResNet((1, 1), 16, 10, 32)),
    "UNet": (16, UNet(), UNet((16, 32), 4, 16)),
    "ViT": (
        *(64, VisionTransformer(4, **WIDE, classes=1000, image=224, patch=16)),
        VisionTransformer(**TINY, classes=1000, image=32, patch=16),
    ),
    "language model": (16, TextModel(**TEXT), TextModel(**SHORT)),
    "scanned GPT": (16, GPT(**GPT_TEXT), GPT(**SHORT, groups=2, checkpointed=False)),
    "mixture of experts": (16, Experts(**TEXT), Experts(**SHORT, experts=4)),
    "state-space model": (16, StateSpace(**TEXT), StateSpace(**SHORT)),
}


# --- Steps ---

Loss = Callable[..., tuple[jax.Array, Any]]


def loss_of(model: Any) -> Loss:
    """Returns the loss with the averages that the model keeps, which are None of all but one."""
    if hasattr(model, "averages"):
        return model.loss
    return lambda params, averages, *batch: (model.loss(params, *batch), averages)


def by_hand(loss_fn: Loss) -> Loss:
    def low(params: PyTree, averages: Any, x: jax.Array, *rest: jax.Array) -> Any:
        inputs = steps.cast(x, LOW)  # tokens stay integers
        return loss_fn(low_params(params), averages, inputs, *rest)

    return low


WAYS: dict[str, Callable[[Loss], Loss]] = {
    "by hand": by_hand,
    **{text: functools.partial(jmpx.apply_policy, policy=text) for text in POLICIES},
}


def trace(model: str, way: str, small: bool) -> Any:
    """Traces a step that donates its state, for one H100."""
    size, *networks = ARCHITECTURES[model]
    network, size = networks[small], 2 if small else size
    loss_fn = WAYS[way](loss_of(network))

    def run(state: Any, *batch: jax.Array) -> Any:
        params, opt_state, averages = state
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, averages), grads = grad_fn(params, averages, *batch)
        return (*steps.update(grads, params, opt_state), averages), loss

    params, batch = steps.shapes(network, size)
    averages = network.averages(params) if hasattr(network, "averages") else None
    state = params, jax.eval_shape(steps.ADAM.init, params), averages
    return steps.traced(Step(run, ()), state, batch, gpu.devices())


def measure(chip: str, model: str, way: str, small: bool = False) -> Record:
    return gpu_compile.compiled(functools.partial(trace, model, way, small), chip)


def points() -> list[Record]:
    scans = lambda model, way: "scan" in way and "scan" not in model  # noqa: E731
    every = ((model, way) for model in ARCHITECTURES for way in WAYS)
    return [{"chip": "H100", "model": m, "way": w} for m, w in every if not scans(m, w)]


main = functools.partial(records.main, __doc__, {"over_by_hand": (points(), measure)}, out=RESULTS)

if __name__ == "__main__":
    main()
