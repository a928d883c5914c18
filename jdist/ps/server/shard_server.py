"""A server's shell round its shard: arrays, a lock, and the commands of the state machine carried out.

Nothing is decided here: `shard.receive` says what happens, this file holds what it happens to.
"""

from __future__ import annotations

import dataclasses
import functools
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
from jdist.ps.program.artifact import unpack
from jdist.ps.program.shard_plan import SHARD_PLAN, ShardPlan, program_spec, result_spec
from jdist.ps.protocol.messages import (
    TRAVELLING,
    Apply,
    Command,
    Commit,
    Cut,
    Forget,
    Held,
    Message,
    Parameters,
    Pull,
    Push,
    Replace,
    Reply,
    Restore,
)
from jdist.ps.protocol.shard import Shard, receive
from jdist.ps.protocol.wire import ROUNDED, Spec, from_plain, mean_of_integers, to_plain
from jdist.ps.server.malloc import LARGE_BYTES, let_go
from jdist.ps.transport.interface import FailedPrecondition, Header, Method, check_files

MOST_MESSAGES = 4096
MOST_NAME = 300
Program = Callable[[Sequence[Any]], list[jax.Array]]


class ShardServer:
    """One shard, with its arrays.

    Args:
        allow: custom calls that a received program may have; see `artifact.unpack`.
        wait_s: how long a push waits at a frozen shard before its call fails.
    """

    def __init__(self, *, allow: Sequence[str] = (), wait_s: float = 60.0):
        self.incarnation = secrets.token_hex(8)
        self._allow, self._wait_s = tuple(allow), wait_s
        self._lock = threading.Condition()
        self._shard = Shard()
        self._plan: ShardPlan | None = None
        self._kept: list[jax.Array] = []
        self._rounded: dict[int, jax.Array] = {}
        self._programs: list[Program] = []
        # A push's view and arrays, or a result's bytes, by the number that the machine knows.
        self._held: dict[int, Any] = {}
        self._next_ref = 0
        self._cut: list[np.ndarray] = []
        self._cut_of: tuple[Any, Any] = 0, 0  # its generation and version
        self._answers: dict[int, Any] = {}
        self._holds_applied = False  # memory of gradients that were applied
        self._begun_by = ""  # the coordinator of its history
        self._left: set[int] = set()  # calls that are not answered yet, and whose callers have gone

    def methods(self) -> dict[str, Method]:
        """What a transport serves."""
        return {
            "status": Method(self._status),
            "restore": Method(self._restore, self._expects_of_restore),
            "say": Method(self._say, self._expects_of_say, limited=True),
            "read": Method(self._read),
        }

    def _status(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        check_files()  # else it can do nothing, and is as good as silent
        with self._lock:
            shard = self._shard
            counts = dataclasses.asdict(shard.counts)
            found = {"generation": shard.generation, "version": shard.version, "counts": counts}
            found["begun_by"] = self._begun_by
        return {"incarnation": self.incarnation, **found}, []

    def _expects_of_restore(self, header: Header) -> list[Spec]:
        plan = from_plain(SHARD_PLAN, header.get("plan"))
        sizes = header.get("programs")
        if not isinstance(sizes, list) or len(sizes) != len(plan.views):
            raise WireError("not a program for each view")
        return [*plan.kept, *map(program_spec, sizes)]

    def _restore(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        message = from_plain({"Restore": Restore}, header.get("say"))
        by = str(header.get("by", ""))[:MOST_NAME]
        plan = from_plain(SHARD_PLAN, header.get("plan"))
        kept, packed = arrays[: len(plan.kept)], arrays[len(plan.kept) :]
        programs = self._unpacked(plan, packed)
        failpoints.reached(Point.IN_REPLACE)
        with self._lock:
            self._check()
            shard = dataclasses.replace(self._shard, rules=plan.rules)
            shard, commands = receive(shard, dataclasses.replace(message, call=0))
            if any(isinstance(command, Replace) for command in commands):
                self._put(plan, kept, programs, packed)
                self._begun_by = by
            self._carry_out(shard, commands)
            answer = self._answers.pop(0)
        return {"answer": to_plain(answer)}, []

    def _unpacked(self, plan: ShardPlan, packed: Sequence[np.ndarray]) -> list[Program]:
        donate = range(plan.changing)
        return [unpack(x.tobytes(), donate=donate, allow=self._allow) if x.size else _nothing for x in packed]

    def _put(
        self, plan: ShardPlan | None, kept: Sequence[Any], programs: list[Program], packed: Sequence[np.ndarray]
    ) -> None:
        """Takes over arrays in place of all that there are; all of them, or none."""
        # The block that came is kept by these arrays, which share its memory where they can.
        taken = [jnp.asarray(x) for x in kept]
        self._rounded = {} if plan is None else {i: taken[i].astype(ROUNDED) for i in plan.rounded}
        self._kept, self._plan, self._programs = taken, plan, programs

    def _check(self) -> None:
        """Raises what ends a call that waits; here nothing does. See `replicated_shard.ReplicatedShard`."""

    def _expects_of_say(self, header: Header) -> list[Spec]:
        """The arrays of a push, then the bytes of its result."""
        size = header.get("result")
        if size is None:
            return []
        result = result_spec(size)
        with self._lock:
            plan = self._plan
            holds, self._holds_applied = self._holds_applied, False
        if holds:
            let_go()
        said = [m for m in header.get("say", ()) if isinstance(m, dict) and m.get("is") in ("Push", "Stage", "Commit")]
        views = [(m["is"], m.get("view")) for m in said if m["is"] != "Commit" or m.get("as_one")]
        if len(views) != 1:
            raise WireError("arrays of no push, or of several")
        if plan is None:
            raise FailedPrecondition("a push to an empty shard")
        ((kind, number),) = views
        if type(number) is not int or not 0 <= number < len(plan.views) or self._programs[number] is _nothing:
            raise WireError("a push of no step that is known here and updates something")
        view = plan.views[number]
        return [*(view.scalars if kind == "Commit" else view.pushes), result]

    def _say(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Several messages of one sender, one after the other: a commit, a push and the next pull are one call."""
        plain = header.get("say")
        if not isinstance(plain, list) or len(plain) > MOST_MESSAGES:
            raise WireError("no list of messages")
        messages = [from_plain(TRAVELLING, m) for m in plain]
        if any(isinstance(m, Restore) for m in messages) or (any(isinstance(m, Push) for m in messages) and not arrays):
            raise WireError("a push without arrays")
        answers, sent = [], []
        deadline = time.monotonic() + self._wait_s
        with self._lock:
            for message in messages:
                answer = self._ask(message, arrays, deadline)
                answers.append(self._told(message, answer, sent))
            arrays.clear()  # the caller's list: what is kept of them, `_held` has
        return {"answers": answers}, sent

    def _ask(self, message: Message, arrays: list[np.ndarray], deadline: float) -> Any:
        call = self._take(message, arrays)
        incarnation = self.incarnation
        try:
            while call not in self._answers:
                if not self._lock.wait(deadline - time.monotonic()):
                    # The message stays where it is; whoever repeats it is answered then.
                    raise TimeoutError("the shard stayed frozen")
                self._check()
                if self.incarnation != incarnation:
                    raise WireError("the shard has lost its memory")
        except BaseException:
            self._left.add(call)
            raise
        return self._answers.pop(call)

    def _take(self, message: Message, arrays: list[np.ndarray]) -> int:
        """Hands a message to the machine; the call's name, under which it is answered now or later.

        Raises:
            OutOfFilesError: nothing is changed yet. Within an update, XLA's own error would come half-way.
        """
        if not isinstance(message, Pull):
            check_files()
        call = self._name()
        given: dict[str, Any] = {"call": call}
        if isinstance(message, Push) and arrays:
            *pushes, result = arrays
            given["gradients"] = self._name((message.view, pushes))
            given["result"] = self._name(result.tobytes()) if result.size else None
        if isinstance(message, Commit):
            given["scalars"] = self._name(arrays[:-1]) if message.as_one and arrays else None
        shard, commands = receive(self._shard, dataclasses.replace(message, **given))
        self._carry_out(shard, commands)
        return call

    def _told(self, message: Message, answer: Any, sent: list[Any]) -> Header:
        """An answer as it travels, and the arrays that go with it."""
        plain, plan = to_plain(answer), self._plan
        assert plan is not None or not isinstance(answer, Parameters)  # an empty shard refuses
        if isinstance(answer, Parameters) and plan is not None:
            assert isinstance(message, Pull)  # nothing else is answered by parameters
            places = plan.sent(message.view, changed=answer.changed, first=message.known is None)
            sent.extend(np.asarray(self._rounded.get(i, self._kept[i])) for i in places)
        if isinstance(answer, Cut):
            # Views, not the arrays: of a donated buffer that is still looked at JAX makes a copy.
            self._cut = [np.asarray(x) for x in self._kept]
            self._cut_of = message.generation, answer.version
            failpoints.reached(Point.IN_SNAPSHOT)
        if isinstance(answer, Held):
            plain["results"] = [[closure, self._held[ref]] for closure, ref in answer.results]
        return plain

    def _read(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """The arrays of the last snapshot, which can be read once, by who says which it is."""
        with self._lock:
            if self._cut_of != (header.get("generation"), header.get("version")):
                return {"arrays": 0}, []
            cut, self._cut = self._cut, []
        return {"arrays": len(cut)}, cut

    def _name(self, held: Any = None) -> int:
        self._next_ref += 1
        if held is not None:
            self._held[self._next_ref] = held
        return self._next_ref

    def _carry_out(self, shard: Shard, commands: list[Command]) -> None:
        """Takes over the machine's new state, and does what it says."""
        for command in commands:
            match command:
                case Apply():
                    scalars = [] if command.scalars is None else self._held[command.scalars]
                    gradients = [(self._held[ref], weight) for ref, weight in command.gradients]
                    self._holds_applied = sum(x.nbytes for (_, arrays), _ in gradients for x in arrays) > LARGE_BYTES
                    try:
                        self._apply(gradients, scalars)
                    except BaseException:
                        self._begin_anew()
                        raise
                case Forget():
                    self._held.pop(command.ref, None)
                case Reply() if command.call in self._left:
                    self._left.discard(command.call)
                case Reply():
                    self._answers[command.call] = command.answer
        self._shard = shard
        self._lock.notify_all()

    def _begin_anew(self) -> None:
        """After an update that failed half-way, for lack of memory perhaps, there is no state that any version names.

        The shard is then as one that was killed and started again: empty, and under another name.
        """
        self.incarnation = secrets.token_hex(8)
        self._shard = Shard()
        ShardServer._put(self, None, [], [], [])
        self._held, self._cut, self._cut_of = {}, [], (0, 0)
        self._answers.clear()
        self._left.clear()
        self._lock.notify_all()

    def _apply(self, gradients: list[tuple[tuple[int, list[np.ndarray]], float]], scalars: list[np.ndarray]) -> None:
        plan = self._plan
        assert plan is not None  # an empty shard applies nothing
        ((view, pushes), weight), *others = gradients
        if others or weight != 1.0 or plan.widens(view):
            weights = np.array([weight, *(w for _, w in others)], np.float32) / len(gradients)
            equal = np.full_like(weights, 1 / len(gradients))
            each = [equal if i in plan.views[view].unweighted else weights for i in range(len(pushes))]
            pushes = _weighted(each, [pushes, *(more for (_, more), _ in others)])
        new = self._programs[view]([*self._kept, *pushes, *scalars])
        n = plan.changing
        self._kept[:n] = new[:n]
        self._rounded.update(zip([i for i in plan.rounded if i < n], new[n:], strict=True))


def _nothing(values: Sequence[Any]) -> list[jax.Array]:
    """The program of a step that updates nothing, and is pushed by nobody."""
    raise AssertionError


@jax.jit
def _weighted(weights: list[jax.Array], gradients: list[list[jax.Array]]) -> list[jax.Array]:
    """The weighted sum, `wire.wide`; of integers the mean, which is exact (`wire.mean_of_integers`); of flags the first.

    Args:
        weights: for each array, the weight of each one's.
        gradients: the arrays of each.
    """

    def one(weights: jax.Array, *values: jax.Array) -> jax.Array:
        if not jnp.issubdtype(values[0].dtype, jnp.inexact):
            return mean_of_integers(values)
        return functools.reduce(jnp.add, [w * x for w, x in zip(weights, values, strict=True)])  # weights are float32

    return jax.tree.map(one, weights, *gradients)
