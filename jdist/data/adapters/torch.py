"""PyTorch's loaders, and those of its convention, `state_dict` and `load_state_dict`: the state is the loader's.

torchdata's `StatefulDataLoader` has a state, `DataLoader` has none.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from jdist.data.adapters.recognize import refuse_rows
from jdist.data.sources.elements import unlike_row
from jdist.data.sources.sequential import Batches, PlainSource, SequentialSource
from jdist.errors import DatasetError
from jdist.typing import PyTree

_HOW_TO_SHARE = "`sampler=DistributedSampler(dataset, num_replicas=num_processes, rank=process_index)`"


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


class StatefulLoaderSource(StateDictSource):
    """Batches of a `torchdata.stateful_dataloader.StatefulDataLoader`."""

    # Without workers, its state lacks draws of the loader's generator other than the order: the
    # next pass would get another order than in an uninterrupted run. So the generator's own state
    # is kept as well.

    how_to_share = _HOW_TO_SHARE

    def __init__(self, loader: Any):
        self.loader = loader
        self.kind = "StatefulDataLoader"
        self.num_steps = _length(loader)
        self.own_part = _own_part(loader)
        sampler_generator = getattr(loader.sampler, "generator", None)
        self._generator = sampler_generator or loader.generator
        # PyTorch's own samplers have no state: they draw a pass's order again, from the generator's state at its beginning.
        is_stateful = type(loader.sampler).__module__.startswith("torchdata.")
        self._draws_anew = sampler_generator is not None and not is_stateful
        # Whether the next pass needs more than the generator: a dataset of its own mind goes on where the last one ended.
        self.keeps_dataset = hasattr(loader.dataset, "state_dict")
        self._dataset_at_first = copy.deepcopy(loader.dataset.state_dict()) if self.keeps_dataset else None
        self._generator_at_first = None if self._generator is None else self._generator.get_state()

    def describe_batch(self, number: int, error: Exception) -> str | None:
        return _row_text(error)

    def generator_state(self) -> Any:
        """Copies the state of the generator; with workers it is ahead of them, and the loader's state has what it needs."""
        return None if self._generator is None or self.loader.num_workers else self._generator.get_state()

    def set_epoch(self, epoch: int) -> None:
        _set_epoch(self.loader, epoch)

    def open(self, epoch: int, state: Any) -> Batches:
        self.set_epoch(epoch)
        if state is None:
            state = {"loader": {}, "generator": self._generator_at_first}  # {}: from the beginning
            if self.keeps_dataset:
                self.loader.dataset.load_state_dict(copy.deepcopy(self._dataset_at_first))
        self.loader.load_state_dict(copy.deepcopy(state["loader"]))
        is_new = state["loader"] == {}
        self._set_generator(state["generator"] if is_new else state.get("begin"))
        begin = None if self._generator is None else self._generator.get_state()
        batches = iter(self.loader)  # draws the order
        if not is_new and not self._draws_anew:
            self._set_generator(state["generator"])
        return self._with_states(batches, begin)

    def _with_states(self, batches: Iterator[PyTree], begin: Any) -> Batches:
        """Yields batches with their states; `begin` is the generator's when the pass began."""
        for batch in batches:
            yield batch, self._state(begin)
        at_end = self._state(begin)
        return at_end if self.loader.num_workers or self.keeps_dataset else at_end | {"loader": {}}

    def _state(self, begin: Any) -> dict[str, Any]:
        state = self.loader.state_dict()
        return {
            "loader": copy.deepcopy(state) if self.keeps_dataset else state,
            "generator": self.generator_state(),
            "begin": begin,
        }

    def _set_generator(self, state: Any) -> None:
        if self._generator is not None and state is not None:
            self._generator.set_state(state)


def state_dict_source(loader: Any, global_batch: int | None) -> StateDictSource:
    """Adapts a loader of batches."""
    refuse_rows(type(loader).__name__, global_batch)
    return StateDictSource(loader)


def stateful_data_loader(loader: Any, global_batch: int | None) -> StatefulLoaderSource:
    """Adapts a `StatefulDataLoader`."""
    refuse_rows("StatefulDataLoader", global_batch)
    return StatefulLoaderSource(loader)


def data_loader(loader: Any, global_batch: int | None) -> PlainSource:
    """Adapts a `torch.utils.data.DataLoader`."""
    refuse_rows("DataLoader", global_batch)

    def begin(epoch: int) -> Iterator[PyTree]:
        _set_epoch(loader, epoch)
        return iter(loader)

    return PlainSource(
        kind="DataLoader",
        begin=begin,
        advice="a DataLoader of PyTorch has no state. `torchdata.stateful_dataloader.StatefulDataLoader`, with the same "
        "arguments, has a position",
        how_to_share=_HOW_TO_SHARE,
        num_steps=_length(loader),
        own_part=_own_part(loader),
        describe_row=_row_text,
    )


def dataset(dataset: Any, global_batch: int | None) -> NoReturn:
    """Refuses a dataset of PyTorch, which has rows."""
    name = type(dataset).__name__
    raise DatasetError(
        f"a {name} is a dataset of PyTorch, which has rows and no batches. Use `StatefulDataLoader({name}(...), "
        "batch_size=...)`, or with random access `jdist.data.from_rows(dataset, global_batch=...)`"
    )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # of an IterableDataset
        return None


def _own_part(loader: Any) -> tuple[int, int] | None:
    """Finds the part of a `DistributedSampler`."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if any(cls.__name__ == "DistributedSampler" for cls in type(sampler).__mro__):
            return sampler.rank, sampler.num_replicas  # type: ignore[union-attr]  # it is that class
    return None


def _set_epoch(loader: Any, epoch: int) -> None:
    for part in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.dataset):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def _row_text(error: Exception) -> str | None:
    """Describes the row that made an error, by the batch's row numbers in the loader's frame."""
    # The rows are read again. The one that raises the same error is named, or the first one unlike
    # those before.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    fetch = next((frame.f_locals for frame in frames if "possibly_batched_index" in frame.f_locals), None)
    if fetch is None or not isinstance(numbers := fetch["possibly_batched_index"], list):
        return None
    is_numbered = numbers[0] is not None  # else of an IterableDataset
    names = [f"row {n} (from 0)" if is_numbered else f"row {i} (from 0) of the batch" for i, n in enumerate(numbers)]
    if any(frame.f_code.co_name == "default_collate" for frame in frames):
        unlike = unlike_row(fetch["data"], names)
        return None if unlike is None else ", which ".join(unlike)
    for number, name in zip(numbers, names, strict=True):
        try:
            if is_numbered:
                fetch["self"].dataset[number]
        except Exception as again:  # noqa: BLE001 - compared; the first one is raised
            if type(again) is type(error) and str(again) == str(error):
                return name
    return None
