"""`jdist plan --suggest`: ways to keep a config's state on a target, each compiled, beside each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jdist.cluster import exit_status
from jdist.experiment.load import load
from jdist.experiment.validate import validate
from jdist.plan.plan import Plan, make_plan
from jdist.plan.table import aligned, duration, size
from jdist.plan.target import Target, find_target_devices

_HEADER = ("", "memory of a device", "step", "binds", "what to write")


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
        """What the step is bound by, or why it does not fit."""
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
    print(json.dumps(values, indent=2) if as_json else show(found))
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


def show(suggestions: Sequence[Suggestion]) -> str:
    """Formats one line a way; the first that fits is to be pasted."""
    rows = []
    for each in suggestions:
        step = "" if each.step_s is None else duration(each.step_s)
        rows.append((each.plan.verdict, _memory(each.plan), step, each.binds, each.line))
    fitting = [each for each in suggestions if each.plan.fits]
    last = "none of them fits: more devices, a smaller model, or `jax.checkpoint` in it"
    if fitting:
        last = f"append {fitting[0].line}"
    return "\n".join([*aligned([_HEADER, *rows]), last])


def _memory(plan: Plan) -> str:
    """What a way needs of a device's memory; where it does not fit, what is known of that."""
    if plan.memory is not None:
        return size(plan.memory.total)
    if plan.refusal is not None and plan.refusal.needed is not None:
        return size(plan.refusal.needed) + (" of temporaries" if plan.refusal.partly else "")
    return f"{size(plan.state_bytes)} of state"
