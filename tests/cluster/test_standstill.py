"""Processes that are alive and do not go on: the job ends with 75, and says who kept the others waiting, and where."""

import sys
import threading

import pytest

from jdist import CommunicationOptions
from jdist.cluster.runtime import Runtime, alone
from jdist.cluster.watch.stacks import HOST, WAITING, whereabouts
from jdist.errors import StrategyError
from tests.cluster.fault_jobs import BOUND_S, STEPS, TIMEOUT_S, Job

PATIENT_S = 4.0  # for one that does not go on
IMPATIENT = STEPS.replace('"start_timeout_s": 60', f'"start_timeout_s": 60, "progress_timeout_s": {PATIENT_S}')
assert IMPATIENT != STEPS


def test_a_data_loader_that_never_returns_is_named(tmp_path):
    body = """
def next_batch():
    if index == 1:
        time.sleep(3600)
train(3)
next_batch()
train(3)
"""
    with Job(tmp_path, IMPATIENT + body) as job:
        assert job.codes(within_s=60 + BOUND_S) == [75, 75], job.out(0) + job.out(1)
        for index in (0, 1):
            record = job.record(index)
            assert record["process"] == 1
            assert "the others have waited for it for" in record["cause"]
            assert record["cause"].endswith(" next_batch"), record["cause"]  # the innermost frame of the program's own
            (waits, stuck) = record["places"]
            assert (waits["process"], waits["phase"]) == (0, WAITING)
            assert (stuck["process"], stuck["step"], stuck["phase"]) == (1, 3, HOST)
            assert any("next_batch" in frame for frame in stuck["stack"])
            assert "jdist: process 1, step 3: the program's own code" in job.out(index)
            last = job.out(index).splitlines()[-1]
            assert last.startswith("jdist: PeerLostError: process 1 ("), last
            assert "`with strategy.cluster.busy(...):`" in last
            assert "progress_timeout_s" in last


FIT = """
data = {"x": np.ones((64, 4), np.float32)}

def source(stuck_at, context):
    for k in range(40):
        if k == stuck_at and index == 1:
            time.sleep(3600)
        yield {"x": np.ones((2, 4), np.float32)}
"""


def test_a_source_of_fit_that_never_returns_is_named_although_a_thread_reads_it(tmp_path):
    body = FIT + "jdist.fit(step, np.ones(4, np.float32), lambda c: source(10, c), strategy=strategy, epochs=1)\n"
    with Job(tmp_path, IMPATIENT + body) as job:
        assert job.codes(within_s=60 + BOUND_S) == [75, 75], job.out(0) + job.out(1)
        record = job.record(0)
        assert record["process"] == 1, record
        assert record["cause"].endswith(" source"), record["cause"]


def test_an_evaluation_on_one_process_alone_ends_the_job(tmp_path):
    """It waits for the others, which are elsewhere: what may last is what a process does by itself."""
    body = (
        FIT
        + """
def eval_step(state, batch):
    return {"loss": jdist.mean((batch["x"] @ state) ** 2, batch["mask"])}
train(3)
if index == 1:
    jdist.evaluate(eval_step, np.ones(4, np.float32), data, strategy=strategy, global_batch=4)
train(3)
"""
    )
    with Job(tmp_path, IMPATIENT + body) as job:
        assert job.codes(within_s=60 + BOUND_S) == [75, 75], job.out(0) + job.out(1)
        assert "all have waited for each other for" in job.record(0)["cause"], job.record(0)


