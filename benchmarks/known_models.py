"""Measures the strings of `docs/known_models.md` on ten small models, and writes them down.

    pip install -e '.[bench,tpu]'               # with the compiler of a TPU v5e
    python benchmarks/known_models.py           # the points that are missing
    python benchmarks/known_models.py --only ViT

The peaks on an H100 want its compiler, too: `benchmarks/gpu.py` says how to get it.

A model has the weights that training starts from, and random data. A line has

- error: of the gradients, relative to those of float32, the root mean square over four batches;
  `jmpx.inspect.emulate` rounds as the program says, whatever the machine multiplies in;
- low: the share of the FLOPs of matmuls and convolutions that multiply in 16 bits;
- v5e, h100: the peak memory, in MiB, of a step with Adam and 16 times the batch, by the chip's
  compiler; None without it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import records
from flax import nnx
from records import PyTree, Record

import jmpx

RESULTS = records.RESULTS / "known_models.jsonl"
Loss = Callable[..., jax.Array]
Made = tuple[Loss, PyTree, Callable[[jax.Array], tuple[jax.Array, ...]]]
normal = jax.random.normal


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# --- Sequences and images ---


class Block(nn.Module):
    """A block of a GPT."""

    heads: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attention")(
            nn.LayerNorm()(x), mask=mask
        )
        h = nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1], name="down")(h)


class GPT(nn.Module):
    """A language model of Linen whose head is its table of tokens."""

    tokens: int = 512
    width: int = 128

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        table = nn.Embed(self.tokens, self.width, name="tokens")
        positions = self.param("positions", nn.initializers.normal(0.02), (64, self.width))
        x = table(text) + positions
        for number in range(2):
            x = Block(name=f"block_{number}")(x)
        return table.attend(nn.LayerNorm(name="last_norm")(x))


def gpt() -> Made:
    model = GPT()
    params = model.init(jax.random.key(0), jnp.zeros((1, 64), int))
    loss = lambda params, text: cross_entropy(model.apply(params, text[:, :-1]), text[:, 1:])  # noqa: E731
    return loss, params, lambda key: (jax.random.randint(key, (16, 65), 0, 512),)


class ViT(nnx.Module):
    """A vision transformer of NNX."""

    def __init__(self, rngs: nnx.Rngs, width: int = 128) -> None:
        self.patches = nnx.Conv(3, width, (4, 4), (4, 4), rngs=rngs)
        self.positions = nnx.Param(0.02 * normal(rngs.params(), (64, width)))
        self.blocks = nnx.List([ViTBlock(width, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 100, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(len(x), -1, x.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class ViTBlock(nnx.Module):
    """A block of a ViT."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


def images(key: jax.Array, size: int = 16) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key)
    return normal(keys[0], (size, 32, 32, 3)), jax.random.randint(keys[1], (size,), 0, 100)


def vit() -> Made:
    loss = lambda model, x, labels: cross_entropy(model(x), labels)  # noqa: E731
    return loss, ViT(nnx.Rngs(0)), images


def resnet() -> Made:
    net = hk.transform_with_state(lambda x: hk.nets.ResNet18(100, resnet_v2=True)(x, True))
    params, state = net.init(jax.random.key(0), images(jax.random.key(1))[0])
    loss = lambda params, x, labels: cross_entropy(net.apply(params, state, None, x)[0], labels)  # noqa: E731
    return loss, params, images


