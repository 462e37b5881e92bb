"""Types of what looks at a program. Run here, and checked by pyright."""

# An ignored error must be there: it is what this file asserts.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import pytest
from typed_models import Params, make_params, ones, predict

import jmpx


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    return predict(params, x)["y"].sum()


def test_audit() -> None:
    report = jmpx.inspect.audit(loss_fn)(make_params(), ones(4, 2))
    assert_type(report, jmpx.inspect.Audit)
    assert_type(report.check("f32", at_least=0.5), jmpx.inspect.Audit)
    assert_type(report.products[0].flops, int)
    assert_type([finding.name for finding in report.findings], list[str])
    assert_type(report.saved, dict[str, int])
    assert_type(report.to_text(all=True), str)
    assert_type(report.to_dict(), dict[str, Any])
    assert_type(report.to_json(), str)
    with pytest.raises(TypeError):
        jmpx.inspect.audit(3)()  # pyright: ignore[reportArgumentType]


def test_compiled() -> None:
    # JAX does not annotate the arguments of a jitted function.
    step: Any = jax.jit(loss_fn)  # pyright: ignore[reportUnknownMemberType]
    found = jmpx.inspect.compiled(step.lower(make_params(), ones(4, 2)))
    assert_type(found, jmpx.inspect.Compiled)
    assert_type(found.sent, float)
    assert_type(found.counts(), dict[str, int])
    assert_type(found.to_dict(), dict[str, Any])
    assert_type(found.to_json(), str)
    assert found.memory is None


def test_ranges(tmp_path: Path) -> None:
    found = jmpx.inspect.ranges(loss_fn)(make_params(), ones(4, 2))
    assert_type(found, jmpx.inspect.Ranges)
    assert_type(found.loss_scale(head_room=2), float)
    assert_type(found.to_json(), str)
    found.plot(tmp_path / "ranges.png")


def test_first_nonfinite() -> None:
    found = jmpx.inspect.first_nonfinite(loss_fn)(make_params(), ones(4, 2))
    assert_type(found, jmpx.inspect.FirstNonfinite | None)
    assert found is None


def test_blame(tmp_path: Path) -> None:
    found = jmpx.inspect.blame(loss_fn, "c=bf16")((make_params(), ones(4, 2)))
    assert_type(found, jmpx.inspect.Blame)
    assert_type(found.check(at_most=0.1), jmpx.inspect.Blame)
    assert_type(found.rows[0].share, float)
    assert_type(found.explained, float)
    assert_type(found.diff(found), str)
    assert_type(found.to_json(), str)
    found.plot(tmp_path / "blame.png")


def make_step(policy: str) -> tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]:
    return jnp.sin, (jax.ShapeDtypeStruct((8,), jnp.float32),)


def test_plan() -> None:
    found = jmpx.inspect.plan(make_step, ["c=f32", "c=bf16"])
    assert_type(found, jmpx.inspect.Plan)
    assert_type([row.peak for row in found.rows], list[int | None])
    assert_type(found.to_json(), str)


def test_choose(tmp_path: Path) -> None:
    policy = "by=operations,c=bf16"
    found = jmpx.inspect.choose(loss_fn, policy, error=0.5)((make_params(), ones(4, 2)))
    assert_type(found, jmpx.inspect.Choice)
    assert_type(found.policy, str)
    assert_type([row.error for row in found.rows], list[float])
    assert_type(found.to_dict(), dict[str, Any])
    found.plot(tmp_path / "choice.png")


def test_compare() -> None:
    emulated = jmpx.inspect.emulate(loss_fn)
    assert_type(emulated(make_params(), ones(4, 2)), jax.Array)
    found = jmpx.inspect.compare(loss_fn, emulated, band=0.1)(make_params(), ones(4, 2))
    assert_type(found, jmpx.inspect.Comparison)
    assert_type(found.check(at_most=0.1), jmpx.inspect.Comparison)
    assert_type([row.error for row in found.rows], list[float])
    assert_type(found.to_dict(), dict[str, Any])
    assert_type(found.to_html(), str)
