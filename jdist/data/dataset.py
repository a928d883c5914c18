"""A dataset as its consumer sees it: batches, and the position to go on at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from jdist.data import batching
from jdist.data.batching import BatchLayout
from jdist.data.iterator import DatasetIterator
from jdist.data.pipeline import Numbered, Options, learn_layout, prepare
from jdist.data.prefetch import Prefetcher, PushBack, Stop
from jdist.data.readers import GlobalReader, LocalReader, NumberedPart
from jdist.data.sources.arrays import ArraySource
from jdist.data.sources.protocol import Resumable, read_state, resumable, write_state
from jdist.errors import DatasetError
from jdist.support.html import table
from jdist.support.leaf_table import tree_table
from jdist.support.tracebacks import without_own_frames

PyTree = Any


class DistributedDataset:
    """Batches as the replicas receive them, and the position of the one who consumes them.

    Iterating starts at the position: at first 0; after a loop was left early, behind the last batch it
    received; after a loop came to the end, 0 again; after `restore`, the restored position, even if that is
    the end. A plain iterable is asked for a new iterator each time, except one that is an iterator itself (a
    generator): that goes on where the consumer stopped, with nothing lost. One iterator is active at a time:
    a new one closes the last.

    Made by `distributed_dataset`.
    """

    def __init__(
        self,
        reader: GlobalReader | LocalReader,
        options: Options,
        *,
        hand_over: Callable[[PyTree], PyTree] | None = None,
    ):
        self._reader = reader
        self._source = reader.source
        self._options = options
        self._hand_over = hand_over
        self._position = 0
        self._finished = False
        self._skip = self._skipped = 0  # batches of a plain iterable that the next pass, and this one, leave out
        self._layout: BatchLayout | None = None
        self._stop = Stop()  # of the pass that was opened last
        self._peeked: Iterator[NumberedPart | None] | None = None  # of a plain iterable, only looked at
        self._stream: PushBack[Numbered | None] | None = None  # of an iterator, which cannot be made anew
        self._prefetcher: Prefetcher[Numbered] | None = None
        self._active: weakref.ref[DatasetIterator] | None = None

    @property
    def num_steps(self) -> int | None:
        """How many batches one pass has; None: without end, or a plain iterable."""
        return None if self._reader.facts is None else self._reader.facts.num_steps

    @property
    def is_endless(self) -> bool:
        """Whether it is known that a pass does not end."""
        return self._reader.facts is not None and self._reader.facts.num_steps is None

    @property
    def is_resumable(self) -> bool:
        """Whether `state` and `restore` work: not of a plain iterable."""
        return self._reader.facts is not None

    @property
    def steps_per_pass(self) -> int | None:
        """How many steps a whole pass makes; None: not known. An iterable's `len()` is taken at its word."""
        if self._reader.facts is not None:
            numbers_what_is_left = isinstance(self._reader, GlobalReader) and isinstance(
                self._reader.source, ArraySource
            )
            leaves_out = self._options.partial == "drop" and not numbers_what_is_left
            return None if leaves_out else self._reader.facts.num_steps
        if self._options.partial == "drop" or not (
            isinstance(self._reader, GlobalReader) and isinstance(self._source, Sized)
        ):
            return None
        try:
            return len(self._source)
        except TypeError:  # a loader or a `tf.data.Dataset` that does not know it
            return None

    def __len__(self) -> int:
        """How many global batches a whole pass hands out; with `steps_per_call` above 1, how many stacks of them.

        Raises:
            TypeError: that is not known.

        Example:
            >>> import jdist, numpy as np
            >>> source = jdist.data.from_arrays(np.arange(10), global_batch=5)
            >>> len(jdist.one_device().distribute_dataset(source))
            2
        """
        if (steps := self.steps_per_pass) is None:
            drops = (
                ', of which partial="drop" leaves out those that are short' if self._options.partial == "drop" else ""
            )
            why = "is without end" if self.is_endless else "does not tell how many batches it has"
            raise TypeError(
                f"this dataset has no len(): its source, a {type(self._source).__name__}, {why}{drops}. Count in steps, as "
                "`jdist.fit(..., steps_per_epoch=...)` does, or give a source with `num_steps` or `len()`."
            )
        return -(-steps // self._options.steps_per_call)

    def __bool__(self) -> bool:
        return True  # a dataset is there, whether or not it has a len()

    @property
    def global_batch(self) -> int | None:
        """Rows of a full batch as the sources give it; None: a plain iterable, not read from yet."""
        if self._reader.facts is not None:
            return self._reader.facts.global_batch
        return None if self._layout is None else self._layout.global_batch

    @property
    def position(self) -> int:
        """Steps of the source that were handed to the consumer in this pass; never counts prefetched ones."""
        return self._position

    @property
    @without_own_frames
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of what a step receives, over all replicas: a pytree of `jax.ShapeDtypeStruct`.

        Of batches that a strategy puts on its devices with their shardings.

        Makes or reads one batch if none was yet; a plain iterable loses nothing by it. Where each process has an
        iterable of its own, all have to ask then.
        """
        if self._layout is None:
            if self._reader.facts is not None:
                self._learn(self._reader.look(), start=0)
            else:
                self._peeked = self._learn(self._parts(0), start=0)
        assert self._layout is not None
        spec = batching.element_spec(self._layout, steps_per_call=self._options.steps_per_call)
        return spec if self._options.place_spec is None else self._options.place_spec(spec)

    def state(self) -> dict[str, Any]:
        """The position as a dict that JSON can hold: steps handed to the consumer, and of which data.

        Raises:
            DatasetError: the source is a plain iterable.
        """
        return write_state(self._resumable(), self._position)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; costs the same at every step. Ends an iteration that is under way.

        Args:
            state: what `state` returned, for the same data, global batch and shuffle seed; the number of
                devices may differ.

        Raises:
            DatasetError: the source is a plain iterable, or the position belongs to another one.
        """
        position = read_state(self._resumable(), state)
        self._end_active("the dataset was restored to another position")
        self._position, self._finished = position, False

    def go_to(self, step: int) -> None:
        """Goes to a step of the pass, from 0; as `restore`.

        Raises:
            DatasetError: the source is a plain iterable.
        """
        self.restore(write_state(self._resumable(), step))

    def rewind(self) -> None:
        """Goes to the beginning: the next loop gets every row, wherever the last one was left; of an iterator what is left."""
        if self._reader.facts is not None and self._position:
            self.go_to(0)
        elif self._finished:
            self._position, self._finished = 0, False

    def skip(self, count: int) -> None:
        """Has the next loop begin `count` batches behind the beginning of a plain iterable, which are read and left out.

        The loop raises a `DatasetError` if there are fewer.
        """
        self._skip = count

    def close(self) -> None:
        """Ends an iteration that is under way; waits at most 2 s for its thread. The position stays."""
        self._end_active(None)

    @without_own_frames
    def __iter__(self) -> DatasetIterator:
        self._end_active("another `iter` of the same dataset has started")
        if self._prefetcher is not None:
            raise DatasetError(
                f"the {type(self._source).__name__} still works on the batch that the last loop waited "
                "for; it can only go on where that ends. Iterate again once it has returned"
            )
        if self._finished:
            self._position, self._finished = 0, False
        batches = self._open()
        if self._options.prefetch:
            keep_unused = batches is self._stream
            self._prefetcher = Prefetcher(
                batches, depth=self._options.prefetch, keep_unused=keep_unused, stop=self._stop
            )
        iterator = DatasetIterator(
            self._prefetcher or filter(None, batches),
            hand_over=self._hand_over,
            handed=self._handed,
            came_to_end=self._came_to_end,
            close=self.close,
        )
        self._active = weakref.ref(iterator)
        return iterator

    def __repr__(self) -> str:
        count = self._options.num_replicas
        replicas = "1 replica" if count == 1 else f"{count:,} replicas"
        full = self._reader.full if self._layout is None else self._layout.full
        if self.global_batch is None or full is None:
            return f"DistributedDataset({replicas}, global batch known after the first batch, plain iterable)"
        rows = batching.padded_rows(full, num_replicas=count)
        padded = f" padded to {rows:,}" if rows != self.global_batch else ""
        if self._reader.facts is None:
            steps = "plain iterable"
        else:
            steps = "endless" if self.num_steps is None else f"{self.num_steps:,} steps"
        calls = f", {self._options.steps_per_call} steps a call" if self._options.steps_per_call > 1 else ""
        return (
            f"DistributedDataset(global batch {self.global_batch:,}{padded} = {replicas} x "
            f"{rows // count:,}, {steps}{calls}, at step {self._position:,})"
        )

    def _repr_html_(self) -> str:
        count, calls = self._options.num_replicas, self._options.steps_per_call
        rows: list[tuple[str, object]] = [("replicas", f"{count:,}")]
        full = self._reader.full if self._layout is None else self._layout.full
        if self.global_batch is None or full is None:
            rows.append(("global batch", "known after the first batch"))
        else:
            padded = batching.padded_rows(full, num_replicas=count)
            filled = f", padded to {padded:,}" if padded != self.global_batch else ""
            rows.append(("global batch", f"{self.global_batch:,} rows{filled}: {padded // count:,} a replica"))
        if self._reader.facts is None:
            steps = "not known: a plain iterable"
        else:
            steps = "endless" if self.num_steps is None else f"{self.num_steps:,}"
        rows += [("steps of a pass", steps), ("at step", f"{self.position:,}"), ("steps a call", calls)]
        received = "" if self._layout is None else tree_table(self.element_spec, title="what a step receives")
        return table(rows, title=type(self).__name__) + received

    def _open(self) -> Iterator[Numbered | None]:
        """Prepared batches from the position on."""
        start = self._position
        if self._reader.facts is not None:
            numbered = self._parts(start)
        elif self._stream is not None and not self._stream.ended:
            self._stop.asked, self._skipped = False, 0
            return self._stream
        else:
            start = 0
            numbered, self._peeked = self._peeked or self._parts(0), None
        if self._layout is None:
            numbered = self._learn(numbered, start=start)
        if self._reader.facts is None:
            self._position = self._skipped = self._skip
            self._skip = 0
            numbered = _behind(numbered, self._skipped, type(self._source).__name__) if self._skipped else numbered
        if not isinstance(self._source, Iterator):
            return self._prepared(numbered)
        self._stream = PushBack(self._prepared(numbered))
        return self._stream

    def _parts(self, start: int) -> Iterator[NumberedPart | None]:
        self._stop = Stop()
        return self._reader.parts(start, self._stop)

    def _resumable(self) -> Resumable:
        return self._reader.facts or resumable(self._source)

    def _learn(self, numbered: Iterator[NumberedPart | None], *, start: int) -> Iterator[NumberedPart | None]:
        """Settles the layout from the first batch, and returns the batches with that one still in front."""
        learnt = learn_layout(numbered, full=lambda: self._reader.full, options=self._options)
        if learnt is not None:
            self._layout, numbered = learnt
            return numbered
        if start > 0:
            return iter(())
        raise DatasetError(
            f"the dataset is empty: the {type(self._source).__name__} gave no batch with rows; check its "
            "files and filters, and if it is a generator or an iterator, that nothing has used it up before"
        )

    def _prepared(self, numbered: Iterator[NumberedPart | None]) -> Iterator[Numbered | None]:
        if self._layout is None:  # resumed at the end: there was no batch to learn it from
            return iter(())
        return prepare(numbered, layout=self._layout, options=self._options)

    def _end_active(self, reason: str | None) -> None:
        iterator = None if self._active is None else self._active()
        if iterator is not None:
            iterator.end(reason)
        self._active = None
        if self._prefetcher is None:
            return
        self._prefetcher.close()
        if self._stream is None:
            self._prefetcher = None
        elif not self._prefetcher.alive:
            self._stream.push_back(*self._prefetcher.unused())
            self._prefetcher = None

    def _handed(self, position: int) -> None:
        self._position = position

    def _came_to_end(self, count: int) -> None:
        self._finished = True
        if count or self._skipped:
            return
        if isinstance(self._source, Iterator):
            raise DatasetError(
                f"the {type(self._source).__name__} is exhausted: an earlier loop used it up (or an error "
                "ended it), and an iterator cannot start again. Pass something that gives a new iterator "
                "each time (a list, a loader, an object with `__iter__`), or `jdist.data.from_arrays(..., "
                "epochs=...)`"
            )
        if self._position == 0:
            raise DatasetError(
                f"this pass over the {type(self._source).__name__} gave no batch: it yields nothing (any "
                f"more), or partial={self._options.partial!r} left out every batch as short of "
                f"{self.global_batch} rows"
            )


def _behind(numbered: Iterator[NumberedPart | None], count: int, kind: str) -> Iterator[NumberedPart | None]:
    """What comes behind the first batches of a plain iterable."""
    position = 0
    for one in numbered:
        if one is None:
            yield None
            continue
        position = one[0]
        if position > count:
            yield one
    if position < count:
        raise DatasetError(
            f"the {kind} ended after {position:,} batches, but {count:,} of this pass were trained on before. To go on, it has "
            "to give the same batches in the same order as then; or begin anew, in another folder."
        )
