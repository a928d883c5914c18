"""Public figures of each chip, from `chips.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What the maker says of a chip; peaks, not measurements.

    Attributes:
        name: "v5p", "H100", ...
        kinds: what JAX calls the device.
        hbm_bytes: memory.
        hbm_bytes_per_s: its bandwidth.
        flops_per_s: dense bfloat16.
        link_bytes_per_s: what a chip can send to others of its domain, over all its links together.
        domain_chips: most chips that these links join; beyond it there is the network.
        network_bytes_per_s: what a chip can send over the network; None: nothing is published.
        host_bytes_per_s: what a chip and its host can copy, each way; None: nothing is published.
        source: where the figures stand.
    """

    name: str
    kinds: tuple[str, ...]
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    domain_chips: int
    network_bytes_per_s: float | None
    host_bytes_per_s: float | None
    source: str


def load_chips() -> dict[str, Chip]:
    """All chips of `chips.yaml`, by name.

    Example:
        >>> load_chips()["v5e"].hbm_bytes // 2**30
        16
    """
    text = resources.files("jdist.plan").joinpath("chips.yaml").read_text(encoding="utf-8")
    return {name: _chip(name, figures) for name, figures in yaml.safe_load(text).items()}


def _chip(name: str, figures: dict[str, Any]) -> Chip:
    network, host = figures["network_gb_per_s"], figures["host_gb_per_s"]
    return Chip(
        name=name,
        kinds=tuple(figures["kinds"]),
        hbm_bytes=figures["hbm_gib"] * 2**30,
        hbm_bytes_per_s=figures["hbm_gb_per_s"] * 1e9,
        flops_per_s=figures["bf16_tflops"] * 1e12,
        link_bytes_per_s=figures["interconnect_gb_per_s"] * 1e9 / 2,  # published for both directions together
        domain_chips=figures["domain_chips"],
        network_bytes_per_s=None if network is None else network * 1e9,
        host_bytes_per_s=None if host is None else host * 1e9,
        source=figures["source"],
    )


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device; None if `chips.yaml` does not have it.

    Args:
        device_kind: as `jax.Device.device_kind` says it.
    """
    return next((chip for chip in load_chips().values() if device_kind in chip.kinds), None)
