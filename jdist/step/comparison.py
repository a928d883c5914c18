"""The comparison of a step on many replicas with the same step on one that sees the whole batch.

It may differ only where its text looks at its own rows: at a mean of something that is no mean, at a count, at pairs of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist.cluster.runtime import alone
from jdist.core.sharded_leaf import map_leaves
from jdist.core.step_state import user_state
from jdist.core.strategy import Strategy
from jdist.data.batching import filled_up, full_mask_place
from jdist.errors import JDistError, ReplicaDivergenceError
from jdist.reduction import psum
from jdist.step import rounding, trace_causes
from jdist.step.mesh_step import DistributedStep
from jdist.step.placement import compare_replicas
from jdist.step.quiet import calls_the_host, draws, draws_until, prints
from jdist.step.rounding import Leaf
from jdist.step.trace_causes import Evidence
from jdist.step.trial import Result, Trial, named_leaves, on_host

PyTree = Any

_IN_JIT = (
    'If the step means the whole batch throughout, `transform="jit"` of the strategy computes that from the same text.'
)
_COARSE = 0.01  # of a leaf's change: what is compared less closely than that is listed
_MATMUL_EPS = 2.0**-8  # accelerators may multiply float32 in fewer digits


@dataclass(frozen=True)
class Difference:
    """A leaf that differs by more than rounding.

    Attributes:
        leaf: its path, `state['w']` or `metrics['loss']`.
        one: its value as one replica; of an array the Euclidean norm.
        distributed: the same as it is distributed.
        relative: how far apart both are, relative to how much the step changes the leaf.
        cause: the likely cause, as a clause.
        remedy: what to write instead, as a sentence.
    """

    leaf: str
    one: float
    distributed: float
    relative: float
    cause: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.leaf}: {self.one:.6g} as one replica, {self.distributed:.6g} distributed "
            f"({self.relative:.2g} of its change apart)"
        )


@dataclass(frozen=True)
class Verification:
    """The result of `jdist.verify`; true if nothing differs.

    Attributes:
        differences: the leaves of state and metrics that differ by more than rounding.
        remedy: what to do, for the likeliest cause first; last, where it helps, the global view. Empty if nothing differs.
        not_compared: what was left out, and why; and the leaves that rounding lets be compared only coarsely, and how coarsely.
        num_compared: how many leaves were compared.
        parts: into how many parts the batch was cut: replicas times microbatches.
    """

    differences: tuple[Difference, ...]
    remedy: str
    not_compared: tuple[str, ...]
    num_compared: int
    parts: int

    @property
    def ok(self) -> bool:
        """Whether nothing differs, of what was compared."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        left_out = [f"Not compared: {each}." for each in self.not_compared]
        if self.ok:
            same = f"{self.num_compared} leaves are the same in {self.parts} parts as in one, but for rounding."
            return "\n".join([*([same] if self.num_compared else []), *left_out])
        lines = [
            f"{len(self.differences)} of {self.num_compared} leaves differ, beyond rounding, between one replica with the "
            f"whole batch and the {self.parts} parts that it is cut into."
        ]
        for cause, remedy in dict.fromkeys((each.cause, each.remedy) for each in self.differences):
            leaves = [each for each in self.differences if each.cause == cause]
            lines.append(f"Likely cause: {cause}. {remedy} It shows in")
            lines += [f"  {each}" for each in leaves[:3]]
            if len(leaves) > 3:
                lines.append(f"  and {len(leaves) - 3} more")
        if self.remedy.endswith(_IN_JIT):
            lines.append(_IN_JIT)
        return "\n".join([*lines, *left_out])

    __repr__ = __str__


class NotComparableError(Exception):
    """Nothing can be compared; its text says why, to be read after "the step"."""


