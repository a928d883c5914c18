"""A step over a state in parts: parameters gathered on the devices, gradients reduced by parts, the update part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jdist.core.context import ReplicaTrace, tracing
from jdist.core.division import FormsByPath, forms
from jdist.core.layout import Form, Layout, over_replicas
from jdist.core.per_replica import PerReplica, is_per_replica
from jdist.core.sharded_leaf import ShardedLeaf, is_sharded_leaf, map_leaves
from jdist.jaxpr.elementwise import prepared
from jdist.jaxpr.phases import Cut
from jdist.jaxpr.split import PartsVaryError
from jdist.sharded_state.gathering import READ_OUTSIDE, gathered_at_start, gathering, on_parts, paths_of
from jdist.sharded_state.update import ShardedArray, evaluate
from jdist.step.divergence import hash_leaf
from jdist.step.loops import repeat
from jdist.step.mesh_program import Program
from jdist.step.microbatches import Plan, all_reduced, gradient_part, make_plan
from jdist.step.non_finite import STEP_ENTRIES, guarded
from jdist.step.outputs import LOCAL, ROWS
from jdist.step.program_spec import FiniteFlags, ProgramSpec
from jdist.step.tree_checks import check_same_state
from jdist.typing import PyTree


def make_program(spec: ProgramSpec) -> Program:
    """Makes the program of a step over a state in parts: `Backend.make_program`."""

    def program(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        if spec.options.steps_per_call == 1:
            return _SplitStep(spec, token, state, batches, others).run(token, state, batches, others)
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        step = _SplitStep(spec, token[:STEP_ENTRIES], state, first, others)

        def once(token: jax.Array, state: PyTree, batch: PyTree) -> Any:
            token, state, outputs, hashes = step.run(token, state, batch, others)
            return token, state, (outputs, hashes)

        token, state, (outputs, hashes) = repeat(spec, once, token, state, batches)
        # The compiler lays out a loop's carry as it likes.
        state = step.laid_out(state)
        # Here the loop over steps is outside the replicas; the axis of replicas leads all the same.
        outputs = jax.tree.map(
            lambda x: jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), x) if is_per_replica(x) else x,
            outputs,
            is_leaf=is_per_replica,
        )
        return token, state, outputs, {path: x[-1] for path, x in hashes.items()}

    return Program(program, spec)


class _SplitStep:
    """A step in its gradient part and its update part, for arguments of these shapes."""

    plan: Plan  # the gradient part
    update: Any  # `(token, state, others, cuts, carried) -> (token, state, outputs)`
    results: Any  # of the update, as shapes

    def __init__(self, spec: ProgramSpec, token: jax.Array, state: PyTree, batches: PyTree, others: PyTree):
        self.spec, self.strategy, self.options = spec, spec.strategy, spec.options
        self.layout = Layout.of(spec.strategy)
        whole, rows = PartitionSpec(), PartitionSpec(self.strategy.axes)
        traced = over_replicas(self.strategy, self.split, (whole, whole, rows, whole), whole)
        leaves = jax.tree.leaves_with_path(state, is_leaf=is_sharded_leaf)
        self.leaves = [x for _, x in leaves]
        self.paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        self.names = paths_of(state)
        self.forms = forms(self.strategy, state)
        self.by_path = FormsByPath(self.layout, self.paths, self.forms)
        parts = self.strategy.parts
        # Leaves in parts are gathered where they are used; otherwise before the step.
        self.gathers_late = parts is not None and parts.of == "state" and parts.memory == "device"
        self.in_parts = tuple(i for i, form in enumerate(self.forms) if self.gathers_late and form.is_cut)
        state = map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        jax.eval_shape(traced, token, state, batches, others)

    def split(self, token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> None:
        """Traces the step as a replica sees it, and splits it."""
        all_flags: list[FiniteFlags] = []
        pure = self.spec.splittable(all_flags)

        gathers = self.spec.traced.gathers

        def planned() -> Plan:
            gathers.clear()
            return make_plan(
                self.strategy,
                gathering(pure, self.by_path, gathers) if self.in_parts else pure,
                self.options.accumulate,
                state,
                batches,
                self.with_parts(others),
                parts=self.in_parts,
                otherwise="use `jdist.mirrored()`, which does not split a step, if a device can hold the state",
            )

        try:
            plan = planned()
        except PartsVaryError:  # a gradient by what each replica computed of its own rows: whole, as it has it
            self.in_parts = ()
            plan = planned()
        if not self.gathers_late:
            gathers += gathered_at_start(plan.split, state, [i for i in plan.split.read if self.forms[i].is_cut])
        plan.check(self.spec)
        flags = all_flags[-1]
        num_outputs = len(plan.kinds) - len(flags.names)

        def run(state: PyTree, others: PyTree, combined: list[jax.Array], carried: list[jax.Array]) -> Any:
            with tracing(ReplicaTrace(self.strategy)):
                # The update reads no parts.
                leaves, late = plan.split.update(state, self.with_parts(others), combined, carried)
            late = [None if x is None else jnp.asarray(x) for x in late]
            if "state" not in self.spec.traced.returns:
                return state, late[:num_outputs], FiniteFlags([], [], hidden=False)
            new = check_same_state(state, jax.tree.unflatten(plan.split.state_treedef, leaves))
            finite = [x for x in late[num_outputs:] if x is not None]
            assert len(finite) == len(flags.names)  # each waits for a combined gradient
            return new, late[:num_outputs], FiniteFlags(flags.names, finite, hidden=False)

        def update(token: jax.Array, state: PyTree, *rest: PyTree) -> Any:
            return guarded(run, token, state, rest, self.spec.policy, self.spec.flag_names, (), self.spec.loss_scaling)

        combined = [shape for cut in plan.split.cuts for shape in cut.shapes]
        self.cut_forms = [
            self.form_of(operand, shape)
            for cut in plan.split.cuts
            for operand, shape in zip(cut.operands, cut.shapes, strict=True)
        ]
        new = [plan.split.traced.new_state[each.leaf].aval for each in plan.split.carried]
        arguments = token, state, others, combined, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in new]
        closed, results = jax.make_jaxpr(update, return_shape=True)(*arguments)
        self.plan, self.results = plan, results
        self.update = prepared(closed, jax.tree.leaves(arguments))

    def run(self, token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        """Runs one optimiser step, outside of the replicas: `(token, state, outputs, hashes)`."""
        # The hashes, uint32 [replicas] by path, are of the values that each replica wrote to leaves
        # in parts without a reduction.
        cuts, carried, early, hashes = self.gradients(state, batches, others)
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_sharded_leaf)
        on_host = self.layout.on_host
        values = [
            ShardedArray(x.stored, form, on_host, path) if form.is_cut else x
            for x, form, path in zip(leaves, self.forms, self.names, strict=True)
        ]
        arguments = [token, *values, *jax.tree.leaves(others), *cuts, *carried]
        shapes = jax.tree.leaves(self.results)
        of_leaves = [form if form.is_cut else None for form in self.forms]
        kept = [None, *of_leaves, *[None] * (len(shapes) - 1 - len(leaves))]
        # `late` has no leaf for an output that did not wait for the update.
        names, late = self.plan.kinds, self.results[2]
        kinds = [None] * (1 + len(leaves)) + [k for k, x in zip(names, late, strict=False) if x is not None]
        results, late_hashes = evaluate(
            self.strategy, self.layout, self.update, arguments, kept, kinds, self.spec.traced.gathers
        )
        if on_host:  # a loop over steps needs its carry back where it was, so the last thing is a copy to the host
            results = [
                x if form is None else jax.device_put(x, self.layout.kept(form))
                for x, form in zip(results, kept, strict=True)
            ]
        new = [
            ShardedLeaf(x, form.of) if form.is_cut else self.in_place(x, self.layout.kept(form))
            for x, form in zip(results[1 : 1 + len(leaves)], self.forms, strict=True)
        ]
        new_state = jax.tree.unflatten(treedef, new)
        late = jax.tree.unflatten(jax.tree.structure(self.results[2]), results[1 + len(leaves) :])
        outputs = self.outputs(early, late)
        carried_leaves = [cut.leaf for cut in self.plan.split.carried]
        hashes_by_path = {self.paths[i]: x for i, x in zip(carried_leaves, hashes, strict=False)}
        if self.options.check_replicas:
            hashes_by_path |= {self.paths[i - 1]: x for i, x in late_hashes.items()}
        return self.in_place(results[0], self.layout.whole), new_state, outputs, hashes_by_path

    def in_place(self, x: Any, sharding: NamedSharding | None) -> Any:
        """Lays out what leaves the step where the compiler might choose how to spread it over a replica's devices."""
        return jax.lax.with_sharding_constraint(x, sharding) if self.strategy.model_axes else x

    def laid_out(self, state: PyTree) -> PyTree:
        """Lays out a state as it came in."""
        layout, constrain = self.layout, jax.lax.with_sharding_constraint
        if layout.on_host:
            return state
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_sharded_leaf)
        laid_out = [
            ShardedLeaf(constrain(x.stored, layout.kept(form)), x.shape)
            if form.is_cut
            else constrain(x, layout.kept(form))
            for x, form in zip(leaves, self.forms, strict=True)
        ]
        return jax.tree.unflatten(treedef, laid_out)

    def gradients(self, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        """Runs the gradient part on all replicas: `(cuts, carried, outputs, hashes of carried)`."""
        # Large cuts and carried leaves are in parts.
        plan, layout = self.plan, self.layout
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_sharded_leaf)
        read = {*plan.split.read, *self.in_parts}
        copies = {i: self.on_devices(i, x) for i, x in enumerate(leaves) if is_sharded_leaf(x) and i in read}
        whole = {i: x for i, x in enumerate(leaves) if not is_sharded_leaf(x)}
        carried_forms = [self.forms[each.leaf] for each in plan.split.carried]

        def body(copies: Any, whole: Any, batches: PyTree, others: PyTree) -> Any:
            parts = {i: copies[i] for i in plan.split.read if i in copies}

            def of_whole(gathered: dict[int, jax.Array], others: PyTree) -> Any:
                def value(i: int, x: Any) -> jax.Array:
                    known = gathered.get(i, whole.get(i))
                    return jnp.zeros(x.shape, x.dtype) if known is None else known

                now = jax.tree.unflatten(treedef, [value(i, x) for i, x in enumerate(leaves)])
                with tracing(ReplicaTrace(self.strategy)):
                    return gradient_part(plan, now, batches, self.with_parts(others, copies), self.combine)

            # What the step reads elsewhere than in a gradient, an evaluation all of it.
            if parts and self.gathers_late:
                numbers = sorted(parts)
                of_read = {place: self.forms[i] for place, i in enumerate(numbers)}
                names = {place: self.names[i] for place, i in enumerate(numbers)}
                gathers = self.spec.traced.gathers
                run = on_parts(layout, of_whole, of_read, names, gathers, READ_OUTSIDE, gathers_again=False)
                part = run(parts, others)
            else:
                part = of_whole({i: layout.all_gather(x, self.forms[i]) for i, x in parts.items()}, others)
            outputs = {i: x for i, x in enumerate(part.outputs) if x is not None}
            varying = {i: x for i, x in outputs.items() if plan.kinds[i] in (LOCAL, ROWS)}
            shared = {i: x for i, x in outputs.items() if i not in varying}
            # Hashed now: once each replica keeps only its part, a difference could not be found.
            hashes = [hash_leaf(x)[None] for x in part.carried] if self.options.check_replicas else []
            combined, carried = self.sorted(part.combined, self.cut_forms), self.sorted(part.carried, carried_forms)
            return *combined, *carried, shared, varying, hashes

        same, rows = PartitionSpec(), PartitionSpec(self.strategy.axes)
        cut_specs, carried_specs, copy_specs = map(self.specs, (self.cut_forms, carried_forms, self.forms))
        cut_parts, whole_cuts, carried_parts, whole_carried, shared, varying, hashes = over_replicas(
            self.strategy,
            body,
            in_specs=({i: copy_specs[i] for i in copies}, same, rows, same),
            out_specs=(cut_specs, same, carried_specs, same, same, rows, rows),
        )(copies, whole, batches, others)
        shared, varying = (
            {i: self.in_place(x, sharding) for i, x in each.items()}
            for each, sharding in ((shared, self.layout.whole), (varying, self.strategy.batch_sharding))
        )
        outputs = {**shared, **varying}

        def joined(parts: dict[int, jax.Array], whole: dict[int, jax.Array], forms: Sequence[Form]) -> list[Any]:
            parted = {i: ShardedArray(x, forms[i], on_host=False) for i, x in parts.items()}
            return [parted[i] if i in parted else whole[i] for i in range(len(forms))]

        return (
            joined(cut_parts, whole_cuts, self.cut_forms),
            joined(carried_parts, whole_carried, carried_forms),
            [outputs.get(i) for i in range(len(plan.kinds))],
            hashes,
        )

    def with_parts(self, others: PyTree, parts: dict[int, jax.Array] | None = None) -> PyTree:
        """Adds to the further arguments the parts that gradients are taken of; without any, zeros in their place."""
        if not self.in_parts:
            return others
        if parts is not None:
            return others, [parts[i] for i in self.in_parts]
        shapes = [(self.forms[i].part(self.layout.num_parts), self.leaves[i].dtype) for i in self.in_parts]
        return others, [jnp.zeros(*each) for each in shapes]

    def on_devices(self, number: int, x: ShardedLeaf) -> jax.Array:
        """Copies the stored array of a leaf to the devices, unless it is there."""
        return jax.device_put(x.stored, self.layout.device(self.forms[number])) if self.layout.on_host else x.stored

    def combine(self, cuts: Sequence[Cut], arrays: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Brings the cuts of a phase together; of gradients that the update alone reads each replica receives its part."""
        scattered = [cut.collective.kind == "gradient" and cut.collective.op in ("sum", "mean") for cut in cuts]
        rest = [(cut, xs) for cut, xs, done in zip(cuts, arrays, scattered, strict=True) if not done]
        reduced = iter(all_reduced(self.strategy)([cut for cut, _ in rest], [xs for _, xs in rest]))
        return [
            [self.gradient(cut, x, self.form_of(x.shape, shape)) for x, shape in zip(xs, cut.shapes, strict=True)]
            if done
            else next(reduced)
            for cut, xs, done in zip(cuts, arrays, scattered, strict=True)
        ]

    def form_of(self, operand: tuple[int, ...], combined: jax.ShapeDtypeStruct) -> Form:
        """Finds how what a cut combines is kept for the update, by the shape of its operand."""
        if operand != combined.shape:  # a gradient by a part
            return self.by_path.of_part(combined.shape, operand)
        return self.by_path.find("", combined.shape, combined.dtype)

    def gradient(self, cut: Cut, x: jax.Array, form: Form) -> jax.Array:
        """Sums or averages a gradient over the replicas; of a large one each replica receives its part."""
        layout, axes = self.layout, self.strategy.bound_axes
        between = tuple(axis for axis in axes if axis not in layout.axes)
        if x.shape != form.of:  # a gradient by a part
            total = jax.lax.psum(x, between) if between else x
        elif form.is_cut and not cut.is_read_again:
            total = layout.sum_scatter(x, form)
            total = jax.lax.psum(total, between) if between else total
        else:
            total = jax.lax.psum(x, axes) if axes else x
        total = total / self.strategy.num_replicas if cut.collective.op == "mean" else total
        return layout.all_gather(total, form) if total.shape != form.of and cut.is_read_again else total

    def sorted(self, values: list[jax.Array], forms: Sequence[Form]) -> tuple[Any, Any]:
        """Sorts values by their place, those in parts and those that all replicas hold; cuts the former."""
        pairs = list(enumerate(zip(values, forms, strict=True)))
        parts = {i: x if x.shape != form.of else self.layout.own_part(x, form) for i, (x, form) in pairs if form.is_cut}
        return parts, {i: x for i, (x, form) in pairs if not form.is_cut}

    def specs(self, forms: Sequence[Form]) -> dict[int, PartitionSpec]:
        """Lists how what is cut is cut, by place."""
        return {i: self.layout.spec(form) for i, form in enumerate(forms) if form.is_cut}

    def outputs(self, early: list[Any], late: list[Any]) -> tuple[PyTree, ...]:
        """Merges the step's outputs: `late` those that waited for the update, `early` the others."""
        num_flags = len(self.plan.kinds) - len(late)
        leaves = [before if after is None else after for before, after in zip(early, late, strict=False)]
        *outputs, _ = jax.tree.unflatten(self.plan.split.outputs_treedef, [*leaves, *[None] * num_flags])
        return tuple(
            PerReplica(tree) if role == "per_replica" else tree
            for role, tree in zip(self.spec.traced.output_roles, outputs, strict=True)
        )
