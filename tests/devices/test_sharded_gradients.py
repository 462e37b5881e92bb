"""Which parameters the gradient functions take for shards, and which for replicas."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.maps import AXIS, DEVICES, MAPS, everywhere, in_float64, over_devices
from jax.sharding import PartitionSpec as P

import jmpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
WHOLE, SPLIT = (P(), P(AXIS)), (P(AXIS), P(AXIS))


def gradients(loss, how, params, batch, sharded=None, specs=None):
    over, scaling = jmpx.Over(AXIS, sharded=sharded), jmpx.StaticLossScale(8)
    run = jmpx.value_and_grad(loss, scaling, policy="full", over=over)
    return over_devices(run, how, params, batch, specs=specs)


def gather(w):
    return jax.lax.all_gather(w, AXIS, tiled=True)


@jax.custom_vjp
def gather_with_float32_sum(w):
    return gather(w)


gather_with_float32_sum.defvjp(
    lambda w: (gather(w), None),
    lambda _, g: (jax.lax.psum_scatter(g.astype(jnp.float32), AXIS, tiled=True),),
)


@jax.custom_jvp
def gather_forward(w):
    return gather(w)


gather_forward.defjvp(lambda w, t: (gather(*w), gather(*t)))


@jax.custom_vjp
def quantized(w):
    return gather(jnp.round(w * 16).astype(jnp.int8)).astype(jnp.float32) / 16


quantized.defvjp(
    lambda w: (quantized(w), None), lambda _, g: (jax.lax.psum_scatter(g, AXIS, tiled=True),)
)


def ring(w):
    """Gathers by passing the parts around, so that each device has its own first."""
    parts = [w]
    for _ in range(DEVICES - 1):
        parts.append(jax.lax.ppermute(parts[-1], AXIS, [(i, (i + 1) % 4) for i in range(4)]))
    return jnp.concatenate(parts)


def through_ref(w):
    ref = jax.new_ref(jnp.zeros((8, 3)) * w[:1, :1])
    ref[...] = gather(w)
    return ref[...]


def in_scan(w):
    rows = jax.lax.scan(lambda c, row: (c, gather(row)), 0.0, w.reshape(6, 1))[1]
    return rows.reshape(8, 3)


def carried_until_later(w):
    step = lambda c, _: ((c[1], w), gather(c[0]))  # noqa: E731
    return jax.lax.scan(step, (w * 0, w * 0), None, length=3)[1][2]


def in_cond(w):
    return jax.lax.cond(jax.lax.axis_index(AXIS) >= 0, gather, lambda w: 2 * gather(w), w)


def exchanged(w):
    return jax.lax.all_to_all(jnp.tile(w, (1, 4)), AXIS, split_axis=1, concat_axis=0, tiled=True)


# Ways to read a whole weight of shape (8, 3) from its shard of shape (2, 3).
READS = {
    "gather": gather,
    "jmpx.distributed.gather": lambda w: jmpx.distributed.gather(w, AXIS, "full"),
    "untiled": lambda w: jax.lax.all_gather(w, AXIS).reshape(8, 3),
    "over several axes": lambda w: jax.lax.all_gather(w, (AXIS,), tiled=True),
    "cast": lambda w: gather(w.astype(jnp.bfloat16)).astype(jnp.float32),
    "joined": lambda w: gather(jnp.concatenate([w, 2 * w], 1))[:, :3],
    "a part": lambda w: gather(jax.lax.dynamic_slice_in_dim(w, 0, 2)),
    "in nested jit": jax.jit(lambda w: jax.jit(gather)(w.astype(jnp.bfloat16)).astype(w.dtype)),
    "in checkpoint": jax.checkpoint(gather),
    "in cond": in_cond,
    "in scan": in_scan,
    "carried": lambda w: jax.lax.scan(lambda c, _: (c, gather(c)), w, None, length=2)[1][1],
    "carried, later": carried_until_later,
    "in vmap": lambda w: jax.vmap(gather, in_axes=1, out_axes=1)(w),
    "own backward": gather_with_float32_sum,
    "own tangent": gather_forward,
    "ring": ring,
    "all_to_all": exchanged,
    "in 8 bits": quantized,
}
if jax.__version_info__ >= (0, 10):  # JAX 0.7 cannot differentiate one under shard_map
    READS["in a mutable array"] = through_ref
if hasattr(jax.lax, "all_gather_invariant"):  # on JAX 0.7
    READS["invariant"] = lambda w: jax.lax.all_gather_invariant(w, AXIS, tiled=True)  # pyright: ignore[reportAttributeAccessIssue]


def square(w, x):
    return jnp.mean((x @ w) ** 2)


def of_each(losses):
    """A loss of one weight for each of the losses."""
    return lambda params, x: sum((losses[name](w, x) for name, w in params.items()), jnp.zeros(()))


@pytest.mark.thorough
@pytest.mark.versions
@pytest.mark.parametrize("mask", [None, True])
def test_a_varying_parameter_that_is_gathered_is_a_shard(mask, rng):
    weights, batch = {name: normal(rng, 8, 3) for name in READS}, normal(rng, 12, 8)
    loss = of_each({name: lambda w, x, r=read: square(r(w), x) for name, read in READS.items()})
    grads = gradients(loss, "shard_map", weights, batch, mask).grads
    by_hand = lambda w, x: jax.grad(loss)(w, x)  # noqa: E731
    sums = over_devices(by_hand, "shard_map without vma", weights, batch)
    if "invariant" in READS:  # whose backward pass sums nothing where JAX does not track
        one_device = jax.jit(jax.grad(square))(weights["invariant"], batch)
        sums["invariant"] = DEVICES * one_device.reshape(DEVICES, 2, 3)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, sums[name] / DEVICES, 1e-5, 1e-6, err_msg=name)


@pytest.mark.skipif("invariant" not in READS, reason="of JAX 0.7")
@pytest.mark.parametrize("mask", [None, True, False])
def test_an_invariant_gather_is_refused_where_nothing_is_tracked(mask, rng):
    loss = lambda w, x: square(READS["invariant"](w["w"]), x)  # noqa: E731
    match = r"\['w'\].*all_gather_invariant .* gather by jax.lax.all_gather"
    with pytest.raises(TypeError, match=match):
        gradients(loss, MAPS[1], {"w": normal(rng, 8, 3)}, normal(rng, 12, 8), mask)


@pytest.mark.parametrize("read", [read for read in READS if read not in ("invariant", "joined")])
def test_every_gather_is_seen_where_nothing_is_tracked(read, rng):
    loss = lambda w, x: square(READS[read](w["full"]["w"]), x)  # noqa: E731
    params = {"full": {"w": normal(rng, 8, 3)}, "rest": jnp.ones(4)}
    match = r"whether the first argument's \['full'\]\['w'\] is a shard, which the function"
    with pytest.raises(TypeError, match=match):
        gradients(loss, "vmap", params, normal(rng, 12, 8))


# Neither gathered nor a device's own: the loss depends on the parameters of other devices


def experts(w, x):
    """Each device has the experts of two features, and gets those of the examples of all."""
    mine = jax.lax.all_to_all(x.reshape(3, 4, 2), AXIS, split_axis=1, concat_axis=0, tiled=True)
    parts = (mine.reshape(12, 2) @ w).reshape(4, 3, 3)
    return jnp.mean(jax.lax.psum_scatter(parts, AXIS) ** 2)


def place():
    return jax.lax.axis_index(AXIS) * 2


def pieces_of_a_product(w, x):
    """Tensor parallelism: the same batch on all devices, the features split."""
    mine = jax.lax.dynamic_slice_in_dim(gather(x), place(), 2, axis=1)
    return jnp.mean(jax.lax.psum(mine @ w, AXIS) ** 2)


def placed(w, x):
    """A gather by a sum of arrays that are zero where other devices have their shards."""
    full = jax.lax.dynamic_update_slice_in_dim(jnp.zeros((8, 3)), w, place(), axis=0)
    return square(jax.lax.psum(full, AXIS), x)


def stages(w, x):
    """A pipeline, whose last device alone has a loss."""
    steps = [(i, (i + 1) % 4) for i in range(4)]
    h = gather(x)[:, :3]
    for stage in range(4):
        h = jnp.where(jax.lax.axis_index(AXIS) == stage, jnp.tanh(h * w.sum(0)), h)
        h = jax.lax.ppermute(h, AXIS, steps)
    return jnp.where(jax.lax.axis_index(AXIS) == 0, 4 * jnp.mean(h**2), 0.0)


def last_of_stages(w, x):
    h = x[:, :3]
    for part in w.reshape(4, 2, 3):
        h = jnp.tanh(h * part.sum(0))
    return jnp.mean(h**2)


def solved(w, x):
    """A linear system whose matrix is split over the devices."""
    product = lambda v: 9 * v + jax.lax.psum(w.T @ (w @ v), AXIS)  # noqa: E731
    right = jax.lax.pmean(x.sum((0, 1)), AXIS) * jnp.ones(3)
    return jax.scipy.sparse.linalg.cg(product, right)[0].sum()


def contrasts(w, x, everything=gather):
    """Compares each example with the examples of all devices."""
    return -jax.nn.log_softmax((x @ w) @ everything(x @ w).T).mean()


def normalized(w, x, mean=lambda x: x):
    """By a norm over the batch."""
    return square(w / jnp.sqrt(mean(square(w, x))), x)


def in_layers(w, x):
    return square(jax.lax.scan(lambda c, _: (c, gather(w)), 0, length=2)[1][1], x)


def picked(w, x):
    return square(gather(jax.lax.dynamic_slice_in_dim(w, place(), 2)), x)


class Use(NamedTuple):
    """A loss on each device, what its weight is, and the same loss on one device."""

    loss: Any
    is_split: bool  # or each device has a copy
    right: tuple  # what a mask may say of the weight
    wrong: bool | None = (
        None  # what is seen to be wrong; what JAX does not track may be an own part
    )
    whole: Any = square


USES = {
    "gathered": Use(lambda w, x: square(gather(w), x), True, (True, "own"), False),
    "jmpx": Use(lambda w, x: square(READS["jmpx.distributed.gather"](w), x), True, (True,), False),
    "in layers": Use(in_layers, True, ("own",), False),
    "experts": Use(experts, True, ("own",), True),
    "pieces": Use(pieces_of_a_product, True, ("own",), True),
    "placed": Use(placed, True, ("own",)),
    "stages": Use(stages, True, ("own",), None, last_of_stages),
    "replica": Use(square, False, (False,), True),
    "contrasts": Use(contrasts, False, (False,), True, lambda w, x: contrasts(w, x, lambda x: x)),
    "picked": Use(picked, False, (False,)),
    "picked by rows": Use(
        lambda w, x: square(gather(w[place() + jnp.arange(2)]), x), False, (False,)
    ),
    "a mean of losses of shards": Use(
        lambda w, x: jax.lax.pmean(square(gather(w), x), AXIS), True, (True,)
    ),
    "a sum of losses of shards": Use(
        lambda w, x: jax.lax.psum(square(gather_with_float32_sum(w), x), AXIS) / DEVICES,
        *(True, (True,)),
    ),
    "a mean of losses": Use(lambda w, x: jax.lax.pmean(square(w, x), AXIS), False, (False,)),
    "a sum of losses": Use(
        lambda w, x: jax.lax.psum(square(w, x), AXIS) / DEVICES, False, (False,)
    ),
    "gathered losses": Use(
        lambda w, x: jax.lax.all_gather(square(w, x), AXIS).mean(), False, (False,)
    ),
    "a norm over the batch": Use(
        lambda w, x: normalized(w, x, lambda loss: jax.lax.pmean(loss, AXIS)),
        *(False, (False,), None, normalized),
    ),
}
REPLICAS = ("a mean of losses", "a sum of losses", "gathered losses", "a norm over the batch")
NEITHER = ("experts", "pieces", "placed", "stages", "contrasts", *REPLICAS, "solved")


@pytest.mark.parametrize("name", NEITHER)
def test_what_may_be_both_is_refused_without_a_mask(name, rng):
    loss = solved if name == "solved" else USES[name].loss
    # Each device has a whole weight of its own where the loss reads a whole one.
    is_split = name == "solved" or USES[name].is_split
    params = {"full": {"w": normal(rng, 8 if is_split else 32, 3)}}
    match = r"Cannot tell whether the first argument's \['full'\]\['w'\] is a shard or a replica"
    with pytest.raises(TypeError, match=match):
        gradients(
            lambda p, x: loss(p["full"]["w"], x),
            "shard_map",
            params,
            normal(rng, 12, 8),
            specs=SPLIT,
        )


# A mask is believed where it may be right, and refused where it is seen to be wrong.


@pytest.mark.parametrize(
    "how", ["shard_map", "vmap", *(pytest.param(m, marks=pytest.mark.thorough) for m in MAPS[1::2])]
)
def test_masks_that_are_right(how, rng):
    """All uses in one program: each weight has the gradient of the mean loss."""
    uses = {f"{name} {says}": (use, says) for name, use in USES.items() for says in use.right}
    params, batch = {name: normal(rng, 8, 3) / 3 for name in uses}, normal(rng, 12, 8)
    loss = of_each({name: use.loss for name, (use, _) in uses.items()})
    # Copies that JAX knows to vary, and those that it knows to be equal.
    varying = [name for name in uses if name.removesuffix(" False") in REPLICAS]
    copied = {**params, **{name: jnp.tile(params[name], (DEVICES, 1)) for name in varying}}
    mask = {name: says for name, (_, says) in uses.items()}
    specs = {n: P(AXIS) if use.is_split or n in varying else P() for n, (use, _) in uses.items()}
    value, _, _, grads = gradients(loss, how, copied, batch, mask, (specs, P(AXIS)))
    of_all = lambda p, x: sum(use.whole(p[name], x) for name, (use, _) in uses.items())  # noqa: E731
    total, expected = in_float64(of_all, params, batch)
    np.testing.assert_allclose(value, [total] * DEVICES, rtol=1e-5)
    for name, (use, _) in uses.items():
        one = expected[name]
        one = one.reshape(4, 2, 3) if use.is_split else [one] * DEVICES
        np.testing.assert_allclose(grads[name], one, 1e-4, 1e-6, err_msg=name)


WRONG = [name for name, use in USES.items() if use.wrong is not None]


@pytest.mark.parametrize(("use", "how"), [(use, MAPS[i % 4]) for i, use in enumerate(WRONG)])
def test_masks_that_are_seen_to_be_wrong(use, how, rng):
    w, batch = {"w": normal(rng, 8, 3), "b": normal(rng, 3)}, normal(rng, 12, 8)
    loss, is_split, _, says, _ = USES[use]
    of_both = lambda p, x: loss(p["w"], x) + p["b"].sum()  # noqa: E731
    specs = ({"w": P(AXIS) if is_split else P(), "b": P()}, P(AXIS))
    match = rf"\['w'\].* as sharded={says} says|as sharded={says} says.*\['w'\]"
    with pytest.raises(TypeError, match=match) as error:
        gradients(of_both, how, w, batch, {"w": says, "b": False}, specs)
    assert f"say sharded={not says} " in str(error.value)


# What makes no shard of a replica


@pytest.mark.parametrize(("kind", "vma"), [("cast", True), ("stacked", False)])
def test_varying_replicas_are_averaged(kind, vma, rng):
    w, batch = normal(rng, 4, 8, 3), normal(rng, 12, 8)

    def loss_fn(params, x):
        w = params["w"]  # whose copies are compared, beside the loss
        drift = jax.lax.stop_gradient(gather(w)).sum() + jax.lax.psum(w * 0, AXIS).sum()
        return square(w, x), (drift, gather(w).sum()) if kind == "cast" else 0.0

    def run(w, x):
        w = everywhere(w[0]) if kind == "cast" else w[0]
        scaling, options = jmpx.StaticLossScale(8), {"policy": "full", "over": jmpx.Over(AXIS)}
        return jmpx.grad(loss_fn, scaling, has_aux=True, **options)({"w": w}, x).grads["w"]

    how, specs = (MAPS[0], WHOLE) if vma else (MAPS[1], SPLIT)
    grads = over_devices(run, how, w, batch, specs=specs)
    replicas = w if kind == "stacked" else jnp.stack([w[0]] * 4)
    each = jax.jit(jax.vmap(jax.grad(square)))(replicas, batch.reshape(4, 3, 8))
    for one in grads:
        np.testing.assert_allclose(one, each.mean(0), rtol=1e-5, atol=1e-6)


FINE = {
    "a contrastive loss": contrasts,  # gathers activations
    "no gather": lambda w, x: (x @ w).mean(),
    "a norm": lambda w, x: (x @ w).mean() + 0 * jax.lax.all_gather(jnp.sum(w**2), AXIS).sum(),
    "a mean over devices": lambda w, x: (x @ w).mean() + jnp.sum((w - jax.lax.pmean(w, AXIS)) ** 2),
    "without gradient": lambda w, x: (x @ w).mean() + gather(jax.lax.stop_gradient(w)).sum(),
    "of the inputs": lambda w, x: (gather(x) @ w).mean(),
    "of rows": lambda w, x: gather(w[(x[:, 0] > 0).astype(jnp.int32)]).mean(),
    "of what a scan computes": lambda w, x: gather(
        jax.lax.scan(lambda h, row: (h * jnp.tanh(row.sum()), h), x, w)[1]
    ).mean(),
}


@pytest.mark.parametrize("how", ["shard_map", pytest.param(MAPS[1], marks=pytest.mark.thorough)])
def test_what_gathers_no_parameter_goes_on(how, rng):
    weights, batch = {name: normal(rng, 8, 3) for name in FINE}, normal(rng, 12, 8)
    loss = of_each(FINE)

    def run(params, x):
        closed_over = lambda params: loss(params, x)  # noqa: E731
        args = (loss, params, x) if how == MAPS[1] else (closed_over, params)
        options = {"policy": "full", "over": jmpx.Over(AXIS)}
        return jmpx.grad(args[0], jmpx.StaticLossScale(8), **options)(*args[1:]).grads

    grads = over_devices(run, how, weights, batch, specs=WHOLE)
    # By hand: where JAX tracks nothing, each device has the gradient of the sum of all losses.
    by_hand = lambda w, x: jax.grad(loss)(w, x)  # noqa: E731
    sums = over_devices(by_hand, "shard_map without vma", weights, batch, specs=WHOLE)
    for name, grad in grads.items():
        expected = [sums[name].mean(0)] * DEVICES
        np.testing.assert_allclose(grad, expected, 1e-5, 1e-6, err_msg=name)


def test_what_nobody_sees_may_be_a_gather(rng):
    """A callback may gather: a mask that calls its parameter a shard is believed."""
    w, batch = normal(rng, 2, 3), normal(rng, 4, 3, 2)

    @jax.custom_vjp
    def called_back(w):
        return jax.pure_callback(lambda w: w, jax.typeof(w), w, vmap_method="sequential")

    called_back.defvjp(lambda w: (called_back(w), None), lambda _, g: (g,))
    loss = lambda w, x: square(called_back(w), x)  # noqa: E731
    over = jmpx.Over(AXIS, sharded=True)
    run = jmpx.grad(loss, jmpx.StaticLossScale(8), policy="full", over=over)
    grads = jax.jit(jax.vmap(run, in_axes=(None, 0), axis_name=AXIS))(w, batch).grads
    each = jax.jit(jax.vmap(jax.grad(square), in_axes=(None, 0)))(w, batch)
    np.testing.assert_allclose(grads, each / DEVICES, rtol=1e-5, atol=1e-6)
