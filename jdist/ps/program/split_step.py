"""Splits a step for a parameter server: what a worker computes, and what the servers do with it.

The step is split where gradients are combined (`jaxpr.split`, as for gradient accumulation). The gradient part becomes
the worker's function: parameters and a batch in; gradients, metrics and a few scalars out. The update part is sorted
into units (`update_units`), and each lives on one server.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist.core.context import ReplicaTrace, tracing
from jdist.errors import BoundaryError
from jdist.jaxpr import graph
from jdist.jaxpr.elementwise import prepared
from jdist.jaxpr.phases import Split
from jdist.ps.program.affine_state import CarriedLeaves, find_carried
from jdist.ps.program.update_units import Update
from jdist.step.microbatches import Plan, all_reduced, gradient_part, make_plan
from jdist.step.outputs import LOCAL, ROWS, OutputKind
from jdist.step.program_spec import ProgramSpec, Pure
from jdist.step.tree_checks import check_same_state
from jdist.support.arrays import is_key
from jdist.typing import PyTree


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitStep:
    """A step in two parts, for one batch size. PRNG keys travel as their data."""

    spec: ProgramSpec
    plan: Plan  # the gradient part, which takes the state that `filled` returns
    update: Update  # the update part
    carried: CarriedLeaves  # state that it computes from the batch without a gradient
    late: tuple[int, ...]  # places of the outputs and flags that wait for the combined gradients
    treedef: Any  # of the state
    # the implementation of each leaf of the state that is a PRNG key, else None
    impls: tuple[Any, ...]
    arguments: PyTree  # shapes of a call's `(batches, others)`

    @functools.cached_property
    def identity(self) -> tuple[Any, ...]:
        """Equal for steps that read, push and update alike, also where they were traced for batches of other sizes."""
        return self.read, self.pushed, self.update.identity

    @property
    def updates(self) -> bool:
        """Returns whether it changes the state."""
        return bool(self.update.reads)

    @functools.cached_property
    def reports_finite(self) -> bool:
        """Returns whether a call's results end with whether its gradients were finite."""
        return self.updates and (self.spec.policy == "skip" or self.spec.options.loss_scaling is not None)

    @property
    def loss_scale(self) -> tuple[int, int] | None:
        """See `FunctionPlan.loss_scale`; it is the last of the arguments."""
        scaling = self.spec.options.loss_scaling if self.updates else None
        return None if scaling is None else (len(jax.tree.leaves(self.arguments)) - 1, scaling.growth_interval)

    @functools.cached_property
    def read(self) -> tuple[int, ...]:
        """Numbers of the state's leaves that the worker reads."""
        traced = self.plan.split.traced
        after_phases = [traced.outputs[i] for i in self.here] + [traced.new_state[i] for i in self.carried.leaves]
        return tuple(sorted({*self.plan.split.read, *traced.read_by(after_phases)}))

    @functools.cached_property
    def pushed(self) -> tuple[int, ...]:
        """Numbers of the arrays that the worker pushes, among those that the update part can read."""
        return tuple(sorted({j for unit in self.update.units for j in unit.pushed}))

    @property
    def here(self) -> tuple[int, ...]:
        """Places of the outputs that the worker computes after the phases."""
        early = self.plan.split.early
        return tuple(i for i in range(len(early)) if not early[i] and i not in self.late)

    @functools.cached_property
    def outputs_treedef(self) -> Any:
        """The tree of the step's results other than the state. `plan` has its leaves first, then the flags."""
        treedef = self.plan.split.outputs_treedef
        return jax.tree.structure(tuple(jax.tree.unflatten(treedef, [0] * treedef.num_leaves)[:-1]))

    @property
    def num_batch_leaves(self) -> int:
        """The number of leaves of a call's batches, which come before those of the other arguments."""
        return len(jax.tree.leaves(self.arguments[0]))

    @property
    def gradients(self) -> tuple[int, ...]:
        """Numbers of the gradients, and of losses, among the arrays that the update part can read."""
        of_cuts = [cut.collective.kind == "gradient" for cut in self.plan.split.cuts for _ in cut.shapes]
        first = len(jax.tree.leaves(self.arguments[1]))
        return tuple(first + i for i, is_gradient in enumerate(of_cuts) if is_gradient)

    def filled(self, leaves: dict[int, Any]) -> PyTree:
        """Makes a state of these leaves, by number, with zeros in place of the others."""
        shapes = self.update.shapes
        every = [leaves[i] if i in leaves else jnp.zeros(s.shape, s.dtype) for i, s in enumerate(shapes)]
        return jax.tree.unflatten(self.treedef, _typed(every, self.impls))

    def worker(self, values: Sequence[Any]) -> list[Any]:
        """Computes the worker's part of inputs and arguments, both flat; returns the results in `FunctionPlan`'s order."""
        # Traced on a worker. PRNG keys of the state come as their data. Whoever changes the order changes `FunctionPlan`.
        plan, strategy, n = self.plan, self.spec.strategy, len(self.read)
        batches, others = jax.tree.unflatten(jax.tree.structure(self.arguments), values[n:])
        traced, kinds, num_outputs = plan.split.traced, plan.kinds, self.outputs_treedef.num_leaves

        def on_replica(read: Sequence[Any], batches: PyTree, others: PyTree) -> Any:
            state = self.filled(dict(zip(self.read, read, strict=True)))
            with tracing(ReplicaTrace(strategy)):
                of_phases = gradient_part(plan, state, batches, others, all_reduced(strategy))
                carried = self.carried.pushed(plan, state, batches, others, of_phases)
            pushed = [*jax.tree.leaves(others), *of_phases.combined, *carried]
            here = traced.piece([traced.outputs[i] for i in self.here])(
                state, others, of_phases.combined, of_phases.carried
            )
            late = self.update.late(pushed, range(len(self.late)))
            results: dict[int, Any] = dict(enumerate(of_phases.outputs))
            results |= dict(zip((*self.here, *self.late), (*here, *late), strict=True))
            flags = [jnp.asarray(results.pop(i)) for i in range(num_outputs, len(kinds))]
            finite = jnp.stack(flags).all() if flags else jnp.bool_(True)
            own = {i: x for i, x in results.items() if kinds[i] in (LOCAL, ROWS)}
            # A replica's own result that is the same for its microbatches is that of each of them.
            by_rows = {
                i: x if plan.split.early[i] or kinds[i] == ROWS else jnp.broadcast_to(x, (plan.k, *jnp.shape(x)))
                for i, x in own.items()
            }
            shared = {i: x for i, x in results.items() if i not in own}
            return [pushed[i] for i in self.pushed], self.update.worker_scalars(pushed), finite, shared, by_rows

        whole, rows = PartitionSpec(), PartitionSpec(strategy.axes)
        pushed, scalars, finite, shared, by_rows = jax.shard_map(
            on_replica,
            mesh=strategy.mesh,
            in_specs=(whole, rows, whole),
            out_specs=(whole, whole, whole, whole, rows),
            check_vma=False,
        )(list(values[:n]), batches, others)
        outputs = [{**shared, **by_rows}[i] for i in range(num_outputs)]
        reported = [finite] if self.reports_finite else []
        return [*pushed, *scalars, finite, *outputs, *reported] if self.updates else outputs


