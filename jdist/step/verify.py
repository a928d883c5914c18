"""The verification that a step computes on many replicas what it computes on one with the whole batch.

It may differ only where its text looks at its own rows: at an average of what is not a mean, at a count, at pairs of rows.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist.cluster.runtime import alone
from jdist.core import context
from jdist.core.sharded_leaf import map_leaves
from jdist.core.step_state import user_state
from jdist.core.strategy import Strategy
from jdist.data.batching import filled_up, full_mask_place
from jdist.errors import JDistError, ReplicaDivergenceError, StepError, VerificationError
from jdist.reduction import psum
from jdist.step import trace_causes
from jdist.step.base import Distributed
from jdist.step.differences import (
    IN_JIT,
    NUM_TRIALS,
    Difference,
    Found,
    Pair,
    Verification,
    allowance,
    apart,
    as_averages,
    as_numbers,
    noise,
    relative,
)
from jdist.step.mesh_step import DistributedStep
from jdist.step.placement import compare_replicas
from jdist.step.trace_causes import Evidence
from jdist.step.trial import Result, Trial, calls_the_host, draws, draws_until, named_leaves, on_host, prints
from jdist.support.tracebacks import callers_level
from jdist.typing import PyTree

_MATMUL_EPS = 2.0**-8  # accelerators may multiply float32 in fewer digits


class VerificationWarning(UserWarning):
    """A step differs on many replicas from what it is on one with the whole batch."""


def verify(train_step: Any, *args: Any, **kwargs: Any) -> Verification:
    """Compares a step on one replica, which sees the whole batch, with the same step, distributed.

    Both run once, on copies: state, metrics and the step itself stay as they were. Random draws are replaced by one constant
    in both, as each replica draws for its own rows; with `precision` and under an all-reduce that is not exact both compute
    in float32. Where leaves differ at all, further runs on one device, with errors of rounding in each sum, measure how far
    apart rounding may leave each leaf.

    Args:
        train_step: what `jdist.distribute` or `jdist.nnx.distribute` made.
        *args: as in a call: the state, a global batch, and what else the step takes.
        **kwargs: as in a call.

    Returns:
        A `Verification`, false if any leaf differs by more than rounding. It raises nothing where they differ: see `verify`
        of `jdist.distribute`.

    Raises:
        StepError: `train_step` is not a distributed step.
        JDistError: what a call with these arguments would raise.

    Example:
        >>> import jdist, numpy as np
        >>> @jdist.distribute(jdist.mirrored())
        ... def train_step(w, batch):
        ...     loss, grad = jdist.value_and_grad(lambda w: jdist.mean((w * batch["x"] - 2.0) ** 2))(w)
        ...     return w - 0.1 * grad, {"loss": loss, "rows": batch["x"].shape[0]}
        >>> found = jdist.verify(train_step, np.float32(0), {"x": np.ones(8, np.float32)})
        >>> found.ok or [each.leaf for each in found.differences]
        ["metrics['rows']"]
    """
    return _verified(train_step, args, kwargs)


def _verified(train_step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, pads: bool = False) -> Verification:
    step, args = train_step.pure(args) if isinstance(train_step, Distributed) else (train_step, args)
    if not isinstance(step, DistributedStep):
        raise StepError(
            "jdist.verify needs a step that `jdist.distribute` made for devices of this process, it got a "
            f"{type(train_step).__name__}. For a parameter server, verify the same step under `jdist.mirrored()`."
        )
    with context.outside_scopes(), context.own_settings(step.strategy):
        try:
            return Comparison(step, args, kwargs).compare(pads=pads)
        except NotComparableError as exc:
            return _left_out(f"the step, {exc}", step.strategy.num_replicas * step.options.accumulate)


def verify_first(
    step: DistributedStep, args: tuple[Any, ...], kwargs: dict[str, Any], *, strict: bool, pads: bool = False
) -> Verification:
    """Verifies a step before its first call and warns where it differs; `strict` raises instead."""
    # `strict` also raises if nothing could be compared. With `pads`, a later batch will be padded:
    # the step is verified on a padded batch as well.
    try:
        verification = _verified(step, args, kwargs, pads=pads)
    except Exception as exc:  # noqa: BLE001 - the call that follows raises it again
        verification = _left_out(f"the step, as that failed: {type(exc).__name__}: {exc}", 0)
    if strict and not (verification.ok and (verification.num_compared or verification.parts == 1)):
        raise VerificationError(
            f"{step.__name__} differs between one replica and many, or could not be verified. {verification}\n"
            '`verify="first"` warns of it and goes on; `verify="off"` says nothing.',
            verification,
        )
    if not verification.ok:
        warnings.warn(
            f'{step.__name__}: {verification}\nIf it is meant so, say `verify="off"`; `jdist.verify` compares again.',
            VerificationWarning,
            stacklevel=callers_level(),
        )
    return verification


def _left_out(what: str, parts: int) -> Verification:
    return Verification((), "", (what,), num_compared=0, parts=parts)


class NotComparableError(Exception):
    """Nothing can be compared; its text says why, to be read after "the step"."""


class Comparison:
    """A step and the arguments of a call to compare it on; raises NotComparableError where nothing can be compared."""

    def __init__(self, step: DistributedStep, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._step, self._strategy, self._options = step, step.strategy, step.options
        self._parts = step.strategy.num_replicas * step.options.accumulate
        if self._parts == 1:
            raise NotComparableError("which has one replica and one microbatch: there is nothing to compare it with")
        whole = self._strategy.replicated_sharding
        if whole is not None and not whole.is_fully_addressable:
            raise NotComparableError("which runs in several processes: verify it in one, under `jdist.mirrored()`")
        self._call, state, batches, others = step.bind(args, kwargs)
        self._mask_place = full_mask_place(batches)
        if step.options.steps_per_call > 1:
            batches = jax.tree.map(lambda x: x[0], batches)
        filled = (filled_up(batch) for batch in batches)
        real = next((rows for rows in filled if rows is not None and not rows.all()), None)
        self._real = None if real is None or not real.any() else real
        self._state, self._others = map_leaves(on_host, user_state(state)), map_leaves(on_host, others)
        self._batches = jax.tree.map(on_host, batches)
        self._rows = self._batches if self._real is None else jax.tree.map(lambda x: x[self._real], self._batches)
        self._runs: list[dict[str, Result]] = []  # with errors of rounding, of these rows
        self._before = {leaf.name: leaf.value for leaf in named_leaves((None, self._state, ()), ("state",))}

    def compare(self, *, pads: bool) -> Verification:
        """Runs both ways and compares their results; with `pads` also on a batch with rows that only fill it up."""
        one = self._as_one()
        step = self._step
        rounds = self._options.precision is not None or self._strategy.keeps_residuals
        if rounds or self._options.steps_per_call > 1 or draws(one.closed) or prints(one.closed):
            step = self._like(_exact(self._strategy))
        many = Trial(step, self._call)
        alone, together = self._run_one(one), many.run(self._state, self._batches, self._others)
        found = self._found(one, alone, together)
        not_compared = [*self._not_compared(one, alone, together), *found.coarse()]
        of_shape = tuple(self._of_another_shape(alone, together))
        is_padded = self._real is not None
        has_nan = any(_is_nan(result, together.get(name)) for name, result in alone.items())
        if not found.differing and not of_shape and pads and self._mask_place is not None and not has_nan:
            # A full batch does not show what a replica does with fewer rows.
            is_padded, full = True, together
            one, alone, together, found = self._compare_padded(self._mask_place, one, many, full)
        num_compared = len(found.pairs) + len(of_shape)
        if not found.differing and not of_shape:
            return Verification((), "", tuple(not_compared), num_compared, self._parts)
        evidence = Evidence(
            one=one,
            many=many,
            rows=next((len(x) for x in jax.tree.leaves(self._rows)), 0),
            parts=self._parts,
            accumulates=self._options.accumulate > 1,
            apart=_are_apart(step.strategy, many.state),
            padded=is_padded,
        )
        differences = (*of_shape, *_explained(evidence, found.differing))
        remedies = list(dict.fromkeys(each.remedy for each in differences))
        if trace_causes.BROADCAST.remedy not in remedies and self._is_exact_in_jit(one, alone):
            remedies.append(IN_JIT)
        return Verification(differences, " ".join(remedies), tuple(not_compared), num_compared, self._parts)

    def _as_one(self) -> Trial:
        """Traces the step as one replica."""
        one = _one_replica(self._strategy)
        way = Trial(self._like(one, accumulate=1), self._call)
        try:
            way.trace(self._state, self._rows, self._others)
        except Exception as exc:  # a step may refuse a number of rows by any
            # Raises if the step is wrong under every strategy.
            Trial(self._like(_exact(self._strategy)), self._call).trace(self._state, self._batches, self._others)
            why = next(iter(str(exc).splitlines()), type(exc).__name__)
            raise NotComparableError(f"which does not run as one replica: {why}") from exc
        if calls_the_host(way.closed):
            raise NotComparableError("which calls a function of the host, and would call it twice more")
        if draws_until(way.closed):
            raise NotComparableError("which draws random numbers until it accepts some; draws differ on purpose")
        limits = one.devices[0].memory_stats() if one.devices else None
        if limits is not None and "bytes_limit" in limits:
            free = limits["bytes_limit"] - limits.get("bytes_in_use", 0)
            if 3 * _size_bytes(self._state) + _size_bytes(self._rows) > free:
                raise NotComparableError("as one device cannot hold its state and the whole batch")
        return way

    def _run_one(self, one: Trial) -> dict[str, Result]:
        try:
            return one.run(self._state, self._rows, self._others)
        except jax.errors.JaxRuntimeError as exc:
            if "RESOURCE_EXHAUSTED" not in str(exc):
                raise
            raise NotComparableError("as one device cannot hold the whole batch") from exc

    def _like(self, strategy: Strategy, **options: Any) -> DistributedStep:
        """Copies the step without what rounds on purpose."""
        plain = {"donate": False, "precision": None, "steps_per_call": 1, "verify": "off"}
        return self._step.like(strategy, **plain, **options)

    def _pairs(self, one: dict[str, Result], other: dict[str, Result]) -> list[Pair]:
        """Pairs the leaves that both ways return in one shape."""
        pairs = []
        for name, result in one.items():
            if name not in other or _is_nan(result, other[name]):
                continue
            value, distributed = result.value, other[name].value
            if self._real is not None and name.startswith("examples") and len(distributed) == len(self._real):
                distributed = distributed[self._real]
            if np.shape(distributed) != np.shape(value):
                continue
            before = self._before.get(name)
            before = np.zeros_like(as_numbers(value)) if before is None else before
            pairs.append(Pair(name, result.place, before, value, distributed))
        return pairs

    def _found(self, one: Trial, alone: dict[str, Result], together: dict[str, Result]) -> Found:
        """Compares two results, each leaf within what rounding does on its own path through the program."""
        pairs = as_averages(self._pairs(alone, together), self._parts)
        within = {pair.name: allowance(pair.one) for pair in pairs}
        suspects = [pair for pair in pairs if apart(pair.one, pair.other) > within[pair.name]]
        if suspects and not self._runs:
            shaken = one.shaken(_multiplies(one))
            self._runs = [self._run_one(shaken) for _ in range(NUM_TRIALS)]
        for pair in suspects:
            shaken_leaves = [(pair.before, run[pair.name].value) for run in self._runs]
            within[pair.name] = max(within[pair.name], noise(pair.one, shaken_leaves))
        return Found(pairs, within)

    def _compare_padded(
        self, mask_place: int, one: Trial, many: Trial, full: dict[str, Result]
    ) -> tuple[Trial, dict[str, Result], dict[str, Result], Found]:
        """Compares with some rows masked; the one replica does not see these rows, if it runs without them."""
        self._batches, real = self._with_rows_left_out(mask_place)
        self._runs = []
        together = many.run(self._state, self._batches, self._others)
        try:
            self._real, self._rows = real, jax.tree.map(lambda x: x[real], self._batches)
            without = self._as_one()
            alone = self._run_one(without)
            found = self._found(without, alone, together)
            if not found.differing or not trace_causes.has_statistics(without, many, [x.name for x in found.pairs]):
                return without, alone, together, found
            # Batch statistics may see padding; a leaf that the mask does not change is a mistake.
            if ignoring := _ignoring_mask(found, full):
                within = {pair.name: 0.0 if pair in ignoring else float("inf") for pair in found.pairs}
                return without, alone, together, Found(found.pairs, within)
        except NotComparableError:
            pass
        self._real, self._rows, self._runs = None, self._batches, []
        alone = self._run_one(one)
        return one, alone, together, self._found(one, alone, together)

    def _with_rows_left_out(self, mask_place: int) -> tuple[PyTree, np.ndarray]:
        """Masks the last half of the last part's rows, at least one, in the batches; returns the mask as well."""
        leaves, treedef = jax.tree.flatten(self._batches)
        mask = np.array(leaves[mask_place])
        mask[len(mask) - max(1, len(mask) // self._parts // 2) :] = 0
        leaves[mask_place] = mask
        return jax.tree.unflatten(treedef, leaves), mask.astype(bool)

    def _of_another_shape(self, alone: dict[str, Result], together: dict[str, Result]) -> Iterator[Difference]:
        """Finds leaves with a shape that depends on the number of a replica's rows; examples of padding do not count."""
        for name, result in alone.items():
            if name not in together or np.shape(result.value) == np.shape(together[name].value):
                continue
            if self._real is not None and name.startswith("examples"):
                continue
            shapes = np.shape(result.value), np.shape(together[name].value)
            cause = trace_causes.of_shape(*shapes)
            summaries = _summary(result.value), _summary(together[name].value)
            yield Difference(name, *summaries, float("inf"), cause.description, cause.remedy)

    def _not_compared(self, one: Trial, alone: dict[str, Result], together: dict[str, Result]) -> Iterator[str]:
        if draws(one.closed):
            yield "random draws, which differ on purpose (each was replaced by one constant)"
        yield from (
            f"{name}, which is NaN in both" for name, result in alone.items() if _is_nan(result, together.get(name))
        )

    def _is_exact_in_jit(self, one: Trial, alone: dict[str, Result]) -> bool:
        """Returns whether the step in the global view is what it is as one replica."""
        strategy = self._strategy
        if strategy.name not in ("mirrored", "tpu", "multi_worker") or strategy.is_global_view:
            return False
        way = Trial(self._like(dataclasses.replace(_exact(strategy), transform="jit")), self._call)
        try:
            results = way.run(self._state, self._batches, self._others)
        except (JDistError, TypeError, ValueError, NameError):  # it has no meaning there
            return False
        return not self._found(one, alone, results).differing


def _ignoring_mask(found: Found, full: dict[str, Result]) -> list[Pair]:
    """Finds differing leaves that are the same with and without the mask: metrics, or all of the state but statistics."""
    pairs = [x for x in found.differing if not x.name.startswith("examples") and not trace_causes.is_statistic(x.name)]
    same = [
        pair
        for pair in pairs
        if np.shape(full[pair.name].value) == np.shape(pair.together)
        and apart((pair.before, full[pair.name].value), pair.other) <= found.within[pair.name]
    ]
    state = [pair for pair in pairs if pair.name.startswith("state") and not pair.name.startswith("state.metrics")]
    is_masked = any(pair not in same for pair in state)
    return [pair for pair in same if pair not in state or not is_masked]


def _is_nan(one: Result, other: Result | None) -> bool:
    """Returns whether two results hold nothing but NaN, so that nothing can be compared."""
    values = [] if other is None else [as_numbers(result.value) for result in (one, other)]
    return bool(values) and all(value.size and np.isnan(value).all() for value in values)


def _explained(evidence: Evidence, pairs: list[Pair]) -> Iterator[Difference]:
    general = trace_causes.of_step(evidence, [pair.name for pair in pairs])
    for pair in pairs:
        own = None
        if not pair.name.startswith("state"):
            own = trace_causes.of_metric(evidence, pair.alone, pair.together, pair.place)
        cause = general if own is None or (own, general) == (trace_causes.TOTAL, trace_causes.GLOBAL) else own
        alone, together = _summary(pair.alone), _summary(pair.together)
        length = relative(pair.one, pair.other)
        yield Difference(pair.name, alone, together, length, cause.description, cause.remedy)


def _summary(value: Any) -> float:
    numbers = as_numbers(value)
    return float(np.real(numbers)) if numbers.ndim == 0 else float(np.linalg.norm(numbers.ravel()))


def _size_bytes(tree: PyTree) -> int:
    return sum(getattr(x, "nbytes", 8) for x in jax.tree.leaves(tree))


def _exact(strategy: Strategy) -> Strategy:
    """Copies a strategy, with the state on its devices and exact sums."""
    return dataclasses.replace(strategy, reduction=psum(), cluster=alone())


def _one_replica(strategy: Strategy) -> Strategy:
    """Makes a strategy of one of a strategy's devices, with its axes."""
    if strategy.mesh is None:
        return strategy
    devices = np.array(strategy.devices[:1]).reshape((1,) * len(strategy.mesh.axis_names))
    mesh = Mesh(devices, strategy.mesh.axis_names, axis_types=(AxisType.Auto,) * devices.ndim)
    return dataclasses.replace(
        _exact(strategy), name="one_device", devices=strategy.devices[:1], mesh=mesh, transform="shard_map"
    )


def _are_apart(strategy: Strategy, state: PyTree) -> bool:
    """Returns whether the replicas hold different states."""
    try:
        compare_replicas(strategy, state)
    except ReplicaDivergenceError:
        return True
    return False


def _multiplies(way: Trial) -> float:
    """Computes the least relative error of a product of matrices, as accelerators round factors."""
    devices = way.step.strategy.devices
    return 0.0 if not devices or devices[0].platform == "cpu" else _MATMUL_EPS
