"""Several threads that make the items of one sequence, which come in their order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

from jdist.data.prefetch import Prefetcher

S = TypeVar("S")
T = TypeVar("T")


def ordered_map(
    function: Callable[[S], T], items: Callable[[], Iterator[S]], *, workers: int, ahead: int = 1
) -> Iterator[T]:
    """Maps a function over items by several threads; yields the results in the items' order.

    Example:
        >>> from jdist.data.workers import ordered_map
        >>> list(ordered_map(lambda n: n * n, lambda: iter(range(5)), workers=2))
        [0, 1, 4, 9, 16]
    """
    # Thread k takes items k, k + workers, and so on, so an exception comes at its item's place.
    # Waits (for a disk, a network, a decoder in C) overlap; Python itself runs in one thread at a
    # time. `function` may not return None. Each thread counts its own iterator of `items` through;
    # `ahead` results of a thread may wait for the consumer. One worker is the consumer's own
    # thread.

    def results(number: int) -> Iterator[T]:
        # No `map`: a StopIteration of the function would end it, and what follows were lost in silence.
        for item in itertools.islice(items(), number, None, workers):
            yield function(item)

    if workers == 1:
        yield from results(0)
        return
    threads = [Prefetcher(results(number), depth=ahead) for number in range(workers)]
    try:
        # The first thread without a result has come to the end of all items: those behind it have fewer.
        with contextlib.suppress(StopIteration):
            for thread in itertools.cycle(threads):
                item = next(thread)
                yield item
                del item  # else it stays in memory while the next one is waited for
    finally:
        for thread in threads:
            thread.abandon()
