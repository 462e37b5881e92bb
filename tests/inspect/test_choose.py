"""`choose`: its strings against runs as written; its report, and its command."""

import json
import re
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64, normal, run_jmpx
from helpers.planted_layer import drawn_model, planted

import jmpx
from jmpx._inspect import running

choose = jmpx.inspect.choose
POLICY = "c=bf16"


def loss_of_scopes(w, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("distance"):  # a difference of large numbers
        h = (h @ w + 64) - 64
    return jnp.mean(h.astype(jnp.float32) ** 2)


def drawn(rng):
    return [tuple(normal(rng, 2, 16, 16)) for _ in range(6)]


@pytest.mark.thorough
def test_the_strings_have_the_errors_and_the_memory_of_their_own_runs():
    batches = drawn(np.random.default_rng(0))
    choice = choose(loss_of_scopes, POLICY, error=0.015)(*batches)
    assert len(choice.rows) <= 8
    assert choice.policy.startswith(POLICY)
    assert "*/distance: full" in choice.policy
    assert choice.chosen is not None
    for row in (choice.rows[0], choice.chosen):  # pyright: ignore[reportGeneralTypeIssues]
        found = jmpx.inspect.blame(loss_of_scopes, row.policy)(*batches)
        assert row.error == pytest.approx(found.error, rel=1e-5)
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
    assert first == 1 and 0 < choice.chosen.low < 1  # the products of the distance are in float32
    assert last == 0
    text = str(choice)
    assert "over 6 batches, at most 0.015" in text
    (row,) = (line for line in text.splitlines() if line.startswith("chosen "))
    assert row.endswith(f" {choice.policy}")
    assert f"--mp_policy='{choice.policy}'" in text
    assert json.loads(choice.to_json())["policy"] == choice.policy
    assert choice.to_html().count("<tr>") == len(choice.rows) + 1


def test_a_bound_that_the_policy_holds_needs_no_rule(rng):
    choice = choose(loss_of_scopes, f"{POLICY},save=products", error=0.5)(*drawn(rng))
    assert choice.policy == f"{POLICY},save=products"


def test_memory_is_saved_by_modules_too(rng):
    model = eqx.nn.MLP(8, 8, 8, 3, key=jax.random.key(0))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2)  # noqa: E731
    batches = [(model, normal(rng, 64, 8)) for _ in range(2)]
    choice = choose(loss, "by=modules,c=bf16", error=0.5)(*batches)
    assert choice.policy == "by=modules,c=bf16,save=products"


