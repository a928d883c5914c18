"""The treatment of a step's state on a strategy: where each leaf is, and what the compiled program exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jdist.core.collective_marks import Gather
from jdist.core.state_report import StateReport
from jdist.errors import StepError
from jdist.plan.collectives import Collective, collectives
from jdist.plan.hlo import parse
from jdist.plan.table import table_of_collectives
from jdist.step.base import Distributed
from jdist.step.mesh_step import DistributedStep
from jdist.support.table import Table
from jdist.typing import PyTree

_GATHERS = "gathers of arrays in parts, and the bytes that a device then holds"


@dataclass(frozen=True)
class Explanation:
    """The work of a step: `print` it, or show it in a notebook."""

    state: StateReport
    # of leaves in parts, as traced: each leaf and place once, with its first line
    gathers: Sequence[Gather]
    collectives: Sequence[Collective]  # of one call of the compiled program
    arguments: int  # bytes of a device's memory for state and batch
    temporaries: int  # bytes for activations, gradients and gathered arrays, as the compiler says

    @property
    def _tables(self) -> list[Table]:
        gathered = [(g.leaf, f"{g.num_bytes:,}", g.why + f", {g.line}" * bool(g.line)) for g in self.gathers]
        memory = f"a device's memory: {self.arguments:,} bytes of arguments, {self.temporaries:,} of temporaries"
        exchanged = table_of_collectives("collectives in one call", self.collectives, [memory])
        return [*([Table(_GATHERS, gathered, ("leaf", "bytes", "gathered"))] if gathered else []), exchanged]

    def __str__(self) -> str:
        return "\n\n".join([str(self.state), *map(str, self._tables)])

    def _repr_html_(self) -> str:
        return "".join(each._repr_html_() for each in (self.state, *self._tables))


def explain(step: Any, state: PyTree, *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Explains what a distributed step does with its state; compiles it, and runs nothing.

    Args:
        step: what `jdist.distribute` or `jdist.nnx.distribute` made, under a strategy with the same program in all processes;
            its devices need not be here.
        state: a state, or its shapes; of an nnx step its first object.
        *args: the step's further arguments, a batch first; arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: as `args`.

    Returns:
        An explanation to print or to show in a notebook.

    Raises:
        StepError: `step` is not such a step.

    Example:
        >>> import jax.numpy as jnp, jdist
        >>> @jdist.distribute(jdist.mirrored(["cpu:0", "cpu:1"]))
        ... def train_step(w, batch):
        ...     loss, grad = jdist.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
        ...     return w - 0.1 * grad, {"loss": loss}
        >>> explanation = jdist.explain(train_step, jnp.ones(3), {"x": jnp.ones((4, 3))})
        >>> [c.kind for c in explanation.collectives]
        ['all-reduce']
    """
    pure, args = step.pure((state, *args)) if isinstance(step, Distributed) else (None, args)
    if not isinstance(pure, DistributedStep):
        raise StepError(
            f"jdist.explain takes a step that `jdist.distribute` made under a strategy such as `jdist.sharded()`, and got a "
            f"{type(step).__name__}. Decorate the function; for a parameter server use `strategy.report`."
        )
    step = DistributedStep(pure.strategy, pure.__wrapped__, pure.options, pure.backend)  # traced again, by these shapes
    compiled = step.lower(*args, **kwargs).compile()
    call, state, *_ = step.bind(args, kwargs)
    _, traced = step.program(call)
    gathers = {(g.leaf, g.why): g for g in reversed(traced.gathers)}
    mesh, memory = step.strategy.mesh, compiled.memory_analysis()
    assert memory is not None  # every backend of JAX analyses its programs
    return Explanation(
        state=step.strategy.report(state),
        gathers=tuple(gathers.values())[::-1],
        collectives=() if mesh is None else collectives(parse(compiled.as_text() or ""), mesh.shape),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
    )
