"""The dataset that feeds replicas: padded, masked, prefetched batches, and a position to resume at."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jdist.data import batching
from jdist.data.arrays import ArraySource
from jdist.data.batching import PARTIALS, BatchLayout, Partial, check_divisible
from jdist.data.files import FileSource
from jdist.data.iterator import DatasetIterator
from jdist.data.pipeline import Numbered, NumberedPart, Options, learn_layout, parts_from, parts_of, prepare
from jdist.data.prefetch import Prefetcher, PushBack
from jdist.data.replica_batches import RandomAccessReplicaBatches, ReplicaBatches
from jdist.data.share import WHOLE, Share
from jdist.data.source import (
    RandomAccessSource,
    check_source,
    read_state,
    resumable,
    whole_number,
    write_state,
)
from jdist.errors import DatasetError

PyTree = Any


def distributed_dataset(
    source: Iterable[PyTree] | RandomAccessSource,
    *,
    num_replicas: int,
    place: Callable[[PyTree], PyTree] | None,
    place_spec: Callable[[PyTree], PyTree] | None = None,
    partial: Partial = "pad",
    with_mask: bool = False,
    steps_per_call: int = 1,
    prefetch: int = 2,
    prefetch_to_device: bool = True,
    share: Share = WHOLE,
) -> DistributedDataset:
    """Feeds the batches of a source to replicas; `strategy.distribute_dataset` calls this.

    Args:
        source: an iterable of numpy pytrees with leaves [rows, ...], one global batch each; or a
            random-access source.
        num_replicas: how many replicas share the rows of a global batch.
        place: puts a host batch with leaves [rows, ...] ([steps, rows, ...] with `steps_per_call` above 1)
            on the devices; called from the prefetch thread (see `prefetch_to_device`), where a `with
            jax.default_device(...)` or the like of the consumer does not reach. None leaves batches on the host.
        place_spec: maps the tree of `element_spec`, for example to add shardings. None leaves it.
        partial: what to do with a batch that has fewer rows than the first: "pad" fills it up and masks the
            filling, "drop" leaves it out, "error" refuses it. "pad" also rounds the global batch up to a
            multiple of `num_replicas`; the others require that it divides.
        with_mask: yield `(batch, mask)` for batches that are not dicts; a dict always gains a `mask` leaf.
        steps_per_call: stack this many batches on a new leading axis. What is left over at the end comes as a
            smaller stack, which compiles a step once more.
        prefetch: how many (stacks of) batches a background thread makes ahead; 0: none, and no thread.
        prefetch_to_device: whether the thread calls `place` too; False: it is called when the consumer takes a
            batch, in the consumer's thread.
        share: which rows of each global batch this process makes; `place` gets these alone.

    Returns:
        The dataset.

    Raises:
        DatasetError: the source is empty or not a source, or an option is out of range.
        BatchError: the global batch of a random-access source does not divide where `partial` requires it.

    Example:
        >>> import numpy as np
        >>> from jdist.data import distributed_dataset, from_arrays
        >>> source = from_arrays({"x": np.arange(3)}, global_batch=2)
        >>> [b["mask"].tolist() for b in distributed_dataset(source, num_replicas=2, place=None)]
        [[True, True], [True, False]]
    """
    if partial not in PARTIALS:
        close = difflib.get_close_matches(str(partial), PARTIALS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DatasetError(f"`partial` must be one of {', '.join(PARTIALS)}, but it is {partial!r}{hint}")
    for name, number, least in (
        ("num_replicas", num_replicas, 1),
        ("steps_per_call", steps_per_call, 1),
        ("prefetch", prefetch, 0),
    ):
        whole_number(number, name=name, least=least)
    check_source(source)
    if partial == "drop" and isinstance(source, ArraySource):
        source = source.without_short()  # so that its steps count, and number, the batches that are left
    if partial != "pad" and isinstance(source, RandomAccessSource):
        check_divisible(source.global_batch, num_replicas=num_replicas, partial=partial)
    options = Options(
        num_replicas=num_replicas,
        place=place if prefetch_to_device else None,
        place_spec=place_spec,
        partial=partial,
        with_mask=with_mask,
        steps_per_call=steps_per_call,
        prefetch=prefetch,
        copy=not isinstance(source, ArraySource | RandomAccessReplicaBatches | ReplicaBatches),
        share=share,
    )
    return DistributedDataset(source, options, hand_over=None if prefetch_to_device else place)


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
        source: Iterable[PyTree] | RandomAccessSource,
        options: Options,
        *,
        hand_over: Callable[[PyTree], PyTree] | None = None,
    ):
        self._source = source
        self._options = options
        self._hand_over = hand_over
        self._position = 0
        self._finished = False
        self._layout: BatchLayout | None = None
        self._peeked: Iterator[NumberedPart] | None = None  # of a plain iterable, only looked at
        self._stream: PushBack[Numbered] | None = None  # of an iterator, which cannot be made anew
        self._prefetcher: Prefetcher[Numbered] | None = None
        self._active: weakref.ref[DatasetIterator] | None = None

    @property
    def num_steps(self) -> int | None:
        """How many batches one pass has; None: without end, or a plain iterable, which does not tell."""
        return self._source.num_steps if isinstance(self._source, RandomAccessSource) else None

    @property
    def global_batch(self) -> int | None:
        """Rows of a full batch as the source gives it; None: a plain iterable, not read from yet."""
        if isinstance(self._source, RandomAccessSource):
            return self._source.global_batch
        return None if self._layout is None else self._layout.global_batch

    @property
    def position(self) -> int:
        """Steps of the source that were handed to the consumer in this pass; never counts prefetched ones."""
        return self._position

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of what a step receives, over all replicas: a pytree of `jax.ShapeDtypeStruct`.

        Makes or reads one batch if none was yet; a plain iterable loses nothing by it.
        """
        if self._layout is None:
            if isinstance(self._source, RandomAccessSource):
                self._learn(parts_from(self._source, 0, self._options), start=0)
            else:
                self._peeked = self._learn(self._parts(self._source), start=0)
        assert self._layout is not None
        spec = batching.element_spec(self._layout, steps_per_call=self._options.steps_per_call)
        return spec if self._options.place_spec is None else self._options.place_spec(spec)

    def state(self) -> dict[str, Any]:
        """The position as a dict that JSON can hold: steps handed to the consumer, and of which data.

        Raises:
            DatasetError: the source is a plain iterable.
        """
        return write_state(resumable(self._source), self._position)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; costs the same at every step. Ends an iteration that is under way.

        Args:
            state: what `state` returned, for the same data, global batch and shuffle seed; the number of
                devices may differ.

        Raises:
            DatasetError: the source is a plain iterable, or the position belongs to another one.
        """
        position = read_state(resumable(self._source), state)
        self._end_active("the dataset was restored to another position")
        self._position, self._finished = position, False

    def close(self) -> None:
        """Ends an iteration that is under way; waits at most 2 s for its thread. The position stays."""
        self._end_active(None)

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
            batches = Prefetcher(batches, depth=self._options.prefetch, keep_unused=keep_unused)
            self._prefetcher = batches
        iterator = DatasetIterator(
            batches,
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
        if self.global_batch is None:
            return f"DistributedDataset({replicas}, global batch known after the first batch, plain iterable)"
        rows = -(-self.global_batch // count) * count
        padded = f" padded to {rows:,}" if rows != self.global_batch else ""
        if not isinstance(self._source, RandomAccessSource):
            steps = "plain iterable"
        else:
            steps = "endless" if self.num_steps is None else f"{self.num_steps:,} steps"
        calls = f", {self._options.steps_per_call} steps a call" if self._options.steps_per_call > 1 else ""
        return (
            f"DistributedDataset(global batch {self.global_batch:,}{padded} = {replicas} x "
            f"{rows // count:,}, {steps}{calls}, at step {self._position:,})"
        )

    def _open(self) -> Iterator[Numbered]:
        """Prepared batches from the position on."""
        start = self._position
        if isinstance(self._source, RandomAccessSource):
            numbered = parts_from(self._source, start, self._options)
        elif self._stream is not None and not self._stream.ended:
            return self._stream
        else:
            start = self._position = 0
            numbered, self._peeked = self._peeked or self._parts(self._source), None
        if self._layout is None:
            numbered = self._learn(numbered, start=start)
        if not isinstance(self._source, Iterator):
            return self._prepared(numbered)
        self._stream = PushBack(self._prepared(numbered))
        return self._stream

    def _learn(self, numbered: Iterator[NumberedPart], *, start: int) -> Iterator[NumberedPart]:
        """Settles the layout from the first batch, and returns the batches with that one still in front."""
        learnt = learn_layout(numbered, global_batch=self._told_global_batch, options=self._options)
        if learnt is not None:
            self._layout, numbered = learnt
            return numbered
        if start > 0:
            return iter(())
        raise DatasetError(
            f"the dataset is empty: the {type(self._source).__name__} gave no batch with rows; check its "
            "files and filters, and if it is a generator or an iterator, that nothing has used it up before"
        )

    def _parts(self, source: Iterable[PyTree]) -> Iterator[NumberedPart]:
        return parts_of(source, self._told_global_batch(), self._options)

    def _told_global_batch(self) -> int | None:
        if isinstance(self._source, RandomAccessSource | FileSource | ReplicaBatches):
            return self._source.global_batch
        return None

    def _prepared(self, numbered: Iterator[NumberedPart]) -> Iterator[Numbered]:
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
        if count:
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
