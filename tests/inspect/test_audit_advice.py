"""Each sentence of advice of an audit is followed: then the finding is gone, or less severe.

A row has the source of a program, the advice that its audit gives, and edits of the source that do
what the advice says. A rule is pasted into the policy. Nothing runs: the programs are traced.
"""

import importlib.util
import itertools
from typing import NamedTuple

import pytest
from helpers.findings_of import found

import jmpx
from jmpx._inspect.audit.api import KINDS
from jmpx._inspect.audit.report import SEVERITIES

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.versions]

PREAMBLE = """
import jax
import jax.numpy as jnp
import numpy as np
from helpers.findings_of import shape
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jmpx

bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
NO_SCALE = jmpx.NoOpLossScale()


def mean_square(h):
    return jnp.mean(h.astype(f32) ** 2)


def two_layers(x, w):
    return jnp.tanh(x.astype(bf16) @ w.astype(bf16)) @ w.astype(bf16)


def float32_sums(x, w):
    return jnp.matmul(x, w, preferred_element_type=f32)


def over_devices(fn):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    return jax.shard_map(fn, mesh=mesh, check_vma=False, **specs)


policy, args = "", (shape(8, 8), shape(4, 8))
"""
RULE = "a rule"  # in place of advice: the finding's rule, which is pasted into the policy


class Row(NamedTuple):
    """A program, the advice that it gets, and how its source is edited to follow it."""

    kind: str
    advice: str  # a part of it
    source: str
    edits: dict[str, str] = {}
    platform: str | None = None
    brings: str = ""  # a finding of this kind is no worse than what it takes the place of


LOGITS = """
def loss(w, x):
    logits = x @ w
    return -jnp.mean(jax.nn.log_softmax(logits.astype(f32)))
"""
NAMED_LOGITS = LOGITS.replace("logits = x @ w", "with jax.named_scope('head'): logits = x @ w")
BY_OPERATIONS = "policy = 'c=bf16'\n"
IN_BF16 = "args = shape(8, 8, dtype=bf16), shape(4, 8, dtype=bf16)\n"
IN_F16 = IN_BF16.replace("bf16", "f16")
IN_FLOAT32 = "preferred_element_type=f32"