def split_step(spec: ProgramSpec, state: PyTree, batches: PyTree, others: PyTree, *, closures: int = 1) -> SplitStep:
    """Traces and splits a step; warns of dropped results that depend on the update."""
    # `spec` has one worker's strategy; the gradients of `closures` closures are averaged.
    pure = spec.splittable([])
    step = _split(spec, pure, state, batches, others, closures)
    if paths := _known_to_servers(step):
        _warn_left_out(spec.name, paths)
        step = _split(spec, _without_results(pure, paths), state, batches, others, closures)
    return step


def _split(spec: ProgramSpec, pure: Pure, state: PyTree, batches: PyTree, others: PyTree, closures: int) -> SplitStep:
    traced: list[tuple[functools.partial[SplitStep], Any]] = []

    def trace(state: PyTree, batches: PyTree, others: PyTree) -> None:
        traced.append(_trace(spec, pure, state, batches, others, closures))

    whole, rows = PartitionSpec(), PartitionSpec(spec.strategy.axes)
    mapped = jax.shard_map(
        trace, mesh=spec.strategy.mesh, in_specs=(whole, rows, whole), out_specs=whole, check_vma=False
    )
    jax.eval_shape(mapped, state, batches, others)
    make, closed = traced[0]
    return make(
        update=Update(_without_mesh(closed), len(jax.tree.leaves(state))),
        arguments=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)), (batches, others)
        ),
    )


