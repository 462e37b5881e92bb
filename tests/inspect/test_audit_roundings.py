"""What rounding takes from matrices that are decomposed, from integers, and from targets.

Each is found on its line; what is alike and loses nothing is not.
"""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from helpers import BF16, F16, F32
from helpers.findings_of import found, line_of, shape

import jmpx

pytestmark = pytest.mark.versions

# Linear algebra, of matrices that were rounded.

DECOMPOSED = {
    "cholesky": (lambda a: jnp.linalg.cholesky(a), "high"),
    "lu": (lambda a: jnp.linalg.solve(a, a), "medium"),
    "eigh": (lambda a: jnp.linalg.eigh(a)[0], "medium"),
    "qr": (lambda a: jnp.linalg.qr(a)[1], "medium"),
    "svd": (lambda a: jnp.linalg.svd(a, full_matrices=False)[1], "medium"),
    "triangular_solve": (lambda a: jsp.linalg.solve_triangular(a, a[0]), "medium"),
}


def covariance(x, dtype):
    with jax.named_scope("kernel"):
        d = jnp.sum(x**2, 1)[:, None] + jnp.sum(x**2, 1) - 2 * jnp.matmul(x, x.T).astype(dtype)
        return jnp.exp(-d / 2) + 1e-3 * jnp.eye(len(x), dtype=dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DECOMPOSED)
@pytest.mark.parametrize("policy", ["c=bf16", "by=arguments,c=f16"])
def test_the_decomposition_of_a_rounded_matrix_is_found(name, policy):
    fn, severity = DECOMPOSED[name]

    def loss(x):
        k = covariance(jnp.tanh(x), x.dtype)
        return jnp.mean(fn(k.astype(F32)))

    run = jmpx.apply_policy(loss, policy)
    (finding,) = found(run, shape(9, 3), names=("low-linalg",))
    assert (finding.severity, finding.place.line) == (severity, line_of(fn))
    assert finding.message.startswith(f"{name} reads a matrix") and "noise" in finding.message
    assert ("NaN" in finding.message) == (name == "cholesky")
    if policy == "c=bf16":
        assert finding.rule == "*/kernel: full"
        mended = jmpx.apply_policy(loss, f"{policy}; {finding.rule}")
        assert not found(mended, shape(9, 3), names=("low-linalg",))


def test_a_matrix_in_float32_is_no_hazard_also_if_it_is_made_of_rounded_numbers():
    """A covariance of rounded points is one; a rounded covariance is none."""

    def loss(x, w):
        low = x.astype(BF16)
        exact = covariance(low.astype(F32), F32) + (covariance(x, F32) @ w) @ x.T
        gram = jnp.matmul(low, low.T, preferred_element_type=F32)
        jitter = BF16.type(0.01) * jnp.eye(len(x), dtype=BF16)
        gram = gram * (gram > 0).astype(BF16).astype(F32) + jitter.astype(F32)
        return sum(jnp.sum(fn(k)) for fn, _ in DECOMPOSED.values() for k in (exact, gram))

    assert not found(loss, shape(9, 3), shape(9, 3), names=("low-linalg",))


@pytest.mark.parametrize("name", DECOMPOSED)
def test_products_of_a_decomposed_matrix_and_of_its_gradient_are_meant_to_be_in_float32(name):
    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(x.astype(BF16) @ w.astype(BF16))
        points = x.astype(F32)
        return jnp.mean(DECOMPOSED[name][0](points @ points.T + jnp.eye(len(x))))

    assert not found(loss, shape(5, 5), shape(5, 5))


def test_a_rounded_argument_that_is_decomposed():
    loss = lambda w, x: jnp.mean(jnp.linalg.solve(w.astype(F32), x.astype(F32)))  # noqa: E731
    args = shape(4, 4), shape(4, 2)
    (finding,) = found(jmpx.apply_policy(loss, "by=arguments,c=bf16"), *args, names=("low-linalg",))
    assert finding.severity == "low" and "by=operations" in finding.advice
    assert not found(jmpx.apply_policy(loss, "c=bf16"), *args, names=("low-linalg",))


# Integers that become 16 bits.

COUNT = 1000
TABLE = np.arange(COUNT)


