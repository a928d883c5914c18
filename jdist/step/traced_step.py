"""A step that is traced, lowered and previewed; nothing of it runs. `mesh_step` adds the calls."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jdist.core.context import in_own_settings, run_under_mesh
from jdist.core.division import shapes
from jdist.core.step_state import StepState, carrying, loss_scale_of, pack, unpack, with_static_leaves
from jdist.core.strategy import Strategy
from jdist.step import placement
from jdist.step.base import Distributed, Preview
from jdist.step.call_errors import explain
from jdist.step.error_feedback import ResidualSlot
from jdist.step.in_flight import NewestState
from jdist.step.mesh_program import Backend, Program
from jdist.step.options import StepOptions
from jdist.step.outputs import Traced
from jdist.step.placement import shapes_in
from jdist.step.program_spec import ProgramSpec
from jdist.step.signature import Call, Others, Signature, Step, split_states
from jdist.support.tracebacks import without_own_frames
from jdist.typing import PyTree


class TracedStep(Distributed):
    """A step and its programs over the mesh, one for each kind of call."""

    def __init__(self, strategy: Strategy, step: Step, options: StepOptions, backend: Backend):
        self.__name__, self.__wrapped__ = "the step", step
        functools.update_wrapper(self, step)
        self.strategy, self.options, self.backend = strategy, options, backend
        self._step = with_static_leaves(step)
        self._signature = Signature(step, options, strategy)
        self._programs: dict[Call, tuple[Program, Traced]] = {}
        self._flag_names: list[str] = []
        self._newest = NewestState()
        self._residuals = None
        if strategy.keeps_residuals:
            self._residuals = ResidualSlot(self.__name__, step, lambda: self._newest.packed)

    @property
    @abc.abstractmethod
    def _token(self) -> Any:
        """The token that the next call takes."""

    @without_own_frames
    @in_own_settings
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Traces and lowers the step without running it.

        Args:
            *args: as in a call; arrays, or `jax.ShapeDtypeStruct`s in their place.
            **kwargs: as in a call.

        Returns:
            JAX's `Lowered`: `.as_text()` is StableHLO, `.compile()` gives memory and cost.
        """
        return self._trace(args, kwargs, lambda traced: traced.lower())[0]

    @without_own_frames
    @in_own_settings
    def prepare(self, *args: Any, **kwargs: Any) -> PyTree:
        """Returns the state as a call does: in its place, with a loss scale or residuals where a step keeps them.

        To restore a checkpoint into, which holds these too.

        Args:
            *args: as in a call; batches may be `jax.ShapeDtypeStruct`s.
            **kwargs: as in a call.

        Returns:
            The state, of a step of several a tuple of them; nothing of the step is run.
        """
        call, state, batches, others = self._bind_shapes(args, kwargs)
        state = self.backend.adopt_state(self.strategy, state)
        if self.strategy.keeps_residuals:
            state = self._with_residuals(call, state, batches, others)
        return self._as_returned(unpack(state))

    @in_own_settings
    def preview(self, *args: Any, **kwargs: Any) -> Preview:
        """Describes what a call would do: traces the step, compiles and runs nothing.

        Args:
            *args: as in a call; batches may be `jax.ShapeDtypeStruct`s.
            **kwargs: as in a call.
        """
        return Preview.of(*self._trace(args, kwargs))

    @in_own_settings
    def jaxpr(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the step, compiles and runs nothing; its jaxpr, closed. `*args` and `**kwargs` are as in `preview`."""
        traced, _, _ = self._trace(args, kwargs)
        return traced.jaxpr

    def _trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[Any], Any] = lambda traced: traced
    ) -> tuple[Any, Traced, tuple[PyTree, ...]]:
        """Traces a call: what JAX has traced, or `then` makes of it; what is known of the results; the arguments."""
        call, state, batches, others = self._bind_shapes(args, kwargs)
        try:
            program, traced = self.program(call)
            whole = self.strategy.replicated_sharding
            token, others = shapes_in(self._token, whole), shapes_in(others, whole)
            batches = placement.batch_shapes(self.strategy, self.options, batches, call.batch_axes)
            if self.strategy.keeps_residuals:
                state = self._with_residuals(call, state, batches, others, shapes_alone=True)
                own = shapes_in(state.residuals, self.strategy.batch_sharding)
                state = carrying(shapes_in(carrying(state, residuals=None), whole), residuals=own)
            else:
                state = shapes(self.strategy, state)
            arguments = token, state, batches, others
            made = run_under_mesh(self.strategy, lambda: then(program.trace(*arguments)))
        except Exception as exc:
            explain(exc, self.strategy, self._signature, call, state, batches, others)
            raise
        return made, traced, arguments

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, PyTree, PyTree, PyTree]:
        """Sorts the arguments of a call by role: `(call, state, batches, others)`."""
        return self._signature.bind(args, kwargs)

    def _bind_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, PyTree, PyTree, Others]:
        """Sorts arguments that may be shapes; the state is packed, with a loss scale if the step has one."""
        call, state, batches, others = self._signature.bind(args, kwargs)
        placement.check_stacking(batches, self.strategy, self.options, call.batch_axes)
        return call, self._with_loss_scale(pack(state)), batches, others

    def _with_loss_scale(self, state: PyTree) -> PyTree:
        """Gives a state the first loss scale, if the step scales its loss and the state has none."""
        scaling = self.options.loss_scaling
        if scaling is None or loss_scale_of(state) is not None:
            return state
        return carrying(state, loss_scale=scaling.begin())

    def _with_residuals(
        self, call: Call, state: PyTree, batches: PyTree, others: Others, *, shapes_alone: bool = False
    ) -> StepState:
        """Gives a state residuals of zeros for this step's gradients, or shapes of them, unless it has some."""
        assert self._residuals is not None  # callers ask `strategy.keeps_residuals` first
        program, _ = self.program(call)

        def after(state: PyTree) -> PyTree:
            return program.trace(shapes_in(self._token, None), state, shapes_in(batches, None), others).out_info[1]

        state_shapes = shapes_in(carrying(state, residuals={}), None)
        sharding = self.strategy.batch_sharding
        zeros = None if shapes_alone else lambda x: jnp.zeros(x.shape, x.dtype, device=sharding)
        return self._residuals.filled(call, state, state_shapes, after, zeros)

    def _as_returned(self, state: PyTree) -> PyTree:
        """Splits a state as a call returns it: into a tuple, if the step has several."""
        return state if self.options.num_states < 2 else split_states(state, self.options.num_states)

    def program(self, call: Call) -> tuple[Program, Traced]:
        """Makes the program of calls like this one, once: `(program, knowledge of its results)`."""
        entry = self._programs.get(call)
        if entry is None:
            traced = Traced()
            spec = ProgramSpec(self._step, self.strategy, self.options, call, traced, self._flag_names, self.__name__)
            entry = self._programs[call] = self.backend.make_program(spec), traced
        return entry
