"""The shell round one shard's state machine: its arrays, its programs, and a lock.

It decides nothing: `shard.receive` says what happens, this file does it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.cluster import failpoints
from jdist.cluster.failpoints import Point
from jdist.errors import WireError
from jdist.ps.program.artifact import keeping_64_bits, unpack
from jdist.ps.program.shard_plan import ShardPlan, program_spec, result_spec
from jdist.ps.protocol import messages
from jdist.ps.protocol.shard import Shard, receive
from jdist.ps.protocol.wire import ROUNDED, Spec, from_plain, mean_of_integers, to_plain
from jdist.ps.server.shard_transfer import ShardState
from jdist.ps.transport.interface import FailedPrecondition, Header, Method, check_files
from jdist.support.versions import versions

_LOG = logging.getLogger(__name__)
MOST_MESSAGES = 4096
MOST_NAME = 300
FROZEN_S = 6.0  # then a shard thaws by itself; a snapshot of a coordinator that is not cut off takes less
LARGE_BYTES = 1 << 20  # of gradients, below which it takes longer to have JAX release them than it is worth
Program = Callable[[Sequence[Any]], list[jax.Array]]


class ShardServer:
    """One shard: state machine, arrays, programs, and the methods that a transport serves."""

    def __init__(self, *, allow: Sequence[str] = ()):  # custom calls, for `artifact.unpack`
        self._allow, self._frozen_s = tuple(allow), FROZEN_S
        self.lock = threading.Condition()  # guards everything here; notified of each change
        self.incarnation = secrets.token_hex(8)  # another one once the memory is lost
        self.shard = Shard()
        self.plan: ShardPlan | None = None  # None while the shard is empty
        self.begun_by = ""  # the coordinator that restored it
        self._kept: list[jax.Array] = []
        self._rounded: dict[int, jax.Array] = {}
        self._programs: list[Program | None] = []  # None for a step that updates nothing
        self._packed: list[np.ndarray] = []
        # A push's view and arrays, or a result's bytes, by the number that the machine knows.
        self._held: dict[Any, Any] = {}
        self._next_ref = 0
        self._thaws_at_s = 0.0  # once it is frozen
        self._snapshot: list[np.ndarray] = []
        self._snapshot_of: tuple[Any, Any] = 0, 0  # its generation and version
        self._answers: dict[int, messages.Answer] = {}
        self._abandoned: set[int] = set()  # calls without an answer yet, for which nobody waits
        self._holds_applied = False  # memory of gradients that were applied

    def methods(self) -> dict[str, Method]:
        """Returns what a transport serves."""
        return {
            "status": Method(self.status),
            "restore": Method(self.restore, self.expects_of_restore),
            "say": Method(self.say, self.expects_of_say, limited=True),
            "read": Method(self.read),
        }

    # What a copy of a shard adds, with the lock held

    def _check(self) -> None:
        """Raises if no message may be taken; called before each, and in waits."""

    def _changed(self, message: messages.Message, arrays: list[np.ndarray], answer: messages.Answer | None) -> None:
        """Takes in a message that has changed the state, and the answer if there is one yet."""

    def _restored(self) -> None:
        """Notes that the state was replaced."""

    # What callers ask

    def status(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Returns the incarnation and the history."""
        check_files()  # without any the server can do nothing, and counts as silent
        shard = self.shard  # without the lock: a server that compiles answers all the same
        history = {"generation": shard.generation, "version": shard.version, "begun_by": self.begun_by}
        return {"incarnation": self.incarnation, **history, "versions": versions()}, []

    def expects_of_restore(self, header: Header) -> list[Spec]:
        """Returns the specs of a restore's arrays, and of its programs' bytes."""
        plan = from_plain(ShardPlan, header.get("plan"))
        sizes = header.get("programs")
        if not isinstance(sizes, list) or len(sizes) != len(plan.views):
            raise WireError(f"`programs` must have {len(plan.views)} sizes, one for each view of the plan")
        return [*plan.kept, *map(program_spec, sizes)]

    def restore(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Begins a new history with the arrays and programs that come."""
        message = from_plain(messages.Restore, header.get("say"))
        plan = from_plain(ShardPlan, header.get("plan"))
        kept, packed = arrays[: len(plan.kept)], arrays[len(plan.kept) :]
        programs = self.unpack_programs(plan, packed)
        failpoints.reached(Point.IN_REPLACE)
        with self.lock:
            self._check()
            shard = dataclasses.replace(self.shard, rules=plan.rules)
            shard, commands = receive(shard, dataclasses.replace(message, call=0))
            is_replaced = any(isinstance(command, messages.Replace) for command in commands)
            if is_replaced:
                self._put(plan, kept, programs, packed)
                self.begun_by = str(header.get("by", ""))[:MOST_NAME]
            self._carry_out(shard, commands)
            if is_replaced:
                self._restored()
            answer = self._answers.pop(0)
        return {"answer": to_plain(answer)}, []

    def expects_of_say(self, header: Header) -> list[Spec]:
        """Returns the specs of a push's arrays, and of its result's bytes."""
        size = header.get("result")
        if size is None:
            return []
        result = result_spec(size)
        with self.lock:
            plan = self.plan
            holds, self._holds_applied = self._holds_applied, False
        if holds:  # JAX releases the arguments of ended programs at its next call; else two gradients would be held
            _do_nothing(np.int8(0))
        sent = [m for m in header.get("say", ()) if isinstance(m, dict) and m.get("is") in ("Push", "Commit")]
        views = [(m["is"], m.get("view", 0)) for m in sent if m["is"] != "Commit" or m.get("as_one")]
        if len(views) != 1:
            raise WireError("the arrays of a call must be of one push, not of none or of several")
        if plan is None:
            raise FailedPrecondition("a push to an empty shard; it must be restored first")
        ((kind, number),) = views
        if type(number) is not int or not 0 <= number < len(plan.views) or self._programs[number] is None:
            raise WireError("the `view` of a push must be that of a step that is known here and updates something")
        view = plan.views[number]
        return [*(view.scalars if kind == "Commit" else view.pushes), result]

    def say(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Takes several messages of one sender in turn: a push or a commit comes in one call with the next pull."""
        plain = header.get("say")
        if not isinstance(plain, list) or len(plain) > MOST_MESSAGES:
            raise WireError(f"`say` must be a list of at most {MOST_MESSAGES:,} messages")
        received = [from_plain(messages.TRAVELLING, m) for m in plain]
        brings_arrays = any(isinstance(m, messages.Push) for m in received)
        if any(isinstance(m, messages.Restore) for m in received) or (brings_arrays and not arrays):
            raise WireError("a push must come with arrays, and a restore by a call of its own")
        answers, sent = [], []
        with self.lock:
            for message in received:
                answer = self._ask(message, arrays)
                answers.append(self._encode_answer(message, answer, sent))
            arrays.clear()  # the caller's list: what is kept of them, `_held` has
        return {"answers": answers}, sent

    def _ask(self, message: messages.Message, arrays: list[np.ndarray]) -> messages.Answer:
        self._check()
        before = self.shard
        call = self._take(message, arrays)
        is_kept = isinstance(message, messages.Snapshot) and message.phase == "keep"
        if self.shard is not before and not isinstance(message, messages.Pull) and not is_kept:
            self._changed(message, arrays, self._answers.get(call))
        incarnation = self.incarnation
        try:
            while call not in self._answers:
                is_in_time = self.lock.wait(max(0.0, self._thaws_at_s - time.monotonic()))
                self._check()
                if self.incarnation != incarnation:
                    raise WireError("the shard has lost its memory")
                if not is_in_time and call not in self._answers:
                    self._thaw()
        except BaseException:
            self._abandoned.add(call)
            raise
        return self._answers.pop(call)

    def _thaw(self) -> None:
        """Ends a freeze after its coordinator is gone or cut off; its snapshot is never used."""
        number = self.shard.frozen
        _LOG.warning("no thaw for snapshot %d within %g s of its freeze: pushes go on", number, self._frozen_s)
        self._ask(messages.Snapshot(generation=self.shard.generation, number=number, phase="thaw"), [])
        self.drop_snapshot()

    def _encode_answer(self, message: messages.Message, answer: messages.Answer, sent: list[Any]) -> Header:
        """Returns an answer as it travels, and adds the arrays that go with it to `sent`."""
        if isinstance(answer, messages.Parameters):
            # An empty shard refuses, and nothing but a pull is answered by parameters.
            assert self.plan is not None
            assert isinstance(message, messages.Pull)
            places = self.plan.sent(message.view, changed=answer.changed, first=message.known is None)
            sent.extend(np.asarray(self._rounded.get(i, self._kept[i])) for i in places)
        if isinstance(answer, messages.Cut):
            self._snapshot = self._views()
            self._snapshot_of = message.generation, answer.version
            failpoints.reached(Point.IN_SNAPSHOT)
        if isinstance(answer, messages.Held):
            results = tuple((closure, self._held[ref]) for closure, ref in answer.results)
            answer = dataclasses.replace(answer, results=results)
        return to_plain(answer)

    def read(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Returns the arrays of the last snapshot, once, to a caller who says which it is."""
        with self.lock:
            if self._snapshot_of != (header.get("generation"), header.get("version")):
                return {"arrays": 0}, []
            snapshot, self._snapshot = self._snapshot, []
        return {"arrays": len(snapshot)}, snapshot

    # What the machine says, done

    def _take(self, message: messages.Message, arrays: list[np.ndarray]) -> int:
        """Hands a message to the machine; the returned call name is answered now or later."""
        # Before any change: inside an update, XLA's own error would come half-way.
        if not isinstance(message, messages.Pull):
            check_files()
        call = self._name()
        refs: dict[str, Any] = {"call": call}
        if isinstance(message, messages.Push) and arrays:
            *pushes, result = arrays
            refs["gradients"] = self._name((message.view, pushes))
            refs["result"] = self._name(result.tobytes()) if result.size else None
        if isinstance(message, messages.Commit):
            refs["scalars"] = self._name(arrays[:-1]) if message.as_one and arrays else None
        self._carry_out(*receive(self.shard, messages.changed(message, **refs)))
        return call

    def _name(self, held: Any = None) -> int:
        self._next_ref += 1
        if held is not None:
            self._held[self._next_ref] = held
        return self._next_ref

    def _carry_out(self, shard: Shard, commands: list[messages.Command]) -> None:
        """Takes over the machine's new state, and carries out its commands."""
        for command in commands:
            match command:
                case messages.Apply():
                    scalars = [] if command.scalars is None else self._held[command.scalars]
                    gradients = [(self._held[ref], weight) for ref, weight in command.gradients]
                    self._holds_applied = sum(x.nbytes for (_, arrays), _ in gradients for x in arrays) > LARGE_BYTES
                    try:
                        self._apply(gradients, scalars)
                    except BaseException:
                        self._reset()
                        raise
                case messages.Forget():
                    self._held.pop(command.ref, None)
                case messages.Reply() if command.call in self._abandoned:
                    self._abandoned.discard(command.call)
                case messages.Reply():
                    self._answers[command.call] = command.answer
        if shard.frozen and not self.shard.frozen:
            self._thaws_at_s = time.monotonic() + self._frozen_s
        self.shard = shard
        self.lock.notify_all()

    def _apply(self, gradients: list[tuple[tuple[int, list[np.ndarray]], float]], scalars: list[np.ndarray]) -> None:
        """Updates the state by the weighted mean of several pushes of one view."""
        plan = self.plan
        assert plan is not None  # an empty shard applies nothing
        ((view, pushes), weight), *others = gradients
        if others or weight != 1.0 or plan.widens(view):
            weights = np.array([weight, *(w for _, w in others)], np.float32) / len(gradients)
            equal = np.full_like(weights, 1 / len(gradients))
            each = [equal if i in plan.views[view].unweighted else weights for i in range(len(pushes))]
            with keeping_64_bits(pushes):
                pushes = _weighted(each, [pushes, *(more for (_, more), _ in others)])
        program = self._programs[view]
        assert program is not None  # `expects_of_say` refuses a push of a step that updates nothing
        new = program([*self._kept, *pushes, *scalars])
        n = plan.changing
        self._kept[:n] = new[:n]
        self._rounded.update(zip([i for i in plan.rounded if i < n], new[n:], strict=True))

    def _reset(self) -> None:
        """Empties the shard after an update that failed half-way: no version names its state."""
        # It then looks like a shard that was killed and restarted: empty, with another incarnation.
        self.incarnation = secrets.token_hex(8)
        self.replace(ShardState(shard=Shard()), [])

    # The state as a whole

    def unpack_programs(self, plan: ShardPlan, packed: Sequence[np.ndarray]) -> list[Program | None]:
        """Returns the programs of a plan's views."""
        donate = range(plan.changing)
        return [unpack(x.tobytes(), donate=donate, allow=self._allow) if x.size else None for x in packed]

    def _put(
        self,
        plan: ShardPlan | None,
        kept: Sequence[Any],
        programs: list[Program | None],
        packed: Sequence[np.ndarray],
    ) -> None:
        """Takes over arrays and programs in place of all that there are; all of them, or none."""
        # The block that came is kept by these arrays, which share its memory where they can. Updates soon replace them,
        # so the packed programs are copied out of it.
        with keeping_64_bits(kept):
            taken = [jnp.asarray(x) for x in kept]
        rounded = {} if plan is None else {i: taken[i].astype(ROUNDED) for i in plan.rounded}
        self._packed = [np.array(x) for x in packed]
        self.plan, self._kept, self._rounded, self._programs = plan, taken, rounded, programs

    def _views(self) -> list[np.ndarray]:
        """Returns the kept arrays as views: of a donated buffer that is still looked at JAX makes a copy."""
        return [np.asarray(x) for x in self._kept]

    def state(self) -> ShardState | None:
        """Returns the whole state, by reference; None while pushes wait. Called with the lock held."""
        if self.shard.waiting:
            return None
        held = dict(self._held)  # later the names mean something else
        return ShardState(shard=self.shard, plan=self.plan, kept=self._views(), packed=self._packed, held=held)

    def replace(self, state: ShardState, programs: list[Program | None]) -> None:
        """Takes over a whole state; whoever waits for an answer here gets none. Called with the lock held."""
        self._put(state.plan, state.kept, programs, state.packed)
        self.shard, self._held = state.shard, dict(state.held)
        self._next_ref = max([self._next_ref, *self._held])
        self._answers.clear()
        self._abandoned.clear()
        self.drop_snapshot()
        self.lock.notify_all()

    def apply_entry(self, message: messages.Message, arrays: list[np.ndarray]) -> None:
        """Takes a message that the leader has answered. Called with the lock held."""
        call = self._take(message, arrays)
        if self._answers.pop(call, None) is None:
            self._abandoned.add(call)

    def drop_snapshot(self) -> None:
        """Lets go of a snapshot that nobody will read. Called with the lock held."""
        self._snapshot = []


_do_nothing = jax.jit(lambda x: x)


@jax.jit
def _weighted(weights: list[jax.Array], gradients: list[list[jax.Array]]) -> list[jax.Array]:
    """Returns weighted sums, `wire.wide`; the exact mean of integers, the first of flags."""

    def one(weights: jax.Array, *values: jax.Array) -> jax.Array:
        if not jnp.issubdtype(values[0].dtype, jnp.inexact):
            return mean_of_integers(values)
        return functools.reduce(jnp.add, [w * x for w, x in zip(weights, values, strict=True)])  # weights are float32

    return jax.tree.map(one, weights, *gradients)
