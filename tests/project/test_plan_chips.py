"""`plan` on the compilers of chips: it says what a compilation in this process says."""

import functools

import jax
import model_steps
import pytest
from compiled_step import compiling
from helpers.adam_step import shapes, step_under
from helpers.compilers import CHIPS, MISSING
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

import jmpx

pytestmark = [
    pytest.mark.slow,  # some seconds for each chip
    pytest.mark.usefixtures("standard_promotion"),  # as in a user's program
]
WITH_COMPILER = [
    pytest.param(name, marks=pytest.mark.skipif(why != "", reason=why))
    for name, why in MISSING.items()
]
POLICIES = ["c=f32", "c=bf16,o=f32", "by=operations,c=bf16,save=products"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def devices(monkeypatch):
    """Makes the chips of a name in this process."""

    def chips(name, count=1):
        for variable, value in CHIPS[name].settings.items():
            monkeypatch.setenv(variable, value)
        return topologies.get_topology_desc(**CHIPS[name].topology(count)).devices[:count]

    with compiling():
        yield chips


def make_step(policy, rows=None, whole=None, width=256, batch=1024):
    """A step of a model of four layers, which donates its state."""
    on = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # noqa: E731
    *state, x = shapes(width, batch, layers=4)
    state = jax.tree.map(lambda each: on(each, whole if each.ndim else None), state)
    return jax.jit(step_under(policy), donate_argnums=(0, 1)), (*state, on(x, rows))


def directly(chip, step, arguments):
    lowered = step.trace(*arguments).lower(lowering_platforms=(CHIPS[chip].platform,))
    return lowered.compile(compiler_options=CHIPS[chip].options)


def assert_alike(row, program):
    assert row.error == ""
    assert row.peak == program.memory_analysis().peak_memory_in_bytes
    cost = program.cost_analysis()
    assert row.accessed == (cost["bytes accessed"] if cost else None)
    assert sum(row.sent.values()) == jmpx.inspect.compiled(program).sent


@pytest.mark.parametrize("chip", WITH_COMPILER)
def test_one_chip(chip, devices):
    report = jmpx.inspect.plan(make_step, POLICIES[1:2], chip=chip)
    on = jax.sharding.SingleDeviceSharding(devices(chip)[0])
    for row in report.rows:
        assert_alike(row, directly(chip, *make_step(row.policy, on, on)))
        assert row.fits and row.chips == 1
    assert f"on {chip}, " in str(report)


@pytest.mark.parametrize("chip", WITH_COMPILER)
def test_chips_of_a_mesh_that_is_not_there(chip, devices):
    def sharded(policy, mesh):
        return make_step(
            policy, NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
        )

    mesh = AbstractMesh((8,), ("data",))
    report = jmpx.inspect.plan(functools.partial(sharded, mesh=mesh), POLICIES[2:], chip=chip)
    real = Mesh(devices(chip, 8), "data")
    for row in report.rows:
        assert_alike(row, directly(chip, *sharded(row.policy, real)))
        assert row.chips == 8 and row.sent


@pytest.mark.parametrize("chip", WITH_COMPILER)
def test_what_does_not_fit_is_a_row(chip):
    make = functools.partial(make_step, width=8192, batch=2**22)
    (row,) = jmpx.inspect.plan(make, ["c=f32"], chip=chip).rows
    assert row.fits is False and (row.peak or 0) > CHIPS[chip].memory


@pytest.mark.parametrize("chip", WITH_COMPILER[::3])
def test_a_train_step_of_a_vision_transformer(chip, devices):
    point = model_steps.Point("vit", "autocast, save", layers=2, batch=2)

    def make_step(policy):
        step, state, batch = model_steps.make(point, 2, small=True)
        return jax.jit(step.run, donate_argnums=0), (state, *batch)

    (row,) = jmpx.inspect.plan(make_step, ["c=bf16"], chip=chip).rows
    traced = model_steps.trace(point, devices(chip), small=True)
    lowered = traced.lower(lowering_platforms=(CHIPS[chip].platform,))
    assert_alike(row, lowered.compile(compiler_options=CHIPS[chip].options))


def test_a_mesh_of_more_chips_than_there_are_is_refused():
    with pytest.raises(ValueError, match="^Expected at most as many chips as 16x16 of v5e, "):
        CHIPS["v5e"].topology(512)
