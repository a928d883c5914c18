"""The phases of a step, and what it computes of its microbatches in each.

A phase is a loop over the microbatches. A cut that reads another cut's result needs a later one; what no other cut reads
goes where a gradient is taken, so that a total of what the forward pass gives needs no forward pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax

from jdist.core.collective_marks import Collective, collective_of
from jdist.jaxpr import graph
from jdist.typing import PyTree

Var = graph.Var


@dataclass(frozen=True)
class Cut:
    """A collective that combines what microbatches computed.

    Attributes:
        collective: what it does.
        shapes: of the combined arrays.
        operands: the shapes of what is combined, one for each of them; of a gradient by a part that of the part.
        is_read_again: whether a later phase reads them; else the update part alone.
    """

    collective: Collective
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    operands: tuple[tuple[int, ...], ...]
    is_read_again: bool


@dataclass(frozen=True)
class Phase:
    """One loop over the microbatches.

    Attributes:
        cuts: those with operands that it computes.
        carried: the places of those of `Split.carried` that it computes.
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
class StepJaxpr:
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
        """Computes variables after the phases: `(state, others, combined, carried) -> values`, of flat lists or trees."""
        run = graph.subfunction(self.closed, self._after_phases, list(wanted))
        return lambda *values: run(jax.tree.leaves(values))

    def read_by(self, wanted: Sequence[Any]) -> tuple[int, ...]:
        """Finds the numbers of the state's leaves that `piece(wanted)` reads."""
        _, reads = graph.needed(self.closed, wanted, set(self._after_phases))
        return tuple(i for i, v in enumerate(self.state) if v in reads)

    @property
    def _after_phases(self) -> list[Any]:
        """The variables that are known once all phases have run."""
        return [*self.state, *self.others, *self.combined, *self.carried]

    def depends(self, sources: Sequence[Any]) -> set[Any]:
        """Finds the variables that depend on one of `sources`, by way of collectives too."""
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
            order, None in place of an output that a phase computes.
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
    traced: StepJaxpr
    state_treedef: Any
    outputs_treedef: Any

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Those of all phases, in order."""
        return tuple(cut for phase in self.phases for cut in phase.cuts)


@dataclass(frozen=True, kw_only=True)
class PhaseContents:
    """The contents of one phase.

    Attributes:
        cuts: the places of their equations.
        carried: numbers of leaves of the state that microbatches write.
        outputs: numbers of the step's outputs.
        effects: prints and callbacks of each microbatch; equations.
    """

    cuts: tuple[int, ...]
    carried: tuple[int, ...]
    outputs: tuple[int, ...]
    effects: tuple[Any, ...]


def schedule(
    closed: Any,
    own: AbstractSet[Var],
    *,
    carried: Sequence[Var],
    outputs: Mapping[int, Var],
    effects: Sequence[Any],
) -> list[PhaseContents]:
    """Assigns cuts, leaves, outputs and effects to phases.

    Args:
        closed: a traced step.
        own: its variables that are one microbatch's own.
        carried: the leaves of the new state that microbatches write.
        outputs: those that microbatches compute, by number.
        effects: prints and callbacks of each microbatch; equations.

    Returns:
        The phases, in the order of execution.
    """
    equations = graph.body_of(closed).eqns
    cuts = {place: eqn for place, eqn in enumerate(equations) if is_cut(eqn, own)}
    levels = _levels(equations, set(cuts))

    def level_of(variables: Sequence[Var]) -> int:
        return max((levels.get(v, 0) for v in variables if not graph.is_literal(v)), default=0)

    level_of_cut = {place: level_of(eqn.invars) for place, eqn in cuts.items()}
    gradients = sorted(level_of_cut[place] for place, eqn in cuts.items() if _is_gradient(eqn))
    last = max(level_of_cut.values(), default=0)

    def phase_of(*variables: Var) -> int:
        """Finds the first gradient for which all that they need is known, so that one forward pass serves both."""
        level = level_of(variables)
        return next((g for g in gradients if g >= level), max(level, last))

    ends = [*outputs.values(), *carried, *(v for eqn in [*effects, *cuts.values()] for v in eqn.invars)]
    _, read_in_phases = graph.needed(closed, ends, set())

    def phase_of_cut(place: int) -> int:
        """Puts a cut where its operands are known if a phase reads its result, else where a gradient is taken."""
        level, eqn = level_of_cut[place], cuts[place]
        if _is_gradient(eqn) or any(v in read_in_phases for v in eqn.outvars):
            return level
        return next((g for g in gradients if g >= level), level)

    of_cut = {place: phase_of_cut(place) for place in cuts}
    of_carried = [phase_of(v) for v in carried]
    of_output = {i: phase_of(v) for i, v in outputs.items()}
    of_effect = [phase_of(*eqn.invars) for eqn in effects]
    return [
        PhaseContents(
            cuts=tuple(place for place, phase in of_cut.items() if phase == number),
            carried=tuple(i for i, phase in enumerate(of_carried) if phase == number),
            outputs=tuple(i for i, phase in of_output.items() if phase == number),
            effects=tuple(eqn for eqn, phase in zip(effects, of_effect, strict=True) if phase == number),
        )
        for number in sorted({*of_cut.values(), *of_carried, *of_output.values(), *of_effect})
    ]


def _levels(equations: Sequence[Any], cuts: AbstractSet[int]) -> dict[Var, int]:
    """Counts for each variable the cuts in sequence that come before it; `cuts` are places of equations."""
    levels: dict[Var, int] = {}
    for place, eqn in enumerate(equations):
        level = max((levels.get(v, 0) for v in eqn.invars if not graph.is_literal(v)), default=0)
        levels.update((v, level + (place in cuts)) for v in eqn.outvars)
    return levels


def is_cut(eqn: Any, own: AbstractSet[Var]) -> bool:
    """Returns whether an equation is a collective that reads one of these variables, which are a microbatch's own."""
    return collective_of(eqn) is not None and any(graph.is_in(v, own) for v in eqn.invars)


def _is_gradient(eqn: Any) -> bool:
    collective = collective_of(eqn)
    return collective is not None and collective.kind == "gradient"
