"""Reports of audits for tests, as data."""

import dataclasses

from jmpx._inspect.audit.data import Cast, Finding, Products, Scope
from jmpx._inspect.audit.report import Audit
from jmpx._jaxprs.places import Place

POLICY = "params=float32,compute=bfloat16,output=float32"
LEAK = Finding(
    "mixed-product",
    "high",
    "A matrix product multiplies float32 by bfloat16, because float32 positions were added.",
    Place("examples/equinox/vit.py", 88, "__call__"),
    "vit/blocks_0/attention",
    "*/blocks_0/attention: bf16",
    4,
    3_210_000_000,
    0,
)
SAVED = Finding(
    "saved-float32",
    "medium",
    "A float32 value is saved for the backward pass, where bfloat16 would take half of it.",
    Place("examples/equinox/vit.py", 91, "__call__"),
    "vit/mlp",
    "call .astype(x.dtype) on it",
    1,
    0,
    48 << 20,
)
EXP = Finding("low-exp", "low", "An exp in bfloat16 has 3 digits.", None, "", "op.exp: full")
REPORT = Audit(
    title="loss_fn",
    is_step=False,
    platform=None,
    products=(
        Products("bfloat16 x bfloat16", 9_000_000_000, 124),
        Products("float32 x bfloat16", 3_000_000_000, 48),
    ),
    saved={"bfloat16": 340 << 20, "float32": 48 << 20},
    casts=(Cast("float32", "bfloat16", 36, 88 << 20), Cast("bfloat16", "float32", 1, 20 << 20)),
    scopes=(
        Scope("", "", "", 12, "float32", 0),
        *(Scope(f"vit/blocks_{i}/norm", "LayerNorm", "", 9, "float32", 0) for i in range(12)),
        *(Scope(f"vit/blocks_{i}/mlp", "MLP", POLICY, 5, "bfloat16", 10**9) for i in range(12)),
    ),
    findings=(LEAK, SAVED, EXP),
    has_while=False,
)
CLEAN = dataclasses.replace(REPORT, findings=(), products=REPORT.products[:1])
