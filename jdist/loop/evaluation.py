"""The evaluation that goes along with training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jdist.loop.expected import names_of
from jdist.loop.feed import Feed
from jdist.loop.measure import measure
from jdist.loop.tally import Measured, Metrics
from jdist.remote import shapes_of
from jdist.strategy import Strategy
from jdist.transforms.distributed import Distributed
from jdist.transforms.spread import map_leaves
from jdist.values import own_state

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluates a state, called with it.

    Attributes:
        step: the evaluation step, distributed.
        feed: what to evaluate on.
        strategy: where to evaluate.
        trained_by: the strategy whose state it is.
        metrics: which of the results are contributions of metrics, as for `Tally`.
    """

    step: Distributed
    feed: Feed
    strategy: Strategy
    trained_by: Strategy
    metrics: Metrics

    def __call__(self, state: PyTree) -> Measured:
        """What it measures of a state, by name."""
        own = state if self.strategy is self.trained_by else self.trained_by.fetch(state)
        return measure(self.step, own, self.feed.batches, self.strategy.cluster, self.metrics)

    def names(self, state: PyTree) -> frozenset[str] | None:
        """The names of what it will measure; None where only a call shows them.

        Raises:
            StepError: the step does not return what it should.
        """
        if self.strategy is not self.trained_by:  # what `fetch` would give
            state = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own_state(shapes_of(state)))
        return names_of(self.step, state, self.feed, self.metrics, depth=4)
