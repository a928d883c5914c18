"""The dataset that feeds replicas: batches, and the position of its consumer."""

from __future__ import annotations

import inspect
import itertools
import logging
import weakref
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from typing import Any

from jdist.data import batching
from jdist.data.batching import BatchLayout, plan_layout, prepare, put
from jdist.data.options import FeedOptions
from jdist.data.position import Numbered, Part, Place, write_state
from jdist.data.prefetch import DatasetIterator, Prefetcher, StopRequest
from jdist.data.readers import GlobalReader
from jdist.data.sources.protocol import kind_of
from jdist.data.sources.rows import RowsByNumber
from jdist.data.sources.sequential import PlainSource
from jdist.errors import DatasetError
from jdist.support.leaves import leaves_of, table_of
from jdist.support.table import Table
from jdist.support.tracebacks import without_own_frames
from jdist.typing import PyTree

_LOG = logging.getLogger(__name__)


class DistributedDataset:
    """Batches as the replicas receive them, and the position of the one who consumes them.

    A loop starts at the position: at first 0; behind the last batch that was received, after a loop was left early; 0 again
    after a loop came to the end; the restored one after `restore`, even if that is the end. A plain iterable starts over in
    each loop, but an iterator (a generator) goes on where the consumer stopped, with nothing lost. One loop is active at a
    time: a new one closes the last.

    `distributed_dataset` makes it.
    """

    def __init__(self, reader: GlobalReader, options: FeedOptions):
        self._reader = reader
        self._source = reader.source
        self._options = options
        self._place = self._begin = Place()  # of the consumer, and of the pass's beginning
        self._finished = False
        self._pass = 0  # number of the next pass of a source without positions
        self._skip = self._skipped = 0  # leading batches that the next pass and this one leave out
        self._layout: BatchLayout | None = None
        self._stop = StopRequest()  # of the pass that was opened last
        self._peeked: Iterator[Part | None] | None = None  # opened for `element_spec`
        self._stream: Generator[Numbered | None] | Prefetcher[Numbered] | None = None  # of an iterator
        self._prefetcher: Prefetcher[Numbered] | None = None
        self._active: weakref.ref[DatasetIterator] | None = None

    @property
    def num_steps(self) -> int | None:
        """Batches of one pass; None: without end, or not known."""
        return self._reader.num_steps if self.is_resumable else None

    @property
    def is_endless(self) -> bool:
        """Returns whether it is known that a pass does not end."""
        return self._reader.is_endless

    @property
    def is_resumable(self) -> bool:
        """Returns whether `state` and `restore` work: not of a plain iterable."""
        return self._reader.is_resumable

    @property
    def steps_per_pass(self) -> int | None:
        """Steps of a whole pass, of an iterable by its `len()`; None: not known."""
        # Alone, a `RowsByNumber` counts the batches that are left, see `distributed_dataset`.
        counts_left = (
            self._reader.num_sources == 1 and isinstance(self._source, RowsByNumber) and self._source.drop_short
        )
        return self._reader.num_steps if self._options.partial != "drop" or counts_left else None

    def __len__(self) -> int:
        """Counts the global batches of a whole pass; with `steps_per_call` above 1, the stacks of them.

        Raises:
            TypeError: that is not known.

        Example:
            >>> import jdist, numpy as np
            >>> source = jdist.data.from_arrays(np.arange(10), global_batch=5)
            >>> len(jdist.one_device().distribute_dataset(source))
            2
        """
        if (steps := self.steps_per_pass) is None:
            is_dropping = self._options.partial == "drop"
            drops = ', and partial="drop" leaves out the short ones' if is_dropping else ""
            why = "is without end" if self.is_endless else "does not tell how many batches it has"
            raise TypeError(
                f"this dataset has no len(): its source, a {self._kind}, {why}{drops}. Count in steps, as "
                "`jdist.fit(..., steps_per_epoch=...)` does, or give a source with `num_steps` or `len()`."
            )
        return -(-steps // self._options.steps_per_call)

    def __bool__(self) -> bool:
        return True  # a dataset is there, whether or not it has a len()

    @property
    def global_batch(self) -> int | None:
        """Rows of a full batch as the sources give it; None: a plain iterable, not read from yet."""
        known = self._layout or self._reader.numbered
        return None if known is None else known.global_batch

    @property
    def position(self) -> int:
        """Steps that the consumer has received in this pass; prefetched ones do not count."""
        return self._place.step

    @property
    @without_own_frames
    def element_spec(self) -> PyTree:
        """Describes what a step receives, over all replicas: a pytree of `jax.ShapeDtypeStruct`, with shardings under a mesh.

        Makes one batch if none was made yet; a plain iterable loses nothing by it. Where each process has an iterable of
        its own, all have to ask.
        """
        if self._layout is None:
            if self._is_numbered:
                self._learn(self._reader.peek(), start=0)
            else:
                self._peeked = self._learn(self._parts(), start=self.position)
        assert self._layout is not None
        spec = batching.element_spec(self._layout)
        return spec if self._options.place_spec is None else self._options.place_spec(spec)

    def state(self) -> dict[str, Any]:
        """Saves the position as a dict that JSON can hold: the number of steps that the consumer has received, and their data.

        Where each process has a source of its own that has states, such as a loader's, all have to ask.

        Raises:
            DatasetError: the source is a plain iterable, or its state cannot be saved.
        """
        return self._reader.write(self._place, None if self._layout is None else self._layout.full)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; costs the same at every step. Ends an iteration that is under way.

        Args:
            state: what `state` returned, for the same data, global batch and shuffle seed; any number of devices.

        Raises:
            DatasetError: the source is a plain iterable, or the position belongs to another one.
        """
        self._place = self._reader.read(state)
        self._begin = self._place if self._place.step == 0 else Place(epoch=self._place.epoch)
        self._finished, self._peeked = False, None
        self._end_active("the dataset was restored to another position")

    def go_to(self, step: int) -> None:
        """Goes to number `step` of the pass, from 0; as `restore`.

        Raises:
            DatasetError: the source does not make batches by their numbers.
        """
        if self._reader.numbered is None:
            raise DatasetError(f"a {self._kind} only goes forward: its batches have no numbers to go to")
        self.restore(write_state(self._reader.numbered, step))

    def rewind(self) -> None:
        """Goes to the beginning: the next loop gets every row; of an iterator, the rest."""
        if self.is_resumable and self.position:
            self._end_active("the dataset was rewound")
        if self._finished:
            self._next_pass()
        elif self.is_resumable:
            if self._place is not self._begin:
                self._peeked = None  # it begins at the place that was left
            self._place = self._begin

    def skip(self, count: int, *, number: int = 0) -> None:
        """Has the next loop read and leave out `count` batches of a plain iterable; fewer are a `DatasetError`.

        Args:
            count: the number of batches to leave out.
            number: that of the pass, for libraries with an order that depends on it.
        """
        self._skip = count
        if number:
            self._pass = number
            if isinstance(self._source, PlainSource):  # else what was looked at is the beginning of that pass
                self._peeked = None

    def renew(self, other: DistributedDataset) -> None:
        """Ends an iteration that is under way, and goes on as another dataset of the same source.

        Args:
            other: the dataset to become, for other replicas.
        """
        self.close()
        vars(self).update(vars(other))

    def close(self) -> None:
        """Ends an iteration that is under way; waits at most 2 s for its thread. The position stays."""
        self._end_active(None)

    @without_own_frames
    def __iter__(self) -> DatasetIterator:
        self._end_active("another `iter` of the same dataset has started")
        if self._finished:
            self._next_pass()
        self._tell_of_repeated_order()
        batches = self._open()
        if isinstance(batches, Prefetcher):
            batches.resume()
        elif self._options.input.prefetch:
            depth, keeps = self._options.input.prefetch, self._reader.is_stream
            batches = Prefetcher(batches, depth=depth, keep_unused=keeps, stop=self._stop)
        place, self._stream = self._options.place, batches if self._reader.is_stream else None
        self._prefetcher = batches if isinstance(batches, Prefetcher) else None
        iterator = DatasetIterator(
            self._prefetcher or filter(None, batches),
            hand_over=None if place is None or self._options.input.prefetch_to_device else partial(put, place=place),
            handed=self._handed,
            came_to_end=self._came_to_end,
            close=self.close,
        )
        self._active = weakref.ref(iterator)
        return iterator

    def __repr__(self) -> str:
        count, rows = self._options.num_replicas, self._padded_rows()
        replicas = "1 replica" if count == 1 else f"{count:,} replicas"
        if self.global_batch is None or rows is None:
            return f"DistributedDataset({replicas}, global batch known after the first batch, {self._kind_of_source})"
        padded = f" padded to {rows:,}" if rows != self.global_batch else ""
        steps = self._steps_text(self._kind_of_source, " steps")
        calls = f", {self._options.steps_per_call} steps a call" if self._options.steps_per_call > 1 else ""
        return (
            f"DistributedDataset(global batch {self.global_batch:,}{padded} = {replicas} x "
            f"{rows // count:,}, {steps}{calls}, at step {self.position:,})"
        )

    def _repr_html_(self) -> str:
        count, calls = self._options.num_replicas, self._options.steps_per_call
        batch, padded = "known after the first batch", self._padded_rows()
        if self.global_batch is not None and padded is not None:
            filled = f", padded to {padded:,}" if padded != self.global_batch else ""
            batch = f"{self.global_batch:,} rows{filled}: {padded // count:,} a replica"
        rows = [
            ("replicas", f"{count:,}"),
            ("global batch", batch),
            ("steps of a pass", self._steps_text(f"not known: a {self._kind_of_source}")),
            ("at step", f"{self.position:,}"),
            ("steps a call", calls),
        ]
        tables = [Table(type(self).__name__, rows)]
        if self._layout is not None:
            tables.append(table_of(leaves_of(self.element_spec), "what a step receives"))
        return "".join(each._repr_html_() for each in tables)

    def _padded_rows(self) -> int | None:
        full = self._reader.full if self._layout is None else self._layout.full
        return None if full is None else self._padded(full)

    def _padded(self, full: tuple[int, ...]) -> int:
        return batching.padded_rows(full, num_replicas=self._options.num_replicas)

    def _steps_text(self, of_iterable: str, unit: str = "") -> str:
        if self.num_steps is None and not self.is_endless:
            return of_iterable
        return "endless" if self.num_steps is None else f"{self.num_steps:,}{unit}"

    def _open(self) -> Generator[Numbered | None] | Prefetcher[Numbered]:
        """Opens the prepared batches from the position on."""
        start = self.position
        if self._stream is not None and not _is_over(self._stream):
            self._skipped = 0
            return self._stream
        if not self.is_resumable:
            start, self._place = 0, Place(step=self._skip)
        parts, self._peeked = self._peeked or self._parts(), None
        if self._layout is None:
            parts = self._learn(parts, start=start)
        if not self.is_resumable:
            self._skipped, self._skip = self._skip, 0
            if self._skipped:
                parts = _skip_batches(parts, self._skipped, self._kind)
        if self._layout is None:  # resumed at the end: there was no batch to learn it from
            return (_ for _ in ())
        return prepare(parts, self._layout)

    def _parts(self) -> Iterator[Part | None]:
        self._stop, place = StopRequest(), self._place
        if not self.is_resumable:
            place, self._pass = Place(epoch=self._pass), self._pass + 1
        return self._reader.parts(place, self._stop, ahead=self._options.input.prefetch > 0)

    def _handed(self, place: Place) -> None:
        self._place = place

    def _next_pass(self) -> None:
        """Goes to the beginning of the next pass."""
        self._place = self._begin = Place(epoch=self._place.epoch + 1, state=self._reader.state_at_end)
        self._finished = False

    @property
    def _is_numbered(self) -> bool:
        return self._reader.numbered is not None

    @property
    def _kind(self) -> str:
        return kind_of(self._source)

    @property
    def _kind_of_source(self) -> str:
        return self._kind if self.is_resumable else "plain iterable"

    def _learn(self, parts: Iterator[Part | None], *, start: int) -> Iterator[Part | None]:
        """Learns the layout from the first batch; returns the batches with that one still in front."""
        for place, part in filter(None, parts):
            if (rows := sum(part.sizes)) > 0:
                # Some sources know their full batch from the first one on.
                known = part.full or self._reader.full
                full = known or self._options.share.sizes(rows, self._padded((rows,)))
                copy = not getattr(self._source, "is_fresh", False)
                self._layout = plan_layout(part.batch, full, self._options, copy=copy)
                return itertools.chain([(place, part)], parts)
        if start > 0:
            return iter(())
        raise DatasetError(
            f"the dataset is empty: the {self._kind} gave no batch with rows; check its "
            "files and filters, and if it is a generator or an iterator, that nothing has used it up before"
        )

    def _end_active(self, reason: str | None) -> None:
        iterator = None if self._active is None else self._active()
        if iterator is not None:
            iterator.end(reason)
        self._active = None
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    @property
    def _order(self) -> str | None:
        """The text that names the order of the rows in a pass from the beginning; None: no seed of jdist's shuffles them."""
        draws_again = not self._is_numbered and self._place.epoch > 0
        is_shuffled = getattr(self._source, "shuffle_seed", None) is not None
        return self._source.fingerprint if is_shuffled and not draws_again else None

    def _tell_of_repeated_order(self) -> None:
        order = self._order
        if order is None or self.position or self._options.orders.get(order, True):
            return
        self._options.orders[order] = True
        _LOG.warning(
            "the rows come in the same order as in an earlier pass: shuffle_seed=%s orders epoch 0 again. For a new order in "
            "each epoch give `epochs=n` (None: without end) to the source, and distribute it once.",
            getattr(self._source, "shuffle_seed", None),
        )

    def _came_to_end(self, count: int) -> None:
        self._finished = True
        if (order := self._order) is not None:
            self._options.orders.setdefault(order, False)
        if count or self._skipped:
            return
        if self._reader.is_stream:
            raise DatasetError(
                f"the {self._kind} is exhausted: an earlier loop used it up, or an error ended it. Pass an iterable that can "
                "start again (a list, a loader), or `jdist.data.from_arrays(..., epochs=...)`"
            )
        if self.position == 0:
            raise DatasetError(
                f"this pass over the {self._kind} gave no batch: it yields nothing (any more), or "
                f"partial={self._options.partial!r} left out every batch as short of {self.global_batch} rows"
            )


def _is_over(stream: Generator[Numbered | None] | Prefetcher[Numbered]) -> bool:
    return stream.ended if isinstance(stream, Prefetcher) else inspect.getgeneratorstate(stream) == inspect.GEN_CLOSED


def _skip_batches(parts: Iterator[Part | None], count: int, kind: str) -> Iterator[Part | None]:
    """Leaves out the first batches of a plain iterable."""
    place = Place()
    for each in parts:
        place = place if each is None else each[0]
        if each is None or place.step > count:
            yield each
    if place.step < count:
        raise DatasetError(
            f"the {kind} ended after {place.step:,} batches, but this run has trained on {count:,} of this pass. To go on, "
            "it must give the same batches in the same order as then; or start over, in another folder."
        )
