"""From raw batches to batches on the devices: generators that a prefetch thread or the consumer runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jdist.data.batching import BatchLayout, Partial, fit, plan_layout, stack
from jdist.data.leaves import count_rows, to_numpy
from jdist.data.padding import remember_real_rows
from jdist.data.share import Part, Share, part_of, read_part
from jdist.data.source import RandomAccessSource

PyTree = Any
Numbered = tuple[int, PyTree]  # the position after a batch, and the batch
NumberedPart = tuple[int, Part]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `distributed_dataset` was asked for; see there."""

    num_replicas: int
    place: Callable[[PyTree], PyTree] | None
    place_spec: Callable[[PyTree], PyTree] | None
    partial: Partial
    with_mask: bool
    steps_per_call: int
    prefetch: int
    copy: bool  # the source may reuse or keep the memory of its batches
    share: Share

    def padded(self, global_batch: int) -> int:
        """Rows of a batch as the replicas receive it."""
        return -(-global_batch // self.num_replicas) * self.num_replicas


def steps_from(source: RandomAccessSource, step: int) -> Iterator[int]:
    """The numbers of a random-access source's batches from `step` on."""
    return iter(itertools.count(step) if source.num_steps is None else range(step, source.num_steps))


def parts_from(source: RandomAccessSource, step: int, options: Options) -> Iterator[NumberedPart]:
    """A process's parts of the batches of a random-access source, from `step` on."""
    rows = options.padded(source.global_batch)
    return ((number + 1, read_part(source, number, options.share, rows)) for number in steps_from(source, step))


def parts_of(source: Iterable[PyTree], global_batch: int | None, options: Options) -> Iterator[NumberedPart]:
    """A process's parts of the batches of a plain iterable, which it reads whole; None: the first batch is a full one."""
    for number, batch in enumerate(iter(source), start=1):
        global_batch = global_batch or count_rows(to_numpy(batch)) or None
        yield number, part_of(batch, options.share, options.padded(global_batch or 0))


def learn_layout(
    numbered: Iterator[NumberedPart], *, global_batch: Callable[[], int | None], options: Options
) -> tuple[BatchLayout, Iterator[NumberedPart]] | None:
    """The layout that the first batch with rows settles, and the batches from that one on; None: no such."""
    for position, part in numbered:
        if (found := sum(part.sizes)) > 0:
            layout = plan_layout(
                part.batch,
                global_batch=global_batch() or found,  # some sources know it from their first batch on
                num_replicas=options.num_replicas,
                partial=options.partial,
                with_mask=options.with_mask,
                share=options.share,
            )
            return layout, itertools.chain([(position, part)], numbered)
    return None


def prepare(numbered: Iterator[NumberedPart], *, layout: BatchLayout, options: Options) -> Iterator[Numbered]:
    """Batches fitted, stacked `steps_per_call` at a time and placed, with the position after each.

    Holds the source and nothing of its consumer, so that a thread that runs it keeps no consumer alive.
    """
    group: list[PyTree] = []
    position, sizes = 0, (0,)
    # `fit` copies before the source is asked again, which may refill the same memory.
    for position, part in numbered:
        fitted = fit(layout, part, copy=options.copy)
        if fitted is None:
            continue
        group.append(fitted)
        sizes = part.sizes
        if len(group) == options.steps_per_call:
            yield position, _place(group, sizes, options)
            group = []
    if group:
        yield position, _place(group, sizes, options)


def _place(group: list[PyTree], sizes: tuple[int, ...], options: Options) -> PyTree:
    batch = group[0] if options.steps_per_call == 1 else stack(group)
    batch = batch if options.place is None else options.place(batch)
    if options.steps_per_call == 1:  # of several steps a call returns no rows, so nobody asks
        remember_real_rows(batch, sizes)
    return batch
