"""From raw batches to batches on the devices: generators that a prefetch thread or the consumer runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jdist.data.batching import BatchLayout, Partial, fit, plan_layout, stack
from jdist.data.mask import remember_real_rows
from jdist.data.process_shard import LocalRows, ProcessShard

PyTree = Any
Numbered = tuple[int, PyTree]  # the position after a batch, and the batch
NumberedPart = tuple[int, LocalRows]


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
    share: ProcessShard


def learn_layout(
    numbered: Iterator[NumberedPart | None], *, full: Callable[[], tuple[int, ...] | None], options: Options
) -> tuple[BatchLayout, Iterator[NumberedPart | None]] | None:
    """The layout that the first batch with rows settles, and the batches from that one on; None: no such."""
    for position, part in filter(None, numbered):
        if (found := sum(part.sizes)) > 0:
            layout = plan_layout(
                part.batch,
                full=part.full
                or full()
                or options.share.sizes(found),  # some sources know it from their first batch on
                num_replicas=options.num_replicas,
                partial=options.partial,
                with_mask=options.with_mask,
                share=options.share,
            )
            return layout, itertools.chain([(position, part)], numbered)
    return None


def prepare(
    numbered: Iterator[NumberedPart | None], *, layout: BatchLayout, options: Options
) -> Iterator[Numbered | None]:
    """Batches fitted, stacked `steps_per_call` at a time and placed, with the position after each.

    None comes where it stopped waiting for other processes; the next one goes on.

    Holds the source and nothing of its consumer, so that a thread that runs it keeps no consumer alive.
    """
    group: list[PyTree] = []
    position, sizes = 0, (0,)
    # `fit` copies before the source is asked again, which may refill the same memory.
    for one in numbered:
        if one is None:
            yield None
            continue
        position, part = one
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
    rows = jax.tree.leaves(group[0])[0].shape[0]
    batch = batch if options.place is None else options.place(batch)
    if options.steps_per_call == 1:  # of several steps a call returns no rows, so nobody asks
        remember_real_rows(batch, sizes, rows)
    return batch
