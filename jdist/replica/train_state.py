"""Train state: parameters, the optimiser's state, and what else a step carries along."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from jdist.core.sharded_leaf import is_sharded_leaf
from jdist.errors import StepError
from jdist.replica.aggregation import Aggregation, aggregate
from jdist.replica.gradients import OVERWRITTEN
from jdist.support import checks
from jdist.support.leaves import leaves_of, table_of
from jdist.support.table import Table
from jdist.support.words import did_you_mean
from jdist.typing import PyTree


def optimizer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Lets an optimiser ignore the further arguments of `update` that others need, such as `value=loss`.

    Args:
        tx: the optimiser. Equal ones give equal ones. A step needs no such mark on an optimiser that it calls itself.
    """
    if isinstance(tx, optax.GradientTransformationExtraArgs):
        return tx
    return optax.GradientTransformationExtraArgs(tx.init, _Update(tx))


@dataclasses.dataclass(frozen=True)
class _Update:
    tx: optax.GradientTransformation

    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        return self.tx.update(updates, state, params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Parameters, optimiser state and what else a step carries along: a convenience, any pytree serves as well.

    Attributes:
        step: number of updates made, int32 scalar.
        params: pytree of parameters.
        opt_state: the optimiser's state.
        rng: a PRNG key, or None.
        extra: further collections by name (batch statistics, an average of the parameters, ...), each a pytree.
        aggregation: `(collection, how)` of each collection that replicas write differently; static.
        apply_fn: the model's apply function; static.
        tx: the optimiser; static.

    Example:
        >>> import jdist, optax
        >>> state = jdist.TrainState.create(params={"w": 1.0}, tx=optax.sgd(0.5))
        >>> float(state.apply_gradients(grads={"w": 1.0}).params["w"])
        0.5
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    rng: jax.Array | None = None
    extra: dict[str, PyTree] = dataclasses.field(default_factory=dict)
    apply_fn: Callable[..., Any] | None = dataclasses.field(default=None, metadata={"static": True})
    tx: optax.GradientTransformation = dataclasses.field(metadata={"static": True})
    aggregation: tuple[tuple[str, Aggregation], ...] = dataclasses.field(default=(), metadata={"static": True})

    @classmethod
    def create(
        cls,
        *,
        params: PyTree,
        tx: optax.GradientTransformation,
        apply_fn: Callable[..., Any] | None = None,
        rng: jax.Array | None = None,
        aggregation: Mapping[str, Aggregation] | None = None,
        **extra: PyTree,
    ) -> TrainState:
        """Makes a state before the first step.

        Args:
            params: pytree of parameters.
            tx: the optimiser.
            apply_fn: the model's apply function.
            rng: a PRNG key for steps that draw.
            aggregation: how `apply_gradients` brings together what replicas made of a collection, for example
                `{"batch_stats": "mean", "seen": "sum"}`; see `jdist.aggregate`. With "per_replica" the collection leads
                with an axis of replicas. A collection left out must come out the same on every replica.
            **extra: further collections, read back as `state.extra[name]`.

        Raises:
            StepError: `aggregation` names no collection, or no aggregation.
        """
        aggregation = dict(aggregation or {})
        for name, how in aggregation.items():
            checks.choice(f"aggregation[{name!r}]", how, get_args(Aggregation), StepError, call="TrainState.create")
            if name not in extra:
                raise StepError(
                    f"TrainState.create: `aggregation` names {name!r}, which is not a collection; the collections are "
                    f"{sorted(extra) or 'none'}."
                )
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=tx.init(_apart(params)[0]),
            rng=rng,
            extra=extra,
            apply_fn=apply_fn,
            tx=tx,
            aggregation=tuple(aggregation.items()),
        )

    def apply_gradients(self, *, grads: PyTree, **extra: PyTree) -> TrainState:
        """Makes one optimiser update.

        Args:
            grads: gradient, a tree like `params`.
            **extra: new values of collections that `create` declared, this replica's where `aggregation` says how to
                bring them together. Other names are further arguments of the optimiser's `update`, such as
                `value=loss` of `optax.contrib.reduce_on_plateau`.

        Raises:
            StepError: a name that is neither a collection nor an argument that the optimiser takes.
        """
        (grads, overwritten), (params, _) = _apart(grads), _apart(self.params)
        of_update = {name: extra.pop(name) for name in self._read_by_update(grads, params, extra)}
        self._check_declared(extra)
        for name, how in self.aggregation:
            if name in extra:
                old = {"old": self.extra[name]} if how == "sum" else {}
                extra[name] = aggregate(extra[name], how, **old)
        update: Callable[..., tuple[PyTree, PyTree]] = self.tx.update
        updates, opt_state = update(grads, self.opt_state, params, **of_update)
        params: Any = optax.apply_updates(params, updates)
        return dataclasses.replace(
            self,
            step=self.step + 1,
            params={**params, **overwritten} if overwritten else params,
            opt_state=opt_state,
            extra={**self.extra, **extra},
        )

    def replace(self, **changes: PyTree) -> TrainState:
        """Copies the state with `changes` of its fields or declared collections, by name; aggregates nothing.

        Raises:
            StepError: neither a field nor a declared collection.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        own = {name: value for name, value in changes.items() if name in fields}
        extra = {name: value for name, value in changes.items() if name not in fields}
        self._check_declared(extra)
        return dataclasses.replace(self, **{"extra": {**self.extra, **extra}, **own})

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is neither field nor method. Copying and pickling ask before there is an `extra`.
        extra = self.__dict__.get("extra", {})
        mend = f"; it is a collection: read `state.extra[{name!r}]`" if name in extra else ""
        raise AttributeError(f"a TrainState has no attribute {name!r}{mend}")

    def _table(self) -> Table | None:
        """Makes a table of the leaves and where they are; None if no leaf is an array."""
        if not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(self)):
            return None
        return table_of(leaves_of(self, is_sharded_leaf), "TrainState")

    def _repr_html_(self) -> str | None:
        table = self._table()
        return None if table is None else table._repr_html_()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # IPython's text: it would show all values, which large arrays need the host's memory for, and donated ones lack.
        printer.text(str(self._table() or repr(self)))

    def _read_by_update(self, grads: PyTree, params: PyTree, extra: dict[str, PyTree]) -> list[str]:
        """Lists the names, of no collection, that the optimiser's `update` reads."""
        others = {name: value for name, value in extra.items() if name not in self.extra}
        if not others or not isinstance(self.tx, optax.GradientTransformationExtraArgs):
            return []
        # Chains take any name and pass it on, so only the program tells whether one of them reads it.
        functions = {name: value for name, value in others.items() if callable(value)}
        arrays = {name: value for name, value in others.items() if name not in functions}
        update: Callable[..., Any] = self.tx.update
        traced = jax.make_jaxpr(lambda arrays: update(grads, self.opt_state, params, **functions, **arrays))(arrays)
        reads = [*(v for eqn in traced.jaxpr.eqns for v in eqn.invars), *traced.jaxpr.outvars]
        is_read = jax.tree.unflatten(
            jax.tree.structure(arrays), [any(v is x for x in reads) for v in traced.jaxpr.invars]
        )
        return [*functions, *(name for name in arrays if any(jax.tree.leaves(is_read[name])))]

    def _check_declared(self, extra: dict[str, PyTree]) -> None:
        for name in extra:
            if name not in self.extra:
                raise StepError(
                    f"TrainState: `{name}` is not a collection of this state; it has {sorted(self.extra) or 'none'}."
                    f"{did_you_mean(name, self.extra)} Declare it at the start: `TrainState.create(..., {name}=...)`. The "
                    "optimiser's `update` does not read it either."
                )


def _apart(params: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
    """Takes the collection that its gradient replaces out of parameters, as flax's TrainState does."""
    if not isinstance(params, Mapping) or OVERWRITTEN not in params:
        return params, {}
    return {name: x for name, x in params.items() if name != OVERWRITTEN}, {OVERWRITTEN: params[OVERWRITTEN]}
