"""Which worker reads which batch, of shares that tell their length and of such that do not."""

import pytest

from jdist.errors import ClosureCancelledError, DatasetError
from jdist.ps.coordinator.datasets import AHEAD, DatasetPass
from jdist.ps.coordinator.remote_value import Pending


class Shares:
    """Workers that are asked for shares of these lengths."""

    def __init__(self, *lengths):
        self.lengths, self.asked = lengths, []

    def ask(self, pipeline, method, header):
        self.asked.append((pipeline, header["until"], header["asked"]))
        there = min(self.lengths[pipeline], header["until"])
        return {"available": there, "ended": there < header["until"]}

    def a_pass(self, *, tell=False):
        steps = self.lengths if tell else [None for _ in self.lengths]
        return DatasetPass(0, {"dataset": 5, "name": "m:f"}, None, steps, self.ask)


def every(one_pass):
    return iter(one_pass.next, None)


def scheduled(batch):
    pending = Pending()
    batch.of_pass.use(batch, pending)
    return pending


@pytest.mark.parametrize("tell", [True, False])
def test_a_worker_is_given_its_own_share_in_order_and_no_other_one(tell):
    one_pass = Shares(2, 3).a_pass(tell=tell)
    batches = list(every(one_pass))
    assert len(batches) == 5
    first = [one_pass.take(batches[i], 0, ()) for i in range(2)]
    assert first == [(5, 0, 0, 0), (5, 0, 0, 1)]
    assert one_pass.take(batches[2], 0, ()) is None
    assert [one_pass.take(b, 1, ()) for b in batches[2:]] == [(5, 0, 1, i) for i in range(3)]


def test_the_share_of_a_lost_worker_is_read_by_others_and_a_batch_stays_the_same():
    one_pass = Shares(1, 3).a_pass(tell=True)
    batches = list(every(one_pass))
    assert one_pass.take(batches[0], 1, ()) == (5, 0, 1, 0)
    assert one_pass.take(batches[0], 0, ()) is None
    assert one_pass.take(batches[0], 0, (1,)) == (5, 0, 1, 0)
    assert [one_pass.take(b, 0, (1,)) for b in batches[1:]] == [(5, 0, 0, 0), (5, 0, 1, 1), (5, 0, 1, 2)]


def test_a_worker_goes_on_where_nobody_knows_yet_whether_there_is_more():
    one_pass = Shares(20, 20).a_pass()
    batches = [one_pass.next() for _ in range(2 * AHEAD)]
    names = [one_pass.take(b, 0, ()) for b in batches]
    assert names[-1] == (5, 0, 0, 2 * AHEAD - 1)
    one_pass.ended(0, 20)
    assert [one_pass.take(b, 0, ()) for b in batches[19:21]] == [(5, 0, 0, 19), None]
    assert [one_pass.take(b, 1, ())[2] for b in batches[20:]] == [1] * 12
    rest = list(every(one_pass))
    assert len(rest) == 40 - 2 * AHEAD
    assert [one_pass.take(b, 1, ()) for b in rest] == [(5, 0, 1, i) for i in range(12, 20)]


def test_a_loop_that_leaves_batches_out_comes_to_the_end():
    shares = Shares(100, 3)
    one_pass = shares.a_pass()
    taken, count = [], 0
    for batch in every(one_pass):
        count += 1
        if count % 10 == 0:
            scheduled(batch)
            taken.append(one_pass.take(batch, 0, ()))
        del batch
    assert (count, len(taken)) == (103, 10)
    assert [name[3] for name in taken] == sorted({name[3] for name in taken})
    assert shares.asked[-1][2] > 50  # what was left out is not kept


def test_batches_that_are_kept_wait_for_nobody_and_stay_to_be_read():
    one_pass = Shares(70, 50).a_pass()
    batches = list(every(one_pass))
    assert len(batches) == 120
    assert {one_pass.take(b, i >= 70, ()) for i, b in enumerate(batches)} == {
        *((5, 0, 0, i) for i in range(70)),
        *((5, 0, 1, i) for i in range(50)),
    }


def test_a_batch_is_for_one_call_unless_that_was_cancelled():
    one_pass = Shares(3).a_pass(tell=True)
    batch = one_pass.next()
    pending = scheduled(batch)
    with pytest.raises(DatasetError, match="a batch of m:f was given to a second call"):
        scheduled(batch)
    pending.arrive([], ClosureCancelledError("it was cancelled"))
    scheduled(batch).arrive([])
    with pytest.raises(DatasetError, match="was given to a second call"):
        scheduled(batch)


def test_what_is_cancelled_is_not_waited_for():
    one_pass = Shares(10 * AHEAD).a_pass()
    pending = []
    for _ in range(AHEAD):
        batch = one_pass.next()
        pending.append(scheduled(batch))
    for each in pending:
        each.arrive([], ClosureCancelledError("another closure had failed"))
    assert len(list(every(one_pass))) == 9 * AHEAD


def test_fewer_batches_than_were_found_is_an_error():
    one_pass = Shares(2, 2).a_pass(tell=True)
    batches = list(every(one_pass))
    assert [one_pass.take(b, i % 2, ())[3] for i, b in enumerate(batches)] == [0, 0, 1, 1]
    one_pass.ended(1, 1)
    with pytest.raises(DatasetError, match="m:f has 3 batches on all workers together, fewer than at first"):
        one_pass.take(batches[3], 1, ())
