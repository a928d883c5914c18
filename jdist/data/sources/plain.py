"""Sources that only go forward, whose place cannot be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

PyTree = Any


@dataclass(kw_only=True, eq=False)
class PlainSource(Iterable[PyTree]):
    """Batches of another library's loader."""

    kind: str  # its name in messages
    begin: Callable[[int], Iterator[PyTree]]  # opens a pass by its number, from 0
    advice: str  # why it has no position, and which loader has one
    how_to_share: str  # code that makes the library give each process its own part
    length: int | None = None  # batches of a pass; None: unknown
    # `(index, count)` if the library gives this process only its part of the data
    own_part: tuple[int, int] | None = None
    # describes the row that raised an error; None: unknown
    describe_row: Callable[[Exception], str | None] = lambda _: None
    next_pass: int = field(default=0, init=False)  # number of the pass that begins next

    def __iter__(self) -> Iterator[PyTree]:
        number, self.next_pass = self.next_pass, self.next_pass + 1
        return self.begin(number)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"a {self.kind} does not tell how many batches it has")
        return self.length
