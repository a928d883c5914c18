"""`jdist plan`: plans a config, or a sweep over its global batch, and says by its exit code whether the step fits."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jdist.cluster import exit_status
from jdist.errors import ConfigError
from jdist.experiment.load import load
from jdist.experiment.validate import validate
from jdist.plan.picture import draw
from jdist.plan.plan import Plan, check_global_batch, make_plan
from jdist.plan.table import show, show_sweep, sweep_row
from jdist.plan.target import Target
from jdist.report.files import write_atomically


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
        raise ConfigError(f"--svg is {name!r}, and the folder {Path(name).parent} is not there. Make it first.")


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