class Comparison:
    """A step and the arguments of a call to compare it on; raises NotComparableError where nothing can be compared."""

    def __init__(self, step: DistributedStep, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._step, self._strategy, self._options = step, step.strategy, step.options
        self._parts = step.strategy.num_replicas * step.options.accumulate
        if self._parts == 1:
            raise NotComparableError("which has one replica and one microbatch: it is what it would be compared with")
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
        """Runs both ways and compares their results; with `pads` also on a batch of which some rows only fill it up."""
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
        if not found.differing and not of_shape and pads and self._mask_place is not None:
            # A full batch does not show what a replica does with fewer rows.
            is_padded = True
            self._batches = self._rows = self._with_rows_left_out(self._mask_place)
            self._runs = []
            alone, together = self._run_one(one), many.run(self._state, self._batches, self._others)
            found = self._found(one, alone, together)
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
            remedies.append(_IN_JIT)
        return Verification(differences, " ".join(remedies), tuple(not_compared), num_compared, self._parts)

    def _as_one(self) -> Trial:
        """Traces the step as one replica."""
        one = _one_replica(self._strategy)
        way = Trial(self._like(one, accumulate=1), self._call)
        try:
            way.trace(self._state, self._rows, self._others)
        except (JDistError, TypeError, ValueError, NameError) as exc:
            # Raises if the step is wrong under every strategy.
            Trial(self._like(_exact(self._strategy)), self._call).trace(self._state, self._batches, self._others)
            raise NotComparableError(f"which does not run as one replica: {str(exc).splitlines()[0]}") from exc
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

    def _pairs(self, one: dict[str, Result], other: dict[str, Result]) -> list[_Pair]:
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
            before = np.zeros_like(rounding.as_numbers(value)) if before is None else before
            pairs.append(_Pair(name, result.place, before, value, distributed))
        return pairs

    def _found(self, one: Trial, alone: dict[str, Result], together: dict[str, Result]) -> _Found:
        """Compares two results, each leaf within what rounding does on its own path through the program."""
        pairs = _as_averages(self._pairs(alone, together), self._parts)
        within = {pair.name: rounding.allowance(pair.one) for pair in pairs}
        suspects = [pair for pair in pairs if rounding.apart(pair.one, pair.other) > within[pair.name]]
        if suspects and not self._runs:
            shaken = one.shaken(_multiplies(one))
            self._runs = [self._run_one(shaken) for _ in range(rounding.NUM_TRIALS)]
        for pair in suspects:
            noise = rounding.noise(pair.one, [(pair.before, run[pair.name].value) for run in self._runs])
            within[pair.name] = max(within[pair.name], noise)
        return _Found(pairs, within)

    def _with_rows_left_out(self, mask_place: int) -> PyTree:
        """Masks the last half of the last part's rows, at least one, in the batches."""
        leaves, treedef = jax.tree.flatten(self._batches)
        mask = np.array(leaves[mask_place])
        mask[len(mask) - max(1, len(mask) // self._parts // 2) :] = 0
        leaves[mask_place] = mask
        return jax.tree.unflatten(treedef, leaves)

    def _of_another_shape(self, alone: dict[str, Result], together: dict[str, Result]) -> Iterator[Difference]:
        """Finds leaves whose shape depends on how many rows a replica sees; examples of padding do not count."""
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
        """Whether the step in the global view is what it is as one replica."""
        strategy = self._strategy
        if strategy.name not in ("mirrored", "tpu", "multi_worker") or strategy.is_global_view:
            return False
        way = Trial(self._like(dataclasses.replace(_exact(strategy), transform="jit")), self._call)
        try:
            results = way.run(self._state, self._batches, self._others)
        except (JDistError, TypeError, ValueError, NameError):  # it has no meaning there
            return False
        return not self._found(one, alone, results).differing


def _is_nan(one: Result, other: Result | None) -> bool:
    """Whether two results hold nothing but NaN, of which nothing can be compared."""
    values = [] if other is None else [rounding.as_numbers(result.value) for result in (one, other)]
    return bool(values) and all(value.size and np.isnan(value).all() for value in values)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A leaf as one replica makes it and as another way does, with its value before the step."""

    name: str
    place: int
    before: Any
    alone: Any
    together: Any

    @property
    def one(self) -> Leaf:
        return self.before, self.alone

    @property
    def other(self) -> Leaf:
        return self.before, self.together


@dataclass(frozen=True)
class _Found:
    """Pairs of leaves, and how far apart rounding may leave each."""

    pairs: list[_Pair]
    within: dict[str, float]

    @property
    def differing(self) -> list[_Pair]:
        return [pair for pair in self.pairs if rounding.apart(pair.one, pair.other) > self.within[pair.name]]

    def coarse(self) -> Iterator[str]:
        """Says which leaves are the same, but could differ by much without being told from rounding."""
        same = [pair for pair in self.pairs if pair not in self.differing and rounding.change(pair.one).any()]
        relative = {pair.name: rounding.of_change(self.within[pair.name], pair.one) for pair in same}
        coarse = sorted(((x, name) for name, x in relative.items() if x > _COARSE), reverse=True)
        if coarse:
            named = ", ".join(f"{name} (within {x:.0%} of its change)" for x, name in coarse[:3])
            more = f" and {len(coarse) - 3} more" if len(coarse) > 3 else ""
            yield f"closely, as rounding is most of how they change: {named}{more}"


def _as_averages(pairs: list[_Pair], parts: int) -> list[_Pair]:
    """Divides out of nnx metrics the values that every part has added: `nnx.metrics.Average` divides sum by count."""
    by_metric: dict[str, list[_Pair]] = {}
    for pair in pairs:
        by_metric.setdefault(pair.name.rpartition("[")[0], []).append(pair)
    divided: dict[str, _Pair] = {}
    for name, group in by_metric.items():
        changes = [[rounding.change(leaf) for leaf in (pair.one, pair.other)] for pair in group]
        counted = [one.any() and np.array_equal(parts * one, other) for one, other in changes]
        if name.startswith("state.metrics") and len(group) > 1 and any(counted):
            for pair, (_, change) in zip(group, changes, strict=True):
                together = (rounding.as_numbers(pair.before) + change / parts).astype(pair.alone.dtype)
                divided[pair.name] = dataclasses.replace(pair, together=together)
    return [divided.get(pair.name, pair) for pair in pairs]


def _explained(evidence: Evidence, pairs: list[_Pair]) -> Iterator[Difference]:
    general = trace_causes.of_step(evidence, [pair.name for pair in pairs])
    for pair in pairs:
        own = None
        if not pair.name.startswith("state"):
            own = trace_causes.of_metric(evidence, pair.alone, pair.together, pair.place)
        cause = general if own is None or (own, general) == (trace_causes.TOTAL, trace_causes.GLOBAL) else own
        alone, together = _summary(pair.alone), _summary(pair.together)
        apart = rounding.relative(pair.one, pair.other)
        yield Difference(pair.name, alone, together, apart, cause.description, cause.remedy)


def _summary(value: Any) -> float:
    numbers = rounding.as_numbers(value)
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
    """Whether the replicas hold different states."""
    try:
        compare_replicas(strategy, state)
    except ReplicaDivergenceError:
        return True
    return False


def _multiplies(way: Trial) -> float:
    """Computes the least relative error of a product of matrices, as accelerators round factors."""
    devices = way.step.strategy.devices
    return 0.0 if not devices or devices[0].platform == "cpu" else _MATMUL_EPS
