"""Modules of Equinox with drawn leaves, and functions of them that are compiled as a whole."""

from typing import Any

import equinox as eqx
import numpy as np

from helpers import exactly
from helpers.planted_layer import drawn_model


class Around(eqx.Module):
    """Calls another module, and computes nothing itself."""

    inner: Any

    def __call__(self, *args):
        return self.inner(*args)


def drawn(make):
    """Makes a module, of which nothing is compiled; all of its arrays are float32."""
    return drawn_model(eqx.filter_eval_shape(make), np.random.default_rng(0))


def compiled(run, model, *args):
    """Results of a function of a model, which rounds where its operations do."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    return exactly(lambda arrays, *args: run(eqx.combine(arrays, rest), *args))(arrays, *args)
