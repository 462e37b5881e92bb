"""`python -m jmpx`: what a policy string means, and which rule each module of a model has."""

import contextlib
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
    FRAMEWORKS,
    HAIKU,
    LINEN,
    X,
    in_words_of,
    products,
)

import jmpx
import jmpx.equinox
import jmpx.haiku
from jmpx.__main__ import main

PATHS = {"first": "first", "inner": "block/inner", "outer": "block/outer", "head": "head"}
MADE = {
    "haiku": (HAIKU, (X,)),
    "linen": (LINEN, (X,)),
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
        header = lines[0].replace("runs in", "runs_in")
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


# The table of a policy map


def lines_of(capsys, policy):
    assert main([policy]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_shows_what_each_rule_means(capsys):
    lines = lines_of(capsys, "c=bf16,o=f32; BatchNorm: full; */head/*: o=f16")
    words = [line.split() for line in lines]
    assert words[0] == ["params", "compute", "output"]
    assert words[1] == ["default", "float32", "bfloat16", "float32"]
    assert words[2] == ["BatchNorm", "float32", "float32", "bfloat16", "*"]
    assert words[3] == ["*/head/*", "float32", "bfloat16", "*", "float16"]
    assert lines[4] == "* the compute dtype of what surrounds the call: here, of the default"


def test_the_table_shows_the_algorithm_and_the_reduction_where_they_are_set(capsys):
    policy = "c=bf16,o=f32,m=high,r=bf16; BatchNorm: full; */router: c=f32,o=f32,m=highest"
    lines = lines_of(capsys, policy)
    words = [line.split() for line in lines]
    assert words[0] == ["params", "compute", "output", "matmul", "reduce"]
    assert words[1] == ["default", "float32", "bfloat16", "float32", "high", "bfloat16"]
    assert words[2] == ["BatchNorm", "float32", "float32", "bfloat16", "*", "high", "*"]
    assert words[3] == ["*/router", "float32", "float32", "float32", "highest"]
    assert lines[4].startswith("* the compute dtype, or matmul, of what surrounds")

    words = [line.split() for line in lines_of(capsys, "c=bf16; */a: m=high; */b: full")]
    assert words[0] == ["params", "compute", "output", "matmul"]
    assert words[1] == ["default", "float32", "bfloat16", "bfloat16", "-"]
    assert words[3] == ["*/b", "float32", "float32", "bfloat16", "*", "-", "*"]


def test_a_rule_for_an_operation_has_no_more_than_it_says(capsys):
    lines = lines_of(capsys, "c=bf16; op.exp: f32; op.dot_general: m=high")
    assert [line.split() for line in lines[2:4]] == [
        ["op.exp", "float32"],
        ["op.dot_general", "high"],
    ]


def test_the_table_shows_the_mark_of_optional_rules(capsys):
    lines = lines_of(capsys, "c=bf16; BatchNorm?: full; */head: o=f32;")
    assert lines[2].split() == ["BatchNorm?", "float32", "float32", "bfloat16", "*"]
    assert lines[3].startswith("*/head  ") and lines[-2].startswith("? no warning where")
    assert "?" not in "".join(lines_of(capsys, "c=bf16; BatchNorm: full"))


@pytest.mark.parametrize(
    ("string", "line"),
    {
        "c=bf16": "none (auto: no policy computes in float16)",
        "c=bf16; */x: f16 | auto": "dynamic,init=32768 (auto: a policy computes in float16)",
        "c=f16 | none": "none",
        "c=bf16|Static = 1e3": "static=1000",
        "c=f16; Linear: full | dynamic, init=2**10, hysteresis=2": (
            "dynamic,init=1024,hysteresis=2"
        ),
    }.items(),
)
def test_the_loss_scale_is_shown(string, line, capsys):
    assert lines_of(capsys, string)[-1] == f"loss scale: {line}"


# The rules of a model's modules


ISLANDS = [
    "c=bf16,o=f32",
    "c=bf16; <Linear>: full",
    "c=f32; block: bf16",
    "c=bf16; <net/>block: c=f32,o=f32; */inner: bf16; */head: o=f32",
    "c=bf16,m=high; *: c=f32; */head: m=highest; <net/>block/*: c=bf16,o=f32",
    "c=bf16; <Own>Base: full; <Own>Head: full",
]


@every_framework
@pytest.mark.parametrize("policy", ISLANDS)
def test_the_dtypes_are_those_in_which_the_products_run(framework, policy, ask):
    policy = in_words_of(framework, policy).replace("; block:", "; */block:")
    run, model, adapt, _ = FRAMEWORKS[framework]
    ran = products(adapt(policy), model, X)
    tables, _ = ask(MADE[framework], policy)
    rows = by_layer(framework, only(tables))
    assert {layer: {row["compute"]} for layer, row in rows.items()} == ran


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
    text = "c=bf16; <Linear>x: full; */hed: full; No?: full; */inner: f16; */block/*: full"
    text += "; op.exp: f32"
    _, others = ask(MADE[framework], in_words_of(framework, text))
    near = in_words_of(framework, "<Linear>")
    path = in_words_of(framework, "<net/>head")
    assert others == [
        f"The rule '{near}x: compute=float32' matched no class; did you mean '{near}'?",
        f"The rule '*/hed: compute=float32' matched no path; did you mean '{path}'?",
        "The rule 'op.exp: compute=float32' matched no module, as rules for operations are those "
        "of jmpx.autocast: give it the string, and write 'op.exp?' where one string serves both.",
        "The optional rule 'No?: compute=float32' matched no module.",
        "The rule '*/inner: compute=float16' is never the last one that matches a module.",
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
            hk.transform_with_state(lambda x, t: hk.BatchNorm(True, True, 0.9)(x, t)),
            (X, True),
        ),
        "linen": lambda: (nn.BatchNorm(use_running_average=False), (X,)),
        "nnx": lambda: nnx.BatchNorm(3, rngs=rngs),
        "equinox": lambda: eqx.nn.Sequential(
            [eqx.nn.Linear(3, 3, key=key), eqx.nn.BatchNorm(3, "batch", mode="ema")]
        ),
    }[framework]


@every_framework
@pytest.mark.usefixtures("standard_promotion")
def test_modules_that_keep_the_dtype_of_their_statistics_say_so(framework, ask):
    tables, _ = ask(statistics_of(framework), "c=bf16")
    own = [row for row in only(tables) if row["rule"] == "its statistics"]
    names = {"haiku": ["ExponentialMovingAverage"] * 2, "equinox": ["BatchNorm"]}
    assert [row["class"] for row in own] == names.get(framework, [])
    assert all(row["compute"] == "float32" and row["output"] == "bfloat16" for row in own)


def huge(framework):
    size, key = 10**6, jax.random.key(0)
    x = jax.ShapeDtypeStruct((2, size), jnp.float32)
    return {
        "haiku": lambda: (hk.transform(lambda x: hk.Linear(size)(x)), (x,)),
        "linen": lambda: (nn.Dense(size), (x,)),
        "nnx": lambda: nnx.eval_shape(lambda: nnx.Linear(size, size, rngs=nnx.Rngs(0))),
        "equinox": lambda: eqx.filter_eval_shape(eqx.nn.Linear, size, size, key=key),
        "autocast": lambda: (lambda w, x: x @ w, (jax.ShapeDtypeStruct((size, size), "f4"), x)),
    }[framework]


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "autocast"])
def test_nothing_is_computed(framework, ask):
    tables, others = ask(huge(framework), "c=bf16")  # weights of 4 terabytes
    assert next(iter(tables.values()))[0]["compute"] == "bfloat16" and others == []


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
    names = ["under jmpx.equinox.with_policies:", "under jmpx.flax.with_policies:"]
    assert list(tables) == names
    assert [len(rows) for rows in tables.values()] == [6, 1]
    assert others == []  # each rule matched in one of the two


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

    tables, _ = ask((hk.transform(run), (X,)), "c=bf16,o=f32; */outer_1: full")
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
    text = "c=bf16; */router: c=f32,m=highest; op.tanh: full; */rooter: full; op.softmax: full"
    tables, others = ask((router, (w, X)), text)
    scopes, operations = tables.values()
    assert {row["scope"]: (row["rule"], row["compute"], row["matmul"]) for row in scopes} == {
        "(outermost)": ("default", "bfloat16", ""),
        "body": ("default", "bfloat16", ""),
        "router": ("*/router", "float32", "highest"),
    }
    ran = {row["operation"]: (row["rule"], row["runs_in"]) for row in operations}
    assert ran["tanh"] == ("op.tanh", "float32")
    assert ran["dot_general"] == ("", "bfloat16 float32") and ran["exp"] == ("", "float32")
    assert [line.partition(" matched ")[2] for line in others] == [
        "no scope; did you mean 'router'?",
        "no operation, as 'softmax' is none of JAX's primitives: write 'op.exp' and "
        "'op.reduce_sum'.",
    ]


