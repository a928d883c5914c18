"""Gradient accumulation: a step's phases over microbatches, one all-reduce a phase, one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jdist.core.collective_marks import Collective
from jdist.core.context import ReplicaTrace, tracing
from jdist.core.strategy import Strategy
from jdist.jaxpr.phases import Cut, Phase, Split
from jdist.jaxpr.split import axis_of_rows, split
from jdist.replica import collectives, gradients
from jdist.step.divergence import check_averages_combined
from jdist.step.error_feedback import ErrorFeedback
from jdist.step.loops import scan
from jdist.step.notices import notice
from jdist.step.outputs import LOCAL, METRIC, ROWS, OutputKind, check_means, rows_of
from jdist.step.program_spec import FiniteFlags, ProgramSpec, Pure, RunFn
from jdist.step.signature import Others
from jdist.support.arrays import promote_types
from jdist.typing import PyTree

# (cuts of a phase, the arrays of this replica for each) -> those of all replicas
Combine = Callable[[Sequence[Cut], list[list[jax.Array]]], list[list[jax.Array]]]


@dataclass(frozen=True)
class Plan:
    """A step that was split for `k` microbatches."""

    strategy: Strategy
    k: int
    split: Split  # as one microbatch sees the step
    kinds: list[OutputKind]  # how each output is combined over the replicas

    def check(self, spec: ProgramSpec) -> None:
        """Refuses moving averages of each replica's own rows, and warns of what `notice` finds."""
        traced, n = self.split.traced, self.strategy.num_replicas
        if spec.compares_replicas:
            state = jax.tree.unflatten(self.split.state_treedef, traced.new_state)
            check_averages_combined(traced.closed, traced.state, traced.new_state, traced.batch, state, (n, self.k))
        self.notice(spec.name)

    def notice(self, name: str) -> None:
        """Warns of what `notices.notice` finds in the step called `name`."""
        traced, n = self.split.traced, self.strategy.num_replicas if self.strategy.bound_axes else 1
        notice(name, traced.closed, traced.batch, self.k * n, [traced.microbatch])


class PhaseResults(NamedTuple):
    """The results of the phases, over all microbatches and replicas."""

    combined: list[jax.Array]  # the results of all cuts
    carried: list[jax.Array]  # the state leaves that phases wrote
    outputs: list[jax.Array | None]  # None for outputs that wait for the update


def microbatched(spec: ProgramSpec) -> RunFn:
    """Builds a step of `options.accumulate` microbatches, equal to one on as many more replicas."""
    strategy = spec.strategy

    def run(state: PyTree, batches: PyTree, others: Others) -> tuple[PyTree, tuple[PyTree, ...], FiniteFlags]:
        seen: list[FiniteFlags] = []
        feedback = None
        if strategy.keeps_residuals:
            state, feedback = ErrorFeedback.of(strategy, spec.name, state)
        plan = make_plan(strategy, spec.splittable(seen), spec.options.accumulate, state, batches, others)
        plan.check(spec)
        with tracing(ReplicaTrace(strategy, sum_gradient=feedback.sum if feedback else None)):
            of_phases = gradient_part(plan, state, batches, others, all_reduced(strategy))
            leaves, late = plan.split.update(state, others, of_phases.combined, of_phases.carried)
            late = finish_late(plan, late)
        outputs = [early if after is None else after for early, after in zip(of_phases.outputs, late, strict=True)]
        *outputs, finite = jax.tree.unflatten(plan.split.outputs_treedef, outputs)
        new = jax.tree.unflatten(plan.split.state_treedef, leaves)
        flags = FiniteFlags(seen[-1].names, finite, seen[-1].hidden)
        return (feedback.close(new) if feedback else new), tuple(outputs), flags

    return run


def make_plan(
    strategy: Strategy,
    pure: Pure,
    k: int,
    state: PyTree,
    batches: PyTree,
    others: PyTree,
    *,
    parts: Sequence[int] = (),
    otherwise: str = "leave `accumulate` at 1",
) -> Plan:
    """Splits a step for `k` microbatches, see `jaxpr.split.split`."""
    kinds: list[OutputKind] = []

    def without_kinds(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, PyTree]:
        new_state, outputs, kinds[:] = pure(state, batches, others)
        return new_state, outputs

    shapes = jax.eval_shape(lambda x: jax.tree.map(lambda leaf: leaf[0], microbatches(strategy, x, k)), batches)
    step = split(
        strategy,
        without_kinds,
        state,
        shapes,
        others,
        num_microbatches=k,
        parts=parts,
        otherwise=otherwise,
    )
    averaged = [v and kind == METRIC for v, kind in zip(step.varies, kinds, strict=True)]
    check_means(jax.tree.unflatten(step.outputs_treedef, step.output_shapes), averaged, rows_of(shapes))
    return Plan(strategy, k, step, kinds)


