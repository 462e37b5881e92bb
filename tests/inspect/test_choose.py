"""`choose`: its sets of islands against brute force, and its strings against runs as written."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpx
from jmpx._inspect.blame.api import blamed_runs, nodes_of
from jmpx._inspect.blame.shares import shares
from jmpx._inspect.choose import api
from jmpx._inspect.choose.islands import find_islands
from jmpx._inspect.choose.search import Search
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
    graph = Graph(program)
    islands = find_islands(graph, nodes_of(graph, runs.points), jmpx.get_policy_map(policy))
    parts = shares(runs, [island.own for island in islands], 0, lambda: None).parts
    return Search(runs, islands, parts, lambda: None)


@pytest.mark.parametrize("seed", range(10))
def test_as_few_islands_as_brute_force(seed):
    search = searched(*model_of(seed))
    everything = range(len(search.islands))
    sets = [s for n in everything for s in itertools.combinations(everything, n + 1)]
    errors = {s: search.error(s) for s in [(), *sets]}
    first, floor = errors[()], errors[tuple(everything)]
    for part in (0.8, 0.5, 0.3, 0.15, 0.05):
        bound = max(part * first, 1.1 * floor)
        found = search.find(bound)
        assert search.error(found) <= bound
        assert len(found) == min(len(s) for s, error in errors.items() if error <= bound)


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


def test_rules_that_are_worse_than_their_masks_are_not_given_up(monkeypatch):
    loss_fn, batches = model_of(0)
    search = searched(loss_fn, batches)
    bound = search.error(search.find(search.error([]) / 3)) / 0.98
    assert 0.97 * bound < search.error(search.find(bound)) < 0.985 * bound
    measured = api._Errors.of

    def worse(self, text):
        if text not in self.found and ": full" in text:
            self.found[text] = 1.03 * measured(self, text)
        return measured(self, text)

    monkeypatch.setattr(api._Errors, "of", worse)
    choice = jmpx.inspect.choose(loss_fn, POLICY, error=bound)(*batches)
    assert choice.policy.startswith(POLICY)
    assert choice.chosen.error <= bound