def test_an_algorithm_that_jax_ignores_is_noted(ask):
    model = eqx.nn.Conv2d(3, 3, 3, key=jax.random.key(0))
    _, (line,) = ask(model, "c=f32,m=BF16_BF16_F32_X3")
    assert "matmul=BF16_BF16_F32_X3 does not hold for convolutions" in line


# Wrong usage


def fails():
    raise RuntimeError("no\nsuch  file")


def leaves():
    sys.exit("--data is missing")


def own_haiku():
    def run(x):
        with jmpx.haiku.policies("c=f16"):
            return hk.Linear(3)(x)

    return hk.transform(run), (X,)


def own_equinox():
    return lambda x: jmpx.equinox.with_policies(MADE["equinox"])(x), (X,)


RESULTS = "to return a module of Equinox or NNX, or a pair of"
WRONG = {
    "model": ("Expected --model pkg.module:make, got 'model'",),
    ":make": ("Expected --model pkg.module:make, got ':make'",),
    "no_such_module:make": ("Cannot import 'no_such_module' of --model", "ModuleNotFoundError"),
    "THIS:mkae": ("has no 'mkae'; did you mean 'make'?",),
    "THIS:MADE": ("Expected --model to name a function", "got a value of type dict."),
    "THIS:fails": (
        "'fails' of --model",
        "failed: RuntimeError: no such file (",
        "command_line.py:",
    ),
    "THIS:leaves": ("failed: SystemExit: --data is missing (",),
    "THIS:router": ("failed: TypeError", "missing 2 required positional arguments"),
    "THIS:own_haiku": (
        "runs them under its own jmpx.haiku.policies('params=float32,compute=float16",
    ),
    "THIS:own_equinox": ("runs them under its own jmpx.equinox.with_policies('')",),
}
RETURNED = {
    "a value of type NoneType": None,
    "a value of type list": [1],
    "a value of type tuple": (1, 2, 3),
    "a LinenNet and no arguments": LINEN,
    "a Transformed and no arguments": HAIKU,
    "a function and no arguments": lambda: router,
    "a function and arguments of type ArrayImpl": (router, X),
}


