"""Processes that are killed or stopped in real jobs: every other one ends in bounded time, and knows which it was."""

import os
import signal
import sys

import pytest

from jdist import launch
from tests.by_default import some
from tests.cluster.fault_jobs import BOUND_S, LIGHT, ROOT, STEPS, TIMEOUT_S, Job

WAIT = "joined.exchange('never', 0, 60)"
TRAIN = "train(5)"
# What remains for a survivor to do is small, so all that it may need from the loss on is in the bound.
START_S = 60.0


def check_survivors(job, victim, *, within_s, code=75):
    """That all others end in time with `code`, and have recorded the victim."""
    others = [index for index in job.processes if index != victim]
    assert job.codes(*others, within_s=within_s) == [code] * len(others), "\n".join(map(job.out, others))
    return [job.check_lost(index, lost=victim) for index in others]


def fail(tmp_path, script, point, action, victim, **options):
    """A job in which a process is killed or stopped at a point; the records of the others."""
    with Job(tmp_path, script, failpoints=f"process={victim}:{point}:{action}", **options) as job:
        if action.startswith("kill"):
            assert job.code(victim, START_S) == -signal.SIGKILL
        else:
            job.await_stopped(victim, START_S)
        return check_survivors(job, victim, within_s=BOUND_S)


# ---- in a step


@pytest.mark.parametrize(
    ("victim", "point", "action"),
    some(
        [(0, "step=in", "kill"), (1, "step=before", "kill"), (0, "step=before", "stop"), (1, "step=in", "stop")],
        [(0, "step=in", "kill"), (1, "step=in", "stop")],
    ),
)
def test_in_a_step(tmp_path, victim, point, action):
    (record,) = fail(tmp_path, STEPS + TRAIN, point, f"{action}@3", victim)
    assert record["last_step"] in (2, 3)
    assert ("killed" if action == "kill" else "stands still") in record["cause"]


# ---- in start-up


@pytest.mark.parametrize(
    ("victim", "point", "action"),
    some(
        [
            (0, "connect=after", "stop"),
            (1, "connect=after", "kill"),
            (0, "init=before", "kill"),
            (1, "init=before", "stop"),
        ],
        [(1, "connect=after", "kill"), (0, "init=before", "kill")],
    ),
)
def test_in_start_up(tmp_path, victim, point, action):
    (record,) = fail(tmp_path, LIGHT + WAIT, point, action, victim)
    assert record["last_step"] == 0


@pytest.mark.parametrize(("victim", "action"), some([(0, "kill"), (1, "stop")], [(0, "kill")]))
def test_while_jax_starts_its_devices(tmp_path, victim, action):
    fail(tmp_path, STEPS + TRAIN, "init=in", action, victim)


@pytest.mark.parametrize(("point", "action"), [("connect=before", "kill"), ("connect=in", "stop")])
def test_before_it_has_come_the_others_give_up_in_time_and_name_it(tmp_path, point, action):
    script = LIGHT.replace('"start_timeout_s": 60', '"start_timeout_s": 4')
    with Job(tmp_path, script, failpoints=f"process=1:{point}:{action}", count=3) as job:
        assert job.codes(0, 2, within_s=START_S) == [75, 75]
        for index in (0, 2):
            assert f"not all of the 3 processes came in time; missing: process 1 ({job.addresses[1]})" in job.out(index)


def test_without_process_0_the_others_give_up_in_time(tmp_path):
    script = LIGHT.replace('"start_timeout_s": 60', '"start_timeout_s": 4')
    with Job(tmp_path, script, failpoints="process=0:connect=before:kill") as job:
        assert job.codes(within_s=START_S) == [-signal.SIGKILL, 75]
        # On a busy machine process 1 may have reached it before it was killed.
        gone = f"process 1 did not reach process 0 at {job.addresses[0].rpartition(':')[0]}" in job.out(1)
        assert gone or job.record(1)["process"] == 0, job.out(1)


# ---- in a save, and while restoring

SAVES = """
from jdist.checkpoint.checkpointer import Checkpointer
checkpoints = Checkpointer("saves", cluster=joined)
"""


@pytest.mark.parametrize(("victim", "action"), some([(0, "kill"), (1, "stop")], [(0, "kill")]))
def test_in_a_save_nothing_is_saved_and_the_one_before_is_whole(tmp_path, victim, action):
    body = "for n in (1, 2):\n    train(1)\n    checkpoints.save(n, strategy.fetch(state), wait=True)"
    (record,) = fail(tmp_path, STEPS + SAVES + body, "save=in", f"{action}@2", victim)
    assert record["last_step"] == 2
    assert [path.name for path in (tmp_path / "saves").glob("step_*")] == ["step_00000001_save_00001"]


