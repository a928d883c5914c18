"""`CommunicationOptions`: how processes all-reduce, and how long they wait for each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jdist.errors import StrategyError
from jdist.support import checks

Implementation = Literal["auto", "ring", "nccl"]


@dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """Sets how gradients are all-reduced between processes, and how long a process may be silent.

    Attributes:
        bytes_per_pack: gradients are sent in packs of at least this many bytes, so that the first may leave while the
            last is computed; 0: in one.
        timeout_s: seconds of silence after which a process is lost, and all others end with exit code 75; also how long
            others wait for a process after its program has ended. Python code must not hold the interpreter's lock as long.
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
        size = checks.whole_number("bytes_per_pack", self.bytes_per_pack, StrategyError, least=0, unit="bytes")
        object.__setattr__(self, "bytes_per_pack", size)
        checks.seconds("timeout_s", self.timeout_s, StrategyError, least=1)
        checks.seconds("start_timeout_s", self.start_timeout_s, StrategyError, least=1)
        if self.progress_timeout_s not in (None, "auto"):
            fix = 'Or give "auto", or None for no end.'
            value = self.progress_timeout_s
            checks.real_number("progress_timeout_s", value, StrategyError, least=1, unit="seconds", fix=fix)
        checks.choice("implementation", self.implementation, get_args(Implementation), StrategyError)
        if self.implementation == "ring" and self.bytes_per_pack:
            raise StrategyError(
                '`bytes_per_pack` is for JAX; `implementation` "ring" sends all gradients as one. Leave one out.'
            )

    @property
    def timeouts(self) -> dict[str, Any]:
        """The keywords of `runtime.start`."""
        return {
            "timeout_s": self.timeout_s,
            "start_timeout_s": self.start_timeout_s,
            "progress_timeout_s": math.inf if self.progress_timeout_s is None else self.progress_timeout_s,
        }
