"""A replica's function -> one compiled program over the mesh: by `shard_map`, `pmap` or `jit`, or on no mesh at all."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jdist.strategy import Strategy
from jdist.transforms.options import StepOptions
from jdist.transforms.placement import check_rows
from jdist.transforms.replica_step import ReplicaFunction
from jdist.transforms.results import Traced
from jdist.values import PerReplica, put_per_replica, take_per_replica

PyTree = Any


class Program(Protocol):
    """A compiled step: `(token, state, batches, others) -> (token, state, outputs)` over whole, global arrays."""

    def run_into(self, box: list[Any], token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> None:
        """Runs the step and puts its results into `box`, the token and the state first."""
        ...

    def outputs_of(self, results: Any) -> tuple[PyTree, ...]:
        """The outputs among results that `run_into` put into a box."""
        ...

    def lower(self, token: Any, state: Any, batches: Any, others: Any) -> jax.stages.Lowered: ...


class JittedProgram:
    """A program of one jitted function.

    The old state's buffers are gone once the call has begun. `extend(map(...))` calls and stores without returning to
    the interpreter, which looks at signals only between instructions: an interrupt finds the results in the box.
    """

    def __init__(self, function: Any):
        self._function = function
        self.lower = function.lower

    def run_into(self, box: list[Any], token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> None:
        box.extend(map(self._function, (token,), (state,), (batches,), (others,)))

    def outputs_of(self, results: Any) -> tuple[PyTree, ...]:
        return results[2]


def compile_over_mesh(
    function: ReplicaFunction, strategy: Strategy, options: StepOptions, traced: Traced, donate: bool
) -> Program:
    """Builds the program that runs `function` on every replica of a strategy.

    Args:
        function: what one replica computes.
        strategy: where.
        options: the decorator's options.
        traced: what tracing `function` tells about its results.
        donate: whether the state's buffers may be reused for the new state.

    Returns:
        The program; it compiles at its first call.
    """
    build = {None: _plain, "jit": _jit, "shard_map": _shard_map, "pmap": _pmap}[strategy.transform]
    return build(function, strategy, options, traced, (1,) if donate else ())


def _plain(
    function: ReplicaFunction,
    strategy: Strategy,
    options: StepOptions,
    traced: Traced,
    donate: tuple[int, ...],
) -> Program:
    def program(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        check_rows(batches, strategy, options)
        token, state, outputs = function(token, state, batches, others)
        same, own, rows = _sort(outputs, traced)
        return token, state, _join(same, jax.tree.map(lambda x: jnp.asarray(x)[None], own), rows, traced)

    return JittedProgram(jax.jit(program, donate_argnums=donate))


def _jit(
    function: ReplicaFunction,
    strategy: Strategy,
    options: StepOptions,
    traced: Traced,
    donate: tuple[int, ...],
) -> Program:
    whole, by_rows = strategy.replicated_sharding, strategy.batch_sharding

    def program(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        check_rows(batches, strategy, options)
        token, state, outputs = function(token, state, batches, others)
        same, _, rows = _sort(outputs, traced)
        keep = jax.lax.with_sharding_constraint
        token, state, same = keep((token, state, same), whole)
        return token, state, _join(same, [], [keep(x, by_rows) for x in rows], traced)

    return JittedProgram(jax.jit(program, donate_argnums=donate))


def _shard_map(
    function: ReplicaFunction,
    strategy: Strategy,
    options: StepOptions,
    traced: Traced,
    donate: tuple[int, ...],
) -> Program:
    whole, by_rows = PartitionSpec(), PartitionSpec(strategy.axes)
    batch_spec = by_rows if options.steps_per_call == 1 else PartitionSpec(None, strategy.axes)

    def body(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        token, state, outputs = function(token, state, batches, others)
        same, own, rows = _sort(outputs, traced)
        return token, state, same, jax.tree.map(lambda x: jnp.asarray(x)[None], own), rows

    # check_vma=False: with it, averaged gradients come out num_replicas times too large and flax's RNN fails to
    # trace; jdist compares the replicas itself (replica_check.py).
    mapped = jax.shard_map(
        body,
        mesh=strategy.mesh,
        in_specs=(whole, whole, batch_spec, whole),
        out_specs=(whole, whole, whole, by_rows, by_rows),
        check_vma=False,
    )

    def program(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        check_rows(batches, strategy, options)
        token, state, same, own, rows = mapped(token, state, batches, others)
        return token, state, _join(same, own, rows, traced)

    return JittedProgram(jax.jit(program, donate_argnums=donate))


class _pmap:
    """`pmap` wants a leading axis of replicas, so batches are reshaped on the way in and rows on the way out."""

    def __init__(
        self,
        function: ReplicaFunction,
        strategy: Strategy,
        options: StepOptions,
        traced: Traced,
        donate: tuple[int, ...],
    ):
        self.strategy, self.options, self.traced = strategy, options, traced

        def body(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
            token, state, outputs = function(token, state, batches, others)
            return token, state, *_sort(outputs, traced)

        assert strategy.mesh is not None  # every strategy with a transform has a mesh
        (axis,) = strategy.axes
        self._mapped = jax.pmap(
            body,
            axis_name=axis,
            # One entry for each part of `others`: with as many entries as leaves JAX would take them leaf by leaf.
            in_axes=(None, None, 0, (None, None)),
            out_axes=(None, None, None, 0, 0),
            devices=list(strategy.mesh.devices.flat),
            donate_argnums=donate,
        )
        leading = NamedSharding(strategy.mesh, PartitionSpec(axis))
        self._split = jax.jit(lambda batches: jax.tree.map(self._by_replica, batches), out_shardings=leading)
        self._merge = jax.jit(
            lambda rows: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), out_shardings=leading
        )

    def _by_replica(self, x: jax.Array) -> jax.Array:
        lead = 0 if self.options.steps_per_call == 1 else 1
        shape = (*x.shape[:lead], self.strategy.num_replicas, x.shape[lead] // self.strategy.num_replicas)
        return x.reshape(*shape, *x.shape[lead + 1 :]).swapaxes(0, lead)

    def run_into(self, box: list[Any], token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> None:
        check_rows(batches, self.strategy, self.options)
        box.extend(map(self._mapped, (token,), (state,), (self._split(batches),), (others,)))

    def outputs_of(self, results: Any) -> tuple[PyTree, ...]:
        _, _, same, own, rows = results
        return _join(same, own, self._merge(rows) if rows else rows, self.traced)

    def lower(self, token: Any, state: Any, batches: Any, others: Any) -> jax.stages.Lowered:
        check_rows(batches, self.strategy, self.options)
        return self._mapped.lower(token, state, jax.eval_shape(self._split, batches), others)


def _sort(outputs: tuple[PyTree, ...], traced: Traced) -> tuple[list[PyTree], list[PyTree], list[PyTree]]:
    """Outputs by how they leave the mesh: the same on all replicas, each replica's own, rows to be joined."""
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