EVALUATES = """
def held_out(context):
    for k in range(1_000):
        if k == 3 and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        yield {"x": np.ones((4, 4), np.float32)}

@jdist.distribute(strategy, returns="metrics")
def evaluate(state, batch):
    return {"loss": jdist.mean((batch["x"] @ state) ** 2, batch["mask"])}

data = {"x": np.ones((16, 4), np.float32)}
jdist.fit(
    step, jnp.ones(4), data, steps=100, global_batch=4, eval_step=evaluate, eval_data=held_out, eval_every=2,
    callbacks=[jdist.callbacks.checkpoint("saves", every=None)],
)
"""


def test_a_signal_in_an_evaluation_stops_all_after_the_same_step_and_saves(tmp_path):
    with Job(tmp_path, STEPS + EVALUATES) as job:
        assert job.codes() == [143, 143], (job.out(0), job.out(1))
    assert [path.name for path in (tmp_path / "saves").glob("step_*")] == ["step_00000002_save_00001"]


def test_while_restoring(tmp_path):
    body = "checkpoints.save(1, state, wait=True)\ncheckpoints.restore(state)"
    fail(tmp_path, STEPS + SAVES + body, "restore=in", "kill", 1)


# ---- at the end


@pytest.mark.parametrize(
    ("victim", "point", "action"),
    some(
        [(0, "end=before", "stop"), (1, "end=before", "kill"), (0, "end=in", "kill"), (1, "end=in", "stop")],
        [(1, "end=before", "kill"), (1, "end=in", "stop")],
    ),
)
def test_at_the_end(tmp_path, victim, point, action):
    fail(tmp_path, LIGHT, point, action, victim)


def test_a_program_that_ends_while_another_waits_for_it_in_a_step(tmp_path):
    body = "train(3)\nif index == 0: train(1)"
    with Job(tmp_path, STEPS + body) as job:
        assert job.codes(within_s=START_S + BOUND_S) == [75, 1]  # by which a launcher knows who is to blame
        for index in (0, 1):
            assert job.check_lost(index, lost=1)["cause"] == "its program has ended, while process 0 waits for it"


# ---- three processes, and the launcher


def test_both_survivors_of_three_name_the_same(tmp_path):
    records = fail(tmp_path, LIGHT + "joined.at_step(index)\n" + WAIT, "init=in", "kill", 1, count=3)
    assert len({(record["process"], record["cause"]) for record in records}) == 1


@pytest.mark.parametrize(
    ("victim", "action", "how"), [(1, "kill", "was killed by SIGKILL"), (0, "stop", "had to be killed")]
)
def test_the_launcher_names_the_guilty_and_starts_again(tmp_path, capfd, monkeypatch, victim, action, how):
    (script := tmp_path / "program.py").write_text(
        LIGHT + f"if {os.environ.get('NO')!r} is None: joined.exchange('k', 0, 60)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("JDIST_FAILPOINTS", f"process={victim}:init=in:{action}")
    result = launch(
        [sys.executable, str(script)], processes=2, max_restarts=1, log_dir=tmp_path / "logs", grace_s=TIMEOUT_S / 2
    )
    assert result.exit_code == 0
    first, second = result.attempts
    assert (first.guilty.task.index, second.outcome) == (victim, "finished")
    assert {end.task.index: end.code for end in first.ends} == {victim: -signal.SIGKILL, 1 - victim: 75}
    err = capfd.readouterr().err
    assert f"attempt 0 failed: process {victim} " in err
    assert how in err
    assert f"[{1 - victim}] jdist: peer lost " in err
    assert (tmp_path / "logs" / "attempt_0" / f"peer_lost_process_{1 - victim}.json").exists()


# ---- pairs


POINTS = [
    *("connect=after", "init=before", "init=in", "init=after"),
    *("step=before", "step=in", "step=after", "end=before", "end=in"),
]
ACTIONS = [("kill", "kill"), ("kill", "stop"), ("stop", "kill"), ("stop", "stop")]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(POINTS) ** 2))
def test_pairs(tmp_path, number):
    points, actions = (POINTS[number // len(POINTS)], POINTS[number % len(POINTS)]), ACTIONS[number % len(ACTIONS)]
    failures = [f"process={i}:{points[i]}:{actions[i]}" for i in (0, 1)]
    with Job(tmp_path, STEPS + TRAIN, count=3, failpoints=";".join(failures)) as job:
        assert job.code(2, START_S + BOUND_S) == 75, f"{failures}:\n{job.out(2)}"
        assert job.record(2)["process"] in (0, 1)
        for index in (0, 1):  # one of them may have heard of the other's loss first, and ended by itself
            if actions[index] == "stop" and f"failpoint {points[index]}" in job.out(index):
                job.await_stopped(index)
            else:
                assert job.code(index, BOUND_S) in (75, -signal.SIGKILL), f"{failures}:\n{job.out(index)}"
