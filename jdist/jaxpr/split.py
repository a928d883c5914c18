"""The split of a step: what each microbatch computes, what is combined over them, what is computed once from that.

Microbatches are replicas in time: `accumulate=k` on N replicas is the step on k x N replicas. A traced step holds its
collectives (`jdist.value_and_grad`, `all_reduce`, `mean` with a mask, ...) as equations (`core/collective_marks.py`). Each that
combines what differs from microbatch to microbatch is a *cut*: what it reads is computed in a loop over the
microbatches and summed up, the sums are combined over the replicas, and what follows reads the result. A cut that
depends on another needs a further loop, a *phase*; what it needs again of the microbatch is computed again. What
depends on no microbatch but through cuts is the *update part* and runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jdist.core.collective_marks import Collective, collective_of, is_own_part
from jdist.core.context import ReplicaTrace, tracing
from jdist.core.strategy import Strategy
from jdist.errors import BoundaryError
from jdist.jaxpr import graph, variation
from jdist.jaxpr.affine import SAY_WHAT_IT_IS, AffineRule
from jdist.jaxpr.phases import Carried, Cut, Phase, PhaseContents, Split, StepJaxpr, is_cut, schedule
from jdist.replica import collectives
from jdist.typing import PyTree

Step = Callable[..., tuple[PyTree, PyTree]]


def split(
    strategy: Strategy,  # its axes are bound by the caller
    step: Step,  # `(state, batch, others) -> (state, outputs)`
    state: PyTree,
    batch: PyTree,  # one microbatch
    others: PyTree = (),  # the same for all microbatches
    *,
    num_microbatches: int = 1,
    # numbers of the state leaves that have parts, the last leaves of `others`
    parts: Sequence[int] = (),
    # what an error suggests other than rewriting the step
    otherwise: str = "leave `accumulate` at 1",
) -> Split:
    """Traces a pure step once and splits it into phases and an update part."""

    num_virtual = [1]

    def traced(state: PyTree, batch: PyTree, others: PyTree, microbatch: jax.Array, by_rows: frozenset[Any]) -> Any:
        trace = ReplicaTrace(strategy, num_microbatches=num_microbatches, microbatch=microbatch, by_rows=by_rows)
        with tracing(trace):
            num_virtual[0] = collectives.num_replicas()
            return step(state, batch, others)

    def trace(by_rows: frozenset[Any]) -> Any:
        return jax.make_jaxpr(partial(traced, by_rows=by_rows), return_shape=True)(state, batch, others, jnp.int32(0))

    def of_rows(closed: Any) -> list[Any]:
        first, rest = (len(jax.tree.leaves(tree)) for tree in (state, others))
        *arguments, microbatch = graph.body_of(closed).invars
        return [*arguments[first : len(arguments) - rest], microbatch]

    closed, _, _, shapes = variation.traced(trace, of_rows)
    closed = graph.entered(closed, variation.holds_collective)

    def scattered(eqn: Any, operands: list[Any], microbatch: Any) -> list[Any] | None:
        """Computes the transpose of a gather: each takes the rows that it gave of the sum over all."""
        if not variation.is_transposed_gather(eqn):
            return None
        with tracing(ReplicaTrace(strategy, num_microbatches=num_microbatches, microbatch=microbatch)):
            totals = collectives.combine(Collective("value", "sum"), operands)
            return [own_rows(x, v.aval.shape) for x, v in zip(totals, eqn.outvars, strict=True)]

    if any(map(variation.is_transposed_gather, graph.body_of(closed).eqns)):
        step = closed

        def with_scattered(*values: Any) -> list[Any]:
            return graph.evaluated(step, values, lambda eqn, operands: scattered(eqn, operands, values[-1]))

        closed = jax.make_jaxpr(with_scattered)(*map(graph.struct_of, graph.body_of(step).invars))
    sizes = num_virtual[0] // num_microbatches, num_microbatches
    closed = graph.forwarded(closed)
    invars, (num_state, num_batch, num_others) = (
        graph.body_of(closed).invars,
        map(len, map(jax.tree.leaves, (state, batch, others))),
    )
    of_leaves = dict(zip(parts, invars[num_state + num_batch + num_others - len(parts) : -1], strict=True))
    given = {invars[i]: part for i, part in of_leaves.items()}
    if parts and _cuts_what_varies(closed, of_rows(closed)):
        raise PartsVaryError

    def part_of(eqn: Any) -> dict[int, Any]:
        part = given.get(eqn.invars[0]) if is_own_part(eqn) else None
        return {0: part} if part is not None and part.aval.shape == eqn.outvars[0].aval.shape else {}

    closed = graph.substituted(closed, part_of)
    return _Analysis(closed, (state, batch, others), shapes, sizes, otherwise, len(parts)).split()


class PartsVaryError(Exception):
    """A step takes replicas' own parts of a value that differs between them; together the parts do not form an array."""


