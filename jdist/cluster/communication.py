"""`CommunicationOptions`: how processes all-reduce, and how long they wait for each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jdist.errors import StrategyError
from jdist.support.checks import as_int, as_real

Implementation = Literal["auto", "ring", "nccl"]


@dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """Sets how gradients are all-reduced between processes, and how long a process may be silent.

    Attributes:
        bytes_per_pack: gradients are sent in packs of at least this many bytes, so that the first may leave while the
            last is computed; 0: in one.
        timeout_s: seconds of silence after which a process is lost, and all others end with exit code 75; also how long
            others wait for a process whose program has ended. Python code must not hold the interpreter's lock as long.
        start_timeout_s: seconds to wait until all processes have come.
        progress_timeout_s: seconds to wait for a process that is alive and does not come to the same step, as where its
            data loader or a collective is stuck. Then all end with exit code 75, and say where each was. Time in which it
            compiles, saves, evaluates or is `strategy.cluster.busy(...)` does not count. "auto": ten times as long as 95
            of 100 calls of a step take, at least five minutes; for the first 20 calls ten times as long as the longest, and
            at most half an hour. A wait of a minute is logged. None: no limit.
        implementation: "auto" leaves it to JAX (NCCL on GPU, the interconnect on TPU, gloo on CPU); "nccl" insists on NCCL;
            "ring" passes gradients round a ring of replicas, step by step.

    Raises:
        StrategyError: a value is not allowed.

    Example:
        >>> import jdist
        >>> jdist.CommunicationOptions(timeout_s=30).implementation
        'auto'

    Source: `tf.distribute.experimental.CommunicationOptions`
    """

    bytes_per_pack: int = 0
    timeout_s: float = 10.0
    start_timeout_s: float = 300.0
    progress_timeout_s: float | Literal["auto"] | None = "auto"
    implementation: Implementation = "auto"

    def __post_init__(self) -> None:
        size = as_int(self.bytes_per_pack, least=0)
        if size is None:
            raise StrategyError(
                f"`bytes_per_pack` is {self.bytes_per_pack!r}; it must be a whole number of bytes, 0 or more."
            )
        object.__setattr__(self, "bytes_per_pack", size)
        for name in ("timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            if not _is_at_least_one_second(value):
                raise StrategyError(f"`{name}` is {value!r}; it must be a number of seconds, 1 or more.")
        value = self.progress_timeout_s
        if value not in (None, "auto") and not _is_at_least_one_second(value):
            raise StrategyError(
                f'`progress_timeout_s` is {value!r}; it must be "auto", a number of seconds, 1 or more, or None for no end.'
            )
        if self.implementation not in get_args(Implementation):
            allowed = ", ".join(map(repr, get_args(Implementation)))
            raise StrategyError(f"`implementation` is {self.implementation!r}; allowed are {allowed}.")
        if self.implementation == "ring" and self.bytes_per_pack:
            raise StrategyError(
                '`bytes_per_pack` packs what JAX all-reduces; `implementation` "ring" sends all gradients as one. Leave one '
                "of them out."
            )

    @property
    def timeouts(self) -> dict[str, Any]:
        """The keywords of `runtime.start`."""
        return {
            "timeout_s": self.timeout_s,
            "start_timeout_s": self.start_timeout_s,
            "progress_timeout_s": math.inf if self.progress_timeout_s is None else self.progress_timeout_s,
        }


def _is_at_least_one_second(value: Any) -> bool:
    number = as_real(value)
    return number is not None and 1 <= number < math.inf
