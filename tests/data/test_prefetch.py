"""The prefetch thread: order, errors, and that it goes away."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import traceback
import weakref
from typing import Any

import numpy as np
import pytest

from jdist.data import from_arrays
from jdist.data.prefetch import THREAD_NAME, Prefetcher, StopRequest
from jdist.errors import DatasetError
from tests.data.counting import distributed_dataset

DEADLINE_S = 20


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.fixture(autouse=True)
def no_thread_left(quick_collection):
    """Fails every test here that leaves a prefetch thread behind."""
    yield
    gc.collect()
    assert_threads_end()


def assert_threads_end():
    for thread in prefetch_threads():
        thread.join(timeout=DEADLINE_S)
        assert not thread.is_alive()


def endless(**options):
    source = from_arrays({"x": np.arange(8)}, global_batch=4, epochs=None)
    return distributed_dataset(source, num_replicas=2, **options)


def test_items_come_in_order_and_then_the_end():
    prefetcher = Prefetcher(iter(range(50)), depth=3)
    assert list(prefetcher) == list(range(50))
    with pytest.raises(StopIteration):
        next(prefetcher)


def abandon(prefetcher):
    prefetcher.abandon(prefetcher.turn)


@pytest.mark.parametrize("stop", [Prefetcher.close, abandon])
def test_one_that_was_stopped_goes_on_with_all_its_items(stop):
    request = StopRequest()
    prefetcher = Prefetcher(iter(range(20)), depth=2, keep_unused=True, stop=request)
    found = []
    while not prefetcher.ended:
        found += itertools.islice(prefetcher, 3)
        stop(prefetcher)
        assert request.asked
        prefetcher.resume()
        assert not request.asked
    assert found == list(range(20))


def test_a_consumer_of_an_earlier_turn_takes_nothing_and_stops_nobody():
    prefetcher = Prefetcher(iter(range(9)), depth=2, keep_unused=True)
    earlier = prefetcher.turn
    assert prefetcher.take(earlier) == 0
    prefetcher.close()
    prefetcher.resume()
    prefetcher.abandon(earlier)  # as the garbage collector may, late
    with pytest.raises(StopIteration):
        prefetcher.take(earlier)
    assert list(prefetcher) == list(range(1, 9))


def test_what_a_closed_one_would_have_read_is_let_go_with_its_thread():
    def items():
        yield from itertools.count()

    source = items()
    prefetcher, kept = Prefetcher(source, depth=1), weakref.ref(source)
    del source
    prefetcher.close()
    gc.collect()
    assert kept() is None


def test_the_error_is_kept_for_the_consumer_that_goes_on():
    def items():
        yield from (1, 2)
        raise ValueError("late")

    prefetcher = Prefetcher(items(), depth=3, keep_unused=True)
    assert next(prefetcher) == 1
    prefetcher.close()
    prefetcher.resume()
    assert next(prefetcher) == 2
    with pytest.raises(ValueError, match="late"):
        next(prefetcher)
    assert prefetcher.ended


def test_nothing_is_handed_out_where_the_iterator_stopped_waiting():
    assert list(Prefetcher(iter([None, 1, None, 2]), depth=1)) == [1, 2]


def test_it_is_at_most_depth_items_ahead():
    made, third_made = [], threading.Event()

    def items():
        for number in range(100):
            made.append(number)
            if number == 2:
                third_made.set()
            yield number

    prefetcher = Prefetcher(items(), depth=2)
    assert next(prefetcher) == 0
    assert third_made.wait(DEADLINE_S)
    prefetcher.close()
    assert made == [0, 1, 2]


def test_the_error_of_the_source_comes_after_its_items_with_type_and_traceback():
    class OwnError(Exception):
        pass

    def failing_source():
        yield {"x": np.arange(2)}
        yield {"x": np.arange(2)}
        raise OwnError("disk on fire")

    iterator = iter(distributed_dataset(failing_source(), num_replicas=2))
    next(iterator)
    next(iterator)
    with pytest.raises(OwnError, match="disk on fire") as caught:
        next(iterator)
    assert "failing_source" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_holds_no_reference_cycle():
    class OwnError(Exception):
        pass

    def items():
        yield 1
        raise OwnError

    prefetcher = Prefetcher(items(), depth=1)
    next(prefetcher)
    alive = []
    gc.disable()
    try:
        try:
            next(prefetcher)
        except OwnError as error:
            alive.append(weakref.ref(error))
        assert_threads_end()
        assert [reference() for reference in alive] == [None]
    finally:
        gc.enable()


def test_errors_that_are_no_exceptions_are_passed_on_too():
    def items():
        raise SystemExit(3)
        yield

    with pytest.raises(SystemExit):
        next(Prefetcher(items(), depth=1))


def test_the_thread_has_a_name_and_is_a_daemon_and_without_prefetch_there_is_none():
    iterator = iter(endless())
    (thread,) = prefetch_threads()
    assert thread.daemon
    iterator.close()
    iterator = iter(endless(prefetch=0))
    next(iterator)
    assert prefetch_threads() == []


def test_no_thread_is_left_after_the_end_or_a_break():
    list(distributed_dataset(from_arrays({"x": np.arange(8)}, global_batch=4), num_replicas=2))
    assert_threads_end()
    dataset = endless()
    for _ in dataset:
        break
    assert_threads_end()
    assert dataset.position == 1


def test_no_thread_is_left_after_an_exception_in_the_loop():
    dataset = endless()

    def loop():
        for _ in dataset:
            raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step") as caught:
        loop()
    del caught  # its traceback holds the loop, and the loop its iterator
    gc.collect()
    assert_threads_end()


def test_no_thread_is_left_after_close():
    dataset = endless()
    iterator = iter(dataset)
    next(iterator)
    dataset.close()
    assert prefetch_threads() == []
    with pytest.raises(StopIteration):
        next(iterator)


def test_dropping_dataset_and_iterator_frees_both_without_the_garbage_collector():
    gc.disable()
    try:
        dataset = endless()
        iterator = iter(dataset)
        next(iterator)
        alive = weakref.ref(dataset)
        (thread,) = prefetch_threads()
        del dataset
        assert alive() is not None
        del iterator
        assert alive() is None
        thread.join(timeout=DEADLINE_S)
        assert not thread.is_alive()
    finally:
        gc.enable()


def announce_waits(prefetcher):
    """An event that is set once someone waits for the prefetcher, with its lock held until they really do."""
    waiting, wait = threading.Event(), prefetcher._changed.wait

    def announced(timeout=None):
        waiting.set()
        return wait(timeout)

    prefetcher._changed.wait = announced
    return waiting


def test_a_thread_in_a_full_queue_ends_even_if_no_one_can_wake_it():
    go = threading.Event()

    def items():
        go.wait(DEADLINE_S)
        yield from range(100)

    prefetcher = Prefetcher(items(), depth=1)
    waiting = announce_waits(prefetcher)
    go.set()
    assert waiting.wait(DEADLINE_S)
    held, done = threading.Event(), threading.Event()

    def hold_the_lock():
        with prefetcher._changed:
            held.set()
            done.wait(DEADLINE_S)

    holder = threading.Thread(target=hold_the_lock)
    holder.start()
    assert held.wait(DEADLINE_S)
    abandon(prefetcher)  # returns although it cannot take the lock
    done.set()
    holder.join(timeout=DEADLINE_S)
    assert_threads_end()


def blocking_source(release):
    yield {"x": np.arange(2)}
    release.wait(DEADLINE_S)
    yield {"x": np.arange(2) + 2}


def test_closing_does_not_wait_for_a_source_that_blocks():
    release = threading.Event()
    dataset = distributed_dataset(blocking_source(release), num_replicas=2)
    iterator = iter(dataset)
    next(iterator)
    (thread,) = prefetch_threads()
    dataset.close()
    assert thread.is_alive()
    again = iter(dataset)
    assert prefetch_threads() == [thread], "which goes on with the batch that it waits for"
    release.set()
    assert [batch["x"].tolist() for batch in again] == [[2, 3]]


def test_a_consumer_that_waits_is_woken_by_close_from_another_thread():
    release, results = threading.Event(), []
    source = from_arrays({"x": np.arange(6)}, global_batch=2)

    def place(batch):
        if batch["x"][0] == 2:
            release.wait(DEADLINE_S)
        return batch

    dataset = distributed_dataset(source, num_replicas=2, place=place)
    iterator = iter(dataset)
    next(iterator)
    waiting = announce_waits(dataset._prefetcher)
    consumer = threading.Thread(target=lambda: results.append(list(iterator)))
    consumer.start()
    assert waiting.wait(DEADLINE_S)
    dataset.close()
    consumer.join(timeout=DEADLINE_S)
    release.set()
    assert results == [[]]
    assert [batch["x"].tolist() for batch in dataset] == [[2, 3], [4, 5]]


def test_an_interrupt_while_waiting_stops_the_thread_and_keeps_the_position():
    release = threading.Event()

    def place(batch):
        if batch["x"][0] == 2:
            release.wait(DEADLINE_S)
        return batch

    source = from_arrays({"x": np.arange(6)}, global_batch=2, epochs=None)
    dataset = distributed_dataset(source, num_replicas=2, place=place)
    iterator = iter(dataset)
    next(iterator)

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    prefetcher: Any = dataset._prefetcher
    wait, prefetcher._changed.wait = prefetcher._changed.wait, interrupted
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    prefetcher._changed.wait = wait
    release.set()
    assert_threads_end()  # although the iterator is still held, as a notebook's traceback holds it
    assert list(iterator) == []
    assert next(iter(dataset))["x"].tolist() == [2, 3]


def test_a_dead_thread_is_reported_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(Prefetcher, "_run", lambda self: None)  # as in a forked process
    with pytest.raises(DatasetError, match=r"thread is gone.*prefetch=0"):
        next(Prefetcher(iter(range(3)), depth=1))


def test_a_process_that_exits_in_the_middle_of_a_loop_exits_cleanly():
    program = (
        "import jax, numpy as np\n"
        "from jdist.data import FeedOptions, distributed_dataset, from_arrays\n"
        "source = from_arrays({'x': np.zeros((64, 1024))}, global_batch=64, epochs=None)\n"
        "dataset = distributed_dataset(source, FeedOptions(num_replicas=1, place=jax.device_put))\n"
        "iterator = iter(dataset)\n"
        "next(iterator)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
