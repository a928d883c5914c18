"""Does a step compute on many replicas what it computes on one with the whole batch?

It may differ only where its text looks at its own rows: at a mean of something that is no mean, at a count, at pairs of
rows. `verify` runs the first batch both ways, keeps nothing, and names what differs.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.sharding import AxisType, Mesh

from jdist.cluster.runtime import alone
from jdist.core import context
from jdist.core.host_sharded import is_spread, map_leaves
from jdist.core.per_replica import is_per_replica
from jdist.core.step_state import user_state
from jdist.core.strategy import Strategy
from jdist.data.mask import filled_up, full_mask_place
from jdist.errors import JDistError, ReplicaDivergenceError, StepError, VerificationError
from jdist.reduction import psum
from jdist.step import rounding, trace_causes
from jdist.step.backend import Rehearsal
from jdist.step.mesh_step import DistributedStep
from jdist.step.placement import compare_replicas
from jdist.step.quiet import calls_the_host, draws, draws_until, equations, prints, quiet, shaken
from jdist.step.rounding import Leaf
from jdist.step.signature import Call
from jdist.step.trace_causes import Evidence
from jdist.support.arrays import to_host

PyTree = Any

_IN_JIT = '`transform="jit"`'
_MATMUL_EPS = 2.0**-8  # of an accelerator, which may multiply float32 in fewer digits


@runtime_checkable
class _StandsForPure(Protocol):
    """A step over objects that are changed in place."""

    def pure(self, args: tuple[Any, ...]) -> tuple[DistributedStep, tuple[Any, ...]]:
        """The step over their arrays, and its arguments."""
        ...


class VerificationWarning(UserWarning):
    """A step differs on many replicas from what it is on one with the whole batch."""


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
    """What `jdist.verify` found; true if nothing differs.

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


