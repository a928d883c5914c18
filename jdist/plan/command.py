"""`jdist plan`: plans a config, a sweep of global batches, or ways to keep its state; its exit code says whether it fits."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdist.cluster import exit_status
from jdist.errors import ConfigError
from jdist.experiment.load import load
from jdist.experiment.validate import validate
from jdist.loop.report.files import write_atomically
from jdist.plan.picture import draw
from jdist.plan.plan import Plan, check_global_batch, make_plan
from jdist.plan.table import duration, show, show_sweep, sweep_row
from jdist.plan.target import Target, find_target_devices
from jdist.support.table import Table
from jdist.support.words import size

_HEADER = ("", "memory of a device", "step", "binds", "what to write")


def plan_command(
    config: str,
    overrides: Sequence[str],
    target: Target,
    *,
    batches: list[int] | None = None,
    check: bool = True,
    as_json: bool = False,
    svg: str | None = None,
) -> int:
    """Plans a config file, or a sweep over its global batch, and prints the result."""
    # `batches` are in rising order; None: the config's own. `svg` is a file for the picture, not
    # for a sweep. Returns exit code 1 if the step, or every step of a sweep, does not fit; else 0.

    def plan(more: Sequence[str] = (), *, check: bool) -> Plan:
        document = load(config, [*overrides, *more])
        return make_plan(validate(document), document, target, check=check)

    if batches is None:
        planned = plan(check=check)
        if svg is not None:
            write_atomically(Path(svg), str(draw(planned)))
        print(json.dumps(planned.as_json(), indent=2) if as_json else show(planned))
        return 1 if planned.fits is False else 0
    plans, interrupted = [], False
    try:
        for each in sweep(batches, lambda batch: plan([f"train.global_batch={batch}"], check=False)):
            plans.append(each)
            # Not with the result: a large batch may take the compiler minutes.
            print(sweep_row(each), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted after {len(plans)} of {len(batches)} global batches", file=sys.stderr)
    print(json.dumps([p.as_json() for p in plans], indent=2) if as_json else show_sweep(plans))
    if interrupted:
        return exit_status.INTERRUPTED
    return 1 if all(p.fits is False for p in plans) else 0


def check_svg(name: str, *, tries_several: bool) -> None:
    """Refuses, by a ConfigError, a file that no plan can be drawn into; nothing is compiled before."""
    if tries_several:
        raise ConfigError("--svg draws one plan; leave out --sweep or --suggest.")
    if not name.endswith(".svg"):
        raise ConfigError(f"--svg is {name!r}; the picture is SVG, so its name must end in .svg.")
    if not Path(name).absolute().parent.is_dir():
        raise ConfigError(f"--svg is {name!r}, and the folder {Path(name).parent} does not exist. Make it first.")


def parse_sweep(text: str) -> list[int]:
    """Reads rising batches: `global_batch=128,256,384`, or doublings `global_batch=128..4096`."""
    batches = _batches(text)
    check_global_batch("--sweep: global_batch", batches[-1])
    return batches


def _batches(text: str) -> list[int]:
    values = re.fullmatch(r"(?:train\.)?global_batch=(\d+(?:,\d+)*)", text)
    if values and all(int(n) for n in values[1].split(",")):
        return sorted({int(n) for n in values[1].split(",")})
    doublings = re.fullmatch(r"(?:train\.)?global_batch=([1-9]\d*)\.\.([1-9]\d*)", text)
    if doublings and int(doublings[1]) <= int(doublings[2]):
        first, last = int(doublings[1]), int(doublings[2])
        return [first << n for n in range((last // first).bit_length())]
    raise ConfigError(
        f"--sweep is {text!r}; it must be global_batch=128,256,384 or global_batch=128..4096, which doubles from 128."
    )


def sweep(batches: list[int], plan: Callable[[int], Plan]) -> Iterator[Plan]:
    """Plans global batches in rising order, up to the first that does not fit: more rows never need less memory."""
    for batch in batches:
        planned = plan(batch)
        yield planned
        if planned.fits is False:
            return


@dataclass(frozen=True)
class Suggestion:
    """One way, planned."""

    overrides: tuple[str, ...]  # of the config, as written after it
    plan: Plan  # of a state that alone is too large nothing was compiled

    @property
    def line(self) -> str:
        """The overrides as a shell takes them."""
        return " ".join(f"'{x}'" if "{" in x else x for x in self.overrides)

    @property
    def step_s(self) -> float | None:
        """Modelled time of a step on the target, in seconds; None if it does not fit or is not known."""
        here = [each for each in self.plan.estimates if each.chips == self.plan.num_devices]
        return here[0].step_s if here and self.plan.fits is not False else None

    @property
    def binds(self) -> str:
        """Names the limit of the step's speed, or the reason that it does not fit."""
        plan = self.plan
        if plan.fits is False:
            alone = plan.capacity is not None and plan.state_bytes > plan.capacity
            return "the state alone is too large" if alone else "memory"
        here = [each for each in plan.estimates if each.chips == plan.num_devices]
        if not here or here[0].exchange_share is None:
            return ""
        return "exchange" if here[0].exchange_share > 0.5 else here[0].bound


