"""The evaluation of a step's update part on arrays in parts: what is elementwise where the parts are, the rest on the devices.

Optimisers are elementwise, but for a few scalars and a norm here and there. Each device therefore updates its own parts
(under central storage each host, in row-major order). A sum, maximum or minimum over a whole array (the norm of a
gradient, of a parameter) is taken on the devices, part by part. What is neither (a transposition, a product of
matrices) is computed on the devices from whole arrays: every step that can be split gives the right result, and only
such an operation costs the device memory of its operands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import compute_on
from jax.sharding import PartitionSpec

from jdist.core.collective_marks import Gather, line_of
from jdist.core.layout import Form, Layout, over_replicas
from jdist.core.strategy import Strategy
from jdist.jaxpr import graph, variation
from jdist.jaxpr.elementwise import (
    COLLECTIVES,
    ELEMENTWISE,
    FILLINGS,
    OF_BOOLS,
    apply_stored,
    bind,
)
from jdist.step.divergence import hash_leaf
from jdist.step.outputs import LOCAL, METRIC, ROWS, OutputKind

# Called compute_on2 before JAX 0.12.
_compute_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)


@dataclass(frozen=True)
class ShardedArray:
    """An array in parts during the update, stored as a `ShardedLeaf` is."""

    stored: jax.Array | None  # the rows; None until the host has computed them
    form: Form
    on_host: bool  # in host memory, else on the devices
    # the leaf of the state that it is, or was computed from first; "" of a gradient alone
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form.of


@dataclass(frozen=True)
class Splat:
    """An array of one value everywhere."""

    value: Any
    shape: tuple[int, ...]


def evaluate(
    strategy: Strategy,
    layout: Layout,
    closed: Any,
    arguments: Sequence[Any],
    kept: Sequence[Form | None],
    kinds: Sequence[OutputKind | None] = (),
    gathers: list[Gather] | None = None,
) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """Evaluates an update part, seen from outside of the replicas; returns `(results, hashes)`."""
    # `arguments` are arrays that every device has in full, and `ShardedArray`s. Results with a form
    # in `kept` are stored in it, the others in full on the devices, with a leading axis of replicas
    # if their kind is LOCAL; a kind of None is the same on all. The hashes, uint32 [replicas] by a
    # result's place, are of results in parts that may vary among the replicas. `gathers` collects
    # the gathered arrays.
    evaluation = _Evaluation(strategy, layout, closed, [] if gathers is None else gathers)
    return evaluation.run(arguments, kept, kinds or [None] * len(kept))


class _Evaluation:
    """One evaluation. Equations for the hosts wait until a device needs a result, so that they are computed in one go."""

    def __init__(self, strategy: Strategy, layout: Layout, closed: Any, gathers: list[Gather]):
        self.strategy, self.layout, self.closed, self.gathers = strategy, layout, closed, gathers
        self.equation: Any = None  # the one that is computed
        self.results = graph.body_of(closed).outvars
        self.effects = graph.effects_of(closed)
        self.equations, _ = graph.needed(closed, self.results, (), self.effects)
        self.known: dict[Any, Any] = {}
        self.waiting: list[Any] = []  # equations for the hosts
        self.on_host: dict[Any, jax.Array] = {}  # what was copied there
        self.on_device: dict[Any, jax.Array] = {}
        self.varying = variation.varying(closed, ())
        # Whole operands of equations with results that vary among the replicas.
        self.read_by_varying: dict[Any, jax.Array] = {}

    def run(self, arguments: Sequence[Any], kept: Sequence[Form | None], kinds: Sequence[OutputKind | None]) -> Any:
        self.known = graph.values_at_start(self.closed, arguments)
        self.known.update(
            {v: np.asarray(x) for v, x in self.known.items() if not isinstance(x, jax.Array | ShardedArray)}
        )
        for number, eqn in enumerate(self.equations):
            self.done, self.equation = number, eqn
            if self.is_of_replicas(eqn):
                continue
            operands = [self.value(v) for v in eqn.invars]
            self.known.update(zip(eqn.outvars, self.apply(eqn, operands), strict=True))
        self.done, self.equation = len(self.equations), None
        self.flush()
        results = [
            self.wanted(v, kind) if form is None else self.kept(v, form)
            for v, form, kind in zip(self.results, kept, kinds, strict=True)
        ]
        # Hashed now: once each replica keeps only its part, a difference could not be found.
        places = {
            i: v for i, (v, form) in enumerate(zip(self.results, kept, strict=True)) if form and self.is_varying(v)
        }
        rows = PartitionSpec(self.strategy.axes)
        hashes = self.by_replicas(list(places.values()), rows, change=lambda x: hash_leaf(x)[None]) if places else {}
        return results, {i: hashes[v] for i, v in places.items()}

    def is_varying(self, v: Any) -> bool:
        """Returns whether a value varies among the replicas; a literal does not."""
        return not graph.is_literal(v) and v in self.varying

    def is_of_replicas(self, eqn: Any) -> bool:
        """Returns whether replicas compute an equation by themselves: a result or operand varies."""
        # Equations with effects, and with results that do not vary, are computed at once.
        makes_varying = any(map(self.is_varying, eqn.outvars))
        if not makes_varying and not any(map(self.is_varying, eqn.invars)):
            return False
        for v in eqn.invars:
            if not graph.is_literal(v) and not self.is_varying(v) and v not in self.read_by_varying:
                self.read_by_varying[v] = self.whole(v, self.value(v))
        effects = [effect for effect in self.effects if effect is eqn]
        if effects or not makes_varying:
            results = self.by_replicas(eqn.outvars, PartitionSpec(), effects)
            (self.read_by_varying if makes_varying else self.known).update(results)
        return True

    def by_replicas(
        self,
        wanted: Sequence[Any],
        spec: PartitionSpec,
        effects: Sequence[Any] = (),
        change: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> Any:
        """Variables as each replica computes them, and `change`s them, by variable."""
        wanted = [v for v in wanted if not graph.is_dropped(v)]
        piece = graph.subfunction(self.closed, list(self.read_by_varying), wanted, effects)
        mapped = over_replicas(self.strategy, lambda values: [change(x) for x in piece(values)], PartitionSpec(), spec)
        return dict(zip(wanted, mapped(list(self.read_by_varying.values())), strict=True))

    def value(self, v: Any) -> Any:
        # A constant remembers the mesh of the trace, and its axes are no longer bound.
        return np.asarray(v.val) if graph.is_literal(v) else self.known[v]

    def kept(self, v: Any, form: Form) -> jax.Array:
        x = self.by_replicas([v], PartitionSpec())[v] if self.is_varying(v) else self.value(v)
        if isinstance(x, ShardedArray) and x.on_host:
            assert x.stored is not None  # `flush` has computed it
            return x.stored
        if isinstance(x, Splat):
            x = jnp.full(x.shape, x.value, v.aval.dtype)
        stored = self.device_operand(v, x, form)
        if self.layout.on_host:
            return jax.device_put(stored, self.layout.kept(form))
        return jax.lax.with_sharding_constraint(stored, self.layout.device(form))

    def wanted(self, v: Any, kind: OutputKind | None) -> jax.Array:
        n, rows = self.strategy.num_replicas, PartitionSpec(self.strategy.axes)
        if self.is_varying(v) and kind is not None:
            x = self.by_replicas([v], rows, change=lambda x: x if kind == ROWS else x[None])[v]
            return x.mean(0) if kind == METRIC else x
        x = (
            self.by_replicas([v], PartitionSpec())[v]
            if self.is_varying(v)
            else jnp.asarray(self.whole(v, self.value(v)))
        )
        if kind not in (LOCAL, ROWS):
            return x
        # An entry a replica lies with its replica, also where all are the same.
        of_replicas = jnp.broadcast_to(x, (n, *x.shape)) if kind == LOCAL else jnp.concatenate([x] * n)
        return jax.lax.with_sharding_constraint(of_replicas, self.strategy.batch_sharding)

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        in_parts = [x for x in operands if isinstance(x, ShardedArray)]
        leaf = next((x.name for x in in_parts if x.name), "")
        splats = [x for x in operands if isinstance(x, Splat)]
        shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
        if name == "optimization_barrier":
            self.flush()
            return [self.value(v) for v in eqn.invars]
        if name in graph.RESHAPING and splats:
            return [Splat(splats[0].value, shape)]
        if name == "broadcast_in_dim" and not in_parts and not jnp.ndim(operands[0]):
            dtype = eqn.outvars[0].aval.dtype
            return (
                [Splat(operands[0], shape)]
                if self.layout.takes_parts(shape, dtype)
                else self.apply_whole(eqn, operands)
            )
        in_order = name != "reshape" or eqn.params["dimensions"] is None
        if name in graph.RESHAPING and in_order and in_parts and (form := self.reshaped(in_parts[0].form, shape)):
            stored = in_parts[0].stored
            on_host = in_parts[0].on_host
            return [self.wait(eqn, form, leaf) if on_host else ShardedArray(stored, form, on_host=False, name=leaf)]
        # JAX 0.12 stretches axes of size 1 in elementwise operations.
        fits = all(getattr(x, "shape", ()) in ((), shape) for x in operands)
        if name in ELEMENTWISE and in_parts and fits:
            form = in_parts[0].form
            if any(x.on_host for x in in_parts):
                return [self.wait(eqn, form, leaf)]
            inputs = [self.device_operand(v, x, form) for v, x in zip(eqn.invars, operands, strict=True)]
            return [ShardedArray(apply_stored(eqn, inputs, form.stored), form, on_host=False, name=leaf)]
        if name in ELEMENTWISE and splats and all(isinstance(x, Splat) or not jnp.ndim(x) for x in operands):
            values = [x.value if isinstance(x, Splat) else x for x in operands]
            return [Splat(bind(eqn, values), shape)]
        in_bits = name in OF_BOOLS and eqn.invars[0].aval.dtype != jnp.bool_
        if name in FILLINGS and not in_bits and in_parts and len(eqn.params["axes"]) == len(in_parts[0].shape):
            stored = self.device_operand(eqn.invars[0], in_parts[0], in_parts[0].form)
            real = in_parts[0].form.with_padding(stored, FILLINGS[name](stored.dtype))
            reduced = bind(eqn, [real], axes=tuple(range(real.ndim)))
            if name in ("reduce_max", "reduce_min") and jnp.issubdtype(real.dtype, jnp.floating):
                # Between the parts XLA may pass over NaN: see `_extreme` in replica/collectives.py.
                reduced = jnp.where(jnp.isnan(real).any(), jnp.asarray(jnp.nan, real.dtype), reduced)
            return [reduced]
        return self.apply_whole(eqn, [self.whole(v, x) for v, x in zip(eqn.invars, operands, strict=True)])

    def reshaped(self, form: Form, shape: tuple[int, ...]) -> Form | None:
        """Returns the form of an array of `shape` if the reshape moves no data, else None."""
        other = dataclasses.replace(form, of=shape)
        if shape == form.of:
            return form
        return other if not any(form.model) and self.layout.form(shape) == other else None

    def apply_whole(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Computes with whole arrays; what may name an axis of the mesh, as a replica."""
        if eqn.primitive.name not in COLLECTIVES and eqn.outvars and not graph.nested_jaxprs(eqn):
            results = bind(eqn, operands)
            return results if eqn.primitive.multiple_results else [results]
        specs = PartitionSpec(), PartitionSpec()
        mapped = over_replicas(self.strategy, lambda *xs: graph.apply_equation(self.closed, eqn, xs), *specs)
        return mapped(*operands)

    def whole(self, v: Any, x: Any) -> Any:
        if isinstance(x, ShardedArray):
            self.note(v, x)
            return self.layout.gather(self.device_operand(v, x, x.form), x.form)
        return jnp.full(x.shape, x.value, v.aval.dtype) if isinstance(x, Splat) else x

    def note(self, v: Any, x: ShardedArray) -> None:
        """Notes that an array is gathered, and for what."""
        eqn = self.equation
        why = (
            "whole, for what the step returns"
            if eqn is None
            else f"whole, for the update or a metric ({eqn.primitive.name})"
        )
        num_bytes = math.prod(x.shape) * v.aval.dtype.itemsize
        leaf = x.name or f"a gradient, {v.aval.dtype}{list(x.shape)}"
        self.gathers.append(Gather(leaf, why, num_bytes, "" if eqn is None else line_of(eqn)))

    def device_operand(self, v: Any, x: Any, form: Form) -> Any:
        """Gives an operand as the devices compute with it: stored in a form, or a scalar."""
        if isinstance(x, Splat):
            return x.value
        if not isinstance(x, ShardedArray):
            return self.in_parts(x, form) if jnp.ndim(x) else x
        if not x.on_host:
            assert x.stored is not None  # only a host has yet to compute
            return x.stored if x.form == form else self.in_parts(x.form.restore(x.stored), form)
        if v not in self.on_device:
            if x.stored is None:
                self.flush()
            self.on_device[v] = jax.device_put(self.known[v].stored, self.layout.device(self.known[v].form))
        return self.on_device[v]

    def in_parts(self, x: jax.Array, form: Form) -> jax.Array:
        return jax.lax.with_sharding_constraint(form.store(x), self.layout.device(form))

    def wait(self, eqn: Any, form: Form, leaf: str) -> ShardedArray:
        self.waiting.append(eqn)
        return ShardedArray(None, form, on_host=True, name=leaf)

    def flush(self) -> None:
        """Has the hosts compute the waiting equations."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        computed = {v for eqn in waiting for v in eqn.outvars}
        later = {v for eqn in self.equations[self.done :] for v in eqn.invars if not graph.is_literal(v)}
        later.update(v for v in self.results if not graph.is_literal(v))
        wanted = [v for v in dict.fromkeys(v for eqn in waiting for v in eqn.outvars) if v in later]
        # A constant is read by its place, a variable by itself.
        read = {
            (v if not graph.is_literal(v) else (number, i)): v
            for number, eqn in enumerate(waiting)
            for i, v in enumerate(eqn.invars)
            if graph.is_literal(v) or v not in computed
        }

        def run(operands: dict[Any, jax.Array]) -> list[jax.Array]:
            values = dict(operands)
            for number, eqn in enumerate(waiting):
                inputs = [values[(number, i) if graph.is_literal(v) else v] for i, v in enumerate(eqn.invars)]
                values[eqn.outvars[0]] = apply_stored(eqn, inputs, self.layout.form(eqn.outvars[0].aval.shape).stored)
            return [values[v] for v in wanted]

        keys, operands = list(read), [self.host_operand(v) for v in read.values()]
        on_host = _compute_on(
            lambda operands: run(dict(zip(keys, operands, strict=True))),
            compute_type="device_host",
            out_memory_spaces=jax.memory.Space.Host,
        )
        for v, stored in zip(wanted, on_host(operands), strict=True):
            before = self.known.get(v)  # of what the hosts alone needed nothing was known
            leaf = "" if before is None else before.name
            self.known[v] = ShardedArray(stored, self.layout.form(v.aval.shape), on_host=True, name=leaf)

    def host_operand(self, v: Any) -> jax.Array:
        """Gives an operand as the hosts compute with it: stored, or a scalar."""
        if graph.is_literal(v):
            return jax.device_put(np.asarray(v.val), self.layout.whole_on_host)
        x = self.known[v]
        if isinstance(x, ShardedArray) and x.on_host:
            assert x.stored is not None  # equations still waiting are part of this very call
            return x.stored
        if v not in self.on_host:
            form = self.layout.form(v.aval.shape)
            value = self.device_operand(v, x, form)
            to = self.layout.kept(form) if jnp.ndim(value) else self.layout.whole_on_host
            self.on_host[v] = jax.device_put(value, to)
        return self.on_host[v]
