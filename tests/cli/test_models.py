"""`python -m jmpx --model`: which rule each module of a model has."""

import functools
import sys
import types

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import run_python
from helpers.four_frameworks import (
    BATCH,
    FRAMEWORKS,
    HAIKU,
    LINEN,
    WIDTHS,
    X,
    call,
    in_words_of,
    products,
)
from helpers.products import products_of

import jmpx
import jmpx.equinox
import jmpx.haiku
from jmpx.__main__ import main

PATHS = {"first": "first", "inner": "block/inner", "outer": "block/outer", "head": "head"}
KEY = jax.random.key(0)
MADE = {
    "haiku": (HAIKU.init, (KEY, X)),
    "linen": (LINEN.init, (KEY, X)),
    "nnx": FRAMEWORKS["nnx"][1],
    "equinox": FRAMEWORKS["equinox"][1],
}
ORDER = ["net", "(outermost)", "first", "block", "inner", "outer", "head"]
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


@pytest.fixture
def ask(capsys, monkeypatch):
    """Calls `main` on what a function returns; returns the tables and the lines after them."""

    def run(made, policy):
        module = types.ModuleType("models_of_a_test")
        vars(module)["make"] = made if isinstance(made, types.FunctionType) else lambda: made
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert main(["--model", f"{module.__name__}:make", policy]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return read(printed.out)

    return run


def read(output):
    """Returns by table the rows, each a dict by the names of its columns; and the other lines."""
    tables, others = {}, []
    for block in output.split("\n\n")[1:]:
        title, *lines = block.splitlines()
        if not title.endswith(":"):
            others += [title, *lines]
            continue
        header = lines[0]
        starts = [header.index(name) for name in header.split()]
        cuts = list(zip(starts, [*starts[1:], None], strict=True))
        tables[title] = [
            {name: line[a:b].strip() for name, (a, b) in zip(header.split(), cuts, strict=True)}
            for line in lines[1:]
        ]
    return tables, others


def only(tables):
    ((_, rows),) = tables.items()
    return rows


def by_layer(framework, rows):
    """Returns the rows of the four layers by their names."""
    root = in_words_of(framework, "<net/>")
    return {
        layer: next(row for row in rows if row["path"] == root + path)
        for layer, path in PATHS.items()
    }


# The rules of a model's modules


ISLANDS = [
    "by=modules,c=bf16,o=f32",
    "c=bf16; <Linear>: full",
    "c=f32; block: bf16",
    "c=bf16; <net/>block: c=f32,o=f32; */inner: bf16; */head: o=f32",
    "c=bf16,m=high; *: c=f32; */head: m=highest; <net/>block/*: c=bf16,o=f32",
    "c=bf16; <Own>Base: full; <Own>Head: full",
]


@pytest.mark.sampled(5)
@every_framework
@pytest.mark.parametrize("policy", ISLANDS)
def test_the_dtypes_are_those_in_which_the_products_run(framework, policy, ask):
    policy = in_words_of(framework, policy).replace("; block:", "; */block:")
    run, model, adapt, _ = FRAMEWORKS[framework]
    ran = products(adapt(policy), model, X)
    tables, _ = ask(MADE[framework], policy)
    rows = by_layer(framework, only(tables))
    assert {layer: {row["compute"]} for layer, row in rows.items()} == ran


ALGORITHMS = [
    "m=high; */head: m=highest; */inner: m=default",
    "c=bf16,o=f32; <net/>block: c=f32,m=highest; */outer: m=high",
    "f32; <Own>Head: m=BF16_BF16_F32_X3; */first: m=tensorfloat32",
]
SPELLED = {"": "DEFAULT", "tensorfloat32": "HIGH", "BF16_BF16_F32_X3": "bf16 f32 x3"}


@pytest.mark.sampled(5)
@every_framework
@pytest.mark.parametrize("policy", ALGORITHMS)
def test_the_algorithms_are_those_by_which_the_products_multiply(framework, policy, ask):
    policy = in_words_of(framework, policy).replace("; block:", "; */block:")
    _, model, adapt, _ = FRAMEWORKS[framework]
    multiply = {
        layer: {product.how for product in ran if product.sizes - {BATCH} == set(widths)}
        for ran in [products_of(adapt(policy), model, X)]
        for layer, widths in WIDTHS.items()
    }
    rows = by_layer(framework, only(ask(MADE[framework], policy)[0]))
    listed = {layer: row["matmul"] for layer, row in rows.items()}
    assert {layer: {SPELLED.get(m, m.upper())} for layer, m in listed.items()} == multiply


@every_framework
def test_each_module_is_listed_with_its_rule(framework, ask):
    text = "c=bf16,o=f32; <Own>Base: c=f32; */outer: bf16; */head?: m=highest"
    tables, others = ask(MADE[framework], in_words_of(framework, text))
    rows = sorted(only(tables), key=lambda row: ORDER.index(row["path"].rpartition("/")[2]))
    assert [row["rule"] for row in rows] == [
        *("default", "inherited", in_words_of(framework, "<Own>Base")),
        *("inherited", "*/outer", "*/head?"),
    ]
    assert [row["compute"] for row in rows] == [
        *("bfloat16", "bfloat16", "float32", "float32", "bfloat16", "bfloat16")
    ]
    assert [row["output"] for row in rows] == [
        *("float32", "bfloat16", "bfloat16", "float32", "float32", "bfloat16")
    ]
    assert [row["matmul"] for row in rows] == ["", "", "", "", "", "highest"]
    assert rows[0]["path"] == ("net" if framework == "haiku" else "(outermost)")
    assert [row["class"].lower().removeprefix(framework) for row in rows][::5] == ["net", "head"]
    creates = framework in ("haiku", "linen")
    assert all(("params" in row) == creates for row in rows)
    assert others == []


@every_framework
def test_rules_that_are_in_force_nowhere_are_named_with_what_is_near(framework, ask):
    text = "c=bf16; <Linear>x: full; */hed: full; No?: full; op.exp: f32"
    _, others = ask(MADE[framework], in_words_of(framework, text))
    near = in_words_of(framework, "<Linear>")
    path = in_words_of(framework, "<net/>head")
    assert others == [
        f"The rule '{near}x: compute=float32' matched no class; did you mean '{near}'?",
        f"The rule '*/hed: compute=float32' matched no path; did you mean '{path}'?",
        "The rule 'op.exp: compute=float32' matched no module, as rules for operations hold "
        "by=operations and in jmpx.autocast alone: write by=operations, or 'op.exp?' where the map "
        "is for modules, too.",
    ]


@every_framework
def test_policies_of_classes_are_told_from_rules(framework, ask):
    model = MADE[framework]
    linear = {
        "haiku": hk.Linear,
        "linen": nn.Dense,
        "nnx": nnx.Linear,
        "equinox": type(FRAMEWORKS["equinox"][1].first),
    }[framework]
    with jmpx.push_policy(linear, "c=f16,o=bf16"):
        tables, _ = ask(model, "c=bf16,m=high; */inner: full")
    rows = by_layer(framework, only(tables))
    assert rows["first"] == {**rows["first"], "rule": "class policy", "compute": "float16"}
    assert rows["first"]["output"] == "bfloat16" and rows["first"]["matmul"] == "high"
    assert rows["inner"]["rule"] == "*/inner" and rows["head"]["rule"] == "inherited"


def statistics_of(framework):
    key, rngs = jax.random.key(0), nnx.Rngs(0)
    return {
        "haiku": lambda: (
            hk.transform_with_state(lambda x, t: hk.BatchNorm(True, True, 0.9)(x, t)).init,
            (KEY, X, True),
        ),
        "linen": lambda: (nn.BatchNorm(use_running_average=False).init, (KEY, X)),
        "nnx": lambda: nnx.BatchNorm(3, rngs=rngs),
        "equinox": lambda: eqx.nn.Sequential(
            [eqx.nn.Linear(3, 3, key=key), eqx.nn.BatchNorm(3, "batch", mode="ema")]
        ),
    }[framework]


@every_framework
@pytest.mark.usefixtures("standard_promotion")
def test_modules_that_keep_the_dtype_of_their_statistics_say_so(framework, ask):
    tables, _ = ask(statistics_of(framework), "by=modules,c=bf16")
    own = [row for row in only(tables) if row["rule"] == "its state"]
    names = {"haiku": ["ExponentialMovingAverage"] * 2, "equinox": ["BatchNorm"]}
    assert [row["class"] for row in own] == names.get(framework, [])
    assert all(row["compute"] == "float32" and row["output"] == "bfloat16" for row in own)


def with_fields(framework, dtype=jnp.float32):
    class Linen(nn.Module):
        dtype: type

        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="last")(nn.Dense(9, name="first", dtype=self.dtype)(x))

    class NNX(nnx.Module):
        def __init__(self, rngs):
            self.dtype = dtype
            self.first = nnx.Linear(3, 9, dtype=dtype, rngs=rngs)
            self.last = nnx.Linear(9, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(self.first(x))

    return {"linen": lambda: (Linen(dtype).init, (KEY, X)), "nnx": lambda: NNX(nnx.Rngs(0))}[
        framework
    ]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize("policy", ["full", "c=f16"])
def test_a_field_decides_whether_it_is_narrower_or_another_format(framework, policy, ask):
    tables, _ = ask(with_fields(framework, jnp.bfloat16), f"by=modules,{policy}")
    found = {row["path"]: (row["rule"], row["compute"]) for row in only(tables)}
    (first,) = (path for path in found if path.endswith("first"))
    assert found[first] == ("its dtype field", "bfloat16")


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_fields_that_decide_and_fields_that_are_set_say_so(framework, ask):
    tables, others = ask(with_fields(framework), "by=modules,c=bf16")
    assert [(row["rule"], row["compute"], row["output"]) for row in only(tables)] == [
        ("default", "bfloat16", "bfloat16"),
        ("its dtype field", "float32", "float32"),
        ("inherited", "bfloat16", "bfloat16"),
    ]
    assert len(others) == 1 and others[0].startswith("The dtype field of 1 of 2 layers")
    rule = f"{framework.capitalize() if framework == 'linen' else 'NNX'}: c=bf16"
    tables, others = ask(with_fields(framework), f"c=bf16; {rule}")
    assert [(row["rule"], row["compute"]) for row in only(tables)] == [
        (f"{rule.partition(':')[0]} (sets its dtype field)", "bfloat16"),
        ("inherited (sets its dtype field)", "bfloat16"),
        ("inherited", "bfloat16"),
    ]
    assert others == []


def huge(framework):
    size, key = 10**6, jax.random.key(0)
    x = jax.ShapeDtypeStruct((2, size), jnp.float32)
    return {
        "haiku": lambda: (hk.transform(lambda x: hk.Linear(size)(x)).init, (KEY, x)),
        "linen": lambda: (nn.Dense(size).init, (KEY, x)),
        "nnx": lambda: nnx.eval_shape(lambda: nnx.Linear(size, size, rngs=nnx.Rngs(0))),
        "equinox": lambda: eqx.filter_eval_shape(eqx.nn.Linear, size, size, key=key),
        "autocast": lambda: (lambda w, x: x @ w, (jax.ShapeDtypeStruct((size, size), "f4"), x)),
    }[framework]


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "autocast"])
def test_nothing_is_computed(framework, ask):
    way = "operations" if framework == "autocast" else "modules"
    tables, others = ask(huge(framework), f"by={way},c=bf16")  # weights of 4 terabytes
    row = only(tables)[0]
    assert (row.get("compute") or row["dtypes"]) in ("bfloat16", "bf16") and others == []


