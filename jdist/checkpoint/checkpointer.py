"""Checkpoints, saved in the background, whole or not at all; the newest that can be read is restored.

    DIRECTORY/step_00000500_save_00003/manifest.json    step, data position, metrics; each leaf, its pieces and their crc32
    DIRECTORY/step_00000500_save_00003/pieces_0.bin     what process 0 wrote of the leaves; pieces.py says how
    DIRECTORY/.saving_...  .deleting_...                left by a killed process; removed by the next one

On a disk a save is written under a hidden name, flushed to the disk by each process that writes of it, and only then renamed by
process 0: the name is the commit. Saves are numbered, so a step saved again replaces nothing before its successor is
whole, and "newest" means saved last. A bucket has no rename: a save has its name from the start, and the manifest,
written last, is the commit; folder.py says more.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jdist.checkpoint import folder as disk
from jdist.checkpoint import leaves as codec
from jdist.checkpoint.bucket import BucketPath, open_path
from jdist.checkpoint.fit import Only, Rename, Selection, first_few
from jdist.checkpoint.folder import Damaged, Place, open_shared
from jdist.checkpoint.job import Job
from jdist.checkpoint.together import agree_on_paths, read_together, save_together
from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.cluster.runtime import Runtime, alone, together
from jdist.core.remote import fetched, shapes_of
from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.core.step_state import pack, unpack
from jdist.errors import CheckpointError
from jdist.support import checks
from jdist.support.tracebacks import callers_level
from jdist.typing import PyTree

_CLAIM_S = 10.0  # an earlier run may be about to end


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped: it is damaged, or jdist did not write it."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The contents of a checkpoint, as they were saved.

    Attributes:
        step: the number of updates in `state`.
        state: the state, laid out as `like` was.
        data: the position in the data.
        metrics: scalars by name.
        metadata: other facts.
        not_restored: the paths of the leaves of `state` that have their values from `like`.
        unused: the paths of the leaves in the checkpoint that are not in `state`.
    """

    step: int
    state: PyTree
    data: dict[str, Any] | None
    metrics: dict[str, float]
    metadata: dict[str, Any]
    not_restored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


class Checkpointer:
    """Saves state and data position in a directory, and finds the newest that can be read.

    Use it as a context manager, or call `close`: a save still in flight when the interpreter exits is lost (the
    checkpoint before it is not). Any number of readers and one writing run can share a directory.

    With `cluster` all processes of a job make it, save and restore, each in the same order: each writes what it alone
    holds, process 0 the rest and the commit. A checkpoint can be restored on any number of processes: each reads what its
    devices take, leaf by leaf, and holds no more on its host than that and one leaf.

    Args:
        directory: where to save: a folder on a disk, made by the first save, or a bucket's URL, `s3://BUCKET/FOLDER` or
            `gs://...` (`pip install "jdist[remote]"`); fsspec is configured with its credentials and options.
        keep: how many of the checkpoints saved last are kept; more than one, so that a damaged one has a successor.
        best_metric: also keep the checkpoint with the best value of this metric; None: none.
        best_mode: whether the best is the greatest ("max") or the least ("min").
        check: called with the state before each save; raises to prevent it. Pass `strategy.check`: saving reads
            one replica's copy, which would hide that replicas have diverged.
        timeout_s: the longest that any call waits for devices, disk, another writer or another process, in seconds.
        cluster: the processes that save together, `strategy.cluster`; None: this one alone.

    Raises:
        CheckpointError: an argument is not valid, the directory is not one, or the processes do not share it.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> state = {"w": jnp.arange(3.0)}
        >>> with Checkpointer(tempfile.mkdtemp()) as checkpoints:
        ...     checkpoints.save(10, state, data={"position": 640})
        ...     restored = checkpoints.restore(state)
        >>> restored.step, restored.data, restored.state["w"].tolist()
        (10, {'position': 640}, [0.0, 1.0, 2.0])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | BucketPath,
        *,
        keep: int = 3,
        best_metric: str | None = None,
        best_mode: Literal["max", "min"] = "max",
        check: Callable[[PyTree], None] | None = None,
        timeout_s: float = 600.0,
        cluster: Runtime | None = None,
    ):
        self._keep = checks.whole_number("keep", keep, CheckpointError)
        checks.choice("best_mode", best_mode, ("max", "min"), CheckpointError)
        seconds = checks.seconds("timeout_s", timeout_s, CheckpointError)
        self._directory = open_path(directory, seconds)
        self._best_metric = best_metric
        self._best_mode = best_mode
        self._check = check
        self._timeout_s = seconds
        self._damaged: set[str] = set()
        self._saving: tuple[int, Job, codec.HostMemory] | None = None
        self._memory: codec.HostMemory | None = None  # of the last save; None while one may still use it
        self._waiting_s: float | None = None  # when the last wait for it began
        self._closed = False
        self._let_go: Callable[[], None] | None = None
        self._cluster = cluster or alone()
        # Of the values that processes exchange: their paths may differ, and several may save at once.
        self._name = f"checkpointer {self._cluster.next_number('checkpointer')}"
        self._shared: Any = {"cluster": self._cluster, "name": self._name, "timeout_s": seconds}
        strangers, self._is_open = open_shared(self._directory, self._cluster, seconds, self._name, make=False)
        if strangers:
            text = f"named like a leftover of jdist, but not removed, as it holds other files: {', '.join(map(str, strangers))}"
            warnings.warn(text, CheckpointWarning, stacklevel=callers_level())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Saves a state; returns once it is copied to the host, so it may be donated at once. The rest runs in the background.

        Args:
            step: the number of updates in `state`. A step saved before is saved again, then the old one removed.
            state: any pytree of arrays, PRNG keys and numbers.
            data: the position in the data, as of `dataset.state()`: plain JSON values.
            metrics: scalars by name, among them `best_metric` where it was measured; NaN is never the best.
            metadata: other facts to keep with the state: plain JSON values.
            wait: return only when the checkpoint is committed.

        Raises:
            CheckpointError: the save before this one failed, or an argument cannot be saved; with `wait`, this one.
            DonatedStateError: `state` was donated already.
            Exception: whatever `check` raises.
        """
        if self._closed:
            raise CheckpointError(f"{self._directory}: this Checkpointer is closed; make another to save again")
        step = checks.whole_number("step", step, CheckpointError, least=0)
        body = {
            "step": step,
            "data": None if data is None else disk.to_plain_json("data", data),
            "metrics": _scalars({} if metrics is None else metrics),
            "metadata": disk.to_plain_json("metadata", {} if metadata is None else metadata),
        }
        leaves = codec.flatten(pack(fetched(state)))
        self.wait()
        self.claim()
        failpoints.reached(Point.BEFORE_SAVE)
        for path, leaf in leaves.items():
            codec.check_savable(path, leaf, self._cluster.num_processes)
        body["leaves"] = [codec.describe_leaf(path, leaf) for path, leaf in leaves.items()]
        with self._cluster.blocked():
            if self._check is not None:
                self._check(state)
            # Not on the thread: all processes have to run these computations in the same order.
            numbers = [codec.without_keys(leaf) for leaf in leaves.values()]
            memory, self._memory = self._memory or codec.HostMemory(), None
            copying = Job(lambda: codec.to_host(numbers, memory, is_chief=self._cluster.is_chief))
            copied = copying.result(self._timeout_s, f"copying step {step} to the host for {self._directory}")
        write = functools.partial(save_together, self._directory, body, copied, prune=self._prune, **self._shared)
        self._saving, self._waiting_s = (step, Job(write), memory), None
        if wait:
            self.wait()

    def claim(self) -> None:
        """Holds the directory, made if need be, for the saves of this job until it is closed; the first save does so by itself.

        Raises:
            CheckpointError: it cannot be made, or another job holds it; says which process, on which machine.
        """
        if self._let_go is not None:
            return
        if not self._is_open:
            open_shared(self._directory, self._cluster, self._timeout_s, self._name, make=True)
            self._is_open = True
        with together(f"{self._name}: claiming", self._timeout_s, self._cluster):
            let_go = disk.claim(self._directory, _CLAIM_S) if self._cluster.is_chief else lambda: None
        self._let_go = weakref.finalize(self, let_go)

    def wait(self) -> None:
        """Waits until the save in flight, if there is one, is committed.

        Raises:
            CheckpointError: it failed (raised once), or did not end in time (it goes on).
        """
        self._waiting_s = time.monotonic()
        self._wait(self._waiting_s)

    def _wait(self, since_s: float | None) -> None:
        if self._saving is not None:
            step, job, memory = self._saving
            try:
                with self._cluster.blocked():
                    job.result(self._timeout_s, f"saving step {step} in {self._directory}", since_s)
                self._memory = None if self._closed else memory
            finally:
                if job.done():
                    self._saving = None

    def close(self) -> None:
        """Waits for the save in flight, unless `wait` has already failed on it, and refuses further ones.

        Closing twice changes nothing.

        Raises:
            CheckpointError: as `wait`.
        """
        self._closed, self._memory = True, None
        try:
            self._wait(self._waiting_s)
        finally:
            if self._let_go is not None:
                self._let_go()

    def steps(self) -> list[int]:
        """Lists the steps that are saved whole, ascending, without reading their arrays."""
        return sorted({body["step"] for _, body in self._whole()})

    @property
    def best_step(self) -> int | None:
        """The step with the best `best_metric`, the earlier of equals; None if none was saved with it."""
        best = self._best(self._whole())
        return None if best is None else best["step"]

    def restore(
        self,
        like: PyTree,
        *,
        step: int | None = None,
        only: Only | None = None,
        rename: Rename | None = None,
        skip_mismatch: bool = False,
    ) -> Restored | None:
        """Reads the checkpoint saved last; a damaged one is passed over, with a warning, for the one before.

        With `only`, `rename` or `skip_mismatch` it reads a part of it: the parameters alone, or old weights under a new head.
        Paths are then names with "/" between them, `params/block_0/kernel`, whatever kind of tree has them.

        Args:
            like: the tree to fill, of arrays or of what `strategy.shapes` returns: the restored leaves take its shapes,
                dtypes and shardings, on any number of devices. Values that a step adds to the user's state (a loss scale,
                residuals of compressed gradients) stay as in `like` where the checkpoint does not have them.
            step: read this step and no other; the same on all processes.
            only: which leaves of `like` are restored; the others keep their values, so it has to hold arrays there. A regular
                expression for the end of a path, as in the rules of `jdist.sharded`, several, or a function of a path.
            rename: the paths in `like` of what the checkpoint has under others: a mapping of leaves, or of what is above
                them, `{"params/encoder": "params/backbone"}`, or a function of a path. None as a new path leaves a leaf out.
            skip_mismatch: leave a leaf that the checkpoint does not have, or has in another shape or dtype, and warn of it;
                otherwise that is an error.

        Returns:
            The checkpoint, with the paths of what it did not restore and of what was not used; None if the directory has
            none.

        Raises:
            CheckpointError: `like` does not fit, no checkpoint can be read, `step` is not there or not the same on all
                processes, `only` or `rename` name what is not there, a leaf that is to keep its value has none, or the
                checkpoints in the directory are not jdist's.

        Example:
            >>> import tempfile, jax.numpy as jnp
            >>> with Checkpointer(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.save(10, {"params": {"body": jnp.ones(2), "head": jnp.ones(3)}, "count": jnp.ones(())})
            ...     like = {"params": {"body": jnp.zeros(2), "new_head": jnp.zeros(5)}, "count": jnp.zeros(())}
            ...     restored = checkpoints.restore(like, only="params/body")
            >>> restored.state["params"]["body"].tolist(), restored.not_restored
            ([1.0, 1.0], ('count', 'params/new_head'))
        """
        if step is not None:
            step = checks.whole_number("step", step, CheckpointError, least=0, fix="None takes the newest.")
        selection = Selection(only, rename, skip_mismatch)
        self.wait()
        # What is left keeps its value.
        like = pack(shapes_of(like) if selection.is_all else fetched(like))
        wanted = codec.flatten(like)
        failpoints.reached(Point.BEFORE_RESTORE)
        with self._cluster.blocked():
            paths = agree_on_paths(self._directory, step, **self._shared)
            problems: dict[str, str] = {}
            read = read_together(paths, wanted, problems, selection=selection, **self._shared)
            self._damaged |= problems.keys()
        if read is None:
            if problems:
                text = "\n  ".join(problems.values())
                raise CheckpointError(f"{self._directory}: no checkpoint can be read:\n  {text}")
            if foreign := disk.list_foreign(self._directory):
                raise CheckpointError(
                    f"{self._directory}: holds {', '.join(foreign[:3])}, checkpoints that jdist did not write. Give "
                    "jdist another folder. `jdist.train.from_orbax` reads those of Orbax; read others by their own "
                    "library, and start from that state: `strategy.init(lambda: state)`."
                )
            return None
        body, leaves, fitted = read
        failpoints.reached(Point.AFTER_RESTORE)
        for problem in problems.values():
            text = f"{problem}. Going on from step {body['step']} instead."
            warnings.warn(text, CheckpointWarning, stacklevel=callers_level())
        if fitted.passed_over:
            text = (
                f"{self._directory}: {len(fitted.not_restored):,} of the state's {len(leaves):,} leaves keep their values, "
                f"and {len(fitted.unused):,} of the checkpoint's are not used. What does not fit:\n  "
                f"{first_few(fitted.passed_over)}"
            )
            warnings.warn(text, CheckpointWarning, stacklevel=callers_level())
        return Restored(
            state=unpack(jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_sharded_leaf), leaves)),
            not_restored=fitted.not_restored,
            unused=fitted.unused,
            **{name: body[name] for name in ("step", "data", "metrics", "metadata")},
        )

    def _whole(self) -> list[tuple[Place, dict[str, Any]]]:
        """Lists the checkpoints that look readable, the last save of each step, in the order of saving."""
        whole: dict[int, tuple[Place, dict[str, Any]]] = {}
        for path in disk.list_committed(self._directory):
            with contextlib.suppress(Damaged):  # `restore` reports it; here it only does not count
                if path.name not in self._damaged:
                    body = disk.read_manifest(path)
                    whole.pop(body["step"], None)
                    whole[body["step"]] = path, body
        return list(whole.values())

    def _best(self, whole: list[tuple[Place, dict[str, Any]]]) -> dict[str, Any] | None:
        sign = 1 if self._best_mode == "max" else -1
        scored = [body for _, body in whole if not math.isnan(self._measured(body))]
        return max(scored, key=lambda body: (sign * self._measured(body), -body["step"]), default=None)

    def _measured(self, body: dict[str, Any]) -> float:
        return body["metrics"].get(self._best_metric or "", math.nan)

    def _prune(self) -> None:
        whole = self._whole()
        best = self._best(whole)
        newest = [path for path, _ in whole[-self._keep :]]
        if not newest:
            return
        kept = {*newest, *(path for path, body in whole if body is best)}
        last = {body["step"]: path for path, body in whole}
        for path in disk.list_committed(self._directory):
            # A damaged one newer than what is kept stays: someone may want to look at it.
            old = disk.number_of(path) < max(
                disk.number_of(newest[0]), disk.number_of(last.get(disk.step_of(path), path))
            )
            if old and path not in kept:
                disk.remove(path)


def _scalars(metrics: Any) -> dict[str, float]:
    """Converts metrics to floats; refuses anything else, such as an array of several numbers."""
    if not isinstance(metrics, Mapping):
        raise CheckpointError(f"`metrics` is {metrics!r:.80}: it must be a mapping from names to numbers")
    scalars: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            scalars[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"`metrics`: {name!r} is {value!r:.80}: it must be one number") from error
    return scalars
