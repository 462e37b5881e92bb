"""Random policies, policy maps and values of configurations, and what reading one of them gives."""

from hypothesis import strategies as st

import jmpx
from jmpx._base.dtypes import dtype_names
from jmpx._base.matmul import matmul_names

NAMES = [name for name in dtype_names() if name != "half"]
REDUCE_NAMES = ["f16", "bf16", "f32", "f64"]
SELECTORS = ["LayerNorm", "haiku.BatchNorm", "*/head/*", "mlp/linear", "op.exp", "*", "*/a?", "C"]


@st.composite
def policies(draw):
    dtypes = [draw(st.sampled_from(NAMES)) for _ in range(3)]
    matmul = draw(st.none() | st.sampled_from(matmul_names()))
    reduce = draw(st.none() | st.sampled_from(REDUCE_NAMES))
    return jmpx.Policy(*dtypes, matmul_precision=matmul, reduce_dtype=reduce)


@st.composite
def rules(draw):
    keys = draw(st.sets(st.sampled_from(["params", "compute", "output", "matmul"]), min_size=1))
    fields = {key: draw(st.sampled_from(NAMES)) for key in sorted(keys - {"matmul"})}
    if "matmul" in keys:
        fields["matmul"] = draw(st.sampled_from(matmul_names()))
    selector, optional = draw(st.sampled_from(SELECTORS)), draw(st.booleans())
    return jmpx.types.Rule(selector, **fields, optional=optional or selector.endswith("?"))


def policy_maps():
    return st.builds(
        lambda default, rules: jmpx.PolicyMap(default, tuple(rules)),
        policies(),
        st.lists(rules(), max_size=4),
    )


WORDS = [
    "policy", "rules", "loss_scale", "select", "optional", "type", "init", "period", "max", "min",
    "params", "p", "compute", "c", "C ", "output", "matmul", "m", "reduce", "dynamic", "static",
    "static=8", "none", "auto", "bf16", "f16", "full", "highest", "c=bf16", "LayerNorm: full",
    "c=bf16; X?: f32", "c=f16 | dynamic", "X", "*/a/*", "2**15", "1e4", "", "|", ";", ":",
]  # fmt: skip


def any_value():
    """Nested dicts and lists of what YAML has, in which the words of the grammar are frequent."""
    words = st.sampled_from(WORDS)
    leaves = words | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    keys = words | st.text(max_size=4) | st.integers() | st.booleans() | st.none()

    def grow(values):
        return (
            st.lists(values, max_size=3)
            | st.dictionaries(keys, values, max_size=4)
            | st.dictionaries(words, values, max_size=4)
        )

    return st.recursive(leaves, grow, max_leaves=12)


def given_value_or_sentence(read, value):
    """Returns what reading a value gives: an object, or the sentence of the error."""
    try:
        return read(value)
    except (ValueError, TypeError) as error:
        sentence = str(error)
        assert len(sentence.splitlines()) == 1 and sentence[-1] in ".?", sentence
        return sentence


@st.composite
def loss_scales(draw):
    scale = draw(st.floats(2**-20, 2**40, width=32) | st.sampled_from([1.0, 1024.0, 2.0**15]))
    kind = draw(st.sampled_from(["none", "static", "dynamic"]))
    if kind == "none":
        return jmpx.NoOpLossScale()
    if kind == "static":
        return jmpx.StaticLossScale(scale)
    low = draw(st.none() | st.floats(2**-20, scale))
    high = draw(st.none() | st.floats(scale, 2**60))
    fields = {
        "loss_scale": scale,
        "counter": draw(st.none() | st.integers(0, 1000)),
        "period": draw(st.none() | st.integers(1, 2**31 - 1)),
        "factor": draw(st.none() | st.floats(1.5, 100) | st.integers(2, 64)),
        "min_loss_scale": min(1.0, scale) if low is None else low,
        "max_loss_scale": high,
        "backoff_factor": draw(st.none() | st.floats(0.125, 0.9375)),
        "hysteresis": draw(st.none() | st.integers(1, 5)),
    }
    return jmpx.DynamicLossScale(**{k: v for k, v in fields.items() if v is not None})


def mixed_precisions():
    return st.builds(jmpx.MixedPrecision, policy_maps(), loss_scales())


@st.composite
def nearly_mixed_precisions(draw):
    """The mappings of mixed precisions, up to two places of which have any value instead."""
    mapping = draw(mixed_precisions()).to_dict()
    for _ in range(draw(st.integers(0, 2))):
        node, key = mapping, draw(st.sampled_from(list(mapping)))
        while isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
            node = node[key]
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = draw(st.sampled_from(keys))
        node[key] = draw(any_value())
    return mapping