def suggest_command(config: str, overrides: Sequence[str], target: Target, *, as_json: bool = False) -> int:
    """Plans a config in several ways and prints them, fitting ones first, the fastest on top."""
    # Returns exit code 1 if none of them fits, else 0.
    found: list[Suggestion] = []
    interrupted = False
    try:
        for each in suggest(config, overrides, target):
            found.append(each)
            print(f"{each.line}: {each.plan.verdict}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    found.sort(key=lambda each: (each.plan.fits is False, each.step_s is None, each.step_s or 0.0))
    values = [{"overrides": each.overrides, "binds": each.binds, **each.plan.as_json()} for each in found]
    print(json.dumps(values, indent=2) if as_json else show_suggestions(found))
    if interrupted:
        return exit_status.INTERRUPTED
    return 1 if all(each.plan.fits is False for each in found) else 0


def suggest(config: str, overrides: Sequence[str], target: Target) -> Iterator[Suggestion]:
    """Plans a config in each way; what cannot fit, as the state alone is too large, is not compiled."""
    count = len(find_target_devices(target))
    rows = validate(load(config, [*overrides])).train.global_batch // count
    for more in ways(target, count, rows=rows):
        document = load(config, [*overrides, *more])
        yield Suggestion(more, make_plan(validate(document), document, target, check=False, only_if_state_fits=True))


def ways(target: Target, count: int, *, rows: int) -> list[tuple[str, ...]]:
    """Lists overrides that keep a state on `count` devices; some use microbatches."""
    domain, gpus = target.domain_chips, target.gpus_per_host is not None
    several = gpus and domain is not None and count > domain
    name = "tpu" if target.platform == "tpu" else "multi_worker" if several else "mirrored"
    shards = ["optimizer", "state"]
    if domain is not None and domain < count and count % domain == 0:
        shards.append(f"{{of: state, within: {domain}}}")
    found = [f"strategy={{name: {name}}}", *(f"strategy={{name: {name}, shard: {shard}}}" for shard in shards)]
    microbatches = [n for n in (8, 4, 2) if rows % n == 0][:1]
    return [(each,) for each in found] + [(each, f"train.accumulate={n}") for n in microbatches for each in found]


def show_suggestions(suggestions: Sequence[Suggestion]) -> str:
    """Formats one line a way; the user pastes the first that fits."""
    rows = []
    for each in suggestions:
        step = "" if each.step_s is None else duration(each.step_s)
        rows.append((each.plan.verdict, _memory(each.plan), step, each.binds, each.line))
    fitting = [each for each in suggestions if each.plan.fits]
    last = "none of them fits: more devices, a smaller model, or `jax.checkpoint` in it"
    if fitting:
        last = f"append {fitting[0].line}"
    return f"{Table('', rows, _HEADER)}\n{last}"


def _memory(plan: Plan) -> str:
    """Returns the share of a device's memory that a way needs; where it does not fit, the known part."""
    if plan.memory is not None:
        return size(plan.memory.total)
    if plan.refusal is not None and plan.refusal.needed is not None:
        return size(plan.refusal.needed) + (" of temporaries" if plan.refusal.partly else "")
    return f"{size(plan.state_bytes)} of state"
