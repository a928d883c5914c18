"""An evaluator follows the checkpoints of a job: each once, never in its way, and ends with it."""

import jax.numpy as jnp
import pytest

import jdist
from jdist.checkpoint.evaluator import LOCK, new_checkpoints
from jdist.errors import CheckpointError, ClusterError
from jdist.support.file_lock import hold, is_held
from jdist.train import Checkpointer

LIKE = {"w": jnp.zeros(3)}


def save(folder, *steps, keep=9):
    with Checkpointer(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"w": jnp.full(3, float(step))})


def follow(folder, *, is_alive=lambda: True, is_over=lambda: False, final_step=9, known=(), like=LIKE):
    return new_checkpoints(
        folder,
        like,
        final_step=final_step,
        is_alive=is_alive,
        is_over=is_over,
        timeout_s=0.05,
        poll_s=0.01,
        known=known,
    )


def test_each_is_seen_once_in_order_until_the_last(tmp_path):
    folder, seen = tmp_path / "not there yet", []
    work = iter([lambda: None, lambda: save(folder, 1, 3), lambda: save(folder, 5, keep=1), lambda: save(folder, 9)])

    def is_alive():
        next(work, lambda: None)()
        return True

    for restored in follow(folder, is_alive=is_alive):
        assert float(restored.state["w"][0]) == restored.step
        seen.append(restored.step)
    assert seen == [1, 5, 9]  # 3 was deleted before it was its turn


def test_known_ones_are_left_out_and_a_run_that_is_over_ends_at_once(tmp_path):
    save(tmp_path, 3, 9)
    assert [restored.step for restored in follow(tmp_path, known=[3])] == [9]
    assert list(follow(tmp_path, known=[9])) == []


def test_it_ends_when_it_is_asked_to(tmp_path):
    save(tmp_path, 3)
    asked = []
    for restored in follow(tmp_path, is_over=lambda: bool(asked)):
        asked.append(restored.step)
    assert asked == [3]


def test_a_job_that_is_gone_for_too_long_is_an_error(tmp_path):
    save(tmp_path, 3)
    steps = follow(tmp_path, is_alive=lambda: False)
    assert next(steps).step == 3
    with pytest.raises(ClusterError, match=r"no process has trained into it for .*step 3 of 9"):
        next(steps)


def test_a_damaged_checkpoint_is_left_out_and_one_that_does_not_fit_is_an_error(tmp_path):
    save(tmp_path, 3, 9)
    (damaged,) = tmp_path.glob("step_00000003*")
    (damaged / "pieces_0.bin").unlink()
    assert [restored.step for restored in follow(tmp_path)] == [9]
    with pytest.raises(CheckpointError, match="does not fit the state"):
        list(follow(tmp_path, like={"v": jnp.zeros(3)}))


def spec(task, index=0):
    return jdist.cluster.simple(jobs={"worker": ["a:1", "b:1"]}, task_type=task, task_index=index)


def test_the_script_of_a_job_trains_in_its_workers_and_evaluates_in_its_evaluator(tmp_path):
    folder, held = tmp_path / "checkpoints", []

    def train():
        held.append(is_held(folder / LOCK))
        save(folder, 4, 8)
        return "trained"

    def run(cluster):
        return jdist.train_and_evaluate(
            train,
            lambda restored: restored.step,
            checkpoints=folder,
            like=lambda: LIKE,
            final_step=8,
            cluster=cluster,
            poll_s=0.01,
        )

    assert run(spec("worker", 1)) == "trained"
    assert run(spec("worker")) == "trained"
    assert held == [False, True]
    assert run(spec("evaluator")) == 8
    with hold(folder / LOCK), pytest.raises(CheckpointError, match="another process saves its training here"):
        run(spec("worker"))


def test_a_parameter_server_has_no_part_in_it(tmp_path):
    cluster = jdist.cluster.simple(jobs={"worker": ["a:1"], "ps": ["b:1"]}, task_type="ps", task_index=0)
    with pytest.raises(ClusterError, match="parameter server"):
        jdist.train_and_evaluate(
            int, int, checkpoints=tmp_path, like=dict, final_step=1, cluster=cluster, timeout_s=0.05
        )
