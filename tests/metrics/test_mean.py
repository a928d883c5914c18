"""The mean over all rows."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import jdist


def mean(values, mask=None):
    metric = jdist.metrics.mean()
    return metric.compute(metric.update(values, mask))


def test_it_is_numpys_average():
    rng = np.random.default_rng(0)
    values, weight = rng.normal(size=(50, 3)).astype(np.float32), rng.uniform(size=50).astype(np.float32)
    expected = np.average(values, weights=np.broadcast_to(weight[:, None], (50, 3)))
    assert mean(values, weight) == pytest.approx(expected, rel=1e-5)  # sums in float32
    assert mean(values) == pytest.approx(values.mean(dtype=np.float64), rel=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [bool, np.int32, np.float32])
def test_what_is_not_finite_on_padding_stays_out_and_elsewhere_does_not(bad, kind):
    assert mean(jnp.array([1.0, 3.0, bad]), np.array([1, 1, 0], kind)) == 2.0
    assert not math.isfinite(mean(jnp.array([1.0, 3.0, bad])))


def test_halves_are_added_up_in_float32():
    assert mean(jnp.full(4096, 1.0, jnp.bfloat16)) == 1.0
    assert mean(jnp.full(100_000, 7, jnp.int8)) == 7.0


def test_of_no_rows_it_is_nan_with_a_warning():
    for found in (lambda: mean(jnp.ones(3), np.zeros(3, bool)), lambda: mean(jnp.ones((0, 2)))):
        with pytest.warns(UserWarning, match="jdist.metrics.mean is undefined, and NaN: no row counts"):
            assert math.isnan(found())
