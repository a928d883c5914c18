"""The current strategy, and what is known while a step is traced under it.

Two kinds of context; no other part of a step depends on where it is called. `own_settings` keeps the caller's mesh out.

- the *current strategy*, which `strategy.scope()` and `set_strategy` choose and which library code may ask for;
- the *replica trace*: while a transform traces a step, the collectives of `jdist.replica` find here the strategy, and which
  microbatch the step is traced for. It is JAX user context, so a function that the user jitted inside a step is never
  taken from a cache that another strategy filled.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
from jax.extend.core import get_opaque_trace_state

from jdist.errors import StrategyError
from jdist.typing import PyTree

if TYPE_CHECKING:
    from jdist.core.precision import Precision

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
Strategy = Any  # `jdist.core.strategy.Strategy`, which imports this file


def _trace_level() -> Any:
    return get_opaque_trace_state(convention="nnx")  # the convention that compares by trace, not by identity


@dataclass(frozen=True, eq=False)
class ReplicaTrace:
    """One tracing of one step under one strategy."""

    strategy: Strategy
    num_microbatches: int = 1  # each counts as a replica of its own
    microbatch: jax.Array | None = None  # its number, int32 scalar; None if there is one
    # `(leaf path, flag)` of each gradient at the step's own level
    finite: list[tuple[str, jax.Array]] = field(default_factory=list)
    # replicas check their own part of a gradient; flags are combined later
    looks_at_parts: bool = False
    # one entry for each gradient in a `lax.scan` or the like, where its flag cannot be seen
    hidden: list[str] = field(default_factory=list)
    # set if the all-reduce keeps residuals, see step/error_feedback.py
    sum_gradient: Callable[[PyTree, tuple[str, ...]], PyTree] | None = None
    # differentiates by parts of arrays, see sharded_state/gathering.py; None: by full arrays
    in_parts: Any = None
    precision: Precision | None = None  # set where the step computes in 16 bits
    loss_scale: jax.Array | None = None  # factor of the losses; None: 1
    # numbers the gradients that the step takes
    gradients: Iterator[int] = field(default_factory=itertools.count)
    # differentiated leaves, by gradient, that differ between the replicas
    by_rows: frozenset[tuple[int, int]] = frozenset()
    # the trace that the step itself runs in; another inside `lax.scan` or `jax.jit`
    level: Any = field(default_factory=_trace_level)

    def at_step_level(self) -> bool:
        """Returns whether the caller runs in the step itself, not inside a `lax.scan` or `jax.jit` of it."""
        return self.level == _trace_level()


_TRANSFERS = ("", "_host_to_device", "_device_to_device", "_device_to_host")  # those that JAX may guard
# A weak reference, as JAX's caches keep every context that they meet, and would keep the strategy with it.
_trace = jax.make_user_context(None)
_scoped: contextvars.ContextVar[Strategy | None] = contextvars.ContextVar("jdist_strategy", default=None)
_process_wide: list[Strategy] = []


@contextlib.contextmanager
def tracing(trace: ReplicaTrace) -> Iterator[ReplicaTrace]:
    """Makes `trace` the current replica trace, and its strategy the current strategy."""
    with _trace(weakref.ref(trace)), scope(trace.strategy):
        yield trace


def current_trace() -> ReplicaTrace | None:
    """Returns the replica trace under way, or None outside a step."""
    reference = _trace.value
    return None if reference is None else reference()


@contextlib.contextmanager
def scope(strategy: Strategy) -> Iterator[Strategy]:
    """Makes `strategy` the current one in a `with` block; refuses another open scope."""
    check_not_mixed(strategy)
    token = _scoped.set(strategy)
    try:
        yield strategy
    finally:
        _scoped.reset(token)


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Leaves every `with strategy.scope()` within the block, so that another strategy can be used there."""
    token = _scoped.set(None)
    try:
        yield
    finally:
        _scoped.reset(token)


def check_not_mixed(strategy: Strategy) -> None:
    """Raises StrategyError for a strategy within the scope, or in a step, of another one."""
    outer = _scoped.get()
    if outer is None or outer is strategy or outer.name == "default":
        return
    raise StrategyError(
        f"two strategies are mixed: {strategy!r} is used within the scope of {outer!r}. Leave that `with` block first, "
        "or use one strategy for both; two calls of `jdist.mirrored()` make two strategies."
    )


