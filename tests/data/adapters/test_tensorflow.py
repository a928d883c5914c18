"""`tf.data` as it is; `make test-loaders` runs this where TensorFlow is not installed."""

import numpy as np
import pytest

from jdist.data.adapters.recognize import adapted
from jdist.errors import BatchError, DatasetError
from tests.data.adapters.positions import fed, rows

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed; `make test-loaders` runs these tests")


def given():
    return tf.data.Dataset.from_tensor_slices({"y": np.arange(20), "x": np.zeros((20, 3), np.float32)})


def test_batches_and_their_number():
    dataset = fed(given().batch(6))
    assert len(dataset) == 4
    assert not dataset.is_resumable
    assert rows(dataset) == rows(dataset) == [[*range(start, min(start + 6, 20))] for start in range(0, 20, 6)]
    assert fed(given().batch(6).repeat()).steps_per_pass is None
    assert fed(given().batch(6).filter(lambda batch: True)).steps_per_pass is None


def test_a_position_is_refused_with_what_has_one():
    with pytest.raises(
        DatasetError, match=r"the position in a tf.data.Dataset cannot be saved.*only TensorFlow's own checkpoints"
    ):
        fed(given().batch(6)).state()


def test_an_error_names_the_batch():
    def broken(row):
        tf.debugging.assert_none_equal(row["y"], tf.constant(7, tf.int64), message="bad pixel")
        return row

    with pytest.raises(tf.errors.InvalidArgumentError, match="bad pixel") as caught:
        rows(fed(given().map(broken).batch(6)))
    assert "while making batch 1 (from 0) of a tf.data.Dataset" in caught.value.__notes__


def test_rows_and_texts_are_refused():
    with pytest.raises(DatasetError, match="taken as batches"):
        rows(fed(given()))
    with pytest.raises(BatchError, match=r"dtype object"):
        rows(fed(tf.data.Dataset.from_tensor_slices({"y": ["a", "b"]}).batch(2)))


@pytest.mark.parametrize(
    "batched",
    [
        lambda rows: rows.batch(4),
        lambda rows: rows.batch(4).prefetch(1),
        lambda rows: rows.padded_batch(4).map(lambda batch: batch, num_parallel_calls=2),
        lambda rows: rows.ragged_batch(4),
        lambda rows: tf.data.Dataset.zip({"y": rows.batch(4), "x": rows.batch(4)}).map(lambda both: both["y"]),
    ],
)
def test_global_batch_is_refused_for_batches(batched):
    with pytest.raises(DatasetError, match=r"`global_batch` is 8, but `data` is a tf.data.Dataset, which has batches"):
        adapted(batched(given()), 8)
    assert next(iter(adapted(batched(given()).unbatch(), 8)))["y"].shape == (8,)
