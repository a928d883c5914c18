"""Rows on their way to a tracker, in a thread of their own, so that no tracker keeps training waiting."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdist.checkpoint.bucket import BucketPath
from jdist.checkpoint.folder import Place
from jdist.checkpoint.locks import check_held
from jdist.errors import CheckpointError, ConfigError
from jdist.loop.report.curves import NO_MATPLOTLIB, as_png, matrix_as_png
from jdist.loop.report.files import write_atomically

_MOST_WAITING = 10_000  # rows; a tracker this far behind is not there
_BUCKET_PAUSE_S = 2.0  # between two writes of an object; Google's store takes one a second
_LONGEST_VECTOR = 100  # numbers that are metrics of their own
_IN_USE: set[Place] = set()
_SAFE = "The run's own files have all rows."


@dataclass(frozen=True, kw_only=True)
class Record:
    """A row to deliver: numbers and arrays by name."""

    step: int
    values: Mapping[str, Any]


class Delivery:
    """Delivers rows to a tracker, each metric's steps once, and remembers progress and failures."""

    # `begin`, `put`, `end` and `take_messages` are for the training thread; only `end` waits.

    def __init__(
        self,
        name: str,
        tracker: Any,  # a `Tracker`
        *,
        config: Mapping[str, Any],  # hyperparameters
        # rows of the resumed run; a kill may have lost some of them on their way
        earlier: Sequence[Record],
        folder: Place | None,  # has `tracker-NAME.json`; None: the run cannot be resumed
    ):
        self._name, self._tracker = name, tracker
        self._config = config
        self._earlier = earlier
        self._path = None if folder is None else folder / f"tracker-{name}.json"
        self._records: queue.Queue[Record | Callable[[], None]] = queue.Queue(_MOST_WAITING)
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._given = self._taken = self._dropped = 0
        self._failures = 0
        self._is_off = False
        self._named: set[str] = set()
        self._run_id = uuid.uuid4().hex[:8]
        self._resumed = False
        self._logged: dict[str, int] | None = None  # as the tracker says
        self._marks: dict[str, int] = {}  # as given
        self._pause_s = _BUCKET_PAUSE_S if isinstance(self._path, BucketPath) else 0.0
        self._due_s: float | None = None  # when to save the marks; None: they are saved
        self._free_s = 0.0  # from when on they may be

    def begin(self) -> None:
        """Reads what an earlier process left, and starts the thread."""
        if self._path is not None:
            if self._path in _IN_USE:
                raise ConfigError(
                    f"{self._name}: two trackers of this run have this name, and would overwrite each other in "
                    f"{self._path}. Leave one out, or give each its own `name` (`jdist.callbacks.track`)."
                )
            _IN_USE.add(self._path)
        self._recall()
        self._thread.start()

    def put(self, record: Record) -> None:
        """Puts a row into the queue; one that finds no room there is lost."""
        self._given += 1
        if self._is_off:
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            self._name_failure(
                f"it is {_MOST_WAITING:,} rows behind; further rows are dropped, from step {record.step:,} on"
            )

    def end(self, status: Any, rows: Sequence[Mapping[str, Any]], *, timeout_s: float) -> None:
        """Delivers the rest and the curves of all rows, and ends the tracker's run, within some seconds."""
        if self._path is not None:
            _IN_USE.discard(self._path)
        deadline = time.monotonic() + timeout_s
        if self._thread.is_alive():
            last = functools.partial(self._conclude, status, rows)
            try:
                self._records.put(last, timeout=timeout_s)
            except queue.Full:  # a row makes room, so that the thread ends should the tracker come back
                with contextlib.suppress(queue.Empty):
                    self._records.get_nowait()
                self._records.put_nowait(last)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            waiting, there = self._given - self._taken, "all rows were sent, the end of the run perhaps not"
            if waiting:
                there = f"{waiting:,} of {self._given:,} rows may be missing"
            self._tell(f"not done {timeout_s:g} s after the end of the run; {there}. {_SAFE}")
        elif (lost := self._failures + self._dropped) > 1:
            self._tell(f"{lost:,} of {self._given + len(self._earlier):,} rows were lost on the way to it.")

    def take_messages(self) -> list[str]:
        """Returns the messages for the user, each once."""
        messages = []
        while not self._messages.empty():
            messages.append(self._messages.get_nowait())
        return messages

    def _run(self) -> None:
        try:
            self._deliver()
        # Whatever a tracker raises, SystemExit included, training goes on; the user is told.
        except BaseException as exc:  # noqa: BLE001
            self._is_off = True
            self._tell(f"its thread has ended: {_text(exc)}. {_SAFE}")

    def _deliver(self) -> None:
        try:
            self._remember()
            started = self._tracker.start(self._run_id, self._config, resumed=self._resumed)
            self._run_id = self._run_id if started.run_id is None else str(started.run_id)
            self._logged = None if started.logged is None else dict(started.logged)
        except Exception as exc:  # noqa: BLE001  # as above
            self._is_off = True
            self._tell(f"cannot be reached or set up: {_text(exc)}. Training goes on without it. {_SAFE}")
            return
        self._remember()
        for record in self._earlier:
            self._try_to_hand_over(record)
        while isinstance(record := self._next_record(), Record):
            self._try_to_hand_over(record)
            self._taken += 1
        record()

    def _next_record(self) -> Record | Callable[[], None]:
        """Waits for a row, and meanwhile keeps the marks of those before it once that is due."""
        if self._due_s is not None:
            try:
                return self._records.get(timeout=max(0.0, self._due_s - time.monotonic()))
            except queue.Empty:
                self._remember()
        return self._records.get()

    def _try_to_hand_over(self, record: Record) -> None:
        try:
            self._hand_over(record)
        except Exception as exc:  # noqa: BLE001  # as above
            self._failures += 1
            self._name_failure(f"did not take the row of step {record.step:,}: {_text(exc)}")

    def _conclude(self, status: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._due_s is not None:
            self._remember()
        try:
            curves = as_png(rows, title="") if rows else ""
            if isinstance(curves, bytes):
                self._give(rows[-1]["step"], {}, {"curves": curves})
            if self._due_s is not None:
                self._remember()
            self._tracker.finish(status)
        except Exception as exc:  # noqa: BLE001  # as above
            self._name_failure(f"could not end its run: {_text(exc)}")

    def _hand_over(self, record: Record) -> None:
        scalars, images = {}, {}
        for name, value in record.values.items():
            numbers = np.asarray(value, float)  # of a file of rows NaN comes as None
            shape = numbers.shape
            if len(shape) == 0:
                scalars[name] = float(numbers)
            elif len(shape) == 1 and shape[0] <= _LONGEST_VECTOR:
                scalars |= {f"{name}/{i}": float(each) for i, each in enumerate(numbers)}
            elif len(shape) == 2:
                if self._has(name, record.step):
                    continue
                picture = matrix_as_png(numbers, title=f"{name}, step {record.step:,}")
                if picture is None:
                    self._tell_once(f"{name} is not shown: {NO_MATPLOTLIB}")
                else:
                    images[name] = picture
            else:
                self._tell_once(f"{name} is not shown, it is an array of shape {shape}; the run's own files have it")
        self._give(record.step, scalars, images)

    def _give(self, step: int, scalars: dict[str, float], images: dict[str, bytes]) -> None:
        """Gives the tracker what it does not have yet."""
        scalars = {name: value for name, value in scalars.items() if not self._has(name, step)}
        images = {name: value for name, value in images.items() if not self._has(name, step)}
        if scalars or images:
            self._tracker.log(step, scalars, images)
            taken = dict.fromkeys([*scalars, *images], step)
            self._marks |= taken
            if self._logged is not None:
                self._logged |= taken
            self._due_s = self._free_s
            if time.monotonic() >= self._due_s:
                self._remember()

    def _has(self, name: str, step: int) -> bool:
        return step <= (self._marks if self._logged is None else self._logged).get(name, -1)

    def _recall(self) -> None:
        if self._path is None:
            return
        try:
            if not self._path.exists():
                return
            kept = json.loads(self._path.read_bytes())
            marks = {str(name): int(step) for name, step in kept["steps"].items()}
            self._run_id, self._marks, self._resumed = str(kept["run_id"]), marks, True
        except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            self._tell(f"{self._path} cannot be read ({_text(exc)}); a new run begins in the tracker.")

    def _remember(self) -> None:
        self._due_s, self._free_s = None, time.monotonic() + self._pause_s
        if self._path is not None:
            text = json.dumps({"run_id": self._run_id, "steps": self._marks})
            try:
                if isinstance(self._path, BucketPath):
                    check_held(self._path.parent)  # another job's marks are not replaced
                    self._path.write_text(text)
                else:
                    write_atomically(self._path, text)
            except (CheckpointError, ConfigError) as exc:
                self._tell_once(f"its position cannot be saved, so a resumed run may show rows twice: {_text(exc)}")

    def _name_failure(self, text: str) -> None:
        """Tells the user of the first failure; how many there were the end says."""
        if "failure" not in self._named:
            self._named.add("failure")
            self._tell(f"{text}. Training goes on. {_SAFE}")

    def _tell_once(self, text: str) -> None:
        if text not in self._named:
            self._named.add(text)
            self._tell(f"{text}.")

    def _tell(self, text: str) -> None:
        self._messages.put(f"{self._name}: {text}")


def _text(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc).strip().rstrip('.')[:500]}"
