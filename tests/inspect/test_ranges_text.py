"""Ranges as text, as JSON and as pictures."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import jmpx
from jmpx._inspect.ranges.data import Histogram, Range
from jmpx._inspect.ranges.formats import bin_of
from jmpx._inspect.ranges.report import Ranges


@pytest.fixture(scope="module")
def found():
    rng = np.random.default_rng(0)

    def loss_fn(params, x):
        with jax.named_scope("net"):
            with jax.named_scope("encoder"):
                h = jnp.tanh(x @ params["w"])
            with jax.named_scope("energy"):
                h = jnp.square(1000 * h).sum(-1)
        return jnp.mean(jnp.sqrt(h)) / 1000

    return jmpx.inspect.ranges(loss_fn)({"w": normal(rng, 8, 4)}, normal(rng, 6, 8))


def many_scopes(number, name):
    histogram = Histogram(((bin_of(-149 << 23), 2), (bin_of(-20 << 23), 3)))
    ranges = tuple(Range(f"{name}_{i}", histogram) for i in range(number))
    return Ranges("step", ranges, ranges[: number // 2])


def test_the_text_says_what_matters(found):
    text = str(found)
    assert text.startswith("Ranges of loss_fn and its gradient in float32: 3 scopes, ")
    (row,) = [line for line in text.splitlines() if line.endswith("net/energy")]
    shares = found.shares("float16", kind="activations", scope="net/energy")
    assert f"{100 * shares.overflowing:.1f} %" in row
    assert f"dynamic,init={int(found.loss_scale())}  " in text


def test_the_text_says_what_a_loss_in_float16_takes(found):
    said = "A loss that is itself computed in float16 takes dynamic,init=32768."
    assert (said in str(found)) == (found.loss_scale() > 2**15)
    small = jmpx.inspect.ranges(lambda w, x: jnp.mean((x @ w) ** 2) / 2**20)(
        jnp.ones(4), jnp.eye(4)
    )
    assert small.loss_scale() > 2**15 and said in str(small)
    large = jmpx.inspect.ranges(lambda w, x: jnp.mean((x @ w) ** 2))(jnp.ones(4), jnp.eye(4))
    assert large.loss_scale() <= 2**15 and said not in str(large)


def test_the_table_has_a_line_for_each_scope(found):
    deep = many_scopes(3, "language_model/transformer/layers_with_long_names/attention/projection")
    lines = str(deep).splitlines()
    (head,) = [line for line in lines if line.endswith("scope")]
    assert len(head) <= 80
    assert sum("2**-149 .. 2**-20" in line for line in lines) == 3
    assert all(len(line) <= 80 for line in str(found).splitlines())


def test_the_worst_scopes_are_shown():
    large = Range("large", Histogram(((bin_of(20 << 23), 1),)))
    few = many_scopes(40, "scope")
    ranges = Ranges("step", (*few.activations, large), few.gradients)
    text = str(ranges)
    assert "  large\n" in text and "... and 17 more scopes, which to_dict() holds" in text
    assert sum("  scope_" in line for line in text.splitlines()) == 23


def test_nothing_found_is_said(rng):
    text = str(jmpx.inspect.ranges(lambda x: x + 1)(np.arange(3)))
    assert "0 scopes" in text and "Loss scale" not in text and "subnormal" not in text


def test_json_holds_what_the_ranges_hold(found):
    data = json.loads(found.to_json())
    assert [each["scope"] for each in data["gradients"]] == [e.scope for e in found.gradients]
    energy = data["activations"][1]
    histogram = found.activations[1].histogram
    assert energy["exponents"] == {str(e): n for e, n in histogram.exponents.items()}


def test_scopes_are_found_by_path_by_name_and_by_glob(found):
    inner = [each.histogram for each in found.activations if each.scope.startswith("net/")]
    sizes = [each.numbers for each in inner]
    for scope, size in {
        "net": sum(sizes),
        "net/encoder": sizes[0],
        "encoder": sizes[0],
        "*/energy": sizes[1],
        "net/*": sum(sizes),
        "": found.activations[2].histogram.numbers,
    }.items():
        assert found.histogram("activations", scope).numbers == size
    assert found.histogram("activations").numbers > sum(sizes)


@pytest.mark.parametrize("scope", ["encodr", "enc/*"])
def test_an_unknown_scope_is_named(found, scope):
    with pytest.raises(ValueError, match="Expected scope= to be one of "):
        found.histogram("gradients", scope)
    with pytest.raises(ValueError, match="Expected kind= to be 'activations' or 'gradients'"):
        found.histogram("gradient")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")]
)
def test_pictures_are_written(found, tmp_path, name, start):
    found.plot(tmp_path / name, scale=found.loss_scale())
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.thorough
def test_a_picture_says_what_float16_loses(found, tmp_path):
    import matplotlib

    file = tmp_path / "energy.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        found.plot(str(file), scope="*/energy", scale=2**4)
    drawn = file.read_text()
    shares = found.shares("float16", kind="activations", scope="*/energy")
    assert f"overflowing {100 * shares.overflowing:.1f} %" in drawn
    assert "its gradient in */energy" in drawn and "at scale 2**4" in drawn


def test_a_picture_has_a_known_ending(found, tmp_path):
    with pytest.raises(ValueError, match="supported formats"):
        found.plot(tmp_path / "ranges.xyz")


@pytest.mark.thorough
def test_matplotlib_is_imported_by_the_picture_alone():
    code = (
        "import sys, jax.numpy as jnp, jmpx\n"
        "print(jmpx.inspect.ranges(jnp.sin)(jnp.ones(3)))\n"
        "assert 'matplotlib' not in sys.modules\n"
        "sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None\n"
        "try: jmpx.inspect.ranges(jnp.sin)(jnp.ones(3)).plot('a.png')\n"
        "except ModuleNotFoundError as error: assert 'matplotlib' in str(error)\n"
        "else: raise SystemExit('drawn')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
