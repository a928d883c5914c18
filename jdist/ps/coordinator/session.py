"""The session of one strategy: its servers, the state that they have now, and the programs of the steps that use it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.core.state_report import WHOLE, Holding, Place, StateReport, in_words
from jdist.core.strategy import Strategy
from jdist.errors import StrategyError
from jdist.ps.coordinator.closures import Function
from jdist.ps.coordinator.coordinator import Coordinator
from jdist.ps.coordinator.datasets import RemoteBatch, WorkerDataset, name_of_function
from jdist.ps.coordinator.remote_state import RemoteState
from jdist.ps.coordinator.remote_value import Pending
from jdist.ps.coordinator.servers import Servers, devices_of_workers
from jdist.ps.program.artifact import pack
from jdist.ps.program.function_plan import FunctionPlan, StepFunction, plan_function
from jdist.ps.program.layout import Layout, Wire, make_layout
from jdist.ps.program.partition import Partitioner, Placement
from jdist.ps.program.shard_plan import ShardPlan
from jdist.ps.program.split_step import SplitStep
from jdist.ps.protocol.shard import Rules
from jdist.ps.protocol.sync_rounds import Rounds
from jdist.ps.protocol.times import Times
from jdist.ps.protocol.wire import Spec
from jdist.ps.transport.routed import place_copies
from jdist.support.leaves import Leaf, leaves_of
from jdist.support.words import counted, size

_PIECES, _COPIES, _HERE = "in pieces, each on one server", "whole on every server", "whole in this process"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PsOptions:
    """Layout, transport and update options of a state; see `jdist.parameter_server`."""

    # from a worker's number of devices to the strategy that traces its part of a step
    on_worker: Callable[[int], Strategy]
    partitioner: Partitioner
    placement: Placement
    rules: Rules
    times: Times
    wire: Wire = "float32"
    rounds: Rounds | None = None  # how many gradients make an update, in synchronous mode
    replicas: int = 1


class Session:
    """Lays states out over servers, and schedules steps and functions of one strategy."""

    def __init__(
        self, servers: Servers | Callable[[], Servers], options: PsOptions, *, counts: tuple[int, int] = (0, 0)
    ):
        self._start, self.options, self._counts = servers, options, counts
        self._servers = servers if isinstance(servers, Servers) else None
        self._lock = threading.RLock()
        self._coordinator: Coordinator | None = None
        self._layout: Layout | None = None
        self._state: RemoteState | None = None
        self._functions: dict[Any, Function] = {}  # of the present coordinator
        self._packed: dict[Any, bytes] = {}  # programs of servers, by what they are made from
        self._is_closed = False
        self._skipped_before = 0  # by coordinators before this one
        self._since_parting: set[int] = set()  # steps with closures scheduled since the last `Coordinator.part`

    @property
    def servers(self) -> Servers:
        """The workers and parameter servers; started when they are first asked for."""
        with self._lock:
            if self._is_closed:
                raise StrategyError(
                    "this parameter server was closed (`strategy.coordinator.close()`); make another `jdist.parameter_server`."
                )
            if self._servers is None:
                assert not isinstance(self._start, Servers)  # it would be there
                self._servers = self._start()
            return self._servers

    @functools.cached_property
    def on_worker(self) -> Strategy:
        """The strategy of a worker's part of a step: mirrored over the worker's devices."""
        count = devices_of_workers(self.servers, self.options.times)
        if self.options.rounds is not None and count > 1:
            raise StrategyError(
                f"each worker has {count} devices; synchronous mode has one gradient of one device for each worker. Start "
                "a worker for each device, or use `jdist.multi_worker()`."
            )
        return self.options.on_worker(count)

    def describe(self) -> str:
        """Says where it runs, in a few words; starts nothing."""
        servers = self._servers
        if servers is None:
            return "workers and parameter servers of this machine, started when they are needed"
        named = [("worker", servers.workers), ("parameter server", servers.ps)]
        return " and ".join(
            f"{len(addresses)} {name}{'s' * (len(addresses) > 1)} ({addresses[0]}{', ...' * (len(addresses) > 1)})"
            for name, addresses in named
        )

    def show(self, state: RemoteState | None) -> StateReport:
        """Shows workers, servers and the part of a state that each holds; starts nothing."""
        with self._lock:
            if self._servers is not None:
                workers, ps = self._servers.workers, self._servers.ps
            else:
                workers, ps = (("",) * count for count in self._counts)
            if state is None:
                return _report(workers, ps)
            is_there = state is self._state
            leaves = state.leaves if is_there else _leaves_here(state)
            return _report(
                workers,
                ps,
                shapes=state.shapes,
                here=[i for i, x in enumerate(leaves) if x is not None],
                layout=self._layout if is_there else None,
                backups=self.options.replicas == 2,
            )

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the running state."""
        assert self._coordinator is not None  # asked for once a step was scheduled
        return self._coordinator

    def schedule(
        self, state: RemoteState, function: StepFunction, arguments: Sequence[Any], reads: RemoteBatch | None = None
    ) -> list[Pending]:
        """Schedules a step call's closures; moves the state to the servers first if necessary."""
        # A step that only reads waits for those that update, and they for it: it reads the state
        # after all earlier steps. Over several servers, two steps also wait for each other if they
        # update in different ways a leaf that every server has a copy of (`layout.in_turn`).
        with self._lock:
            steps = self._layout.steps if self._layout is not None and state is self._state else ()
            identities = [step.identity for step in steps]
            if function.step.identity not in identities:
                self._place(state, [*steps, function.step])
                identities.append(function.step.identity)
            step = identities.index(function.step.identity)
            made = self._made(function, lambda: self._plan(function, step))
            assert self._layout is not None  # the state has been placed
            if any((step, other) in self._layout.in_turn for other in self._since_parting):
                self.coordinator.part()
                self._since_parting.clear()
            self._since_parting.add(step)
            if function.cut is not None:
                return self.coordinator.queue.schedule_round(made, function.cut(arguments))
            return [self.coordinator.queue.schedule(made, arguments, reads)]

    def schedule_function(
        self,
        key: Any,
        make: Callable[[], tuple[FunctionPlan, bytes]],
        arguments: Sequence[Any],
        reads: RemoteBatch | None = None,
    ) -> Pending:
        """Schedules a closure of a stateless function; `make` gives a new `key` its function."""
        with self._lock:
            if self._coordinator is None:
                self._coordinator = self._make_coordinator([])
                self._coordinator.begin([], [])
            return self._coordinator.queue.schedule(self._made(key, make), arguments, reads)

    def dataset(self, fn: Any, options: dict[str, Any]) -> WorkerDataset:
        """Makes a dataset; each worker reads its own share."""
        servers = self.servers
        connects = [functools.partial(servers.connect, address) for address in servers.workers]
        return WorkerDataset(name_of_function(fn), options, connects, self.options.times.no_worker_timeout_s)

    def _made(self, key: Any, make: Callable[[], tuple[Any, ...]]) -> Function:
        if key not in self._functions:
            self._functions[key] = self.coordinator.queue.add(*make())
        return self._functions[key]

    def _plan(self, function: StepFunction, step: int) -> tuple[Any, ...]:
        """Returns what the queue takes in of a step's function: its plan, its program and what combines its closures."""
        assert self._layout is not None  # the state has been placed
        layout = self._layout
        program = pack(layout.worker(step, function.run), [*layout.inputs(step), *function.arguments])
        return plan_function(layout, step, function), program, function.combine

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for every closure; raises what failed."""
        coordinator = self._coordinator  # without the lock: others may schedule meanwhile, or close
        if coordinator is not None:
            coordinator.queue.join(timeout_s)

    @property
    def done(self) -> bool:
        """Returns whether every closure is done."""
        coordinator = self._coordinator
        return coordinator is None or coordinator.queue.done

    def fetch(self, state: RemoteState) -> list[np.ndarray]:
        """Returns the leaves of a state, after every closure."""
        self.join()
        with self._lock:
            if self._coordinator is None or self._layout is None or state is not self._state:
                return [np.array(x) for x in _leaves_here(state)]
            return self._layout.join_leaves(self._coordinator.state().kept, state.leaves)

    def num_skipped(self) -> int:
        """Counts the updates that were left out, as a gradient was not finite; waits for every closure."""
        with self._lock:
            if self._coordinator is None:
                return self._skipped_before
            self._coordinator.queue.join()
            return self._skipped_before + self._coordinator.queue.num_skipped

    def close(self) -> None:
        """Ends the workers' threads, the connections and what was started."""
        coordinator = self._coordinator
        if coordinator is not None:  # whoever has the lock may wait for it
            coordinator.close()
        with self._lock:
            if self._is_closed:
                return
            self._leave()
            if self._servers is not None:
                self._servers.close()
            self._is_closed = True

    def _leave(self) -> None:
        if self._coordinator is not None:
            self._skipped_before += self._coordinator.queue.num_skipped
            self._coordinator.close()
        self._coordinator = self._layout = self._state = None
        self._functions.clear()
        self._since_parting.clear()

    def _place(self, state: RemoteState, steps: Sequence[SplitStep]) -> None:
        """Lays a state out for these steps. Another state that is on the servers is brought here first."""
        servers, options = self.servers, self.options
        if state is not self._state:
            _leaves_here(state)
        if self._state is not None:
            self._state.leaves = list(self.fetch(self._state))
        first = 0
        if self._coordinator is not None:
            self._coordinator.queue.join()
            first = self._coordinator.queue.dispatch.scheduled
        self._leave()
        layout = make_layout(
            steps,
            num_ps=len(servers.ps),
            partitioner=options.partitioner,
            placement=options.placement,
            wire=options.wire,
            rules=options.rules,
            is_sync=options.rounds is not None,
        )
        programs = [[self._program(layout, shard, step) for step in range(len(steps))] for shard in layout.shards]
        coordinator = self._make_coordinator(layout.shards)
        try:
            coordinator.begin(layout.split_leaves(state.leaves), programs, first=first)
        except BaseException:
            coordinator.close()  # the state is here still, and goes to the servers with the next call
            raise
        self._coordinator, self._layout, self._state = coordinator, layout, state
        kept = {rows.of for shard in layout.shards for rows in shard.rows}
        state.leaves = [None if i in kept else x for i, x in enumerate(state.leaves)]

    def _make_coordinator(self, plans: Sequence[ShardPlan]) -> Coordinator:
        servers, options = self.servers, self.options
        addresses = [servers.ps[plan.server] for plan in plans]
        return Coordinator(
            [functools.partial(servers.connect, address) for address in servers.workers],
            place_copies(servers.connect, addresses, servers.ps, replicas=options.replicas),
            plans,
            times=options.times,
            rounds=options.rounds,
            on_replaced=servers.leave,
        )

    def _program(self, layout: Layout, shard: ShardPlan, step: int) -> bytes:
        """Returns a server's program for a step, packed; empty if the step changes nothing."""
        parts = layout.steps[step]
        if not parts.update.reads:
            return b""
        specs = tuple(shard.program_specs(step))
        key = (parts.identity, layout.groups, shard.rows, shard.changing, shard.rounded, specs)
        if key not in self._packed:
            structs = [jax.ShapeDtypeStruct(s.shape, s.numpy) for s in specs]
            self._packed[key] = pack(layout.program(shard, step), structs)
        return self._packed[key]


