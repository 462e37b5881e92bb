"""Micro-batches: how a batch is split, and that they give the gradients of the whole batch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, enable_x64, normal
from helpers.jaxprs import equations_of
from helpers.loops import instructions, operations
from helpers.maps import AXIS, in_float64, mapped, mesh_of
from helpers.training import LOSS_SCALES, loss_fn, make_params, value
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import jmpx

in_16_bits = pytest.mark.filterwarnings(  # on purpose
    "ignore:The gradient function differentiates parameters that are stored in less:UserWarning"
)

TOLERANCE = {"f16": 5e-3, "bf16": 4e-2, "f32": 5e-6}  # against float64
NO_SCALE = jmpx.NoOpLossScale()
# Their options come from tables, whose types pyright does not follow.
grad: Any = jmpx.grad
value_and_grad: Any = jmpx.value_and_grad


def parts(count, **options):
    return jmpx.Batch(microbatches=count, **options)


def assert_close(got, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance)


# What is split


DTYPES = ["float32", "float16", "bfloat16", "int8", "uint32", "bool", "complex64"]


@st.composite
def batches(draw):
    """Batch arguments of any structure, their number of examples, and a divisor of it."""
    count, each = draw(st.integers(2, 5)), draw(st.integers(0, 3))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)

    def array(dtype, rest, numpy):
        values = rng.integers(-9, 9, (count * each, *rest))
        if dtype == "key":
            return jax.random.split(jax.random.key(seed), count * each or 1)[: count * each]
        return values.astype(np.float32) if numpy else jnp.asarray(values).astype(dtype)

    shapes = st.lists(st.integers(0, 2), max_size=2)
    arrays = st.builds(array, st.sampled_from([*DTYPES, "key"]), shapes, st.booleans())
    leaves = arrays | st.sampled_from([None, 3, 0.5, "text", max])
    trees = st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
            | st.tuples(inner)
        ),
        max_leaves=3,
    )
    args = [draw(arrays), *draw(st.lists(trees, max_size=2))]
    return count, each, tuple(draw(st.permutations(args)))


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(batch=batches(), explicit=st.booleans())
def test_a_part_has_every_count_th_example_in_order(batch, explicit):
    count, each, args = batch
    params, seen = {"w": jnp.ones(7)}, []

    def loss(params, *part):
        seen.append(params["w"])
        return params["w"].sum(), part

    argnums = tuple(range(1, len(args) + 1)) if explicit else None
    options = {"batch": parts(count, argnums=argnums), "policy": "full"}
    found = jmpx.grad(loss, NO_SCALE, True, **options)(params, *args).aux
    assert jax.tree.structure(found) == jax.tree.structure(args)
    for leaf, got in zip(jax.tree.leaves(args), jax.tree.leaves(found), strict=True):
        if not isinstance(leaf, jax.Array | np.ndarray):
            assert got is leaf
            continue
        assert got.dtype == leaf.dtype and got.shape == (count, each, *leaf.shape[1:])
        np.testing.assert_array_equal(
            bits(got).swapaxes(0, 1).reshape(bits(leaf).shape), bits(leaf)
        )
    assert len(seen) == 1 and seen[0].shape == (7,)


@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(2, 8),
    examples=st.integers(1, 40),
    others=st.integers(1, 40),
)
def test_a_batch_that_cannot_be_split_is_refused(count, examples, others):
    seen = []

    def loss(w, x, y):
        seen.append((x.shape, y.shape))
        return w.sum()

    grad_fn = grad(loss, NO_SCALE, policy="full", microbatches=count)
    run = lambda x, y: grad_fn(jnp.ones(2), x, y).grads  # noqa: E731
    args = jnp.zeros((examples, 2)), jnp.zeros(others)
    if examples == others and examples % count == 0:
        jax.eval_shape(run, *args)
        assert seen == [((examples // count, 2), (examples // count,))]
        return
    with pytest.raises(ValueError, match=f"into {count} micro-batches") as error:
        jax.eval_shape(run, *args)
    differ = "differ in their number of examples" in str(error.value)
    assert differ == (examples != others) and "\n" not in str(error.value)


class Examples(NamedTuple):
    x: jax.Array
    more: dict


def nested_loss(params, batch, key, noise=0.0, *, shift):
    assert batch.more["keys"].shape in ((4,), (12,)) and not key.shape
    hidden = batch.x @ params + batch.more["y"] + shift
    return jnp.mean(hidden**2) + noise * jax.random.uniform(key).astype(hidden.dtype)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("argnums", "as_array"), [(None, np.asarray), (-3, jnp.asarray), ([1], np.asarray)]
)
def test_batches_may_be_nested_and_other_arguments_go_whole(argnums, as_array, rng, key):
    more = {"y": as_array(normal(rng, 12)), "name": "train", "keys": jax.random.split(key, 12)}
    batch = Examples(as_array(normal(rng, 12, 3)), more)
    w, shift = normal(rng, 3), normal(rng)
    grad_fn = functools.partial(value_and_grad, nested_loss, NO_SCALE, policy="full")
    whole = grad_fn()(w, batch, key, 0.5, shift=shift)
    split = grad_fn(batch=parts(3, argnums=argnums))(w, batch, key, 0.5, shift=shift)
    np.testing.assert_allclose(split.value, whole.value, rtol=1e-6)
    np.testing.assert_allclose(split.grads, whole.grads, rtol=1e-5)


@pytest.mark.parametrize("argnums", [-2, (1, 2), [2, 1]])
def test_which_arguments_are_split(argnums, rng):
    shapes = []

    def loss(params, x, y, *, scale):
        shapes.append((x.shape, y.shape, scale.shape))
        return loss_fn(params, x) + 0 * y.sum() * scale.sum()

    grad_fn = grad(loss, NO_SCALE, policy="full", batch=parts(8, argnums=argnums))
    params, x, y = make_params(rng), normal(rng, 24, 6), normal(rng, 24, 3)
    jax.eval_shape(lambda *args: grad_fn(*args, scale=jnp.ones(24)).grads, params, x, y)
    assert set(shapes) == {((3, 6), (24 if argnums == -2 else 3, 3), (24,))}


def test_no_length_decides_whether_an_array_is_split():
    """Class weights of eight rows are refused beside eight examples as beside any other number."""
    loss = lambda w, x, *, weights, key=None: (x @ w).mean() * weights.mean()  # noqa: E731
    weights = jnp.ones(8)
    for examples in (8, 16):
        args = jnp.ones(6), jnp.ones((examples, 6))
        grad_fn, of_argument = (
            grad(loss, NO_SCALE, policy="full", batch=parts(4, argnums=n)) for n in (None, 1)
        )
        with pytest.raises(ValueError, match=r"'weights' .*float32\[8\] in it .* by argnums of"):
            grad_fn(*args, weights=weights)
        jax.eval_shape(lambda *args, run=of_argument: run(*args, weights=weights)[1:], *args)
        given = {"weights": weights[0], "key": jax.random.key(0)}
        jax.eval_shape(lambda *args, run=grad_fn, given=given: run(*args, **given)[1:], *args)


def test_arguments_that_are_not_cast_are_split_too():
    def loss(w, x, target):
        assert (w.dtype, x.dtype, target.dtype) == (F16, F16, F32)
        return jnp.mean((w * x).astype(F32) - target)

    target = jnp.array([1e6, 2e6, 3e6, 4e6])  # beyond float16
    for uncast in -1, "target":
        options = {"policy": "by=arguments,c=f16", "microbatches": 2, "uncast": uncast}
        grad_fn = value_and_grad(loss, jmpx.StaticLossScale(1), **options)
        got = grad_fn(jnp.ones(()), jnp.ones(4), target)
        assert float(got.value) == 1 - 2.5e6 and float(got.grads) == 1


# Values


@pytest.mark.parametrize(
    ("policy", "kind", "count"),
    [("f16", "Dynamic", 8), ("bf16", "NoOp", 3), ("f32", "Static", 2)],
)
def test_they_give_the_gradients_of_the_whole_batch(policy, kind, count, rng):
    params, x = make_params(rng), normal(rng, 24, 6)
    loss, grads = in_float64(loss_fn, params, x)
    options = {"policy": f"c={policy}", "batch": parts(count)}
    got = jax.jit(value_and_grad(loss_fn, LOSS_SCALES[kind](), **options))(params, x)
    assert got.value.dtype == F32 and bool(got.grads_finite)
    np.testing.assert_allclose(got.value, loss, rtol=TOLERANCE[policy])
    for name, grad in grads.items():
        assert got.grads[name].dtype == F32
        error = np.abs(got.grads[name] - grad).max() / np.abs(grad).max()
        assert error < TOLERANCE[policy], name


@pytest.mark.parametrize(
    ("params", "policy"), [(BF16, "by=arguments,full"), (F16, "by=arguments,c=bf16")]
)
@in_16_bits
def test_their_gradients_are_summed_in_float32_and_rounded_once(params, policy, rng):
    """Sums in bfloat16 would stay at 256, whatever is added to it."""
    w, x = jnp.ones(3, params), np.ones((128, 3), np.float32)
    x[0], x[:, 2] = 256, rng.choice([0.5, 1, 2], 128)
    loss = lambda w, x: jnp.mean(x.astype(F32) @ w.astype(F32))  # noqa: E731
    grads = jmpx.grad(loss, NO_SCALE, batch=parts(128), policy=policy)(w, x).grads
    assert grads.dtype == params
    np.testing.assert_array_equal(grads, x.astype(np.float64).mean(0).astype(params))


@pytest.mark.thorough
@in_16_bits
def test_wide_and_complex_parameters_keep_their_dtype(rng):
    with enable_x64():
        params = {
            "wide": jnp.asarray(rng.normal(size=3)),
            "complex": jnp.asarray(rng.normal(size=3) + 1j * rng.normal(size=3)),
            "narrow": jnp.asarray(rng.normal(size=3), BF16),
            "count": 3,
        }
        x = jnp.asarray(rng.normal(size=(8, 3)))

        def loss(params, x):
            wide = params["wide"].astype(x.dtype) + params["narrow"].astype(x.dtype)
            plain = params["complex"].astype(jnp.complex128)
            return jnp.mean((x @ wide) ** 2) + jnp.mean(jnp.abs(x.astype(plain.dtype) @ plain) ** 2)

        whole = jax.jit(grad(loss, NO_SCALE, policy="by=arguments,c=f64"))(params, x).grads
        split = grad(loss, NO_SCALE, policy="by=arguments,c=f64", batch=parts(4))(params, x).grads
        assert split["count"] is None
        for name, rtol in {"wide": 1e-12, "complex": 1e-12, "narrow": 0.05}.items():
            assert split[name].dtype == params[name].dtype
            pair = (np.asarray(grads[name], complex) for grads in (split, whole))
            np.testing.assert_allclose(*pair, rtol=rtol)


def test_there_is_one_scale_one_flag_and_one_adjustment(rng):
    params, x = make_params(rng), np.array(normal(rng, 8, 6))
    scaling = jmpx.DynamicLossScale(2.0**10, counter=3)
    options = {"policy": "c=f16", "batch": parts(4)}
    run = jax.jit(value_and_grad(loss_fn, scaling, **options))
    rows = [{}, {0: np.inf}, {2: -np.inf}, {6: np.nan}]
    for bad in rows:
        given = x.copy()
        for row, number in bad.items():
            given[row] = number
        got, good = run(params, given), not bad
        assert bool(got.grads_finite) is good
        assert value(got.loss_scale) == (2.0**10 if good else 2.0**9)
        assert int(got.loss_scale.counter) == (4 if good else 0)
        assert all(bool(jnp.isfinite(grad).all()) is good for grad in jax.tree.leaves(got.grads))


def test_infinities_that_cancel_are_seen():
    x = jnp.array([1e30, -1e30, 0.0, 0.0])
    options = {"policy": "by=arguments,c=f16", "microbatches": 4}
    grad_fn = grad(lambda w, x: (w * x).mean(), jmpx.StaticLossScale(1), **options)
    assert not grad_fn(jnp.ones(()), x).grads_finite


def test_aux_gets_a_leading_axis_and_other_leaves_stay(rng):
    others = {"rate": 0.5, "name": "loss", "none": None}

    def loss(w, x):
        hidden = x @ w
        arrays = {"mean": hidden.mean(), "hidden": hidden, "count": np.arange(3)}
        return (hidden**2).mean(), arrays | others

    w, x = normal(rng, 3), normal(rng, 8, 3)
    options = {"has_aux": True, "policy": "full", "batch": parts(4)}
    aux = grad(loss, NO_SCALE, **options)(w, x).aux
    hidden = loss(w, x)[1]["hidden"].reshape(2, 4).T
    assert {name: aux[name] for name in others} == others
    np.testing.assert_allclose(aux["hidden"], hidden, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(aux["mean"], hidden.mean(1), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(aux["count"], np.tile(np.arange(3), (4, 1)))


@pytest.mark.parametrize("policy", ["c=bf16", "c=bf16; op.tanh: full"])
def test_casts_are_those_of_a_whole_batch(policy, rng):
    func = jmpx.autocast(loss_fn, policy) if ";" in policy else loss_fn
    params, x = make_params(rng), normal(rng, 8, 6)

    def dtypes_of(count):
        grad_fn = grad(func, NO_SCALE, policy=policy, batch=parts(count))
        return [
            (eqn.primitive.name, *(var.aval.dtype.name for var in eqn.invars))
            for eqn in equations_of(grad_fn, params, x)
            if eqn.primitive.name in ("dot_general", "tanh")
        ]

    assert len(dtypes_of(1)) >= 3
    assert dtypes_of(4) == dtypes_of(1)


@pytest.mark.parametrize(("rest", "count"), [((), 2), ((0,), 1), ((0, None), 8)])
def test_model_state_goes_from_one_to_the_next(rest, count, rng):
    w, x = normal(rng, 3), normal(rng, 8, 3)
    given = {"mean": np.zeros(3, np.float32), "steps": np.int32(0), "name": "ema"}

    def loss(w, x, state):
        assert w.dtype == x.dtype == BF16 and state["mean"].dtype == F32  # it is not cast
        mean = 0.5 * state["mean"] + x.astype(F32).mean(0)
        new, value = {**state, "mean": mean, "steps": state["steps"] + 1}, jnp.mean((x @ w) ** 2)
        others = tuple(value if one == 0 else None for one in rest)
        return value, (new, *others) if rest else new

    options = {"has_aux": True, "batch": parts(count), "state_argnum": 2}
    options["policy"] = "by=arguments,c=bf16"
    got = grad(loss, NO_SCALE, **options)(w, x, given).aux
    state, *others = got if rest else [got]
    mean = np.zeros(3, np.float32)
    rounded = np.asarray(x.astype(BF16).astype(F32))
    for part in range(count):
        mean = 0.5 * mean + rounded[part::count].mean(0)
    np.testing.assert_allclose(state["mean"], mean, rtol=1e-5, atol=1e-6)
    assert (int(state["steps"]), state["name"]) == (count, "ema")
    assert len(others) == len(rest)
    assert not others or others[0].shape == ((count,) if count > 1 else ())


# Programs


def test_one_micro_batch_is_the_program_without(rng):
    params, x = make_params(rng), normal(rng, 8, 6)
    options = {"policy": "c=bf16"}
    without, one = (
        jax.make_jaxpr(grad(loss_fn, jmpx.DynamicLossScale(2.0**10), **options, **more))(params, x)
        for more in ({}, {"batch": jmpx.Batch()})
    )
    assert str(without) == str(one) and "scan[" not in str(one)


@pytest.mark.parametrize("axis", [None, AXIS])
def test_the_function_is_traced_once_and_no_longer_program_is_made_for_more(axis, rng):
    calls, sizes = [], []

    def loss(params, x):
        calls.append(x.shape)
        return loss_fn(params, x)

    for count in 2, 16:
        options = {"policy": "c=bf16", "batch": parts(count), "over": axis and jmpx.Over(axis)}
        run = grad(loss, NO_SCALE, **options)
        if axis:
            run = jax.shard_map(run, mesh=mesh_of(1), in_specs=(P(), P(AXIS)), out_specs=P())
        lowered = jax.jit(run).lower(make_params(rng), normal(rng, 8 * count, 6))
        sizes.append(len(operations(lowered)))
    assert calls == [(8, 6), (8, 6)]
    assert len(set(sizes)) == 1


@pytest.mark.thorough
def test_memory_of_activations_is_that_of_one():
    """As XLA plans it for the CPU."""
    w, x = jnp.ones((8, 128, 128)), jnp.ones((256, 128))

    def loss(w, x):
        for layer in w:
            x = jnp.tanh(x @ layer)
        return jnp.mean(x**2)

    def temporary(count):
        grad_fn = grad(loss, NO_SCALE, policy="full", batch=parts(count))
        analysis: Any = jax.jit(grad_fn).lower(w, x).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    whole, four, sixteen = map(temporary, (1, 4, 16))
    activations = 8 * x.nbytes
    assert whole > activations
    # The loop holds the gradients of the parameters twice: the sums, and those of one micro-batch.
    assert four - w.nbytes < whole - activations / 2
    assert sixteen < four


@pytest.mark.thorough
def test_devices_are_averaged_once_and_outside_of_the_loop(rng):
    params, x = make_params(rng), normal(rng, 16, 6)
    options: dict[str, Any] = {"policy": "c=bf16,r=bf16", "batch": parts(2), "over": AXIS}
    grad_fn = grad(loss_fn, NO_SCALE, **options)
    grad_fn = jax.shard_map(grad_fn, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P())
    lowered = jax.jit(grad_fn).lower(params, x)
    assert operations(lowered, in_loops=True).count("stablehlo.dot_general") >= 2
    assert "stablehlo.all_reduce" not in operations(lowered, in_loops=True)
    compiled = lowered.compile()
    kinds, inside = instructions(compiled), instructions(compiled, in_loops=True)
    assert any(kind.startswith("all-reduce") for kind in kinds) and "dot" in inside
    assert not any(kind.startswith(("all-", "reduce-scatter")) for kind in inside)
    plain = jax.jit(grad(loss_fn, NO_SCALE, policy="c=bf16"))
    assert_close(compiled(params, x).grads, plain(params, x).grads, 2e-3)


@pytest.mark.parametrize("how", ["shard_map", "shard_map without vma", "vmap"])
def test_maps_average_micro_batches_and_devices_and_state_varies_as_it_is_made(how, rng):
    params, x = make_params(rng), normal(rng, 16, 6)

    def loss(params, x, state):
        add = {"steps": 1, "own": x.mean(0), "averaged": jax.lax.pmean(x.mean(0), AXIS)}
        return loss_fn(params, x), {name: 0.5 * state[name] + add[name] for name in state}

    def run(params, x, state):
        options = {"policy": "full", "over": jmpx.Over(AXIS), "batch": parts(2)}
        scaling = jmpx.DynamicLossScale(2.0**10)
        grad_fn = value_and_grad(loss, scaling, True, state_argnum=2, **options)
        return tuple(grad_fn(params, x, state))

    state = {"own": jnp.zeros(6), "averaged": jnp.zeros(6), "steps": jnp.zeros(())}
    (value, new), scaling, finite, grads = mapped(run, how, (None, 0, None))(
        params, x.reshape(4, 4, 6), state
    )
    of_last = jax.tree.map(lambda leaf: leaf[3], (value, grads))
    assert_close(of_last, jax.jit(jax.value_and_grad(loss_fn))(params, x))
    assert finite.all() and (scaling.counter == 1).all()
    means = np.asarray(x).reshape(4, 2, 2, 6).mean(1)  # devices, micro-batches, features
    own = 0.5 * means[:, 0] + means[:, 1]
    np.testing.assert_allclose(new["own"], own, rtol=1e-5, atol=1e-6)
    averaged = np.tile(own.mean(0), (4, 1))
    np.testing.assert_allclose(new["averaged"], averaged, rtol=1e-5, atol=1e-6)
    assert (new["steps"] == 1.5).all()


@pytest.mark.parametrize(
    ("gather", "vma", "mask"),
    [
        (lambda w: jax.lax.all_gather(w, AXIS, tiled=True), True, None),
        (lambda w: jmpx.distributed.gather(w, AXIS, "full"), False, True),
    ],
    ids=["lax", "jmpx"],
)
def test_shards_that_each_micro_batch_gathers_get_the_gradients_of_the_whole(
    gather, vma, mask, rng
):
    """The gather is part of the function, so that its backward pass reduces in the loop."""
    w, x = normal(rng, 8, 3), normal(rng, 16, 8)
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
    options = {"policy": "full", "over": jmpx.Over(AXIS, sharded=mask), "batch": parts(2)}
    of_shard = lambda shard, x: loss(gather(shard), x)  # noqa: E731
    grad_fn = grad(of_shard, NO_SCALE, **options)
    specs = {"in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": vma}
    run = jax.shard_map(lambda w, x: grad_fn(w, x).grads, mesh=mesh_of(4), **specs)
    lowered = jax.jit(run).lower(w, x)
    assert operations(lowered, in_loops=True).count("stablehlo.reduce_scatter") == 1
    assert_close(lowered.compile()(w, x), jax.jit(jax.grad(loss))(w, x))
