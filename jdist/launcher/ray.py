"""`ray_launch`: a job's processes in actors of a Ray cluster.

The launcher is that of `launch`, on this machine; `_RayHost` places the actors, `Place` runs a process in one, under a guard
of its own, and `ActorPipe` is the way to it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import selectors
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdist.cluster.address import join
from jdist.cluster.environment import RECORD_FOLDER
from jdist.errors import LaunchError
from jdist.launcher.environment import OF_CLUSTER, free_ports
from jdist.launcher.exit_cause import Task
from jdist.launcher.launch import check_cpu_devices, command_line, make_log_dir, make_settings
from jdist.launcher.loop import Launched, Launcher
from jdist.launcher.process import CHUNK, GuardPipe, Host, Transport
from jdist.support import checks

# Of the launcher's environment processes get what concerns the job; the rest is their node's.
_SENT = ("JDIST_", "JAX_", "XLA_")
_POLL_S = 0.5
_READ_S = 1.0
_ANSWER_S = 60.0  # for an actor to answer, which it does within a second
_GONE_S = 10.0


def ray_launch(
    command: Sequence[str],
    *,
    processes: int | str | tuple[int, int] = 2,
    num_cpus: float = 1,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    devices_per_process: int | None = None,
    max_restarts: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    start_timeout_s: float = 300.0,
    grace_s: float = 10.0,
    stop_timeout_s: float = 300.0,
    regrow_s: float = 300.0,
) -> Launched:
    """Runs a command in several Ray actors; their processes find each other by TF_CONFIG, and all have ended when it returns.

    It is `jdist launch` with the processes elsewhere: their output comes to the terminal and the logs here, a process or an
    actor that is lost is named, all are ended, and with restarts left all are started again, in new actors. The actors of an
    attempt are one placement group: all are there or none.

    Args:
        command: a config (.yaml) and overrides, a script (.py) and arguments, `-m` and a module, or a program; on each node as
            here, or brought there by `runtime_env`.
        processes: how many; with "MIN:MAX" or (MIN, MAX) as for `jdist.launch`.
        num_cpus: CPUs of each.
        num_gpus: GPUs of each.
        resources: Ray's other resources of each, such as {"TPU": 4}.
        address: of the Ray cluster; None: the one that this process is connected to, else RAY_ADDRESS, else one on this
            machine.
        runtime_env: Ray's, of the actors.
        devices_per_process: number of virtual CPU devices of each; None: the devices that JAX finds.
        max_restarts: how often to start all again after a failure; None: 0, or 3 with MIN:MAX.
        log_dir: folder for the output of each process; None: runs/launch-TIME.
        start_timeout_s: seconds for the cluster to find room for all actors and to start them.
        grace_s: as for `jdist.launch`, like the next two.
        stop_timeout_s: see above.
        regrow_s: see above.

    Returns:
        The exit code, the attempts and the folder of the logs.

    Raises:
        LaunchError: an argument is not allowed, Ray is not installed, or its cluster cannot be reached.

    Example:
        `jdist.ray_launch(["train.py"], processes=4, num_gpus=1, max_restarts=3)`
    """
    settings = make_settings(processes, max_restarts, grace_s=grace_s, stop_timeout_s=stop_timeout_s, regrow_s=regrow_s)
    start_timeout_s = checks.seconds("start_timeout_s", start_timeout_s, LaunchError)
    bundle = _bundle_of(num_cpus, num_gpus, resources)
    line = command_line(command, devices_per_process=devices_per_process)
    check_cpu_devices(devices_per_process, os.environ)
    try:
        module = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ModuleNotFoundError as exc:
        raise LaunchError("ray: it is not installed: pip install 'jdist[ray]'") from exc
    is_connected = module.is_initialized()
    if not is_connected:
        try:
            module.init(address=address, log_to_driver=False)
        except (ConnectionError, module.exceptions.RayError, ValueError, RuntimeError) as exc:
            why = _first_line(exc)
            raise LaunchError(f"ray: address={address!r}: {why}. Start one by `ray start --head`.") from exc
    host = _RayHost(module, bundle=bundle, runtime_env=runtime_env, start_timeout_s=start_timeout_s)
    try:
        launcher = Launcher(
            settings, line, log_dir=make_log_dir(log_dir), devices_per_process=devices_per_process, host=host
        )
        many = f"{settings.largest} process{'es' if settings.largest > 1 else ''}"
        return launcher.run(f"{many} in Ray actors of {shlex.join(command)}")
    finally:
        host.close()
        if not is_connected:
            module.shutdown()


def _bundle_of(num_cpus: float, num_gpus: float, resources: Mapping[str, float] | None) -> dict[str, float]:
    """Checks the resources of a process, and returns those that it takes, by Ray's names."""
    if resources is not None and not isinstance(resources, Mapping):
        raise LaunchError(f'`resources` is {resources!r:.80}; it must be a dict of amounts, such as {{"TPU": 4}}.')
    if both := {"CPU", "GPU"} & set(resources or {}):
        raise LaunchError(f"`resources` has {', '.join(sorted(both))}: give that as num_cpus or num_gpus.")
    amounts = {name: (f"resources[{name!r}]", amount) for name, amount in (resources or {}).items()}
    amounts |= {"CPU": ("num_cpus", num_cpus), "GPU": ("num_gpus", num_gpus)}
    bundle = {name: checks.real_number(argument, x, LaunchError, least=0) for name, (argument, x) in amounts.items()}
    if bundle["GPU"] > 1 and bundle["GPU"] != int(bundle["GPU"]):
        raise LaunchError(f"`num_gpus` is {num_gpus!r:.80}; it must be a fraction below 1, or a whole number.")
    bundle = {name: amount for name, amount in bundle.items() if amount}
    if not bundle:
        raise LaunchError("a process takes nothing of the Ray cluster: give num_cpus, num_gpus or resources above 0.")
    return bundle


