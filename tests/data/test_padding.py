"""The real rows of a batch: known with its mask, whatever the batch's own leaves are called or hold."""

import jax
import numpy as np
import pytest

from jdist.data.batching import Masked, real_rows
from tests.data.counting import distributed_dataset


def batches(source, *, num_replicas=2, **options):
    return list(distributed_dataset(source, num_replicas=num_replicas, **options))


@pytest.mark.parametrize("place", [None, jax.device_put])
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 2}, {"prefetch_to_device": False}], ids=str)
def test_a_leaf_with_the_name_of_the_mask_is_a_leaf_like_any_other(place, options):
    classes = np.array([[1, 0], [0, 0], [2, 1], [0, 0]])
    source = [{"x": np.arange(4), "mask": classes}, {"x": np.arange(3), "mask": classes[:3]}]
    full, short = batches(source, place=place, with_mask=True, **options)
    assert real_rows(full).tolist() == [True] * 4
    assert real_rows(short).tolist() == [True, True, True, False]
    assert full.batch["mask"].tolist() == classes.tolist()
    assert short.batch["mask"].tolist() == [*classes[:3].tolist(), classes[0].tolist()]


def test_the_mask_takes_it_along_into_other_trees():
    _, short = batches([np.arange(4), np.arange(3)], with_mask=True)
    x, mask = short
    for tree in (short, (x, mask), {"image": x, "weights": mask}, ({"a": x}, {"b": (mask,)})):
        assert real_rows(tree).tolist() == [True, True, True, False]
    assert real_rows((x, x)) is None


def test_rounding_up_to_the_replicas_is_padding_too():
    (batch,) = batches([{"x": np.arange(5)}], num_replicas=4)
    assert type(batch) is dict
    assert real_rows(batch).tolist() == [True] * 5 + [False] * 3


def test_in_a_batch_from_elsewhere_the_masks_place_counts_if_it_holds_a_bool_a_row():
    real = np.array([True, False])
    for batch in ({"x": np.arange(2), "mask": real}, Masked(np.arange(2), real)):
        assert real_rows(batch).tolist() == [True, False]
    for other in (np.array([1.0, 0]), np.array([1, 0]), np.array([[True, True], [False, False]])):
        assert real_rows({"x": np.arange(2), "mask": other}) is None


@pytest.mark.parametrize(
    "batch", [{"x": np.arange(2)}, {"mask": {"a": np.arange(2)}}, (np.arange(2), np.arange(2)), {}]
)
def test_without_a_mask_there_is_no_padding(batch):
    assert real_rows(batch) is None
