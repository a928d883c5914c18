"""A step -> what each microbatch computes, what is combined over microbatches and replicas, and what is computed once
from that.

Microbatches are replicas in time: `accumulate=k` on N replicas is the step on k x N replicas. A traced step holds its
collectives (`jdist.value_and_grad`, `all_reduce`, `mean` with a mask, ...) as equations (`collective.py`). Each that
combines what differs from microbatch to microbatch is a *cut*: what it reads is computed in a loop over the
microbatches and summed up, the sums are combined over the replicas, and what follows reads the result. A cut that
depends on another needs a further loop, a *phase*; what it needs again of the microbatch is computed again. What
depends on no microbatch but through cuts is the *update part* and runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jdist.core.collective_marks import Collective, collective_of
from jdist.core.context import ReplicaTrace, tracing
from jdist.core.strategy import Strategy
from jdist.errors import BoundaryError
from jdist.jaxpr import graph
from jdist.jaxpr.affine import AffineRule
from jdist.replica import collectives

PyTree = Any
Step = Callable[..., tuple[PyTree, PyTree]]


@dataclass(frozen=True)
class Cut:
    """A collective that combines what microbatches computed.

    Attributes:
        collective: what it does.
        shapes: of the combined arrays.
        is_read_again: whether a later phase reads them; else the update part alone.
    """

    collective: Collective
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    is_read_again: bool


@dataclass(frozen=True)
class Phase:
    """One loop over the microbatches.

    Attributes:
        cuts: those whose operands it computes.
        carried: which of `Split.carried` it computes, by place.
        outputs: which of the step's outputs it computes, by place.
        prepare: `(state, others, combined) -> prepared`, what is the same for all its microbatches; `combined` holds
            the combined arrays of all earlier phases' cuts.
        run: `(prepared, batch, microbatch) -> (operands of each cut, carried leaves, outputs)`.
    """

    cuts: tuple[Cut, ...]
    carried: tuple[int, ...]
    outputs: tuple[int, ...]
    prepare: Callable[[PyTree, PyTree, list[jax.Array]], list[jax.Array]]
    run: Callable[[list[jax.Array], PyTree, jax.Array], tuple[list[list[jax.Array]], list[jax.Array], list[jax.Array]]]


@dataclass(frozen=True)
class Carried:
    """A leaf of the state that a step computes from its rows without combining it.

    Attributes:
        leaf: its number in the state.
        adds_up: whether each microbatch adds a whole number to the old value (a counter), so that all additions count;
            else the microbatches' values are averaged, as replicas' are.
    """

    leaf: int
    adds_up: bool


@dataclass(frozen=True)
class Traced:
    """A step's jaxpr, and what its variables are.

    Attributes:
        closed: `(state leaves, batch leaves, others' leaves, microbatch) -> (state leaves, outputs)`.
        state: the variables of the state's leaves.
        batch: of the batch's.
        others: of the further arguments'.
        microbatch: of the microbatch's number.
        new_state: of the new state's leaves.
        outputs: of the outputs.
        combined: of the combined arrays of all cuts, in order.
        carried: of the leaves that phases write.
    """

    closed: Any
    state: tuple[Any, ...]
    batch: tuple[Any, ...]
    others: tuple[Any, ...]
    microbatch: Any
    new_state: tuple[Any, ...]
    outputs: tuple[Any, ...]
    combined: tuple[Any, ...]
    carried: tuple[Any, ...]

    def piece(self, wanted: Sequence[Any]) -> Callable[..., list[jax.Array]]:
        """What computes variables behind the phases: `(state, others, combined, carried) -> values`, flat lists or trees."""
        given = [*self.state, *self.others, *self.combined, *self.carried]
        run = graph.subfunction(self.closed, given, list(wanted))
        return lambda *values: run(_leaves(*values))

    def read_by(self, wanted: Sequence[Any]) -> tuple[int, ...]:
        """Numbers of the state's leaves that `piece(wanted)` reads."""
        given = {*self.state, *self.others, *self.combined, *self.carried}
        _, reads = graph.needed(self.closed, [v for v in wanted if not graph.is_literal(v)], given)
        return tuple(i for i, v in enumerate(self.state) if v in reads)

    def depends(self, sources: Sequence[Any]) -> set[Any]:
        """Every variable that depends on one of `sources`, by way of collectives too."""
        return graph.dependents(self.closed, sources)


