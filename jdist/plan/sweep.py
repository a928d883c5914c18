"""`--sweep global_batch=...`: the same step with other global batches, and the largest that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from jdist.errors import ConfigError
from jdist.plan.plan import Plan, check_global_batch


def parse_sweep(text: str) -> list[int]:
    """The global batches that a sweep names, in rising order.

    Args:
        text: `global_batch=128,256,384`, or `global_batch=128..4096` for doublings.

    Returns:
        The batches.

    Raises:
        ConfigError: it is neither, or one of them is larger than any plan takes.

    Example:
        >>> parse_sweep("global_batch=128..1000")
        [128, 256, 512]
    """
    batches = _batches(text)
    check_global_batch("--sweep: global_batch", batches[-1])
    return batches


def _batches(text: str) -> list[int]:
    listed = re.fullmatch(r"(?:train\.)?global_batch=(\d+(?:,\d+)*)", text)
    if listed and all(int(n) for n in listed[1].split(",")):
        return sorted({int(n) for n in listed[1].split(",")})
    doubled = re.fullmatch(r"(?:train\.)?global_batch=([1-9]\d*)\.\.([1-9]\d*)", text)
    if doubled and int(doubled[1]) <= int(doubled[2]):
        first, last = int(doubled[1]), int(doubled[2])
        return [first << n for n in range((last // first).bit_length())]
    raise ConfigError(
        f"--sweep is {text!r}; it must be global_batch=128,256,384 or global_batch=128..4096, which doubles from 128."
    )


def sweep(batches: list[int], plan: Callable[[int], Plan]) -> Iterator[Plan]:
    """Plans each global batch in turn, up to the first that does not fit.

    Args:
        batches: in rising order.
        plan: makes the plan of one.

    Yields:
        The plans, as they are made; more rows never need less memory, so what comes after a misfit is left out.
    """
    for batch in batches:
        made = plan(batch)
        yield made
        if made.fits is False:
            return
