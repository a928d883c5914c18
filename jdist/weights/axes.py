"""The way from the axes of a tensor in a file to those of a leaf: transposed, split, merged, picked from or stacked."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jdist.checkpoint.leaves import boxes_of_elements
from jdist.errors import CheckpointError

_TOKEN = re.compile(r"\(([\w ]*)\)|(\w+)")
Range = tuple[int, int]  # from which index to before which
Ranges = Mapping[str, Range]  # by axis


@dataclass(frozen=True)
class Axes:
    """The axes of a tensor and of a leaf, by their names: `"out in -> in out"`, `"in (qkv out) -> in out"`.

    An axis in brackets with others is a factor of the one that they are together, the last one running fastest. Of an axis that
    one side alone has there is an index: of the tensor that of the part which is the leaf's, of the leaf that of the part
    which is the tensor's.

    Attributes:
        tensor: for each axis of the tensor its factors.
        leaf: the same for the leaf.
        text: what it was written as.
    """

    tensor: tuple[tuple[str, ...], ...]
    leaf: tuple[tuple[str, ...], ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Axes:
        """Reads a pattern; raises a `CheckpointError` for invalid ones."""
        left, arrow, right = text.partition("->")
        sides = [tuple(_factors(side, text)) for side in (left, right)]
        names = [list(itertools.chain(*side)) for side in sides]
        if not arrow or any(len(set(each)) != len(each) for each in names):
            raise _refusal(text)
        return cls(*sides, text=text)

    @classmethod
    def same(cls, num_axes: int) -> Axes:
        """Makes the pattern of a tensor that is as the leaf is."""
        axes = tuple((f"axis{i}",) for i in range(num_axes))
        return cls(axes, axes, "unchanged")

    @property
    def of_tensor(self) -> tuple[str, ...]:
        """The names of all factors of the tensor's axes, in order."""
        return tuple(itertools.chain(*self.tensor))

    @property
    def of_leaf(self) -> tuple[str, ...]:
        """The same for the leaf."""
        return tuple(itertools.chain(*self.leaf))

    @property
    def one_sided(self) -> set[str]:
        """The names that one side alone has."""
        return set(self.of_tensor) ^ set(self.of_leaf)


def _factors(side: str, text: str) -> Iterator[tuple[str, ...]]:
    if _TOKEN.sub("", side).strip():
        raise _refusal(text)
    for group, name in _TOKEN.findall(side):
        yield (name,) if name else tuple(group.split())


def _refusal(text: str) -> CheckpointError:
    return CheckpointError(
        f"axes {text!r}: must be the names of the tensor's axes, `->`, and those of the leaf's, each name once on a side, and "
        'factors of one axis in brackets, such as "out in -> in out" or "in (qkv out) -> in out"'
    )


def infer_sizes(factors: Sequence[Sequence[str]], shape: Sequence[int], sizes: dict[str, int]) -> bool:
    """Completes the sizes of the factors of an array's axes by its shape; returns whether they fit."""
    if len(factors) != len(shape):
        return False
    for names, length in zip(factors, shape, strict=True):
        unknown = [name for name in names if name not in sizes]
        known = math.prod(sizes[name] for name in names if name in sizes)
        if len(unknown) == 1 and known and length % known == 0:
            sizes[unknown[0]] = length // known
        elif unknown or known != length:
            return False
    return True


