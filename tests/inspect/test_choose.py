"""`choose`: its sets of islands against brute force, and its strings against runs as written."""

import contextlib
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64
from helpers.planted_layer import FRAMEWORKS, drawn_model, planted

import jmpx
from jmpx.__main__ import main
from jmpx._inspect.blame.api import blamed_runs, nodes_of
from jmpx._inspect.choose import api
from jmpx._inspect.choose.api import _search
from jmpx._inspect.choose.islands import Sites, pattern
from jmpx._inspect.choose.report import Choice, Tried, front
from jmpx._inspect.graph import Graph

POLICY = "by=operations,c=bf16"
WIDTH = 12


def dense(w, x):
    return jnp.tanh(x @ w)


def residual(w, x):
    return (x + jax.nn.gelu(x @ w)) / 2


def mixed(w, x):
    return jax.nn.softmax(x @ w) * 4 - x / 2


def cancelled(w, x):
    return jnp.tanh(((x @ w) + 30) - 30)


def by_moments(w, x):
    x = x @ w + 4
    return (x - 4) / jnp.sqrt(1 + (x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2)


def squares(w, x):
    return jnp.tanh(((x + 8) ** 2 - x * x - 64) / 16 @ w)


def near_one(w, x):
    return jnp.tanh(20 * jnp.log(1 + 0.02 * jnp.exp((x @ w) / 4)))


PLANTS = [cancelled, by_moments, squares, near_one]
BENIGN = [dense, residual, mixed]


def model_of(seed, layers=6, plants=2):
    """A loss of layers in scopes, of which some lose digits; and batches of its arguments."""
    rng = np.random.default_rng(seed)
    kinds = [BENIGN[i] for i in rng.integers(len(BENIGN), size=layers)]
    for place in rng.choice(layers, size=plants, replace=False):
        kinds[place] = PLANTS[rng.integers(len(PLANTS))]

    def loss_fn(params, x):
        for letter, kind, w in zip("abcdefghij", kinds, params, strict=False):
            with jax.named_scope(f"{kind.__name__}_{letter}"):
                x = kind(w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32) for _ in kinds]
    data = [jnp.asarray(rng.normal(size=(16, WIDTH)), jnp.float32) for _ in range(6)]
    return loss_fn, [(params, x) for x in data]


def searched(loss_fn, batches, policy=POLICY):
    program, runs = blamed_runs(loss_fn, policy, batches)
    return _search(program, runs, jmpx.get_policy_map(policy), runs, 0, lambda: None)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(10))
def test_as_few_islands_as_brute_force(seed):
    search = searched(*model_of(seed))
    everything = [i for i, island in enumerate(search.islands) if not island.is_operation]
    assert len(everything) >= 5
    sets = [s for n in range(len(everything)) for s in itertools.combinations(everything, n + 1)]
    errors = {s: search.error(s) for s in [(), *sets]}
    first, floor = errors[()], errors[tuple(everything)]
    for part in (0.8, 0.5, 0.3, 0.15, 0.05):
        bound = max(part * first, 1.1 * floor)
        found = search.find(bound)
        assert search.error(found) <= bound
        assert len(found) == min(len(s) for s, error in errors.items() if error <= bound)


def test_rules_that_are_worse_than_their_masks_are_not_given_up(monkeypatch):
    loss_fn, batches = model_of(0)
    search = searched(loss_fn, batches)
    bound = search.error(search.find(search.error([]) / 2)) / 0.98
    assert 0.97 * bound < search.error(search.find(bound)) < 0.985 * bound
    measured = api._Strings.error

    def worse(self, text):
        if text not in self.errors and ": full" in text:
            self.errors[text] = 1.03 * measured(self, text)
        return measured(self, text)

    monkeypatch.setattr(api._Strings, "error", worse)
    choice = jmpx.inspect.choose(loss_fn, POLICY, error=bound)(*batches)
    assert choice.policy.startswith(POLICY)
    assert choice.chosen
    assert choice.chosen.error <= bound


