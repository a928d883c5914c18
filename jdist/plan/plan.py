"""The plan of a config's step on a target; reads top to bottom."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

from jdist.errors import ConfigError, StrategyError
from jdist.experiment.config import Config
from jdist.experiment.load import Document, load
from jdist.experiment.prepare import Parts, prepare
from jdist.experiment.summary import arithmetic
from jdist.experiment.validate import validate
from jdist.plan import roofline
from jdist.plan.collectives import collectives, host_copies
from jdist.plan.compile import TooLarge, check_memory, compile_step, plan_step
from jdist.plan.hlo import overlap, recomputed
from jdist.plan.table import Plan as Plan
from jdist.plan.target import Target, configure_platform, find_target_devices, parse_target, strategy_on
from jdist.strategies.gpu_topology import GPUS
from jdist.strategies.topology import parse_topology
from jdist.support.chips import Chip, chip_of

_MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the newer name first
MOST_ROWS = 2**31 - 1  # what fits no 32-bit index fits no device either, and XLA ends the process on larger sizes


def plan_config(config: str | os.PathLike[str], *overrides: str, topology: str) -> Plan:
    """Plans the step of a config file on hardware that need not be here; `jdist plan` in Python, without its check.

    Args:
        config: the YAML file, as for `jdist run`.
        *overrides: values that replace those of the file, "train.global_batch=4096".
        topology: a TPU as CHIP:SHAPE ("v5e:2x4", "v5p:16x16x16"), GPUs as CHIP:GPUS or CHIP:HOSTSxGPUS ("h100:8",
            "h100:4x8"), "cpu:8", "gpu" or "gpu:4".

    Returns:
        The plan; `jdist.plan.show` of it is what the command prints.

    Raises:
        ConfigError: the config is not right, or JAX has started in this process with other devices already.
        DeviceError: the topology is not known, or its compiler (libtpu, JAX's CUDA plugin) is missing.

    Example:
        >>> import jdist
        >>> plan = jdist.plan.plan_config("configs/digits.yaml", "task.options.width=4", topology="cpu:8")
        >>> plan.num_devices, plan.global_batch
        (8, 128)
    """
    target, document = parse_target(topology), load(os.fspath(config), overrides)
    checked = validate(document)
    configure_platform(target, checked.platform)
    return make_plan(checked, document, target, check=False)


def make_plan(
    config: Config, document: Document, target: Target, *, check: bool = True, only_if_state_fits: bool = False
) -> Plan:
    """Compiles a config's step for a target and reads its needs; allocates nothing there."""
    # `configure_platform` was called for the target. With `check`, and devices that are here, one
    # step is made to compare its memory with the prediction. With `only_if_state_fits` nothing is
    # compiled if the state alone is too large.
    check_global_batch("train.global_batch", config.train.global_batch)
    devices = find_target_devices(target)
    parts = prepare(config, document, make=functools.partial(strategy_on, target, devices), to_run=False)
    if parts.strategy.coordinator is not None:
        raise StrategyError(
            "a plan compiles one program, and under a parameter server a step is several. Plan strategy.name=one_device: a "
            "worker's program is that step's without the update."
        )
    kind, steps = devices[0].device_kind, config.train.steps_per_call
    chip = chip_of(kind)
    planned = plan_step(config, parts)
    report = parts.strategy.report(planned.state)
    plan = Plan(
        target=target.name,
        device_kind=kind,
        num_devices=max(1, len(parts.strategy.devices)),
        replica_devices=max(1, len(parts.strategy.devices) // parts.strategy.num_replicas),
        global_batch=config.train.global_batch,
        summary="\n".join([arithmetic(config, parts), *_more_than_the_data(config, parts)]),
        capacity=_capacity(target, devices, chip),
        capacity_note=_preallocated() if target.gpus_per_host else "",
        state_bytes=report.bytes_per_device,
        optimizer_bytes=sum(leaf.bytes_per_device for leaf in report.leaves if leaf.of_optimizer),
        rows=max(1, config.train.global_batch // (parts.strategy.num_replicas * config.train.accumulate)),
        flops=planned.flops,
        products=planned.products,
        steps_per_call=steps,
        chip=chip,
    )
    if only_if_state_fits and plan.capacity is not None and plan.state_bytes > plan.capacity:
        message = "nothing was compiled, as the state alone is too large."
        return dataclasses.replace(plan, refusal=TooLarge(message=message, needed=None, available=None, partly=False))
    compiled = compile_step(planned)
    if isinstance(compiled, TooLarge):
        available = plan.capacity if compiled.available is None else compiled.available
        return dataclasses.replace(plan, refusal=compiled, capacity=available)
    mesh = parts.strategy.mesh
    exchanged = () if mesh is None else collectives(compiled.module, mesh.shape, domain=target.gpus_per_host)
    num_copies, num_bytes = host_copies(compiled.module)
    in_flight, overlapped = overlap(compiled.module)
    plan = dataclasses.replace(
        plan,
        memory=compiled.memory,
        bytes_moved=compiled.bytes_moved / steps,
        recomputed=-(-recomputed(compiled.module) // steps),
        collectives=tuple(
            dataclasses.replace(c, count=-(-c.count // steps), bytes=c.bytes // steps) for c in exchanged
        ),
        host_transfers=-(-num_copies // steps),
        host_bytes=num_bytes // steps,
        in_flight_bytes=in_flight // steps,
        overlapped_bytes=overlapped // steps,
        checks=check_memory(config, parts, planned, compiled.memory) if check and target.is_here else (),
        compile_s=compiled.compile_s,
    )
    return plan if chip is None else _with_model(plan, chip, target)


def _more_than_the_data(config: Config, parts: Parts) -> list[str]:
    """Warns of a batch that the data cannot fill, as `jdist run` would; a plan may be made before the data is there."""
    batch, rows = config.train.global_batch, parts.rows_per_epoch
    if rows is None or batch <= 2 * rows:
        return []
    return [f"the task has {rows:,} rows to train on, so `jdist run` refuses a global batch of {batch:,}"]


def check_global_batch(name: str, rows: int) -> None:
    """Refuses, by a ConfigError, a global batch of more than `MOST_ROWS` rows."""
    if rows > MOST_ROWS:
        raise ConfigError(f"{name} is {rows:,}; a plan takes global batches of at most {MOST_ROWS:,} rows.")


def _with_model(plan: Plan, chip: Chip, target: Target) -> Plan:
    """Adds a model of the step's time to a plan."""
    domain = target.domain_chips or chip.domain_chips
    missing = []
    if plan.num_devices == 1:
        missing.append("more than one chip: it was compiled for one device, which does not show what several exchange")
    if plan.host_bytes:
        missing.append("the update that the hosts compute: hosts have no public figures")
    estimates = tuple(
        roofline.estimate(
            chip,
            products=plan.products,
            memory_bytes=plan.bytes_moved,
            exchanged=plan.collectives,
            chips=n,
            domain_chips=domain,
            host_bytes=plan.host_bytes * plan.num_devices,
        )
        for n in sorted({*roofline.CHIPS, plan.num_devices} if plan.num_devices > 1 else {1})
    )
    if plan.products.get("wider"):
        missing.append(
            "float64 and whole numbers, which are multiplied more slowly than float32: they are counted as that"
        )
    if any(e.host_s is None for e in estimates):
        missing.append(f"{plan.host_bytes:,} bytes between each chip and its host: no public figure of their link")
    return dataclasses.replace(plan, estimates=estimates, not_in_model=tuple(missing), domain_chips=domain)


def _capacity(target: Target, devices: Any, chip: Chip | None) -> int | None:
    """Finds the memory of one device: of its allocator, its maker, or its share of this machine's."""
    if target.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    if target.gpus_per_host:
        return int(GPUS[parse_topology(target.name).chip].memory_bytes * _memory_fraction()[0])
    stats = devices[0].memory_stats() if target.is_here else None
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return None if chip is None else chip.hbm_bytes


def _memory_fraction() -> tuple[float, str]:
    """Reads the share of GPU memory that JAX takes at its start, and its variable."""
    # https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    there = [name for name in _MEMORY_FRACTION if os.environ.get(name)]  # JAX ignores an empty one
    if len(there) > 1:
        raise ConfigError(f"{' and '.join(there)} both limit JAX's memory, and JAX refuses that; unset {there[1]}.")
    name = there[0] if there else _MEMORY_FRACTION[0]
    value = os.environ.get(name) or "0.75"
    try:
        fraction = float(value)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0, and at most 1.")
    return fraction, name


def _preallocated() -> str:
    fraction, name = _memory_fraction()
    return f"the {100 * fraction:.6g}% of a GPU that JAX takes when it starts ({name})"