@dataclass(frozen=True)
class View:
    """A tensor in a file as a part of a leaf, or all of it.

    Attributes:
        axes: of both.
        sizes: of every factor.
        index: of each axis that one side alone has.
    """

    axes: Axes
    sizes: Mapping[str, int]
    index: Mapping[str, int]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(math.prod(self.sizes[name] for name in names) for names in self.axes.tensor)

    @property
    def extent(self) -> tuple[Range, ...]:
        """Returns the indices of the leaf's factors that the tensor has."""
        ranges = self._whole()
        return tuple(ranges[name] for name in self.axes.of_leaf)

    def _whole(self) -> dict[str, Range]:
        return {name: (0, size) for name, size in self.sizes.items()} | {
            name: (i, i + 1) for name, i in self.index.items()
        }

    def boxes(self, extent: Sequence[Range] | None) -> Iterator[tuple[tuple[slice, ...], Ranges]]:
        """Finds the boxes of the tensor that are in a box of the leaf, and no element more.

        Args:
            extent: the box of the leaf; None: all of it.

        Yields:
            A box of the tensor, and the indices of its factors.
        """
        for ranges in self._factored(extent):
            for pieces in itertools.product(*(self._runs(names, ranges) for names in self.axes.tensor)):
                box = tuple(slice(first, last) for first, last, _ in pieces)
                yield box, {**ranges, **{name: each for _, _, inner in pieces for name, each in inner.items()}}

    def _factored(self, extent: Sequence[Range] | None) -> Iterator[dict[str, Range]]:
        """Writes a box of the leaf as boxes of its factors; leaves out what is not of this tensor."""
        whole = self._whole()
        if extent is None:
            yield whole
            return
        by_axis: list[list[dict[str, Range]]] = []
        for names, (first, last) in zip(self.axes.leaf, extent, strict=True):
            shape = tuple(self.sizes[name] for name in names)
            inner = boxes_of_elements(shape, first, np.broadcast_to(np.int8(0), last - first))
            by_axis.append(
                [
                    {name: (at, at + n) for name, at, n in zip(names, start, box.shape, strict=True)}
                    for start, box in inner
                ]
            )
        for parts in itertools.product(*by_axis):
            ranges = dict(whole)
            for name, (first, last) in ((name, each) for part in parts for name, each in part.items()):
                a, b = whole[name]
                ranges[name] = max(a, first), min(b, last)
            if all(first < last for first, last in ranges.values()):
                yield ranges

    def _runs(self, names: Sequence[str], ranges: Ranges) -> Iterator[tuple[int, int, dict[str, Range]]]:
        """Finds the successive indices of an axis that its factors' indices are: `(first, last, of the factors)`."""
        sizes = [self.sizes[name] for name in names]
        cut = [i for i, name in enumerate(names) if ranges[name] != (0, sizes[i])]
        inner = cut[-1] if cut else 0  # of the factors before it a run has one index each
        for outer in itertools.product(*(range(*ranges[name]) for name in names[:inner])):
            each = {name: (i, i + 1) for name, i in zip(names[:inner], outer, strict=True)}
            each |= {name: ranges[name] for name in names[inner:]}
            first = count = 0
            for name, size in zip(names, sizes, strict=True):
                first = first * size + each[name][0]
            count = math.prod(b - a for a, b in each.values())
            yield first, first + count, each

    def write(self, values: np.ndarray, ranges: Ranges, leaf: np.ndarray) -> None:
        """Writes a box of the tensor into its place in the leaf.

        Args:
            values: of the box.
            ranges: the indices of its factors.
            leaf: the whole leaf, contiguous.
        """
        part = self._part_of(leaf, ranges)
        part[...] = values.reshape(part.shape)

    def is_in(self, values: np.ndarray, ranges: Ranges, leaf: np.ndarray) -> bool:
        """Returns whether the leaf has a box of the tensor to the bit; arguments as of `write`."""
        part = self._part_of(leaf, ranges)
        return part.tobytes() == values.reshape(part.shape).astype(leaf.dtype).tobytes()

    def read(self, leaf: np.ndarray, tensor: np.ndarray) -> None:
        """Copies a whole leaf's part into a whole tensor, both contiguous."""
        ranges = self._whole()
        self._box(tensor, self.axes.of_tensor, ranges)[...] = self._part_of(leaf, ranges)

    def _box(self, array: np.ndarray, names: Sequence[str], ranges: Ranges) -> np.ndarray:
        """Views a box of an array, with an axis for each factor of `names`."""
        factored = array.reshape([self.sizes[name] for name in names])
        return factored[(*(slice(*ranges[name]) for name in names), ...)]  # with `...` a view of a scalar as well

    def _part_of(self, leaf: np.ndarray, ranges: Ranges) -> np.ndarray:
        """Views a box of the leaf with the axes of the tensor's factors."""
        of_tensor, of_leaf = self.axes.of_tensor, self.axes.of_leaf
        # Of an axis that one side alone has, the box has one index.
        leaf_alone = tuple(i for i, name in enumerate(of_leaf) if name not in of_tensor)
        both = [name for name in of_leaf if name in of_tensor]
        part = self._box(leaf, of_leaf, ranges).squeeze(leaf_alone)
        part = part.transpose([both.index(name) for name in of_tensor if name in both])
        return np.expand_dims(part, tuple(i for i, name in enumerate(of_tensor) if name not in both))