def test_functions_may_run_modules_in_their_own_way(ask):
    model = nn.Sequential([nn.Dense(4), nn.Dropout(0.5, deterministic=False)])

    @jax.jit
    def init(x):
        return model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    init(X)  # a trace that JAX keeps
    tables, _ = ask(lambda: (init, [X]), "c=bf16; Dense: full")
    assert [row["rule"] for row in only(tables)] == ["default", "Dense", "inherited"]

    network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
    params = jax.eval_shape(network.init, jax.random.key(0), X)
    tables, _ = ask(lambda: (network.apply, (params, X)), "c=bf16; Linear: full")
    assert [row["rule"] for row in only(tables)] == ["Linear"]


def test_modules_among_the_arguments_of_a_function(ask):
    equinox, linear = MADE["equinox"], nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    made = (lambda models, x: None, ({"a": equinox, "b": linear}, X))
    tables, others = ask(made, "c=bf16; Linear: full; */inner: full")
    names = ["under jmpx.equinox.with_policies:", "under jmpx.apply_policy:"]
    assert list(tables) == names
    assert [len(rows) for rows in tables.values()] == [6, 1]
    assert others == []  # each rule matched in one of the two
    tables, others = ask(made, "by=modules,c=bf16; Linear: full; Lineer: full; */inner: bf16")
    assert list(tables) == names
    assert others == ["The rule 'Lineer: compute=float32' matched no class; did you mean 'Linear'?"]