class UNetBlock(eqx.Module):
    """A block that reads the time of a diffusion."""

    norm: eqx.nn.GroupNorm
    conv: eqx.nn.Conv2d
    time: eqx.nn.Linear

    def __init__(self, inputs: int, outputs: int, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.norm = eqx.nn.GroupNorm(4, inputs)
        self.conv = eqx.nn.Conv2d(inputs, outputs, 3, padding=1, key=keys[0])
        self.time = eqx.nn.Linear(64, outputs, key=keys[1])

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        return self.conv(jax.nn.silu(self.norm(x))) + self.time(time)[:, None, None]


class UNet(eqx.Module):
    """A network of Equinox that predicts noise, at one of 1000 times."""

    first: eqx.nn.Conv2d
    down: list[UNetBlock]
    up: list[UNetBlock]
    last: eqx.nn.Conv2d

    def __init__(self, key: jax.Array, width: int = 32) -> None:
        keys = jax.random.split(key, 6)
        self.first = eqx.nn.Conv2d(3, width, 3, padding=1, key=keys[0])
        self.down = [UNetBlock(width, width, keys[1]), UNetBlock(width, 2 * width, keys[2])]
        self.up = [UNetBlock(2 * width, width, keys[3]), UNetBlock(2 * width, width, keys[4])]
        self.last = eqx.nn.Conv2d(width, 3, 3, padding=1, key=keys[5])

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        angles = time * 1e4 ** -(jnp.arange(32.0) / 32)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
        high = self.down[0](self.first(x), time)
        low = eqx.nn.AvgPool2d(2, 2)(high)
        low = self.up[0](self.down[1](low, time), time)
        grown = low.repeat(2, 1).repeat(2, 2)
        return self.last(self.up[1](jnp.concatenate([grown, high]), time))


def unet() -> Made:
    def loss(model: UNet, x: jax.Array, times: jax.Array, noise: jax.Array) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x, times) - noise) ** 2)

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        shape = 8, 3, 16, 16
        times = jax.random.randint(keys[1], (8,), 0, 1000).astype(jnp.float32)
        return normal(keys[0], shape), times, normal(keys[2], shape)

    return loss, UNet(jax.random.key(0)), batch


class Mamba(eqx.Module):
    """A selective state-space layer of Equinox, as Mamba's, without its convolution."""

    norm: eqx.nn.RMSNorm
    enter: eqx.nn.Linear
    steps: eqx.nn.Linear
    selects: eqx.nn.Linear
    decay: jax.Array
    leave: eqx.nn.Linear

    def __init__(self, key: jax.Array, width: int = 128, states: int = 16) -> None:
        keys = jax.random.split(key, 4)
        linear = functools.partial(eqx.nn.Linear, width)
        self.norm, self.enter = eqx.nn.RMSNorm(width), linear(2 * width, key=keys[0])
        self.steps, self.leave = linear(width, key=keys[1]), linear(width, key=keys[2])
        self.selects = linear(2 * states, key=keys[3])
        self.decay = jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (width, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        u, gate = jnp.split(jax.vmap(self.enter)(jax.vmap(self.norm)(x)), 2, axis=-1)
        steps = jax.nn.softplus(jax.vmap(self.steps)(u))
        b, c = jnp.split(jax.vmap(self.selects)(u), 2, axis=-1)
        with jax.named_scope("states"):
            decays = jnp.exp(-steps[..., None] * jnp.exp(self.decay))
            both = lambda one, two: (one[0] * two[0], one[1] * two[0] + two[1])  # noqa: E731
            inputs = (steps * u)[..., None] * b[:, None]
            states = jax.lax.associative_scan(both, (decays, inputs))[1]
        mixed = jnp.einsum("lds,ls->ld", states, c)
        return x + jax.vmap(self.leave)(mixed * jax.nn.silu(gate))


class Sequence(eqx.Module):
    """A language model of Equinox with some layers."""

    tokens: eqx.nn.Embedding
    layers: list[Any]
    head: eqx.nn.Linear

    def __init__(self, layer: Any, key: jax.Array, width: int = 128) -> None:
        keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(512, width, key=keys[0])
        self.layers = [layer(keys[1]), layer(keys[2])]
        self.head = eqx.nn.Linear(width, 512, key=keys[3])

    def __call__(self, text: jax.Array) -> jax.Array:
        x = jax.vmap(self.tokens)(text)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.head)(x)


