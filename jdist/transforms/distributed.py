"""What every distributed step is, whatever its strategy."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jdist.strategy import Strategy
from jdist.transforms.options import StepOptions, Verify

PyTree = Any


@dataclass(frozen=True)
class Preview:
    """What a call of a step would do.

    Attributes:
        results: what it returns, by role, of `jax.ShapeDtypeStruct`s.
        changes_state: whether the state that it returns is another than the one that it is given.
        ignores_mask: whether anything of that depends on the rows of a batch, and nothing on its mask.
    """

    results: Mapping[str, PyTree]
    changes_state: bool
    ignores_mask: bool


class Distributed(abc.ABC):
    """What `jdist.distribute` returns.

    Attributes:
        strategy: the strategy it runs under.
        options: the options of `jdist.distribute`.
    """

    strategy: Strategy
    options: StepOptions
    __name__: str

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; called like the function that it was made of."""

    @abc.abstractmethod
    def prepare(self, *args: Any, **kwargs: Any) -> PyTree:
        """The state as a call takes and returns it; nothing of the step is run."""

    def preview(self, *args: Any, **kwargs: Any) -> Preview | None:
        """What a call would do, known with nothing compiled; None where only a call shows it."""
        return None

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits for every call in flight."""

    def verify_next(self, how: Verify) -> None:
        """Compares the next call with one replica that sees the whole batch, where the strategy's replicas share a batch."""
        return None