def verify(train_step: Any, *args: Any, **kwargs: Any) -> Verification:
    """Compares a step on one replica, which sees the whole batch, with the same step as it is distributed.

    Both run once, on copies: state, metrics and the step itself stay as they were. Random draws are replaced by one constant
    in both, as each replica draws for its own rows; with `precision` and under an all-reduce that is not exact both compute
    in float32. What rounding makes of a leaf is measured by further runs on one device, where leaves differ at all.

    Args:
        train_step: what `jdist.distribute` or `jdist.nnx.distribute` made.
        *args: as in a call: the state, a global batch, and what else the step takes.
        **kwargs: as in a call.

    Returns:
        A `Verification`, false if any leaf differs by more than rounding. It raises nothing where they differ: see `verify`
        of `jdist.distribute`.

    Raises:
        StepError: `train_step` is no distributed step.
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
    step = train_step
    if isinstance(train_step, _StandsForPure):
        step, args = train_step.pure(args)
    if not isinstance(step, DistributedStep):
        raise StepError(
            f"jdist.verify needs a step that `jdist.distribute` made for devices of this process, it got a "
            f"{type(train_step).__name__}. Under a parameter server, whose workers see other parameters each, distribute the "
            "function under `jdist.mirrored()` and verify that."
        )
    with context.outside_scopes():
        try:
            return _Comparison(step, args, kwargs).compared(pads=pads)
        except _LeftOut as exc:
            return _left_out(f"the step, {exc}", step.strategy.num_replicas * step.options.accumulate)


def verify_first(
    step: DistributedStep, args: tuple[Any, ...], kwargs: dict[str, Any], *, strict: bool, pads: bool = False
) -> Verification:
    """Verifies a step before its first call, and says what differs.

    Args:
        step: the step.
        args: of the call.
        kwargs: as well.
        strict: whether a difference is an error.
        pads: whether a later batch will be filled up, so that the step is verified on such a one as well.

    Raises:
        VerificationError: something differs, or nothing could be compared, and `strict` is set.

    Warns:
        VerificationWarning: something differs.
    """
    try:
        found = _verified(step, args, kwargs, pads=pads)
    except Exception as exc:  # noqa: BLE001 - the call itself follows, and raises what is wrong with step or arguments
        found = _left_out(f"the step, as that failed: {type(exc).__name__}: {exc}", 0)
    if strict and not (found.ok and (found.num_compared or found.parts == 1)):
        raise VerificationError(
            f"{step.__name__} differs between one replica and many, or could not be verified. {found}\n"
            '`verify="first"` warns of it and goes on; `verify="off"` says nothing.',
            found,
        )
    if not found.ok:
        warnings.warn(
            f'{step.__name__}: {found}\nIf it is meant so, say `verify="off"`; `jdist.verify` compares again.',
            VerificationWarning,
            stacklevel=5,
        )
    return found


def _left_out(what: str, parts: int) -> Verification:
    return Verification((), "", (what,), num_compared=0, parts=parts)


class _LeftOut(Exception):
    """Nothing can be compared; its text says why, behind "the step"."""


@dataclass(frozen=True)
class _Result:
    """A leaf of what a step returned, on the host, and its place among all leaves."""

    name: str
    place: int
    value: Any


class _Way:
    """A way to run a step: traced at the first run, and kept apart from the step's own calls.

    Attributes:
        closed: the jaxpr.
        state: the newest state, where the step has left it.
    """

    def __init__(self, step: DistributedStep, call: Call):
        self.step, self._call = step, call
        self.closed: Any = None
        self.state: PyTree = None
        self._run: Callable[[tuple[PyTree, ...]], Any] | None = None
        self._treedef: Any = None

    def shaken(self, eps: float) -> _Way:
        """The same with errors of rounding in all that is summed; after a run."""
        way = copy.copy(self)
        function = jax.jit(jex.jaxpr_as_fun(shaken(quiet(self.closed), eps)))
        way._run = lambda arguments: self._treedef.unflatten(function(*jax.tree.leaves(arguments)))
        return way

    def run(self, state: PyTree, batches: PyTree, others: PyTree) -> dict[str, _Result]:
        rehearsal = self.trace(state, batches, others)
        assert self._run is not None  # the trace has made it
        results = self._run(rehearsal.arguments)
        self.state = results[1]
        traced = rehearsal.traced
        return {leaf.name: leaf for leaf in _named(results, traced.returns)}

    def trace(self, state: PyTree, batches: PyTree, others: PyTree) -> Rehearsal:
        """Makes ready for a run."""
        with warnings.catch_warnings():  # what tracing has to say, the step itself says
            warnings.simplefilter("ignore")
            rehearsal = self.step.rehearse(self._call, state, batches, others)
            if self._run is None:
                made = rehearsal.program.trace(*rehearsal.arguments)
                self.closed, treedef = made.jaxpr, jax.tree.structure(made.out_info)
                self._treedef = treedef
                self._run = self._loud(rehearsal)
                if draws(self.closed) or prints(self.closed):
                    function = jax.jit(jex.jaxpr_as_fun(quiet(self.closed)))
                    self._run = lambda arguments: treedef.unflatten(function(*jax.tree.leaves(arguments)))
        return rehearsal

    @staticmethod
    def _loud(rehearsal: Rehearsal) -> Callable[[tuple[PyTree, ...]], Any]:
        def run(arguments: tuple[PyTree, ...]) -> Any:
            box: list[Any] = []
            rehearsal.program.run_into(box, *arguments)
            return box[0]

        return run


class _Comparison:
    """One step, one batch, and the ways of running it that are compared."""

    def __init__(self, step: DistributedStep, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._step, self._strategy, self._options = step, step.strategy, step.options
        self._parts = step.strategy.num_replicas * step.options.accumulate
        if self._parts == 1:
            raise _LeftOut("which has one replica and one microbatch: it is what it would be compared with")
        whole = self._strategy.replicated_sharding
        if whole is not None and not whole.is_fully_addressable:
            raise _LeftOut("which runs in several processes: verify it in one, under `jdist.mirrored()`")
        self._call, state, batches, others = step.bind(args, kwargs)
        self._mask_place = full_mask_place(batches)
        if step.options.steps_per_call > 1:
            batches = jax.tree.map(lambda x: x[0], batches)
        filled = (filled_up(batch) for batch in batches)
        real = next((rows for rows in filled if rows is not None and not rows.all()), None)
        self._real = None if real is None or not real.any() else real
        self._state, self._others = map_leaves(_on_host, user_state(state)), map_leaves(_on_host, others)
        self._batches = jax.tree.map(_on_host, batches)
        self._rows = self._batches if self._real is None else jax.tree.map(lambda x: x[self._real], self._batches)
        self._before = {leaf.name: leaf.value for leaf in _named((None, self._state, ()), ("state",))}

    def compared(self, *, pads: bool) -> Verification:
        one = self._as_one()
        given = self._step
        rounds = self._options.precision is not None or self._strategy.keeps_residuals
        if rounds or self._options.steps_per_call > 1 or draws(one.closed) or prints(one.closed):
            given = self._like(_exact(self._strategy))
        many = _Way(given, self._call)
        alone, together = self._run_one(one), many.run(self._state, self._batches, self._others)
        pairs = self._pairs(alone, together)
        differing = self._differing(one, pairs)
        left_out = tuple(self._left_out(one, alone, together))
        of_shape = tuple(self._of_another_shape(alone, together))
        is_padded = self._real is not None
        if not differing and not of_shape and pads and self._mask_place is not None:
            # The last batch will be filled up: what a replica does without all of its rows shows in no full one.
            is_padded = True
            self._batches = self._rows = self._with_rows_left_out(self._mask_place)
            alone, together = self._run_one(one), many.run(self._state, self._batches, self._others)
            pairs = self._pairs(alone, together)
            differing = self._differing(one, pairs)
        if not differing and not of_shape:
            return Verification((), "", left_out, len(pairs), self._parts)
        evidence = Evidence(
            one=one.closed,
            many=many.closed,
            rows=next((len(x) for x in jax.tree.leaves(self._rows)), 0),
            parts=self._parts,
            accumulates=self._options.accumulate > 1,
            apart=_are_apart(given.strategy, many.state),
            padded=is_padded,
        )
        found = [*of_shape, *_explained(evidence, [pairs[i] for i in differing])]
        remedies = list(dict.fromkeys(each.remedy for each in found))
        if self._is_exact_in_jit(one, alone):
            remedies.insert(
                0, f"{_IN_JIT} of `jdist.{self._strategy.name}` computes what one replica does, from the same text."
            )
        return Verification(tuple(found), " ".join(remedies), left_out, len(pairs) + len(of_shape), self._parts)

    def _as_one(self) -> _Way:
        """The step as one replica, traced."""
        one = _one_replica(self._strategy)
        way = _Way(self._like(one, accumulate=1), self._call)
        try:
            way.trace(self._state, self._rows, self._others)
        except (JDistError, TypeError, ValueError, NameError) as exc:
            # What is wrong with the step under every strategy is an error.
            _Way(self._like(_exact(self._strategy)), self._call).trace(self._state, self._batches, self._others)
            raise _LeftOut(f"which does not run as one replica: {str(exc).splitlines()[0]}") from exc
        if calls_the_host(way.closed):
            raise _LeftOut("which calls a function of the host, and would call it twice more")
        if draws_until(way.closed):
            raise _LeftOut("which draws random numbers until it accepts some; draws differ on purpose")
        limits = one.devices[0].memory_stats() if one.devices else None
        if limits is not None and "bytes_limit" in limits:
            free = limits["bytes_limit"] - limits.get("bytes_in_use", 0)
            if 3 * _size_bytes(self._state) + _size_bytes(self._rows) > free:
                raise _LeftOut("as one device cannot hold its state and the whole batch")
        return way

    def _run_one(self, one: _Way, change: Callable[[Any], Any] = lambda x: x) -> dict[str, _Result]:
        try:
            return one.run(*jax.tree.map(change, (self._state, self._rows, self._others)))
        except jax.errors.JaxRuntimeError as exc:
            if "RESOURCE_EXHAUSTED" not in str(exc):
                raise
            raise _LeftOut("as one device cannot hold the whole batch") from exc

    def _like(self, strategy: Strategy, **options: Any) -> DistributedStep:
        """The step without what rounds on purpose."""
        plain = {"donate": False, "precision": None, "steps_per_call": 1, "verify": "off"}
        return self._step.like(strategy, **plain, **options)

    def _pairs(self, one: dict[str, _Result], other: dict[str, _Result]) -> list[_Pair]:
        """The leaves that both have, in one shape."""
        found = []
        for name, result in one.items():
            value = result.value
            if name not in other or np.shape(other[name].value) != np.shape(value) or _is_nan(result, other[name]):
                continue
            before = self._before.get(name)
            before = np.zeros_like(rounding.as_numbers(value)) if before is None else before
            found.append(_Pair(name, result.place, before, value, other[name].value))
        return found

    def _differing(self, one: _Way, pairs: list[_Pair]) -> list[int]:
        """Which of the pairs differ by more than rounding."""

        def run(change: Callable[[Any], Any]) -> list[Leaf]:
            before = {
                leaf.name: leaf.value for leaf in _named((None, jax.tree.map(change, self._state), ()), ("state",))
            }
            after = self._run_one(one, change)
            return [(before.get(pair.name, pair.before), after[pair.name].value) for pair in pairs]

        first, second = [pair.one for pair in pairs], [pair.other for pair in pairs]
        among = rounding.suspects(first, second, [pair.dtype for pair in pairs])
        differing = rounding.beyond_rounding(first, second, among, run, _eps(one))
        alike = _counted_by_each(pairs, self._parts)
        differing = [i for i in differing if i not in alike]
        if not differing:
            return []
        eps = _eps(one)
        one = one.shaken(eps)  # which `run` takes from here on
        return rounding.beyond_rounding(first, second, differing, run, eps)

    def _with_rows_left_out(self, mask_place: int) -> PyTree:
        """The batches with a mask that leaves out the last half of the last part's rows, at least one."""
        leaves, treedef = jax.tree.flatten(self._batches)
        mask = np.array(leaves[mask_place])
        mask[len(mask) - max(1, len(mask) // self._parts // 2) :] = 0
        leaves[mask_place] = mask
        return jax.tree.unflatten(treedef, leaves)

    def _of_another_shape(self, alone: dict[str, _Result], together: dict[str, _Result]) -> Iterator[Difference]:
        """The leaves whose shape depends on how many rows a replica sees; rows that fill up a batch are no part of one's."""
        for name, result in alone.items():
            if name not in together or np.shape(result.value) == np.shape(together[name].value):
                continue
            if self._real is not None and name.startswith("examples"):
                continue
            shapes = np.shape(result.value), np.shape(together[name].value)
            cause = trace_causes.of_shape(*shapes)
            summaries = _summary(result.value), _summary(together[name].value)
            yield Difference(name, *summaries, float("inf"), cause.says, cause.remedy)

    def _left_out(self, one: _Way, alone: dict[str, _Result], together: dict[str, _Result]) -> Iterator[str]:
        if draws(one.closed):
            yield "random draws, which differ on purpose (both ran with one constant in the place of each)"
        yield from (
            f"{name}, which is NaN in both" for name, result in alone.items() if _is_nan(result, together.get(name))
        )

    def _is_exact_in_jit(self, one: _Way, alone: dict[str, _Result]) -> bool:
        """Whether the step in the global view is what it is as one replica."""
        strategy = self._strategy
        if strategy.name not in ("mirrored", "tpu", "multi_worker") or strategy.is_global_view:
            return False
        way = _Way(self._like(dataclasses.replace(_exact(strategy), transform="jit")), self._call)
        try:
            results = way.run(self._state, self._batches, self._others)
        except (JDistError, TypeError, ValueError, NameError):  # it has no meaning there
            return False
        return not self._differing(one, self._pairs(alone, results))


def _is_nan(one: _Result, other: _Result | None) -> bool:
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
    """The leaves of nnx metrics to which every part has added one value: sum and count are larger by one factor.

    What `nnx.metrics.Average` makes of them is the same.
    """
    by_metric: dict[str, list[int]] = {}
    for i, pair in enumerate(pairs):
        if pair.name.startswith("state.metrics"):
            by_metric.setdefault(pair.name.rpartition("[")[0], []).append(i)
    found: set[int] = set()
    for places in by_metric.values():
        changes = [[rounding.change(leaf) for leaf in (pairs[i].one, pairs[i].other)] for i in places]
        if all(np.allclose(parts * one, other, rtol=1e-5) for one, other in changes):
            found.update(places)
    return found


def _explained(evidence: Evidence, pairs: list[_Pair]) -> Iterator[Difference]:
    general = trace_causes.of_step(evidence, [pair.name for pair in pairs])
    for pair in pairs:
        own = None
        if not pair.name.startswith("state") and not evidence.padded:
            own = trace_causes.of_metric(evidence, pair.alone, pair.together, pair.place)
        cause = own or general
        alone, together = _summary(pair.alone), _summary(pair.together)
        apart = rounding.relative(pair.one, pair.other)
        yield Difference(pair.name, alone, together, apart, cause.says, cause.remedy)


def _summary(value: Any) -> float:
    numbers = rounding.as_numbers(value)
    return float(np.real(numbers)) if numbers.ndim == 0 else float(np.linalg.norm(numbers.ravel()))


def _named(results: Any, returns: tuple[str, ...]) -> Iterator[_Result]:
    """The leaves of state and results, without what each replica has of its own."""
    _, state, outputs, *_ = results
    roles = [role for role in returns if role != "state"]
    trees = [("state", state if "state" in returns else None)]
    names = [role if roles.count(role) == 1 else f"{role}[{i}]" for i, role in enumerate(roles)]
    trees += list(zip(names, outputs, strict=True))
    place = 1 if "state" in returns else 1 + len(jax.tree.leaves(state))
    for role, tree in trees:
        for path, node in jax.tree.leaves_with_path(tree, is_leaf=lambda x: is_per_replica(x) or is_spread(x)):
            if not is_per_replica(node) and role != "per_replica":
                yield _Result(role + jax.tree_util.keystr(path), place, _on_host(node))
            place += len(jax.tree.leaves(node))


def _on_host(x: Any) -> Any:
    return to_host(x) if isinstance(x, jax.Array) or is_spread(x) else x


def _size_bytes(tree: PyTree) -> int:
    return sum(getattr(x, "nbytes", 8) for x in jax.tree.leaves(tree))


def _exact(strategy: Strategy) -> Strategy:
    """The strategy with the state on its devices, and sums that are exact."""
    return dataclasses.replace(strategy, reduction=psum(), cluster=alone())


def _one_replica(strategy: Strategy) -> Strategy:
    """One device of a strategy, with its axes."""
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


def _eps(way: _Way) -> float:
    """The relative error of a rounding, of the least precise numbers that a step computes with."""
    avals = (v.aval for eqn in equations(way.closed) for v in eqn.outvars)
    dtypes = {aval.dtype for aval in avals if hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)}
    devices = way.step.strategy.devices
    multiplies = 0.0 if not devices or devices[0].platform == "cpu" else _MATMUL_EPS
    return max([multiplies, *(float(jnp.finfo(dtype).eps) for dtype in dtypes)])
