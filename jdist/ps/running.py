"""A step under a parameter server: taken apart at its first call, then scheduled call by call."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.errors import StepError
from jdist.ps.artifact import pack
from jdist.ps.coordinator import Coordinator
from jdist.ps.job import job_of, keeping_of
from jdist.ps.layout import Layout, make_layout
from jdist.ps.link import Times
from jdist.ps.partition import Partitioner, Placement
from jdist.ps.program import StepParts, take_apart
from jdist.ps.remote_value import RemoteValue
from jdist.ps.shard import Rules
from jdist.ps.shards import ShardClient
from jdist.ps.transport.seam import Channel
from jdist.strategy import Strategy
from jdist.transforms.calls import Call, Signature, Step
from jdist.transforms.guard import Watched
from jdist.transforms.options import StepOptions
from jdist.transforms.replica_step import ProgramSpec
from jdist.transforms.results import Traced
from jdist.transforms.trees import check_arrays

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Servers:
    """Where a job runs.

    Attributes:
        workers: addresses of the workers.
        ps: addresses of the parameter servers.
        connect: from an address to a channel.
        close: ends what was started for the job.
        pids: process ids of what was started: the parameter servers, then the workers.
    """

    workers: tuple[str, ...]
    ps: tuple[str, ...]
    connect: Callable[[str], Channel]
    close: Callable[[], None]
    pids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PsOptions:
    """How a state is spread over the servers, and what they do with late gradients."""

    partitioner: Partitioner
    placement: Placement
    rules: Rules
    times: Times


class RemoteState:
    """A state that lives on parameter servers; `strategy.fetch(state)` brings it here.

    Before the first step it is still here: only a step tells which of its leaves are updated together.
    """

    def __init__(self, job: PsJob, initial: PyTree):
        self.job, self.initial = job, initial

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"this state lives on parameter servers, so `.{name}` is not here. Take `strategy.fetch(state).{name}`."
        )

    def __repr__(self) -> str:
        return f"RemoteState({jax.tree.structure(self.initial)!s:.80})"


class PsJob:
    """What is running of one strategy."""

    def __init__(self, servers: Servers, options: PsOptions):
        self.servers, self.options = servers, options
        self._lock = threading.RLock()
        self._coordinator: Coordinator | None = None
        self._layout: Layout | None = None
        self._step: PsStep | None = None
        self._state: RemoteState | None = None

    def begin(self, step: PsStep, state: RemoteState, parts: StepParts, arguments: Sequence[Any], treedef: Any) -> None:
        """Places the state and starts the workers; later calls of the same step and state do nothing.

        Raises:
            StepError: another step, or another state, is running.
        """
        with self._lock:
            if self._coordinator is not None:
                if step is not self._step or state is not self._state:
                    raise StepError(
                        "a parameter server runs one step with one state so far; another one is running. Fetch that state, and "
                        "begin a new strategy with it."
                    )
                return
            self._coordinator, self._layout = self._started(state, parts, arguments, treedef)
            self._step, self._state = step, state

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the running step."""
        assert self._coordinator is not None  # asked for after `begin`
        return self._coordinator

    def fetch(self, state: RemoteState) -> PyTree:
        """The whole state, after every scheduled closure."""
        with self._lock:
            if self._coordinator is None or state is not self._state:
                return jax.tree.map(np.asarray, state.initial)
            assert self._layout is not None  # set with the coordinator
            self._coordinator.join()
            leaves, treedef = jax.tree.flatten(state.initial)
            found = [np.array(_raw(x)) for x in leaves]
            for shard, arrays in zip(self._layout.shards, self._coordinator.snapshot().kept, strict=True):
                for rows, x in zip(shard.kept, arrays, strict=True):
                    found[rows.of][... if rows.stop is None else slice(rows.start, rows.stop)] = x
            typed = [
                jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(old)) if _is_key(old) else x
                for x, old in zip(found, leaves, strict=True)
            ]
            return jax.tree.unflatten(treedef, typed)

    def close(self) -> None:
        """Ends the workers' threads, the connections and what was started."""
        with self._lock:
            if self._coordinator is not None:
                self._coordinator.close()
                self._coordinator = None
            self.servers.close()

    def _started(
        self, state: RemoteState, parts: StepParts, arguments: Sequence[Any], treedef: Any
    ) -> tuple[Coordinator, Layout]:
        servers, options = self.servers, self.options
        leaves = [_raw(x) for x in jax.tree.leaves(state.initial)]
        layout = make_layout(
            parts, num_ps=len(servers.ps), partitioner=options.partitioner, placement=options.placement
        )
        inputs = [leaves[i] for i in parts.read]

        def worker(values: list[Any]) -> list[Any]:
            pushed, scalars, finite, outputs = parts.worker(
                values[: len(inputs)], *jax.tree.unflatten(treedef, values[len(inputs) :])
            )
            return [*pushed, *scalars, finite, *outputs]

        results = jax.eval_shape(worker, [*inputs, *arguments])
        outputs = results[len(layout.pushed) + len(layout.update.scalar_shapes) + 1 :]
        keepings = [keeping_of(layout, shard, options.rules) for shard in layout.shards]
        kept = [[np.asarray(rows.cut(leaves[rows.of])) for rows in shard.kept] for shard in layout.shards]
        clients = [
            ShardClient(servers.connect(servers.ps[shard.ps]), keeping)
            for shard, keeping in zip(layout.shards, keepings, strict=True)
        ]
        coordinator = Coordinator(
            [lambda address=address: servers.connect(address) for address in servers.workers],
            clients,
            times=options.times,
        )
        coordinator.begin(
            job_of(layout, servers.ps, arguments, outputs, options.rules),
            keepings,
            pack(worker, [*inputs, *arguments]),
            kept=kept,
            shard_programs=[
                pack(
                    layout.program(shard),
                    [*mine, *(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in layout.push_specs(shard))],
                )
                for shard, mine in zip(layout.shards, kept, strict=True)
            ],
            generation=1 + max(_generation(client) for client in clients),
        )
        return coordinator, layout


