"""The runs of `blame` and `choose`, in which some sites round: shares and islands by force."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import jmpx

# Which sites round is a mask of these runs: no public function takes one.
from jmpx._inspect.blame.api import blamed_runs, group_names, nodes_of
from jmpx._inspect.choose.api import Choice, Tried, front
from jmpx._inspect.choose.search import IslandSearch, Sites, Strings, _alike
from jmpx._inspect.graph import Graph

POLICY = "by=operations,c=bf16"
WIDTH = 12

# Shares


def attention(params, x):
    q, k, v = (x @ w for w in params)
    with jax.named_scope("scores"):
        scores = q @ k.T / x.shape[-1] ** 0.5
    with jax.named_scope("mix"):
        return jax.nn.softmax(scores) @ v


def scanned(params, x):
    def body(x, w):
        with jax.named_scope("product"):
            y = x @ w
        with jax.named_scope("sum"):
            return x + jnp.sin(y), None

    return jax.lax.scan(body, x, jnp.stack(params))[0]


def normed(params, x):
    for index, w in enumerate(params):
        with jax.named_scope(f"norm{index}"):
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        x = jax.nn.gelu(x @ w)
    return x


def loss_of(model):
    def loss_fn(params, x, y):
        return jnp.mean((model(params, x).astype(jnp.float32) - y) ** 2)

    return loss_fn


def batches_of(rng, arrays):
    params = [normal(rng, 32, 32) / 6 for _ in range(3)]
    return [(params, *(normal(rng, 48, 32) for _ in range(arrays))) for _ in range(8)]


HALF = "c=f16"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "is_loss", "policy"),
    [(attention, True, HALF), (scanned, False, POLICY)],
)
def test_shares_explain_the_error_and_are_those_of_one_line_at_a_time(rng, model, is_loss, policy):
    func, batches = (loss_of(model) if is_loss else model), batches_of(rng, 1 + is_loss)
    report = jmpx.inspect.blame(func, policy, by="lines")(*batches)
    assert 0.75 < report.explained < 1.25
    program, runs = blamed_runs(func, policy, batches)
    names = np.array(group_names(Graph(program), runs.points, "lines"))
    everywhere = np.ones(len(names), bool)
    assert np.isclose(runs.squared(everywhere) ** 0.5, report.error, rtol=1e-3)
    # A constant such as the root of 32 was rounded when it was traced, whatever the mask.
    assert runs.squared(~everywhere) < report.error**2 / 10
    alone = np.array([runs.squared(names == row.name) for row in report.rows])
    shares = np.array([row.share for row in report.rows]) / report.explained
    assert 0.5 * np.abs(shares - alone / alone.sum()).sum() <= 0.15


def test_turns_of_a_scan_are_one_line(rng):
    report = jmpx.inspect.blame(scanned, POLICY)(*batches_of(rng, 1))
    assert {"product", "sum"} <= {row.name for row in report.rows}
    sizes = {row.name: row.size for row in report.rows}
    assert sizes["product"] >= 3 * (48 * 32 + 32 * 32)  # the results and the weights


@pytest.mark.parametrize("model", [scanned, normed])
def test_rounded_runs_are_those_of_emulate(rng, model):
    batches = batches_of(rng, 1)[:1]
    expected = jax.jit(jmpx.inspect.emulate(jmpx.apply_policy(model, POLICY)))(*batches[0])
    _, runs = blamed_runs(model, POLICY, batches)
    rounded = jax.jit(lambda arrays: runs.points.rounded(lambda array: array, arrays)[0])
    (found,) = rounded(runs.batches[0].arrays)
    # By the order of float32 sums, and by powers, whose factors are rounded one after the other.
    assert np.mean(found != expected) < (0.1 if model is normed else 0.01)
    limit = 5e-3 if model is normed else 1e-3
    assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected)


def test_a_sum_of_one_number_is_measured_and_its_errors_add_up():
    def total(x):
        def body(total, _):
            return total + x, None

        return jax.lax.scan(body, jnp.zeros_like(x), None, 1000)[0]

    x = jnp.full((1,), 0.1, jnp.bfloat16)
    report = jmpx.inspect.blame(total)((x,))
    exact = 1000 * float(x[0])
    written = float(jax.jit(jmpx.inspect.emulate(total))(x)[0])
    assert written - exact < -60  # the sum stays at 32
    assert np.isclose(report.error, abs(written - exact) / exact, rtol=1e-4)
    (row,) = report.rows
    assert (row.operation, row.is_measured) == ("add", True)
    assert np.isclose(row.share, 1)
    assert "one number" in str(report).lower()
    # The local errors of the rounded run sum to the error of the result.
    _, runs = blamed_runs(total, None, [(x,)])
    _, errors = runs.points.rounded(lambda array: array, runs.batches[0].arrays, keep=True)
    ((local,),) = errors.values()
    assert local.shape == (1000, 1)
    assert np.isclose(np.asarray(local, np.float64).sum(), written - exact, rtol=0.01)


# Islands

LAYERS = {
    "squares": lambda w, x: jnp.tanh(((x + 8) ** 2 - x * x - 64) / 16 @ w),  # it loses digits
    "residual_a": lambda w, x: (x + jax.nn.gelu(x @ w)) / 2,
    "residual_b": lambda w, x: (x + jax.nn.gelu(x @ w)) / 2,
    "dense_a": lambda w, x: jnp.tanh(x @ w),
    "dense_b": lambda w, x: jnp.tanh(x @ w),
    "near_one": lambda w, x: jnp.tanh(20 * jnp.log(1 + 0.02 * jnp.exp((x @ w) / 4))),  # it, too
}


def layered(params, x):
    for (name, layer), w in zip(LAYERS.items(), params, strict=True):
        with jax.named_scope(name):
            x = layer(w, x)
    return jnp.mean(x.astype(jnp.float32) ** 2)


@functools.cache
def batches_and_search():
    """Batches of the layered loss, and the search among its islands."""
    rng = np.random.default_rng(0)
    params = [normal(rng, WIDTH, WIDTH) / WIDTH**0.5 for _ in LAYERS]
    batches = [(params, normal(rng, 16, WIDTH)) for _ in range(6)]
    return batches, searched(layered, batches)


def searched(loss_fn, batches):
    program, runs = blamed_runs(loss_fn, POLICY, batches)
    return IslandSearch(program, runs, jmpx.get_policy_map(POLICY), 0, lambda: None)


@pytest.mark.thorough
def test_as_few_islands_as_brute_force():
    search = batches_and_search()[1]
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


@pytest.mark.thorough
def test_rules_that_are_worse_than_their_masks_are_not_given_up(monkeypatch):
    batches, search = batches_and_search()
    bound = search.error(search.find(search.error([]) / 2)) / 0.98
    assert 0.97 * bound < search.error(search.find(bound)) < 0.985 * bound
    measured = Strings.error

    def worse(self, text):
        if text not in self.errors and ": full" in text:
            self.errors[text] = 1.03 * measured(self, text)
        return measured(self, text)

    monkeypatch.setattr(Strings, "error", worse)
    choice = jmpx.inspect.choose(layered, POLICY, error=bound)(*batches)
    assert choice.policy.startswith(POLICY)
    assert choice.chosen
    assert choice.chosen.error <= bound


def sites_of(rng, loss_fn, layers):
    """Returns the sites of a loss of layers of 8 x 8."""
    params = [normal(rng, 8, 8) / 3 for _ in range(layers)]
    program, runs = blamed_runs(loss_fn, POLICY, [(params, normal(rng, 8, 8))])
    graph = Graph(program)
    return Sites(graph, nodes_of(graph, runs.points), jmpx.get_policy_map(POLICY))


@pytest.mark.thorough
def test_many_layers_that_are_alike_are_one_island(rng):
    def loss_fn(params, x):
        for index, w in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                x = jnp.tanh(((x @ w) + 30) - 30)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    layers, *others = sites_of(rng, loss_fn, 30).islands()
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

    sites = sites_of(rng, loss_fn, 3)
    mlps = ["block0/mlp", "block1/mlp", "block2/mlp"]
    assert sites.shortened(["op.add", *mlps, "op.exp"]) == ["op.add", "block*/mlp", "op.exp"]
    assert sites.shortened(mlps[:2]) == mlps[:2]
    assert _alike("net/conv2_d_1/block0/w2v") == "net/conv2_d_*/block*/w2v"
    assert sites.shortened(["block0/norm", *mlps[1:]]) == ["block0/norm", *mlps[1:]]


def pairs_of(rng):
    return [tuple(normal(rng, 2, WIDTH, WIDTH) / WIDTH**0.5) for _ in range(6)]


def test_an_island_is_not_a_part_of_which_others_make_the_error(rng):
    def loss_fn(w, x):
        with jax.named_scope("block"):
            x = x + 0.1
            with jax.named_scope("distance"):
                x = (x @ w + 64) - 64
            with jax.named_scope("mlp"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    selectors = [island.selector for island in searched(loss_fn, pairs_of(rng)).islands]
    assert {"block/distance", "block/mlp"} <= set(selectors)
    assert "*/block" not in selectors


@pytest.mark.thorough
def test_of_two_parts_that_hold_the_bound_the_one_with_fewer_products_is_chosen(rng):
    def loss_fn(w, x):
        with jax.named_scope("mlp"):
            x = ((x @ w + 48) - 48) * 0.37
        with jax.named_scope("shift"):
            x = (x + 8) - 8
        return jnp.mean(x.astype(jnp.float32) ** 2)

    search = searched(loss_fn, pairs_of(rng))
    selectors = [island.selector for island in search.islands]
    mlp, shift = selectors.index("*/mlp"), selectors.index("*/shift")
    bound = 1.001 * search.error([shift])
    assert search.error([mlp]) < search.error([shift]) < 0.98 * search.error([])
    assert search.find(bound) == (shift,)


# Strings that were tried


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