def loss_of_scopes(w, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("distance"):  # a difference of large numbers
        h = (h @ w + 64) - 64
    return jnp.mean(h.astype(jnp.float32) ** 2)


def drawn(rng, count=6, dtype=jnp.float32):
    return [tuple(jnp.asarray(rng.normal(size=(2, 16, 16)), dtype)) for _ in range(count)]


def test_the_strings_have_the_errors_and_the_memory_of_their_own_runs(rng):
    batches = drawn(rng)
    choice = jmpx.inspect.choose(loss_of_scopes, POLICY, error=0.015)(*batches)
    assert len(choice.rows) <= 8
    assert choice.policy.startswith(POLICY)
    assert "*/distance: full" in choice.policy
    for row in choice.rows[:-1]:
        assert row.error == pytest.approx(
            jmpx.inspect.blame(loss_of_scopes, row.policy)(*batches).error, rel=1e-5
        )
    policies, memory = zip(*((row.policy, row.memory) for row in choice.rows), strict=True)

    def gradient(policy):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batches[0]]
        return jax.value_and_grad(jmpx.apply_policy(loss_of_scopes, policy)), tuple(shapes)

    planned = jmpx.inspect.plan(gradient, policies)
    assert [sum(row.saved.values()) for row in planned.rows] == [*memory]
    errors = [row.error for row in choice.rows]
    assert errors == sorted(errors, reverse=True)
    assert [*memory] == sorted(memory)
    first, *_, last = (row.low for row in choice.rows)
    assert 0 < first < 1  # the products of the distance are in float32
    assert last == 0


def test_a_bound_that_the_policy_holds_needs_no_rule(rng):
    choice = jmpx.inspect.choose(loss_of_scopes, f"{POLICY},save=products", error=0.5)(*drawn(rng))
    assert choice.policy == f"{POLICY},save=products"


def test_rules_that_were_given_stay(rng):
    def loss_fn(w, x):
        with jax.named_scope("encoder"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("distance"):
            h = (h @ w + 64) - 64
        with jax.named_scope("head"):
            h = jnp.sin(h @ w / 16)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    given = f"{POLICY}; */encoder: full;"
    choice = jmpx.inspect.choose(loss_fn, given, error=0.03)(*drawn(rng))
    assert choice.policy.endswith("; */encoder: full; */distance: full")


def test_the_same_seed_gives_the_same_choice(rng):
    batches = drawn(rng)
    run = jmpx.inspect.choose(loss_of_scopes, POLICY, error=0.01, seed=3)
    assert run(*batches) == run(*batches)


def test_operations_are_islands_where_there_are_no_scopes(rng):
    def loss_fn(w, x):
        h = x @ w
        return jnp.mean((1e4 * (jnp.sqrt(1 + 1e-4 * h * h) - 1)).astype(jnp.float32) ** 2)

    choice = jmpx.inspect.choose(loss_fn, POLICY, error=0.02)(*drawn(rng))
    assert choice.policy.endswith(("; op.add: full", "; op.mul: full"))
    assert choice.chosen
    assert choice.chosen.error <= 0.02


def test_a_metric_of_the_user(rng):
    def largest(results, exact):
        return max(float(jnp.abs(a - b).max()) for a, b in zip(results, exact, strict=True))

    batches = drawn(rng)
    choice = jmpx.inspect.choose(loss_of_scopes, POLICY, error=2e-3, metric=largest)(*batches)
    assert choice.title == "the metric of loss_of_scopes"
    written = jmpx.inspect.emulate(
        jax.grad(jmpx.apply_policy(loss_of_scopes, choice.rows[0].policy))
    )
    found = [largest([written(*b)], [jax.grad(loss_of_scopes)(*b)]) for b in batches]
    assert choice.rows[0].error == pytest.approx(np.mean(np.square(found)) ** 0.5, rel=0.05)
    assert choice.chosen
    assert choice.chosen.error <= 2e-3


def a_larger_step(policy):
    """A step that saves more in float32, as those of small models may not."""
    dtype = jmpx.get_policy_map(policy).default.compute_dtype

    def loss_fn(w):
        return jnp.tanh(w.astype(dtype)).sum().astype(jnp.float32)

    return jax.value_and_grad(loss_fn), (jax.ShapeDtypeStruct((64, 64), "float32"),)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["modules", "operations"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_planted_layer_of_a_model_is_the_island(rng, framework, way):
    loss, (model, x) = planted(framework, lambda x: (x + 100) - 100, None, rows=8)
    model = drawn_model(model, rng)
    batches = [(model, jnp.asarray(rng.normal(size=x.shape), jnp.float32)) for _ in range(4)]
    policy = f"by={way},c=bf16"
    before = jmpx.inspect.blame(loss, policy)(*batches).error
    choice = jmpx.inspect.choose(loss, policy, error=before / 3, make_step=a_larger_step)(*batches)
    assert "plant: " in choice.policy.lower()
    assert choice.policy.count(":") == 1


def test_many_layers_that_are_alike_are_one_island(rng):
    def loss_fn(params, x):
        for index, w in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                x = jnp.tanh(((x @ w) + 30) - 30)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = [jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) / 3 for _ in range(30)]
    batches = [(params, jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)) for _ in range(3)]
    program, runs = blamed_runs(loss_fn, POLICY, batches)
    graph = Graph(program)
    nodes = nodes_of(graph, runs.points)
    layers, *others = Sites(graph, nodes, jmpx.get_policy_map(POLICY)).islands()
    assert layers.selector == "*/layer*"
    assert layers.sites.sum() == len(layers.own) > 100
    assert all(island.is_operation for island in others)


