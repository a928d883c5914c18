"""The guard against gradients that are NaN or infinite: the state stays unchanged, and a token tells the host."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.core.precision import SMALLEST, LossScale, LossScaling
from jdist.core.step_state import carrying, loss_scale_of
from jdist.core.strategy import Strategy
from jdist.errors import NonFiniteError
from jdist.jaxpr import graph
from jdist.step.options import NonFinite
from jdist.step.program_spec import FiniteFlags, ProgramSpec, RunFn, StepFn
from jdist.support.arrays import put
from jdist.typing import PyTree

# A token is an int32 array that each call takes from the one before, and that the host reads some calls later. Its entries:
# the verdict (under "raise" the code of the first non-finite value, 0 for none; under "skip" how many steps were left out),
# the number of steps before it, and, of a call of several steps, for each of them whether it was left out.
VERDICT, STEPS, STEP_ENTRIES = 0, 1, 2


def new_token(strategy: Strategy, steps_per_call: int) -> Any:
    """Makes the token of a first call; its shape where the devices are not here, as `lower` needs no more."""
    size = STEP_ENTRIES + (steps_per_call if steps_per_call > 1 else 0)
    if strategy.topology is not None:
        return jax.ShapeDtypeStruct((size,), np.int32)
    return put(np.zeros(size, np.int32), strategy.replicated_sharding)


def non_finite_error(step_name: str, name: str, step: int) -> NonFiniteError:
    """Makes the error of a step that met a NaN or infinite value of that name."""
    return NonFiniteError(
        f"step {step}: {name} is NaN or infinite. The state from before this step is kept (`{step_name}.last_state`); "
        "later calls changed nothing. Lower the learning rate, clip gradients, look at the batch; or choose "
        '`non_finite="skip"` to leave such steps out, "apply" to let them through.',
        name,
        step,
    )


def finite_guarded(spec: ProgramSpec, run: RunFn) -> StepFn:
    """Keeps the old state where a gradient is not finite, as the step's options say, and reports it in the token."""
    axes = spec.strategy.bound_axes

    def step(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        return guarded(run, token, state, (batches, others), spec.policy, spec.flag_names, axes, spec.loss_scaling)

    return step


def add_names(flag_names: list[str], names: list[str]) -> int:
    """Adds the names of one program, unless it was traced before; returns how many codes come before theirs."""
    for start in range(len(flag_names) - len(names) + 1):
        if flag_names[start : start + len(names)] == names:
            return start
    flag_names.extend(names)
    return len(flag_names) - len(names)


def step_done(token: jax.Array) -> jax.Array:
    """Counts a step that has nothing to report: a token passed through unchanged would be ready before the step is."""
    return token + jnp.array([0, 1], jnp.int32)


def decide(token: jax.Array, finite: list[jax.Array], base: int, policy: NonFinite) -> tuple[jax.Array, jax.Array]:
    """Decides whether to keep the new state; returns `(new token, bool scalar)`."""
    # The code of the first flag is `base + 1`.
    code, count = token[VERDICT], token[STEPS]
    bad = ~jnp.stack(finite)
    now = jnp.where(bad.any(), base + jnp.argmax(bad).astype(jnp.int32) + 1, 0)
    if policy == "raise":  # sticky: later steps change nothing until the host has seen it
        code = jnp.where(code == 0, now, code)
        keep = code == 0
        return jnp.stack([code, count + keep.astype(count.dtype)]), keep
    keep = now == 0
    return jnp.stack([code + (~keep).astype(code.dtype), count + 1]), keep


def stages(closed: Any, replaced: Collection[Any]) -> list[tuple[list[Any], list[Any], Any]]:
    """Cuts a function into successive parts `(reads, writes, function)`, so that `replaced` can be changed between them."""
    # Each equation goes into the first part where its operands are known. Readers of a variable in
    # `replaced` go into a later part than its writer.
    level, parts = dict[Any, int](), list[list[Any]]()
    for eqn in graph.body_of(closed).eqns:
        number = max((level.get(v, 0) + (v in replaced) for v in eqn.invars if not graph.is_literal(v)), default=0)
        parts.extend([] for _ in range(number + 1 - len(parts)))
        parts[number].append(eqn)
        level.update((v, number) for v in eqn.outvars)
    later = {v for v in graph.body_of(closed).outvars if not graph.is_literal(v)}
    result: list[tuple[list[Any], list[Any], Any]] = []
    for equations in reversed(parts):
        written = dict.fromkeys(v for eqn in equations for v in eqn.outvars)  # a dict keeps the order
        own = {*written, *graph.body_of(closed).constvars}
        read = (v for eqn in equations for v in eqn.invars if not graph.is_literal(v) and v not in own)
        reads, writes = list(dict.fromkeys(read)), [v for v in written if v in later]
        later.update(reads)
        result.append((reads, writes, graph.piece(closed, reads, equations, writes)))
    return result[::-1]


def guarded(
    # `(state, *rest) -> (state, outputs, flags)`
    run: Callable[..., tuple[PyTree, PyTree, FiniteFlags]],
    token: jax.Array,  # int32[2], of one step
    state: PyTree,
    rest: tuple[PyTree, ...],
    policy: NonFinite,
    flag_names: list[str],  # extended by the names that the token's codes stand for
    axes: tuple[str, ...] = (),  # the replica axes, where they are bound
    loss_scaling: LossScaling | None = None,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Runs a step and keeps the old state where a gradient is not finite."""
    if policy == "apply":
        new, outputs, _ = run(state, *rest)
        return step_done(token), new, outputs
    names: list[str] = []

    def traced(state: PyTree, rest: tuple[PyTree, ...]) -> tuple[PyTree, PyTree, list[jax.Array]]:
        new, outputs, flags = run(state, *rest)
        if flags.hidden or not flags.finite:
            # The flags are those of the all-reduced gradients, before the update, so that the
            # choice between old and new fuses with the update. If the gradients cannot be seen, the
            # new state is checked.
            flags = _flags_of_state(state, new, flags, axes)
        names[:] = flags.names
        return new, outputs, flags.finite

    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(state, rest)
    closed = graph.forwarded(graph.entered(closed, graph.is_called), collectives=True)
    invars, outvars = graph.body_of(closed).invars, graph.body_of(closed).outvars
    old = jax.tree.leaves(state)
    new_vars, flag_vars = outvars[: len(old)], outvars[len(outvars) - len(names) :]
    _, before_flags = graph.needed(closed, flag_vars, given=())
    known = graph.values_at_start(closed, jax.tree.leaves((state, rest)))
    taken = {*known, *before_flags}
    counts = collections.Counter(v for v in new_vars if not graph.is_literal(v))
    places = {v: i for i, v in enumerate(new_vars) if not graph.is_literal(v) and counts[v] == 1 and v not in taken}
    if not names or graph.effects_of(closed):  # in stages, prints and the like would come in another order
        places = {}
    # Each leaf of the new state is replaced by the chosen one once computed, so that
    # values computed from it (parameters from a momentum) read the chosen one. Choosing at the end
    # needs the momentum before and after at the same time, for which XLA copies it.
    keep, loss_scale = jnp.bool_(True), loss_scale_of(state)
    for number, (reads, writes, stage) in enumerate(stages(closed, places)):
        known.update(zip(writes, graph.call(stage, [known[v] for v in reads]), strict=True))
        if number == 0 and names:
            finite = [graph.value_of(v, known) for v in flag_vars]
            token, keep, loss_scale = _decide(
                token, finite, add_names(flag_names, names), policy, loss_scale, loss_scaling
            )
        for v in writes:
            if v in places:
                known[v] = jax.lax.select(keep, known[v], old[places[v]])
    values = [graph.value_of(v, known) for v in outvars]
    for i, v in enumerate(new_vars):
        if names and v is not invars[i] and (graph.is_literal(v) or v not in places):
            values[i] = jnp.where(keep, values[i], old[i])
    new, outputs, _ = jax.tree.unflatten(jax.tree.structure(shapes), values)
    if loss_scaling is not None and loss_scale is not None:
        new = carrying(new, loss_scale=loss_scale)
    return token if names else step_done(token), new, outputs


def _decide(
    token: jax.Array,
    finite: list[jax.Array],
    base: int,
    policy: NonFinite,
    now: LossScale | None,
    loss_scaling: LossScaling | None,
) -> tuple[jax.Array, jax.Array, LossScale | None]:
    """Decides as `decide` does, and moves the loss scale, the third result."""
    if loss_scaling is None or now is None:
        return *decide(token, finite, base, policy), now
    fits = jnp.stack(finite).all()
    if policy == "raise":
        # A smaller scale may remove the overflow, so "raise" reports it at the smallest scale only;
        # the step is left out all the same.
        finite = [flag | (now.scale > SMALLEST) for flag in finite]
    token, goes_on = decide(token, finite, base, policy)
    moves = goes_on if policy == "raise" else True  # once an error waits for the host, nothing changes
    after = jax.tree.map(lambda new, old: jnp.where(moves, new, old), loss_scaling.after(now, fits), now)
    return token, goes_on & fits, after


def _flags_of_state(old: PyTree, new: PyTree, flags: FiniteFlags, axes: tuple[str, ...]) -> FiniteFlags:
    """Adds a flag for each floating-point state leaf that the step changed."""
    changed = [
        (f"state leaf {jax.tree_util.keystr(path) or 'itself'}", a, b)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(b.dtype, jnp.inexact) and a is not b
    ]
    names = [*flags.names, *(name for name, _, _ in changed)]
    # Elements that were not finite before may stay so. Replicas agree on the flags, even where
    # their leaves differ, so that all of them keep the same state.
    own = [jnp.all(jnp.isfinite(b) | ~jnp.isfinite(a)) for _, a, b in changed]
    if own and axes:
        own = list(jax.lax.pmin(jnp.stack(own).astype(jnp.int32), axes) > 0)
    finite = [*flags.finite, *own]
    return FiniteFlags(names, finite, flags.hidden)
