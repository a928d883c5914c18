"""A model of a step's time from public peaks: no measurement, and no overlap, latency or contention in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jdist.plan.collectives import BETWEEN_SLICES, Collective
from jdist.plan.hardware import Chip

CHIPS = (8, 64, 512, 4096)
FORMULA = (
    "compute = max(FLOPs / peak, bytes / memory bandwidth); exchange = sum over collectives of f x bytes / link "
    "bandwidth, f = 2(n-1)/n for an all-reduce, (n-1)/n for a gather, scatter or all-to-all, 1 for a permute; beyond "
    "the d chips that the links join + 2(m-1)/m x bytes / d / network bandwidth over the m = n/d domains; "
    "step = compute + exchange, without overlap; share = exchange / step; the batch of a replica stays the same"
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The model's answer for one number of chips.

    Attributes:
        chips: how many, one replica each.
        compute_s: time of computation, seconds.
        exchange_s: time of communication; None where the network's figure is not published.
        bound: "compute" or "memory": what limits the computation.
    """

    chips: int
    compute_s: float
    exchange_s: float | None
    bound: str

    @property
    def step_s(self) -> float | None:
        """Computation, then communication."""
        return None if self.exchange_s is None else self.compute_s + self.exchange_s

    @property
    def exchange_share(self) -> float | None:
        """Part of the step that is communication, from 0 to 1."""
        if self.exchange_s is None or self.step_s is None:
            return None
        return self.exchange_s / self.step_s if self.step_s else 0.0


def estimate(chip: Chip, *, flops: float, memory_bytes: float, exchanged: Sequence[Collective], chips: int) -> Estimate:
    """The model's step time on some number of chips, the work of each chip staying the same.

    Args:
        chip: public figures.
        flops: operations of one step on one chip.
        memory_bytes: bytes that one step moves to and from the chip's memory.
        exchanged: collectives of one step; their bytes are those of one device.
        chips: how many chips exchange.

    Returns:
        The estimate; `FORMULA` says how it is made.
    """
    by_flops, by_memory = flops / chip.flops_per_s, memory_bytes / chip.hbm_bytes_per_s
    near = min(chips, chip.domain_chips)
    domains = -(-chips // near)
    exchange: float | None = 0.0
    for collective in exchanged:
        if collective.kind == BETWEEN_SLICES:
            continue  # the same bytes as those inside a slice, on their way on
        exchange += _factor(collective.kind, near) * collective.bytes / chip.link_bytes_per_s
    if domains > 1:
        if chip.network_bytes_per_s is None:
            exchange = None
        else:
            total = sum(c.bytes for c in exchanged if c.kind != BETWEEN_SLICES)
            exchange += 2 * (domains - 1) / domains * total / near / chip.network_bytes_per_s
    return Estimate(
        chips=chips,
        compute_s=max(by_flops, by_memory),
        exchange_s=exchange,
        bound="compute" if by_flops >= by_memory else "memory",
    )


def _factor(kind: str, n: int) -> float:
    """Bytes that a chip sends for each byte of payload, in a ring or a torus of `n` chips."""
    if kind == "all-reduce":
        return 2 * (n - 1) / n
    return 1.0 if kind == "collective-permute" else (n - 1) / n
