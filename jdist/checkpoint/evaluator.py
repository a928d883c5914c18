"""Evaluates the checkpoints of a job during its training, without slowing it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jdist.checkpoint.checkpointer import Checkpointer, Restored
from jdist.cluster.resolvers.resolve import STARTED, resolve
from jdist.cluster.spec import ClusterSpec
from jdist.cluster.stop import preemption
from jdist.errors import CheckpointError, ClusterError
from jdist.support.file_lock import hold, is_held
from jdist.typing import PyTree

LOCK = ".run.lock"


def train_and_evaluate(
    train: Callable[[], Any],
    evaluate: Callable[[Restored], Any],
    *,
    checkpoints: str | os.PathLike[str],
    like: Callable[[], PyTree],
    final_step: int,
    cluster: ClusterSpec | None = None,
    timeout_s: float = 300.0,
    poll_s: float = 1.0,
) -> Any:
    """Trains in the chief and the workers; in the evaluator, evaluates each checkpoint that they save.

    The same script runs as every task of TF_CONFIG. The evaluator reads checkpoints in the order of saving, each once, and
    leaves out those that are deleted before it comes to them. It ends after the one of `final_step`, on SIGTERM or SIGINT, or
    when the job has been gone for `timeout_s`.

    Args:
        train: called without arguments in the chief and the workers; saves by a `jdist.train.Checkpointer`.
        evaluate: called in the evaluator with each checkpoint; its last result is returned.
        checkpoints: the directory that `train` saves in, shared by all.
        like: called in the evaluator; makes the tree to restore into, on its devices.
        final_step: the last step of the job.
        cluster: the job, and which task this is; None: found in the environment, see `jdist.cluster.resolve`.
        timeout_s: how long the evaluator waits for a job that does not run (yet, or any more).
        poll_s: seconds between two looks for a new checkpoint.

    Returns:
        The result of `train`; in the evaluator the last one of `evaluate`, None if it was not called.

    Raises:
        ClusterError: the job was gone for `timeout_s` before its end, or this is a parameter server.
        CheckpointError: another process trains into this directory, or a checkpoint does not fit `like`.

    Example:
        >>> import tempfile, jax.numpy as jnp, jdist
        >>> from jdist.train import Checkpointer
        >>> folder = tempfile.mkdtemp()
        >>> def train():
        ...     with Checkpointer(folder) as checkpoints:
        ...         checkpoints.save(1, {"w": jnp.ones(())})
        >>> def evaluate(restored):
        ...     return {"w": float(restored.state["w"])}
        >>> def run(task):
        ...     spec = jdist.cluster.simple(jobs={"worker": ["a:1"]}, task_type=task, task_index=0)
        ...     make = lambda: {"w": jnp.zeros(())}
        ...     return jdist.train_and_evaluate(
        ...         train, evaluate, checkpoints=folder, like=make, final_step=1, cluster=spec
        ...     )
        >>> run("worker"), run("evaluator")
        (None, {'w': 1.0})

    Source: `tf.estimator.train_and_evaluate`
    """
    # The strategy refuses an allocation that does not include this process.
    spec = resolve(os.environ, resolvers=STARTED) if cluster is None else cluster
    if "://" in str(checkpoints):
        raise CheckpointError(
            f"`checkpoints`: {checkpoints} is a bucket; the evaluator needs a lock on a file to see whether the job is "
            "alive. Give a folder on a file system that all tasks share."
        )
    directory = Path(checkpoints).expanduser().absolute()
    if spec.task_type == "ps":
        raise ClusterError("a parameter server neither trains nor evaluates; leave the job `ps` out of the cluster")
    if spec.task_type != "evaluator":
        if not spec.is_chief:
            return train()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with hold(directory / LOCK):
                return train()
        except BlockingIOError:
            raise CheckpointError(
                f"{directory}: another process saves its training here. Stop that process, or use another folder."
            ) from None
    result = None
    with preemption(poll_s=poll_s) as stop:
        tree = like()
        for restored in new_checkpoints(
            directory,
            tree,
            final_step=final_step,
            is_alive=lambda: is_held(directory / LOCK),
            is_over=lambda: stop.reason is not None,
            timeout_s=timeout_s,
            poll_s=poll_s,
        ):
            result = evaluate(restored)
            del restored  # not kept while the next is read
    return result


def new_checkpoints(
    directory: Path,
    like: PyTree,
    *,
    final_step: int,
    is_alive: Callable[[], bool],
    is_over: Callable[[], bool],
    timeout_s: float,
    poll_s: float,
    known: Iterable[int] = (),
) -> Iterator[Restored]:
    """Restores a running job's checkpoints in order, each once; the last is `final_step`'s."""
    # `is_alive`: the job runs now. `is_over`: end although the job runs on. `known`: steps to leave
    # out. For errors and other arguments see `train_and_evaluate`.
    seen, alive_s = set(known), time.monotonic()
    while not is_over() and max(seen, default=-1) < final_step:
        if is_alive():  # before looking for steps: a job that ends now has saved
            alive_s = time.monotonic()
        step = next((step for step in _saved(directory) if step not in seen), None)
        if step is not None:
            seen.add(step)
            if (restored := _restored(directory, like, step)) is not None:
                yield restored
            del restored
        elif time.monotonic() - alive_s > timeout_s:
            raise ClusterError(
                f"{directory}: no process has trained into it for {timeout_s:g} s. The last checkpoint is of step "
                f"{max(seen, default=0):,} of {final_step:,}. Start the job again, and the evaluator with it."
            )
        else:
            time.sleep(poll_s)


def _saved(directory: Path) -> list[int]:
    """Lists the saved steps, ascending."""
    with Checkpointer(directory) as reader:
        return reader.steps()


def _restored(directory: Path, like: PyTree, step: int) -> Restored | None:
    """Restores a checkpoint; None if it was deleted meanwhile, or is damaged."""
    with Checkpointer(directory) as reader:
        try:
            return reader.restore(like, step=step)
        except CheckpointError:
            if step in reader.steps():
                raise
            return None
