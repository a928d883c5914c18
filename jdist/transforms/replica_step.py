"""What one replica computes in one call: the user's step, accumulated, guarded and repeated as the options say."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jdist import dataflow, replica
from jdist.boundary import split
from jdist.context import ReplicaTrace, current_trace, tracing
from jdist.errors import BoundaryError, GlobalViewError, StepError
from jdist.strategy import Strategy
from jdist.transforms.options import StepOptions
from jdist.transforms.trees import check_batch, check_same_state
from jdist.values import PerReplica, is_per_replica

PyTree = Any
# How an output leaf comes together from the replicas: averaged, kept apart, rows joined, or a finite-gradient flag.
METRIC, LOCAL, ROWS, FLAG = "metric", "local", "rows", "flag"


@dataclass
class Traced:
    """What tracing a step told about it.

    Attributes:
        returns: the role of each result.
        bare: whether the step returned its one result itself rather than a tuple.
        watched: names of the values that the finite check looks at, in the order of its codes.
    """

    returns: tuple[str, ...] = ()
    bare: bool = False
    watched: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """How the arguments of one call are put back in order.

    Attributes:
        roles: role of each positional argument.
        static: values of the static positional arguments, in order.
        static_kwargs: static keyword arguments.
    """

    roles: tuple[str, ...]
    static: tuple[Hashable, ...] = ()
    static_kwargs: tuple[tuple[str, Hashable], ...] = ()

    def apply(self, step: Callable[..., Any], state: PyTree, batches: PyTree, others: PyTree) -> Any:
        """Calls `step` with every argument in its place."""
        batch, static = iter(batches), iter(self.static)
        replicated, kwargs = iter(others[0]), others[1]
        sources = {"batch": batch, "replicated": replicated, "static": static}
        args = [state if role == "state" else next(sources[role]) for role in self.roles]
        return step(*args, **kwargs, **dict(self.static_kwargs))


def replica_step(
    step: Callable[..., Any], strategy: Strategy, options: StepOptions, call: Call, traced: Traced
) -> Callable[[jax.Array, PyTree, PyTree, PyTree], tuple[jax.Array, PyTree, tuple[PyTree, ...]]]:
    """The function that every replica runs.

    Args:
        step: the user's step.
        strategy: what it runs under.
        options: the decorator's options.
        call: how the arguments of this call are laid out.
        traced: filled in while tracing.

    Returns:
        `(token, state, batches, others) -> (token, state, outputs)`, `outputs` without the state, one by return role.
        `token` is int32[2]: under "raise" the code of the first non-finite value (0: none) and the number of steps
        before it; under "skip" the number of steps left out, and of steps.
    """

    def pure(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, Any]:
        """The user's step with its results sorted: `(state, (outputs, kinds, flags))`; kinds ride in the structure."""
        new_state, outputs = _sort_results(call.apply(step, state, batches, others), state, options, traced)
        trace = current_trace()
        assert trace is not None  # both callers trace under one
        traced.watched = [name for name, _ in trace.finite]
        return new_state, (outputs, [flag for _, flag in trace.finite])

    def once(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        _check_rows(batches, strategy, options)
        if options.accumulate == 1:
            with tracing(ReplicaTrace(strategy)) as trace:
                new_state, (outputs, flags) = pure(state, batches, others)
                outputs = _average(outputs, _kinds(outputs, traced), {id(x) for x in trace.reduced})
        else:
            new_state, outputs, flags = _accumulate(strategy, options, pure, traced, state, batches, others)
        if options.may_update_state and "state" in traced.returns:
            new_state = check_same_state(state, new_state)
            token, new_state = _guard(token, state, new_state, flags, options, traced)
        else:
            new_state = state
        return token, new_state, outputs

    def many(token: jax.Array, state: PyTree, batches: PyTree, others: PyTree) -> Any:
        def body(carry: Any, batches: PyTree) -> Any:
            token, state = carry
            token, state, outputs = once(token, state, batches, others)
            return (token, state), outputs

        (token, state), outputs = _scan(strategy, body, (token, state), batches)
        return token, state, outputs

    return once if options.steps_per_call == 1 else many


def _sort_results(
    result: Any, state: PyTree, options: StepOptions, traced: Traced
) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Tells the roles of what the step returned, and takes the state out of it."""
    returns = options.returns
    if returns is None:
        if "state" not in options.args:
            returns = ("metrics",)
        elif jax.tree.structure(result) == jax.tree.structure(state):
            returns = ("state",)
        elif isinstance(result, tuple) and len(result) == 2:
            returns = ("state", "metrics")
        else:
            # Neither the state's tree nor a pair: most likely a state that lost its form; say where.
            check_same_state(state, result)
            raise AssertionError("unreachable: trees that differ are refused above")
    traced.returns, traced.bare = (
        returns,
        len(returns) == 1 and not (isinstance(result, tuple) and len(result) == 1),
    )
    if traced.bare:
        result = (result,)
    if not isinstance(result, tuple) or len(result) != len(returns):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise StepError(f"the step returned {got}, but `returns` is {returns!r}.")
    if "state" in returns:
        i = returns.index("state")
        return result[i], result[:i] + result[i + 1 :]
    return state, result


def output_roles(traced: Traced) -> tuple[str, ...]:
    """The return roles without the state's."""
    return tuple(role for role in traced.returns if role != "state")


def _kinds(outputs: tuple[PyTree, ...], traced: Traced) -> tuple[PyTree, ...]:
    """The tree of `outputs` with each leaf's kind in its place."""

    def of(role: str, tree: PyTree) -> PyTree:
        if role != "metrics":
            kind = ROWS if role == "examples" else LOCAL
            return jax.tree.map(lambda _: kind, tree)
        return jax.tree.map(
            lambda node: jax.tree.map(lambda _: LOCAL, node) if isinstance(node, PerReplica) else METRIC,
            tree,
            is_leaf=is_per_replica,
        )

    roles = output_roles(traced)
    trace = current_trace()
    if trace is not None and trace.strategy.transform == "jit":
        for role, tree in zip(roles, outputs, strict=True):
            if role == "per_replica" or any(map(is_per_replica, jax.tree.leaves(tree, is_leaf=is_per_replica))):
                raise GlobalViewError(
                    'the step returns per-replica values, which have no meaning under transform="jit", where it sees '
                    'the whole batch. Return the value itself, or use transform="shard_map".'
                )
    return tuple(of(role, tree) for role, tree in zip(roles, outputs, strict=True))


def _average(outputs: PyTree, kinds: PyTree, reduced: set[int]) -> PyTree:
    """Averages the metrics over the replicas, all in one all-reduce, those left out that are averages already."""
    leaves, treedef = jax.tree.flatten(outputs)
    which = [i for i, kind in enumerate(jax.tree.leaves(kinds)) if kind == METRIC and id(leaves[i]) not in reduced]
    averaged = replica.all_reduce([_countable(leaves[i]) for i in which], "mean") if which else []
    for i, leaf in zip(which, averaged, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def _countable(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _check_rows(batches: PyTree, strategy: Strategy, options: StepOptions) -> None:
    # Rows here are one replica's, or all of them in the global view, which divides among replicas as well.
    check_batch(
        batches,
        parts=options.accumulate,
        explanation=f"accumulate={options.accumulate} microbatches a replica",
    )


def _accumulate(
    strategy: Strategy,
    options: StepOptions,
    pure: Callable[..., Any],
    traced: Traced,
    state: PyTree,
    batches: PyTree,
    others: PyTree,
) -> tuple[PyTree, PyTree, list[jax.Array]]:
    """The gradient part scanned over microbatches, ONE all-reduce, one update."""
    k = options.accumulate
    # Every k-th row: in the global view each device then keeps its own rows, and padding spreads evenly.
    micro = jax.tree.map(lambda x: x.reshape(x.shape[0] // k, k, *x.shape[1:]).swapaxes(0, 1), batches)
    first = jax.tree.map(lambda x: x[0], micro)
    if "state" not in options.args:
        raise BoundaryError('`accumulate` needs a step with a "state" to update.')

    def flat(state: PyTree, batches: PyTree, others: PyTree) -> tuple[PyTree, Any]:
        new_state, (outputs, flags) = pure(state, batches, others)
        box.append(_kinds(outputs, traced))
        return new_state, (outputs, flags)

    box: list[Any] = []
    parts = split(strategy, flat, state, first, others, num_microbatches=k)
    # The update is traced with the whole batch, so that a count made from its shape counts every row.
    whole = split(strategy, flat, state, batches, others, num_microbatches=k)
    if (whole.cuts, whole.carried, whole.crossing) != (parts.cuts, parts.carried, parts.crossing):
        raise BoundaryError(
            "the step does different things for different numbers of rows; `accumulate` cannot split it."
        )
    kinds = [*jax.tree.leaves(box[0]), *[FLAG] * len(traced.watched)]
    state_leaves = jax.tree.leaves(state)

    counts = jax.lax.map(lambda x: parts.counts(state, x[1], others, x[0]), (jnp.arange(k), micro))
    counts = [c.sum(0) for c in counts]
    with tracing(ReplicaTrace(strategy)):
        counts = replica.all_reduce(counts, "sum") if counts and replica.replica_axes() else counts

    def body(carried: list[jax.Array], x: tuple[jax.Array, PyTree]) -> Any:
        leaves = list(state_leaves)
        for i, leaf in zip(parts.carried, carried, strict=True):
            leaves[i] = leaf
        now = jax.tree.unflatten(jax.tree.structure(state), leaves)
        cuts, carried, crossing, outputs = parts.gradients(now, x[1], others, x[0], counts)
        _check_crossing(crossing, parts.crossing)
        early = [None if leaf is None else _countable(leaf) for leaf in outputs]
        rows = [leaf if kind == ROWS else None for leaf, kind in zip(early, kinds, strict=True)]
        sums = [None if kind == ROWS else leaf for leaf, kind in zip(early, kinds, strict=True)]
        return carried, ((cuts, crossing, sums), rows)

    # Summing the stacked results would keep k gradients alive, so the sum is part of the carry.
    x0 = (jnp.int32(0), first)
    carried = [state_leaves[i] for i in parts.carried]
    shapes = jax.eval_shape(lambda: body(carried, x0)[1][0])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, _wide(s.dtype)), shapes)

    def add(carry: Any, x: Any) -> Any:
        carried, total = carry
        carried, (now, rows) = body(carried, x)
        return (carried, jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, now)), rows

    (carried, total), rows = _scan(strategy, add, (carried, zeros), (jnp.arange(k), micro))
    cuts, crossing, sums = jax.tree.map(lambda x, s: x.astype(s.dtype), total, shapes)

    with tracing(ReplicaTrace(strategy)):
        over_replicas = replica.replica_axes() is not None
        metrics = [leaf if kind == METRIC else None for leaf, kind in zip(sums, kinds, strict=True)]
        together = (cuts, crossing, metrics)
        size = k * replica.num_replicas() if over_replicas else k
        if over_replicas:
            together = replica.all_reduce(together, "sum")
        cuts, crossing, metrics = together
        cuts = [x if op == "sum" else x / size for x, op in zip(cuts, parts.cuts, strict=True)]
        crossing = [x / size for x in crossing]
        new_leaves, late = whole.update(state, others, cuts, carried, crossing)

    outputs = []
    for metric, local, row, after in zip(metrics, sums, rows, late, strict=True):
        if after is not None:
            outputs.append(after)
        elif row is not None:
            outputs.append(row.swapaxes(0, 1).reshape(-1, *row.shape[2:]))
        elif metric is not None:
            outputs.append(metric / size)
        else:
            outputs.append(jnp.divide(local, k))
    result, flags = jax.tree.unflatten(parts.outputs_treedef, outputs)
    return jax.tree.unflatten(parts.state_treedef, new_leaves), result, flags


def _scan(strategy: Strategy, body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> tuple[Any, Any]:
    """`lax.scan`, unrolled where XLA's CPU backend would run convolutions 25 times slower inside a loop."""
    platform = strategy.devices[0].platform if strategy.devices else jax.default_backend()
    unroll = False
    if platform == "cpu":
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
        unroll = dataflow.contains_primitive(jax.make_jaxpr(body)(init, first), "conv_general_dilated")
    return jax.lax.scan(body, init, xs, unroll=unroll or 1)


def _wide(dtype: Any) -> Any:
    """What to add up in: float32 for half precision, which would lose small microbatches."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _check_crossing(crossing: list[jax.Array], names: tuple[str, ...]) -> None:
    for x, name in zip(crossing, names, strict=True):
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.floating):
            raise BoundaryError(
                f"with `accumulate`, result {name} needs, after the update, a value of one microbatch of type "
                f"{x.dtype}{list(x.shape)}; only floating-point scalars can be averaged over microbatches. Compute it "
                "before the update from one microbatch alone, or from the combined gradients alone."
            )


def _guard(
    token: jax.Array, old: PyTree, new: PyTree, flags: list[jax.Array], options: StepOptions, traced: Traced
) -> tuple[jax.Array, PyTree]:
    """Keeps the old state where a gradient is not finite; the token tells the host."""
    if options.non_finite == "apply":
        return token, new
    if not flags:  # no gradient was seen at the step's own level: look at what the step made of the state
        pairs = [
            (path, a, b)
            for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
            if jnp.issubdtype(b.dtype, jnp.inexact) and a is not b
        ]
        traced.watched = [f"state leaf {jax.tree_util.keystr(path)}" for path, _, _ in pairs]
        flags = [jnp.all(jnp.isfinite(b) | ~jnp.isfinite(a)) for _, a, b in pairs]
    if not flags:
        return token + jnp.array([0, 1], jnp.int32), new
    code, count = token[0], token[1]
    bad = ~jnp.stack(flags)
    now = jnp.where(bad.any(), jnp.argmax(bad).astype(jnp.int32) + 1, 0)
    if options.non_finite == "raise":  # sticky: later steps change nothing until the host has seen it
        code = jnp.where(code == 0, now, code)
        keep = code == 0
        count = count + keep
    else:
        keep = now == 0
        code, count = code + ~keep, count + 1
    kept = jax.tree.map(lambda a, b: b if a is b else jnp.where(keep, b, a), old, new)
    return jnp.stack([code, count]), kept
