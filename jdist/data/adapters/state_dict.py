"""Loaders with `state_dict` and `load_state_dict`, the convention of PyTorch: the state is the loader's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from jdist.data.adapters.recognize import refuse_rows
from jdist.data.sources.sequential import Batches, SequentialSource
from jdist.typing import PyTree


class StateDictSource(SequentialSource):
    """Batches of a loader with `state_dict` and `load_state_dict`, for one consumer at a time."""

    how_to_share = "a part of the data for each `strategy.cluster.process_index`"

    def __init__(self, loader: Any, kind: str | None = None):
        self.loader = loader
        self.kind = kind or type(loader).__name__
        try:
            self.num_steps = len(loader)
        except (TypeError, NotImplementedError, AttributeError):
            self.num_steps = None
        self._initial = copy.deepcopy(loader.state_dict())

    def set_epoch(self, epoch: int) -> None:
        """Tells the loader the number of the pass that begins, where it draws a new order for each."""
        if callable(set_epoch := getattr(self.loader, "set_epoch", None)):
            set_epoch(epoch)

    def open(self, epoch: int, state: Any) -> Batches:
        self.set_epoch(epoch)
        self.loader.load_state_dict(copy.deepcopy(self._initial if state is None else state))
        return ((batch, copy.deepcopy(self.loader.state_dict())) for batch in self.iterate())

    def iterate(self) -> Iterator[PyTree]:
        """Begins a pass where the loader's state is."""
        return iter(self.loader)

    @property
    def fingerprint(self) -> str:
        return f"kind={self.kind.replace(' ', '_')} batches={self.num_steps}"


def state_dict_source(loader: Any, global_batch: int | None) -> StateDictSource:
    """Adapts a loader of batches."""
    refuse_rows(type(loader).__name__, global_batch)
    return StateDictSource(loader)
