"""Compiles a train step of a Llama for 64 or 256 TPU v5e, without the chips, in eight ways.

    pip install -e '.[bench,tpu]'
    python benchmarks/llama.py                         # what has no line yet
    python benchmarks/llama.py --again --only 1B autocast    # one row, in a minute of a core
    python benchmarks/llama.py --again --only 8B       # all ways, on 256 chips

RMSNorm, rotary embedding, grouped-query attention, SwiGLU, a head of its own; the layers are
scanned, and the backward pass computes each again (`jax.checkpoint`); 2,048 tokens a chip; Adam.
Each chip stores its share of every parameter and of the optimizer's state, as FSDP does, and reads
its share of the batch. With `save="products"` no layer is marked: its peer is `by hand, products
saved`, where JAX's policy keeps what products of weights made. A line has

- peak_mib: the most memory that a chip holds at once, by the compiler's plan, with arguments;
- tflop: of the products of a chip, counted on the jaxpr by `jmpx.inspect.audit`, a loop's as often
  as it runs;

and the other fields of `tpu_compile.py`, where `gflop` counts the body of the loop once.
"""

import collections
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
import steps
import tpu
import tpu_compile
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from model_steps import CARRY, LOW
from models import SAVEABLE, LanguageModel, Params, Transformer, cross_entropy
from records import Record
from steps import Step

import jmpx

RESULTS = records.RESULTS / "llama.jsonl"


