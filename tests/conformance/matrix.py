"""What is run with what. A new strategy, family or option is one more line here (or in families.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import optax

import jdist


def half() -> int:
    return max(1, len(jax.local_devices()) // 2)


@functools.cache
def parameter_server() -> jdist.Strategy:
    """Asynchronous, but with one worker every gradient is one of the newest parameters. Its processes serve all cases."""
    return jdist.parameter_server(local_workers=1, local_ps=2, partitioner=jdist.ps.fixed_shards(2))


@functools.cache
def parameter_server_sync() -> jdist.Strategy:
    """The mean of two workers' gradients, on two servers."""
    partitioner = jdist.ps.fixed_shards(2)
    return jdist.parameter_server(mode="sync", local_workers=2, local_ps=2, partitioner=partitioner)


def close_servers() -> None:
    """Ends the parameter servers that cases have shared."""
    for make in (parameter_server, parameter_server_sync):
        if make.cache_info().currsize:
            make().coordinator.close()
            make.cache_clear()


STRATEGIES: dict[str, Callable[[], jdist.Strategy]] = {
    "default": jdist.default,
    "one_device": jdist.one_device,
    "mirrored_shard_map": jdist.mirrored,
    "mirrored_pmap": lambda: jdist.mirrored(transform="pmap"),
    "mirrored_jit": lambda: jdist.mirrored(transform="jit"),
    "mirrored_half": lambda: jdist.mirrored(jax.local_devices()[: half()]),
    "mirrored_ring": lambda: jdist.mirrored(all_reduce="ring"),
    "mirrored_hierarchical": lambda: jdist.mirrored(
        transform="pmap", all_reduce=jdist.reduction.hierarchical(half(), len(jax.local_devices()) // half())
    ),
    # Packs of one leaf to a few: most leaves here have between 32 and 1,200 bytes.
    "mirrored_bucketed": lambda: jdist.mirrored(all_reduce=jdist.reduction.bucketed(500)),
    "mirrored_to_one_device": lambda: jdist.mirrored(all_reduce="to_one_device"),
    "mirrored_bf16": lambda: jdist.mirrored(all_reduce=jdist.reduction.compressed("bf16")),
    "mirrored_int8": lambda: jdist.mirrored(all_reduce=jdist.reduction.compressed("int8")),
    "central_storage": jdist.central_storage,
    # The models here are small: everything that has an element for each part is in parts.
    "sharded": lambda: jdist.sharded(whole_below=0, most_whole=1),
    "sharded_optimizer": lambda: jdist.sharded(shard="optimizer", whole_below=0),
    "sharded_within": lambda: jdist.sharded(within=half(), whole_below=0, most_whole=1),
    "parameter_server": parameter_server,
    "parameter_server_sync": parameter_server_sync,
    # tpu() is left out: it needs a TPU. Its steps are mirrored's, on a mesh in another order (tests/strategies/test_tpu.py).
}

# All-reduce algorithms that always run with these alone, and with everything in `make conformance`: what they sum does not
# depend on the model, and each case compiles for two seconds.
# The same goes for parameter servers, whose processes take their time.
ALGORITHMS = (
    "mirrored_bucketed",
    "mirrored_to_one_device",
    "mirrored_bf16",
    "mirrored_int8",
    "parameter_server",
    "parameter_server_sync",
)
# These compile for several seconds each; they always run where a strategy has a transform of its own, or updates elsewhere.
SLOW_FAMILIES = ("lstm", "transformer")
THOROUGH = ("mirrored_shard_map", "mirrored_jit", "central_storage")
LIGHT_FAMILIES = ("plain_pytree", "params_and_opt_state", "gan", "nnx_mlp")
LIGHT_OPTIONS = ("plain", "accumulate", "steps_per_call", "skip_non_finite")

# How far losses, and parameters under SGD, may be from one device's after 20 steps. A compressed gradient is rounded to 8
# significant bits (bf16), or to 1/254 of the largest of its block (int8), and what rounding leaves out comes a step later.
# Measured: at most 9e-4 and 1.1e-2 (bf16), 3.2e-3 and 1.5e-2 (int8), both with the CNN, whose losses fall by 1.6; three times
# that is allowed. A sum in place of a mean is off by 0.7 and more.
COMPRESSED: dict[str, tuple[float, float]] = {"mirrored_bf16": (3e-3, 3e-2), "mirrored_int8": (1e-2, 5e-2)}

# On several processes, in a program of their own: several_processes.py.
MULTI_WORKER: dict[str, Callable[[], jdist.Strategy]] = {
    "shard_map": jdist.multi_worker,
    "jit": lambda: jdist.multi_worker(transform="jit"),
    "hierarchical": lambda: jdist.multi_worker(all_reduce="hierarchical"),
    "sharded": lambda: jdist.multi_worker(shard={"of": "state", "whole_below": 0, "most_whole": 1}),
    "sharded_optimizer": lambda: jdist.multi_worker(shard={"of": "optimizer", "whole_below": 0, "within": 4}),
    "ring": lambda: jdist.multi_worker(communication=jdist.CommunicationOptions(implementation="ring")),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "steps_per_call": {"steps_per_call": 4},
    "accumulate_and_steps_per_call": {"accumulate": 2, "steps_per_call": 2},
    "keep_state": {"donate": False, "max_in_flight": 1, "check_replicas": 3},
    "skip_non_finite": {"non_finite": "skip", "check_replicas": 0},
}

# Compared with one device in the same precision, accumulating as often. The first loss scale is one at which nothing
# overflows: the scale counts for a replica's mean, so one device and eight would leave different steps out.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": jdist.precision("bf16")},
    "fp16": {"precision": jdist.precision("fp16", initial_scale=2.0**6)},
    "fp16_accumulate_and_steps_per_call": {
        "precision": jdist.precision("fp16", initial_scale=2.0**6),
        "accumulate": 2,
        "steps_per_call": 2,
    },
}

