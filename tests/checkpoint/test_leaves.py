"""Leaves of a checkpoint: the boxes that are written of an array in parts."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.checkpoint.folder import Damaged
from jdist.checkpoint.leaves import HostMemory, to_host
from jdist.checkpoint.pieces import read_leaves


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
    (local,) = to_host([leaf], HostMemory(), is_chief=True)
    for start, box in local.boxes:
        place = tuple(slice(at, at + length) for at, length in zip(start, box.shape, strict=True))
        got[place], times[place] = box, times[place] + 1
    np.testing.assert_array_equal(got, want)
    assert (times == 1).all()


@pytest.mark.parametrize("make", [jdist.sharded, jdist.mirrored, jdist.central_storage])
def test_a_process_holds_no_more_of_a_checkpoint_than_its_share_and_one_leaf(make, tmp_path):
    count, size = 24, 1 << 18
    strategy = make()

    def create():
        return [jnp.full((size + i,), i, jnp.float32) for i in range(count)]  # few divide among eight

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, strategy.init(create))
    like = strategy.init(create)
    with Checkpointer(tmp_path) as checkpointer:
        tracemalloc.start()
        try:
            restored = checkpointer.restore(like).state
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    one = size * 4
    # JAX may go on with the arrays that it was given: those are this process's share.
    assert kept <= 1.02 * count * one
    assert peak - kept < 4 * one, "all leaves would be 24"
    for a, b in zip(strategy.fetch(restored), create(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_leaf_without_one_of_its_pieces_is_damaged(tmp_path):
    body = {"leaves": [{"path": "['w']", "stored": {"shape": [4], "dtype": "float32"}, "pieces": []}]}
    with pytest.raises(Damaged, match=r"does not list all pieces of leaf \['w'\]"):
        list(read_leaves(tmp_path, body, {0: None}))
