"""The predicted memory beside what one real step allocates, where the devices are here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdist.experiment.config import Config
from jdist.experiment.prepare import Parts, state_maker
from jdist.plan.compile import Memory
from jdist.plan.step import PlannedStep
from jdist.support.arrays import is_key

PyTree = Any


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """A prediction and what was measured.

    Attributes:
        what: what was compared.
        predicted: bytes on one device.
        measured: bytes on one device.
    """

    what: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def check_memory(config: Config, parts: Parts, planned: PlannedStep, memory: Memory) -> tuple[MemoryCheck, ...]:
    """Makes one real step and compares.

    On GPU the allocator tells its peak: it holds all that this process ever held at once, so also what making the
    state took. A CPU has no such count; there the bytes of the arrays that go in and come out are compared, and the
    temporaries are not.

    Args:
        config: the checked config.
        parts: what `prepare` made; the devices are here.
        planned: the step.
        memory: the prediction.

    Returns:
        One comparison or more.
    """
    strategy = parts.strategy
    state = strategy.init(*state_maker(config, parts))
    dataset = strategy.distribute_dataset(parts.train_data, steps_per_call=config.train.steps_per_call, prefetch=0)
    batch = next(iter(dataset))
    state = planned.step.prepare(state, batch)  # with what its all-reduce keeps
    token = np.zeros(2, np.int32).nbytes
    arguments = bytes_on_a_device((state, batch)) + token
    returned = jax.block_until_ready(planned.step(state, batch))
    planned.step.wait()
    outputs = bytes_on_a_device(returned) + token
    dataset.close()
    checks = [
        MemoryCheck(what="arguments", predicted=memory.arguments, measured=arguments),
        MemoryCheck(what="outputs", predicted=memory.outputs, measured=outputs),
    ]
    device = strategy.devices[0] if strategy.devices else jax.local_devices()[0]
    stats = device.memory_stats()
    if stats is not None and "peak_bytes_in_use" in stats:
        # The program's code is not the allocator's.
        predicted = memory.total - memory.code
        checks.append(
            MemoryCheck(what="allocator's peak", predicted=predicted, measured=int(stats["peak_bytes_in_use"]))
        )
    return tuple(checks)


def bytes_on_a_device(tree: PyTree) -> int:
    """Bytes that a tree of arrays holds on the first of its devices."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array):  # under default a batch stays on the host until the step takes it
            total += leaf.nbytes
            continue
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        total += data.addressable_shards[0].data.nbytes
    return total
