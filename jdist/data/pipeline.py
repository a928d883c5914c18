"""From raw batches to batches on the devices: generators that a prefetch thread or the consumer runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jdist.data.batching import BatchLayout, Partial, fit, plan_layout, stack
from jdist.data.leaves import count_rows, to_numpy
from jdist.data.padding import remember_real_rows
from jdist.data.source import RandomAccessSource

PyTree = Any
Numbered = tuple[int, PyTree]  # the position after a batch, and the batch


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


def from_step(source: RandomAccessSource, step: int) -> Iterator[Numbered]:
    """The batches of a random-access source from `step` on."""
    for number in itertools.count(step):
        if source.num_steps is not None and number >= source.num_steps:
            return
        yield number + 1, source.batch_at(number)


def learn_layout(
    numbered: Iterator[Numbered], *, global_batch: Callable[[], int | None], options: Options
) -> tuple[BatchLayout, Iterator[Numbered]] | None:
    """The layout that the first batch with rows settles, and the batches from that one on; None: no such."""
    for position, batch in numbered:
        if count_rows(to_numpy(batch)) > 0:
            layout = plan_layout(
                batch,
                global_batch=global_batch(),  # some sources know it from their first batch on
                num_replicas=options.num_replicas,
                partial=options.partial,
                with_mask=options.with_mask,
            )
            return layout, itertools.chain([(position, batch)], numbered)
    return None


def prepare(numbered: Iterator[Numbered], *, layout: BatchLayout, options: Options) -> Iterator[Numbered]:
    """Batches fitted, stacked `steps_per_call` at a time and placed, with the position after each.

    Holds the source and nothing of its consumer, so that a thread that runs it keeps no consumer alive.
    """
    group: list[PyTree] = []
    position = rows = 0
    # `fit` copies before the source is asked again, which may refill the same memory.
    for position, batch in numbered:
        batch = to_numpy(batch)
        fitted = fit(layout, batch, copy=options.copy)
        if fitted is None:
            continue
        group.append(fitted)
        rows = count_rows(batch)
        if len(group) == options.steps_per_call:
            yield position, _place(group, rows, options)
            group = []
    if group:
        yield position, _place(group, rows, options)


def _place(group: list[PyTree], rows: int, options: Options) -> PyTree:
    batch = group[0] if options.steps_per_call == 1 else stack(group)
    batch = batch if options.place is None else options.place(batch)
    if options.steps_per_call == 1:  # of several steps a call returns no rows, so nobody asks
        remember_real_rows(batch, rows)
    return batch