@pytest.mark.parametrize(
    "call",
    ["strategy.reduce('sum', ids)", "strategy.gather(ids, axis=0)", "strategy.fetch({'w': state, 'ids': ids.value})"],
)
def test_who_waits_in_a_call_of_the_strategy_is_not_the_one_to_blame(tmp_path, call):
    """Process 1 would have to take part in it."""
    body = f"""
ids = strategy.run(lambda: jnp.float32(jdist.replica_id())[None])
train(3)
def stuck():
    time.sleep(3600)
if index == 1:
    stuck()
for _ in range(3):
    {call}
train(3)
"""
    with Job(tmp_path, IMPATIENT + body) as job:
        assert job.codes(within_s=60 + BOUND_S) == [75, 75], job.out(0) + job.out(1)
        record = job.record(0)
        assert record["cause"].endswith(" stuck"), record["cause"]
        assert [place["phase"] for place in record["places"]] == [WAITING, HOST]


def test_a_process_that_is_busy_is_waited_for(tmp_path):
    body = f"""
train(3)
if index == 1:
    with joined.busy("downloading"):
        time.sleep({3 * PATIENT_S})
train(3)
print("done", flush=True)
"""
    with Job(tmp_path, IMPATIENT + body) as job:
        assert job.codes(within_s=60 + BOUND_S) == [0, 0], job.out(0) + job.out(1)


def test_what_nobody_waits_for_may_take_its_time(tmp_path):
    body = f"train(3)\ntime.sleep({2 * PATIENT_S + TIMEOUT_S})\ntrain(3)\n"
    with Job(tmp_path, IMPATIENT + body) as job:
        assert job.codes(within_s=60 + BOUND_S) == [0, 0], job.out(0) + job.out(1)


def test_an_evaluation_that_goes_on_may_take_longer_than_one_call(tmp_path):
    body = (
        FIT
        + f"""
def eval_step(state, batch):
    return {{"loss": jdist.mean((batch["x"] @ state) ** 2, batch["mask"])}}

def slow(context):
    for k in range(30):
        time.sleep({PATIENT_S / 10})
        yield {{"x": np.ones((2, 4), np.float32)}}

train(3)
jdist.evaluate(eval_step, np.ones(4, np.float32), slow, strategy=strategy)
train(3)
"""
    )
    with Job(tmp_path, IMPATIENT + body) as job:
        assert job.codes(within_s=60 + BOUND_S) == [0, 0], job.out(0) + job.out(1)


@pytest.mark.parametrize(
    ("calls_s", "patience_s"),
    [
        ([], 1800.0),  # nothing is known yet
        ([2.0], 300.0),  # the first call compiled
        ([50.0, 0.1], 500.0),
        ([600.0], 1800.0),
        ([50.0, *[0.1] * 19], 300.0),
        ([0.1] * 20, 300.0),
        ([0.1] * 20 + [50.0] * 10, 500.0),
    ],
)
def test_patience_follows_from_how_long_calls_take(calls_s, patience_s):
    runtime = alone()
    runtime._calls_s.extend(calls_s)
    assert runtime._patience_s() == patience_s
    assert Runtime(runtime.spec, 10.0, 7.0)._patience_s() == 7.0


@pytest.mark.parametrize("value", [0, -1, "soon", True, float("nan")])
def test_a_time_that_is_none_is_refused(value):
    with pytest.raises(StrategyError, match=r'`progress_timeout_s` is .*; it must be a number of seconds.*"auto"'):
        CommunicationOptions(progress_timeout_s=value)
    assert CommunicationOptions(progress_timeout_s=None).timeouts["progress_timeout_s"] == float("inf")


def test_a_stack_tells_the_phase():
    def compile_something():
        import jax

        def slow(x):
            found.append(whereabouts(threading.get_ident(), None, waits=True))
            return x

        jax.jit(slow)(1.0)

    found = []
    compile_something()
    assert (found[0]["phase"], found[0]["may_last"]) == ("tracing", True)
    here = whereabouts(threading.get_ident(), None, waits=False)
    assert (here["phase"], here["may_last"]) == (HOST, False)
    assert here["stack"][-2].endswith("test_a_stack_tells_the_phase")
    assert whereabouts(threading.get_ident(), "downloading", waits=True)["phase"] == "downloading"
    assert whereabouts(-1, None, waits=True)["stack"] == []
    assert sys._current_frames()
