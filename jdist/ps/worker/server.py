"""The server of a worker: computes the closures that the coordinator sends, from parameters that it pulls.

Whatever it keeps can be computed again elsewhere. It holds no code of the user's either, only artifacts.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist.errors import ShardLostError, WireError
from jdist.ps.program.artifact import name_of, unpack
from jdist.ps.program.function_plan import FunctionPlan
from jdist.ps.program.shard_plan import ShardPlan, program_spec
from jdist.ps.protocol.wire import Spec, from_plain
from jdist.ps.transport.interface import Channel, FailedPrecondition, Header, Method, check_files, integers
from jdist.ps.transport.routed import RoutedChannel, routes_in
from jdist.ps.transport.shard_client import ShardClient, unreached
from jdist.ps.worker.data import EndOfDataError, WorkerData
from jdist.ps.worker.execute import Abandoned, Installed, Sender, Shards
from jdist.support.versions import versions

MOST_SHARDS = 4096
MOST_CLOSURES = 4096
MOST_COMPILED = 64
MOST_REACH_S = 60.0
Compiled = Callable[[Sequence[Any]], list[jax.Array]]


class WorkerServer:
    """Serves the coordinator."""

    def __init__(
        self,
        connect: Callable[[str], Channel],  # from a server's address
        *,
        allow: Sequence[str] = (),  # custom calls, for `artifact.unpack`
        script: str | None = None,  # for `WorkerData`
        devices: int | None = None,  # of its functions; None: all of this process
        timeout_s: float = 20.0,  # of one call to a server
        give_up_s: float = 60.0,  # of a call that is repeated
    ):
        self._connect, self._allow = connect, tuple(allow)
        self._times = {"timeout_s": timeout_s, "give_up_s": give_up_s}
        self._lock, self._running = threading.Lock(), threading.Lock()
        self._attached = 0  # how often the coordinator has connected
        self._shards = Shards([])
        self._routed: Sequence[RoutedChannel] = ()
        self._functions: dict[str, Installed] = {}
        self._devices = devices or jax.local_device_count()
        self._data = WorkerData(script, self._devices)
        self._compiled: dict[str, Compiled] = {}

    def methods(self) -> dict[str, Method]:
        """Returns what a transport serves."""
        return {
            "status": Method(self._status),
            **self._data.methods(),
            "attach": Method(self._attach),
            "unreached": Method(self._unreached),
            "install": Method(self._install, lambda header: [program_spec(header.get("program"))]),
            "execute": Method(self._execute, self._expects_of_execute),
        }

    def close(self) -> None:
        """Ends its connections."""
        self._shards.close()

    def _status(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Says who it is, and takes in where the shards are now, in case one has moved."""
        check_files()  # else it can do nothing, and is as good as silent
        routes, channels = routes_in(header), self._routed
        for channel, route in zip(channels, routes if len(routes) == len(channels) else (), strict=False):
            channel.move(route)
        waiting_s = max((client.waiting_s for client in self._shards.clients), default=0.0)
        return {"devices": self._devices, "waiting_s": waiting_s, "versions": versions()}, []

    def _unreached(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Says which of the servers do not answer it."""
        timeout_s = header.get("timeout_s")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MOST_REACH_S:
            raise WireError(f"`timeout_s` must be above 0 and at most {MOST_REACH_S:g}")
        return {"unreached": unreached(self._shards.clients, timeout_s)}, []

    def _attach(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Takes in where the state lives; functions installed before are forgotten, what was compiled is not."""
        routes, plans = header.get("routes"), header.get("plans")
        if not isinstance(routes, list) or not isinstance(plans, list) or len(routes) != len(plans):
            raise WireError("`routes` and `plans` must be two lists, with a shard plan for each route")
        if len(plans) > MOST_SHARDS:
            raise WireError(f"`plans` must be at most {MOST_SHARDS}")
        plans = [from_plain(ShardPlan, plan) for plan in plans]
        routed = [RoutedChannel(self._connect, route) for route in routes_in(header)]
        clients = [ShardClient(channel, plan, **self._times) for channel, plan in zip(routed, plans, strict=True)]
        with self._lock:
            before, self._shards, self._functions = self._shards, Shards(clients), {}
            self._attached += 1
            self._routed = routed
        before.close()
        return {"versions": versions()}, []

    def _install(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Takes in a function, and returns the name by which closures call it."""
        function = from_plain(FunctionPlan, header.get("function"))
        if type(header.get("number")) is not int:
            raise WireError("`number` must be an int")
        artifact = arrays[0].tobytes()
        hashed = name_of(artifact)
        with self._lock:
            run, shards = self._compiled.pop(hashed, None), self._shards
        run = run or unpack(artifact, allow=self._allow)
        name = f"{header['number']}-{hashed}"
        with self._lock:
            self._compiled[hashed] = run  # the newest is the last
            while len(self._compiled) > MOST_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            self._functions[name] = Installed(function, run, shards)
        return {"name": name}, []

    def _expects_of_execute(self, header: Header) -> list[Spec]:
        closures, names = header.get("closures"), header.get("functions")
        if not isinstance(closures, list) or not isinstance(names, list) or len(names) != len(closures):
            raise WireError("`closures` and `functions` must be two lists, with a function for each closure")
        if len(names) > MOST_CLOSURES:
            raise WireError(f"{len(names)} closures; there may be {MOST_CLOSURES} at a time")
        with self._lock:
            installed = [self._functions.get(str(name)) for name in names]
        known = [each.function for each in installed if each is not None]
        if len(known) != len(names):
            raise FailedPrecondition("closures of a function that is not installed")
        return [spec for function in known for spec in function.arguments]

    def _execute(self, header: Header, arrays: list[np.ndarray]) -> tuple[Header, list[Any]]:
        """Computes closures in turn; returns all outcomes, and outputs of done and staged ones."""
        names, closures = ("worker", "epoch", "generation", "settled"), header["closures"]
        who = Sender(**dict(zip(names, integers(header, *names), strict=True)))
        if any(type(closure) is not int for closure in closures):
            raise WireError("each of `closures` must be an int")
        with self._lock:
            attached = self._attached
            functions = [self._functions[name] for name in header["functions"]]
        batches = header.get("batches") or [None] * len(closures)
        if not isinstance(batches, list) or len(batches) != len(closures):
            raise WireError("`batches` must be a list, with one for each closure")
        outcomes, outputs, given = list[Header](), list[np.ndarray](), iter(arrays)
        with self._running:  # what an earlier incarnation of the coordinator asked for ends first
            for closure, installed, batch in zip(closures, functions, batches, strict=True):
                outcome, made = {"outcome": "abandoned"}, []
                if not outcomes or outcomes[-1]["outcome"] != "abandoned":  # else as all after it
                    arguments = list(itertools.islice(given, len(installed.function.arguments)))
                    outcome, made = self._compute(who, closure, installed, arguments, batch, attached)
                outcomes.append({"closure": closure, **outcome})
                outputs += made
        return {"outcomes": outcomes}, outputs

    def _compute(
        self, who: Sender, closure: int, installed: Installed, arguments: list[Any], batch: Any, attached: int
    ) -> tuple[Header, list[np.ndarray]]:
        """Computes a closure for the coordinator that has attached for this time; returns outcome and outputs."""
        function = installed.function
        if function.batch is not None:
            try:
                arguments[function.batch[0] : function.batch[0]] = self._data.batch(batch)
            except EndOfDataError as exc:
                return {"outcome": "declined", "batches": exc.count}, []
            except Exception:  # noqa: BLE001  # whatever a user's dataset raises
                return {"outcome": "void", "error": traceback.format_exc()}, []
        try:
            if self._attached > attached:  # whoever asked for this is not there any more
                raise Abandoned
            computed = installed.compute(who, closure, arguments)
        except jax.errors.JaxRuntimeError:  # out of memory, for example
            return {"outcome": "void", "error": traceback.format_exc()}, []
        except (Abandoned, ShardLostError):
            return {"outcome": "abandoned"}, []
        failed = not computed.is_finite and function.non_finite == "raise"
        how = "void" if failed else "staged" if function.stages_only else "done"
        return {"outcome": how, "is_finite": computed.is_finite, "base": computed.base}, computed.outputs
