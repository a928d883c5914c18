"""A run without training: config, data, shapes and steps are checked, and nothing is written."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console

from jdist.core.strategy import Strategy
from jdist.data.feed import distributed_dataset
from jdist.data.options import FeedOptions, InputOptions
from jdist.errors import ConfigError
from jdist.experiment.callbacks import check_watched_of_shapes, make_callbacks
from jdist.experiment.config import Config
from jdist.experiment.load import Document, describe
from jdist.experiment.prepare import Parts, make_eval_step, make_train_step, prepare, state_maker
from jdist.experiment.record import RunFolder, check_can_be_made
from jdist.experiment.resume import check_init_from, check_same_run, init_from
from jdist.experiment.summary import arithmetic
from jdist.strategies.by_name import make_strategy
from jdist.strategies.parameter_server import check_parameter_server
from jdist.support.arrays import is_key
from jdist.support.words import size
from jdist.typing import PyTree


def dry_run(config: Config, document: Document, *, fresh: bool = False) -> int:
    """Checks a config, compiles its steps, and describes a run; returns exit code 0."""
    # `config` was checked and its `platform` applied. With `fresh` the run would set an existing
    # folder aside.
    parts = prepare(config, document, make=without_servers)
    check_init_from(config.init_from, document)
    strategy, task = parts.strategy, parts.task
    console = Console(soft_wrap=True, quiet=not strategy.cluster.is_chief)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, emoji=False)

    say(describe(parts.values, document, derived=parts.derived))
    if config.strategy.name == "parameter_server":
        say("no server is started: what a worker computes, and the update, are compiled for one device here")
    say(arithmetic(config, parts))
    folder = RunFolder(Path(config.log.folder) / config.name)
    callbacks = make_callbacks(config, parts.values, parts.learning_rate, document, folder.path)
    check_can_be_made(folder.path)
    if not fresh:
        check_same_run(folder, parts.values, document)

    state, parameters = state_shapes(config, parts)
    batch = batch_shapes(parts, parts.train_data, steps_per_call=config.train.steps_per_call)
    eval_batch = batch_shapes(parts, task.eval_data(parts.eval_batch))
    say(f"parameters: {_numbers(parameters)}")
    say(f"state: {_numbers(state)}")
    say(f"batch: {_batch(batch)}")
    goes_on = folder.has_checkpoints() and not fresh
    if config.init_from is not None and not goes_on:
        init_from(config.init_from, jax.tree.map(_zeros, state), strategy, say)
    # Before eval_shape: an error in the step then says what it was called with.
    evaluation = make_eval_step(parts).lower(state, eval_batch)
    check_watched_of_shapes(config, callbacks, task, jax.eval_shape(task.eval_step, state, eval_batch), document)

    say(_compiled("train step", make_train_step(config, parts).lower(state, batch)))
    say(_compiled("evaluation", evaluation))
    say(f"a run would {'go on from the checkpoints in' if goes_on else 'write'} {folder.path}")
    say("dry run: all is well; nothing was trained or written")
    return 0


def without_servers(name: str, **options: Any) -> Strategy:
    """Makes the strategy; of a parameter server (its processes are not started) what one worker computes on."""
    if name != "parameter_server":
        return make_strategy(name, **options)
    check_parameter_server(**options)
    return make_strategy("one_device")


def _zeros(x: Any) -> Any:
    """Makes zeros on the host, which take no memory before they are written to."""
    return jax.lax.full(x.shape, 0, x.dtype) if is_key(x) else np.zeros(x.shape, x.dtype)


def _compiled(what: str, lowered: jax.stages.Lowered) -> str:
    """Compiles a step, and says how long that took and what one device needs for it."""
    start = time.perf_counter()
    try:
        stats: Any = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as exc:
        if "RESOURCE_EXHAUSTED" not in str(exc):
            raise
        reason = str(exc).partition("\n")[0]
        raise ConfigError(
            f"the {what} does not fit into a device's memory: {reason} Take a smaller train.global_batch, more devices, "
            "or train.accumulate=2."
        ) from exc
    text = f"{what}: compiled in {time.perf_counter() - start:.1f} s"
    if stats is None:  # not every backend says
        return text
    # Not the compiler's own peak: on CPU that leaves the temporaries out.
    needed = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return f"{text}, needs {size(needed + stats.temp_size_in_bytes)} of each device"


def _numbers(tree: PyTree) -> str:
    leaves = [jax.eval_shape(jax.random.key_data, x) if is_key(x) else x for x in jax.tree.leaves(tree)]
    size_bytes = sum(x.size * np.dtype(x.dtype).itemsize for x in leaves)
    return f"{sum(x.size for x in leaves):,} numbers in {len(leaves)} arrays, {size(size_bytes)}"


def _batch(tree: PyTree) -> str:
    named: Iterable[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(tree)
    return ", ".join(
        f"{jax.tree_util.keystr(path, simple=True, separator='.') or 'array'} {x.dtype}{list(x.shape)}"
        for path, x in named
    )


def state_shapes(config: Config, parts: Parts) -> tuple[PyTree, list[PyTree]]:
    """Finds the shapes of the state, and of the parameter trees that initialise the optimizer."""
    # The devices of the strategy need not be here.
    parameters: list[PyTree] = []

    def init(params: PyTree) -> PyTree:
        parameters.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
        return parts.optimizer.init(params)

    # A task's state may be any tree: only its optimizer gets the part of it that are the parameters.
    create, key = state_maker(config, parts, optax.GradientTransformationExtraArgs(init, parts.optimizer.update))
    return jax.eval_shape(create, key), parameters


def batch_shapes(parts: Parts, source: Any, *, steps_per_call: int = 1) -> PyTree:
    """Finds the shapes of the global batch of one call, padding and mask included; makes one batch of the source for it."""
    options = FeedOptions(
        num_replicas=parts.strategy.num_replicas, steps_per_call=steps_per_call, input=InputOptions(prefetch=0)
    )
    return distributed_dataset(source, options).element_spec
