"""What a step does with its state on a strategy: where each leaf is, and what the compiled program exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jdist.core.state_report import StateReport
from jdist.errors import StepError
from jdist.plan.collectives import Collective, collectives
from jdist.plan.hlo import parse
from jdist.plan.table import aligned
from jdist.step.mesh_step import DistributedStep
from jdist.support.html import table

PyTree = Any
_HEADER = ("kind", "count", "bytes", "mesh axis", "groups")


@dataclass(frozen=True)
class Explanation:
    """What a step does: `print` it, or show it in a notebook.

    Attributes:
        state: where each leaf of the state is.
        collectives: of one call of the compiled program.
        arguments: bytes of a device's memory that state and batch take.
        temporaries: bytes of it that activations, gradients and gathered arrays take, as the compiler says.
    """

    state: StateReport
    collectives: Sequence[Collective]
    arguments: int
    temporaries: int

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                c.kind,
                f"{c.count:,}",
                f"{c.bytes:,}",
                c.axes,
                f"{c.groups:,} of {c.group_size:,}" if c.group_size else "",
            )
            for c in self.collectives
        ]

    def _memory(self) -> str:
        return f"a device's memory: {self.arguments:,} bytes of arguments, {self.temporaries:,} of temporaries"

    def __str__(self) -> str:
        title = "collectives in one call" if self.collectives else "collectives in one call: none"
        lines = aligned([_HEADER, *self._rows()]) if self.collectives else []
        return "\n".join([str(self.state), "", title, *(f"  {line}" for line in lines), "", self._memory()])

    def _repr_html_(self) -> str:
        exchanged = table(self._rows(), header=_HEADER, title=f"collectives in one call; {self._memory()}")
        return self.state._repr_html_() + exchanged


def explain(step: Any, state: PyTree, *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Explains what a distributed step does with its state; compiles it, and runs nothing.

    Args:
        step: what `jdist.distribute` made, under a strategy whose processes all run the same program; its devices need not be
            here.
        state: a state, or its shapes.
        *args: the step's further arguments, a batch first; arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: as `args`.

    Returns:
        An explanation to print or to show in a notebook.

    Raises:
        StepError: `step` is no such step.

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
    if not isinstance(step, DistributedStep):
        raise StepError(
            f"jdist.explain takes a step that `jdist.distribute` made under a strategy such as `jdist.sharded()`, and got a "
            f"{type(step).__name__}. Decorate the function; what a parameter server does, its strategy's `report` tells."
        )
    compiled = step.lower(state, *args, **kwargs).compile()
    mesh, memory = step.strategy.mesh, compiled.memory_analysis()
    assert memory is not None  # every backend of JAX analyses its programs
    return Explanation(
        state=step.strategy.report(state),
        collectives=() if mesh is None else collectives(parse(compiled.as_text() or ""), mesh.shape),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
    )
