"""What a dataset function is told."""

import dataclasses

import pytest

import jdist
from jdist.errors import BatchError, DatasetError


def context(pipelines=1, number=0, replicas=2):
    return jdist.InputContext(num_input_pipelines=pipelines, input_pipeline_id=number, num_replicas_in_sync=replicas)


@pytest.mark.parametrize(("rows", "replicas", "each"), [(4, 2, 2), (2, 2, 1), (3, 1, 3), (24, 8, 3)])
def test_the_per_replica_batch_is_the_replicas_share(rows, replicas, each):
    assert context(replicas=replicas).per_replica_batch(rows) == each


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest_that_do():
    with pytest.raises(BatchError, match=r"3 rows does not divide by 2 replicas.*global batch of 2 or 4"):
        context().per_replica_batch(3)
    with pytest.raises(BatchError, match=r"1 rows does not divide by 8 replicas.*global batch of 8,"):
        context(replicas=8).per_replica_batch(1)
    with pytest.raises(DatasetError, match="`global_batch` is 0; it must be a whole number, 1 or more"):
        context().per_replica_batch(0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 0, 1), "`num_input_pipelines` is 0; .* 1 or more"),
        ((2, 2, 2), "`input_pipeline_id` is 2; it must be a whole number from 0 to 1"),
        ((2, -1, 2), "`input_pipeline_id` is -1; .* from 0 to"),
        ((1, 0, 0), "`num_replicas_in_sync` is 0; .* 1 or more"),
        ((1, 0, 1.5), "`num_replicas_in_sync` is 1.5; it must be"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(DatasetError, match=message):
        context(*numbers)


def test_it_is_an_immutable_value():
    assert context() == context()
    with pytest.raises(dataclasses.FrozenInstanceError):
        context().input_pipeline_id = 1  # pyright: ignore[reportAttributeAccessIssue] - that is the test
