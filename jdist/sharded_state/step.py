"""A step over a state in host memory: parameters gathered on the devices, gradients reduced by parts, the update on hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist.core.context import ReplicaTrace, tracing
from jdist.core.host_sharded import HostSharded, Layout, is_spread, map_leaves
from jdist.core.per_replica import PerReplica, is_per_replica
from jdist.jaxpr.elementwise import prepared
from jdist.jaxpr.phases import Cut
from jdist.sharded_state.update import ShardedArray, evaluate
from jdist.step.divergence import hash_leaf
from jdist.step.loops import repeat
from jdist.step.mesh_program import Program
from jdist.step.microbatches import Plan, all_reduced, gradient_part, make_plan
from jdist.step.non_finite import STEP_ENTRIES, guarded
from jdist.step.outputs import LOCAL, ROWS
from jdist.step.program_spec import FiniteFlags, ProgramSpec
from jdist.step.tree_checks import check_same_state

PyTree = Any


def make_program(spec: ProgramSpec) -> Program:
    """Makes the program of a step over a state in host memory: `Backend.make_program`."""

    def program(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        if spec.options.steps_per_call == 1:
            return _SplitStep(spec, token, state, batches, others).run(token, state, batches, others)
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        step = _SplitStep(spec, token[:STEP_ENTRIES], state, first, others)

        def once(token: jax.Array, state: PyTree, batch: PyTree) -> Any:
            token, state, outputs, hashes = step.run(token, state, batch, others)
            return token, state, (outputs, hashes)

        token, state, (outputs, hashes) = repeat(spec, once, token, state, batches)
        # Here the loop over steps is outside the replicas; the axis of replicas leads all the same.
        outputs = jax.tree.map(
            lambda x: jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), x) if is_per_replica(x) else x,
            outputs,
            is_leaf=is_per_replica,
        )
        return token, state, outputs, {path: x[-1] for path, x in hashes.items()}

    return Program(program, spec)


class _SplitStep:
    """A step in its gradient part and its update part, for arguments of these shapes.

    Attributes:
        plan: the gradient part.
        update: the update part, `(token, state, others, cuts, carried) -> (token, state, outputs)`.
        results: what it returns, as shapes.
    """

    plan: Plan
    update: Any
    results: Any

    def __init__(self, spec: ProgramSpec, token: jax.Array, state: PyTree, batches: PyTree, others: PyTree):
        self.spec, self.strategy, self.options = spec, spec.strategy, spec.options
        self.layout = Layout.of(spec.strategy)
        whole, rows = PartitionSpec(), PartitionSpec(self.strategy.axes)
        traced = jax.shard_map(
            self.split, mesh=self.strategy.mesh, in_specs=(whole, whole, rows, whole), out_specs=whole, check_vma=False
        )
        state = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        jax.eval_shape(traced, token, state, batches, others)

    def split(self, token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> None:
        """Traces the step as a replica sees it, and splits it."""
        all_flags: list[FiniteFlags] = []
        plan = make_plan(
            self.strategy,
            self.spec.splittable(all_flags),
            self.options.accumulate,
            state,
            batches,
            others,
            otherwise="use `jdist.mirrored()`, which does not split a step",
        )
        if self.spec.compares_replicas:
            plan.check_averages_combined()

        def gradients(state: PyTree, batches: PyTree, others: PyTree) -> Any:
            with tracing(ReplicaTrace(self.strategy)):
                part = gradient_part(plan, state, batches, others, all_reduced(self.strategy))
            return part.combined, part.carried

        flags = all_flags[-1]
        num_outputs = len(plan.kinds) - len(flags.names)

        def run(state: PyTree, others: PyTree, combined: list[jax.Array], carried: list[jax.Array]) -> Any:
            with tracing(ReplicaTrace(self.strategy)):
                leaves, late = plan.split.update(state, others, combined, carried)
            late = [None if x is None else jnp.asarray(x) for x in late]
            if "state" not in self.spec.traced.returns:
                return state, late[:num_outputs], FiniteFlags([], [], hidden=False)
            new = check_same_state(state, jax.tree.unflatten(plan.split.state_treedef, leaves))
            finite = [x for x in late[num_outputs:] if x is not None]
            assert len(finite) == len(flags.names)  # each waits for a combined gradient
            return new, late[:num_outputs], FiniteFlags(flags.names, finite, hidden=False)

        def update(token: jax.Array, state: PyTree, *rest: PyTree) -> Any:
            return guarded(run, token, state, rest, self.spec.policy, self.spec.flag_names, (), self.spec.loss_scaling)

        combined, carried = jax.eval_shape(gradients, state, batches, others)
        arguments = token, state, others, combined, carried
        closed, results = jax.make_jaxpr(update, return_shape=True)(*arguments)
        self.plan, self.results = plan, results
        self.update = prepared(closed, jax.tree.leaves(arguments), self.strategy.num_replicas)

    def run(self, token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        """Runs one optimiser step, seen from outside of the replicas.

        Returns:
            `(token, state, outputs, hashes)`; the hashes are of what each replica wrote to leaves in parts without a
            reduction, uint32 [replicas], by the leaf's path.
        """
        cuts, carried, early, hashes = self.gradients(state, batches, others)
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_spread)
        values = [ShardedArray(x.stored, x.shape, on_host=True) if is_spread(x) else x for x in leaves]
        arguments = [token, *values, *jax.tree.leaves(others), *cuts, *carried]
        shapes = jax.tree.leaves(self.results)
        kept = [1 <= i <= len(leaves) and self.layout.is_spread(s.shape, s.dtype) for i, s in enumerate(shapes)]
        # `late` has no leaf for an output that did not wait for the update.
        names, late = self.plan.kinds, self.results[2]
        kinds = [None] * (1 + len(leaves)) + [k for k, x in zip(names, late, strict=False) if x is not None]
        results, late_hashes = evaluate(self.strategy, self.layout, self.update, arguments, kept, kinds)
        # A loop over steps needs its carry back where it was, so the last thing is a copy to the host.
        results = [
            HostSharded(jax.device_put(x, self.layout.host), s.shape) if keep else x
            for x, s, keep in zip(results, shapes, kept, strict=True)
        ]
        new_state = jax.tree.unflatten(treedef, results[1 : 1 + len(leaves)])
        late = jax.tree.unflatten(jax.tree.structure(self.results[2]), results[1 + len(leaves) :])
        outputs = self.outputs(early, late)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state, is_leaf=is_spread)]
        carried_leaves = [cut.leaf for cut in self.plan.split.carried]
        hashes_by_path = {paths[i]: x for i, x in zip(carried_leaves, hashes, strict=False)}
        if self.options.check_replicas:
            hashes_by_path |= {paths[i - 1]: x for i, x in late_hashes.items()}
        return results[0], new_state, outputs, hashes_by_path

    def gradients(self, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        """Runs the gradient part on all replicas.

        Returns:
            `(cuts, carried, outputs, hashes of carried)`; the first two in parts where they are large.
        """
        plan, layout, axes = self.plan, self.layout, self.strategy.axes
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_spread)
        read = {i: x for i, x in enumerate(leaves) if is_spread(x) and i in plan.split.read}
        copies = {i: jax.device_put(x.stored, layout.device) for i, x in read.items()}
        whole = {i: x for i, x in enumerate(leaves) if not is_spread(x)}
        cut_shapes = [shape.shape for cut in plan.split.cuts for shape in cut.shapes]
        carried_shapes: list[tuple[int, ...]] = []  # known once the body is traced

        def body(copies: Any, whole: Any, batches: PyTree, others: PyTree) -> Any:
            def value(i: int, x: Any) -> jax.Array:
                if i in whole:
                    return whole[i]
                if i not in copies:  # not read
                    return jnp.zeros(x.shape, x.dtype)
                return layout.restore(jax.lax.all_gather(copies[i], axes, tiled=True), x.shape)

            now = jax.tree.unflatten(treedef, [value(i, x) for i, x in enumerate(leaves)])
            whole_reduced = all_reduced(self.strategy)
            in_place: list[bool] = []

            def combine(cuts: Sequence[Cut], arrays: list[list[jax.Array]]) -> list[list[jax.Array]]:
                """Gives each replica its part of gradients that the update part alone reads."""
                scatters = [
                    cut.collective.kind == "gradient" and not cut.is_read_again and cut.collective.op in ("sum", "mean")
                    for cut in cuts
                ]
                rest = [(cut, xs) for cut, xs, scattered in zip(cuts, arrays, scatters, strict=True) if not scattered]
                reduced = iter(whole_reduced([cut for cut, _ in rest], [xs for _, xs in rest]))
                in_place.extend(s for cut, s in zip(cuts, scatters, strict=True) for _ in cut.shapes)
                return [
                    [self.scattered(x, cut.collective.op) for x in xs] if scattered else next(reduced)
                    for cut, xs, scattered in zip(cuts, arrays, scatters, strict=True)
                ]

            with tracing(ReplicaTrace(self.strategy)):
                part = gradient_part(plan, now, batches, others, combine)
            carried_shapes[:] = [x.shape for x in part.carried]
            combined = [x if done else self.local_part(x) for x, done in zip(part.combined, in_place, strict=True)]
            outputs = {i: x for i, x in enumerate(part.outputs) if x is not None}
            varying = {i: x for i, x in outputs.items() if plan.kinds[i] in (LOCAL, ROWS)}
            shared = {i: x for i, x in outputs.items() if i not in varying}
            # Hashed now: once each replica keeps only its part, a difference could not be found.
            hashes = [hash_leaf(x)[None] for x in part.carried] if self.options.check_replicas else []
            carried = [self.local_part(x) for x in part.carried]
            return *self.sorted(combined, cut_shapes), *self.sorted(carried, carried_shapes), shared, varying, hashes

        same, parts = PartitionSpec(), PartitionSpec(axes)
        cut_parts, cuts, carried_parts, carried, shared, varying, hashes = jax.shard_map(
            body,
            mesh=self.strategy.mesh,
            in_specs=(parts, same, parts, same),
            out_specs=(parts, same, parts, same, same, parts, parts),
            check_vma=False,
        )(copies, whole, batches, others)

        def joined(
            parts: dict[int, jax.Array], whole: dict[int, jax.Array], shapes: list[tuple[int, ...]]
        ) -> list[Any]:
            return [ShardedArray(parts[i], s, on_host=False) if i in parts else whole[i] for i, s in enumerate(shapes)]

        outputs = {**shared, **varying}
        return (
            joined(cut_parts, cuts, cut_shapes),
            joined(carried_parts, carried, carried_shapes),
            [outputs.get(i) for i in range(len(plan.kinds))],
            hashes,
        )

    def scattered(self, x: jax.Array, op: str) -> jax.Array:
        """Sums or averages a gradient over the replicas; of a large one each replica receives its part."""
        if self.layout.is_spread(x.shape, x.dtype):
            total = jax.lax.psum_scatter(self.layout.store(x), self.strategy.axes, tiled=True)
        else:
            total = jax.lax.psum(x, self.strategy.axes)
        return total / self.strategy.num_replicas if op == "mean" else total

    def local_part(self, x: jax.Array) -> jax.Array:
        """Takes this replica's part of an array that all hold."""
        if not self.layout.is_spread(x.shape, x.dtype):
            return x
        stored = self.layout.store(x)
        rows = stored.shape[0] // self.layout.num_parts
        return jax.lax.dynamic_slice_in_dim(stored, jax.lax.axis_index(self.strategy.axes) * rows, rows)

    def sorted(self, values: list[jax.Array], shapes: list[tuple[int, ...]]) -> tuple[Any, Any]:
        """Sorts values by their place: those in parts, and those that all replicas hold."""
        in_parts = {i for i, (x, s) in enumerate(zip(values, shapes, strict=True)) if self.layout.is_spread(s, x.dtype)}
        parts, whole = ({i: x for i, x in enumerate(values) if (i in in_parts) == part} for part in (True, False))
        return parts, whole

    def outputs(self, early: list[Any], late: list[Any]) -> tuple[PyTree, ...]:
        """Merges the step's outputs: `late` those that waited for the update, `early` the others."""
        num_flags = len(self.plan.kinds) - len(late)
        leaves = [before if after is None else after for before, after in zip(early, late, strict=False)]
        *outputs, _ = jax.tree.unflatten(self.plan.split.outputs_treedef, [*leaves, *[None] * num_flags])
        return tuple(
            PerReplica(tree) if role == "per_replica" else tree
            for role, tree in zip(self.spec.traced.output_roles, outputs, strict=True)
        )
