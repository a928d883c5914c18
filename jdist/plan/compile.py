"""A planned step, compiled: memory and bytes by the compiler's own account."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass
from typing import Any

import jax

from jdist.plan.hlo import Module, parse
from jdist.plan.step import PlannedStep


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one device needs for a step, in bytes.

    Attributes:
        arguments: state, batch and token.
        outputs: new state, metrics and token.
        aliased: part of the outputs that takes the place of donated arguments.
        temporaries: activations, gradients, buffers of collectives.
        code: the program itself; 0 where the compiler does not say.
        host: arguments, outputs and temporaries in the host's memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: int

    @property
    def total(self) -> int:
        """What has to fit: arguments + outputs - aliased + temporaries + code."""
        # Not the compiler's own peak: on CPU that leaves the temporaries out.
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """The compiler's refusal of a step that does not fit.

    Attributes:
        message: its first sentence.
        needed: bytes it would need; None if the message does not say.
        available: bytes there are; None if the message does not say.
        partly: whether `needed` leaves out arguments and results, and is temporaries alone.
    """

    message: str
    needed: int | None
    available: int | None
    partly: bool


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step that the compiler took.

    Attributes:
        memory: of one device.
        bytes_moved: between a device and its memory in one call; what the compiler counts, times `_loops`.
        module: the program.
        compile_s: seconds to lower and compile it.
        compiled: JAX's own object.
    """

    memory: Memory
    bytes_moved: float
    module: Module
    compile_s: float
    compiled: jax.stages.Compiled


def compile_step(planned: PlannedStep) -> CompiledStep | TooLarge:
    """Compiles a step by the compiler of its devices, whether they are here or not.

    Args:
        planned: the step and its shapes.

    Returns:
        The compiled step, or the compiler's refusal if it does not fit into a device's memory.
    """
    start = time.perf_counter()
    lowered = planned.step.lower(planned.state, planned.batch)
    try:
        with warnings.catch_warnings():
            # JAX's compilation cache, where a user has one, keeps what it cannot load without such devices.
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as exc:
        if "RESOURCE_EXHAUSTED" not in str(exc):
            raise
        return too_large(str(exc))
    compile_s = time.perf_counter() - start
    module = parse(compiled.as_text() or "")
    stats: Any = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    )
    cost: Any = compiled.cost_analysis()
    moved = float(cost["bytes accessed"]) * _loops(planned, float(cost.get("flops", 0.0)))
    return CompiledStep(memory=memory, bytes_moved=moved, module=module, compile_s=compile_s, compiled=compiled)


def too_large(message: str) -> TooLarge:
    """Reads the compiler's refusal.

    Example:
        >>> too_large("RESOURCE_EXHAUSTED: Ran out of memory. Used 17.50G of 15.75G hbm. Exceeded by 1.75G.").needed
        18790481920
    """
    text = message.partition("RESOURCE_EXHAUSTED:")[2].strip() or message
    text = re.sub(r"^E\d+: \w+: ", "", text)  # newer compilers number their errors
    used = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", text)
    temporaries = re.search(
        r"required for HLO temporaries \(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", text
    )
    found = used or temporaries
    return TooLarge(
        message=text.splitlines()[0],
        needed=None if found is None else _bytes(found[1]),
        available=None if found is None else _bytes(found[2]),
        partly=used is None and temporaries is not None,
    )


def _bytes(text: str) -> int:
    exponent = "KMGT".find(text[-1]) + 1
    return round(float(text.rstrip("KMGT")) * 1024**exponent)


def _loops(planned: PlannedStep, counted_flops: float) -> float:
    """How many times more work a call does than the compiler counts, which takes each loop's body once.

    Read from the FLOPs, which are known with all trips: layers in a loop, microbatches and steps of one call move
    their bytes as often as they multiply.
    """
    steps = planned.step.options.steps_per_call
    return max(1.0, planned.flops * steps / counted_flops) if counted_flops > 0 else 1.0
