"""A model of a step's time: the public peaks of `jdist.support.chips`, and the shares of them that steps have reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdist.plan.collectives import BETWEEN_SLICES, Collective
from jdist.support.chips import Chip, ProductKind

CHIPS = (8, 64, 512, 4096)
# Measured on one H100: steps of three models took 0.88 to 1.09 of this model's time (benchmarks/RESULTS.md, "Plan").
OF_PEAK, OF_BANDWIDTH = 0.65, 0.75
FORMULA = (
    f"device = FLOPs / {OF_PEAK:.0%} of the peak + bytes / {OF_BANDWIDTH:.0%} of the memory bandwidth: the shares that three "
    "models reached on an H100, within 14%, assumed for every chip; exchange = sum over collectives of f(k) x bytes / link "
    "bandwidth, each over all n chips; the links join k = min(n, d), f(k) = 2(k-1)/k for an all-reduce, (k-1)/k for a "
    "gather, scatter or all-to-all, 1 for a permute; beyond d + sum of f(m) x what crosses / network bandwidth over the "
    "m = n/d domains, and what crosses is the bytes of the messages between slices, or without slices bytes / k (of a "
    "permute or all-to-all all bytes); a collective of smaller groups over its k chips of a domain and its m domains; host = "
    "bytes that all chips copy to and from their hosts / n / host link; links and network reach their peaks; step = device + "
    "exchange + host, without overlap or latency; share = exchange / step; the batch of a replica stays the same"
)
_DIRECT = ("collective-permute", "all-to-all", "ragged-all-to-all")  # cross the network unchanged


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The modelled times on one number of chips."""

    chips: int  # how many, one replica each
    device_s: float  # time of the chip's own work, seconds
    exchange_s: float | None  # time of communication; None where the network's figure is not published
    host_s: float | None  # time of copies between the chip and its host; None where the link's figure is not published
    bound: str  # the larger part of the computation's time, "compute" or "memory"

    @property
    def step_s(self) -> float | None:
        """Computation, then communication, then copies."""
        if self.exchange_s is None or self.host_s is None:
            return None
        return self.device_s + self.exchange_s + self.host_s

    @property
    def exchange_share(self) -> float | None:
        """Part of the step that is communication, from 0 to 1."""
        if self.exchange_s is None or self.step_s is None:
            return None
        return self.exchange_s / self.step_s if self.step_s else 0.0


def estimate(
    chip: Chip,
    *,
    products: Mapping[ProductKind, float],
    memory_bytes: float,
    exchanged: Sequence[Collective],
    chips: int,
    domain_chips: int | None = None,
    host_bytes: float = 0,
) -> Estimate:
    """Models the step time by `FORMULA`, with the same work on each chip."""
    # `products` counts operations of one step on one chip, `memory_bytes` its memory traffic, and
    # `exchanged` the bytes of one device; `host_bytes` travel between all chips together and their
    # hosts. Links join `domain_chips` if a topology of several slices says so; None: as many as
    # this kind of chip can join.
    by_flops = chip.compute_s(products) / OF_PEAK
    by_memory = memory_bytes / chip.hbm_bytes_per_s / OF_BANDWIDTH
    domain = chip.domain_chips if domain_chips is None else domain_chips
    messages = any(c.kind.endswith(BETWEEN_SLICES) for c in exchanged)
    within = crossing = 0.0
    for collective in exchanged:
        joined, domains = _spread(collective, chips, domain)
        if collective.kind.endswith(BETWEEN_SLICES):  # the compiler has listed what crosses
            crossing += _factor(collective.kind.removesuffix(BETWEEN_SLICES), domains) * collective.bytes
            continue
        within += _factor(collective.kind, joined) * collective.bytes
        if not messages:
            share = 1 if collective.kind in _DIRECT else joined
            crossing += _factor(collective.kind, domains) * collective.bytes / share
    exchange: float | None = within / chip.link_bytes_per_s
    if crossing:
        network = chip.network_bytes_per_s
        exchange = None if network is None else exchange + crossing / network
    link = chip.host_bytes_per_s
    return Estimate(
        chips=chips,
        device_s=by_flops + by_memory,
        exchange_s=exchange,
        host_s=0.0 if not host_bytes else None if link is None else host_bytes / chips / link,
        bound="compute" if by_flops >= by_memory else "memory",
    )


def _spread(collective: Collective, chips: int, domain: int) -> tuple[int, int]:
    """Finds how many chips of a domain exchange in a collective, and how many domains, on a number of chips."""
    joined = min(chips, domain)
    domains = -(-chips // joined)
    per_domain, size = collective.per_domain, collective.group_size
    if per_domain is None or collective.groups == 1:
        return joined, domains
    if per_domain == size:
        return min(size, joined), 1
    return min(per_domain, joined), domains


def _factor(kind: str, n: int) -> float:
    """Computes the bytes that one of `n` chips, or domains, sends for each byte of payload, in a ring or a torus."""
    if n == 1:
        return 0.0
    if kind == "all-reduce":
        return 2 * (n - 1) / n
    return 1.0 if kind == "collective-permute" else (n - 1) / n