TRANSFORMED = {
    "partial": functools.partial,
    "method": lambda model: model.__call__,
    "model": lambda model: model,
}


@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("framework", ["equinox", "nnx"])
def test_a_model_in_a_transformed_function_is_found(framework, transform, ask):
    made = (TRANSFORMED[transform](MADE[framework]), (X,))
    tables, _ = ask(lambda: made, "c=bf16; */head: full")
    rows = by_layer(framework, only(tables))
    assert rows["head"]["compute"] == "float32" and len(only(tables)) == 6
    assert list(tables) == [list(ask(lambda: MADE[framework], "c=bf16; */head: full")[0])[0]]


def test_the_modules_in_an_equinox_container_inherit_from_it(ask):
    class Box(eqx.Module):
        norm: eqx.nn.BatchNorm
        layers: list

    class Outer(eqx.Module):
        box: Box

        def __call__(self, x):
            return self.box.layers[0](x)

    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    box = Box(eqx.nn.BatchNorm(3, "batch", mode="ema"), [linear])
    for model in (box, Outer(box)):
        tables, _ = ask(lambda model=model: model, "c=bf16; Box: c=f16; */0: o=f32")
        found = {row["class"]: (row["rule"], row["compute"], row["output"]) for row in only(tables)}
        assert found["Box"] == ("Box", "float16", "bfloat16")
        assert found["BatchNorm"] == ("its state", "float32", "bfloat16")
        assert found["Linear"] == ("*/0", "bfloat16", "float32")


