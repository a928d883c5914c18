"""Batches of several shapes: each keeps to a layout of its own, wherever a run goes on and however many processes read."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdist
from jdist.errors import BatchError, DatasetError
from tests.data.counting import distributed_dataset
from tests.data.job import Job
from tests.data.test_processes import outcome
from tests.toys import TWO


class Buckets:
    """A random-access source of batches of several lengths."""

    fingerprint = "buckets"

    def __init__(self, batches):
        self.batches, self.num_steps = batches, len(batches)
        self.global_batch = max(len(batch["x"]) for batch in batches)

    def batch_at(self, step):
        return self.batches[step]


def make(sizes):
    """Batches of (rows, length, whether they have labels), whose numbers count up."""
    batches, begin = [], 0
    for rows, length, labels in sizes:
        x = np.arange(begin, begin + rows * length).reshape(rows, length)
        batches.append({"x": x} | ({"label": x[:, 0]} if labels else {}))
        begin += x.size
    return batches


def plain(batches):
    return [jax.tree.map(lambda x: x.tolist(), batch) for batch in batches]


SIZES = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([2, 4]), st.booleans()), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(sizes=SIZES, replicas=st.sampled_from([1, 2, 4]), stop=st.integers(0, 12), kind=st.sampled_from([list, Buckets]))
def test_every_row_comes_once_in_at_most_so_many_shapes_also_of_a_run_that_goes_on(sizes, replicas, stop, kind):
    batches = make(sizes)

    def dataset() -> Any:
        return distributed_dataset(kind(batches), num_replicas=replicas, shapes=len(sizes) + 1, prefetch=0)

    whole = list(dataset())
    for batch, expected in zip(whole, batches, strict=True):
        for name, leaf in expected.items():
            assert batch[name][batch["mask"]].tolist() == leaf.tolist()
        assert len(batch["mask"]) % replicas == 0
    seen: dict[Any, int] = {}
    for (rows, *shape), batch in zip(sizes, whole, strict=True):
        if rows <= seen.get(tuple(shape), 0):
            assert len(batch["mask"]) < seen[tuple(shape)] + replicas
        seen[tuple(shape)] = max(rows, seen.get(tuple(shape), 0))
    if kind is Buckets:
        first, other = dataset(), dataset()
        before = [batch for _, batch in zip(range(stop), first, strict=False)]
        other.restore(json.loads(json.dumps(first.state())))
        assert plain(before + list(other)) == plain(whole)


@settings(deadline=None, max_examples=50)
@given(sizes=SIZES, kind=st.sampled_from([list, Buckets]))
def test_the_global_batch_is_the_same_whatever_the_number_of_processes(sizes, kind):
    jobs = [
        Job(count, replicas_each=4 // count).batches(
            [kind(make(sizes))] * count, autoshard="data", prefetch=0, shapes=len(sizes)
        )
        for count in (1, 2, 4)
    ]
    # Joined along the last axis, as in `outcome`, rows of several processes are compared leaf by leaf of one dimension.
    flat = [[[{k: v.T for k, v in batch.items()} for batch in part] for part in parts] for parts in jobs]
    one, two, four = map(outcome, flat)
    assert one == two == four


def test_a_short_batch_keeps_to_an_earlier_layout_that_holds_it():
    dataset = distributed_dataset(
        make([(8, 2, True), (4, 4, True), (7, 2, True), (3, 4, True)]), num_replicas=2, shapes=2
    )
    assert [batch["x"].shape for batch in dataset] == [(8, 2), (4, 4), (8, 2), (4, 4)]


def test_fit_compiles_each_shape_once(compiled):
    batches = make([(4, 2, True), (4, 4, True), (4, 6, True)] * 4)

    def step(w, batch):
        return w + jdist.aggregate(jdist.mean(batch["x"].sum(1), batch["mask"]), "mean"), {}

    def programs(shapes, data):
        compiled.clear()
        data = TWO.distribute_dataset(data, shapes=shapes)
        jdist.fit(step, jnp.zeros(()), data, strategy=TWO, log_to=None, verify="off")
        return len(compiled)

    programs(1, batches[::3])  # what a first run compiles besides
    one, three = programs(1, batches[::3]), programs(3, batches)
    assert three - one in range(1, 3 * one)
    assert programs(3, batches * 4) == three


def test_what_is_refused():
    batches = make([(4, 2, True), (4, 4, True), (6, 2, True)])
    with pytest.raises(BatchError, match=r"batch 2 \(from 0\), 6 rows of .*one shape more than `shapes=2`"):
        list(distributed_dataset(batches, num_replicas=2, shapes=2))
    with pytest.raises(BatchError, match=r"\['x'\] was .*\[rows, 2\] and is .*\[rows, 4\].*shapes=n"):
        list(distributed_dataset(batches, num_replicas=2))
    with pytest.raises(DatasetError, match=r"`shapes` is 2 and `steps_per_call` is 3"):
        distributed_dataset(batches, num_replicas=2, shapes=2, steps_per_call=3)
    for part in Job(2).batches([batches] * 2, autoshard="off", prefetch=0, shapes=2):
        assert isinstance(part, DatasetError)
        assert "batches of its own" in str(part)
