"""A step taken apart for a parameter server: what a worker computes, and what the servers do with it.

The step is split where gradients are combined (`boundary.split`, as for gradient accumulation). The gradient part
becomes the worker's function: parameters and a batch in; gradients, metrics and a few scalars out. The update part is
sorted into units (`update.sort_update`), each of which lives on one server.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist.core.context import ReplicaTrace, tracing
from jdist.errors import BoundaryError
from jdist.jaxpr import graph
from jdist.jaxpr.elementwise import prepared
from jdist.jaxpr.phases import Split
from jdist.ps.program.affine_state import Carrying, find_carrying
from jdist.ps.program.update_units import Update, sort_update
from jdist.step.microbatches import Plan, all_reduced, gradient_part, make_plan
from jdist.step.outputs import LOCAL, ROWS, OutputKind
from jdist.step.program_spec import FiniteFlags, ProgramSpec, Pure
from jdist.step.tree_checks import check_same_state
from jdist.support.arrays import is_key

PyTree = Any


@dataclass(frozen=True)
class StepParts:
    """A step in the form in which it travels. Arrays are numbered, and PRNG keys travel as their data.

    Attributes:
        read: numbers of the state's leaves that the worker reads.
        pushed: numbers of the arrays that it pushes, among those that the update part can read.
        update: what the servers do.
        outputs_treedef: the tree of what the step returns beside the state.
        spec: the step, and how it is run.
        traced: what tracing it told.
    """

    read: tuple[int, ...]
    pushed: tuple[int, ...]
    update: Update
    outputs_treedef: Any
    spec: ProgramSpec
    traced: TracedStep

    @functools.cached_property
    def identity(self) -> tuple[Any, ...]:
        """Equal for steps that read, push and update alike, also where they were traced for batches of other sizes."""
        return self.read, self.pushed, self.update.identity

    def worker(
        self, read: Sequence[Any], batches: PyTree, others: PyTree
    ) -> tuple[list[Any], list[Any], Any, list[Any]]:
        """The worker's function, to be traced.

        Args:
            read: the leaves of that name, PRNG keys as their data.
            batches: the batch, as a call of the step has it.
            others: further arguments.

        Returns:
            `(pushed arrays, scalars, whether all gradients are finite, leaves of the outputs)`.
        """
        found, strategy = self.traced, self.spec.strategy

        def on_replica(read: Sequence[Any], batches: PyTree, others: PyTree) -> Any:
            state = found.filled(dict(zip(self.read, read, strict=True)))
            with tracing(ReplicaTrace(strategy)):
                made = gradient_part(found.plan, state, batches, others, all_reduced(strategy))
                carried = found.carrying.pushed(found.plan, state, batches, others, made)
            pushed = [*jax.tree.leaves(others), *made.combined, *carried]
            results = list(made.outputs)
            here = found.plan.parts.traced.piece([found.plan.parts.traced.outputs[i] for i in found.here])
            results = _placed(results, found.here, here(state, others, made.combined, made.carried))
            results = _placed(results, found.late, self.update.late(pushed, range(len(found.late))))
            outputs, flags = results[: found.num_outputs], results[found.num_outputs :]
            finite = jnp.stack([jnp.asarray(x) for x in flags]).all() if flags else jnp.bool_(True)
            kinds = found.plan.kinds
            own = {i: x for i, x in enumerate(outputs) if kinds[i] in (LOCAL, ROWS)}
            # A replica's own result that is the same for its microbatches is that of each of them.
            by_rows = {
                i: x
                if found.plan.parts.early[i] or kinds[i] == ROWS
                else jnp.broadcast_to(x, (found.plan.k, *jnp.shape(x)))
                for i, x in own.items()
            }
            shared = {i: x for i, x in enumerate(outputs) if i not in own}
            return [pushed[i] for i in self.pushed], self.update.worker_scalars(pushed), finite, shared, by_rows

        whole, rows = PartitionSpec(), PartitionSpec(strategy.axes)
        pushed, scalars, finite, shared, by_rows = jax.shard_map(
            on_replica,
            mesh=strategy.mesh,
            in_specs=(whole, rows, whole),
            out_specs=(whole, whole, whole, whole, rows),
            check_vma=False,
        )(list(read), batches, others)
        outputs = {**shared, **by_rows}
        return pushed, scalars, finite, [outputs[i] for i in range(found.num_outputs)]


@dataclass(frozen=True)
class TracedStep:
    """What tracing a step told; for those that make programs of it.

    Attributes:
        plan: its two parts; the gradient part takes what `filled` returns.
        shapes: of the state's leaves.
        treedef: of the state.
        impls: the implementation of each leaf that is a PRNG key, None of the others.
        here: places of the outputs that the worker computes behind the phases.
        late: places of the outputs and flags that wait for the combined gradients.
        num_outputs: how many outputs there are; the flags are behind them.
        carrying: what it carries besides the gradient.
        gradients: the numbers of the gradients, and of losses, among the arrays that the update part can read.
    """

    plan: Plan
    shapes: tuple[Any, ...]
    treedef: Any
    impls: tuple[Any, ...]
    here: tuple[int, ...]
    late: tuple[int, ...]
    num_outputs: int
    carrying: Carrying
    gradients: tuple[int, ...]

    def typed(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves as the step knows them, from those that travel."""
        return [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(leaves, self.impls, strict=True)
        ]

    def filled(self, given: dict[int, Any]) -> PyTree:
        """The state with these leaves, and nothing in the place of the others."""
        leaves = [given[i] if i in given else self.nothing(i) for i in range(len(self.shapes))]
        return jax.tree.unflatten(self.treedef, self.typed(leaves))

    def nothing(self, i: int) -> Any:
        """Stands for a leaf that the gradient part does not read."""
        shape = self.shapes[i]
        if self.impls[i] is None:
            return jnp.zeros(shape.shape, shape.dtype)
        return jax.random.key_data(jnp.broadcast_to(jax.random.key(0, impl=self.impls[i]), shape.shape))


