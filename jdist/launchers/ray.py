"""`ray`: the launcher with a job's processes in actors of a Ray cluster."""

from __future__ import annotations

import importlib
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdist.errors import LaunchError
from jdist.launcher.console import Console
from jdist.launcher.exit_cause import Task
from jdist.launcher.launch import make_log_dir
from jdist.launcher.loop import Launched, Launcher
from jdist.launcher.options import (
    check_cpu_devices,
    check_positive,
    command_line,
    make_settings,
)
from jdist.launcher.output import Controlled, LogFile
from jdist.launchers.actor import ANSWER_S, ActorProcess, first_line
from jdist.launchers.place import Place
from jdist.support.checks import as_real

# Of the launcher's environment processes get what concerns the job; the rest is their node's.
_SENT = ("JDIST_", "JAX_", "XLA_")
_POLL_S = 0.5


def ray(
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
    """Runs a command in several Ray actors, whose processes find each other by TF_CONFIG; none is left when it returns.

    It is `jdist launch` with the processes elsewhere: their output comes to the terminal and the logs here, a process or an
    actor that is lost is named, all are ended, and with restarts left all are started again, in new actors. The actors of an
    attempt are one placement group: all are there or none.

    Args:
        command: a config (.yaml) and overrides, a script (.py) and arguments, `-m` and a module, or a program; on each node as
            here, or brought there by `runtime_env`.
        processes: how many; with "MIN:MAX" or (MIN, MAX) as for `jdist.cluster.launch`.
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
        grace_s: as for `jdist.cluster.launch`.
        stop_timeout_s: likewise.
        regrow_s: likewise.

    Returns:
        The exit code, the attempts and the folder of the logs.

    Raises:
        LaunchError: an argument is not allowed, Ray is not installed, or its cluster cannot be reached.

    Example:
        `jdist.launchers.ray(["train.py"], processes=4, num_gpus=1, max_restarts=3)`
    """
    settings = make_settings(
        processes, max_restarts=max_restarts, grace_s=grace_s, stop_timeout_s=stop_timeout_s, regrow_s=regrow_s
    )
    check_positive("start_timeout_s", start_timeout_s)
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
            raise LaunchError(f"ray: address={address!r}: {first_line(exc)}. Start one by `ray start --head`.") from exc
    host = _RayHost(
        module,
        bundle=bundle,
        runtime_env=runtime_env,
        start_timeout_s=start_timeout_s,
    )
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
        raise LaunchError(f'resources={resources!r:.80} is no dict: give amounts by name, such as {{"TPU": 4}}.')
    if both := {"CPU", "GPU"} & set(resources or {}):
        raise LaunchError(f"resources has {', '.join(sorted(both))}: give that as num_cpus or num_gpus.")
    named = {"num_cpus": ("CPU", num_cpus), "num_gpus": ("GPU", num_gpus)}
    named |= {f"resources[{name!r}]": (name, amount) for name, amount in (resources or {}).items()}
    bundle: dict[str, float] = {}
    for argument, (name, amount) in named.items():
        number = as_real(amount)
        if number is None or not 0 <= number < math.inf:
            raise LaunchError(f"{argument}={amount!r:.80} is not an amount: give a number from 0 on.")
        if name == "GPU" and number > 1 and number != int(number):
            raise LaunchError(f"{argument}={amount!r:.80} is not to be had: give a part of one GPU, or whole ones.")
        if number:
            bundle[name] = number
    if not bundle:
        raise LaunchError("a process takes nothing of the Ray cluster: give num_cpus, num_gpus or resources above 0.")
    return bundle


class _RayHost:
    """The actors of an attempt, in a placement group."""

    def __init__(
        self,
        ray: Any,
        *,
        bundle: Mapping[str, float],
        runtime_env: Mapping[str, Any] | None,
        start_timeout_s: float,
    ):
        self._ray = ray
        self._bundle = bundle
        self._runtime_env = runtime_env
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
            raise OSError(
                f"the Ray cluster has found no room for {each} in "
                f"{self._start_timeout_s:g} s; it has {_amounts(ray.cluster_resources())} in all, and "
                f"{_amounts(ray.available_resources())} free"
            )
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        others = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        for number, task in enumerate(tasks):
            self._actors[task] = (
                ray.remote(_ActorPlace)
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
            return ray.get(addresses, timeout=ANSWER_S)
        except ray.exceptions.RayError as exc:
            raise OSError(f"an actor does not start: {first_line(exc)}") from exc

    def spawn(
        self,
        task: Task,
        line: Sequence[str],
        environ: Mapping[str, str],
        *,
        log: LogFile,
        prefixes: tuple[bytes, bytes],
        console: Console,
    ) -> Controlled:
        """Starts a process in its actor."""
        variables = {
            name: value
            for name, value in environ.items()
            if os.environ.get(name) != value or name.startswith(_SENT) or name == "PYTHONUNBUFFERED"
        }
        return ActorProcess(
            self._ray,
            self._actors[task],
            task,
            ["" if part == sys.executable else part for part in line],
            variables,
            os.getcwd(),
            log=log,
            prefixes=prefixes,
            console=console,
        )

    def close(self) -> None:
        """Ends all actors, and gives their room back."""
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None


class _ActorPlace(Place):
    """A place at the address by which Ray's other nodes reach this one."""

    def __init__(self) -> None:
        super().__init__(importlib.import_module("ray").util.get_node_ip_address())


def _amounts(resources: Mapping[str, float]) -> str:
    named = {name: amount for name, amount in resources.items() if ":" not in name and "memory" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(named.items())) or "nothing"
