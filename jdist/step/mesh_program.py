"""One program over the mesh, made of what a replica runs by `shard_map`, `pmap` or `jit`; or on no mesh at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist.core.context import run_under_mesh
from jdist.core.layout import over_replicas
from jdist.core.per_replica import PerReplica, put_per_replica, take_per_replica
from jdist.core.step_state import carrying, map_residuals
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import rows_first
from jdist.step.options import StepOptions
from jdist.step.outputs import Traced
from jdist.step.placement import adopt_state, check_rows, compare_replicas
from jdist.step.program_spec import ProgramSpec, StepFn
from jdist.step.replica_program import replica_program
from jdist.step.signature import Others
from jdist.typing import PyTree

Function = Callable[[jax.Array, PyTree, PyTree, PyTree], tuple[jax.Array, PyTree, tuple[PyTree, ...]]]
# One replica in one call: `(token, state, batches, others) -> (token, state, same, own, rows)`, see `_sort`.
Replica = Callable[..., Any]


class Program:
    """A compiled `(token, state, batches, others) -> (token, state, outputs)` over global arrays."""

    def __init__(self, function: Function, spec: ProgramSpec):
        axes, options = spec.call.batch_axes, spec.options

        def checked(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
            if axes:
                batches = rows_first(batches, axes, lead=options.num_step_axes)
            check_rows(batches, spec.strategy, options)
            return function(token, state, batches, others)

        # Traced and compiled at the first call.
        self._jitted = jax.jit(checked, donate_argnums=(1,) if options.donates_state else ())
        self._strategy = spec.strategy

    def run(self, *arguments: PyTree) -> Any:
        """Runs the step: `(token, state, batches, others) -> (token, state, outputs)`."""
        return run_under_mesh(self._strategy, self._jitted, *arguments)

    def trace(self, *arguments: PyTree) -> Any:
        """Traces the step, without compiling it."""
        return run_under_mesh(self._strategy, self._jitted.trace, *arguments)

    def run_into(self, box: list[Any], token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> None:
        """Runs the step and appends `(token, state, outputs)` to `box`."""
        # The call donates the old state's buffers. `extend(map(...))` calls and stores without a return to the interpreter,
        # which looks at signals only between instructions: after an interrupt the results are in the box.
        run_under_mesh(self._strategy, box.extend, map(self._jitted, (token,), (state,), (batches,), (others,)))


def compile_over_mesh(function: StepFn, spec: ProgramSpec) -> Program:
    """Builds the program that runs `function` on every replica; it compiles at its first call."""
    build = {None: _plain, "jit": _jit, "shard_map": _shard_map, "pmap": _pmap}[spec.strategy.transform]

    def replica(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        token, state, outputs = function(token, state, batches, others)
        return token, state, *_sort(outputs, spec.traced)

    mapped = build(replica, spec.strategy, spec.options)

    def program(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        token, state, same, own, rows = mapped(token, state, batches, others)
        return token, state, _join(same, own, rows, spec.traced)

    return Program(program, spec)


def _plain(replica: Replica, strategy: Strategy, options: StepOptions) -> Replica:
    return replica


def _jit(replica: Replica, strategy: Strategy, options: StepOptions) -> Replica:
    whole, by_rows = strategy.replicated_sharding, strategy.batch_sharding

    def program(*arguments: PyTree) -> Any:
        return jax.lax.with_sharding_constraint(replica(*arguments), (whole, whole, whole, whole, by_rows))

    return program


def _shard_map(replica: Replica, strategy: Strategy, options: StepOptions) -> Replica:
    whole, by_rows = PartitionSpec(), PartitionSpec(strategy.axes)
    batch_spec = PartitionSpec(*(None,) * options.num_step_axes, strategy.axes)
    state_spec: Any = carrying(whole, loss_scale=whole, residuals=by_rows) if strategy.keeps_residuals else whole

    def body(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        token, state, *outputs = replica(token, map_residuals(lambda x: x[0], state), batches, others)
        return token, map_residuals(lambda x: x[None], state), *outputs

    out_specs = (whole, state_spec, whole, by_rows, by_rows)
    return over_replicas(strategy, body, in_specs=(whole, state_spec, batch_spec, whole), out_specs=out_specs)


def _pmap(replica: Replica, strategy: Strategy, options: StepOptions) -> Replica:
    """Maps by `pmap`, which wants a leading axis of replicas: batches are reshaped on the way in, rows on the way out."""
    assert strategy.mesh is not None  # every strategy with a transform has a mesh
    (axis,) = strategy.axes
    whole, by_rows, n = strategy.replicated_sharding, strategy.batch_sharding, strategy.num_replicas
    lead = options.num_step_axes
    traces: list[Replica] = []  # holds `replica` while it is traced: JAX keeps what `pmap` maps for ever

    def body(token: jax.Array, state: PyTree, own: tuple[PyTree, jax.Array], others: PyTree) -> Any:
        return traces[-1](token, state, own[0], others)

    def by_replica(x: jax.Array) -> jax.Array:
        parts = x.reshape(*x.shape[:lead], n, x.shape[lead] // n, *x.shape[lead + 1 :])
        return jax.lax.with_sharding_constraint(parts.swapaxes(0, lead), by_rows)

    state_axes: Any = carrying(None, residuals=0) if strategy.keeps_residuals else None
    state_sharding: Any = carrying(whole, loss_scale=whole, residuals=by_rows) if strategy.keeps_residuals else whole
    mapped = jax.pmap(
        body,
        axis_name=axis,
        # One entry for each part of `others`: with as many entries as leaves JAX would take them leaf by leaf.
        in_axes=(None, state_axes, 0, Others._make((None, None, None))),
        out_axes=(None, state_axes, None, 0, 0),
        devices=list(strategy.mesh.devices.flat),
    )

    def program(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        # The numbers are for a step without a batch: `pmap` counts its replicas by a mapped argument.
        parts = jax.tree.map(by_replica, batches), jnp.arange(n, dtype=jnp.int32)
        traces.append(replica)
        try:
            token, state, same, own, rows = mapped(token, state, parts, others)
        finally:
            traces.pop()
        keep = jax.lax.with_sharding_constraint
        token, state, same = keep((token, state, same), (whole, state_sharding, whole))
        own, rows = jax.tree.map(lambda x: keep(x.reshape(-1, *x.shape[2:]), by_rows), (own, rows))
        return token, state, same, own, rows

    return program  # to be jitted: `pmap` itself returns through Python, where an interrupt would lose the results


def _sort(outputs: tuple[PyTree, ...], traced: Traced) -> tuple[list[PyTree], list[PyTree], list[PyTree]]:
    """Sorts outputs by how they leave the mesh: the same on all replicas, each replica's own, rows to be joined."""
    same, own, rows = [], [], []
    for role, tree in zip(traced.output_roles, outputs, strict=True):
        if role == "examples":
            rows.append(tree)
        elif role == "per_replica":
            own.append(tree)
        else:
            tree, taken = take_per_replica(tree)
            same.append(tree)
            own.append(taken)
    return same, own, rows


def _join(same: list[PyTree], own: list[PyTree], rows: list[PyTree], traced: Traced) -> tuple[PyTree, ...]:
    """Undoes `_sort`; own values now lead with an axis of replicas."""
    same_, own_, rows_ = iter(same), iter(own), iter(rows)
    outputs = []
    for role in traced.output_roles:
        if role == "examples":
            outputs.append(next(rows_))
        elif role == "per_replica":
            outputs.append(PerReplica(next(own_)))
        else:
            outputs.append(put_per_replica(next(same_), next(own_, [])))
    return tuple(outputs)


@dataclass(frozen=True)
class Backend:
    """The layout of states and the compilation of steps for a kind of strategy."""

    adopt_state: Callable[[Strategy, PyTree], PyTree]  # to the strategy's layout
    make_program: Callable[[ProgramSpec], Program]
    # takes the program's results; raises where replicas differ
    compare_replicas: Callable[[Strategy, PyTree, Any], None]


REPLICATED = Backend(
    adopt_state,
    lambda spec: compile_over_mesh(replica_program(spec), spec),
    lambda strategy, state, results: compare_replicas(strategy, state),
)