# How far losses, and parameters under SGD, may be from one device's: sums over rows are rounded to 8 or 11 significant bits
# in other groups. Measured: at most 5e-3 and 2.1e-2 (bf16), 1.5e-3 and 8e-3 (fp16); some three times that is allowed. Losses
# fall by 0.2 to 1.6.
TOLERANCES_IN_16_BITS = {"bf16": (1.5e-2, 6e-2), "fp16": (5e-3, 2.5e-2)}

# Those that always run; the rest run in `make conformance`.
PRECISION_CASES = {
    ("mirrored_shard_map", "cnn_synced_batchnorm", "fp16_accumulate_and_steps_per_call", "sgd"),
    ("mirrored_pmap", "nnx_mlp", "bf16", "sgd"),
    ("mirrored_jit", "transformer", "fp16", "sgd"),
    ("central_storage", "gan", "fp16_accumulate_and_steps_per_call", "adam"),
    ("parameter_server", "plain_pytree", "bf16", "sgd"),
    ("mirrored_pmap", "params_and_opt_state", "fp16_accumulate_and_steps_per_call", "sgd"),
    ("parameter_server_sync", "plain_pytree", "fp16", "sgd"),
}

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(3e-3),
}

Case = tuple[str, str, str, str]


def all_cases(strategies: Iterable[str], families: Iterable[str], options: Iterable[str] = OPTIONS) -> list[Case]:
    """Every combination: strategy, family, option, optimiser."""
    every = itertools.product(strategies, families, options, OPTIMIZERS)
    # Objects of this process cannot be changed in place by others; tests/ps/test_step.py has nnx as a pure step.
    # A batch normalisation under synchronous mode knows the rows of its own worker alone, as any of tf.distribute's does.
    left_out = [
        ("parameter_server", "nnx_mlp"),
        ("parameter_server_sync", "nnx_mlp"),
        ("parameter_server_sync", "cnn_synced_batchnorm"),
    ]
    return [case for case in every if case[:2] not in left_out]


def is_light(case: Case) -> bool:
    """Whether a case may be among the few that always run."""
    strategy, family, option, _ = case
    if strategy in ALGORITHMS:
        return family in LIGHT_FAMILIES and option in LIGHT_OPTIONS
    return family not in SLOW_FAMILIES or strategy in THOROUGH


def pairwise(cases: list[Case]) -> list[Case]:
    """A small part of `cases` in which every pair of values of two columns still occurs; always the same part."""

    def pairs(case: Case) -> Iterator[tuple[Any, ...]]:
        return ((i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2))

    missing = {pair for case in cases for pair in pairs(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: sum(pair in missing for pair in pairs(case)))
        chosen.append(best)
        missing.difference_update(pairs(best))
    return chosen