class PsStep:
    """A step under a parameter server; called like the step, it schedules a closure and returns at once."""

    def __init__(self, strategy: Strategy, on_worker: Strategy, job: PsJob, step: Step, options: StepOptions):
        self.__name__ = getattr(step, "__name__", "the step")
        self.strategy, self.options = strategy, options
        self._on_worker, self._job, self._step = on_worker, job, step
        self._signature = Signature(step, options)
        self._parts: dict[Call, tuple[StepParts, Traced]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, state, batches, others = self._signature.bind(args, kwargs)
        if not isinstance(state, RemoteState):
            raise StepError(
                f"{self.__name__} got a state of type {type(state).__name__}; under a parameter server it is what "
                "`strategy.init` returned: `state = strategy.init(lambda: my_state)`."
            )
        arguments, treedef = jax.tree.flatten((batches, others))
        if call not in self._parts:
            check_arrays(batches, "the batch")
            traced = Traced()
            spec = ProgramSpec(self._step, self._on_worker, self.options, call, traced, Watched(), self.__name__)
            parts = take_apart(spec, state.initial, batches, others)
            self._job.begin(self, state, parts, arguments, treedef)
            self._parts[call] = parts, traced
        parts, traced = self._parts[call]
        pending = self._job.coordinator.schedule(arguments)
        values = [RemoteValue(pending, i) for i in range(parts.outputs_treedef.num_leaves)]
        outputs = jax.tree.unflatten(parts.outputs_treedef, values)
        return _result(state, outputs, traced)

    def wait(self) -> None:
        """Waits for every closure."""
        self._job.coordinator.join()


def _result(state: RemoteState, outputs: tuple[PyTree, ...], traced: Traced) -> Any:
    if "state" in traced.returns:
        i = traced.returns.index("state")
        outputs = (*outputs[:i], state, *outputs[i:])
    return outputs[0] if traced.bare else outputs


def _generation(client: ShardClient) -> int:
    header, _ = client.channel.call("status", {}, timeout_s=20.0)
    return header["generation"]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _raw(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)
