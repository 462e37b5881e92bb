"""What several test files share."""

import functools

import jax
import numpy as np
import optax


def leniently(func):
    """Lets another library promote dtypes within its own code, which ours never does."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return func(*args, **kwargs)

    return wrapper


def lenient(optimizer):
    """An optax optimizer as it is: Adam takes a float to the power of an int32."""
    inner = optax.with_extra_args_support(optimizer)
    return optax.GradientTransformationExtraArgs(leniently(inner.init), leniently(inner.update))


# It adds float32 updates to bfloat16 parameters.
apply_updates = leniently(optax.apply_updates)


def assert_same_bits(a, b):
    """Holds two trees to be the same in structure, dtypes and bits, the sign of zero too."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