def _trace(
    spec: ProgramSpec, pure: Pure, state: PyTree, batches: PyTree, others: PyTree, closures: int
) -> tuple[functools.partial[SplitStep], Any]:
    """Traces a step as one replica runs it; returns it without `update`, and the jaxpr of that."""
    # The jaxpr is `(state leaves, others, cuts, carried) -> (leaves, late)`; `carried` is all that
    # `CarriedLeaves.pushed` returns.
    strategy = spec.strategy
    plan = make_plan(
        strategy,
        pure,
        spec.options.accumulate * closures,
        state,
        batches,
        others,
        otherwise="use `jdist.mirrored()`, which does not split a step",
    )
    split, traced = plan.split, plan.split.traced
    # What of a batch's influence goes by no gradient, the step carries; asynchronous workers combine it by themselves.
    of_gradients = traced.depends(_combined_by(split, gradients_alone=True))
    elsewhere = of_gradients if closures == 1 else traced.depends(_combined_by(split, gradients_alone=False))
    of_batch = traced.depends([*traced.batch, traced.microbatch])
    carries = [i for i, v in enumerate(traced.new_state) if graph.is_in(v, of_batch) and v not in of_gradients]
    _check_carried(split, state, carries, of_gradients)
    # In synchronous mode the servers hold the old state that every worker has read, and apply the step's own rule to it.
    by_slope = carries if closures == 1 else []
    carried = find_carried(split, carries, by_slope, (strategy.num_replicas, plan.k))
    leaves, treedef = jax.tree.flatten(state)
    impls = tuple(jax.random.key_impl(x) if is_key(x) else None for x in leaves)
    late = [i for i, v in enumerate(traced.outputs) if not split.early[i] and graph.is_in(v, elsewhere)]
    others_leaves, others_treedef = jax.tree.flatten(others)

    def gradients(state: PyTree, batches: PyTree, others: PyTree) -> Any:
        with tracing(ReplicaTrace(strategy)):
            of_phases = gradient_part(plan, state, batches, others, all_reduced(strategy))
            return of_phases.combined, carried.pushed(plan, state, batches, others, of_phases)

    combined, pushed = jax.eval_shape(gradients, state, batches, others)

    def update(*values: Any) -> list[Any]:
        old = _typed(values[: len(leaves)], impls)
        state = jax.tree.unflatten(treedef, old)
        rest = iter(values[len(leaves) :])
        others = jax.tree.unflatten(others_treedef, [next(rest) for _ in others_leaves])
        with tracing(ReplicaTrace(strategy)):
            of_cuts = [next(rest) for _ in combined]
            pushed = list(rest)
            new, results = split.update(state, others, of_cuts, carried.written_by_phases(split, pushed, impls))
        new = jax.tree.leaves(check_same_state(state, jax.tree.unflatten(split.state_treedef, new)))
        new = carried.applied(old, new, pushed)
        kept = [before if x is typed else x for x, typed, before in zip(new, old, values, strict=False)]
        return [jax.random.key_data(x) if is_key(x) else x for x in kept] + [results[i] for i in late]

    arguments = [jax.random.key_data(x) if is_key(x) else x for x in leaves] + [*others_leaves, *combined, *pushed]
    closed = prepared(jax.make_jaxpr(update)(*arguments), arguments)
    make = functools.partial(
        SplitStep, spec=spec, plan=plan, carried=carried, late=tuple(late), treedef=treedef, impls=impls
    )
    return make, closed


