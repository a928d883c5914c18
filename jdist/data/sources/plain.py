"""Sources that only go forward, whose place cannot be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

PyTree = Any


@dataclass(kw_only=True, eq=False)
class PlainSource(Iterable[PyTree]):
    """Batches of another library's loader.

    Attributes:
        kind: its name in messages.
        begin: opens a pass by its number, from 0.
        advice: why it has no position, and what has one.
        how_to_share: what makes the library give each process its own part, as code.
        length: batches of a pass; None: not known.
        own_part: `(index, count)` where the library gives this process only its part of the data; None: all of it.
        describe_row: describes the row in which an error was raised, for its message; None: not known.
        next_pass: number of the pass that begins next.
    """

    kind: str
    begin: Callable[[int], Iterator[PyTree]]
    advice: str
    how_to_share: str
    length: int | None = None
    own_part: tuple[int, int] | None = None
    describe_row: Callable[[Exception], str | None] = lambda _: None
    next_pass: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[PyTree]:
        number, self.next_pass = self.next_pass, self.next_pass + 1
        return self.begin(number)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"a {self.kind} does not tell how many batches it has")
        return self.length
