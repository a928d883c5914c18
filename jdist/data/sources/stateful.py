"""Sources that only go forward, and whose place among their batches can be saved nevertheless."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jdist.data.sources.protocol import STATE_VERSION, check_fingerprint, check_saved, whole_number
from jdist.errors import DatasetError

PyTree = Any


class StatefulBatches(Iterator[PyTree], abc.ABC):
    """One pass over a `StatefulSource`."""

    @abc.abstractmethod
    def state(self) -> Any:
        """Copies the place behind the batch that came last; called after each one, so it has to be cheap."""

    def state_at_end(self) -> Any:
        """Returns the state that the next pass begins with, once this one has ended; None: a new pass needs none."""
        return None


class StatefulSource(Iterable[PyTree], abc.ABC):
    """Batches in order, of a library that can save a place and continue there without reading."""

    kind: str  # its name in messages, "grain IterDataset"
    num_steps: int | None = None  # batches of a pass; None: unknown
    is_endless: bool = False  # a pass is known to be endless
    # `(index, count)` if the library gives this process only its part of the data
    own_part: tuple[int, int] | None = None
    # code that makes the library share the data among processes; "": jdist shares it
    how_to_share: str = ""

    @abc.abstractmethod
    def open(self, epoch: int, state: Any) -> StatefulBatches:
        """Opens pass `epoch` at `state`: of this pass, or `state_at_end` of the one before; None: at its beginning."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Which data; a saved place only fits the same. Written as that of a `RandomAccessSource`."""

    def describe_batch(self, number: int, error: Exception) -> str | None:
        """Describes the rows of a batch of a pass in which an error was raised, for its message; None: not known."""
        return None

    def to_plain(self, state: Any) -> Any:
        """Converts a state to values that JSON can hold."""
        return state

    def from_plain(self, value: Any) -> Any:
        """Undoes `to_plain`."""
        return value

    def __iter__(self) -> Iterator[PyTree]:
        return self.open(0, None)


class Position(NamedTuple):
    """A consumer's position in a pass."""

    step: int  # how many batches it has had
    state: Any = None  # of a `StatefulSource`, after these batches
    # this source is exhausted, while those of other processes may continue; `state` is then the
    # last
    ended: bool = False


BEGINNING = Position(0)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place in a `StatefulSource`, as one process sees it."""

    epoch: int = 0  # number of the pass
    position: Position = BEGINNING  # in the pass
    full: int | None = None  # rows of a full batch of the source; None: unknown


def describe_place(source: StatefulSource, place: Place) -> dict[str, Any]:
    """Describes what is this process's own of a place, in values that JSON can hold."""
    state = place.position.state
    plain = None if state is None else source.to_plain(state)
    position = place.position
    return {"state": plain, "full_batch": place.full, "ended": position.ended, "fingerprint": source.fingerprint}


def write_place(source: StatefulSource, place: Place, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Writes a place in this process's source as a JSON dict."""
    # `sources` are the results of `describe_place`: of this process, or of all if each has its own
    # source.
    return {
        "version": STATE_VERSION,
        "step": place.position.step,
        "epoch": place.epoch,
        "fingerprint": source.fingerprint,
        "sources": list(sources),
    }


def read_place(source: StatefulSource, saved: Mapping[str, Any], *, index: int, count: int) -> Place:
    """Reads a `write_place` result for process `index` of `count` with their own sources."""
    check_saved(saved)
    sources = saved.get("sources")
    if not isinstance(sources, Sequence):
        raise DatasetError(
            f"this is not the saved position of a {source.kind}, which has `sources`; this dict has {sorted(saved)}"
        )
    if len(sources) != count:
        raise DatasetError(
            f"the saved position is that of {_sources(len(sources))}, and there are now {_sources(count)}. A {source.kind} "
            "has one place in each process's part of the data: go on with as many processes, or with a source of random access "
            "(`jdist.data.from_rows(...)`, a grain MapDataset), whose position fits any number of them"
        )
    own = sources[index]
    check_fingerprint(own["fingerprint"], source.fingerprint)  # of the files of this process
    state = own["state"]
    return Place(
        epoch=whole_number(saved.get("epoch", 0), name="epoch", least=0),
        position=Position(
            whole_number(saved["step"], name="step", least=0),
            None if state is None else source.from_plain(state),
            bool(own["ended"]),
        ),
        full=own["full_batch"],
    )


def _sources(count: int) -> str:
    return "one source, the same in all processes" if count == 1 else f"{count} processes with a part of the data each"