@pytest.mark.thorough
def test_rules_that_were_given_stay(rng):
    def loss_fn(w, x):
        with jax.named_scope("encoder"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("distance"):
            h = (h @ w + 64) - 64
        with jax.named_scope("head"):
            h = jnp.sin(h @ w / 16)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    choice = choose(loss_fn, f"{POLICY}; */encoder: full;", error=0.03)(*drawn(rng))
    assert choice.policy.endswith("; */encoder: full; */distance: full")


LINES = """
import jax, jax.numpy as jnp

def distance(h, w):
    far = h @ w + 64
    return jnp.where(far > 99, far - 64, far - 64)

def loss_fn(w, x):
    h = jnp.tanh(x @ w)
    h = HOW
    return jnp.mean(h.astype(jnp.float32) ** 2)
"""


def loss_in(source, file):
    names = {}
    exec(compile(source, file, "exec"), names)
    return names["loss_fn"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "how",
    [
        "jax.lax.scan(lambda h, w: (distance(h, w), None), h, w[None])[0]",
        "distance(h, w)",
        "jax.jit(distance)(h, w)",
    ],
)
def test_lines_are_parts_where_there_are_no_scopes(how, rng):
    source, batches = LINES.replace("HOW", how), drawn(rng)
    choice = choose(loss_in(source, "plain.py"), POLICY, error=0.02)(*batches)
    assert choice.chosen and choice.policy.endswith("; */distance_5: full")
    with_scope = 'with jax.named_scope("distance_5"):'
    assert "plain.py:5 (distance), " in choice.notes[0] and f"`{with_scope}`" in choice.notes[0]
    lines = source.splitlines()
    lines[4:5] = [f"    {with_scope}", f"    {lines[4]}"]
    edited = loss_in("\n".join(lines), "edited.py")
    error = jmpx.inspect.blame(edited, choice.policy)(*batches).error
    assert choice.chosen.error == pytest.approx(error, rel=1e-3)


@pytest.mark.thorough
def test_operations_are_islands_outside_of_scopes(rng):
    def loss_fn(w, x):
        with jax.named_scope("encoder"):
            h = x @ w
        return jnp.mean((1e4 * (jnp.sqrt(1 + 1e-4 * h * h) - 1)).astype(jnp.float32) ** 2)

    choice = choose(loss_fn, POLICY, error=0.02)(*drawn(rng))
    assert choice.policy.endswith(("; op.add: full", "; op.mul: full"))
    assert choice.chosen
    assert choice.chosen.error <= 0.02


@pytest.mark.thorough
def test_every_rule_is_needed(rng):
    """Float32 results of layers make their sums float32, too: a rule for `add` would be idle."""

    def loss_fn(ws, wide, x, y):
        with jax.named_scope("embed"):
            h = x @ ws[0]
        for number, w in enumerate(ws[1:]):
            with jax.named_scope(f"layer_{number}"):
                d = jnp.sin(h @ w)
            h = h + d
        with jax.named_scope("wide"):
            rest = jnp.sin(x @ wide).mean()
        return jnp.mean((h - y) ** 2) + 1e-3 * rest

    ws, wide = list(normal(rng, 4, 16, 16) / 3), normal(rng, 16, 64)
    xs = 16 * normal(rng, 4, 16, 16)
    batches = [(ws, wide, x, x @ ws[0]) for x in xs]
    choice = choose(loss_fn, POLICY, error=0.05)(*batches)
    default, *rules = choice.policy.split(";")
    assert rules
    for rule in rules:
        without = ";".join([default, *(other for other in rules if other != rule)])
        assert choose(loss_fn, without, error=0.05)(*batches).policy != without


@pytest.mark.thorough
def test_a_metric_of_the_user(rng):
    def largest(results, exact):
        return max(float(jnp.abs(a - b).max()) for a, b in zip(results, exact, strict=True))

    batches = drawn(rng)
    choice = choose(loss_of_scopes, POLICY, error=2e-3, metric=largest)(*batches)
    assert choice.title == "the metric of loss_of_scopes"
    written = jax.jit(
        jmpx.inspect.emulate(jax.grad(jmpx.apply_policy(loss_of_scopes, choice.rows[0].policy)))
    )
    exact = jax.jit(jax.grad(loss_of_scopes))
    found = [largest([written(*b)], [exact(*b)]) for b in batches]
    assert choice.rows[0].error == pytest.approx(np.mean(np.square(found)) ** 0.5, rel=0.05)
    assert choice.chosen
    assert choice.chosen.error <= 2e-3


def test_a_policy_that_overflows_first_gets_the_rules_that_mend_it(rng):
    def loss_fn(w, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("big"):  # sums beyond 65504
            h = ((6e4 * h) @ w) / 6e4
        with jax.named_scope("large"):
            h = ((6e3 * h) @ w) / 6e3
        return jnp.mean(h.astype(jnp.float32) ** 2)

    choice = choose(loss_fn, "by=operations,c=f16", error=0.1)(*drawn(rng)[:2])
    first, second = choice.left_out
    assert (first.policy, first.mark) == ("by=operations,c=f16", "not finite")
    assert second.policy == f"{first.policy}; */big: f32"
    for each, rule in ((first, "*/big: f32"), (second, "*/large: f32")):
        assert each.why.startswith("the gradients are not finite, first by ")
        assert each.why.endswith(f" (loss_fn); first_nonfinite adds '{rule}'")
    assert "; */big: f32; */large: f32" in choice.policy
    assert all(np.isfinite(row.error) for row in choice.rows)
    text = str(choice)
    assert "nan" not in text.lower().replace("not finite", "") and " inf " not in text
    assert f"{first.policy}: left out, as {first.why}." in text
    assert any(line.split() == ["not", "finite", first.policy] for line in text.splitlines())


class Shifted(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, h):
        return (self.linear(h) + 64) - 64


class Recurrent(eqx.Module):
    cell: Shifted
    head: eqx.nn.Linear
    fails: str

    def __call__(self, x):
        def step(h, x):
            new = self.cell(h + x)
            if new.dtype != h.dtype and self.fails == "trace":
                raise KeyError("no kernel for these\nbut for others")
            if new.dtype != h.dtype and self.fails == "run":
                aval = jax.ShapeDtypeStruct(h.shape, h.dtype)
                new = jax.pure_callback(lambda h: 1 / 0, aval, jax.lax.stop_gradient(new))
            return new, None

        return self.head(jax.lax.scan(step, x[0], x)[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("error", "fails", "why"),
    [
        (1e-4, "trace", "'no kernel for these\\nbut for others'"),
        (1e-4, "", "scan body function carry input and carry output must have equal types"),
        (1e-4, "run", "INTERNAL: CpuCallback error"),
        (3e-2, "", ""),
    ],
)
def test_a_string_that_is_refused_is_a_row_and_the_search_goes_on(error, fails, why, rng):
    first, head = (eqx.nn.Linear(4, 4, key=key) for key in jax.random.split(jax.random.key(0)))
    model = Recurrent(Shifted(first), head, fails)
    loss = lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2)  # noqa: E731
    batches = [(model, normal(rng, 5, 4)) for _ in range(6)]
    choice = choose(loss, "by=modules,c=bf16", error=error)(*batches)
    rule, chosen = "by=modules,c=bf16; */cell: ", "by=modules,c=bf16,save=products; */cell: full"
    refused = [each for each in choice.left_out if each.mark == "refused"]
    assert (choice.policy, len(refused)) == (("by=modules,f32", 1), (chosen, 0))[error > 1e-2]
    for each in refused:
        assert each.policy.startswith(rule) and each.policy.endswith("o=f32")
        assert each.why.startswith("it is refused: ") and why in each.why, each.why
        assert f"{each.policy}: left out, as {each.why}." in str(choice)


def a_larger_step(policy):
    """A step that saves more in float32, as those of small models may not."""
    dtype = jmpx.get_policy_map(policy).default.compute_dtype

    def loss_fn(w):
        return jnp.tanh(w.astype(dtype)).sum().astype(jnp.float32)

    return jax.value_and_grad(loss_fn), (jax.ShapeDtypeStruct((64, 64), "float32"),)


def test_the_planted_layer_of_a_model_is_the_island(rng):
    loss, (model, x) = planted("nnx", lambda x: (x + 100) - 100, None, rows=8)
    model = drawn_model(model, rng)
    batches = [(model, normal(rng, *x.shape)) for _ in range(4)]
    policy = "by=modules,c=bf16"
    before = jmpx.inspect.blame(loss, policy)(*batches).error
    choice = choose(loss, policy, error=before / 3, make_step=a_larger_step)(*batches)
    assert "plant: " in choice.policy.lower()
    assert choice.policy.count(":") == 1


def test_what_no_rule_can_hold_is_float32(rng):
    loss, (params, x) = planted("haiku", jnp.tanh, None, rows=8)
    params = drawn_model(params, rng)
    batches = [(params, normal(rng, *x.shape)) for _ in range(2)]
    choice = choose(loss, "by=modules,c=bf16", error=1e-7)(*batches)
    assert choice.policy == "by=modules,f32"
    why = "by=modules,f32 is chosen, as no cheaper string holds 1e-07: "
    assert choice.notes[0].startswith(why)
    for row in choice.rows[:-1]:
        assert f"{row.policy!r} is off by {row.error:.1e}" in choice.notes[0]


@pytest.mark.thorough
def test_float32_is_chosen_only_if_no_string_with_16_bits_holds_the_bound(rng):
    @jax.checkpoint
    def block(x, w):
        return jnp.tanh(x @ w), None

    def loss_fn(params, x):
        x, _ = jax.lax.scan(block, x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = normal(rng, 4, 16, 16) / 4
    choice = choose(loss_fn, POLICY, error=0.1)(*((params, normal(rng, 2, 16)) for _ in range(3)))
    first, *_, last = choice.rows
    assert last.policy == "f32"
    assert last.memory <= first.memory  # Only the carry is kept, and it is in float32.
    assert first is choice.chosen
    assert 0 < first.error <= 0.1


def test_float32_that_misses_the_bound(rng):
    with enable_x64():
        batches = drawn(rng)
        with pytest.raises(ValueError, match=r"where float32 itself is off by \d"):
            choose(loss_of_scopes, POLICY, error=1e-9)(*batches)


def test_float32_that_is_not_finite(rng):
    with pytest.raises(ValueError, match="finite in float32, got NaN or infinity, first by exp"):
        choose(lambda w, x: jnp.exp(1e3 + w @ x).sum(), POLICY, error=0.1)(*drawn(rng)[:1])


@pytest.mark.parametrize("tool", [choose, jmpx.inspect.blame])
def test_batches_in_place_of_the_function(tool, rng):
    options = {"error": 0.1} if tool is choose else {}
    with pytest.raises(TypeError, match=r"got one of type list: pass the function first"):
        tool(drawn(rng), **options)


@pytest.mark.parametrize("has_bar", [True, False])
def test_before_the_first_compile_it_says_what_is_compiled(has_bar, rng, monkeypatch, capsys):
    if not has_bar:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(running, "_SHOWS_AFTER", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = []

    def loss_fn(w, x):
        if not shown:
            time.sleep(0.1)  # another thread writes it
        shown.append(capsys.readouterr().err)
        return jnp.mean((x @ w) ** 2)

    choose(loss_fn, POLICY, error=0.5)(*drawn(rng)[:1])
    assert shown[0].strip().startswith("compiling and running loss_fn in float32")
    rest = "".join([*shown[1:], capsys.readouterr().err])
    assert f"compiling {POLICY!r}, then sets of rules tried" in rest


TOOLS = [jmpx.inspect.blame, choose, jmpx.inspect.first_nonfinite]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_report_that_takes_long_shows_a_bar_in_a_terminal_alone(
    tool, is_terminal, rng, monkeypatch, capsys
):
    monkeypatch.setattr(running, "_SHOWS_AFTER", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)

    def loss_fn(w, x):
        time.sleep(0.05)  # another thread writes it
        return jnp.mean((x @ w) ** 2)

    (batch,), options = drawn(rng)[:1], {"error": 0.5} if tool is choose else {}
    if tool is jmpx.inspect.first_nonfinite:
        tool(loss_fn)(*batch)
    else:
        tool(loss_fn, POLICY, **options)(batch)
    lines = [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.strip()]
    assert any("loss_fn" in line for line in lines)
    assert is_terminal or all(line.endswith(" ...") for line in lines), lines
    assert is_terminal or len(set(lines)) == len(lines)


# The command line


def make():
    return loss_of_scopes, drawn(np.random.default_rng(0))


def test_the_command_chooses_the_same(tmp_path, capsys):
    run, picture = ["choose", f"{__name__}:make", "--error=0.5"], tmp_path / "choice.png"
    assert run_jmpx(*run, "--json", f"--plot={picture}") == 0
    choice = choose(loss_of_scopes, POLICY, error=0.5)(*make()[1])
    assert json.loads(capsys.readouterr().out) == json.loads(choice.to_json())
    assert picture.stat().st_size > 5000
    assert run_jmpx(*run, "--policy=by=arguments,c=bf16") == 2
    assert "leave by out, or write by=modules" in capsys.readouterr().err


@pytest.mark.thorough
def test_for_a_chip_that_multiplies_in_8_bits_the_widest_layers_are_tried(rng):
    def loss_fn(params, x):
        for i in range(2):
            with jax.named_scope(f"mlp_{i}"):
                x = x + jnp.tanh(x @ params[f"up_{i}"]) @ params[f"down_{i}"]
        with jax.named_scope("head"):
            return jnp.mean((x @ params["head"]) ** 2)

    shapes = {f"up_{i}": (64, 128) for i in range(2)} | {f"down_{i}": (128, 64) for i in range(2)}
    params = {
        name: normal(rng, *shape) / 8 for name, shape in (shapes | {"head": (64, 10)}).items()
    }
    batches = [(params, normal(rng, 64, 64)) for _ in range(2)]
    text = str(choose(loss_fn, POLICY, error=0.2, chip="h100")(*batches))
    tried = f"{POLICY},save=products; */mlp_*: m=fp8"
    assert f"{tried}: left out, as it saves no memory, with an error of" in text
    error = jmpx.inspect.blame(loss_fn, tried)(*batches).error
    assert 0.02 < error < 0.2 and f"an error of {error:.1e}" in text
    assert "m=fp8" not in str(choose(loss_fn, POLICY, error=0.2, chip="v5e")(*batches))
