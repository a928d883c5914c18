"""One pass over a source: its batches from a place on, what their errors name, and the place behind each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jdist.data.leaves import to_numpy
from jdist.data.sources.plain import PlainSource
from jdist.data.sources.protocol import RandomAccessSource, refuse_a_row, steps_from
from jdist.data.sources.stateful import Place, Position, StatefulBatches, StatefulSource
from jdist.errors import BatchError

PyTree = Any
Source = Iterable[PyTree] | RandomAccessSource


class Pass(Iterator[PyTree]):
    """The batches of a source from a place on, which the first `next` opens; of a plain iterable from its beginning on."""

    def __init__(self, source: Source, start: Place):
        self._source = source
        self._start = start
        self._number = start.position.step
        self._batches: Iterator[PyTree] | None = None
        self._ended = False

    def __next__(self) -> PyTree:
        if self._ended:
            raise StopIteration
        try:
            if self._batches is None:
                self._batches = self._open()
            batch = next(self._batches)
        except StopIteration:
            self._ended = True
            raise
        except Exception as error:
            source = self._source
            rows = None
            if isinstance(source, StatefulSource) and self._batches is not None:  # else its state was refused
                rows = source.describe_batch(self._number, error)
            elif isinstance(source, PlainSource):
                rows = source.describe_row(error)
            if rows is not None:
                error.add_note(f"while reading {rows}")
            self._note(error, self._number)
            raise
        if self._number == self._start.position.step:
            refuse_a_row(batch, self._source)
        self._number += 1
        return batch

    def as_numpy(self) -> Iterator[PyTree]:
        """Yields the batches with numpy leaves."""
        for batch in self:
            try:
                yield to_numpy(batch)
            except BatchError as error:
                kind = getattr(self._source, "kind", type(self._source).__name__)
                error.add_note(f"while making batch {self._number - 1:,} (from 0) of a {kind}")
                raise

    def _note(self, error: Exception, number: int) -> None:
        kind = getattr(self._source, "kind", None)
        if kind is not None and not isinstance(self._source, RandomAccessSource):
            error.add_note(f"while making batch {number:,} (from 0) of a {kind}")

    def _open(self) -> Iterator[PyTree]:
        source, start = self._source, self._start
        if isinstance(source, RandomAccessSource):
            return map(source.batch_at, steps_from(source, start.position.step))
        if not isinstance(source, StatefulSource):
            return iter(source)
        return iter(()) if start.position.ended else source.open(start.epoch, start.position.state)

    def position(self, step: int) -> Position:
        """Returns the position behind the batch that came last, which is the consumer's `step`."""
        if not isinstance(self._source, StatefulSource):
            return Position(step)
        if self._ended:
            return Position(step, self.state_at_end(), ended=True)
        return Position(step, self._batches.state() if isinstance(self._batches, StatefulBatches) else None)

    def state_at_end(self) -> Any:
        """Returns the state that the next pass begins with; None: it needs none."""
        if isinstance(self._batches, StatefulBatches):
            return self._batches.state_at_end()
        return self._start.position.state if self._start.position.ended else None