def _cuts_what_varies(closed: Any, rows: Sequence[Any]) -> bool:
    cut = [eqn.invars[0] for eqn in graph.body_of(closed).eqns if is_own_part(eqn)]
    varying = variation.varying(closed, rows) if cut else set[Any]()
    return any(graph.is_in(v, varying) for v in cut)


class _Analysis:
    """The equations of a traced step, before they are sorted into phases and the update part."""

    def __init__(
        self,
        closed: Any,  # `(state, batch, others, microbatch) -> (state, outputs)`, of leaves
        arguments: tuple[PyTree, ...],  # the trees of `state`, `batch` and `others`
        results: tuple[PyTree, PyTree],  # the shapes of both results, as trees
        sizes: tuple[int, int],  # number of replicas, and of microbatches of each
        otherwise: str,
        num_parts: int = 0,  # the last leaves of `others`, which are parts of state leaves
    ):
        self.closed, self.results, self.sizes, self.otherwise = closed, results, sizes, otherwise
        jaxpr = graph.body_of(closed)
        invars, outvars = iter(jaxpr.invars), iter(jaxpr.outvars)
        self.state, self.batch, self.others = (_take(invars, len(jax.tree.leaves(tree))) for tree in arguments)
        self.microbatch = next(invars)
        self.new_state, self.outputs = (_take(outvars, len(jax.tree.leaves(tree))) for tree in results)
        self.equations = list(jaxpr.eqns)
        self.of_rows = variation.of_one_microbatch(closed, [*self.batch, self.microbatch])
        # Arrays gathered from parts are gathered again for each microbatch, as if they were its own.
        cut = [v for eqn in self.equations if is_own_part(eqn) for v in eqn.outvars if v not in self.of_rows]
        self.parts = {*self.others[len(self.others) - num_parts :], *cut}
        self.own = variation.of_one_microbatch(closed, [*self.batch, self.microbatch, *self.parts])
        self._check_nested()
        self.late_effects, self.early_effects = self._sort_effects()

    def _is_own(self, v: Any) -> bool:
        return graph.is_in(v, self.own)

    def _is_cut(self, eqn: Any) -> bool:
        return is_cut(eqn, self.own)

    def _check_nested(self) -> None:
        if self.sizes[1] == 1:
            return
        for eqn in self.equations:
            of_microbatch = collective_of(eqn) is None and any(map(self._is_own, eqn.invars))
            if of_microbatch and variation.collectives_in(eqn):
                raise BoundaryError(
                    "the step calls `jdist.value_and_grad`, a masked `jdist.mean` or another jdist collective inside a "
                    "`lax.scan`, `lax.cond`, `lax.while_loop` or `jax.checkpoint` of its own, where it cannot be split. "
                    f"Call it in the step itself, or {self.otherwise}."
                )

    def _sort_effects(self) -> tuple[list[Any], list[Any]]:
        """Sorts prints and host callbacks into `(of the update part, of each microbatch)`."""
        # A print runs once for each microbatch, as it does for each replica; it runs once, in the
        # update part, if every value that it shows is combined.
        late, early = [], []
        of_cuts = graph.dependents(self.closed, [v for eqn in self.equations if self._is_cut(eqn) for v in eqn.outvars])
        for eqn in graph.effects_of(self.closed):
            if not graph.is_print_or_callback(eqn):
                raise BoundaryError(
                    f"the step reads or writes a `jax.Ref` (`{eqn.primitive.name}`), so it cannot be split. Compute with "
                    f"arrays, or {self.otherwise}."
                )
            is_late = any(graph.is_in(v, of_cuts) for v in eqn.invars) and not any(map(self._is_own, eqn.invars))
            (late if is_late else early).append(eqn)
        return late, early

    def split(self) -> Split:
        carried = tuple(self._carried(i) for i, v in enumerate(self.new_state) if self._is_own(v))
        carried_vars = [self.new_state[c.leaf] for c in carried]
        early = tuple(map(self._is_own, self.outputs))
        contents = schedule(
            self.closed,
            self.own,
            carried=carried_vars,
            outputs={i: self.outputs[i] for i, is_early in enumerate(early) if is_early},
            effects=self.early_effects,
        )
        combined: list[Any] = []
        functions: list[tuple[Callable[..., Any], Callable[..., Any], set[Any]]] = []
        for each in contents:
            functions.append(self._phase_functions(each, carried_vars, combined))
            combined += [v for place in each.cuts for v in self.equations[place].outvars]
        reads = {v for _, _, reads_of_phase in functions for v in reads_of_phase}
        of_rows = [v for v in carried_vars if graph.is_in(v, self.of_rows)]
        varying = variation.varying(self.closed, [*self.batch, *of_rows])
        return Split(
            phases=tuple(
                Phase(
                    cuts=tuple(self._cut(place, reads) for place in each.cuts),
                    carried=each.carried,
                    outputs=each.outputs,
                    prepare=prepare,
                    run=run,
                )
                for each, (prepare, run, _) in zip(contents, functions, strict=True)
            ),
            carried=carried,
            read=tuple(i for i, v in enumerate(self.state) if v in reads),
            varies=tuple(graph.is_in(v, varying) or graph.is_in(v, self.of_rows) for v in self.outputs),
            early=early,
            output_shapes=tuple(map(graph.struct_of, self.outputs)),
            update=self._update(early, combined, carried_vars),
            traced=StepJaxpr(
                closed=self.closed,
                state=tuple(self.state),
                batch=tuple(self.batch),
                others=tuple(self.others),
                microbatch=self.microbatch,
                new_state=tuple(self.new_state),
                outputs=tuple(self.outputs),
                combined=tuple(combined),
                carried=tuple(carried_vars),
            ),
            state_treedef=jax.tree.structure(self.results[0]),
            outputs_treedef=jax.tree.structure(self.results[1]),
        )

    def _cut(self, place: int, reads: set[Any]) -> Cut:
        results = self.equations[place].outvars
        collective = collective_of(self.equations[place])
        assert collective is not None  # every cut is one
        operands = tuple(v.aval.shape for v in self._operands(place))
        return Cut(
            collective, tuple(map(graph.struct_of, results)), operands, is_read_again=any(v in reads for v in results)
        )

    def _operands(self, place: int) -> list[Any]:
        """Lists the operands of a cut, one for each result."""
        eqn = self.equations[place]
        if len(eqn.invars) == len(eqn.outvars):
            return list(eqn.invars)
        places = graph.operands_of_results(eqn)
        assert all(i is not None for i in places)  # combined one by one where a step is split
        return [eqn.invars[i] for i in places if i is not None]

    def _phase_functions(
        self, contents: PhaseContents, carried_vars: Sequence[Any], combined: Sequence[Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any], set[Any]]:
        """Builds `(prepare, run, variables that prepare reads or computes)` of a phase."""
        operands = [self._operands(place) for place in contents.cuts]
        carried = [carried_vars[n] for n in contents.carried]
        outputs = [self.outputs[i] for i in contents.outputs]
        wanted = [*(v for vs in operands for v in vs), *carried, *outputs]
        whole = [*self.state, *self.others, *combined]  # what is the same for all microbatches
        equations, _ = graph.needed(self.closed, wanted, {*self.batch, self.microbatch, *whole}, contents.effects)
        elsewhere = [eqn for eqn in self.early_effects if not _is_among(eqn, contents.effects)]
        self._check_called_once(equations, elsewhere)
        # Hoisted out of the loop: variables that are the same for all microbatches, and that the loop reads or returns.
        looped = [eqn for eqn in equations if any(map(self._is_own, eqn.invars)) or _is_among(eqn, contents.effects)]
        in_loop = {v for v in (*(v for eqn in looped for v in eqn.invars), *wanted) if not graph.is_literal(v)}
        constants = set(graph.body_of(self.closed).constvars)
        in_order = [*graph.body_of(self.closed).invars, *(v for eqn in self.equations for v in eqn.outvars)]
        shared = [v for v in in_order if v in in_loop and v not in constants]
        hoisted = [v for v in shared if v not in self.own or v in self.parts]
        before = graph.subfunction(self.closed, whole, hoisted)
        equations_before, needed_before = graph.needed(self.closed, hoisted, set(whole))
        self._check_called_once(equations_before, [*self.late_effects, *self.early_effects])
        inside = graph.subfunction(self.closed, [*hoisted, *self.batch, self.microbatch], wanted, contents.effects)

        def prepare(state: Any, others: Any, combined: Sequence[Any]) -> list[Any]:
            return before([*_leaves(state, others), *combined])

        def run(prepared: Sequence[Any], batch: Any, microbatch: Any) -> Any:
            values = iter(inside([*prepared, *jax.tree.leaves(batch), microbatch]))
            return [_take(values, len(vs)) for vs in operands], _take(values, len(carried)), _take(values, len(outputs))

        return prepare, run, needed_before | set(hoisted)

    def _update(
        self, early: Sequence[bool], combined: Sequence[Any], carried_vars: Sequence[Any]
    ) -> Callable[..., Any]:
        """Builds `Split.update`."""
        late = [v for v, is_early in zip(self.outputs, early, strict=True) if not is_early]
        known = [*self.state, *self.others, *combined, *carried_vars]
        wanted = [*self.new_state, *late]
        self._check_called_once(graph.needed(self.closed, wanted, set(known))[0], self.early_effects)
        run = graph.subfunction(self.closed, known, wanted, self.late_effects)

        def update(state: Any, others: Any, combined: Sequence[Any], carried: Sequence[Any]) -> Any:
            values = iter(run([*_leaves(state, others), *combined, *carried]))
            return _take(values, len(self.new_state)), [None if is_early else next(values) for is_early in early]

        return update

    def _carried(self, i: int) -> Carried:
        """Decides how the values that microbatches compute of a leaf become one: added up, or averaged."""
        old, new = self.state[i], self.new_state[i]
        dtype = old.aval.dtype
        if self.sizes[1] == 1 or not graph.is_in(new, self.of_rows):  # of parameters alone: all have the same
            return Carried(i, adds_up=False)
        rule = AffineRule(self.closed, old, new, self.sizes, rows=self.batch)
        slope = rule.of_program()
        is_added_to = isinstance(slope, float | int) and slope == 1
        if is_added_to and rule.counts_rows:
            return Carried(i, adds_up=True)
        is_average = jnp.issubdtype(dtype, jnp.floating) and slope is not None and not is_added_to
        if is_average and rule.is_mean:
            return Carried(i, adds_up=False)
        path = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(self.results[0])][i]
        if is_added_to:
            raise BoundaryError(
                f"the step adds to state leaf {path or 'itself'}, {dtype}{list(old.aval.shape)}, what it computes from the "
                'rows of one microbatch. Say how they come together: `jdist.aggregate(new, "sum", old=old)`, '
                '`jdist.aggregate(new, "mean")`, or add `jdist.all_reduce(x, "max")`.'
            )
        if is_average:
            raise BoundaryError(
                f"the step averages into state leaf {path or 'itself'}, {dtype}{list(old.aval.shape)}, what it computes from "
                f"the rows of one microbatch, and does not show that this is a mean over them. {SAY_WHAT_IT_IS}"
            )
        raise BoundaryError(
            f"the step computes state leaf {path or 'itself'}, {dtype}{list(old.aval.shape)}, from the rows of one "
            'microbatch, and microbatches have no common value of it. Combine it, `jdist.all_reduce(x, "max")` or '
            f"`jdist.aggregate`; for parameters change `jax.value_and_grad` to `jdist.value_and_grad`; or {self.otherwise}."
        )

    def _check_called_once(self, equations: Sequence[Any], effects: Sequence[Any]) -> None:
        """Refuses a part of the step that would call the host again for what another part calls it."""
        if any(_is_among(eqn, effects) for eqn in equations):
            raise BoundaryError(
                "the result of a callback is needed in several of the parts that the step is split into, and the "
                "callback would run once for each. Call it outside of the step and pass the value, or "
                f"{self.otherwise}."
            )


def axis_of_rows(part: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """Finds the axis along which parts were joined, from two shapes."""
    return next((i for i, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b), 0)


def own_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Takes this replica's rows of an array of all replicas' rows; `shape` is that of its own."""
    axis = axis_of_rows(shape, x.shape)
    return jax.lax.dynamic_slice_in_dim(x, collectives.replica_id() * shape[axis], shape[axis], axis)


def _leaves(*trees: PyTree) -> list[jax.Array]:
    return [leaf for tree in trees for leaf in jax.tree.leaves(tree)]


def _take(items: Any, count: int) -> list[Any]:
    return [next(items) for _ in range(count)]


def _is_among(eqn: Any, equations: Sequence[Any]) -> bool:
    """Returns whether an equation is one of these, not merely equal to one."""
    return any(eqn is other for other in equations)