class _RayHost(Host):
    """The actors of an attempt, in a placement group."""

    def __init__(
        self, ray: Any, *, bundle: Mapping[str, float], runtime_env: Mapping[str, Any] | None, start_timeout_s: float
    ) -> None:
        self._ray, self._bundle, self._runtime_env = ray, bundle, runtime_env
        self._start_timeout_s = start_timeout_s
        self._group: Any = None
        self._actors: dict[Task, Any] = {}

    def place(self, tasks: Sequence[Task], is_asked: Callable[[], bool]) -> list[str]:
        """Starts an actor for each task, and returns their addresses."""
        self.close()
        deadline = time.monotonic() + self._start_timeout_s

        def is_over() -> bool:
            if is_asked():
                raise OSError("asked to stop before all actors were there")
            return time.monotonic() >= deadline

        ray, util = self._ray, self._ray.util
        self._group = util.placement_group([self._bundle] * len(tasks), strategy="PACK")
        while not self._group.wait(_POLL_S):
            if not is_over():
                continue
            each = f"{len(tasks)} process{'' if len(tasks) == 1 else 'es'} of {_amounts(self._bundle)} each"
            free = f"{_amounts(ray.cluster_resources())} in all, and {_amounts(ray.available_resources())} free"
            raise OSError(f"the Ray cluster has found no room for {each} in {self._start_timeout_s:g} s; it has {free}")
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        others = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        for number, task in enumerate(tasks):
            self._actors[task] = (
                ray.remote(Place)
                .options(
                    num_cpus=self._bundle.get("CPU", 0),
                    num_gpus=self._bundle.get("GPU", 0),
                    resources=others,
                    scheduling_strategy=strategy(self._group, placement_group_bundle_index=number),
                    runtime_env=None if self._runtime_env is None else dict(self._runtime_env),
                    max_restarts=0,
                    max_concurrency=4,
                )
                .remote()
            )
        addresses = [actor.address.remote() for actor in self._actors.values()]
        while ray.wait(addresses, num_returns=len(addresses), timeout=_POLL_S)[1]:
            if is_over():
                raise OSError(f"not all of {len(tasks)} actors have started in {self._start_timeout_s:g} s")
        try:
            return ray.get(addresses, timeout=_ANSWER_S)
        except ray.exceptions.RayError as exc:
            raise OSError(f"an actor does not start: {_first_line(exc)}") from exc

    def start(self, task: Task, line: Sequence[str], environ: Mapping[str, str]) -> Transport:
        """Starts a process in its actor."""
        variables = {
            name: value
            for name, value in environ.items()
            if os.environ.get(name) != value or name.startswith(_SENT) or name == "PYTHONUNBUFFERED"
        }
        line = ["" if part == sys.executable else part for part in line]
        return ActorPipe(self._ray, self._actors[task], task, line, variables, os.getcwd())

    def close(self) -> None:
        """Ends all actors, and gives their room back."""
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None


def _amounts(resources: Mapping[str, float]) -> str:
    named = {name: amount for name, amount in resources.items() if ":" not in name and "memory" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(named.items())) or "nothing"


