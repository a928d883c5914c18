"""The collectives of a step, as equations that can be found again in its jaxpr.

What a value means (combined over all replicas, a total, one replica's part) follows from the program: each jdist
collective is a call of a function with a name of its own, which JAX keeps through `grad`, `vmap` and `jit`. What
depends on the batch by way of such equations alone is the same on every replica and for every microbatch.
"""

from __future__ import annotations

import re
import site
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jdist.errors import StepError

Kind = Literal["gradient", "value"]
Op = Literal["mean", "sum", "max", "min", "gather"]
_PACKAGES = tuple({str(Path(p)) for p in (*site.getsitepackages(), sysconfig.get_paths()["stdlib"])}) + (
    str(Path(__file__).parents[1]),
)


@dataclass(frozen=True)
class Collective:
    """The operation of a collective."""

    kind: Kind  # "gradient": `jdist.value_and_grad` combines a loss and its gradient
    # "gather" concatenates along one axis. Its transpose, which JAX makes, adds up the values of
    # all replicas for the rows of one.
    op: Op

    @property
    def name(self) -> str:
        """The name of the function that the equation calls."""
        return f"jdist_{self.kind}_{self.op}"


_NAME = re.compile(rf"jdist_({'|'.join(get_args(Kind))})_({'|'.join(get_args(Op))})")


def emit(
    collective: Collective, body: Callable[..., Sequence[jax.Array]], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """Applies a collective as an equation of its own."""
    if not leaves:
        return []

    def named(*operands: jax.Array) -> list[jax.Array]:
        # One result for each operand, never the operand itself: JAX would drop the equation.
        return list(body(*operands))

    named.__name__ = named.__qualname__ = collective.name
    return jax.jit(named)(*leaves)


def alone(*operands: jax.Array) -> Sequence[jax.Array]:
    """Applies the identity, by barriers, which JAX leaves in the jaxpr: the body of a collective of one replica."""
    return [jax.lax.optimization_barrier(x) for x in operands]


def collective_of(eqn: Any) -> Collective | None:
    """Finds the collective that an equation applies; None for any other equation."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    match = _NAME.search(str(eqn.params.get("name", "")))
    return None if match is None else Collective(match[1], match[2])  # type: ignore[arg-type]  # the pattern's choices


def note_gradient(number: int, leaves: Sequence[jax.Array]) -> None:
    """Notes by which arrays the gradient of a call of this number is taken, by an equation that can be found again."""

    def named(*operands: jax.Array) -> list[jax.Array]:
        return [jax.lax.optimization_barrier(jnp.zeros(())) for _ in operands[:1]]

    named.__name__ = named.__qualname__ = f"jdist_by_{number}"
    jax.jit(named)(*map(jax.lax.stop_gradient, leaves))


def gradient_number(eqn: Any) -> int | None:
    """Finds the number of a gradient that an equation notes; None for any other equation."""
    match = (
        re.search(r"jdist_by_(\d+)", str(eqn.params.get("name", ""))) if eqn.primitive.name in ("jit", "pjit") else None
    )
    return None if match is None else int(match[1])


def own_part(cut: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Takes a replica's own part of an array, by an equation that can be found again."""

    def jdist_own_part(x: jax.Array) -> jax.Array:
        return cut(x)

    return jax.jit(jdist_own_part)(x)


def is_own_part(eqn: Any) -> bool:
    """Returns whether an equation is one of `own_part`."""
    return eqn.primitive.name in ("jit", "pjit") and eqn.params.get("name") == "jdist_own_part"


@jax.custom_jvp
def without_gradient(x: jax.Array) -> jax.Array:
    """Returns a maximum or minimum over replicas unchanged; raises StepError where it is differentiated."""
    return x


@without_gradient.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    raise StepError(
        'the loss depends on a maximum or minimum over the replicas (`jdist.all_reduce(x, "max")`), which has no gradient. '
        "Take it of `jax.lax.stop_gradient(x)`, or gather the values (`jdist.all_gather`) and take their maximum."
    )


@jax.custom_batching.custom_vmap
def gradient_of(value: jax.Array, parameter: jax.Array) -> jax.Array:
    """Marks a loss as differentiated by a parameter; `jax.vmap` over examples alone raises."""
    return jnp.zeros(())


@gradient_of.def_vmap
def _refuse_per_example(axis_size: int, in_batched: Sequence[bool], value: jax.Array, parameter: jax.Array) -> Any:
    if in_batched[0] and not in_batched[1]:
        raise StepError(
            "`jax.vmap` maps `jdist.value_and_grad` or `jdist.grad` over examples: their gradients would be averaged over the "
            "replicas before they are clipped. Write `jax.vmap(jax.grad(loss_fn), (None, 0))`, clip, take the mean, and "
            'combine that: `grads = jdist.all_reduce(mean_of_clipped, "mean")`.'
        )
    return jnp.zeros(()), False


@dataclass(frozen=True)
class Gather:
    """One place where a leaf in parts is gathered."""

    # its path; of an update's result, the path of the leaf that it was computed from first
    leaf: str
    why: str  # the place, described
    num_bytes: int  # a device then holds: the array, or one of its layers
    line: str  # the user's line that reads it, "file.py:12"; "" if JAX does not tell


def line_of(eqn: Any) -> str:
    """Finds the user's own line that an equation comes from, as far as JAX tells; else nothing."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    own = next((frame for frame in frames if not frame.file_name.startswith((*_PACKAGES, "<"))), None)
    return "" if own is None else f"{Path(own.file_name).name}:{own.line_num}"
