"""Products in 8 bits by a rule: their numbers, against a model in NumPy, and all around them."""

import bisect
import functools
import itertools
import warnings
from types import SimpleNamespace

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32, assert_same_bits, normal, warns_once
from helpers.maps import AXIS, DEVICES, mesh_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmpx
from jmpx._autocast import eight_bits
from jmpx._autocast.eight_bits import FEWEST
from jmpx._base.contexts import INSPECTED, RUN, SHOWN, fact_set

E4M3, E5M2 = (np.dtype(d) for d in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FP8, MXFP8 = "c=bf16; mlp: m=fp8+emulate", "c=bf16; mlp: m=mxfp8+emulate"
SIZE = 64  # SIZE**3 == FEWEST


def mlp(f):
    """Runs a function in the scope that the rules select."""
    return jax.named_scope("mlp")(f)


BOTH = pytest.mark.parametrize("policy", [FP8, pytest.param(MXFP8, marks=pytest.mark.thorough)])


def under(f, policy=FP8):
    return jmpx.apply_policy(mlp(f), policy)


matmul = jax.named_scope("mlp")(jnp.matmul)


# A model of the numbers: float64, and casts of ml_dtypes.


def rounded(x, to, axes):
    """Rounds numbers to 8 bits, with a scale for all along some axes."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(axis=axes, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.where(largest == 0, LARGEST[to], largest) / LARGEST[to]))
    return (x / scale).astype(F32).astype(to).astype(np.float64) * scale


def in_blocks(x, axis):
    """Rounds numbers to e4m3, with a scale for each 32 along an axis."""
    moved = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    blocks = rounded(moved.reshape(*moved.shape[:-1], -1, 32), E4M3, -1)
    return np.moveaxis(blocks.reshape(moved.shape), -1, axis)


def modelled(spec, x, w, g, blocks):
    """The product of an einsum and its cotangents, whose letters `e` and `f` are of members."""
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    others = lambda letters: tuple(i for i, c in enumerate(letters) if c not in "ef")  # noqa: E731

    def product(a, b, letters_a, letters_b, result, to):
        if blocks:
            (summed,) = {*letters_a} & {*letters_b} - {*result}
            a, b = in_blocks(a, letters_a.index(summed)), in_blocks(b, letters_b.index(summed))
        else:
            a, b = rounded(a, to, others(letters_a)), rounded(b, E4M3, others(letters_b))
        return np.einsum(f"{letters_a},{letters_b}->{result}", a, b)

    return [
        product(x, w, of_x, of_w, of_y, E4M3),
        product(g, w, of_y, of_w, of_x, E5M2),
        product(g, x, of_y, of_x, of_w, E5M2),
    ]


SPECS = ["ij,jk->ik", "ij,kj->ik", "ji,jk->ki", "eij,ejk->eik", "ije,jek->eki"]
SPECS += ["efij,fejk->efik", "lij,jlk->ik"]
ALL = list(itertools.product(SPECS, ["bfloat16", "float16"], ["fp8", "mxfp8"]))
ALL = [each for each in ALL if each[::2] != ("lij,jlk->ik", "mxfp8")]  # JAX joins the two axes
FIRST = [
    ("ij,jk->ik", "bfloat16", "mxfp8"),
    ("ji,jk->ki", "float16", "fp8"),
    ("ije,jek->eki", "bfloat16", "fp8"),
]


@pytest.mark.parametrize(
    ("spec", "dtype", "word"),
    [pytest.param(*each, marks=[pytest.mark.thorough] * (each not in FIRST)) for each in ALL],
)
def test_a_product_and_its_gradients_are_those_of_the_model(spec, dtype, word, rng):
    sizes = {"i": 64, "j": 96, "k": 128, "e": 2, "f": 3, "l": 2}
    shapes = [[sizes[c] for c in part] for part in spec.replace("->", ",").split(",")]
    most = 8 if dtype == "bfloat16" else -2  # so that the sums do not overflow
    x, w, g = (
        normal(rng, *shape) * 2.0 ** rng.integers(most - 12, most, size=shape).astype(F32)
        for shape in shapes
    )
    policy = f"c={dtype},o=f32; mlp: m={word}+emulate"
    loss = lambda w, x: jnp.sum(mlp(functools.partial(jnp.einsum, spec))(x, w) * g)  # noqa: E731
    y = jax.jit(jmpx.apply_policy(mlp(lambda w, x: jnp.einsum(spec, x, w)), policy))(w, x)
    dw, dx = jax.jit(jax.grad(jmpx.apply_policy(loss, policy), (0, 1)))(w, x)
    low = lambda array: np.asarray(array).astype(dtype)  # noqa: E731
    expected = modelled(spec, low(x), low(w), low(g), word == "mxfp8")
    for found, exact in zip((y, dx, dw), expected, strict=True):
        bound = float(jnp.finfo(dtype).eps) * np.abs(exact) + 2e-5 * np.abs(exact).max()
        assert (np.abs(np.asarray(found, np.float64) - exact) <= bound).all()


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.12 multiplies in blocks on a CPU")
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_blocks_are_those_of_jax(dtype, rng):
    x, w = normal(rng, SIZE, 128), normal(rng, 128, 96)
    loss = mlp(lambda w, x: jnp.mean(jnp.sin(jnp.matmul(x, w))))
    found = []
    for word in ("mxfp8", "mxfp8+emulate"):
        with fact_set(INSPECTED, SHOWN):
            applied = jmpx.apply_policy(loss, f"c={dtype}; mlp: m={word}")
            found.append(jax.value_and_grad(applied, (0, 1))(w, x))
    assert_same_bits(*found)


def numbers_of(to):
    """All numbers of a format that are not negative, in the order of their codes."""
    exponent_bits, mantissa_bits = (4, 3) if to == E4M3 else (5, 2)
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    for code in range(128):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        digits = mantissa / 2**mantissa_bits + (exponent > 0)
        found.append(digits * 2.0 ** (max(exponent, 1) - bias))
    return [number for number in found if number <= LARGEST[to]]


def nearest(number, known):
    """The nearest of the known numbers; the one with an even code if two are."""
    above = bisect.bisect_left(known, abs(number))
    if above and (above == len(known) or abs(number) < known[above]):
        below = above - 1
        distances = abs(number) - known[below], known[above] - abs(number)
        is_below = distances[0] < distances[1] or (distances[0] == distances[1] and below % 2 == 0)
        above -= is_below
    return known[above] if number >= 0 else -known[above]


@pytest.mark.parametrize("to", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("inspected", [None, RUN])
def test_all_numbers_of_bfloat16_are_rounded_as_by_hand(to, inspected):
    # 16 members of 4096 numbers, each times the identity. CPUs may flush what is below 2**-126.
    bits = np.arange(2**16, dtype=np.uint16).reshape(16, SIZE, SIZE)
    x = bits.view(ml_dtypes.bfloat16).astype(F32)
    x = np.where(np.isfinite(x) & (np.abs(x) >= 2.0**-126), x, 0)
    one = jnp.broadcast_to(jnp.eye(SIZE), x.shape)
    with fact_set(INSPECTED, inspected):  # casts alone, or roundings that no compiler leaves out
        if to == E4M3:
            found = under(matmul)(x, one)
        else:
            loss = under(lambda w, g: jnp.sum(jnp.matmul(w, one) * g))
            found = jax.grad(loss)(jnp.ones_like(x), x)
    known = numbers_of(to)
    for member, each in zip(x, np.asarray(found, F32), strict=True):
        scale = 2.0 ** np.ceil(np.log2(float(np.abs(member).max()) / LARGEST[to]))
        expected = [scale * nearest(float(n) / scale, known) for n in member.ravel()]
        with np.errstate(over="ignore"):  # the largest are rounded up
            expected = np.asarray(expected, F32)
        kept = np.abs(expected) >= 2.0**-126
        np.testing.assert_array_equal(each.ravel()[kept], expected[kept])
        assert (np.abs(each.ravel()[~kept]) < 2.0**-126).all()


@BOTH
def test_errors_are_within_the_bound_of_the_format(policy, rng):
    x, w = (normal(rng, SIZE, 128) * np.exp(rng.normal(size=(SIZE, 128)) * 4) for _ in "xw")
    x, w = (np.asarray(each, F32).astype(BF16).astype(np.float64) for each in (x, w.T))
    found = np.asarray(under(matmul, policy)(x.astype(F32), w.astype(F32)), np.float64)
    # Half of the distance of two numbers: of normal ones, and of those near to zero.
    errors = [np.maximum(np.abs(e) / 16, np.abs(e).max() / 224 * 2.0**-10) for e in (x, w)]
    bound = errors[0] @ (np.abs(w) + errors[1]) + np.abs(x) @ errors[1] + np.abs(x @ w) / 128
    assert (np.abs(found - x @ w) <= bound).all()
    assert np.abs(found - x @ w).max() > np.abs(x @ w).max() / 500  # it is rounded to few digits


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("policy", [FP8, MXFP8, "c=f16; mlp: m=fp8+emulate"])
def test_numbers_that_are_not_finite_show(bad, policy, rng):
    x, w = normal(rng, SIZE, SIZE).at[3, 5].set(bad), normal(rng, SIZE, SIZE)
    assert np.isnan(under(matmul, policy)(x, w)[3]).all()
    if policy != MXFP8:  # one scale for all
        assert np.isnan(under(matmul, policy)(x, w)).all()
    assert not under(matmul, policy)(jnp.zeros_like(w), w).any()


# With what surrounds them.


def loss_fn(w, x):
    return jnp.mean(jnp.sin(matmul(x, w)) ** 2)


def gradient(policy):
    return jax.grad(jmpx.apply_policy(loss_fn, policy))


@BOTH
def test_gradients_are_equal_under_each_loss_scale(policy, rng):
    w, x = normal(rng, SIZE, 128), normal(rng, SIZE, SIZE)

    @jax.jit
    def of(loss_scale):
        grad_fn = jmpx.value_and_grad(loss_fn, loss_scale, policy=policy, microbatches=2)
        return grad_fn(w, jnp.concatenate([x, x]))[-1]

    expected = of(jmpx.StaticLossScale(1))
    for power in (10, -20, 60):
        assert_same_bits(of(jmpx.StaticLossScale(2.0**power)), expected)


@BOTH
def test_members_do_not_couple(policy, rng):
    w = normal(rng, 3, SIZE, SIZE) * jnp.asarray([1e-4, 1.0, 300.0])[:, None, None]
    x = normal(rng, 3, SIZE, SIZE) * jnp.asarray([50.0, 1.0, 1e-3])[:, None, None]
    grad_fn = gradient(policy)
    alone = jnp.stack([grad_fn(w[i], x[i]) for i in range(3)])
    assert_same_bits(jax.vmap(grad_fn)(w, x), alone)
    of_all = jmpx.apply_policy(lambda w, x: jax.vmap(loss_fn)(w, x).sum(), policy)
    assert_same_bits(jax.grad(of_all)(w, x), alone)
    of_examples = jnp.stack([grad_fn(w[1], x[i]) for i in range(3)])
    assert_same_bits(jax.vmap(grad_fn, (None, 0))(w[1], x), of_examples)


def layers(params, x):
    for w in params:
        x = jnp.sin(matmul(x, w))
    return jnp.mean(x**2)


def scanned(params, x):
    carry, _ = jax.lax.scan(lambda c, w: (jnp.sin(matmul(c, w)), None), x, params)
    return jnp.mean(carry**2)


def checkpointed(params, x):
    for w in params:
        x = jax.checkpoint(lambda x, w: jnp.sin(matmul(x, w)))(x, w)
    return jnp.mean(x**2)


@BOTH
@pytest.mark.parametrize("fn", [layers, checkpointed])
@pytest.mark.parametrize("save", ["", ",save=products"])
def test_nothing_in_8_bits_is_kept(fn, policy, save, rng):
    params, x = normal(rng, 3, SIZE, SIZE) / 8, normal(rng, SIZE, SIZE)
    applied = jmpx.apply_policy(fn, policy.replace(";", f"{save};"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # save= leaves the user's checkpoint as it is
        found = jax.grad(applied)(params, x)
        kept = jax.tree.leaves(jax.vjp(applied, params, x)[1])
    assert_same_bits(found, jax.grad(jmpx.apply_policy(layers, policy))(params, x))
    assert all(array.dtype.itemsize > 1 for array in kept)


def test_saved_products_are_not_made_again(rng):
    params, x = normal(rng, 3, SIZE, SIZE) / 8, normal(rng, SIZE, SIZE)
    counts = []
    for policy in (FP8, FP8.replace(";", ",save=products;")):
        grad_fn = jax.jit(jax.grad(jmpx.apply_policy(layers, policy)))
        counts.append(str(grad_fn.lower(params, x).compile().as_text()).count(" dot("))
    assert counts[0] == counts[1] == 8  # of 3 layers; nothing reads the gradient of x


def linear(params, x):
    for w in params:
        x = matmul(x, w)
    return jnp.sum(x**2)


def test_a_scan_rounds_its_slices_as_layers_that_are_written_out(rng):
    params, x = normal(rng, 3, SIZE, SIZE) / 8, normal(rng, SIZE, SIZE)

    def scanned(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (matmul(x, w), None), x, params)[0] ** 2)

    # The carry in 16 bits, as activations are elsewhere.
    found = jax.grad(jmpx.apply_policy(scanned, FP8.replace(";", "; op.scan: bf16;")))(params, x)
    assert_same_bits(found, jax.grad(jmpx.apply_policy(linear, FP8))(params, x))


@BOTH
@pytest.mark.parametrize("fn", [layers, scanned, checkpointed, jax.jit(layers)])
def test_the_gradient_of_a_gradient_is_refused(fn, policy, rng):
    params, x = normal(rng, 3, SIZE, SIZE) / 8, normal(rng, SIZE, SIZE)
    grad_fn = jax.grad(jmpx.apply_policy(fn, policy))
    with pytest.raises(ValueError, match="Cannot differentiate the gradient of a product in 8"):
        jax.grad(lambda params: jnp.sum(grad_fn(params, x) ** 2))(params)


def test_forward_mode_is_refused_at_the_line_of_the_product(rng):
    w, x = normal(rng, SIZE, SIZE), normal(rng, SIZE, SIZE)
    with pytest.raises(TypeError, match="forward-mode") as found:
        jax.jvp(jmpx.apply_policy(loss_fn, FP8), (w, x), (w, x))
    assert any("was running `dot_general`" in note for note in found.value.__notes__)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_share_the_scale_of_the_largest(check_vma, rng):
    w = normal(rng, SIZE, SIZE)
    x = jnp.concatenate([normal(rng, SIZE, SIZE) * 30.0**i for i in range(DEVICES)])
    sharded = functools.partial(
        jax.shard_map, mesh=mesh_of(DEVICES), in_specs=(P(AXIS), P()), check_vma=check_vma
    )
    expected = under(matmul)(x, w)
    around = sharded(under(matmul), out_specs=P(AXIS))
    inside = jmpx.apply_policy(sharded(matmul, out_specs=P(AXIS)), FP8)
    for fn in (around, inside):
        found = jax.jit(fn)(x, w)
        np.testing.assert_allclose(found, expected, rtol=2**-8, atol=0)  # XLA may round or not

    def grad_fn(x, w):
        loss = jmpx.apply_policy(lambda w: jnp.sum(matmul(x, w) ** 2), FP8)
        if check_vma:  # JAX sums the gradient of what is the same on all devices
            return jax.grad(loss)(w)
        return jax.lax.psum(jax.grad(loss)(w), AXIS)

    found = jax.jit(sharded(grad_fn, out_specs=P()))(x, w)
    whole = jax.grad(jmpx.apply_policy(lambda w: jnp.sum(matmul(x, w) ** 2), FP8))(w)
    np.testing.assert_allclose(found, whole, rtol=0, atol=0.01 * np.abs(whole).max())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_jit_splits_the_product_and_not_its_scale(axis_type, rng):
    w, x = normal(rng, SIZE, 128), normal(rng, 4 * SIZE, SIZE)
    x = x * 30.0 ** jnp.arange(4.0).repeat(SIZE)[:, None]
    loss = jmpx.apply_policy(lambda w, x: jnp.sum(matmul(x, w) ** 2), FP8)
    expected = jax.jit(jax.grad(loss))(w, x)
    mesh = mesh_of(2, 2, axis_type=axis_type)
    with jax.set_mesh(mesh):
        put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))  # noqa: E731
        found = jax.jit(jax.grad(loss))(put(w, None, "model"), put(x, AXIS))
    assert found.sharding.spec == P(None, "model")
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.01 * np.abs(expected).max())


def test_tools_round_as_the_product_does(rng):
    w, x = normal(rng, SIZE, SIZE) / 8, normal(rng, SIZE, SIZE)
    exact, applied = jax.grad(loss_fn)(w, x), jmpx.apply_policy(loss_fn, FP8)
    found = jax.grad(applied)(w, x)
    assert_same_bits(jax.grad(jmpx.inspect.emulate(applied))(w, x), found)
    error = float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
    for word in ("fp8", "fp8+emulate", "mxfp8"):
        blamed = jmpx.inspect.blame(loss_fn, f"c=bf16; mlp: m={word}")((w, x))
        assert blamed.error == pytest.approx(error, rel=0.2)
    assert error > 5 * jmpx.inspect.blame(loss_fn, "c=bf16")((w, x)).error
    # Magnitudes are those of the arrays, not of what they are divided to.
    reports = [jmpx.inspect.ranges(jmpx.apply_policy(loss_fn, p))(w, x) for p in (FP8, "c=bf16")]
    assert str(reports[0]) == str(reports[1])


# Which products.

REFUSED = {
    "no multiple of 16": lambda w, x: matmul(x, w[:, :40]),
    "of 3 is no multiple of 16": lambda w, x: matmul(x[:3], w),
    f"fewer than {FEWEST}": lambda w, x: matmul(x[:48], w[:, :64]),
    "its precision=": lambda w, x: matmul(x, w, precision="highest") + x @ w,
    "it sums nothing": lambda w, x: matmul(x[:, :1], w[:1]),
    "it is a conv_general_dilated": lambda w, x: mlp(jax.lax.conv)(
        x.reshape(1, 1, 64, 64), w[:3, :3].reshape(1, 1, 3, 3), (1, 1), "SAME"
    ),
    "int8": lambda w, x: matmul(x.astype(jnp.int8), w.astype(jnp.int8)),
    "two activations": lambda w, x: mlp(jnp.einsum)(
        "eij,ekj->eik", *[(x @ w).reshape(2, 64, 64)] * 2
    ),
    "no matrix product in 16 bits": lambda w, x: (
        matmul(x, w) if x.dtype == BF16 else mlp(jnp.sin)(x)
    ),
    "a jax.vmap is around": None,
}


@pytest.mark.filterwarnings("ignore:No product runs in 16 bits")
@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_suit_stays_in_16_bits_and_is_named(why, rng):
    w, x, fn = normal(rng, SIZE, 128), normal(rng, SIZE, SIZE), REFUSED[why]
    applied = jmpx.apply_policy(fn or loss_fn, FP8)
    if fn is None:
        applied = jax.vmap(applied, (None, 0))
        x = jnp.stack([x, x])
    with warns_once(__file__, f"has no effect.*{why}"):
        found = applied(w, x)
    plain = jmpx.apply_policy(fn or loss_fn, "c=bf16")
    assert_same_bits(found, (plain if fn else jax.vmap(plain, (None, 0)))(w, x))


def test_attention_takes_a_word(rng):
    def scores(w, x):
        heads = matmul(x, w).reshape(2, 64, 64)
        return mlp(jnp.einsum)("eij,ekj->eik", heads, heads)

    w, x = normal(rng, SIZE, 128), normal(rng, SIZE, SIZE)
    text = str(jmpx.inspect.audit(jmpx.apply_policy(scores, "c=bf16; mlp: m=fp8"))(w, x))
    assert (
        "in 8 bits" in text
        and "not: it is of two activations, which take matmul=fp8+attention" in text
    )
    audit = jmpx.inspect.audit(jmpx.apply_policy(scores, "c=bf16; mlp: m=fp8+attention"))(w, x)
    assert [(each.why, each.count) for each in audit.eight_bits] == [("", 2)]
    assert audit.check("bf16", at_least=1.0).products[0].dtypes == "float8_e4m3fn x float8_e4m3fn"


def test_the_audit_has_the_share_and_the_reasons(rng):
    shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((SIZE, 256), (256, 10), (SIZE, SIZE))]

    def loss(w, head, x):
        return jnp.mean(matmul(jnp.tanh(matmul(x, w)), head))

    report = jmpx.inspect.audit(jmpx.apply_policy(loss, "c=bf16; mlp: m=fp8"))(*shapes)
    flops = 2 * SIZE * 256
    assert report.eight_bits == (
        ("", flops * SIZE, 1),
        ("an axis of 10 is no multiple of 16", flops * 10, 1),
    )
    assert {p.dtypes: p.count for p in report.products} == {
        "float8_e4m3fn x float8_e4m3fn": 1,
        "float8_e4m3fn x float8_e5m2": 1,  # that of x, which nothing reads, is not counted
        "bfloat16 x bfloat16": 2,
    }
    assert "c=bf16,m=fp8" in str(report)
    assert [f for f in report.findings if f.severity != "low"] == []


@pytest.mark.parametrize("word", ["fp8", "mxfp8"])
def test_hardware_without_units_is_refused(word, rng):
    w, x = normal(rng, SIZE, SIZE), normal(rng, SIZE, SIZE)
    refused = f"has no units for matmul={word}: GPUs of NVIDIA .* write matmul={word}.emulate"
    with pytest.raises(ValueError, match=refused):
        under(matmul, f"c=bf16; mlp: m={word}")(x, w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no other rule is asked for units
        jmpx.apply_policy(jnp.matmul, f"c=bf16; mlp: m={word}")(x, w)


class Net(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, x):
        return jax.vmap(self.mlp)(x)


def nets(rng):
    """Losses of two layers of each framework, with their parameters."""
    x, keys = normal(rng, SIZE, SIZE), jax.random.split(jax.random.key(0))
    haiku = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([128, SIZE], name="mlp")(x)))
    linen = nn.Sequential([nn.Dense(128), nn.tanh, nn.Dense(SIZE)])
    objects = nnx.Sequential(
        nnx.Linear(SIZE, 128, rngs=nnx.Rngs(0)), nnx.Linear(128, SIZE, rngs=nnx.Rngs(1))
    )
    return {
        "haiku": (haiku.apply, haiku.init(keys[0], x), "Linear", "*/mlp/*"),
        "linen": (linen.apply, linen.init(keys[0], x), "Dense", "*/layers_*"),
        "nnx": (lambda net, x: net(x), objects, "Linear", "*/layers/*"),
        "equinox": (
            lambda net, x: net(x),
            Net(eqx.nn.MLP(SIZE, SIZE, 128, 1, key=keys[1])),
            "Linear",
            "*/mlp/*",
        ),
    }, x


@pytest.mark.parametrize("framework", ["haiku", "linen", "nnx", "equinox"])
def test_rules_of_classes_and_paths_in_each_framework(framework, rng):
    cases, x = nets(rng)
    apply, params, *selectors = cases[framework]
    loss = lambda params, x: jnp.mean(apply(params, x) ** 2)  # noqa: E731
    for selector in selectors:
        applied = jmpx.apply_policy(loss, f"c=bf16; {selector}: m=fp8")
        assert jmpx.inspect.audit(applied)(params, x).eight_bits[0][::2] == ("", 2)


@pytest.mark.parametrize("members", [(), (2,)])
def test_float32_sums_leave_a_product_where_reduce_says_so(members, rng):
    w, x = normal(rng, *members, SIZE, SIZE), normal(rng, *members, SIZE, SIZE)
    for reduce in ("f32", "bf16"):
        policy = FP8.replace(";", f",r={reduce};")
        grads = jmpx.grad(loss_fn, jmpx.NoOpLossScale(), policy=policy)(w, x)[-1]
        assert (grads == grads.astype(BF16).astype(F32)).all() == (reduce == "bf16")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_on_a_tpu_the_scales_multiply_the_sums(dtype, rng, monkeypatch):
    loss = jmpx.apply_policy(loss_fn, f"c={dtype}; mlp: m=fp8")
    emulated = jmpx.apply_policy(loss_fn, f"c={dtype}; mlp: m=fp8+emulate")
    w, x = normal(rng, SIZE, SIZE) / 8, normal(rng, SIZE, SIZE)
    expected = jax.grad(emulated)(w, x)
    tpu = SimpleNamespace(platform="tpu", device_kind="TPU7x")
    monkeypatch.setattr(eight_bits, "default_device", lambda: tpu)
    assert_same_bits(jax.grad(loss)(w, x), expected)
    tpu.device_kind = "TPU v5 lite"
    with pytest.raises(ValueError, match="TPU v5 lite has no units for matmul=fp8"):
        loss(w, x)
