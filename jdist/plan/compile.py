"""The step that `jdist run` would compile: its shapes and FLOPs; its memory and bytes by the compiler, and in a real step."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdist.core.context import ReplicaTrace, tracing
from jdist.core.precision import precision
from jdist.experiment.config import Config
from jdist.experiment.dry_run import batch_shapes, state_shapes
from jdist.experiment.prepare import Parts, make_train_step, state_maker
from jdist.jaxpr.flops import count_products
from jdist.plan.hlo import Module, bytes_accessed, parse
from jdist.step.mesh_step import DistributedStep
from jdist.strategies.default import default
from jdist.support.arrays import is_key
from jdist.support.chips import ProductKind
from jdist.typing import PyTree


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The step of a config, and the shapes of its arguments."""

    step: DistributedStep  # the config's train step
    state: PyTree  # shapes of the state
    batch: PyTree  # shapes of the global batch of one call, over all replicas, padding and mask included
    products: dict[ProductKind, float]  # operations of matrix products and convolutions in one step on one device

    @property
    def flops(self) -> float:
        return sum(self.products.values())


def plan_step(config: Config, parts: Parts) -> PlannedStep:
    """Makes the train step of an experiment, ready to be lowered; the devices of its strategy need not be here."""
    steps = config.train.steps_per_call
    state, _ = state_shapes(config, parts)
    batch = batch_shapes(parts, parts.train_data, steps_per_call=steps)
    of_one_step = batch
    if steps > 1:
        of_one_step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    # Without a strategy the step sees all rows and does the work of all replicas, none of it in jdist's own loops.
    products = count_products(_in_precision(parts.task.train_step, config.train.precision), state, of_one_step)
    return PlannedStep(
        step=make_train_step(config, parts),
        state=state,
        batch=batch,
        products={kind: flops / max(1, len(parts.strategy.devices)) for kind, flops in products.items()},
    )


def _in_precision(step: Any, name: str | None) -> Any:
    """Makes a step compute as under `jdist.distribute(..., precision=...)`, for the dtypes of its products."""
    if name is None:
        return step
    chosen = precision(name)

    def in_16_bits(state: PyTree, batch: PyTree) -> Any:
        with tracing(ReplicaTrace(strategy=default(), precision=chosen)):
            return step(state, chosen.cast_to_compute(batch))

    return in_16_bits


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one device for a step, in bytes."""

    arguments: int  # state, batch and token
    outputs: int  # new state, metrics and token
    aliased: int  # part of the outputs that takes the place of donated arguments
    temporaries: int  # activations, gradients, buffers of collectives
    code: int  # the program itself; 0 where the compiler does not say
    host: int  # arguments, outputs and temporaries in the host's memory

    @property
    def total(self) -> int:
        """The bytes that have to fit: arguments + outputs - aliased + temporaries + code."""
        # Not the compiler's own peak: on CPU that leaves the temporaries out.
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """The compiler's refusal of a step that does not fit."""

    message: str  # its first sentence
    needed: int | None  # bytes it would need; None if the message does not say
    available: int | None  # bytes there are; None if the message does not say
    partly: bool  # whether `needed` leaves out arguments and results, and is temporaries alone


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step that the compiler took."""

    memory: Memory  # of one device
    bytes_moved: float  # between a device and its memory in one call
    module: Module  # the program
    compile_s: float  # seconds to lower and compile it


def compile_step(planned: PlannedStep) -> CompiledStep | TooLarge:
    """Compiles a step by the compiler of its devices, here or not; or returns its refusal of one that does not fit."""
    start = time.perf_counter()
    lowered = planned.step.lower(planned.state, planned.batch)
    try:
        with warnings.catch_warnings():
            # JAX's compilation cache, where a user has one, holds entries that it cannot load without such devices.
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
    moved = float(bytes_accessed(module))
    if cost is not None:  # GPUs that are not here have none; it counts the body of each loop once
        moved *= float(cost["bytes accessed"]) / max(1, bytes_accessed(module, loops_once=True))
    return CompiledStep(memory=memory, bytes_moved=moved, module=module, compile_s=compile_s)


def too_large(message: str) -> TooLarge:
    """Reads the compiler's refusal."""
    text = message.partition("RESOURCE_EXHAUSTED:")[2].strip() or message
    text = re.sub(r"^E\d+: \w+: ", "", text)  # newer compilers number their errors
    whole = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", text)
    temporaries = re.search(
        r"required for HLO temporaries \(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", text
    )
    sizes = whole or temporaries
    return TooLarge(
        message=text.splitlines()[0],
        needed=None if sizes is None else _bytes(sizes[1]),
        available=None if sizes is None else _bytes(sizes[2]),
        partly=whole is None and temporaries is not None,
    )


def _bytes(text: str) -> int:
    """Reads a size such as "17.50G"."""
    exponent = "KMGT".find(text[-1]) + 1
    return round(float(text.rstrip("KMGT")) * 1024**exponent)


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """Bytes on one device, predicted and measured."""

    what: str  # "arguments", "outputs" or "allocator's peak"
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def check_memory(config: Config, parts: Parts, planned: PlannedStep, memory: Memory) -> tuple[MemoryCheck, ...]:
    """Makes one real step on present devices, and compares its memory with the prediction."""
    # On GPU the allocator has its peak, of all that this process ever held at once, including the
    # creation of the state. A CPU has no such count; there the bytes of arguments and outputs are
    # compared, and the temporaries are not.
    strategy = parts.strategy
    state = strategy.init(*state_maker(config, parts))
    dataset = strategy.distribute_dataset(parts.train_data, steps_per_call=config.train.steps_per_call, prefetch=0)
    batch = next(iter(dataset))
    state = planned.step.prepare(state, batch)  # with what its all-reduce keeps
    token = np.zeros(2, np.int32).nbytes
    arguments = bytes_on_a_device((state, batch)) + token
    returned = jax.block_until_ready(planned.step(state, batch))
    planned.step.wait()
    outputs = bytes_on_a_device(returned) + token
    dataset.close()
    checks = [
        MemoryCheck(what="arguments", predicted=memory.arguments, measured=arguments),
        MemoryCheck(what="outputs", predicted=memory.outputs, measured=outputs),
    ]
    device = strategy.devices[0] if strategy.devices else jax.local_devices()[0]
    stats = device.memory_stats()
    if stats is not None and "peak_bytes_in_use" in stats:
        # The program's code is not the allocator's.
        predicted = memory.total - memory.code
        checks.append(
            MemoryCheck(what="allocator's peak", predicted=predicted, measured=int(stats["peak_bytes_in_use"]))
        )
    return tuple(checks)


def bytes_on_a_device(tree: PyTree) -> int:
    """Counts the bytes of a tree of arrays on the first of its devices."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array):  # under default a batch stays on the host until the step takes it
            total += leaf.nbytes
            continue
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        total += data.addressable_shards[0].data.nbytes
    return total