@dataclasses.dataclass(frozen=True)
class Llama(LanguageModel):
    """A decoder as Llama 3's; the defaults have 1.1 billion parameters.

    With `casts`, each layer casts its own weights as it reads them, which is how MaxText does it.
    """

    layers: int = 16
    width: int = 2048
    heads: int = 32
    groups: int = 8  # heads of keys and of values
    hidden: int = 8192
    length: int = 2048
    scanned: bool = True
    checkpointed: bool = True
    saveable: Any = None  # which results of a layer the backward pass keeps; None: its input alone
    casts: str | None = None
    rows: NamedSharding | None = None  # of a batch

    def init(self, rng: np.random.Generator) -> Params:
        """Returns float32 parameters."""
        tokens = self._linear(rng, self.classes, self.width)
        return Transformer.init(self, rng) | {"tokens": tokens}

    def apply(self, params: Params, text: jax.Array) -> jax.Array:
        """Returns the scores of the next tokens, of shape (size, length, classes)."""
        tokens, norm, head = self._cast([params[name] for name in ("tokens", "norm", "head")])
        return self.normalized(norm, self._blocks(params, tokens[text])) @ head

    def normalized(self, norm: jax.Array, x: jax.Array) -> jax.Array:
        """Returns RMSNorm of the last axis."""
        x32 = self._island(x)
        scale = jax.lax.rsqrt((x32**2).mean(axis=-1, keepdims=True) + 1e-5)
        return (x32 * scale).astype(x.dtype) * norm

    def loss(self, params: Params, text: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(self.apply(params, text), labels, by_mask=True)

    @property
    def head_size(self) -> int:
        """The entries of a head."""
        return self.width // self.heads

    def _cast(self, tree: Params) -> Params:
        return steps.cast(tree, self.casts) if self.casts else tree

    def _norm(self) -> jax.Array:
        return jnp.ones(self.width)

    def _linear(self, rng: np.random.Generator, inputs: int, outputs: int) -> jax.Array:
        return super()._linear(rng, inputs, outputs)["w"]

    def _layer(self, rng: np.random.Generator) -> Params:
        width, keys = self.width, self.groups * self.head_size
        sizes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "mix": (width, width)}
        sizes |= {name: (width, self.hidden) for name in ("gate", "up")}
        sizes["down"] = self.hidden, width
        products = {name: self._linear(rng, *size) for name, size in sizes.items()}
        return products | {"norm1": self._norm(), "norm2": self._norm()}

    def _block(self, layer: Params, x: jax.Array) -> jax.Array:
        layer = self._cast(layer)
        x = x + self._attention(layer, self.normalized(layer["norm1"], x))
        normal = self.normalized(layer["norm2"], x)
        hidden = jax.nn.silu(normal @ layer["gate"]) * (normal @ layer["up"])
        if self.rows is not None:  # else XLA splits its entries, and gathers 7 times as much
            hidden = jax.lax.with_sharding_constraint(hidden, self.rows)
        return x + hidden @ layer["down"]

    def _attention(self, layer: Params, x: jax.Array) -> jax.Array:
        """Mixes values; each head of keys and values serves several heads of queries."""
        size, length, _ = x.shape
        q, k, v = ((x @ layer[name]).reshape(size, length, -1, self.head_size) for name in "qkv")
        q = self._rotated(q * self.head_size**-0.5)
        q = q.reshape(size, length, self.groups, -1, self.head_size)
        scores = self._island(jnp.einsum("bqgrd,bkgd->bgrqk", q, self._rotated(k)))
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        return jnp.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(x.shape) @ layer["mix"]

    def _rotated(self, x: jax.Array) -> jax.Array:
        """Turns pairs of entries by an angle that grows with the position (rotary embedding)."""
        rates = 5e5 ** -np.linspace(0, 1, self.head_size // 2, endpoint=False, dtype=np.float32)
        angles = (np.arange(x.shape[1], dtype=np.float32)[:, None] * rates)[:, None]
        first, second = jnp.split(self._island(x), 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        turned = first * cos - second * sin, first * sin + second * cos
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


# --- The ways ---


def autocast(model: Llama, **options: Any) -> Step:
    model = dataclasses.replace(model, islands=False)
    return steps.autocast_style(model, LOW, rules=CARRY, **options)


def saved(model: Llama) -> Step:
    return autocast(dataclasses.replace(model, checkpointed=False), save="products")


def by_hand(model: Llama, **form: Any) -> Step:
    model = dataclasses.replace(model, **form)
    return steps.handwritten(model, "float32")  # no cast but the model's own


def by_arguments(model: Llama, policy: str | None = None) -> Step:
    return steps.jmpx_style(model, LOW, policy=policy)


WAYS: dict[str, Callable[[Llama], Step]] = {
    "float32": by_hand,
    "by hand": partial(by_hand, casts=LOW),
    "by hand, cast before the loop": lambda model: steps.handwritten(model, LOW),
    "c=bf16": by_arguments,
    "c=bf16,r=f32": partial(by_arguments, policy="by=arguments,c=bf16,r=f32"),
    "autocast": autocast,
    "by hand, products saved": partial(by_hand, casts=LOW, saveable=SAVEABLE),
    "autocast, save": saved,
}
SIZES = {  # the model, and the chips
    "1B": (Llama(), 64),
    "8B": (Llama(32, 4096, 32, 14336, 128_256), 256),
    "small": (Llama(2, 64, 4, 128, 256, groups=2, length=32), 8),
}


def trace(way: str, model: Llama, chips: list[Any]) -> Any:
    """Traces a step that donates its state; each chip has one sequence."""
    rows = NamedSharding(Mesh(np.array(chips), ("data",)), P("data"))
    step = WAYS[way](dataclasses.replace(model, rows=rows))
    params, batch = steps.shapes(model, len(chips))
    return steps.traced(step, steps.start(step, params), batch, chips)


def teraflops(traced: Any, chips: int) -> float:
    """Returns those of the products of a chip; those of a loop count as often as it runs."""
    arrays = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.jaxpr.in_avals)
    report = jmpx.inspect.audit(jaxpr_as_fun(traced.jaxpr))(*arrays)
    return sum(product.flops for product in report.products) / chips / 1e12


def measure(size: str, chips: int, way: str, small: bool = False) -> Record:
    """Compiles a step for some chips."""
    model, chips = SIZES["small" if small else size]
    devices = tpu.devices(chips)
    found = tpu_compile.compiled(lambda: trace(way, model, devices))
    return found | {"tflop": teraflops(trace(way, model, devices), chips)}


def sent(record: Record, *kinds: str) -> str:
    """Returns the MiB of some kinds of collectives by dtype, where it is one or more."""
    by_dtype: collections.Counter[str] = collections.Counter()
    for name, mib in record["collectives"].items():
        kind, dtype = name.split()
        by_dtype[dtype] += mib if kind in kinds else 0
    return ", ".join(f"{mib:,.0f} {dtype}" for dtype, mib in by_dtype.items() if mib >= 1)


def table(found: list[Record], size: str = "1B") -> str:
    """Returns a row for each way in which a Llama of a size was compiled."""
    by_way = {record["way"]: record for record in found if record["size"] == size}
    rows = [
        (
            way,
            f"{record['peak_mib']:,.0f}",
            sent(record, "all-gather"),
            sent(record, "reduce-scatter", "all-reduce"),
            sent(record, "all-to-all", "collective-permute"),
            f"{record['tflop']:.1f}",
            f"{record['trace_cpu_s']:.1f}",
            f"{record['compile_cpu_s']:.0f}",
        )
        for way in WAYS
        if (record := by_way.get(way))
    ]
    header = (f"Llama {size}, MiB a chip", "peak", "gathered", "summed", "exchanged")
    return records.table((*header, "TFLOP", "s to trace", "s to compile"), rows)


POINTS = [{"size": s, "chips": SIZES[s][1], "way": w} for s in ("1B", "8B") for w in WAYS]
main = partial(records.main, __doc__, {"llama": (POINTS, measure)}, out=RESULTS)

if __name__ == "__main__":
    main()