def test_a_module_that_two_policies_surround_has_two_rows(ask):
    class Outer(hk.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __call__(self, x):
            return self.inner(x)

    def run(x):
        inner = hk.Linear(3)
        return Outer(inner)(x), inner(Outer(inner)(x)), inner(x)

    tables, _ = ask((hk.transform(run).init, (KEY, X)), "c=bf16,o=f32; */outer_1: full")
    found = [(r["path"], r["rule"], r["compute"]) for r in only(tables) if r["class"] == "Linear"]
    assert found == [
        ("linear", "inherited", "bfloat16"),
        ("linear", "inherited", "float32"),
        ("linear", "default", "bfloat16"),
    ]


def router(w, x):
    with jax.named_scope("body"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("router"):
        return jax.nn.softmax(h @ w[:3])


def test_a_function_without_modules_shows_scopes_and_operations(ask):
    w = jnp.ones((3, 3))
    text = "by=operations,c=bf16; */router: c=f32,m=highest; op.tanh: full; */rooter: full"
    text += "; op.softmax: full"
    tables, others = ask((router, (w, X)), text)
    assert {row["scope"]: row["dtypes"] for row in only(tables)} == {
        "body": "bf16",
        "router": "f32",
    }
    assert [line.partition(" matched ")[2] for line in others] == [
        "no scope; did you mean 'router'?",
        "no operation, as 'softmax' is a function: write rules for the primitives that it runs, "
        "which jax.make_jaxpr shows, such as 'op.dot_general' and 'op.exp'.",
    ]


# The way in which a map is applied


@pytest.mark.parametrize(
    ("policy", "line"),
    {
        "c=bf16,o=f32": "bfloat16 before the call; no rules hold",
        "c=f16,o=bf16,by=arguments": "float16 before the call; no rules hold",
    }.items(),
)
@every_framework
def test_by_arguments_is_one_line(framework, policy, line, ask):
    tables, others = ask(MADE[framework], policy)
    assert tables == {}
    assert others == [f"by arguments: all floating arguments are cast to {line}"]


OPERATIONS = [
    "by=operations,c=bf16",
    "by=operations,c=bf16,save=products; <Linear>: full; */head: bf16",
    "by=operations,c=f32; */block: bf16; */inner?: full; No?: full",
]


@every_framework
@pytest.mark.parametrize("policy", OPERATIONS)
def test_by_operations_the_modules_are_in_the_dtypes_of_their_products(framework, policy, ask):
    policy = in_words_of(framework, policy)
    run, model, _, _ = FRAMEWORKS[framework]
    ran = products(jmpx.apply_policy(run, policy), model, X)
    for made in ((run, (model, X)), *(((model, (X,)),) if run is call else ())):
        tables, others = ask(made, policy)
        assert list(tables) == ["by operations, under autocast:"] and others == []
        rows = [{**row, "path": row["scope"].partition(" ")[0]} for row in only(tables)]
        rows = by_layer(framework, rows)
        found = {layer: jnp.dtype(long(row["dtypes"])).name for layer, row in rows.items()}
        assert {layer: {dtype} for layer, dtype in found.items()} == ran
        linear = in_words_of(framework, "(<Linear>)")
        assert [row["scope"].partition(" ")[2] for row in rows.values()][:3] == [linear] * 3


def long(dtypes):
    """Returns the first one of short names of dtypes."""
    return jmpx.get_policy(dtypes.partition(",")[0]).compute_dtype


def test_rules_for_operations_alone_are_by_operations(ask):
    tables, others = ask((call, (MADE["equinox"], X)), "c=bf16; op.dot_general: f32; op.exp: f16")
    assert list(tables) == ["by operations, under autocast:"]
    head = by_layer("equinox", [{**r, "path": r["scope"].split()[0]} for r in only(tables)])["head"]
    assert head["dtypes"].startswith("f32") and len(others) == 1 and "op.exp" in others[0]


def test_a_loss_is_not_differentiated(ask):
    made = (lambda w, x: jnp.mean(x @ w) + 1.0, (jnp.ones((3, 3)), X))
    tables, _ = ask(made, "by=operations,c=bf16")
    (row,) = only(tables)
    assert int(row["operations"]) < 8


class Noisy(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.noise = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.noise(self.norm(x))


@pytest.mark.usefixtures("standard_promotion")
def test_models_with_state_and_random_numbers_by_operations(ask):
    made = [
        statistics_of("haiku")(),
        (hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x)).init, (KEY, X)),
        (Noisy(), (X,)),
    ]
    for each in made:
        tables, _ = ask(each, "by=operations,c=bf16")
        assert only(tables)


def test_what_by_operations_needs(capsys, monkeypatch):
    for made in (MADE["equinox"], MADE["nnx"]):
        monkeypatch.setattr(sys.modules[__name__], "make", lambda made=made: made, raising=False)
        assert main(["--model", f"{__name__}:make", "by=operations,c=bf16"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "of which something runs by operations" in line and "the pair of a call" in line


@pytest.mark.thorough
def test_as_a_command(tmp_path):
    (tmp_path / "net.py").write_text(
        "import equinox as eqx, jax\n"
        "def make():\n"
        "    return eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))\n"
    )
    arguments = ("-W", "error", "-m", "jmpx", "--model", "net:make", "c=bf16,o=f32; */0: full")
    result = run_python(*arguments, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    tables, others = read(result.stdout)
    assert [row["rule"] for row in only(tables)] == ["default", "*/0", "inherited"]
    assert others == []