def _check_carried(split: Split, state: PyTree, carries: Sequence[int], of_gradients: set[Any]) -> None:
    """Refuses carried leaves if a worker would overwrite other workers' changes."""
    paths = [jax.tree_util.keystr(path) or "the state" for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    both = [paths[c.leaf] for c in split.carried if split.traced.new_state[c.leaf] in of_gradients]
    if both:
        raise BoundaryError(
            f"the step computes {', '.join(both)} from a worker's rows and from its combined gradients. Under a "
            "parameter server the update is made elsewhere and later: compute it from the rows alone, or from the "
            "gradients alone; or use `jdist.mirrored()`."
        )
    if carries and not any(cut.collective.kind == "gradient" for cut in split.cuts):
        raise BoundaryError(
            f"the step computes {', '.join(paths[i] for i in carries)} from the batch without "
            "`jdist.value_and_grad` or `jdist.grad`. Under a parameter server a worker would write it over what others "
            "have written meanwhile. Change `jax.value_and_grad` to `jdist.value_and_grad`; return other values as a "
            "metric; or use `jdist.mirrored()`."
        )


def _combined_by(split: Split, *, gradients_alone: bool) -> list[Any]:
    """The variables of a step's combined arrays; of the gradients, or of all cuts of the last phase."""
    variables = iter(split.traced.combined)
    last = split.phases[-1].cuts if split.phases else ()
    of_cut = [(cut, next(variables)) for cut in split.cuts for _ in cut.shapes]
    return [
        v
        for cut, v in of_cut
        if cut.collective.kind == "gradient" or (not gradients_alone and any(cut is other for other in last))
    ]


def _typed(leaves: Sequence[Any], impls: Sequence[Any]) -> list[Any]:
    """Makes PRNG keys of the data of those leaves that have an implementation."""
    return [
        x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in zip(leaves, impls, strict=True)
    ]


def _known_to_servers(step: SplitStep) -> tuple[Any, ...]:
    """The paths of the results that only the servers could compute: those that depend on what the update has changed."""
    outputs = jax.tree.unflatten(step.outputs_treedef, range(step.outputs_treedef.num_leaves))
    paths = {i: path for path, i in jax.tree_util.tree_leaves_with_path(outputs)}
    return tuple(paths[i] for place, i in enumerate(step.late) if i in paths and step.update.late_reads_state(place))


def _warn_left_out(name: str, paths: Sequence[Any]) -> None:
    """Warns that a step's results are left out; refuses those outside of a dict: their place cannot be empty."""
    names = ", ".join(jax.tree_util.keystr(path[1:]) or "it" for path in paths)
    why = (
        "which depends on what its own update has changed. Under a parameter server the update is made elsewhere and "
        "later. Compute it from the parameters as they came in and from the gradients; or in a step of its own, "
        "from a state that was fetched."
    )
    if not all(len(path) > 1 and isinstance(path[-1], jax.tree_util.DictKey) for path in paths):
        raise BoundaryError(f"the step returns {names}, {why} As an entry of a dict of metrics it is left out.")
    warnings.warn(f"{name}: left out of its results is {names}, {why}", stacklevel=3)


def _without_results(whole: Pure, left_out: Sequence[Any]) -> Pure:
    """Leaves results of a step out, by their paths among the outputs; each ends in a key of a dict."""

    def pure(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, Any, list[OutputKind]]:
        new_state, (*results, finite), kinds = whole(state, batches, others)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tuple(results))]
        outputs = jax.tree.map(lambda x: x, tuple(results))  # a copy: the step may hold on to its dicts
        for *parents, last in left_out:
            node = functools.reduce(_entry, parents, outputs)
            del node[last.key]
        kept = [kind for path, kind in zip(paths, kinds, strict=False) if path not in left_out]
        return new_state, (*outputs, finite), [*kept, *kinds[len(paths) :]]

    return pure


def _entry(node: Any, key: Any) -> Any:
    """Returns the part of a tree at a key of a path."""
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name)
    return node[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]


def _without_mesh(closed: Any) -> Any:
    """Rewrites a jaxpr without collectives, traced under a mesh, as if it were traced without one."""
    # Equations, their parameters and constants carry the mesh, and JAX refuses arrays of another
    # mesh.

    def plain(x: Any) -> Any:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)

    def run(closed: Any, values: Sequence[Any]) -> list[Any]:
        jaxpr = graph.body_of(closed)
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(plain, closed.consts), *values], strict=True))

        def value(v: Any) -> Any:
            return np.asarray(v.val, v.aval.dtype) if graph.is_literal(v) else known[v]

        for eqn in jaxpr.eqns:
            params = {name: clean(param) for name, param in eqn.params.items()}
            results = eqn.primitive.bind(*map(value, eqn.invars), **params)
            known.update(zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True))
        return list(map(value, jaxpr.outvars))

    def again(closed: Any) -> Any:
        return jax.make_jaxpr(lambda *values: run(closed, values))(*map(graph.struct_of, graph.body_of(closed).invars))

    def clean(param: Any) -> Any:
        if isinstance(param, jax.sharding.Sharding):
            return None
        if isinstance(param, graph.ClosedJaxpr):
            return again(param)
        return type(param)(map(clean, param)) if type(param) in (tuple, list) else param

    return again(closed)