def microbatches(strategy: Strategy, batches: PyTree, k: int) -> PyTree:
    """Cuts a batch into `k` microbatches, stacked."""
    # Microbatch `m` of replica `r` has the rows of replica `r * k + m` among `k` times as many.

    def cut(x: jax.Array) -> jax.Array:
        parts = x.reshape(k, x.shape[0] // k, *x.shape[1:])
        if not strategy.is_global_view or k == 1 or strategy.batch_sharding is None:
            return parts
        # In the global view each microbatch is spread over all devices again.
        spec = jax.sharding.PartitionSpec(None, *strategy.batch_sharding.spec)
        return jax.lax.with_sharding_constraint(parts, strategy.batch_sharding.update(spec=spec))

    return jax.tree.map(cut, batches)


def gradient_part(plan: Plan, state: PyTree, batches: PyTree, others: PyTree, combine: Combine) -> PhaseResults:
    """Runs the phases over all microbatches and combines the replicas' results, under a trace."""
    # State leaves that no phase reads may hold any values of their shape.
    step, micro = plan.split, microbatches(plan.strategy, batches, plan.k)
    old = jax.tree.leaves(state)
    combined: list[jax.Array] = []
    carried: dict[int, jax.Array] = {}
    outputs: dict[int, jax.Array] = {}
    for phase in step.phases:
        prepared = phase.prepare(state, others, combined)
        initial = {n: old[step.carried[n].leaf] for n in phase.carried if step.carried[n].adds_up}
        operands, leaves, results = _over_microbatches(plan, phase, prepared, initial, micro)
        carried.update(leaves)
        outputs.update(results)
        # Metrics go with the sums of the phase, in one all-reduce.
        means = [i for i in results if plan.kinds[i] == METRIC and step.varies[i]]
        metrics = Cut(Collective("value", "mean"), (), (), is_read_again=False)
        *sums, averages = combine([*phase.cuts, metrics], [*operands, [outputs[i] for i in means]])
        combined += [x for arrays in sums for x in arrays]
        outputs.update(zip(means, averages, strict=True))
    return PhaseResults(
        combined, [carried[n] for n in range(len(step.carried))], [outputs.get(i) for i in range(len(plan.kinds))]
    )


def all_reduced(strategy: Strategy) -> Combine:
    """Brings the cuts of a phase together by one all-reduce; compressed gradients each by themselves, with their residuals."""

    def combine(cuts: Sequence[Cut], arrays: list[list[jax.Array]]) -> list[list[jax.Array]]:
        if collectives.num_replicas() == 1:
            return arrays
        combined = dict(enumerate(arrays))
        summed = []
        for i, cut in enumerate(cuts):
            op = cut.collective.op
            if op == "gather":
                axes = [axis_of_rows(x.shape, whole.shape) for x, whole in zip(arrays[i], cut.shapes, strict=True)]
                combined[i] = list(map(collectives.all_gather, arrays[i], axes))
            elif op in ("max", "min"):
                combined[i] = collectives.all_reduce(arrays[i], op)
            elif cut.collective.kind == "gradient" and strategy.keeps_residuals:
                loss, grads = gradients.reduce_gradients(arrays[i][0], arrays[i][1:], op)
                combined[i] = [loss, *grads]
            else:
                summed.append(i)
        combined.update(zip(summed, collectives.all_reduce([arrays[i] for i in summed], "sum"), strict=True))
        size = collectives.num_replicas()
        return [
            [x / size for x in combined[i]] if i in summed and cut.collective.op == "mean" else combined[i]
            for i, cut in enumerate(cuts)
        ]

    return combine


def finish_late(plan: Plan, late: list[jax.Array | None]) -> list[jax.Array | None]:
    """Averages metrics of the update part that replicas compute of their own number; gives per-replica results their axis."""
    places = [i for i, x in enumerate(late) if x is not None and plan.split.varies[i] and plan.kinds[i] == METRIC]
    averaged = collectives.all_reduce([late[i] for i in places], "mean") if places else []
    results = {**dict(enumerate(late)), **dict(zip(places, averaged, strict=True))}
    return [
        jnp.broadcast_to(x, (plan.k, *jnp.shape(x))) if x is not None and plan.kinds[i] == LOCAL else x
        for i, x in results.items()
    ]


def _over_microbatches(
    plan: Plan, phase: Phase, prepared: list[jax.Array], initial: dict[int, jax.Array], micro: PyTree
) -> tuple[list[list[jax.Array]], dict[int, jax.Array], dict[int, jax.Array]]:
    """Runs a phase over one replica's microbatches: cut operands, carried leaves, outputs."""
    # `initial` has the old values of the leaves that microbatches add to, by place.
    k = plan.k
    ways: list[Way] = [cut.collective.op for cut in phase.cuts for _ in cut.shapes]
    ways.extend("sum" if n in initial else "mean" for n in phase.carried)
    of_kind: dict[OutputKind, Way] = {METRIC: "mean", LOCAL: "stack", ROWS: "gather"}
    # A metric of parameters alone, which the phase gathers, is the same of every microbatch: any of them.
    same = {i for i in phase.outputs if plan.kinds[i] == METRIC and not plan.split.varies[i]}
    ways.extend("max" if i in same else of_kind[plan.kinds[i]] for i in phase.outputs)
    wholes = [shape.shape for cut in phase.cuts for shape in cut.shapes]

    def one(number: jax.Array, batch: PyTree) -> list[jax.Array]:
        operands, carried, outputs = phase.run(prepared, batch, number)
        added = [new - initial[n] if n in initial else new for n, new in zip(phase.carried, carried, strict=True)]
        return [jnp.asarray(x) for x in (*(x for each in operands for x in each), *added, *outputs)]

    first = jax.tree.map(lambda x: x[0], micro)
    if k == 1:
        values = [x[None] if way == "stack" else x for x, way in zip(one(jnp.int32(0), first), ways, strict=True)]
    else:
        shapes = jax.eval_shape(one, jnp.int32(0), first)
        # Summing the stacked results would keep k gradients alive, so what is summed is part of the carry.
        zeros = [
            jnp.zeros(s.shape, _wide(s.dtype)) if way in SUMMED else None for s, way in zip(shapes, ways, strict=True)
        ]

        def add(totals: list[Any], x: tuple[jax.Array, PyTree]) -> Any:
            now = one(*x)
            sums = [
                None if total is None else total + y.astype(total.dtype) for total, y in zip(totals, now, strict=True)
            ]
            return sums, [y if total is None else None for total, y in zip(totals, now, strict=True)]

        totals, stacked = scan(plan.strategy, add, zeros, (jnp.arange(k, dtype=jnp.int32), micro))
        values = []
        for place, (way, total, rows, shape) in enumerate(zip(ways, totals, stacked, shapes, strict=True)):
            if way in SUMMED:
                values.append((total / k if way == "mean" else total).astype(shape.dtype))
            elif way == "gather":
                axis = axis_of_rows(shape.shape, wholes[place]) if place < len(wholes) else 0
                values.append(_joined(rows, axis))
            else:
                values.append(rows if way == "stack" else rows.max(0) if way == "max" else rows.min(0))
    rest = iter(values)
    operands = [[next(rest) for _ in cut.shapes] for cut in phase.cuts]
    carried = {n: initial[n] + next(rest) if n in initial else next(rest) for n in phase.carried}
    return operands, carried, {i: next(rest) for i in phase.outputs}


# How the values of microbatches come together: "stack" keeps them apart.
Way = Literal["sum", "mean", "max", "min", "gather", "stack"]
SUMMED = ("sum", "mean")


def _joined(rows: jax.Array, axis: int) -> jax.Array:
    """Joins stacked arrays end to end along one of their axes."""
    rows = jnp.moveaxis(rows, 0, axis)
    return rows.reshape(*rows.shape[:axis], rows.shape[axis] * rows.shape[axis + 1], *rows.shape[axis + 2 :])


def _wide(dtype: Any) -> Any:
    """Chooses the dtype to add up in: float32 for half precision, which would lose small microbatches."""
    return promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
