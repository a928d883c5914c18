"""The place of a dataset's consumer, and the dict that is saved of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jdist.data.sources.protocol import Resumable, fields
from jdist.data.sources.sequential import SequentialSource
from jdist.errors import DatasetError
from jdist.support import checks
from jdist.typing import PyTree

STATE_VERSION = 1


class Place(NamedTuple):
    """A consumer's place in a source, as one process sees it."""

    step: int = 0  # how many batches of the pass it has had
    epoch: int = 0  # number of the pass
    state: Any = None  # of a `SequentialSource`, after these batches
    # this source is exhausted, while those of other processes may continue; `state` is then the last
    ended: bool = False
    full: int | None = None  # rows of a full batch of the source; None: unknown


@dataclass(frozen=True, kw_only=True)
class ProcessShard:
    """A process's part of every global batch: its replicas' rows of the padded batch."""

    # So a row is on the same replica for any number of processes, and the padding is at the end of
    # the global batch.

    index: int = 0  # the process
    count: int = 1  # how many processes share a batch

    def sizes(self, num_rows: int, padded: int) -> tuple[int, ...]:
        """Counts the real rows of each process in a batch that is filled up to `padded` rows over all processes."""
        each = padded // self.count
        before_last = [min(max(num_rows - i * each, 0), each) for i in range(self.count - 1)]
        return *before_last, num_rows - sum(before_last)


WHOLE = ProcessShard()


class LocalRows(NamedTuple):
    """This process's rows of a global batch."""

    batch: PyTree  # leaves [rows, ...]: its own rows, then perhaps rows that fill up
    sizes: tuple[int, ...]  # the number of rows of each process
    # sizes of a full batch; empty: shared like the source's global batch
    full: tuple[int, ...] = ()


Numbered = tuple[Place, PyTree]  # the place behind a batch, and the batch
Part = tuple[Place, LocalRows]  # the place behind a batch, and this process's rows of it


def write_state(source: Resumable, step: int) -> dict[str, Any]:
    """Writes a position as a dict that JSON can hold: its version, the step, and the source's fingerprint."""
    return {
        "version": STATE_VERSION,
        "step": step,
        "global_batch": source.global_batch,
        "fingerprint": source.fingerprint,
    }


def read_state(source: Resumable, state: Mapping[str, Any]) -> int:
    """Reads the number of batches handed out from a saved position; refuses that of other data."""
    check_saved(state)
    check_fingerprint(state["fingerprint"], source.fingerprint)
    step = checks.whole_number("step", state["step"], DatasetError, least=0)
    if source.num_steps is not None and step > source.num_steps:
        raise DatasetError(
            f"the saved position is step {step}, but the dataset has only {source.num_steps} steps, fewer than when it was "
            "saved. Give at least as many `epochs` as then"
        )
    return step


def check_saved(state: Any) -> None:
    """Raises a `DatasetError` unless it is a saved position that this version reads."""
    if not isinstance(state, Mapping):
        raise DatasetError(f"a saved position is the dict that `state()` returned, not a {type(state).__name__}")
    missing = [key for key in ("version", "step", "fingerprint") if key not in state]
    if missing:
        raise DatasetError(f"this is not a dataset's saved position: it lacks {missing}, and has {sorted(state)}")
    if state["version"] != STATE_VERSION:
        raise DatasetError(
            f"the saved position has version {state['version']!r}, but this jdist reads version "
            f"{STATE_VERSION}; restore it with the jdist that saved it"
        )


def check_fingerprint(saved: Any, now: str) -> None:
    """Raises a `DatasetError` that names what differs, if a position was saved of other data."""
    if saved != now:
        raise DatasetError(
            f"the saved position belongs to another dataset: {_difference(saved, now)}. Data, global batch and shuffle seed "
            "must be the same; restore the source, or start at step 0"
        )


def _difference(saved: Any, now: str) -> str:
    before, after = fields(str(saved)), fields(now)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if not changed or len(before) < 2 or len(after) < 2:
        return f"its fingerprint was {saved!r} and is {now!r}"
    return "; ".join(
        f"{key} was {before.get(key, 'not there')} and is {after.get(key, 'not there')}" for key in changed
    )


def write_place(source: SequentialSource, place: Place, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Writes a place as a JSON dict; `gather` lists what each process with its own source has."""
    own = {
        "state": None if place.state is None else source.to_plain(place.state),
        "full_batch": place.full,
        "ended": place.ended,
        "fingerprint": source.fingerprint,
    }
    return {
        "version": STATE_VERSION,
        "step": place.step,
        "epoch": place.epoch,
        "fingerprint": source.fingerprint,
        "sources": gather(own),
    }


def read_place(source: SequentialSource, saved: Mapping[str, Any], *, index: int, count: int) -> Place:
    """Reads a `write_place` result for process `index` of `count` with their own sources."""
    check_saved(saved)
    sources = saved.get("sources")
    if not isinstance(sources, Sequence):
        raise DatasetError(
            f"this is not the saved position of a {source.kind}, which has `sources`; this dict has {sorted(saved)}"
        )
    if len(sources) != count:
        raise DatasetError(
            f"the saved position is that of {_sources(len(sources))}, and there are now {_sources(count)}. Go on with as many "
            "processes; a source of random access, such as `jdist.data.from_rows(...)`, fits any number of them"
        )
    own = sources[index]
    check_fingerprint(own["fingerprint"], source.fingerprint)  # of the files of this process
    return Place(
        step=checks.whole_number("step", saved["step"], DatasetError, least=0),
        epoch=checks.whole_number("epoch", saved.get("epoch", 0), DatasetError, least=0),
        state=None if own["state"] is None else source.from_plain(own["state"]),
        ended=bool(own["ended"]),
        full=own["full_batch"],
    )


def _sources(count: int) -> str:
    return "one source, the same in all processes" if count == 1 else f"{count} processes with a part of the data each"