def _leaves_here(state: RemoteState) -> list[Any]:
    """Returns the leaves of a state that is on no server."""
    if any(x is None for x in state.leaves):
        raise StrategyError(
            "this state is gone: its parameter servers were closed (`strategy.coordinator.close()`), so fetch it "
            "before; or this is a copy of its handle, so use the handle itself."
        )
    return state.leaves


def _report(
    workers: Sequence[str],
    ps: Sequence[str],
    *,
    shapes: object = None,
    here: Sequence[int] = (),  # numbers of the leaves that this process keeps
    layout: Layout | None = None,
    backups: bool = False,  # each server keeps a backup of the shard of the server before it
) -> StateReport:
    """Reports the processes of a parameter server, and the parts of a state that each has."""
    leaves = leaves_of(shapes)
    ways: list[str] = []
    chief: list[Holding] = []
    held: list[list[Holding]] = [[] for _ in ps]
    pulls, summary = "each pulls what a step reads", "give it a state to see what each server holds"
    if shapes is not None:
        where = "here until the first step that is given it, which cuts it up"
        if layout is not None:
            leaves, ways = _on_servers(layout, leaves, held, backups=backups)
            where = "on the servers"
            most = max(sum(map(_num_bytes_of, layout.inputs(i))) for i in range(len(layout.steps)))
            pulls = f"each pulls {size(most)} for a step"
        summary = f"a state of {counted(len(leaves), 'array')}, {size(sum(x.num_bytes for x in leaves))}, {where}"
    leaves = [dataclasses.replace(leaf, kept=_HERE) if i in here else leaf for i, leaf in enumerate(leaves)]
    if here:
        chief.append(Holding(len(ways), WHOLE, "whole", sum(leaves[i].num_bytes for i in here)))
        ways.append(in_words(_HERE, [leaves[i] for i in here]))
    servers = [Place(f"ps {i}", at, tuple(each)) for i, (at, each) in enumerate(zip(ps, held, strict=True))]
    places = (
        Place("this process, the chief", places=(Place("coordinator", "the program itself", tuple(chief)),)),
        Place(f"workers: {pulls}", places=tuple(Place(f"worker {i}", at) for i, at in enumerate(workers))),
        Place("parameter servers", places=tuple(servers)),
    )
    title = f"parameter_server: {counted(len(workers), 'worker')}, {counted(len(ps), 'server')}"
    return StateReport(title, summary, tuple(leaves), tuple(ways), places)


