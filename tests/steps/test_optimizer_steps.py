"""`jmpx.optimizer_update` and `jmpx.skip_nonfinite`: steps that are skipped to the bit, counted."""

# Optax types states, updates and parameters as pytrees of arrays, which have no fields and no None.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

import functools
from contextlib import nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apply_updates, assert_same_bits, dtypes, lenient, normal, warns_once
from helpers.maps import mesh_of
from jax.sharding import PartitionSpec as P

import jmpx
import jmpx.equinox

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(optax.linear_schedule(0.5, 0.1, 10), momentum=0.9),
    "adam": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "dog": optax.contrib.dog,  # widens its state at the first step
}


def make_optimizer(name):
    return lenient(OPTIMIZERS[name]())


def make_params(rng):
    return {
        "w": normal(rng, 4, 3),
        "b": jnp.asarray(rng.normal(size=3), jnp.bfloat16),
        # A sum with +0.0 would turn -0.0 into 0.0.
        "zero": jnp.array([-0.0, 0.0], jnp.float32),
    }


def like(params, rng, bad=None):
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    if bad is not None:
        grads["w"] = grads["w"].at[1, 1].set(bad)
    return grads


def by_update(params, optimizer, state, grads, finite, skip_by):
    """A step of one's own with `skip_nonfinite`."""
    updates, state = optimizer.update(grads, state, params, grads_finite=finite)
    return apply_updates(params, updates), state


STEPS = {
    "plain": (lambda optimizer, skip: optimizer, jmpx.optimizer_update),
    "counting": (lambda optimizer, skip: jmpx.skip_nonfinite(optimizer), jmpx.optimizer_update),
    "wrapped": (lambda optimizer, skip: jmpx.skip_nonfinite(optimizer, skip_by=skip), by_update),
}


def make_step(way, skip, optimizer=None):
    wrap, update = STEPS[way]
    optimizer = wrap(make_optimizer("adam") if optimizer is None else optimizer, skip)

    def step(params, state, grads, finite):
        return update(params, optimizer, state, grads, finite, skip_by=skip)

    return optimizer, step


def assert_near(got, expected, factor, is_exact=False):
    """Holds that results differ by one rounding: compiled, an update and its sum may be fused."""
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert a.dtype == b.dtype
        is_rounded = jnp.issubdtype(a.dtype, jnp.floating) and not is_exact
        eps = float(jnp.finfo(a.dtype).eps) if is_rounded else 0
        wide = (np.asarray(each, np.float64) for each in (a, b))
        np.testing.assert_allclose(*wide, rtol=factor * eps, atol=eps)


# Skipped and taken


@pytest.mark.parametrize(
    ("name", "way", "skip", "bad", "jit"),
    [
        ("adam", "plain", "cond", np.inf, True),
        ("adamw", "plain", "where", np.nan, True),
        ("sgd", "plain", "cond", -np.inf, False),
        ("sgd", "counting", "cond", np.inf, True),
        ("dog", "plain", None, np.inf, True),
        ("dog", "wrapped", "where", np.inf, True),
    ],
)
def test_they_run_as_optax_runs_them_and_skip_to_the_bit(name, way, skip, bad, jit, rng):
    plain, params = make_optimizer(name), make_params(rng)
    optimizer, step = make_step(way, skip, plain)
    run = jax.jit if jit else lambda f: f
    step = run(lambda *args, step=step: step(*args, jmpx.all_finite(args[2])))
    by_hand, apply = run(plain.update), run(apply_updates)
    state, plain_state = optimizer.init(params), plain.init(params)
    _, widened = jax.eval_shape(plain.update, params, plain_state, params)
    assert (dtypes(widened) != dtypes(plain_state)) == (name == "dog")
    total = row = 0
    for finite in (False, True, False, False, True):
        grads = like(params, rng, None if finite else bad)
        new, state = step(params, state, grads)
        inner = state if way == "plain" else state.inner_state
        total, row = total + (not finite), (row + 1) * (not finite)
        if way != "plain":
            assert (state.total_skipped, state.consecutive_skipped) == (total, row)
            assert bool(state.grads_finite) == finite
        updates, after = by_hand(grads, plain_state, params)
        assert dtypes(inner) == dtypes(after) and dtypes(new) == dtypes(params)
        if finite:
            plain_state, expected = after, apply(params, updates)
        else:  # the old values, in the dtypes that optax gives them
            plain_state = jax.tree.map(lambda x, y: x.astype(y.dtype), plain_state, after)
            expected = params
            assert_same_bits((new, inner), (params, plain_state))
        factor = 8 if name == "dog" else 4
        assert_near((new, inner), (expected, plain_state), factor, is_exact=not jit)
        params, plain_state = new, inner


@pytest.mark.parametrize("skip", ["where", "cond"])
def test_skip_nonfinite_checks_gradients_and_its_updates_are_negative_zeros(skip, rng):
    optimizer, params = jmpx.skip_nonfinite(make_optimizer("sgd"), skip_by=skip), make_params(rng)
    state = optimizer.init(params)
    updates, new = jax.jit(optimizer.update)(like(params, rng, np.inf), state, params)
    assert_same_bits(new.inner_state, state.inner_state)
    assert_same_bits(updates, jax.tree.map(lambda p: jnp.full_like(p, -0.0), params))
    assert_same_bits(apply_updates(params, updates), params)
    # The state is found by optax.
    assert optax.tree_utils.tree_get(new, "total_skipped") == 1


def test_skip_nonfinite_takes_the_flag_that_it_is_given(rng):
    optimizer, params = jmpx.skip_nonfinite(optax.sgd(1.0)), {"w": normal(rng, 3)}
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params, grads_finite=False)
    assert (updates["w"] == 0).all() and state.total_skipped == 1
    bad = {"w": jnp.full(3, jnp.inf)}
    updates, state = optimizer.update(bad, state, params, grads_finite=True)
    assert jnp.isinf(updates["w"]).all() and state.total_skipped == 1


def test_a_step_may_donate_its_first_state(rng):
    optimizer, params = jmpx.skip_nonfinite(make_optimizer("adam")), make_params(rng)
    state, loss_scale = optimizer.init(params), jax.device_put(jmpx.DynamicLossScale(2.0**4))
    kept = jax.tree.map(jnp.copy, (state, loss_scale))  # optax itself makes some arrays once
    grads = like(params, rng)

    def step(state, loss_scale):
        _, state = optimizer.update(grads, state, params)
        return state, loss_scale.adjust(state.grads_finite)

    counters = state.total_skipped, state.consecutive_skipped, state.grads_finite
    assert len({array.unsafe_buffer_pointer() for array in counters}) == 3
    donated = jax.jit(step, donate_argnums=(0, 1))(state, loss_scale)
    assert_same_bits(donated, jax.jit(step)(*kept))


def wrapped_by_lambdas(optimizer):
    """Functions around those of `skip_nonfinite`, which show nothing of them."""
    return optax.GradientTransformationExtraArgs(
        lambda params: optimizer.init(params),
        lambda grads, state, params=None, **extra: optimizer.update(grads, state, params, **extra),
    )


@pytest.mark.parametrize(
    ("wrap", "way", "skip", "limit"),
    [
        (lambda optimizer: optimizer, "counting", "where", 4),
        (wrapped_by_lambdas, "wrapped", "cond", 1),
        (wrapped_by_lambdas, "counting", "where", 2),
    ],
)
def test_check_progress_raises_whatever_wraps_the_optimizer(wrap, way, skip, limit, rng):
    optimizer, update = jmpx.skip_nonfinite(optax.sgd(0.1, 0.9), skip_by=skip), STEPS[way][1]
    step, free = (
        functools.partial(lambda used, p, s, g, f: update(p, used, s, g, f, skip_by=skip), each)
        for each in (wrap(optimizer), optimizer)
    )
    params = {"w": normal(rng, 3)}
    carry = reference = params, optimizer.init(params)
    check = lambda state: jmpx.inspect.check_progress(  # noqa: E731
        state, jmpx.NoOpLossScale(), max_consecutive=limit
    )
    for finite in [True, *[False] * limit, True, *[False] * limit]:
        grads = {"w": normal(rng, 3).at[1].set(1.0 if finite else jnp.nan)}
        reference = free(*reference, grads, finite)
        before, carry = carry, step(*carry, grads, finite)
        assert_same_bits(carry, reference)
        check(carry[1])
        if not finite:
            assert_same_bits(carry[0], before[0])
    _, state = step(*carry, grads, False)
    with pytest.raises(FloatingPointError, match=f"Skipped {limit + 1} optimizer steps"):
        check(state)


# What goes in and comes out


def test_extra_arguments_are_handed_on(rng):
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    optimizer = jmpx.skip_nonfinite(lenient(optax.chain(optax.sgd(0.1), plateau)))
    params = {"w": normal(rng, 3)}
    state = optimizer.init(params)
    _, state = optimizer.update(params, state, params, value=1.0)
    model, state = jmpx.optimizer_update(params, optimizer, state, params, True, value=1.0)
    assert state.total_skipped == 0 and model["w"].dtype == jnp.float32
    plain = jmpx.skip_nonfinite(optax.sgd(0.1))  # takes none: not handed on
    plain.update(params, plain.init(params), params, value=1.0)
    seen = []

    def update(updates, state, params=None, *, value=None, **extra):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    steps = jmpx.skip_nonfinite(optax.MultiSteps(inner, 1))
    with jax.numpy_dtype_promotion("standard"):
        steps.update(params, steps.init(params), params, value=3.0)
    assert seen and None not in seen


def test_optimizer_update_leaves_other_leaves_alone(rng):
    w, key = normal(rng, 3), jax.random.key(0)
    model = {"w": w, "act": jnp.tanh, "n": jnp.arange(2), "key": key, "none": None, "p": 0.5}
    trained = {name: w if name == "w" else None for name in model}
    optimizer = make_optimizer("adam")
    new, _ = jmpx.optimizer_update(model, optimizer, optimizer.init(trained), trained, True)
    assert all(new[name] is model[name] for name in ("act", "n", "key", "none", "p"))
    assert not (new["w"] == w).any()
    weight = {"w": jnp.ones(())}
    sgd = optax.sgd(0.1)
    new, _ = jmpx.optimizer_update(weight, sgd, sgd.init(weight), {"w": 0.5}, True)
    np.testing.assert_allclose(new["w"], 0.95)


def test_a_float32_update_of_a_bfloat16_parameter_is_rounded_once():
    model, optimizer = {"w": jnp.array([1.0], jnp.bfloat16)}, optax.sgd(1.0)
    step = {"w": jnp.array([-(2.0**-8 + 2.0**-9)], jnp.float32)}
    new, _ = jmpx.optimizer_update(model, optimizer, optimizer.init(model), step, True)
    assert new["w"].dtype == jnp.bfloat16 and new["w"][0] == 1 + 2.0**-7


@pytest.mark.parametrize("wrap", [lambda o: o, jmpx.skip_nonfinite])
def test_updates_work_on_numpy_parameters(wrap, rng):
    optimizer, params = wrap(optax.sgd(0.5)), {"w": rng.normal(size=3).astype(np.float32)}
    state = optimizer.init(params)
    new, _ = jmpx.optimizer_update(params, optimizer, state, params, np.bool_(True))
    np.testing.assert_allclose(new["w"], params["w"] / 2)


# cond and where


@pytest.mark.parametrize("skip", ["cond", "where"])
@pytest.mark.parametrize("way", STEPS)
def test_a_cond_holds_all_of_the_optimizer(way, skip, rng):
    optimizer, step = make_step(way, skip)
    params = make_params(rng)
    jaxpr = jax.make_jaxpr(step)(params, optimizer.init(params), params, jnp.array(True))
    # The square roots of Adam are in the branch that a skipped step does not enter.
    outside = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "cond"]
    assert (len(outside) < len(jaxpr.eqns)) == (skip == "cond")
    assert any("sqrt" in str(eqn) for eqn in outside) == (skip == "where")
    assert "sqrt" in str(jaxpr)


@pytest.mark.thorough
@pytest.mark.parametrize(("way", "skip"), [("wrapped", "cond"), ("counting", "where")])
def test_steps_in_a_scan_and_under_vmap(way, skip, rng):
    optimizer, step = make_step(way, skip)
    params, grads = {"w": normal(rng, 2, 3)}, {"w": normal(rng, 2, 3)}
    flags = jnp.array([[True, False, False, True], [False, True, True, False]])

    def run(params, grads, flags):
        carry = params, optimizer.init(params)
        return jax.lax.scan(lambda c, flag: (step(*c, grads, flag), c), carry, flags)

    (last, state), carries = jax.jit(jax.vmap(run))(params, grads, flags)
    before = carries[0]["w"]
    after = jnp.concatenate([before[:, 1:], last["w"][:, None]], axis=1)
    np.testing.assert_array_equal((before == after).all(-1), ~flags)
    counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    np.testing.assert_array_equal(counts[:2], [[2, 2], [2, 2]])
    np.testing.assert_array_equal(state.total_skipped, [2, 2])
    np.testing.assert_array_equal(state.consecutive_skipped, [0, 1])


@pytest.mark.parametrize(
    ("way", "skip", "vma"),
    [("plain", "cond", True), ("counting", "cond", True), ("wrapped", "where", False)],
)
def test_steps_under_shard_map(way, skip, vma, rng):
    # Gradients are replicated and parameters are sharded; of two flags one is replicated, the other
    # differs between devices.
    optimizer, step = make_step(way, skip)
    params, flags = normal(rng, 4), jnp.array([True, False, True, True])

    def run(params, part, flags):
        together = jax.lax.pmin(flags[0].astype(jnp.int32), "data") == 1
        given = ((params, together), (part, together), (part, flags[0]))
        return [step(p, optimizer.init(p), p, flag)[0] for p, flag in given]

    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": [P(), P("data"), P("data")]}
    mapped = jax.shard_map(run, mesh=mesh_of(4), check_vma=vma, **specs)
    same, part, own = jax.jit(mapped)(params, params, flags)
    assert_same_bits(same, params)
    assert_same_bits(part, params)
    np.testing.assert_array_equal(own == params, ~flags)


@pytest.mark.parametrize("skip", ["cond", "where"])
def test_a_skipped_step_keeps_subnormal_numbers(skip):
    params = {"w": jnp.array([2.0**-140, -(2.0**-149), -0.0], jnp.float32)}
    optimizer, step = make_step("counting", skip)
    new, _ = jax.jit(step)(params, optimizer.init(params), params, jnp.array(False))
    assert_same_bits(new, params)


def test_a_state_with_python_numbers_is_selected(rng):
    rate = optax.GradientTransformation(
        lambda params: {"rate": 0.5, "steps": jnp.int32(0)},
        lambda g, s, p=None: (
            jax.tree.map(lambda x: -s["rate"] * x, g),
            s | {"steps": s["steps"] + 1},
        ),
    )
    params = {"w": normal(rng, 3)}

    @jax.jit
    def step(params, steps, finite):
        state = {"rate": 0.5, "steps": steps}
        params, state = jmpx.optimizer_update(params, rate, state, params, finite)
        assert state["rate"] == 0.5 and isinstance(state["rate"], float)
        return params, state["steps"]

    for finite in (True, False):
        new, steps = step(params, jnp.int32(3), finite)
        assert steps == 3 + finite
        np.testing.assert_array_equal(new["w"], params["w"] / (2 if finite else 1))


# What is refused, and warned of


def test_a_view_that_reaches_an_optimizer_is_told():
    optimizer = optax.sgd(0.1)
    counting, model = jmpx.skip_nonfinite(optimizer), eqx.nn.Linear(2, 2, key=jax.random.key(0))
    view, state = jmpx.equinox.with_policies(model, "c=bf16,o=f32"), counting.init(model)
    for call in (
        counting.init,
        lambda model: counting.init({"layers": [{"head": model}]}),
        lambda model: counting.update(model, state),
        lambda model: jmpx.optimizer_update(model, optimizer, optimizer.init(model), model, True),
    ):
        call(model)  # nothing is said
        with warns_once(__file__, "got a view of its Linear.*: give the policy to"):
            call(view)


HIDING = {
    "chain": (lambda inner: optax.chain(optax.clip(1.0), inner), jnp.array(True)),
    "its transformation": (
        lambda inner: optax.MultiSteps(inner, 2).gradient_transformation(),
        np.bool_(True),
    ),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", HIDING)
def test_a_hidden_skip_nonfinite_is_warned_of(name, rng):
    hide, finite = HIDING[name]
    optimizer, params = hide(jmpx.skip_nonfinite(lenient(optax.sgd(0.1)))), make_params(rng)
    state = optimizer.init(params)
    with warns_once(__file__, "inside other transformations, which does not count the steps"):
        jmpx.optimizer_update(params, optimizer, state, params, finite)
    if name == "chain":  # it may skip alone
        grads = like(params, rng, jnp.nan)
        new, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
        assert_same_bits(new, params)
        assert state[1].total_skipped == 1


AROUND = {  # what wraps a `skip_nonfinite` of sgd, and whether it keeps an overflow of a step
    "MultiSteps": (lambda inner: optax.MultiSteps(inner, 2), True),
    "apply_every": (lambda inner: optax.chain(optax.apply_every(2), inner), True),
    "trace": (lambda inner: optax.chain(optax.trace(0.9), inner), True),
    "its own sum": (
        lambda inner: jmpx.optim.with_state_dtype(optax.MultiSteps(inner, 2), jnp.float32),
        True,
    ),
    "before a trace": (lambda inner: optax.chain(inner, optax.trace(0.9)), False),
    "hyperparameters": (lambda inner: optax.inject_hyperparams(lambda lr: inner)(0.1), False),
    "another skip": (lambda inner: optax.apply_if_finite(inner, 9), False),
}


@pytest.mark.usefixtures("standard_promotion")  # as optax's MultiSteps asks for
@pytest.mark.parametrize("name", AROUND)
def test_an_overflow_that_stays_around_skip_nonfinite_is_told(name, rng):
    wrap, keeps = AROUND[name]
    params, sgd, no_scale = {"w": normal(rng, 3)}, optax.sgd(0.1), jmpx.NoOpLossScale()
    inside, outside = wrap(jmpx.skip_nonfinite(sgd)), jmpx.skip_nonfinite(wrap(sgd))
    bad = [{"w": params["w"].at[1].set(jnp.inf if i == 0 else 1.0)} for i in range(4)]

    states = inside.init(params), outside.init(params)
    for step, grads in enumerate(bad):  # by `update` alone, without `optimizer_update`
        updates, state = inside.update(grads, states[0], params)
        states = state, jmpx.optimizer_update(params, outside, states[1], grads, step > 0)[1]
        jmpx.inspect.check_progress({"params": bad[0], "opt_state": states[1]}, no_scale)
        is_first = step == (1 if "Multi" in name or "sum" in name else 0)
        if keeps and is_first:
            with warns_once(__file__, "whose .*w'.* is no longer finite"):
                jmpx.inspect.check_progress({"params": params, "opt_state": state}, no_scale)
    assert bool(jnp.isfinite(updates["w"]).all())
    assert int(states[1].total_skipped) == 1
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(states[1]))
    assert keeps != all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state))

    with warns_once(__file__, "where one overflow stays: .*Multi") if keeps else nullcontext():
        jmpx.optimizer_update(params, inside, inside.init(params), bad[1], True)
    with warns_once(__file__, "[)]{2}[.]$" if keeps else "True[)][.]$"):
        jmpx.optimizer_update(params, inside, inside.init(params), bad[0], False)