class ActorPipe:
    """The transport of a process that a Ray actor runs; if the actor is gone, its guard has killed the process."""

    # `line`, `variables` and `folder` as for `Place.start`.

    def __init__(
        self, ray: Any, actor: Any, task: Task, line: Sequence[str], variables: Mapping[str, str], folder: str
    ) -> None:
        self._ray, self._actor, self._task = ray, actor, task
        try:
            ray.get(actor.start.remote(list(line), dict(variables), folder), timeout=_ANSWER_S)
        except ray.exceptions.RayError as exc:
            raise OSError(f"{task} cannot be started by its Ray actor: {_first_line(exc)}") from exc
        self.control, self._end = socket.socketpair()
        (out, self._out), (err, self._err) = os.pipe(), os.pipe()
        self.pipes: Sequence[int] = (out, err)
        self._code = -int(signal.SIGKILL)
        self._thread = threading.Thread(target=self._follow, name=f"Ray actor of {task}", daemon=True)
        self._thread.start()

    def send(self, number: int) -> None:
        self._actor.send.remote(int(number))

    def is_gone(self) -> bool:
        try:
            return not self.control.recv(1)
        except BlockingIOError:
            return False

    def end(self) -> tuple[int, float | None]:
        self._thread.join(_GONE_S)
        return self._code, None

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)
        self._thread.join(_GONE_S)

    def close(self) -> None:
        self._ray.kill(self._actor, no_restart=True)
        self.control.close()
        for pipe in self.pipes:
            os.close(pipe)

    def _follow(self) -> None:
        """Passes on the output until the process or its actor is gone."""
        try:
            code = None
            while code is None:
                out, err, code = self._ray.get(self._actor.read.remote(), timeout=_ANSWER_S)
                _write(self._out, out)
                _write(self._err, err)
            self._code = int(code)
        except self._ray.exceptions.RayError as exc:
            self._ray.kill(self._actor, no_restart=True)  # one that only does not answer
            with contextlib.suppress(BrokenPipeError):  # as below
                _write(self._err, f"jdist: the Ray actor of {self._task} is gone: {_first_line(exc)}\n".encode())
        except BrokenPipeError:  # the launcher has abandoned it
            pass
        finally:
            os.close(self._out)
            os.close(self._err)
            self._end.close()


class Place:
    """A process on a node of Ray, for the actor there; gone with this object's process, as its guard kills it."""

    # A thread may `send` while another waits in `read`.
    _guard: GuardPipe

    def address(self) -> str:
        """Finds an address by which other nodes reach this one, with a port that is free, as is the next."""
        return join(importlib.import_module("ray").util.get_node_ip_address(), free_ports(1)[0])

    def start(self, line: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        """Starts the process in `folder`, if that exists."""
        # The launcher's `sys.executable` comes as "", and becomes this node's. `variables` are
        # added to this node's environment, without variables of another cluster.
        environ = {name: value for name, value in os.environ.items() if name not in OF_CLUSTER} | dict(variables)
        if not os.path.isdir(environ.get(RECORD_FOLDER, "")):
            environ.pop(RECORD_FOLDER, None)  # it is on the launcher's machine alone
        line = [part or sys.executable for part in line]
        self._guard = GuardPipe(line, environ, folder=folder if os.path.isdir(folder) else None)
        self._guard.control.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._guard.control, selectors.EVENT_READ, None)
        for number, pipe in enumerate(self._guard.pipes):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, number)

    def send(self, number: int) -> None:
        """Sends a signal to the process, through its guard."""
        self._guard.send(number)

    def read(self) -> tuple[bytes, bytes, int | None]:
        """Waits a moment for output; returns stdout, stderr, and the exit code or None."""
        output, code, is_gone = [b"", b""], None, False
        for key, _ in self._selector.select(_READ_S):
            if key.data is None:
                is_gone = self._guard.is_gone()
            else:
                output[key.data] += self._take(key.fd)
        if is_gone:
            code, _ = self._guard.end()
            self._selector.unregister(self._guard.control)
            for key in list(self._selector.get_map().values()):
                while data := self._take(key.fd):
                    output[key.data] += data
            self._selector.close()
            self._guard.close()
        return output[0], output[1], code

    def _take(self, pipe: int) -> bytes:
        try:
            data = os.read(pipe, CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            self._selector.unregister(pipe)
        return data


def _first_line(exc: BaseException) -> str:
    """The first line of an error of Ray, which has many."""
    return next((line.strip().rstrip(".:") for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]
