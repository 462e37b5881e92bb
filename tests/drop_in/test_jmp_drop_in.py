"""`import jmpx as jmp`: what JMP's users hold on to, and what was broken there."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import jmp as theirs
import numpy as np
import pytest
from helpers import run_python

import jmpx as jmp


def test_all_names_exactly_what_is_public():
    public = {name for name in dir(jmp) if not name.startswith("_")}
    modules = "distributed equinox flags flax haiku inspect mpx optim types".split()
    assert public == {*jmp.__all__, *modules} and set(theirs.__all__) <= set(jmp.__all__)
    assert all(hasattr(jmp, name) for name in jmp.__all__)
    with pytest.raises(AttributeError, match="module 'jmpx' has no attribute 'autocats'"):
        jmp.autocats  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    assert list(jmp.__all__) == sorted(jmp.__all__)


@pytest.mark.thorough
def test_haiku_runs_with_jmpx_in_jmps_place():
    code = """if True:
        import sys
        import jmpx
        sys.modules["jmp"] = jmpx
        import haiku as hk, jax, jax.numpy as jnp
        hk.mixed_precision.set_policy(hk.nets.MLP, jmpx.get_policy("c=bf16,o=f32"))
        network = hk.transform(lambda x: hk.nets.MLP([8, 2])(x))
        params = network.init(jax.random.key(0), jnp.ones((4, 3)))
        y = network.apply(params, None, jnp.ones((4, 3)))
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
        print(y.dtype, dtypes, jmpx.policy_of(hk.nets.MLP), sys.modules["jmp"] is jmpx)
        """
    result = run_python("-W", "error", "-c", code)
    assert result.returncode == 0, result.stderr
    policy = "params=float32,compute=bfloat16,output=float32"
    assert result.stdout == f"float32 {{'float32'}} {policy} True\n"


def test_scales_of_3_and_selection_of_none():
    for loss_scale in (jmp.StaticLossScale(3), jmp.DynamicLossScale(3.0)):
        assert loss_scale.scale({"a": jnp.array(1.0)}) == {"a": 3}
        assert loss_scale.unscale({"a": jnp.array(3.0)}) == {"a": 1}
    assert jax.tree.leaves(jmp.StaticLossScale(0)) == []
    assert jmp.select_tree(jnp.bool_(True), None, None) is None


def test_a_hand_serialised_loss_scale():
    loss_scale = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(3), 10, 4, jnp.float32(0.5))
    record = {"type": type(loss_scale).__name__, "loss_scale": float(loss_scale.loss_scale)}
    for name in ("counter", "period", "factor", "min_loss_scale"):
        record[name] = np.asarray(getattr(loss_scale, name)).item()
    restored = getattr(jmp, record.pop("type"))(**record)
    assert restored == loss_scale


def test_defects_of_jmp_are_mended():
    assert str(jmp.Policy(np.dtype("float32"), np.dtype("float16"), "f32"))  # was a KeyError
    loss_scale = jmp.DynamicLossScale(8.0, min_loss_scale=4.0)
    shrunk = jax.jit(lambda s: s.adjust(False))(loss_scale)  # jmp#44, and adjust(False)
    assert shrunk.min_loss_scale == 4.0
    integers = {"n": jnp.arange(2)}
    assert loss_scale.scale(integers)["n"].dtype == jnp.int32  # was a float
    functions = {"f": jnp.tanh}
    assert jmp.select_tree(jnp.bool_(True), functions, functions) == functions  # was an error


# Subclasses of DynamicLossScale, as programs of JMP write them, and register them as JMP does.


def plain(m):
    class Plain(m.DynamicLossScale):
        pass

    return Plain


def rebuilt(m):
    """Of a public program: a class that converts nothing, and rebuilds itself in each step."""

    class DynamicLossScale(m.DynamicLossScale):
        def __post_init__(self):
            pass

        def adjust(self, grads_finite):
            return DynamicLossScale(**dataclasses.asdict(super().adjust(grads_finite)))

    return DynamicLossScale


def with_a_field(m):
    @dataclasses.dataclass(frozen=True)
    class Named(m.DynamicLossScale):
        name: str = "loss"

        def adjust(self, grads_finite):
            adjusted = dataclasses.asdict(super().adjust(grads_finite))
            return Named(**adjusted | {"name": self.name})

    return Named


def with_its_own_leaves(m):
    @dataclasses.dataclass(frozen=True)
    class Counted(m.DynamicLossScale):
        steps: Any = 0

        def adjust(self, grads_finite):
            adjusted = dataclasses.asdict(super().adjust(grads_finite))
            return Counted(**adjusted | {"steps": self.steps + 1})

        def tree_flatten(self):
            return (self.loss_scale, self.counter, self.steps), (self.period, self.factor)

        @classmethod
        def tree_unflatten(cls, meta, data):
            loss_scale, counter, steps = data
            return cls(loss_scale, counter, *meta, steps=steps)

    return Counted


SUBCLASSES = [plain, rebuilt, with_a_field, with_its_own_leaves]


def steps_in_loop(step, state):
    for _ in range(3):
        state = step(state)
    return state


RUNS = {
    "eager": steps_in_loop,
    "jit": lambda step, state: steps_in_loop(jax.jit(step), state),
    "scan": lambda step, state: jax.lax.scan(lambda s, _: (step(s), None), state, length=3)[0],
    "vmap": lambda step, state: jax.tree.map(
        lambda x: x[0], jax.vmap(step)(jax.tree.map(lambda x: jnp.asarray(x)[None], state))
    ),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("make", SUBCLASSES)
def test_a_subclass_that_is_registered_as_jmps_trains(make, run, standard_promotion):
    found = []
    for m in (jmp, theirs):
        # JMP's own adjust returns its own class, which no loop takes.
        is_own = make is plain and m is theirs
        cls = m.DynamicLossScale if is_own else make(m)
        cls = cls if is_own else jax.tree_util.register_pytree_node_class(cls)
        scale = cls(jnp.float32(2.0**15), counter=jnp.int32(1), period=3)

        def step(scale, m=m):
            grads = jax.grad(lambda w: scale.scale(1e34 * w))(jnp.float32(0.5))
            return scale.adjust(m.all_finite(grads))  # not finite above 2**15

        scale = RUNS[run](step, scale)
        assert type(scale) is cls
        found.append((float(scale.loss_scale), int(scale.counter), scale.period))
        if make is with_its_own_leaves:
            assert int(scale.steps) == (1 if run == "vmap" else 3)
    assert found[0] == found[1]


@pytest.mark.parametrize("make", SUBCLASSES)
def test_and_in_the_gradient_function_which_is_traced_once(make):
    cls = jax.tree_util.register_pytree_node_class(make(jmp))
    scale, traces = cls(jnp.float32(2.0**15)), []
    if make is with_a_field:
        scale = dataclasses.replace(scale, name="other")

    @jax.jit
    def step(scale, w):
        traces.append(w)
        return jmp.value_and_grad(lambda w: (w * 3).sum(), scale, policy="c=f16")(w)

    for _ in range(2):
        _, scale, finite, grads = step(scale, jnp.ones(2))
    assert type(scale) is cls and int(scale.counter) == 2 and finite and jnp.all(grads == 3)
    assert getattr(scale, "name", "other") == "other"
    assert len(traces) <= 2  # JMP's number, too, where a Python number is a leaf
    assert jax.tree.structure(scale) == jax.tree.structure(jax.tree.map(lambda x: x, scale))


# Loss scales and policies of JMP itself, as old checkpoints and files that still import it have.

SCALES = {
    "none": lambda m: m.NoOpLossScale(),
    "static=8": lambda m: m.StaticLossScale(8),
    "static=1024": lambda m: m.StaticLossScale(jnp.float32(1024)),
    "static=16": lambda m: m.StaticLossScale(jnp.float16(16)),
    "dynamic,init=32768": lambda m: m.DynamicLossScale(jnp.float32(2.0**15)),
    "dynamic,init=512,counter=7,period=100,factor=4,min=0.5": lambda m: m.DynamicLossScale(
        jnp.float32(512), jnp.int32(7), 100, 4, np.float32(0.5)
    ),
    "dynamic,init=16384,counter=0": lambda m: m.DynamicLossScale(
        jnp.asarray(2.0**15), min_loss_scale=jnp.ones(())
    ).adjust(jnp.bool_(False)),
}


@pytest.mark.parametrize("kept", ["as it is", "pickled", "in numpys", "stacked"])
@pytest.mark.parametrize("text", SCALES)
def test_a_loss_scale_of_jmp_is_taken(text, kept, standard_promotion):
    old = SCALES[text](theirs)
    if kept == "pickled":
        old = pickle.loads(pickle.dumps(old))
    elif kept == "in numpys":
        old = jax.tree.map(np.asarray, old)
    elif kept == "stacked":
        old = jax.tree.map(lambda x: jnp.stack([x, x]), old)
    new, expected = jmp.get_loss_scale(old), jmp.get_loss_scale(text)
    if kept != "as it is":  # JMP loses this one in each tree
        old_default = getattr(expected, "min_loss_scale", 1) == 1
        new = new if old_default else dataclasses.replace(new, min_loss_scale=0.5)
    if kept == "stacked":
        new = jax.tree.map(lambda x: x[0], new)
    assert str(new) == str(expected) and isinstance(new, jmp.LossScale)
    mixed = jmp.MixedPrecision("c=f16", expected)
    assert str(jmp.MixedPrecision("c=f16", new).loss_scale) == str(mixed.loss_scale)


def test_what_is_not_jmps_is_no_loss_scale_of_it():
    class DynamicLossScale(theirs.DynamicLossScale):  # which may adjust in another way
        pass

    values: Any = theirs.DynamicLossScale, DynamicLossScale(jnp.float32(8)), theirs.Policy
    for value in values:
        with pytest.raises(TypeError, match="Expected the string of a loss scale"):
            jmp.get_loss_scale(value)