def _on_servers(
    layout: Layout, leaves: Sequence[Leaf], held: list[list[Holding]], *, backups: bool
) -> tuple[list[Leaf], list[str]]:
    """Sorts what servers keep: leaves in pieces, each on one server, leaves copied to each server, and backups."""
    everywhere = {*layout.groups.everywhere, *layout.groups.constant}
    pieces, copies, kept = [list[int]() for _ in held], [set[int]() for _ in held], dict[int, str]()
    for shard in layout.shards:
        for rows, spec in zip(shard.rows, shard.kept, strict=True):
            kept[rows.of] = _COPIES if rows.of in everywhere else _PIECES
            if rows.of in everywhere:
                copies[shard.server].add(rows.of)
            else:
                pieces[shard.server].append(_num_bytes_of(spec))
    leaves = [dataclasses.replace(leaf, kept=kept.get(i, leaf.kept)) for i, leaf in enumerate(leaves)]
    ends = [0, *itertools.accumulate(map(sum, pieces))]
    spans = [((a / max(1, ends[-1]), b / max(1, ends[-1])),) for a, b in itertools.pairwise(ends)]
    ways = [in_words(how, [x for x in leaves if x.kept == how]) for how in dict.fromkeys((_PIECES, *kept.values()))]
    for holdings, own, span, whole in zip(held, pieces, spans, copies, strict=True):
        holdings += [Holding(0, span, counted(len(own), "piece"), sum(own))] if own else []
        holdings += [Holding(1, WHOLE, "whole", sum(leaves[i].num_bytes for i in whole))] if whole else []
    if backups:
        sizes = [sum(map(_num_bytes_of, shard.kept)) for shard in layout.shards]
        for shard, num_bytes in zip(layout.shards, sizes, strict=True):
            backup = Holding(len(ways), spans[shard.server], f"of ps {shard.server}", num_bytes)
            held[(shard.server + 1) % len(held)].append(backup)
        ways.append(f"a backup of another server's shard: {counted(len(sizes), 'shard')}, {size(sum(sizes))}")
    return leaves, ways


def _num_bytes_of(spec: Any) -> int:
    dtype = spec.numpy if isinstance(spec, Spec) else np.dtype(spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize
