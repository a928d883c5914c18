"""The position of a dataset's consumer: what is saved of it, and where the next pass begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdist.data.readers import GlobalReader, LocalReader
from jdist.data.sources.protocol import read_state, resumable, write_state
from jdist.data.sources.stateful import Place, Position, describe_place, read_place, write_place


class Progress:
    """The position of a dataset's consumer: the pass, the place in it, and its end."""

    def __init__(self, reader: GlobalReader | LocalReader):
        self._reader = reader
        self.place = self._begin = Place()  # of the pass
        self.finished = False

    @property
    def step(self) -> int:
        """Batches that the consumer has had of this pass."""
        return self.place.position.step

    def handed(self, position: Position) -> None:
        """Notes the position behind a batch that the consumer has received."""
        self.place = dataclasses.replace(self.place, position=position)

    def next_pass(self) -> None:
        """Goes to the beginning of the next pass, if this one is finished."""
        if self.finished:
            at_end = self._reader.state_at_end if self._reader.stateful is not None else None
            self.place = self._begin = Place(epoch=self.place.epoch + 1, position=Position(0, at_end))
            self.finished = False

    def rewind(self) -> None:
        """Goes to the beginning of this pass, or of the next one if this is finished."""
        if self.finished:
            self.next_pass()
        else:
            self.place = self._begin

    def to_begin(self, step: int = 0) -> None:
        """Begins a pass of a source without states anew, with its first `step` batches left out."""
        self.place, self.finished = Place(position=Position(step)), False

    def write(self, full: tuple[int, ...] | None) -> dict[str, Any]:
        """Writes the place as a dict for JSON; all processes must call it for stateful sources."""
        reader = self._reader
        shapes = {"shapes": reader.shapes.known} if isinstance(reader, GlobalReader) and reader.shapes.known else {}
        if reader.stateful is None:
            return shapes | write_state(reader.resumable or resumable(reader.source), self.step)
        rows = self.place.full if full is None else reader.full_of_source(full)
        place = dataclasses.replace(self.place, full=rows)
        return shapes | write_place(reader.stateful, place, reader.gather(describe_place(reader.stateful, place)))

    def read(self, saved: Mapping[str, Any]) -> None:
        """Goes to a place that `write` wrote; refuses that of another source."""
        reader = self._reader
        if reader.stateful is not None:
            index, count = reader.own_source
            place = read_place(reader.stateful, saved, index=index, count=count)
            self._begin = place if place.position.step == 0 else Place(epoch=place.epoch)
        else:
            step = read_state(reader.resumable or resumable(reader.source), saved)
            place = Place(position=Position(step))
            self._begin = Place()
        if isinstance(reader, GlobalReader):
            reader.shapes.known = [(shape, rows) for shape, rows in saved.get("shapes", ())]
        self.place, self.finished = place, False
