"""How a kind of strategy lays out states and compiles steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jdist.core.strategy import Strategy
from jdist.step.mesh_program import Program, compile_over_mesh
from jdist.step.outputs import Traced
from jdist.step.placement import adopt_state, compare_replicas, shapes_in
from jdist.step.program_spec import ProgramSpec
from jdist.step.replica_program import replica_program

PyTree = Any


@dataclass(frozen=True)
class Backend:
    """How a kind of strategy lays out states and compiles steps.

    Attributes:
        adopt_state: `(strategy, state) -> state` in the strategy's layout.
        state_shapes: `(strategy, state) -> ShapeDtypeStructs` of that layout, for a state of arrays or structs.
        make_program: `(spec) -> Program`, of what is said there.
        compare_replicas: `(strategy, state, results of the program) -> None`, raises where replicas differ.
    """

    adopt_state: Callable[[Strategy, PyTree], PyTree]
    state_shapes: Callable[[Strategy, PyTree], PyTree]
    make_program: Callable[[ProgramSpec], Program]
    compare_replicas: Callable[[Strategy, PyTree, Any], None]


@dataclass(frozen=True)
class Rehearsal:
    """A call that is ready to run aside: nothing of the step's own takes notice of it.

    Attributes:
        program: the compiled step, or what compiles at its first call.
        traced: what tracing it told; filled in by then.
        arguments: `(token, state, batches, others)` in their places; the state's arrays are nobody else's.
    """

    program: Program
    traced: Traced
    arguments: tuple[PyTree, ...]


def _replicated_program(spec: ProgramSpec) -> Program:
    return compile_over_mesh(replica_program(spec), spec)


REPLICATED = Backend(
    adopt_state,
    lambda strategy, state: shapes_in(state, strategy.replicated_sharding),
    _replicated_program,
    lambda strategy, state, results: compare_replicas(strategy, state),
)
