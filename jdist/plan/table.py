"""A plan, as text and as tables in a notebook."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jdist.plan import roofline
from jdist.plan.collectives import Collective
from jdist.support.chips import Chip, ProductKind
from jdist.support.table import Table, paragraph
from jdist.support.words import size

if TYPE_CHECKING:  # brings what reads configs, which `jdist.explain` need not wait for
    from jdist.plan.compile import Memory, MemoryCheck, TooLarge


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The needs of one optimiser step of a config on each device of a target.

    Attributes:
        target: the topology it was compiled for.
        device_kind: JAX's name of the device.
        num_devices: number of devices.
        replica_devices: how many of them a replica has.
        global_batch: rows of a step over all replicas.
        summary: strategy, batch and length in words.
        capacity: bytes of a device's memory that a step can have; None if it is not known.
        capacity_note: what part of the memory that is, in words; "" if all of it.
        state_bytes: what each device holds of the state.
        optimizer_bytes: of these, the optimiser's.
        rows: of a microbatch, or of the batch, of one device.
        memory: of one device; None if the compiler refused the step.
        refusal: the compiler's message, if it refused.
        flops: operations of matrix products and convolutions on one device.
        products: those by the kind of product, which says at what rate they are multiplied.
        bytes_moved: between a device and its memory.
        recomputed: results that one step computes a second time, by the compiler's choice, to have their memory meanwhile.
        collectives: what the devices exchange in one step.
        host_transfers: copies between a device and its host.
        host_bytes: of these copies, on one device.
        in_flight_bytes: payload of the asynchronous collectives of one step, on one device.
        overlapped_bytes: of these, what is in flight during matrix products, by the compiler's schedule.
        steps_per_call: optimiser steps of one call; `memory` is of a call, all else of a step.
        estimates: a model of the step's time; empty if the chip has no public figures here.
        not_in_model: omissions of that model, in words.
        domain_chips: number of chips that the fast links join, in the model; 0 without a model.
        chip: those figures.
        checks: predicted and measured memory, where a step could be run.
        compile_s: seconds to lower and compile.
    """

    target: str
    device_kind: str
    num_devices: int
    global_batch: int
    summary: str
    capacity: int | None
    capacity_note: str = ""
    state_bytes: int = 0
    optimizer_bytes: int = 0
    rows: int = 0
    memory: Memory | None = None
    refusal: TooLarge | None = None
    flops: float = 0.0
    products: dict[ProductKind, float] = dataclasses.field(default_factory=dict)
    bytes_moved: float = 0.0
    recomputed: int = 0
    collectives: tuple[Collective, ...] = ()
    host_transfers: int = 0
    host_bytes: int = 0
    in_flight_bytes: int = 0
    overlapped_bytes: int = 0
    steps_per_call: int = 1
    estimates: tuple[roofline.Estimate, ...] = ()
    not_in_model: tuple[str, ...] = ()
    domain_chips: int = 0
    replica_devices: int = 1
    chip: Chip | None = None
    checks: tuple[MemoryCheck, ...] = ()
    compile_s: float = 0.0

    @property
    def free_bytes(self) -> int | None:
        """Bytes of a device's memory that the step leaves, below 0 if it needs more; None if one of them is not known."""
        return None if self.memory is None or self.capacity is None else self.capacity - self.memory.total

    @property
    def fits(self) -> bool | None:
        """Returns whether a device's memory holds the step; None if its size is not known."""
        if self.memory is None:  # the compiler refused it
            return False
        return None if self.free_bytes is None else self.free_bytes >= 0

    @property
    def verdict(self) -> str:
        """`fits` in words."""
        return {True: "fits", False: "does not fit", None: "memory not known"}[self.fits]

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as plain values; sizes in bytes, times in seconds."""
        values = dataclasses.asdict(self) | {"fits": self.fits, "formula": roofline.FORMULA}
        if self.memory is not None:
            values["memory"]["total"] = self.memory.total
        for row, estimate in zip(values["estimates"], self.estimates, strict=True):
            row |= {"step_s": estimate.step_s, "exchange_share": estimate.exchange_share}
        for row, check in zip(values["checks"], self.checks, strict=True):
            row["error"] = check.error
        return values

    def __repr__(self) -> str:
        return (
            f"Plan({self.target}: {self.num_devices:,} {self.device_kind} devices, global batch {self.global_batch:,}, "
            f"{self.verdict}; `jdist.plan.show` has all of it)"
        )

    def _repr_html_(self) -> str:
        tables = "".join(table._repr_html_() for table in _tables(self))
        return paragraph(self.summary) + tables + "".join(map(paragraph, _compile_time(self)))


def show(plan: Plan) -> str:
    """Formats the whole plan, in some thirty lines.

    Args:
        plan: the result of `plan_config`.
    """
    return "\n\n".join([plan.summary, *map(str, _tables(plan)), *_compile_time(plan)])


def _tables(plan: Plan) -> list[Table]:
    if plan.memory is None:
        return [_memory(plan)]
    checks = [_checks(plan)] if plan.checks else []
    return [_memory(plan), _work(plan), _collectives(plan), _model(plan), *checks]


def _compile_time(plan: Plan) -> list[str]:
    return [] if plan.memory is None else [f"compiled in {plan.compile_s:.1f} s"]


def show_sweep(plans: Sequence[Plan]) -> str:
    """Formats one line a plan, and the largest global batch that fits."""
    table = Table("", [*map(_cells, plans)], ("global batch", "memory of a device", "free of it", ""))
    fitting = [plan.global_batch for plan in plans if plan.fits]
    result = f"largest that fits: {max(fitting):,}" if fitting else "none of them fits"
    if fitting and all(plan.fits for plan in plans):
        result += "; all that were tried fit, so a larger one may"
    return f"{table}\n{result}"


def sweep_row(plan: Plan) -> str:
    """Formats one plan of a sweep in words."""
    batch, needed, free, verdict = _cells(plan)
    return f"global batch {batch}: {needed} a device, {verdict}" + (f", {free} free" if plan.fits else "")


def _cells(plan: Plan) -> tuple[str, str, str, str]:
    if plan.memory is None:
        needed = None if plan.refusal is None else plan.refusal.needed
        return f"{plan.global_batch:,}", size(needed) if needed else "?", "", plan.verdict
    free = "" if plan.free_bytes is None else size(plan.free_bytes)
    return f"{plan.global_batch:,}", size(plan.memory.total), free, plan.verdict


def _memory(plan: Plan) -> Table:
    title = f"memory of each of {plan.num_devices:,} {plan.device_kind} devices"
    if plan.memory is None:
        assert plan.refusal is not None  # a plan has the one or the other
        notes = [f"does not fit; the compiler: {plan.refusal.message}"]
        if plan.refusal.needed is not None and plan.refusal.available is not None:
            needed, available = plan.refusal.needed, plan.refusal.available
            what = "temporaries alone" if plan.refusal.partly else "it"
            notes.append(f"{what} would need {size(needed)} of {size(available)}, {size(needed - available)} too much")
        return Table(title, (), notes=[*notes, *_remedies(plan)])
    note = "the memory of this device is not known"
    if plan.capacity is not None and plan.free_bytes is not None:
        margin = f"{size(plan.free_bytes)} free" if plan.fits else f"{size(-plan.free_bytes)} too much"
        note = f"of {size(plan.capacity)}: {plan.verdict}, {margin}"
    m = plan.memory
    on_chip = "; a TPU keeps small ones on the chip, not here" if "TPU" in plan.device_kind else ""
    rows = [
        ("arguments", size(m.arguments), "state and batch"),
        ("outputs", size(m.outputs), f"{size(m.aliased)} of it in place of donated arguments"),
        (
            "temporaries",
            size(m.temporaries),
            "activations, gradients, buffers" + on_chip,
        ),
        ("program", size(m.code), ""),
        ("host", size(m.host), f"{size(plan.host_bytes)} copied between device and host in a step"),
        ("total", size(m.total), note),
    ]
    notes = [f"{size(plan.capacity)} are {plan.capacity_note}"] if plan.capacity_note and plan.capacity else []
    return Table(title, rows, notes=notes + (_remedies(plan) if plan.fits is False else []))


def _remedies(plan: Plan) -> list[str]:
    """Names changes of the config by which the step would need less."""
    if plan.capacity is not None and plan.state_bytes > plan.capacity:
        return [
            f"the state alone is {size(plan.state_bytes)} on each device, so no batch fits in {size(plan.capacity)}:",
            "strategy.name=sharded keeps a part of it on each device, strategy.name=parameter_server all of it on servers; or "
            "more devices, devices with more memory, an optimiser that keeps less (sgd, adafactor), a smaller model",
        ]
    if plan.rows == 1:
        return [
            "each device computes with one row at a time, so no batch is smaller: train.precision=bf16, `jax.checkpoint` "
            "in the model, or a device with more memory need less"
        ]
    return ["a smaller train.global_batch, more devices, or train.accumulate=2 need less"]


def _work(plan: Plan) -> Table:
    again = []
    if plan.recomputed:
        again = [
            f"to save memory the compiler has {plan.recomputed:,} results computed twice, which the FLOPs leave out"
        ]
    divided = f", shared evenly by the {plan.replica_devices} devices of a replica" if plan.replica_devices > 1 else ""
    rows = [
        ("FLOPs", f"{plan.flops:,.4g}", f"matrix products and convolutions{divided}"),
        ("bytes", f"{plan.bytes_moved:,.4g}", "to and from its memory"),
    ]
    return Table("work of a device in one step", rows, notes=again)


def _collectives(plan: Plan) -> Table:
    notes = []
    if plan.in_flight_bytes:
        share = plan.overlapped_bytes / plan.in_flight_bytes
        notes = [
            f"asynchronous: {plan.in_flight_bytes:,} bytes; {plan.overlapped_bytes:,} of these ({share:.0%}) are in flight "
            "during matrix products, by the compiler's schedule"
        ]
    return table_of_collectives("collectives in one step", plan.collectives, notes)


def table_of_collectives(title: str, collectives: Sequence[Collective], notes: Sequence[str] = ()) -> Table:
    """Makes the table of what devices exchange."""
    if not collectives:
        return Table(f"{title}: none", (), notes=notes)
    rows = []
    for c in collectives:
        groups = [f"{c.groups:,} of {c.group_size:,}"] if c.group_size else []
        if c.per_domain is not None:
            hosts = -(-c.group_size // c.per_domain)
            groups.append("within a host" if hosts == 1 else f"between {hosts:,} hosts")
        doubt = [] if c.certain else ["at least: a loop's trips could not be read"]
        rows.append((c.kind, f"{c.count:,}", f"{c.bytes:,}", c.axes, " ".join(groups + doubt)))
    return Table(title, rows, ("kind", "count", "bytes", "mesh axis", "groups"), notes)


def _model(plan: Plan) -> Table:
    chip = plan.chip
    if chip is None:
        return Table(f"no model of the time: chips.yaml has no public figures of {plan.device_kind!r}", ())
    rows = []
    for e in plan.estimates:
        times = [("exchange", e.exchange_s), ("host", e.host_s), (e.bound, e.device_s)]
        bound, _ = max(times, key=lambda named: named[1] or 0.0)
        if e.step_s is None:
            bound = "no public figure of the " + ("network" if e.exchange_s is None else "host's link")
        exchange, host, step = ("?" if s is None else duration(s) for s in (e.exchange_s, e.host_s, e.step_s))
        rows.append(
            (
                f"{e.chips:,}",
                duration(e.device_s),
                exchange,
                host,
                step,
                "?" if e.exchange_share is None else f"{e.exchange_share:.1%}",
                bound,
            )
        )
    formula = textwrap.wrap(roofline.FORMULA, 108)
    missing = [f"not in the model: {what}" for what in plan.not_in_model]
    host = ""
    if chip.host_bytes_per_s is not None and plan.host_bytes:
        host = f", to the host {chip.host_bytes_per_s / 1e9:,.0f} GB/s each way"
    network = ""
    if chip.network_bytes_per_s is not None and any(e.chips > plan.domain_chips for e in plan.estimates):
        network = f", network {chip.network_bytes_per_s / 1e9:,.4g} GB/s each way of a chip"
    peaks = (
        f"{chip.name}: {_peaks(chip, plan.products)}, memory {chip.hbm_bytes_per_s / 1e9:,.0f} GB/s, "
        f"links {chip.link_bytes_per_s / 1e9:,.1f} GB/s each way over d = {plan.domain_chips:,} chips"
        f"{network}{host} ({chip.source})"
    )
    return Table(
        "time of a step: a model, not a measurement",
        rows,
        header=("chips", "device", "exchange", "host", "step", "exchange / step", "bound by"),
        notes=[*missing, *formula, peaks],
    )


def _peaks(chip: Chip, products: Mapping[ProductKind, float]) -> str:
    """Names the peak of each kind of product, and how many of the FLOPs it is for where there are several."""
    flops: dict[tuple[float, str], float] = {}
    for kind, count in products.items():
        flops[chip.peak(kind)] = flops.get(chip.peak(kind), 0.0) + count
    total = sum(flops.values())
    rates = [
        f"{rate / 1e12:,.5g} TFLOP/s {name}" + (f" for {count / total:.1%} of the FLOPs" if len(flops) > 1 else "")
        for (rate, name), count in sorted((flops or {chip.peak("16 bits"): 0.0}).items(), reverse=True)
    ]
    return " and ".join(rates) + (f" ({_of_float32(chip)})" if products.get("float32") else "")


def _of_float32(chip: Chip) -> str:
    """Says how a chip multiplies float32 by XLA's default, in words."""
    name = chip.peak("float32")[1]
    if name == "float32":
        return "no tensor cores for float32"
    return f"float32 is multiplied in {name} by JAX's default matmul precision"


def _checks(plan: Plan) -> Table:
    has_peak = any("peak" in c.what for c in plan.checks)
    return Table(
        "memory: predicted, and measured in one real step (bytes of a device)",
        header=("what", "predicted", "measured", "error"),
        rows=[(c.what, f"{c.predicted:,}", f"{c.measured:,}", f"{c.error:+.2%}") for c in plan.checks],
        notes=[] if has_peak else ["this device has no allocator that counts, so the temporaries are not compared"],
    )


def duration(seconds: float) -> str:
    """Formats seconds in the unit that suits them: `1.2 ms`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:,.3g} {unit}"
    return f"{seconds * 1e6:,.3g} us"
