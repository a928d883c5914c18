"""What happens to a NaN or infinite gradient: the state stays as it was, and a token tells the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jdist.context import ReplicaTrace
from jdist.transforms.options import NonFinite

PyTree = Any


@dataclass
class Watched:
    """Names of the values that a step's programs look at; a token's code is a place in this list, from 1."""

    names: list[str] = field(default_factory=list)

    def add(self, names: list[str]) -> int:
        """Takes in the names of one program; returns how many codes come before theirs."""
        for start in range(len(self.names) - len(names) + 1):
            if self.names[start : start + len(names)] == names:  # traced again, for other shapes
                return start
        self.names.extend(names)
        return len(self.names) - len(names)


@dataclass(frozen=True)
class Flags:
    """What one step saw of its gradients.

    Attributes:
        names: of each gradient and loss at the step's own level.
        finite: whether each is finite; bool scalars.
        hidden: whether there were gradients at an inner level (in a `lax.scan`), whose flags cannot be seen.
    """

    names: list[str]
    finite: list[jax.Array]
    hidden: bool

    @classmethod
    def of(cls, trace: ReplicaTrace) -> Flags:
        """The flags that a trace has gathered."""
        return cls([name for name, _ in trace.finite], [flag for _, flag in trace.finite], bool(trace.hidden))


def step_done(token: jax.Array) -> jax.Array:
    """The token after a step with nothing to report; computed, as a token that is merely passed on cannot be waited for."""
    return token + jnp.array([0, 1], jnp.int32)


def guard(
    token: jax.Array, old: PyTree, new: PyTree, flags: Flags, policy: NonFinite, watched: Watched
) -> tuple[jax.Array, PyTree]:
    """Keeps the old state where a gradient is not finite.

    The flag comes from the all-reduced gradients, before the update, so that the choice fuses with the update. A step
    whose gradients cannot be seen is judged by what it made of its state.

    Args:
        token: int32[2]. Under "raise": the code of the first non-finite value (0: none), and the number of steps before
            it. Under "skip": the number of steps left out, and of steps.
        old: the state before the step.
        new: the state after it.
        flags: what was seen of the gradients.
        policy: "raise", "skip" or "apply".
        watched: takes in the names that the codes stand for.

    Returns:
        The new token, and the state to go on with.
    """
    if policy == "apply":
        return step_done(token), new
    names, finite = list(flags.names), list(flags.finite)
    if flags.hidden or not finite:
        changed = [
            (f"state leaf {jax.tree_util.keystr(path) or 'itself'}", a, b)
            for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
            if jnp.issubdtype(b.dtype, jnp.inexact) and a is not b
        ]
        names += [name for name, _, _ in changed]
        finite += [jnp.all(jnp.isfinite(b) | ~jnp.isfinite(a)) for _, a, b in changed]
    if not finite:
        return step_done(token), new
    base = watched.add(names)
    code, count = token[0], token[1]
    bad = ~jnp.stack(finite)
    now = jnp.where(bad.any(), base + jnp.argmax(bad).astype(jnp.int32) + 1, 0)
    if policy == "raise":  # sticky: later steps change nothing until the host has seen it
        code = jnp.where(code == 0, now, code)
        keep = code == 0
        count = count + keep
    else:
        keep = now == 0
        code, count = code + ~keep, count + 1
    kept = jax.tree.map(lambda a, b: b if a is b else jnp.where(keep, b, a), old, new)
    return jnp.stack([code, count]), kept