def make():
    return None


def error_of(capsys, *arguments):
    """Returns the one line of an error."""
    with contextlib.suppress(SystemExit):
        assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.endswith("\n")
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize("target", WRONG)
def test_a_wrong_model_is_one_line(target, capsys):
    line = error_of(capsys, "--model", target.replace("THIS", __name__), "c=bf16")
    assert all(part in line for part in WRONG[target])


@pytest.mark.parametrize("got", RETURNED)
def test_a_function_that_returns_something_else(got, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make", lambda: RETURNED[got])
    if got == "a function and no arguments":
        monkeypatch.setattr(sys.modules[__name__], "make", RETURNED[got])
    line = error_of(capsys, "--model", f"{__name__}:make", "c=bf16")
    assert RESULTS in line and line.endswith(f"got {got}.")


def test_an_error_while_the_model_is_traced(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make", lambda: (router, (X, X)))
    line = error_of(capsys, "--model", f"{__name__}:make", "c=bf16")
    assert line.startswith("Tracing the model failed: TypeError: ") and "command_line.py:" in line


@pytest.mark.parametrize("package", ["haiku", "equinox", "flax"])
def test_a_missing_framework(package, capsys, monkeypatch):
    for name in [*sys.modules]:
        if name.split(".")[0] == package or name.startswith(
            (f"jmpx.{package}", f"jmpx._{package}")
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    line = error_of(capsys, "--model", f"jmpx.{package}:make", "c=bf16")
    assert f"pip install 'jmpx[{package}]'" in line


def test_wrong_arguments_are_one_line(capsys):
    assert "usage: python -m jmpx" in error_of(capsys)
    assert "unrecognized arguments: bf16" in error_of(capsys, "bf16", "bf16")
    with pytest.raises(ValueError, match="did you mean 'bf16'?") as error:
        jmpx.get_mixed_precision("c=f16; Linear: bf61")
    assert error_of(capsys, "c=f16; Linear: bf61") == str(error.value)


def test_as_a_command(tmp_path):
    (tmp_path / "net.py").write_text(
        "import equinox as eqx, jax\n"
        "def make():\n"
        "    return eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))\n"
    )
    run = functools.partial(run_python, "-W", "error", "-m", "jmpx")
    result = run("--model", "net:make", "c=bf16,o=f32; */0: full", PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    tables, others = read(result.stdout)
    assert [row["rule"] for row in only(tables)] == ["default", "*/0", "inherited"] and not others
    result = run("bf61")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    result = run("--help")
    assert result.returncode == 0 and "--model" in result.stdout