CONSTANTS = """
def loss(w, x):
    h = jnp.where(x > 0, x @ w, -1e9)
    return mean_square(x / (jnp.abs(h) + 1e-9))
"""
TO_AND_FRO = """
def loss(w, x):
    wide = jax.nn.softmax(x.astype(f32))
    low = wide.astype(bf16)
    h = jax.nn.softmax(low.astype(f32))
    return mean_square(two_layers(h, w))
"""
TWICE = """
def loss(w, x):
    h = jnp.tanh(x)
    h = h.astype(f16).astype(bf16)
    return mean_square(two_layers(h, w))
"""
WIDE = """
def loss(w, x):
    h = jnp.tanh(two_layers(x, w))
    h = h.astype(f32) @ w.astype(bf16).astype(f32)
    return mean_square(h.astype(bf16) @ w.astype(bf16))
"""
MOSTLY_WIDE = """
def loss(w, x):
    h = x @ w @ w @ w
    return mean_square(two_layers(h, w))
"""
LAST_WIDE = """
def loss(w, x):
    h = jnp.tanh(two_layers(x, w))
    return jnp.mean((h.astype(f32) @ w.astype(bf16).astype(f32)) ** 2)
"""
OF_ARGUMENTS = """
def loss(w, x):
    h = jnp.tanh(two_layers(x, w))
    folded = w @ w
    return mean_square(two_layers(h, folded))
"""
ONE_ARGUMENT = """
def loss(w, x):
    h = jnp.tanh(two_layers(x, w))
    h = (h @ w).astype(bf16)
    return mean_square(two_layers(h, w))
"""
PREFERRED = """
def loss(w, x):
    h = jnp.tanh(two_layers(x, w))
    h = jnp.matmul(h, w.astype(bf16), preferred_element_type=f32)
    return mean_square(two_layers(h.astype(bf16), w))
"""
ARRAY = """
def loss(w, x):
    h = two_layers(x, w)
    table = jnp.sin(w)
    return mean_square((h @ table).astype(bf16) @ w.astype(bf16))
"""
NUMBER = """
def add(h, y):
    return h + y

def loss(w, x):
    h = jnp.tanh(two_layers(x, w)) / np.sqrt(8)
    return mean_square(add(h, two_layers(h, w)))
"""
GOES_ON = """
def norm(h):
    return h / jnp.sqrt(jnp.mean(h**2) + 1e-3)

def block(x, h):
    return x + h.astype(x.dtype)

def loss(w, x):
    h = norm(two_layers(x, w).astype(f32))
    for _ in range(3):
        h = block(h, jnp.tanh(h.astype(bf16) @ w.astype(bf16)))
    return mean_square(h.astype(bf16) @ w.astype(bf16))
"""
CARRIED = """
def loss(w, x):
    def body(h, _):
        return jnp.maximum(h, 0) + two_layers(h, w), None

    h, _ = lax.scan(body, two_layers(x, w).astype(f32), None, length=3)
    return mean_square(h.astype(bf16) @ w.astype(bf16))
"""
SAVED = """
def loss(w, x):
    h = two_layers(x, w)
    wide = jnp.tile(h.astype(f32), 40)
    h = jax.nn.gelu(jnp.tanh(wide))[:, :8].astype(bf16)
    return mean_square(two_layers(h, w))
"""
EXP = """
def loss(w, x):
    with jax.named_scope("gate"):
        x = x * jnp.exp(x)
    return mean_square(x @ w)
"""
ANGLES = """
def loss(w, x):
    angles = x * jnp.asarray(np.linspace(1, 99, 8), x.dtype)
    return mean_square(jnp.cos(angles).astype(x.dtype) @ w)
"""
ANGLES_OF_PRODUCT = """
def loss(w, x):
    with jax.named_scope('angles'):
        angles = x @ w
    return mean_square(jnp.tanh(jnp.cos(angles) @ w) @ w)
"""
SUM = """
def loss(w, x):
    x = jnp.tile(x, (99, 1))
    total = jnp.sum(x, 0, dtype=x.dtype)
    return mean_square((x + total) @ w)
"""
OWN_SUM = """
@over_devices
def loss(w, x):
    h = x.astype(bf16) @ w.astype(bf16)
    return mean_square(lax.psum(h, "data"))
"""
STEP = """
@over_devices
def loss(w, x):
    def local(w, x):
        return mean_square(x @ w.astype(x.dtype))

    over = jmpx.Over("data")
    grad = jmpx.grad(local, NO_SCALE, policy="c=bf16,o=f32,r=bf16", over=over)
    return grad(w, x).grads
"""
GRADIENTS_BY_HAND = """
@over_devices
def loss(w, x):
    grads = jax.grad(lambda w: mean_square(x @ w))(w)
    return lax.psum(grads, "data")
"""
OWN_RULE = """
@jax.custom_vjp
def own(w, x):
    return x @ w

def backward(saved, g):
    w, x = saved
    return jnp.cbrt(x.T @ g).astype(w.dtype), g @ w.T

own.defvjp(lambda w, x: (own(w, x), (w, x)), backward)

def model(w, x):
    return jnp.sum(own(w, x), dtype=f32)

def loss(w, x):
    return jmpx.grad(model, NO_SCALE, policy="by=arguments,c=bf16,r=f32")(w, x).grads
"""
FLOAT32_RULE = {
    "own(w, x), dtype": "own(w, x.astype(f32)), dtype",
    "by=arguments,": "",
    "return x @ w\n": "return (x.astype(bf16) @ w.astype(bf16)).astype(f32)\n",
    "jnp.cbrt(x.T @ g)": "jnp.cbrt((x.T.astype(bf16) @ g.astype(bf16)).astype(f32))",
}
CARRY = """
def loss(w, x):
    def body(total, row):
        return total + row, None

    total, _ = lax.scan(body, jnp.zeros(8, x.dtype), jnp.tile(x, (99, 1)))
    return mean_square(total @ w)
"""
CLOSED_OVER = """
def loss(w, x):
    low = w.astype(bf16)

    def body(h, _):
        return jnp.tanh(h @ low), None

    return mean_square(lax.scan(body, x.astype(bf16), None, length=300)[0])
"""
GAUSSIAN = """
def loss(w, x):
    with jax.named_scope("kernel"):
        k = jnp.exp(-jnp.abs(x @ x.T)) + 1e-2 * jnp.eye(4, dtype=x.dtype)
    return jnp.sum(jnp.linalg.cholesky(k.astype(f32))) + mean_square(x @ w)
"""
GIVEN = """
def loss(w, x):
    return mean_square(x) + jnp.linalg.slogdet(w.astype(f32))[1]
"""
INTEGER = """
def loss(w, x):
    times = jnp.arange(999)[:4, None].astype(x.dtype)
    return mean_square(jnp.tanh(times / 99).astype(x.dtype) * x @ w)
"""
INTEGERS_BY_PRODUCT = """
def loss(w, x):
    times = jnp.arange(999.0)[:8].reshape(4, 2)
    h = times @ w[:2]
    return mean_square(h * x @ w)
"""
TARGET = """
def loss(w, x, y):
    return mean_square(x @ w - y)

args = *args, shape(4, 8)
"""
FLOAT32 = """
def loss(w, x):
    return mean_square(x @ w)
"""
FULL_HEAD = """
def loss(w, x):
    x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return mean_square(x @ w)
"""
ATTENTION = """
def loss(w, x):
    q, k, v = x @ w, x, x
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return mean_square(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v))

args = shape(8, 8, dtype=bf16), shape(2, 4, 2, 8, dtype=bf16)
"""
ROWS = [
    Row(
        "rounded-logits",
        IN_FLOAT32[:22],
        IN_BF16 + LOGITS,
        {"x @ w": f"jnp.matmul(x, w, {IN_FLOAT32})"},
    ),
    Row(
        "rounded-logits",
        "jax.named_scope around the product, and a rule for the scope with product=float32",
        BY_OPERATIONS + LOGITS,
        {
            "logits = x @ w": "with jax.named_scope('head'): logits = x @ w",
            "'c=bf16'": "'c=bf16; */head: product=float32'",
        },
    ),
    Row("rounded-logits", RULE, BY_OPERATIONS + NAMED_LOGITS),
    Row("rounded-logits", RULE, BY_OPERATIONS + NAMED_LOGITS.replace("log_softmax", "log_sigmoid")),
    Row(
        "constant-range",
        "jnp.finfo(x.dtype).min in a mask, an epsilon of 1e-4",
        IN_F16 + CONSTANTS,
        {"-1e9": "jnp.finfo(x.dtype).min", "1e-9": "1e-4"},
    ),
    Row("cast-to-and-fro", "read the float32 value", TO_AND_FRO, {"low.astype(f32)": "wide"}),
    Row("cast-to-and-fro", "leave out the cast back", TO_AND_FRO, {"low.astype(f32)": "low"}),
    Row("double-rounding", "cast once, from float32", TWICE, {".astype(f16)": ""}),
    Row("double-rounding", "use one 16-bit dtype", TWICE, {"h.astype(f16)": "h.astype(bf16)"}),
    Row(
        "float32-product",
        "leave out its cast to float32, so that both operands are bfloat16",
        WIDE,
        {"h.astype(f32) @ w.astype(bf16).astype(f32)": "h @ w.astype(bf16)"},
    ),
    Row(
        "float32-product",
        "both operands are bfloat16, with preferred_element_type",
        LAST_WIDE,
        {
            "h.astype(f32) @ w.astype(bf16).astype(f32)": "float32_sums(h, w.astype(bf16))",
        },
    ),
    Row(
        "float32-product",
        "cast its operands with .astype(jnp.bfloat16)",
        OF_ARGUMENTS,
        {"w @ w": "w.astype(bf16) @ w.astype(bf16)"},
    ),
    Row(
        "mixed-product",
        "cast `w` with .astype(jnp.bfloat16)",
        ONE_ARGUMENT,
        {"h @ w)": "h @ w.astype(bf16))"},
    ),
    Row(
        "mixed-product",
        "cast it with .astype(jnp.bfloat16) where a bfloat16 array meets it",
        ARRAY,
        {"h @ table": "h @ table.astype(bf16)"},
    ),
    Row(
        "mixed-product",
        "leave out preferred_element_type, and cast the result with .astype instead",
        PREFERRED,
        {", preferred_element_type=f32)": ").astype(f32)"},
    ),
    Row(
        "float32-product",
        "cast what enters it, and its weights, with .astype(jnp.bfloat16)",
        MOSTLY_WIDE,
        {"x @ w @ w @ w": "x.astype(bf16) @ w.astype(bf16) @ w.astype(bf16) @ w.astype(bf16)"},
    ),
    Row("promotion", "write a Python number", NUMBER, {"np.sqrt(8)": "8**0.5"}),
    Row(
        "promotion",
        "cast it back with .astype(jnp.bfloat16) before other modules read it",
        GOES_ON,
        {"norm(two_layers(x, w).astype(f32))": "norm(two_layers(x, w).astype(f32)).astype(bf16)"},
    ),
    Row("promotion", "carry it in bfloat16", CARRIED, {"w).astype(f32), None": "w), None"}),
    Row("saved-float32", "leave out the cast to float32", SAVED, {"h.astype(f32)": "h"}),
    Row(
        "saved-float32",
        "compute it anew by save=products",
        SAVED,
        {"def loss": "policy = 'c=bf16,save=products'\n\ndef loss"},
    ),
    Row("saved-float32", "or jax.checkpoint", SAVED, {"def loss": "@jax.checkpoint\ndef loss"}),
    Row(
        "low-exp",
        "x.astype(jnp.float32) before exp",
        IN_BF16 + EXP,
        {"exp(x)": "exp(x.astype(f32)).astype(bf16)"},
    ),
    Row("low-exp", RULE, "policy = 'c=bf16; op.exp: bf16'\n" + EXP),
    Row(
        "low-exp",
        "x.astype(jnp.float32) before the code that makes the angles of cos",
        IN_BF16 + ANGLES,
        {"= x *": "= x.astype(f32) *", "99, 8), x.dtype": "99, 8), f32"},
    ),
    Row(
        "low-exp",
        "with jmpx.full_precision(): around the code that makes the angles of cos",
        BY_OPERATIONS + ANGLES_OF_PRODUCT,
        {"jax.named_scope('angles')": "jmpx.full_precision()"},
    ),
    Row("low-exp", RULE, BY_OPERATIONS + ANGLES_OF_PRODUCT),
    Row(
        "low-exp",
        "with jmpx.full_precision(): around exp",
        "policy = 'c=bf16; op.exp: bf16'\n" + EXP,
        {'jax.named_scope("gate")': "jmpx.full_precision()"},
    ),
    Row(
        "low-exp",
        "no cast of `x` to 16 bits: by=operations in the policy makes none",
        "policy = 'by=arguments,c=bf16'\n" + EXP,
        {"by=arguments": "by=operations"},
    ),
    Row(
        "low-sum",
        "x.astype(jnp.float32) before it, and the cast to 16 bits behind it",
        IN_BF16 + SUM,
        {"jnp.sum(x, 0, dtype=x.dtype)": "jnp.sum(x.astype(f32), 0).astype(x.dtype)"},
    ),
    Row(
        "low-collective",
        "x.astype(jnp.float32) before the sum",
        OWN_SUM,
        {"h, ": "h.astype(f32), "},
    ),
    Row(
        "low-collective",
        "r=f32 in the policy of jmpx.value_and_grad",
        STEP,
        {"r=bf16": "r=f32"},
        brings="float32-product",  # the sums of the backward pass, in float32
    ),
    Row(
        "low-collective",
        "x.astype(jnp.float32) before the sum",
        IN_BF16 + GRADIENTS_BY_HAND,
        {"psum(grads": "psum(grads.astype(f32)"},
    ),
    Row(
        "rounded-gradient",
        "the cast of the parameter inside of the function whose derivative this is",
        OWN_RULE,
        FLOAT32_RULE,
    ),
    Row(
        "low-carry",
        "start the carry in float32, as jnp.zeros(shape, jnp.float32), and add in float32",
        IN_BF16 + CARRY,
        {"jnp.zeros(8, x.dtype)": "jnp.zeros(8, f32)", "total @ w": "total.astype(bf16) @ w"},
    ),
    Row(
        "low-carry",
        "cast the value to 16 bits inside of the loop, so that the sum is in float32",
        CLOSED_OVER,
        {"low = w.astype(bf16)": "low = w", "h @ low": "h @ low.astype(bf16)"},
    ),
    Row(
        "low-linalg",
        "with jmpx.full_precision(): around the code that makes the matrix",
        BY_OPERATIONS + GAUSSIAN,
        {'jax.named_scope("kernel")': "jmpx.full_precision()"},
    ),
    Row("low-linalg", RULE, BY_OPERATIONS + GAUSSIAN),
    Row(
        "low-linalg",
        "x.astype(jnp.float32) before the code that makes the matrix",
        IN_BF16 + GAUSSIAN,
        {"x @ x.T": "x.astype(f32) @ x.astype(f32).T", "dtype=x.dtype": "dtype=f32"},
    ),
    Row(
        "low-linalg",
        "no cast of `w` to 16 bits: by=operations in the policy makes none",
        "policy = 'by=arguments,c=bf16'\n" + GIVEN,
        {"by=arguments": "by=operations"},
    ),
    Row(
        "rounded-integer",
        "x.astype(jnp.float32) in place of the cast, and 16 bits behind the arithmetic on it",
        IN_BF16 + INTEGER,
        {"None].astype(x.dtype)": "None].astype(f32)"},
    ),
    Row(
        "rounded-integer",
        "with jmpx.full_precision(): around the arithmetic on it",
        BY_OPERATIONS + INTEGERS_BY_PRODUCT,
        {"    h = times": "    with jmpx.full_precision(): h = times"},
    ),
    Row(
        "rounded-target",
        "no cast of `y` to 16 bits: by=operations in the policy makes none",
        "policy = 'by=arguments,c=bf16'\n" + TARGET,
        {"by=arguments": "by=operations"},
    ),
    Row(
        "platform-product",
        "matmul=highest in the default policy",
        "policy = 'c=f32'\n" + FLOAT32,
        {"'c=f32'": "'c=f32,matmul=highest'"},
        "tpu",
    ),
    Row(
        "platform-product",
        "jax.default_matmul_precision('highest')",
        FLOAT32,
        {"def loss": "@jax.default_matmul_precision('highest')\ndef loss"},
        "gpu",
    ),
    Row("platform-product", RULE, "policy = 'c=bf16; */head: c=f32'\n" + FULL_HEAD, {}, "tpu"),
    Row(
        "platform-product",
        "precision='highest' of the product",
        WIDE.replace("w.astype(bf16).astype(f32)", "w"),
        {"h.astype(f32) @ w": "jnp.matmul(h.astype(f32), w, precision='highest')"},
        "tpu",
    ),
]

