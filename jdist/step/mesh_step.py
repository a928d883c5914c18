"""The callable that `jdist.distribute` makes of a step: checks a call, starts it, and keeps the newest state."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.core.context import check_not_mixed, in_own_settings, is_foreign, own_settings
from jdist.core.step_state import loss_scale_of, pack
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import is_first, rows_first
from jdist.data.batching import has_padding
from jdist.step import placement
from jdist.step.base import IGNORES_MASK, Preview
from jdist.step.call_errors import explain
from jdist.step.in_flight import Lineage, Window, doubt_newest_states
from jdist.step.mesh_program import REPLICATED, Backend, Program
from jdist.step.non_finite import STEPS, VERDICT, new_token, non_finite_error
from jdist.step.options import StepOptions, Verify
from jdist.step.outputs import Traced, returned
from jdist.step.placement import DonationGuard
from jdist.step.same_program import check_same_of_processes
from jdist.step.signature import Call, Others, Step, is_same_state, unwrap_per_replica
from jdist.step.traced_step import TracedStep
from jdist.step.tree_checks import check_not_traced
from jdist.support.arrays import check_not_donated, to_host
from jdist.support.tracebacks import callers_level, hide_own_frames
from jdist.typing import PyTree

_NO_OTHERS = Others((), {})


class DistributedStep(TracedStep):
    """A step that runs on all replicas of a strategy; `jdist.distribute` makes it.

    Attributes:
        strategy: the strategy it runs under.
        options: the options of `jdist.distribute`.
        backend: how the strategy lays out states and compiles steps.
        verification: the result of verifying the step before its first call; None if it was not verified.
    """

    def __init__(self, strategy: Strategy, step: Step, options: StepOptions, backend: Backend = REPLICATED):
        super().__init__(strategy, step, options, backend)
        lead = options.num_step_axes
        self._by_rows = None if strategy.mesh is None else placement.rows_sharding(strategy, lead=lead)
        self._donation_guard = DonationGuard()
        is_plain = options.args == ("state", "batch") and is_first(options.batch_axis) and not options.static_argnames
        self._plain_call = Call(("state", "batch")) if is_plain else None
        self._window = Window(strategy, options.max_in_flight, self._inspect, lambda: self._newest.state)
        self._token = new_token(self.strategy, self.options.steps_per_call)
        self.verification: Any = None
        self._verify: Verify = options.verify or "off"
        self._verify_pads, self._tell = False, None
        self._notices_mask = True
        self.verifier: Callable[..., Any] | None = None
        self._has_peers = strategy.cluster.num_processes > 1
        # No other process hears of a call's progress. Asked once, as an empty step takes 16 us in all.
        self._is_alone = strategy.cluster.is_alone and not failpoints.armed()
        self._agreed = set[Call]()  # calls with a program that the processes have compared
        self._steps_to_check = 0 if strategy.num_replicas == 1 or not options.check_replicas else 1
        strategy.cluster.follow(self, DistributedStep._renew)

    def _renew(self) -> None:
        """Forgets programs, arrays and the newest state, which were of another world."""
        self._window.forget()
        kept = ("verification", "verifier", "_verify", "_verify_pads", "_tell", "_notices_mask")
        values = [getattr(self, name) for name in kept]
        DistributedStep.__init__(self, self.strategy, self.__wrapped__, self.options, self.backend)
        for name, value in zip(kept, values, strict=True):
            setattr(self, name, value)

    @property
    def last_state(self) -> PyTree:
        """The newest state that a call returned; None before the first. Of a step of several states, a tuple of them.

        After an interrupt or a NonFiniteError it is there although the state passed in was donated.
        """
        newest = self._newest.look()
        return newest if newest is None else self._as_returned(newest)

    @property
    def num_skipped(self) -> int:
        """The number of steps left out so far; waits for the steps in flight.

        Those are the ones that `non_finite="skip"` leaves out; with `jdist.precision("fp16")` every overflow, as counted in
        the state, checkpoints included.
        """
        if self.options.loss_scaling is not None:
            self._take_results()
            loss_scale = loss_scale_of(self._newest.state)
            return 0 if loss_scale is None else int(to_host(loss_scale.num_skipped))
        return int(to_host(self.newest_token)[VERDICT]) if self.options.non_finite == "skip" else 0

    def count_left_out(self, state: PyTree) -> jax.Array | None:
        """See `Distributed`; an int32 scalar, or the token (its first entry)."""
        scales_loss = self.options.loss_scaling is not None
        if self.options.non_finite == "skip" or (scales_loss and self.options.steps_per_call > 1):
            return self.newest_token
        loss_scale = loss_scale_of(state) if scales_loss else None
        return None if loss_scale is None else jnp.copy(loss_scale.num_skipped)

    def wait(self) -> None:
        """Waits for every call in flight.

        Raises:
            NonFiniteError: one of them met a NaN or infinite gradient, and `non_finite` is "raise".
        """
        with self.strategy.cluster.blocked():
            self._window.drain()

    def like(self, strategy: Strategy, **options: Any) -> DistributedStep:
        """Distributes the same function under another strategy that keeps the state on its devices, with some other options."""
        return DistributedStep(strategy, self._step, dataclasses.replace(self.options, **options))

    def verify_next(self, how: Verify, *, pads: bool = False, tell: Callable[[str], Any] | None = None) -> None:
        """Verifies the next call if the step has not been, unless its options say how or not at all."""
        self._verify_pads, self._tell = pads, tell
        self._notices_mask = False  # a loop that asks this knows its data, and looks itself
        if self.options.verify is None and self.verification is None:
            self._verify = how

    def _verify_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.verifier is not None  # `jdist.distribute` sets it
        how, self._verify = self._verify, "off"
        self.verification = self.verifier(self, args, kwargs, strict=how == "strict", pads=self._verify_pads)
        if self._tell is not None and self.verification.not_compared and self.strategy.num_replicas > 1:
            is_same = self.verification.ok and self.verification.num_compared
            found = "found no difference, but could not compare" if is_same else "could not compare"
            self._tell(f"{self.__name__}: verify {found} {'; '.join(self.verification.not_compared)}.")

    def _notice_mask(self, program: Program, traced: Traced, arguments: tuple[PyTree, ...]) -> None:
        """Warns once, at the first batch that is filled up, of a step that never reads its mask."""
        self._notices_mask = False
        if Preview.of(program.trace(*arguments), traced, arguments).ignores_mask:
            warnings.warn(f"{self.__name__} {IGNORES_MASK}", stacklevel=callers_level())

    def _take_results(self) -> None:
        """Makes what the newest call returned the newest token and state; also after an interrupt in that call."""
        if self._newest.results:
            self._token = self._newest.results[0][0]
            self._newest.take()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:  # what `without_own_frames` does, without one call more in each step
            if self._is_alone:
                return self._call(args, kwargs)[0]
            cluster = self.strategy.cluster
            failpoints.reached(Point.BEFORE_STEP)
            with cluster.blocked():
                result, num_updates, token = self._call(args, kwargs)
            failpoints.reached(Point.IN_STEP)
            cluster.advance(num_updates, token)
            if failpoints.armed():
                jax.block_until_ready(token)
                failpoints.reached(Point.AFTER_STEP)
        except Exception as exc:
            hide_own_frames(exc)
            raise
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int, jax.Array]:
        """Starts one call, and waits where too many are in flight; the result, how many updates it makes, its token."""
        check_not_mixed(self.strategy)
        if is_foreign(self.strategy):
            with own_settings(self.strategy):
                return self._call(args, kwargs)
        if self._verify != "off":
            self._verify_first(args, kwargs)
        with self._window.lock:  # of several calling threads each goes on from the token of the one before
            results, newest, traced, batches, axes = self._start(args, kwargs)
            num_updates = self._steps_in(batches) if "state" in traced.returns else 0
            lineage = self._window.lineage
        token, state, outputs = results[:3]  # a backend may add more, for its check
        self._window.add(token, lineage)
        if self._steps_to_check and num_updates:
            self._check_replicas(state, results, num_updates)
        if "per_replica" in self.options.args:
            outputs = unwrap_per_replica(outputs)
        result = returned(newest, outputs, traced, batches, lambda batches: rows_first(batches, axes))
        return result, num_updates, token

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, PyTree, Traced, PyTree, Any]:
        """Starts a call: `(results, newest state, traced, batches as passed, axes of their rows)`."""
        self._take_results()
        newest = self._newest
        if self._plain_call is not None and len(args) == 2 and not kwargs:
            call, state, batches, others = self._plain_call, args[0], (args[1],), _NO_OTHERS
        else:
            call, state, batches, others = self._signature.bind(args, kwargs)
            check_not_traced(others)
            if is_same_state(state, newest.state):
                state = newest.state
        original = batches
        try:
            if state is not newest.state:
                check_not_traced((state, batches))
                state, is_newest = self._adopt(state), False
            else:
                state, is_newest = newest.packed, True
                if self._window.is_doubted:
                    check_not_donated(state)
            self._window.is_doubted = False
            wanted = itertools.repeat(self._by_rows)
            if call.batch_axes and self._by_rows is not None:
                shardings = placement.rows_shardings(self.strategy, self.options, batches, call.batch_axes)
                wanted = jax.tree.leaves(shardings)
            for leaf, sharding in zip(jax.tree.leaves(batches), wanted, strict=False):
                if isinstance(leaf, Tracer):
                    check_not_traced(batches)
                is_array = isinstance(leaf, jax.Array)
                if is_array and leaf.is_deleted():
                    self._signature.check_not_donated(call, batches, others)
                if sharding is not None and not (is_array and leaf.sharding == sharding):
                    batches = placement.place_batches(self.strategy, self.options, batches, call.batch_axes)
                    break
            if call is not self._plain_call:
                others = self._place_others(call, state, batches, others)
            if self._residuals is not None and not is_newest:
                state = self._with_residuals(call, state, batches, others)
            program, traced = self.program(call)
            if self._has_peers and call not in self._agreed:
                check_states = not self._agreed and bool(self.options.check_replicas)
                jaxpr = program.trace(self._token, state, batches, others).jaxpr
                check_same_of_processes(self.strategy, self.__name__, jaxpr, state if check_states else None)
                self._agreed.add(call)
            if self._notices_mask and any(map(has_padding, original)):
                self._notice_mask(program, traced, (self._token, state, batches, others))
            box = newest.results
            newest.results_hold_state = self.options.may_update_state
            try:
                program.run_into(box, self._token, state, batches, others)
            except (RuntimeError, ValueError) as exc:  # on one device a batch may be an array of the state
                if "previously donated in the same call" not in str(exc):
                    raise
                program.run_into(box, self._token, state, self._donation_guard.of(batches, state), others)
        except Exception as exc:
            if isinstance(exc, TypeError):  # perhaps from text among the arguments, and JAX does not name its leaf
                placement.check_rows(original, self.strategy, self.options, call.batch_axes)
                self._signature.check_others(call, others)
            explain(exc, self.strategy, self._signature, call, state, original, others)
            raise
        newest.results_hold_state = "state" in traced.returns
        self._take_results()
        return box[0], newest.state, traced, original, call.batch_axes

    @in_own_settings
    def _adopt(self, state: PyTree) -> PyTree:
        """Takes in a state that this step's newest call did not return: in its place, packed, with a loss scale if need be."""
        self._newest.check_nothing_lost(self.__name__, state)
        if self.options.non_finite == "raise" and self._newest.state is not None:
            self._window.go_on_from(state)
            if self._token is None:
                self._token = new_token(self.strategy, self.options.steps_per_call)
        state = self.backend.adopt_state(self.strategy, self._with_loss_scale(pack(state)))
        self._newest.begin_with(state)
        doubt_newest_states()
        self._donation_guard.forget()
        return state

    def _place_others(self, call: Call, state: PyTree, batches: PyTree, others: PyTree) -> PyTree:
        """Puts further arguments on every device, copies of those with buffers that the call donates with the state."""
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(others)):
            self._signature.check_not_donated(call, batches, others)
        if self.options.donates_state:
            others = self._donation_guard.of(others, state)
        return placement.replicate(self.strategy, others)

    def _steps_in(self, batches: PyTree) -> int:
        """Counts the steps of a call; the last call of a data set may make fewer than the others."""
        n = self.options.steps_per_call
        return n if n == 1 or not (leaves := jax.tree.leaves(batches)) else leaves[0].shape[0]

    def _check_replicas(self, state: PyTree, results: Any, num_updates: int) -> None:
        self._steps_to_check -= num_updates
        if self._steps_to_check <= 0:
            self._steps_to_check = self.options.check_replicas
            self.backend.compare_replicas(self.strategy, state, results)

    @property
    def newest_token(self) -> Any:
        """The token of the newest call, also if its results were not taken yet."""
        return self._newest.results[0][0] if self._newest.results else self._token

    @property
    def _token(self) -> Any:
        """The token that the next call takes."""
        return self._window.lineage.token

    @_token.setter
    def _token(self, token: Any) -> None:
        self._window.lineage.token = token

    def _inspect(self, token: np.ndarray, lineage: Lineage) -> None:
        code, count = int(token[VERDICT]), int(token[STEPS])
        if self.options.non_finite != "raise" or code == 0:
            return
        with self._window.lock:
            self._window.clear(lineage)
            lineage.token = new_token(self.strategy, self.options.steps_per_call)
            step = lineage.steps_before + count
            lineage.steps_before = step + 1
        raise non_finite_error(self.__name__, self._flag_names[code - 1], step)

    def __repr__(self) -> str:
        return f"<{self.__name__} distributed by {self.strategy!r}>"
