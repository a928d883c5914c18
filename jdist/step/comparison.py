"""The comparison of a step on many replicas with the same step on one that sees the whole batch.

It may differ only where its text looks at its own rows: at a mean of something that is no mean, at a count, at pairs of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist.cluster.runtime import alone
from jdist.core.sharded_leaf import map_leaves
from jdist.core.step_state import user_state
from jdist.core.strategy import Strategy
from jdist.data.batching import filled_up, full_mask_place
from jdist.errors import JDistError, ReplicaDivergenceError
from jdist.jaxpr import graph
from jdist.reduction import psum
from jdist.step import rounding, trace_causes
from jdist.step.mesh_step import DistributedStep
from jdist.step.placement import compare_replicas
from jdist.step.quiet import calls_the_host, draws, draws_until, prints
from jdist.step.rounding import Leaf
from jdist.step.trace_causes import Evidence
from jdist.step.trial import Result, Trial, named_leaves, on_host

PyTree = Any

_IN_JIT = '`transform="jit"`'
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
        remedy: what to do; one word first, where the global view computes what one replica does. Empty if nothing differs.
        not_compared: what was left out, and why.
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
            f"whole batch and the {self.parts} parts that it is cut into:",
            *(f"  {each}" for each in self.differences[:8]),
        ]
        if len(self.differences) > 8:
            lines.append(f"  and {len(self.differences) - 8} more")
        if self.remedy.startswith(_IN_JIT):
            lines.append(
                f"One word mends it: {_IN_JIT} of the strategy computes what one replica does, from the same text."
            )
        for cause, remedy in dict.fromkeys((each.cause, each.remedy) for each in self.differences):
            names = [each.leaf for each in self.differences if each.cause == cause]
            more = f" and {len(names) - 1} more" if names[1:] else ""
            lines.append(f"Likely cause of {names[0]}{more}: {cause}. {remedy}")
        return "\n".join([*lines, *left_out])

    __repr__ = __str__


class NotComparableError(Exception):
    """Nothing can be compared; its text says why, to be read after "the step"."""


class Comparison:
    """A step and the arguments of a call to compare it on.

    Raises:
        NotComparableError: there is nothing to compare.
    """

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
        self._before = {leaf.name: leaf.value for leaf in named_leaves((None, self._state, ()), ("state",))}

    def compare(self, *, pads: bool) -> Verification:
        """Runs both ways and compares their results.

        Args:
            pads: whether a later batch will be filled up, so that such a one is compared as well.

        Raises:
            NotComparableError: nothing can be compared.
        """
        one = self._as_one()
        step = self._step
        rounds = self._options.precision is not None or self._strategy.keeps_residuals
        if rounds or self._options.steps_per_call > 1 or draws(one.closed) or prints(one.closed):
            step = self._like(_exact(self._strategy))
        many = Trial(step, self._call)
        alone, together = self._run_one(one), many.run(self._state, self._batches, self._others)
        pairs = self._pairs(alone, together)
        differing = self._differing(one, pairs)
        not_compared = tuple(self._not_compared(one, alone, together))
        of_shape = tuple(self._of_another_shape(alone, together))
        is_padded = self._real is not None
        if not differing and not of_shape and pads and self._mask_place is not None:
            # A full batch does not show what a replica does with fewer rows.
            is_padded = True
            self._batches = self._rows = self._with_rows_left_out(self._mask_place)
            alone, together = self._run_one(one), many.run(self._state, self._batches, self._others)
            pairs = self._pairs(alone, together)
            differing = self._differing(one, pairs)
        if not differing and not of_shape:
            return Verification((), "", not_compared, len(pairs), self._parts)
        evidence = Evidence(
            one=one.closed,
            many=many.closed,
            rows=next((len(x) for x in jax.tree.leaves(self._rows)), 0),
            parts=self._parts,
            accumulates=self._options.accumulate > 1,
            apart=_are_apart(step.strategy, many.state),
            padded=is_padded,
        )
        differences = (*of_shape, *_explained(evidence, [pairs[i] for i in differing]))
        remedies = list(dict.fromkeys(each.remedy for each in differences))
        if self._is_exact_in_jit(one, alone):
            remedies.insert(
                0, f"{_IN_JIT} of `jdist.{self._strategy.name}` computes what one replica does, from the same text."
            )
        return Verification(differences, " ".join(remedies), not_compared, len(pairs) + len(of_shape), self._parts)

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

    def _run_one(self, one: Trial, change: Callable[[Any], Any] = lambda x: x) -> dict[str, Result]:
        try:
            return one.run(*jax.tree.map(change, (self._state, self._rows, self._others)))
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
            value = result.value
            if name not in other or np.shape(other[name].value) != np.shape(value) or _is_nan(result, other[name]):
                continue
            before = self._before.get(name)
            before = np.zeros_like(rounding.as_numbers(value)) if before is None else before
            pairs.append(_Pair(name, result.place, before, value, other[name].value))
        return pairs

    def _differing(self, one: Trial, pairs: list[_Pair]) -> list[int]:
        """Finds the pairs that differ by more than rounding."""

        def run(change: Callable[[Any], Any]) -> list[Leaf]:
            before = {
                leaf.name: leaf.value
                for leaf in named_leaves((None, jax.tree.map(change, self._state), ()), ("state",))
            }
            after = self._run_one(one, change)
            return [(before.get(pair.name, pair.before), after[pair.name].value) for pair in pairs]

        first, second = [pair.one for pair in pairs], [pair.other for pair in pairs]
        eps = _eps(one)
        suspects = rounding.suspects(first, second, [pair.dtype for pair in pairs])
        differing = rounding.beyond_rounding(first, second, suspects, run, eps)
        alike = _counted_by_each(pairs, self._parts)
        differing = [i for i in differing if i not in alike]
        if not differing:
            return []
        one = one.shaken(eps)  # `run` uses this one from here on
        return rounding.beyond_rounding(first, second, differing, run, eps)

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
            yield "random draws, which differ on purpose (both ran with one constant in the place of each)"
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
        return not self._differing(one, self._pairs(alone, results))


def _is_nan(one: Result, other: Result | None) -> bool:
    """Whether two results hold nothing but NaN, of which nothing can be compared."""
    values = [] if other is None else [rounding.as_numbers(result.value) for result in (one, other)]
    return bool(values) and all(value.size and np.isnan(value).all() for value in values)


@dataclass(frozen=True)
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

    @property
    def dtype(self) -> Any:
        return self.alone.dtype


def _counted_by_each(pairs: list[_Pair], parts: int) -> set[int]:
    """Finds leaves of nnx metrics to which every part has added one value: sum and count are larger by one factor.

    What `nnx.metrics.Average` makes of them is the same.
    """
    by_metric: dict[str, list[int]] = {}
    for i, pair in enumerate(pairs):
        if pair.name.startswith("state.metrics"):
            by_metric.setdefault(pair.name.rpartition("[")[0], []).append(i)
    alike: set[int] = set()
    for places in by_metric.values():
        changes = [[rounding.change(leaf) for leaf in (pairs[i].one, pairs[i].other)] for i in places]
        if all(np.allclose(parts * one, other, rtol=1e-5) for one, other in changes):
            alike.update(places)
    return alike


def _explained(evidence: Evidence, pairs: list[_Pair]) -> Iterator[Difference]:
    general = trace_causes.of_step(evidence, [pair.name for pair in pairs])
    for pair in pairs:
        own = None
        if not pair.name.startswith("state") and not evidence.padded:
            own = trace_causes.of_metric(evidence, pair.alone, pair.together, pair.place)
        cause = own or general
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


def _eps(way: Trial) -> float:
    """Computes the relative error of a rounding in the least precise numbers of a step."""
    avals = (v.aval for eqn in graph.all_equations(way.closed) for v in eqn.outvars)
    dtypes = {aval.dtype for aval in avals if hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)}
    devices = way.step.strategy.devices
    multiplies = 0.0 if not devices or devices[0].platform == "cpu" else _MATMUL_EPS
    return max([multiplies, *(float(jnp.finfo(dtype).eps) for dtype in dtypes)])