# A kernel of cuDNN, which is traced only where there is one.
FUSED = Row(
    "unfused-attention",
    "jax.nn.dot_product_attention(q, k, v, implementation='cudnn')",
    ATTENTION,
    {
        "scores = jnp.einsum": "fused = jax.nn.dot_product_attention\n    jnp.einsum",
        """jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)""": (
            "fused(q, k, v, implementation='cudnn')"
        ),
    },
    "gpu",
)
numbers = itertools.count()


def audited(source, platform, folder):
    """The findings in a program, which is a module of its own: so its lines are the user's."""
    name = f"advised_{next(numbers)}"
    path = folder / f"{name}.py"
    path.write_text(PREAMBLE + source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loss = jmpx.apply_policy(module.loss, module.policy) if module.policy else module.loss
    return found(loss, *module.args, platform=platform)


def edited(row, finding):
    source = row.source
    if row.advice == RULE:
        (policy,) = (line for line in source.splitlines() if line.startswith("policy = "))
        return source.replace(policy, f"{policy[:-1]}; {finding.rule}'")
    for old, new in row.edits.items():
        assert old in source
        source = source.replace(old, new)
    return source


def worst(findings, kind):
    return min((SEVERITIES.index(f.severity) for f in findings if f.name == kind), default=9)


def is_about(finding, row):
    text = finding.rule if row.advice == RULE else finding.advice
    return (
        finding.name == row.kind
        and bool(text)
        and (row.advice in (RULE, text) or row.advice in text)
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}: {row.advice}")
def test_advice_that_is_followed_mends(row, tmp_path):
    findings = audited(row.source, row.platform, tmp_path)
    about = [finding for finding in findings if is_about(finding, row)]
    assert about, findings
    after = audited(edited(row, about[0]), row.platform, tmp_path)
    assert worst(after, row.kind) > worst(about, row.kind), after
    # Nothing worse, of any kind, took its place.
    new = {f.name for f in after} - {row.brings, *(f.name for f in findings)}
    assert all(worst(after, kind) > worst(about, row.kind) for kind in new), after


def test_the_kernel_of_an_attention_is_one_that_jax_knows(tmp_path):
    findings = audited(FUSED.source, FUSED.platform, tmp_path)
    (finding,) = (finding for finding in findings if is_about(finding, FUSED))
    try:
        after = audited(edited(FUSED, finding), FUSED.platform, tmp_path)
        assert FUSED.kind not in [finding.name for finding in after]
    except RuntimeError as error:  # a machine without it
        assert "cuDNN" in str(error)


def test_each_kind_has_a_row():
    assert {row.kind for row in [*ROWS, FUSED]} == {*KINDS}
