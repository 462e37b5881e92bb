"""Trees with leaves that JAX cannot hold."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpx
from jmpx._base.leaves import spell


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_all_finite_of_long_doubles(dtype, shape):
    beyond_float64 = np.full(shape, np.longdouble(10) ** 400, dtype)
    check = {"long": beyond_float64[()], "float": jnp.ones(2)}
    for run in (jmpx.all_finite, lambda t: jax.jit(lambda w: jmpx.all_finite({**t, "w": w}))(1.0)):
        assert run(check)
        for bad in (np.inf, np.nan):
            assert bool(run({**check, "long": np.full(shape, bad, dtype)})) == (0 in shape)
        assert not run({**check, "float": jnp.array([1.0, jnp.inf])})


OUTSIDE = {
    "text": (np.array(["a", "b"]), np.array(["c", "long"])),
    "one text": (np.str_("a"), np.str_("b")),
    "bytes": (np.array([b"a"]), np.array([b"b"])),
    "dates": (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
    "many dates": (np.arange(3).astype("M8[s]"), np.arange(1, 4).astype("M8[s]")),
    "durations": (np.timedelta64(1, "s"), np.timedelta64(2, "h")),
    "objects": (np.array([print, None]), np.array([None, print])),
    "long doubles": (np.longdouble(1), np.longdouble(2)),
    "a number and a text": (np.float32(1), np.str_("1")),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_select_tree_of_what_jax_cannot_hold(name):
    a, b = ({"w": jnp.full(2, float(w)), "x": x} for w, x in enumerate(OUTSIDE[name]))
    for true, false in ((True, False), (np.True_, np.False_), (jnp.array(True), jnp.array(False))):
        assert jmpx.select_tree(true, a, b)["x"] is a["x"]
        picked = jmpx.select_tree(false, a, b)
        assert picked["x"] is b["x"] and (picked["w"] == 1).all()
    picked = []

    def step(w, flag):
        picked.append(jmpx.select_tree(False, {**a, "w": w}, b)["x"])  # no tracer
        return jmpx.select_tree(flag, a, b)["w"]

    with pytest.raises(TypeError, match=r"by a traced flag between .* at tree\['x'\]") as error:
        jax.jit(step)(jnp.ones(2), True)
    message = str(error.value).splitlines()[0]  # JAX adds lines to what is raised in jit
    assert message.endswith("outside of jax.jit, or leave them out of the trees.")
    assert f" between {spell(a['x'])} and {spell(b['x'])} at " in message
    assert picked[0] is b["x"]


@pytest.mark.parametrize(
    "name", [n for n in OUTSIDE if n not in ("objects", "a number and a text")]
)
def test_leaves_that_jax_cannot_hold_and_that_are_equal_are_no_conflict(name):
    leaf, _ = OUTSIDE[name]
    equal = pickle.loads(pickle.dumps(leaf))
    found = []

    @jax.jit
    def step(flag):
        found.append(jmpx.select_tree(flag, {"x": leaf}, {"x": equal})["x"])
        return flag

    step(True)
    assert found[0] is leaf and equal is not leaf