def mamba() -> Made:
    def loss(model: Sequence, text: jax.Array) -> jax.Array:
        return cross_entropy(jax.vmap(model)(text[:, :-1]), text[:, 1:])

    batch = lambda key: (jax.random.randint(key, (8, 65), 0, 512),)  # noqa: E731
    return loss, Sequence(Mamba, jax.random.key(0)), batch


class Experts(eqx.Module):
    """A sparse layer of Equinox: each token takes two of eight experts, by `ragged_dot`."""

    norm: eqx.nn.LayerNorm
    router: eqx.nn.Linear
    up: jax.Array
    down: jax.Array

    def __init__(self, key: jax.Array, width: int = 128, experts: int = 8) -> None:
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(width)
        self.router = eqx.nn.Linear(width, experts, use_bias=False, key=keys[0])
        self.up = normal(keys[1], (experts, width, 4 * width)) * width**-0.5
        self.down = normal(keys[2], (experts, 4 * width, width)) * (4 * width) ** -0.5

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norm)(x)
        gates, chosen = jax.lax.top_k(jax.nn.softmax(jax.vmap(self.router)(h)), 2)
        order = jnp.argsort(chosen.ravel())
        rows, sizes = h[order // 2], jnp.bincount(chosen.ravel(), length=len(self.up))
        out = jax.nn.gelu(jax.lax.ragged_dot(rows, self.up, sizes))
        out = jax.lax.ragged_dot(out, self.down, sizes) * gates.ravel()[order, None]
        return x + jnp.zeros_like(x).at[order // 2].add(out.astype(x.dtype))


def experts() -> Made:
    loss = lambda model, text, labels: cross_entropy(model(text), labels)  # noqa: E731
    batch = lambda key: jax.random.randint(key, (2, 512), 0, 512)  # noqa: E731
    return loss, Sequence(Experts, jax.random.key(0)), lambda key: tuple(batch(key))


# --- Science ---


class Potential(hk.Module):
    """The energy of atoms, by messages over their distances."""

    def __call__(self, kinds: jax.Array, places: jax.Array) -> jax.Array:
        with jax.named_scope("geometry"):
            apart = places[:, None] - places[None]
            distances = jnp.sqrt((apart**2).sum(-1) + jnp.eye(len(places)))
            basis = jnp.exp(-((distances[..., None] - jnp.linspace(0.5, 5, 32)) ** 2) * 4)
            basis = basis * (1 - jnp.eye(len(places)))[..., None]
        h = hk.Embed(4, 64)(kinds)
        for number in range(2):
            filters = hk.Linear(64, name=f"filters_{number}")(basis)
            messages = (filters * h[None]).sum(1)
            h = h + jax.nn.silu(hk.Linear(64, name=f"mix_{number}")(messages))
        return hk.Linear(1, name="energy")(jax.nn.silu(hk.Linear(64)(h))).sum()


def potential() -> Made:
    net = hk.without_apply_rng(hk.transform(lambda kinds, places: Potential()(kinds, places)))
    params = net.init(jax.random.key(0), jnp.zeros(16, int), normal(jax.random.key(1), (16, 3)))

    def loss(params: PyTree, kinds: jax.Array, places: jax.Array, forces: jax.Array) -> jax.Array:
        def of_one(kinds: jax.Array, places: jax.Array) -> jax.Array:
            return -jax.grad(net.apply, argnums=2)(params, kinds, places)

        return jnp.mean((jax.vmap(of_one)(kinds, places) - forces) ** 2)

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        kinds = jax.random.randint(keys[0], (8, 16), 0, 4)
        return kinds, 2 * normal(keys[1], (8, 16, 3)), normal(keys[2], (8, 16, 3))

    return loss, params, batch


def pinn() -> Made:
    """Burgers' equation: u_t + u u_x = 0.01 u_xx."""
    model = eqx.nn.MLP(2, "scalar", 64, 3, jnp.tanh, key=jax.random.key(0))

    def residual(model: Any, at: jax.Array) -> jax.Array:
        u, first = jax.value_and_grad(model)(at)
        second = jax.hessian(model)(at)[1, 1]
        return first[0] + u * first[1] - 0.01 * second

    def loss(model: Any, inside: jax.Array, start: jax.Array) -> jax.Array:
        values = jax.vmap(model)(start)
        wrong = values + jnp.sin(np.pi * start[:, 1])
        return jnp.mean(jax.vmap(residual, (None, 0))(model, inside) ** 2) + jnp.mean(wrong**2)

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        inside = jax.random.uniform(key, (256, 2), minval=-1.0)
        return inside, inside.at[:64, 0].set(0)[:64]

    return loss, model, batch


def rnn() -> Made:
    def run(text: jax.Array) -> jax.Array:
        core = hk.LSTM(128)
        x = hk.Embed(512, 128)(text)
        states, _ = hk.dynamic_unroll(core, x, core.initial_state(len(text)), time_major=False)
        return hk.Linear(512, name="head")(states)

    net = hk.without_apply_rng(hk.transform(run))
    params = net.init(jax.random.key(0), jnp.zeros((1, 64), int))
    loss = lambda params, text: cross_entropy(net.apply(params, text[:, :-1]), text[:, 1:])  # noqa: E731
    return loss, params, lambda key: (jax.random.randint(key, (16, 65), 0, 512),)


def process() -> Made:
    """A Gaussian process whose kernel reads the features of a network, in plain JAX."""
    keys = jax.random.split(jax.random.key(0))
    params = {"w": normal(keys[0], (4, 128)) / 2, "v": normal(keys[1], (128, 8)) / 11}
    params |= {"scale": jnp.zeros(()), "noise": jnp.array(-2.0)}

    def loss(params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        features = jnp.tanh(x @ params["w"]) @ params["v"]
        with jax.named_scope("process"):
            apart = ((features[:, None] - features[None]) ** 2).sum(-1)
            kernel = jnp.exp(params["scale"] - apart) + jnp.exp(params["noise"]) * jnp.eye(len(x))
            factor = jnp.linalg.cholesky(kernel)
            white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return jnp.log(jnp.diagonal(factor)).sum() + (white**2).sum() / 2

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        x = normal(key, (64, 4))
        return x, jnp.sin(2 * x[:, 0]) + x[:, 1]

    return loss, params, batch


# --- What is measured ---


class Known(NamedTuple):
    """A kind of model: how a small one is made, and the string for it."""

    make: Callable[[], Made]
    policy: str


FLOAT32, BASE, SAVE = "f32", "c=bf16", "c=bf16,save=products"
MODELS = {
    "GPT with a tied head": Known(gpt, f"{SAVE}; */tokens.attend: product=f32"),
    "ViT": Known(vit, SAVE),
    "ResNet": Known(resnet, SAVE),
    "UNet of a diffusion": Known(unet, f"{SAVE}; */last: full"),
    "Mamba": Known(mamba, f"{SAVE}; */head: product=f32"),
    "mixture of experts": Known(experts, f"{SAVE}; */router: product=f32"),
    "potential with forces": Known(potential, "c=f16"),
    "PINN": Known(pinn, "c=f16"),
    "RNN": Known(rnn, f"{SAVE}; */lstm: product=f32; */head: product=f32"),
    "Gaussian process": Known(process, "c=f16; */process: full"),
}
CHIPS = "v5e", "h100"
BATCHES = 4
ARROW = "\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}"
LARGER = 16  # how many times the batch is larger where the peak is measured
POINTS = [
    {"model": name, "policy": policy}
    for name, known in MODELS.items()
    for policy in (FLOAT32, BASE, known.policy)
]


def scale_of(policy: str) -> jmpx.LossScale:
    """Returns what float16 needs, and bfloat16 does not."""
    return jmpx.StaticLossScale(2.0**10) if policy.startswith("c=f16") else jmpx.NoOpLossScale()


def gradients(loss: Loss, policy: str) -> Callable[..., Any]:
    """Returns a function of the model and a batch that returns the gradients."""
    grad_fn = jmpx.value_and_grad(loss, scale_of(policy), policy=policy)
    return lambda *args: grad_fn(*args).grads


def error(loss: Loss, policy: str, batches: list[tuple[Any, ...]]) -> float:
    """Returns the relative error of the gradients, the root mean square over batches."""
    both = [eqx.filter_jit(jmpx.inspect.emulate(gradients(loss, p))) for p in (policy, FLOAT32)]
    squares = []
    for batch in batches:
        pairs = list(zip(*(jax.tree.leaves(fn(*batch)) for fn in both), strict=True))
        wrong = sum(float(jnp.sum((one - exact) ** 2)) for one, exact in pairs)
        squares.append(wrong / sum(float(jnp.sum(exact**2)) for _, exact in pairs))
    return float(np.sqrt(np.mean(squares)))


def planned(loss: Loss, model: PyTree, batch: tuple[jax.Array, ...], policy: str) -> Record:
    """Returns the share of the FLOPs in 16 bits, and the peak of a step on each chip."""
    optimizer = optax.adam(1e-3)

    def make_step(policy: str) -> Any:
        arrays, static = eqx.partition(model, eqx.is_inexact_array)

        def step(arrays: PyTree, state: Any, *batch: jax.Array) -> Any:
            grads = gradients(loss, policy)(eqx.combine(arrays, static), *batch)
            # Those of an NNX module are a State.
            grads = jax.tree.unflatten(jax.tree.structure(arrays), jax.tree.leaves(grads))
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(arrays, updates), state

        state = jax.eval_shape(lambda: (arrays, optimizer.init(arrays)))
        shapes = (jax.ShapeDtypeStruct((LARGER * len(x), *x.shape[1:]), x.dtype) for x in batch)
        return jax.jit(step, donate_argnums=(0, 1)), (*state, *shapes)

    plans = {chip: jmpx.inspect.plan(make_step, [policy], chip=chip).rows[0] for chip in CHIPS}
    products = plans[CHIPS[0]].products
    whole = sum(each.flops for each in products)
    low = sum(each.flops for each in products if "float32" not in each.dtypes)
    peaks = {chip: row.peak and round(row.peak / 2**20, 2) for chip, row in plans.items()}
    return {"low": round(low / whole, 4), **peaks}


def measure(model: str, policy: str, small: bool = False) -> Record:
    """Returns the figures of a model under a policy."""
    loss, params, batch = MODELS[model].make()
    keys = map(jax.random.key, range(1 if small else BATCHES))
    batches = [(params, *batch(key)) for key in keys]
    found = 0.0 if policy == FLOAT32 else error(loss, policy, batches)
    return {"error": float(f"{found:.3g}"), **planned(loss, params, batches[0][1:], policy)}


def table(found: list[Record]) -> str:
    """Returns a Markdown table with one row per model."""
    of = {(line["model"], line["policy"]): line for line in found}
    rows = []
    for name, (_, policy) in MODELS.items():
        exact, base, line = (of[name, each] for each in (FLOAT32, BASE, policy))
        error = f"{base['error']:.2g}{ARROW}{line['error']:.2g}"
        peaks = (f"{exact[chip]:,.0f}{ARROW}{line[chip]:,.0f}" for chip in CHIPS)
        rows.append((name, f"`{policy}`", error, f"{100 * line['low']:.1f}", *peaks))
    peaks = (f"peak on {chip}, MiB" for chip in ("a v5e", "an H100"))
    return records.table(("model", "policy", "error", "in 16 bits, %", *peaks), rows)


BENCHMARKS: records.Benchmarks = {"known_models": (POINTS, measure)}
main = functools.partial(records.main, __doc__, BENCHMARKS, out=RESULTS)

if __name__ == "__main__":
    main()