INTEGERS = {
    "range": (lambda x, i: jnp.arange(COUNT), "medium"),
    "shifted": (lambda x, i: (jnp.arange(COUNT)[:, None] - 5)[:9, 0], "medium"),
    "by float32": (lambda x, i: jnp.arange(COUNT).astype(F32), "medium"),
    "floats": (lambda x, i: jnp.arange(COUNT, dtype=F32), "medium"),
    "table": (lambda x, i: jnp.asarray(TABLE)[i], "medium"),
    "argument": (lambda x, i: i, "low"),
    "of an argument": (lambda x, i: jnp.maximum(i[:2] + 1, 0), "low"),
    "few": (lambda x, i: jnp.arange(257), None),
    "remainder": (lambda x, i: jnp.arange(COUNT) % 7, None),
    "one-hot": (lambda x, i: jax.nn.one_hot(i, COUNT, dtype=jnp.int32), None),
    "comparison": (lambda x, i: jnp.arange(COUNT) > i[0], None),
    "bits": (lambda x, i: jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), None),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_16_bits_do_not_hold(name):
    integers, severity = INTEGERS[name]

    def layer(x, i):
        return x.sum() * integers(x, i).astype(x.dtype)  # <-

    def loss(x, i):
        return jnp.mean(layer(x, i).astype(F32))

    def findings_in(dtype):
        args = shape(4, dtype=dtype), shape(4, dtype="int32")
        return found(loss, *args, names=("rounded-integer",))

    assert not findings_in(F32)
    findings = findings_in(BF16)
    assert [each.severity for each in findings] == [severity] * (severity is not None)
    for each in findings:
        assert each.place.line == line_of(layer)
        assert "only up to 256" in each.message
        assert ("unknown size" in each.message) == (severity == "low")
    # float16 holds more.
    assert len(findings_in(F16)) == (severity == "low")


def test_ranges_in_16_bits_and_bytes():
    def loss(x, image, mask, labels):
        x = x * jnp.arange(COUNT, dtype=x.dtype)[:4]  # <-
        x = x + image.astype(x.dtype) / 255 + jnp.linspace(0, 1, COUNT, dtype=x.dtype)[:4]
        x = x + jnp.eye(COUNT, dtype=x.dtype)[labels][:, :4]
        return (jnp.sum(x) / jnp.maximum(jnp.sum(mask > 0), 1).astype(x.dtype)).astype(F32)

    args = shape(4, dtype=BF16), shape(4, dtype="uint8"), shape(COUNT), shape(4, dtype="int32")
    (range_,) = found(loss, *args, names=("rounded-integer",))
    assert (range_.severity, range_.place.line) == ("medium", line_of(loss))


# Targets that a policy rounds.


def model(params, x):
    return jnp.tanh(x @ params["w"]) @ params["w"] + params["b"]


def squares(params, x, y):
    return jnp.mean((model(params, x) - y).astype(F32) ** 2)  # <-


def absolute(params, x, y):
    errors = (y[None] - model(params, x)).astype(F32)  # <-
    return jnp.sum(jnp.where(jnp.abs(errors) < 1, errors**2, jnp.abs(errors)))


def widened(params, x, y):
    return jnp.mean(jnp.square(model(params, x).astype(F32) - y.astype(F32)))  # <-


def distances(params, x, y):
    lengths = jnp.linalg.norm(y[jnp.array([0, 1])] - y[jnp.array([1, 2])], axis=-1)  # <-
    return jnp.mean((jnp.exp(-lengths)[:, None] @ params["w"][:1]).astype(F32))


def step(params, x, y):
    gradient = jmpx.grad(widened, jmpx.NoOpLossScale(), policy="by=arguments,c=bf16")
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient(params, x, y).grads)


BY_ARGUMENTS = "by=arguments,c=bf16"
TARGET_ARGS = {"w": shape(4, 4), "b": shape(4)}, shape(3, 4), shape(3, 4)


def targets(loss, policy=None):
    run = jmpx.apply_policy(loss, policy) if policy else loss
    return found(run, *TARGET_ARGS, names=("rounded-target", "cast-to-and-fro", "double-rounding"))


@pytest.mark.parametrize("loss", [squares, absolute, widened, distances])
def test_a_target_that_the_policy_rounds_is_found(loss):
    (finding,) = targets(loss, BY_ARGUMENTS)
    assert (finding.name, finding.severity) == ("rounded-target", "medium")
    assert finding.place.line == line_of(loss) and "`y`" in finding.message
    assert not targets(loss, "by=operations,c=bf16") and not targets(loss)


def test_so_is_one_of_a_step_and_its_parameters_are_none():
    (finding,) = targets(step)
    assert finding.name == "rounded-target" and "`y`" in finding.message


@pytest.mark.parametrize(
    "loss",
    [
        lambda params, x, y: jnp.mean((model(params, x) - x).astype(F32) ** 2),  # also an input
        lambda params, x, y: jnp.mean((model(params, x) * y).astype(F32)),  # a weight
        lambda params, x, y: jnp.mean((model(params, x) - params["b"]).astype(F32) ** 2),
        lambda params, x, y: jnp.mean(model(params, x - y).astype(F32)),  # a mean of inputs
        lambda params, x, y: jnp.mean((params["b"][0] * (y - jnp.mean(y)) ** 2).astype(F32)),
    ],
)
def test_an_argument_that_is_no_target_is_not_found(loss):
    assert "rounded-target" not in [each.name for each in targets(loss, BY_ARGUMENTS)]