def is_foreign(strategy: Strategy) -> bool:
    """Returns whether the caller's JAX settings would change or refuse a strategy's programs: see `own_settings`."""
    return _compiles_nothing() or _has_foreign_mesh(strategy) or _keeps_tracers(strategy)


def own_settings(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """Keeps the caller's JAX settings out: programs are compiled, new arrays lie on no mesh in context, all may be moved."""
    guards = {getattr(jax.config, f"jax_transfer_guard{part}") for part in _TRANSFERS}
    # Entering them takes longer than putting a small batch on a device.
    return _own_settings(strategy) if is_foreign(strategy) or guards - {None, "allow"} else contextlib.nullcontext()


@contextlib.contextmanager
def _own_settings(strategy: Strategy) -> Iterator[None]:
    with (
        jax.transfer_guard("allow"),
        jax.disable_jit(False),
        _no_mesh() if _has_foreign_mesh(strategy) else contextlib.nullcontext(),
        jax.check_tracer_leaks(False) if _keeps_tracers(strategy) else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def plain_jax() -> Iterator[None]:
    """Clears the mesh in context and JAX's switches for a function that is traced for no strategy; see `own_settings`."""
    with _no_mesh(), jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


@contextlib.contextmanager
def _no_mesh() -> Iterator[None]:
    before = jax.sharding.get_mesh()
    with jax.set_mesh(before), jax.set_mesh(before):  # see `run_under_mesh`
        jax.set_mesh(None)
        yield


def run_under_mesh(strategy: Strategy, run: Callable[..., R], *arguments: Any) -> R:
    """Runs a step's program; in the global view under its mesh, for constraints by `PartitionSpec`."""
    if not strategy.is_global_view:
        return run(*arguments)
    before = jax.sharding.get_mesh()
    # The outer restores it if an interrupt cuts the inner's exit short.
    with jax.set_mesh(before), jax.set_mesh(before):
        jax.set_mesh(strategy.mesh)
        return run(*arguments)


def _compiles_nothing() -> bool:
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue] # its annotations leave it out


def _keeps_tracers(strategy: Strategy) -> bool:
    """Returns whether JAX, from 0.11, would take for a leak what the gradient of gathered parts keeps until it was taken."""
    # The rule is off, as JAX leaves the setting out of its annotations.
    return strategy.parts is not None and jax.config.jax_check_tracer_leaks  # pyright: ignore[reportAttributeAccessIssue]


def _has_foreign_mesh(strategy: Strategy) -> bool:
    if strategy.mesh is None and strategy.coordinator is None:
        return False  # the default strategy runs a step where plain JAX would
    try:
        return not jax.sharding.get_mesh().empty
    except ValueError:  # within a trace, where JAX lets nobody change the mesh
        return False


def in_own_settings(method: F) -> F:
    """Makes a method of a strategy, or of a step with a `strategy`, run in `own_settings`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with own_settings(getattr(self, "strategy", self)):
            return method(self, *args, **kwargs)

    return cast(F, run)


def set_process_wide(strategy: Strategy | None) -> None:
    """Makes `strategy` the current one for the whole process, outside every `scope()`; None undoes it."""
    _process_wide[:] = [] if strategy is None else [strategy]


def current_strategy() -> Strategy | None:
    """Returns the strategy of the innermost scope, else the process-wide one, else None."""
    return _scoped.get() or (_process_wide[0] if _process_wide else None)


def in_replica_context() -> bool:
    """Returns whether the caller's code is what a replica runs.

    True while a distributed step or `strategy.run`'s function is traced, in the global view too; and where no strategy
    other than the default one is current, as code is then run by itself, once. False within `strategy.scope()` outside
    a step.

    Source: `tf.distribute.in_cross_replica_context`, which is the opposite.

    Example:
        >>> import jdist
        >>> with jdist.one_device().scope() as strategy:
        ...     jdist.in_replica_context(), strategy.run(lambda: jdist.in_replica_context()).value.tolist()
        (False, [True])
    """
    return current_trace() is not None or not has_strategy()


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is current."""
    strategy = current_strategy()
    return strategy is not None and strategy.name != "default"