@dataclass(frozen=True)
class Split:
    """A traced step in phases, each a pure function of flat lists of arrays.

    Attributes:
        phases: in the order of execution.
        carried: the leaves of the state that phases write.
        read: numbers of the state's leaves that phases read.
        varies: for each output, whether it differs between replicas (or microbatches) if it is not averaged.
        early: for each output, whether a phase computes it; the others wait for the update.
        output_shapes: of the outputs.
        update: `(state, others, combined, carried) -> (state leaves, outputs)`, `combined` the arrays of all cuts in
            order, None in the place of an output that a phase computes.
        traced: the traced step, for those who take it apart further.
        state_treedef: of the state.
        outputs_treedef: of the outputs.
    """

    phases: tuple[Phase, ...]
    carried: tuple[Carried, ...]
    read: tuple[int, ...]
    varies: tuple[bool, ...]
    early: tuple[bool, ...]
    output_shapes: tuple[jax.ShapeDtypeStruct, ...]
    update: Callable[..., tuple[list[jax.Array], list[jax.Array | None]]]
    traced: Traced
    state_treedef: Any
    outputs_treedef: Any

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Those of all phases, in order."""
        return tuple(cut for phase in self.phases for cut in phase.cuts)


def split(
    strategy: Strategy,
    step: Step,
    state: PyTree,
    batch: PyTree,
    others: PyTree = (),
    *,
    num_microbatches: int = 1,
    otherwise: str = "leave `accumulate` at 1",
) -> Split:
    """Traces a step once and splits it.

    Args:
        strategy: the strategy that the step runs under; its axes are bound by the caller.
        step: `(state, batch, others) -> (state, outputs)`, pure.
        state: pytree of arrays or tracers.
        batch: one microbatch; pytree of arrays or tracers.
        others: further arguments, the same for all microbatches.
        num_microbatches: how many microbatches a replica has.
        otherwise: what an error tells the user to do instead of writing the step anew.

    Returns:
        Its phases and its update part.

    Raises:
        BoundaryError: a collective of the step stands inside a loop, a condition or a `jax.checkpoint` of its own; the
            step combines no gradient; or it writes to its state what microbatches have no common value of.
    """

    num_virtual = [1]

    def traced(state: PyTree, batch: PyTree, others: PyTree, microbatch: jax.Array) -> Any:
        with tracing(ReplicaTrace(strategy, num_microbatches=num_microbatches, microbatch=microbatch)):
            num_virtual[0] = collectives.num_replicas()
            return step(state, batch, others)

    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(state, batch, others, jnp.int32(0))
    closed = graph.flat_collectives(closed)

    def scattered(eqn: Any, operands: list[Any], microbatch: Any) -> list[Any] | None:
        """The transpose of a gather: the sum over all, of which each takes the rows that it gave."""
        found = collective_of(eqn)
        if found is None or not graph.is_transposed_gather(eqn):
            return None
        with tracing(ReplicaTrace(strategy, num_microbatches=num_microbatches, microbatch=microbatch)):
            totals = collectives.combine(Collective("value", "sum"), operands)
            return [own_rows(x, v.aval.shape) for x, v in zip(totals, eqn.outvars, strict=True)]

    if any(map(graph.is_transposed_gather, graph.body_of(closed).eqns)):
        closed = graph.replaced(closed, scattered)
    closed = graph.forwarded(closed)
    return _Analysis(
        closed,
        shapes,
        state,
        batch,
        others,
        num_microbatches,
        (num_virtual[0] // num_microbatches, num_microbatches),
        otherwise,
    ).split()


class _Analysis:
    """Sorts the equations of a traced step into phases and the update part."""

    def __init__(
        self,
        closed: Any,
        shapes: Any,
        state: PyTree,
        batch: PyTree,
        others: PyTree,
        num_microbatches: int,
        sizes: tuple[int, int],
        otherwise: str,
    ):
        self.closed, self.otherwise, self.sizes = closed, otherwise, sizes
        jaxpr = graph.body_of(closed)
        invars, outvars = iter(jaxpr.invars), iter(jaxpr.outvars)
        self.state = _take(invars, len(jax.tree.leaves(state)))
        self.batch = _take(invars, len(jax.tree.leaves(batch)))
        self.others = _take(invars, len(jax.tree.leaves(others)))
        self.microbatch = next(invars)
        self.new_state_shape, self.outputs_shape = shapes
        self.new_state = _take(outvars, len(jax.tree.leaves(self.new_state_shape)))
        self.outputs = _take(outvars, len(jax.tree.leaves(self.outputs_shape)))

        # Whatever is one microbatch's own, and which phase may read what: after which cuts a variable is known.
        self.own = graph.of_one_microbatch(closed, [*self.batch, self.microbatch])
        self.level: dict[Any, int] = {}
        self.cut_level: dict[int, int] = {}  # of a cut, by the place of its equation
        self.equations = list(jaxpr.eqns)
        for place, eqn in enumerate(self.equations):
            level = max((self._level(v) for v in eqn.invars), default=0)
            if any(map(self._is_own, eqn.invars)):
                self._check_nested(eqn, num_microbatches)
                if collective_of(eqn) is not None:
                    self.cut_level[place] = level
                    level += 1
            self.level.update((v, level) for v in eqn.outvars)
        self.gradients = sorted(
            level for place, level in self.cut_level.items() if self._collective(place).kind == "gradient"
        )
        self.place_of = {v: place for place in self.cut_level for v in self.equations[place].outvars}
        self._check_effects()

    def _operands(self, place: int) -> list[Any]:
        """What a cut combines: an operand for each result."""
        eqn = self.equations[place]
        if len(eqn.invars) == len(eqn.outvars):
            return list(eqn.invars)
        places = graph.operands_of_results(eqn)
        assert all(i is not None for i in places)  # combined one by one where a step is split
        return [eqn.invars[i] for i in places if i is not None]

    def _collective(self, place: int) -> Collective:
        found = collective_of(self.equations[place])
        assert found is not None  # every cut is one
        return found

    def _is_own(self, v: Any) -> bool:
        return graph.is_in(v, self.own)

    def _level(self, v: Any) -> int:
        return 0 if graph.is_literal(v) else self.level.get(v, 0)

    def _check_nested(self, eqn: Any, num_microbatches: int) -> None:
        if collective_of(eqn) is None and num_microbatches > 1 and graph.collectives_in(eqn):
            raise BoundaryError(
                "the step calls `jdist.value_and_grad`, a masked `jdist.mean` or another jdist collective inside a "
                "`lax.scan`, `lax.cond`, `lax.while_loop` or `jax.checkpoint` of its own, where it cannot be split. "
                "Call it in the step itself: let the inner function return the loss of each example and take the mean "
                f"outside of it; or {self.otherwise}."
            )

    def _check_effects(self) -> None:
        self.late_effects, self.early_effects = [], []
        of_cuts = graph.dependents(self.closed, self.place_of)
        for eqn in graph.effects_of(self.closed):
            if not graph.is_print_or_callback(eqn):
                raise BoundaryError(
                    f"the step reads or writes a `jax.Ref` (`{eqn.primitive.name}`), so it cannot be split. Compute with "
                    "arrays, or leave `accumulate` at 1."
                )
            # A print or a callback of each microbatch, as of each replica; once where what it shows is combined.
            is_late = any(graph.is_in(v, of_cuts) for v in eqn.invars) and not any(map(self._is_own, eqn.invars))
            (self.late_effects if is_late else self.early_effects).append(eqn)

    def split(self) -> Split:
        carried = tuple(self._carried(i) for i, v in enumerate(self.new_state) if self._is_own(v))
        early = tuple(map(self._is_own, self.outputs))
        phase_of_cut = self._schedule(carried, early)
        wanted = [(self._home(self.new_state[c.leaf]), "carried", n) for n, c in enumerate(carried)]
        wanted += [(self._home(v), "outputs", i) for i, v in enumerate(self.outputs) if early[i]]
        effects = [
            (self._phase_of_level(max((self._level(v) for v in eqn.invars), default=0)), eqn)
            for eqn in self.early_effects
        ]
        numbers = sorted({*phase_of_cut.values(), *(p for p, _, _ in wanted), *(p for p, _ in effects)})

        phases: list[Phase] = []
        combined: list[Any] = []
        reads: set[Any] = set()
        for number in numbers:
            places = sorted(place for place, phase in phase_of_cut.items() if phase == number)
            mine = {
                what: tuple(i for p, w, i in wanted if p == number and w == what) for what in ("carried", "outputs")
            }
            phases.append(self._phase(places, carried, mine, [e for p, e in effects if p == number], combined, reads))
            combined += [v for place in places for v in self.equations[place].outvars]
        again = reads & set(combined)
        ordered = [place for number in numbers for place in sorted(p for p, n in phase_of_cut.items() if n == number)]
        described = iter(
            Cut(
                self._collective(place),
                tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.equations[place].outvars),
                any(v in again for v in self.equations[place].outvars),
            )
            for place in ordered
        )
        phases = [
            Phase(tuple(next(described) for _ in phase.cuts), phase.carried, phase.outputs, phase.prepare, phase.run)
            for phase in phases
        ]
        carried_vars = [self.new_state[c.leaf] for c in carried]
        of_replicas = graph.varying(self.closed, [*self.batch, *carried_vars])
        late_vars = [v for v, is_early in zip(self.outputs, early, strict=True) if not is_early]
        given = [*self.state, *self.others, *combined, *carried_vars]
        self._check_not_called_again([*self.new_state, *late_vars], given)
        run_update = graph.subfunction(self.closed, given, [*self.new_state, *late_vars], self.late_effects)

        def update(state: Any, others: Any, combined: Sequence[Any], carried: Sequence[Any]) -> Any:
            out = iter(run_update([*_leaves(state, others), *combined, *carried]))
            return _take(out, len(self.new_state)), [None if is_early else next(out) for is_early in early]

        return Split(
            phases=tuple(phases),
            carried=carried,
            read=tuple(i for i, v in enumerate(self.state) if v in reads),
            varies=tuple(not graph.is_literal(v) and (v in of_replicas or v in self.own) for v in self.outputs),
            early=early,
            output_shapes=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.outputs),
            update=update,
            traced=Traced(
                self.closed,
                tuple(self.state),
                tuple(self.batch),
                tuple(self.others),
                self.microbatch,
                tuple(self.new_state),
                tuple(self.outputs),
                tuple(combined),
                tuple(carried_vars),
            ),
            state_treedef=jax.tree.structure(self.new_state_shape),
            outputs_treedef=jax.tree.structure(self.outputs_shape),
        )

    def _home(self, v: Any) -> int:
        """The phase that computes a variable that no cut reads."""
        return self._phase_of_level(self._level(v))

    def _phase_of_level(self, level: int) -> int:
        """That of the first gradient for which all that is needed is known, so that one forward pass serves both."""
        last = max(self.cut_level.values(), default=0)
        return next((g for g in self.gradients if g >= level), max(level, last))

    def _schedule(self, carried: Sequence[Carried], early: Sequence[bool]) -> dict[int, int]:
        """The phase of each cut: as soon as its operands are known where another phase reads it, else where a gradient
        is taken.

        So a total of what the forward pass gives needs no forward pass of its own.
        """
        ends = [v for v, is_early in zip(self.outputs, early, strict=True) if is_early]
        ends += [self.new_state[c.leaf] for c in carried]
        ends += [v for eqn in self.early_effects for v in eqn.invars]
        ends += [v for place in self.cut_level for v in self.equations[place].invars]
        _, reads = graph.needed(self.closed, [v for v in ends if not graph.is_literal(v)], set())
        return {
            place: level if any(v in reads for v in self.equations[place].outvars) else self._phase_of_end(place, level)
            for place, level in self.cut_level.items()
        }

    def _phase_of_end(self, place: int, level: int) -> int:
        if self._collective(place).kind == "gradient":
            return level
        return next((g for g in self.gradients if g >= level), level)

    def _phase(
        self,
        places: list[int],
        carried: Sequence[Carried],
        mine: dict[str, tuple[int, ...]],
        effects: list[Any],
        combined: list[Any],
        reads: set[Any],
    ) -> Phase:
        operands = [self._operands(place) for place in places]
        carried_vars = [self.new_state[carried[n].leaf] for n in mine["carried"]]
        outputs = [self.outputs[i] for i in mine["outputs"]]
        wanted = [*(v for vs in operands for v in vs), *carried_vars, *outputs]
        known = list(combined)
        given = {*self.state, *self.others, *known}
        equations, _ = graph.needed(self.closed, wanted, {*self.batch, self.microbatch, *given}, effects)
        if any(
            e is other for e in equations for other in self.early_effects if all(other is not own for own in effects)
        ):
            self._refuse_second_call()
        read = {v for eqn in equations for v in eqn.invars if not graph.is_literal(v)}
        read |= {v for v in wanted if not graph.is_literal(v)}
        # What is the same for all microbatches is computed before their loop: variables that own equations, or results,
        # read.
        looped = [eqn for eqn in equations if any(map(self._is_own, eqn.invars)) or any(eqn is e for e in effects)]
        at_loop = {v for eqn in looped for v in eqn.invars if not graph.is_literal(v)}
        at_loop |= {v for v in wanted if not graph.is_literal(v)}
        constants = set(graph.body_of(self.closed).constvars)
        hoisted = [v for v in dict.fromkeys([*self._in_order(at_loop)]) if v not in self.own and v not in constants]
        before = graph.subfunction(self.closed, [*self.state, *self.others, *known], hoisted)
        equations_before, needed_before = graph.needed(self.closed, hoisted, given)
        if any(eqn is effect for eqn in equations_before for effect in (*self.late_effects, *self.early_effects)):
            self._refuse_second_call()
        reads |= needed_before | set(hoisted)
        inside = graph.subfunction(self.closed, [*hoisted, *self.batch, self.microbatch], wanted, effects)
        sizes = [len(vs) for vs in operands]

        def prepare(state: Any, others: Any, combined: Sequence[Any]) -> list[Any]:
            return before([*_leaves(state, others), *combined])

        def run(prepared: Sequence[Any], batch: Any, microbatch: Any) -> Any:
            out = iter(inside([*prepared, *jax.tree.leaves(batch), microbatch]))
            return [_take(out, n) for n in sizes], _take(out, len(carried_vars)), _take(out, len(outputs))

        placeholder = Cut(Collective("value", "sum"), (), False)  # described once all phases are known
        return Phase((placeholder,) * len(places), mine["carried"], mine["outputs"], prepare, run)

    def _in_order(self, variables: set[Any]) -> list[Any]:
        order = [*graph.body_of(self.closed).invars, *(v for eqn in self.equations for v in eqn.outvars)]
        return [v for v in order if v in variables]

    def _carried(self, i: int) -> Carried:
        """How microbatches share a leaf that each computes for itself."""
        old, new = self.state[i], self.new_state[i]
        dtype = old.aval.dtype
        if self.sizes[1] == 1:
            return Carried(i, adds_up=False)
        rule = AffineRule(self.closed, old, new, self.sizes)
        slope = rule.of_program()
        is_added_to = isinstance(slope, float | int) and slope == 1
        if is_added_to and rule.adds_whole_numbers:
            return Carried(i, adds_up=True)
        if jnp.issubdtype(dtype, jnp.floating) and slope is not None and not is_added_to:
            return Carried(i, adds_up=False)
        path = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(self.new_state_shape)][i]
        if is_added_to:
            raise BoundaryError(
                f"the step adds to state leaf {path or 'itself'}, {dtype}{list(old.aval.shape)}, what it computes from the "
                "rows of one microbatch: a sum over its rows, of which all count, or a mean, of which the mean counts? Say "
                'it: `jdist.aggregate(new, "sum", old=old)`, or `jdist.aggregate(new, "mean")`.'
            )
        raise BoundaryError(
            f"the step computes state leaf {path or 'itself'}, {dtype}{list(old.aval.shape)}, from the rows of one "
            "microbatch, and microbatches, like replicas, have no common value of it: it is no sum and no moving "
            'average. Say how they come together: `jdist.all_reduce(x, "max")`, `jdist.aggregate(new, "sum", '
            f"old=old)`, ...; for parameters change `jax.value_and_grad` to `jdist.value_and_grad`; or {self.otherwise}."
        )

    def _check_not_called_again(self, wanted: list[Any], given: list[Any]) -> None:
        equations, _ = graph.needed(self.closed, wanted, set(given))
        if any(eqn is effect for eqn in equations for effect in self.early_effects):
            self._refuse_second_call()

    def _refuse_second_call(self) -> None:
        raise BoundaryError(
            "what a callback of the step returned is needed in more than one of the parts that the step is split into "
            "(the mask of a mean and the loss, for example), and it would be called once for each. Call it outside of "
            f"the step and pass the value as an argument, or {self.otherwise}."
        )


def own_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """This replica's rows of an array of all replicas' rows; `shape` is what it gave."""
    axis = next((i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b), 0)
    return jax.lax.dynamic_slice_in_dim(x, collectives.replica_id() * shape[axis], shape[axis], axis)


def _leaves(*trees: PyTree) -> list[jax.Array]:
    return [leaf for tree in trees for leaf in jax.tree.leaves(tree)]


def _take(items: Any, count: int) -> list[Any]:
    return [next(items) for _ in range(count)]
