"""Leaves of a checkpoint: the boxes that are written of an array in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.checkpoint.leaves import to_host


@pytest.mark.parametrize(
    "make", [jdist.central_storage, lambda devices: jdist.sharded(devices, whole_below=0, most_whole=1)]
)
@pytest.mark.parametrize(
    "shape", [(3, 5), (7,), (5, 3, 7), (2, 2, 3, 5), (64, 128), (3, 3, 64, 128), (9, 40), (5, 1, 1), (1, 1, 11)]
)
def test_the_boxes_of_the_parts_make_the_array(make, shape):
    strategy = make(jax.devices()[:4])
    want = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    leaf = strategy.init(lambda: jnp.asarray(want))
    got, times = np.full(shape, np.nan, np.float32), np.zeros(shape, int)
    for start, box in to_host(leaf, is_chief=True).boxes:
        place = tuple(slice(at, at + length) for at, length in zip(start, box.shape, strict=True))
        got[place], times[place] = box, times[place] + 1
    np.testing.assert_array_equal(got, want)
    assert (times == 1).all()