def take_apart(spec: ProgramSpec, state: PyTree, batches: PyTree, others: PyTree, *, closures: int = 1) -> StepParts:
    """Traces a step and takes it apart.

    Args:
        spec: the step, under a strategy of one worker's devices.
        state: the state, or a tree of what has its leaves' shapes and dtypes.
        batches: the rows of one call of the step.
        others: further arguments.
        closures: into how many closures a call is cut, whose gradients are averaged; 1: each call is one.

    Returns:
        Its parts.

    Raises:
        BoundaryError: it cannot be taken apart; says what stands in the way and what to write instead.

    Warns:
        UserWarning: results are left out that depend on what the update has changed.
    """
    found: list[tuple[TracedStep, Any]] = []

    def trace(state: PyTree, batches: PyTree, others: PyTree) -> None:
        found.append(_traced(spec, state, batches, others, closures))

    whole, rows = PartitionSpec(), PartitionSpec(spec.strategy.axes)
    mapped = jax.shard_map(
        trace, mesh=spec.strategy.mesh, in_specs=(whole, rows, whole), out_specs=whole, check_vma=False
    )
    jax.eval_shape(mapped, state, batches, others)
    parts, closed = found[0]
    update = sort_update(graph.without_mesh(closed), len(jax.tree.leaves(state)))
    if later := _known_on_servers(parts.plan, update, parts.late):
        return take_apart(_Reduced.of(spec, later), state, batches, others, closures=closures)
    pushed = tuple(sorted({j for unit in update.units for j in unit.pushed}))
    *outputs, _ = jax.tree.unflatten(parts.plan.parts.outputs_treedef, [0] * len(parts.plan.kinds))
    traced = parts.plan.parts.traced
    behind = [traced.outputs[i] for i in parts.here] + [traced.new_state[i] for i in parts.carrying.leaves]
    read = tuple(sorted({*parts.plan.parts.read, *traced.read_by(behind)}))
    return StepParts(read, pushed, update, jax.tree.structure(tuple(outputs)), spec, parts)