def test_rules_for_all_of_what_is_alike_are_one_rule(rng):
    def loss_fn(params, x):
        for index, w in enumerate(params):
            with jax.named_scope(f"block{index}"):
                with jax.named_scope("norm"):
                    x = x - x.mean()
                with jax.named_scope("mlp"):
                    x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = [jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) / 3 for _ in range(3)]
    batches = [(params, jnp.asarray(rng.normal(size=(8, 8)), jnp.float32))]
    program, runs = blamed_runs(loss_fn, POLICY, batches)
    graph = Graph(program)
    sites = Sites(graph, nodes_of(graph, runs.points), jmpx.get_policy_map(POLICY))
    mlps = ["block0/mlp", "block1/mlp", "block2/mlp"]
    assert sites.shortened(["op.add", *mlps, "op.exp"]) == ["op.add", "block*/mlp", "op.exp"]
    assert sites.shortened(mlps[:2]) == mlps[:2]
    assert pattern("net/conv2_d_1/block0/w2v") == "net/conv2_d_*/block*/w2v"
    assert sites.shortened(["block0/norm", *mlps[1:]]) == ["block0/norm", *mlps[1:]]


def test_an_island_is_not_a_part_of_which_others_make_the_error(rng):
    def loss_fn(w, x):
        with jax.named_scope("block"):
            x = x + 0.1
            with jax.named_scope("distance"):
                x = (x @ w + 64) - 64
            with jax.named_scope("mlp"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    selectors = [island.selector for island in searched(loss_fn, drawn(rng)).islands]
    assert {"block/distance", "block/mlp"} <= set(selectors)
    assert "*/block" not in selectors


def test_the_report(rng, tmp_path):
    choice = jmpx.inspect.choose(loss_of_scopes, POLICY, error=0.015)(*drawn(rng))
    text = str(choice)
    assert "over 6 batches, at most 0.015" in text
    (chosen,) = (line for line in text.splitlines() if line.startswith("chosen "))
    assert chosen.endswith(f" {choice.policy}")
    assert f"--mp_policy='{choice.policy}'" in text
    assert json.loads(choice.to_json())["policy"] == choice.policy
    assert choice.to_html().count("<tr>") == len(choice.rows) + 1
    choice.plot(tmp_path / "choice.png")
    assert (tmp_path / "choice.png").stat().st_size > 5000


def test_what_no_rule_can_hold_is_float32(rng):
    loss, (params, x) = planted("haiku", jnp.tanh, None, rows=8)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    batches = [(params, jnp.asarray(rng.normal(size=x.shape), jnp.float32)) for _ in range(4)]
    choice = jmpx.inspect.choose(loss, "by=modules,c=bf16", error=1e-7)(*batches)
    assert choice.policy == "by=modules,f32"


def test_a_chip_that_is_too_small():
    rows = (Tried("c=bf16", 0.1, 10, 1.0, True), Tried("c=f32", 0.0, 20, 0.0, False))
    choice = Choice("the gradients of f", 0.01, 8, "v5e", rows)
    assert choice.chosen is None
    assert "does not fit" in str(choice)
    with pytest.raises(ValueError, match=r"found none: allow a larger error"):
        _ = choice.policy


def test_the_front():
    numbers = {"a": (0.1, 10), "b": (0.2, 5), "c": (0.3, 7), "bb": (0.2, 5)}
    rows = [Tried(name, *two, low=1.0) for name, two in numbers.items()]
    assert [row.policy for row in front(rows)] == ["b", "a"]


def test_float32_that_misses_the_bound(rng):
    with enable_x64():
        batches = drawn(rng)
        with pytest.raises(ValueError, match=r"where float32 itself is off by \d"):
            jmpx.inspect.choose(loss_of_scopes, POLICY, error=1e-9)(*batches)


BAD = [
    (lambda: jmpx.inspect.choose(loss_of_scopes, error=0), "to be a positive number, got 0"),
    (lambda: jmpx.inspect.choose(loss_of_scopes, "c=bf16", error=1), "by=modules or by=operations"),
    (lambda: jmpx.inspect.choose(loss_of_scopes, "c=bf17", error=1), "bf17"),
    (lambda: jmpx.inspect.choose(loss_of_scopes, POLICY, error=1, chip="v9"), "v5e"),
    (lambda: jmpx.inspect.choose(loss_of_scopes, POLICY, error=1)(), "Expected batches, got none"),
    (lambda: jmpx.inspect.choose(loss_of_scopes, POLICY, error=1, of="loss"), "'results'"),
]


@pytest.mark.parametrize(("call", "match"), BAD)
def test_bad_input(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()


# The command line.

PROGRAM = """
import jax, jax.numpy as jnp

def loss_fn(w, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("distance"):
        h = (h @ w + 64) - 64
    return jnp.mean(h.astype(jnp.float32) ** 2)

def make():
    keys = jax.random.split(jax.random.key(0), 4)
    return loss_fn, [tuple(jax.random.normal(key, (2, 16, 16))) for key in keys]

def wrong():
    return loss_fn, make()[1][0]
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "program_to_choose_for.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr("sys.path", [*sys.path])
    yield path
    sys.modules.pop(path.stem, None)


def test_the_command(program, capsys):
    picture = program.with_suffix(".png")
    assert main(["choose", f"{program}:make", "--error=0.015", f"--plot={picture}"]) == 0
    assert "*/distance: full" in capsys.readouterr().out
    assert picture.stat().st_size > 5000
    assert main(["choose", f"{program}:make", "--error=0.015", "--json"]) == 0
    assert "*/distance: full" in json.loads(capsys.readouterr().out)["policy"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["make"], "--error"),
        (["wrong", "--error=1"], "to return a loss, the list of its batches"),
        (["make", "--error=1", "--policy=c=bf16"], "by=modules or by=operations"),
        (["make", "--error=1", "--chip=v9"], "v5e"),
    ],
)
def test_wrong_commands(program, capsys, arguments, match):
    with contextlib.suppress(SystemExit):
        assert main(["choose", f"{program}:{arguments[0]}", *arguments[1:]]) == 2
    assert match in capsys.readouterr().err


def test_float32_is_chosen_only_if_no_string_with_16_bits_holds_the_bound(rng):
    @jax.checkpoint
    def block(x, w):
        return jnp.tanh(x @ w), None

    def loss_fn(params, x):
        x, _ = jax.lax.scan(block, x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = jnp.asarray(rng.normal(size=(4, 16, 16)) / 4, jnp.float32)
    batches = [(params, jnp.asarray(rng.normal(size=(2, 16)), jnp.float32)) for _ in range(3)]
    choice = jmpx.inspect.choose(loss_fn, POLICY, error=0.1)(*batches)
    first, *_, last = choice.rows
    assert last.policy == "by=operations,f32"
    assert last.memory <= first.memory  # The carry, which is all that is kept, is in float32.
    assert first is choice.chosen
    assert 0 < first.error <= 0.1


def test_of_two_parts_that_hold_the_bound_the_one_with_fewer_products_is_chosen(rng):
    def loss_fn(w, x):
        with jax.named_scope("mlp"):
            x = ((x @ w + 48) - 48) * 0.37
        with jax.named_scope("shift"):
            x = (x + 8) - 8
        return jnp.mean(x.astype(jnp.float32) ** 2)

    draws = jnp.asarray(rng.normal(size=(6, 2, WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)
    search = searched(loss_fn, [tuple(arrays) for arrays in draws])
    selectors = [island.selector for island in search.islands]
    mlp, shift = selectors.index("*/mlp"), selectors.index("*/shift")
    bound = 1.001 * search.error([shift])
    assert search.error([mlp]) < search.error([shift]) < 0.98 * search.error([])
    assert search.find(bound) == (shift,)
