"""The loss scale of a worker, in `jdist.precision("fp16")`: an overflow is computed again, and nothing is left out.

Under the other strategies the scale is part of the state, and a step with an overflow is skipped. Here it is each worker's own.
As part of the state it would have to move with every push, in the order of the pushes, which asynchronous shards do not agree
on; and all leaves that a skipped step must not change (each counter of each optimiser) would depend on one decision, so that
none could be updated by itself. A worker's gradients leave it unscaled, in float32, so nobody else needs to know its scale; and
as it runs its closures one after the other and can run one again, the promise holds that each takes effect once. The price: a
worker that starts anew begins at the first scale again, which costs it a few computations.
"""

from __future__ import annotations

from jdist.loss_scale import FACTOR, SMALLEST


class WorkerScale:
    """Moves as `jdist.loss_scale.LossScaling` says.

    Args:
        scale: the first one.
        growth_interval: number of closures in a row with finite gradients after which it doubles.
    """

    def __init__(self, scale: float, growth_interval: int):
        self.scale = scale
        self._growth_interval, self._good = growth_interval, 0

    def takes(self, *, is_finite: bool) -> bool:
        """Whether gradients computed with this scale stand; else they are to be computed again, with the scale as it is now.

        Args:
            is_finite: whether they are. Those that are not stand at the smallest scale: no other would mend them.
        """
        if not is_finite:
            self._good = 0
            stands = self.scale <= SMALLEST
            self.scale = max(self.scale / FACTOR, SMALLEST)
            return stands
        self._good += 1
        if self._good == self._growth_interval:
            self.scale, self._good = min(self.scale * FACTOR, 2.0**127), 0
        return True
