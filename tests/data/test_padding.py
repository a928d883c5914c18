"""Which rows of a batch are real: known beside its mask, whatever the mask's weights."""

import gc

import jax
import numpy as np
import pytest

from jdist.data import batching as padding_module
from jdist.data import distributed_dataset
from jdist.data.batching import Masked, real_rows, remember_real_rows

WEIGHTS = np.array([1, 0, 0.5, 0], np.float32)


def batches(source, *, place=None, num_replicas=2, **options):
    return list(distributed_dataset(source, num_replicas=num_replicas, place=place, **options))


@pytest.mark.parametrize("place", [None, jax.device_put])
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 2}, {"prefetch_to_device": False}], ids=str)
def test_a_weight_of_zero_is_no_padding(place, options):
    source = [{"x": np.arange(4), "mask": WEIGHTS}, {"x": np.arange(3), "mask": WEIGHTS[:3]}]
    full, short = batches(source, place=place, **options)
    assert real_rows(full).tolist() == [True] * 4
    assert real_rows(short).tolist() == [True, True, True, False]
    assert type(full) is dict


def test_the_mask_takes_it_along_into_other_trees():
    _, short = batches([np.arange(4), np.arange(3)], with_mask=True)
    x, mask = short
    for tree in (short, (x, mask), {"image": x, "weights": mask}, ({"a": x}, {"b": (mask,)})):
        assert real_rows(tree).tolist() == [True, True, True, False]
    assert real_rows((x, x)) is None


def test_rounding_up_to_the_replicas_is_padding_too():
    (batch,) = batches([{"x": np.arange(5), "mask": np.zeros(5)}], num_replicas=4)
    assert real_rows(batch).tolist() == [True] * 5 + [False] * 3


def test_a_mask_from_elsewhere_is_all_there_is_to_go_by():
    mine = {"x": np.arange(4), "mask": WEIGHTS}
    assert real_rows(mine).tolist() == [True, False, True, False]
    assert real_rows({"x": np.arange(2), "mask": np.array([[0, 1], [0, 0]])}).tolist() == [True, False]
    assert real_rows(Masked(np.arange(2), np.array([True, False]))).tolist() == [True, False]
    (full,) = batches([mine])
    assert real_rows({**full, "mask": full["mask"] * 1}).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "batch", [{"x": np.arange(2)}, {"mask": {"a": np.arange(2)}}, (np.arange(2), np.arange(2)), {}]
)
def test_without_a_mask_there_is_no_padding(batch):
    remember_real_rows(batch, (1,))
    assert real_rows(batch) is None


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("make", [np.zeros, jax.numpy.zeros])
def test_nothing_is_kept_of_batches_that_are_gone(make):
    gc.collect()
    before = len(padding_module._real_rows)
    batch = {"mask": make(3)}
    remember_real_rows(batch, (2,))
    assert len(padding_module._real_rows) == before + 1
    assert real_rows(batch).tolist() == [True, True, False]
    del batch
    gc.collect()
    assert len(padding_module._real_rows) == before


def test_another_array_with_the_same_id_is_not_mistaken(monkeypatch):
    batch, other = {"mask": np.ones(3)}, {"mask": np.ones(3)}
    remember_real_rows(batch, (2,))
    known = {id(other["mask"]): padding_module._real_rows[id(batch["mask"])]}
    monkeypatch.setattr(padding_module, "_real_rows", known)
    assert real_rows(other).tolist() == [True, True, True]