def _traced(spec: ProgramSpec, state: PyTree, batches: PyTree, others: PyTree, closures: int) -> tuple[TracedStep, Any]:
    """The step as traced by one replica, and its update part `(state leaves, others, cuts, carried) -> (leaves, late)`.

    `carried` is all that `Carrying.pushed` gives.
    """
    strategy, seen = spec.strategy, list[FiniteFlags]()
    plan = make_plan(
        strategy,
        spec.splittable(seen),
        spec.options.accumulate * closures,
        state,
        batches,
        others,
        otherwise="use `jdist.mirrored()`, which does not split a step",
    )
    parts, traced = plan.parts, plan.parts.traced
    # What of a batch's influence goes by no gradient, the step carries; asynchronous workers combine it by themselves.
    of_gradients = traced.depends(_combined_by(parts, gradients_alone=True))
    elsewhere = of_gradients if closures == 1 else traced.depends(_combined_by(parts, gradients_alone=False))
    of_batch = traced.depends([*traced.batch, traced.microbatch])
    paths = [jax.tree_util.keystr(path) or "it" for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    carries = [i for i, v in enumerate(traced.new_state) if graph.is_in(v, of_batch) and v not in of_gradients]
    both = [paths[c.leaf] for c in parts.carried if traced.new_state[c.leaf] in of_gradients]
    if both:
        raise BoundaryError(
            f"the step computes {', '.join(both)} from a worker's rows and from its combined gradients. Under a "
            "parameter server the update is made elsewhere and later: compute it from the rows alone, or from the "
            "gradients alone; or use `jdist.mirrored()`."
        )
    if carries and not any(cut.collective.kind == "gradient" for cut in parts.cuts):
        raise BoundaryError(
            f"the step computes {', '.join(paths[i] for i in carries)} from the batch without "
            "`jdist.value_and_grad` or `jdist.grad`. Under a parameter server a worker would write it over what others "
            "have written meanwhile. Change `jax.value_and_grad` to `jdist.value_and_grad`; return what is no gradient as a "
            "metric; or use `jdist.mirrored()`."
        )
    # In synchronous mode the servers hold the old state that every worker has read, and apply the step's own rule to it.
    by_slope = carries if closures == 1 else []
    carrying = find_carrying(parts, carries, by_slope, (strategy.num_replicas, plan.k))
    leaves, treedef = jax.tree.flatten(state)
    impls = tuple(jax.random.key_impl(x) if is_key(x) else None for x in leaves)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    num_outputs = len(plan.kinds) - len(seen[-1].names)
    others_leaves, others_treedef = jax.tree.flatten(others)

    def gradients(state: PyTree, batches: PyTree, others: PyTree) -> Any:
        with tracing(ReplicaTrace(strategy)):
            made = gradient_part(plan, state, batches, others, all_reduced(strategy))
            return made.combined, carrying.pushed(plan, state, batches, others, made)

    combined, carried = jax.eval_shape(gradients, state, batches, others)
    late = [i for i, v in enumerate(traced.outputs) if not parts.early[i] and graph.is_in(v, elsewhere)]
    here = [i for i in range(len(traced.outputs)) if not parts.early[i] and i not in late]
    cuts = parts.cuts
    places = [cut.collective.kind == "gradient" for cut in cuts for _ in cut.shapes]
    numbers = tuple(len(others_leaves) + i for i, is_gradient in enumerate(places) if is_gradient)
    found = TracedStep(plan, shapes, treedef, impls, tuple(here), tuple(late), num_outputs, carrying, numbers)

    def update(*values: Any) -> list[Any]:
        old = found.typed(values[: len(leaves)])
        state = jax.tree.unflatten(treedef, old)
        rest = iter(values[len(leaves) :])
        others = jax.tree.unflatten(others_treedef, [next(rest) for _ in others_leaves])
        with tracing(ReplicaTrace(strategy)):
            combined_here = [next(rest) for _ in combined]
            pushed = list(rest)
            new, results = parts.update(state, others, combined_here, carrying.own(pushed, impls))
        new = jax.tree.leaves(check_same_state(state, jax.tree.unflatten(parts.state_treedef, new)))
        new = carrying.applied(old, new, pushed)
        kept = [before if x is typed else x for x, typed, before in zip(new, old, values, strict=False)]
        return [jax.random.key_data(x) if is_key(x) else x for x in kept] + [results[i] for i in late]

    arguments = [jax.random.key_data(x) if is_key(x) else x for x in leaves] + [*others_leaves, *combined, *carried]
    return found, prepared(jax.make_jaxpr(update)(*arguments), arguments, strategy.num_replicas)


def _combined_by(parts: Split, *, gradients_alone: bool) -> list[Any]:
    """The variables of a step's combined arrays; of the gradients, or of all cuts of the last phase."""
    variables = iter(parts.traced.combined)
    last = parts.phases[-1].cuts if parts.phases else ()
    of_cut = [(cut, next(variables)) for cut in parts.cuts for _ in cut.shapes]
    return [
        v
        for cut, v in of_cut
        if cut.collective.kind == "gradient" or (not gradients_alone and any(cut is other for other in last))
    ]


def _placed(results: list[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """A list with some of its entries filled in."""
    found = dict(zip(places, values, strict=True))
    return [found.get(i, x) for i, x in enumerate(results)]


def _known_on_servers(plan: Plan, update: Update, late: Sequence[int]) -> tuple[Any, ...]:
    """The paths of the results that only the servers could compute: those that depend on what the update has changed."""
    outputs = jax.tree.unflatten(plan.parts.outputs_treedef, range(len(plan.kinds)))[:-1]
    paths = {i: path for path, i in jax.tree_util.tree_leaves_with_path(outputs)}
    return tuple(paths[i] for place, i in enumerate(late) if i in paths and update.late_reads_state(place))


@dataclass(frozen=True)
class _Reduced(ProgramSpec):
    """A step without some of its results.

    Attributes:
        left_out: their paths among the outputs; each ends in a key of a dict.
    """

    left_out: tuple[Any, ...] = ()

    @classmethod
    def of(cls, spec: ProgramSpec, left_out: tuple[Any, ...]) -> _Reduced:
        """Leaves results of a step out, and says so.

        Raises:
            BoundaryError: one of them is no entry of a dict, so its place cannot be empty.

        Warns:
            UserWarning: names them.
        """
        names = ", ".join(jax.tree_util.keystr(path[1:]) or "it" for path in left_out)
        why = (
            "which depends on what its own update has changed. Under a parameter server the update is made elsewhere and "
            "later. Compute it from the parameters as they came in and from the gradients; or in a step of its own, "
            "from a state that was fetched."
        )
        if not all(len(path) > 1 and isinstance(path[-1], jax.tree_util.DictKey) for path in left_out):
            raise BoundaryError(f"the step returns {names}, {why} As an entry of a dict of metrics it is left out.")
        warnings.warn(f"{spec.name}: left out of its results is {names}, {why}", stacklevel=2)
        return cls(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}, left_out=left_out)

    def splittable(self, seen: list[FiniteFlags]) -> Pure:
        """See `ProgramSpec.splittable`."""
        whole = super().splittable(seen)

        def pure(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, Any, list[OutputKind]]:
            new_state, (*results, finite), kinds = whole(state, batches, others)
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tuple(results))]
            outputs = jax.tree.map(lambda x: x, tuple(results))  # a copy: the step may hold on to its dicts
            for *parents, last in self.left_out:
                node = functools.reduce(_entry, parents, outputs)
                del node[last.key]
            kept = [kind for path, kind in zip(paths, kinds, strict=False) if path not in self.left_out]
            return new_state, (*outputs, finite), [*kept, *kinds[len(paths) :]]

        return pure


def _entry(node: Any, key: Any) -> Any:
    """What a tree has at a key of a path."""
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name)
    return node[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
