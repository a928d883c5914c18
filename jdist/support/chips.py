"""Public figures of accelerators, from `chips.yaml`: the maker's peaks, not measurements."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

# What is multiplied: 16 bits or less, float32 at XLA's default precision, float32 at a higher one; float64 and 32-bit integers.
ProductKind = Literal["16 bits", "float32", "float32 in full", "wider"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The maker's figures of a chip; peaks, not measurements."""

    name: str  # "v5p"
    kinds: tuple[str, ...]  # JAX's names of the device
    hbm_bytes: int  # memory
    hbm_bytes_per_s: float  # its bandwidth
    flops_per_s: float  # dense bfloat16
    link_bytes_per_s: float  # of a chip to others of its domain, one way, over all its links together
    domain_chips: int  # most chips that these links join; beyond it there is the network
    network_bytes_per_s: float | None  # of a chip over the network; None: nothing is published
    host_bytes_per_s: float | None  # between a chip and its host, each way; None: nothing is published
    source: str  # of the figures
    tf32_flops_per_s: float | None = None  # of a GPU, dense; None: it has no such units
    fp32_flops_per_s: float | None = None  # of a GPU without its tensor cores; None: float32 is multiplied in bfloat16

    def peak(self, kind: ProductKind) -> tuple[float, str]:
        """Finds the rate of products of a kind by XLA's defaults, and the name of the peak."""
        if kind == "16 bits" or self.fp32_flops_per_s is None:
            return self.flops_per_s, "bfloat16"
        if kind == "float32" and self.tf32_flops_per_s is not None:
            return self.tf32_flops_per_s, "TF32"
        return self.fp32_flops_per_s, "float32"

    def compute_s(self, products: Mapping[ProductKind, float]) -> float:
        """Models the time of products, one after another, by the FLOPs of each kind."""
        return sum(flops / self.peak(kind)[0] for kind, flops in products.items())


@functools.cache
def load_chips() -> dict[str, Chip]:
    """Loads the chips of `chips.yaml`, by name."""
    text = resources.files("jdist.support").joinpath("chips.yaml").read_text(encoding="utf-8")
    return {name: _chip(name, figures) for name, figures in yaml.safe_load(text).items()}


def _chip(name: str, figures: dict[str, Any]) -> Chip:
    network, host = figures["network_gb_per_s"], figures["host_gb_per_s"]
    tf32, fp32 = figures.get("tf32_tflops"), figures.get("fp32_tflops")
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
        tf32_flops_per_s=None if tf32 is None else tf32 * 1e12,
        fp32_flops_per_s=None if fp32 is None else fp32 * 1e12,
    )


def chip_of(device_kind: str) -> Chip | None:
    """Finds the chip of a `jax.Device.device_kind`; None if `chips.yaml` does not have it."""
    return next((chip for chip in load_chips().values() if device_kind in chip.kinds), None)
