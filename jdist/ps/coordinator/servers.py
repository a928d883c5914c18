"""Connects to the servers of a cluster: finds and authenticates them, waits until they answer, and ends them."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence

from jdist.cluster import exit_status
from jdist.cluster.address import split
from jdist.cluster.resolvers.resolve import resolve
from jdist.cluster.spec import ClusterSpec
from jdist.errors import ClusterError, ClusterTimeoutError, StrategyError
from jdist.ps.protocol.times import Times
from jdist.ps.transport.diagnose import Diagnosis, reach_all
from jdist.ps.transport.grpc_transport import RpcChannel
from jdist.ps.transport.interface import CallFailed, Channel, ask_once, ask_until_one_answers
from jdist.ps.transport.security import Security, how_to_protect, open_to_others, read_security

_CALL_S = 5.0
_RETRY_S = 0.5
_TELLING_S = 10.0  # machines that are gone do not answer, and may be many
_QUIET_S = 5.0  # who waits longer for the servers says so, and is content with one worker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Servers:
    """The processes that a session uses."""

    workers: tuple[str, ...]
    ps: tuple[str, ...]
    connect: Callable[[str], Channel]  # from an address to a channel
    close: Callable[[], None]  # ends everything that was started for the job
    # makes `close` spare the other processes: they belong to another job
    leave: Callable[[], None] = lambda: None
    # present process ids of the started servers, then workers: one that has ended is started again
    processes: Callable[[], tuple[int, ...]] = tuple
    # process ids of the started workers that have not ended
    running_workers: Callable[[], tuple[int, ...]] = tuple


def cluster_of_environment() -> ClusterSpec | None:
    """Returns the cluster that the environment describes; None for a single process."""
    spec = resolve(os.environ)
    alone = spec.num_processes <= 1 and spec.num_ps == 0 and spec.task_type in ("chief", "worker")
    return None if alone else spec


def check_place(spec: ClusterSpec) -> None:
    """Refuses a cluster without workers or servers, or with another coordinator."""
    example = '{"chief": ["c:2222"], "worker": ["a:2222", "b:2222"], "ps": ["d:2222"]}'
    for job, name in (("worker", "workers"), ("ps", "parameter servers")):
        if not spec.jobs.get(job):
            raise StrategyError(
                f"the cluster (from {spec.resolver}) has no {name}: it has {', '.join(spec.jobs)}. A parameter server needs "
                f"all of them, as in {example}. For processes of this machine give `local_workers` and `local_ps`."
            )
    if spec.task_type in ("worker", "ps"):
        raise StrategyError(
            f"this process is {spec.task_type} {spec.task_index} of the cluster (from {spec.resolver}), which does not "
            "run your program: run `jdist serve` here, and the program as the chief."
        )
    unknown = [i for i, address in enumerate(spec.jobs["worker"]) if address is None]
    if unknown:
        raise StrategyError(f"the address of worker {unknown[0]} is not known; write it into the cluster.")


def connect_servers(spec: ClusterSpec, *, insecure: bool, keep: bool, start_timeout_s: float) -> Servers:
    """Returns a cluster's servers once every ps and one worker answer and trust each other."""
    # The other workers may come later: a restarted coordinator must not wait for a lost worker.
    # `insecure`: other machines may lack TLS and token. `keep`: the servers outlive this program.
    security = read_security(os.environ)
    workers, ps = (tuple(a for a in spec.jobs[job] if a is not None) for job in ("worker", "ps"))
    wrong = open_to_others((*workers, *ps), security)
    if wrong is not None and not insecure:
        raise StrategyError(
            f"{wrong} {how_to_protect(security)} In a network that is yours alone, say `insecure=True`."
        )
    if wrong is not None:
        _say(f"insecure: {wrong}")
    names = {address: f"{job} {i} ({address})" for job in ("worker", "ps") for i, address in enumerate(spec.jobs[job])}
    _wait(lambda: _look_for(workers, ps, security, names), start_timeout_s)
    # Connected before: at its exit Python starts no thread.
    channels = [RpcChannel(address, security=security) for address in (*workers, *ps)]

    end, leave = functools.partial(_end_servers, channels), functools.partial(_close, channels)
    if not keep:  # and the program will not be started again, when it would look for them
        atexit.register(lambda: end() if exit_status.is_finished() else leave())
    return Servers(
        workers=workers,
        ps=ps,
        connect=lambda address: RpcChannel(address, security=security),
        close=leave if keep else end,
        leave=leave,
    )


def _look_for(
    workers: Sequence[str], ps: Sequence[str], security: Security, names: dict[str | None, str]
) -> tuple[list[str], bool]:
    """Probes all servers, from here and each worker: `(lines on unreachable ones, can_begin)`."""
    everyone = [*ps, *workers]
    reached = dict(zip(everyone, reach_all(everyone, security, _CALL_S), strict=True))
    seen = [(names[a], trouble) for a, trouble in reached.items()]
    there = [worker for worker in workers if reached[worker] is None]
    usable = 0
    if all(reached[a] is None for a in ps):
        for worker in there:
            from_there = seen_from(worker, ps, security)
            usable += all(trouble is None for trouble in from_there)
            seen += [(f"{names[worker]} cannot reach {names[to]}", x) for to, x in zip(ps, from_there, strict=True)]
    lasting = [f"{who}: {trouble.text}" for who, trouble in seen if trouble is not None and trouble.lasts]
    if lasting:
        more = f" ({len(lasting) - 1} more)" if len(lasting) > 1 else ""
        raise ClusterError(f"{lasting[0]}.{more}")
    return [f"{who}: {trouble.text}" for who, trouble in seen if trouble is not None], usable > 0


def seen_from(worker: str, ps: Sequence[str], security: Security) -> list[Diagnosis | None]:
    """Has a worker try to reach all parameter servers."""
    answer = ask_once(RpcChannel(worker, security=security), "reach", {"addresses": list(ps)}, 4 * _CALL_S)
    if isinstance(answer, CallFailed):
        return [Diagnosis(f"asking it for that failed: {answer.reason}", lasts=False) for _ in ps]
    return [None if each is None else Diagnosis(str(each[0]), lasts=bool(each[1])) for each in answer["found"]]


def _wait(look: Callable[[], tuple[list[str], bool]], timeout_s: float) -> None:
    """Waits until nothing is missing, and after a while only until the job can begin; says for whom."""
    begin, has_told = time.monotonic(), False
    while True:
        lines, can_begin = look()
        waited_s = time.monotonic() - begin
        if not lines:
            return
        if can_begin and waited_s > min(_QUIET_S, timeout_s):
            return _say(f"beginning without some of the workers, which may come later: {'; '.join(lines[:4])}")
        if waited_s > timeout_s:
            raise ClusterTimeoutError(
                f"after {timeout_s:g} s the cluster has not all parameter servers and a worker. {'; '.join(lines[:4])}. Is "
                "`jdist serve` running as each of them?"
            )
        if waited_s > _QUIET_S and not has_told:
            has_told = True
            _say(f"waiting for the servers of the cluster: {'; '.join(lines[:4])}")
        time.sleep(min(_RETRY_S, timeout_s))


def _say(text: str) -> None:
    print(f"jdist: {text}", file=sys.stderr, flush=True)


def _has_ended(address: str) -> bool:
    """Returns whether a machine says that nothing listens there."""
    try:
        socket.create_connection(split(address), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # silent, or not to be found: nobody knows
        return False
    return False


def _end_servers(channels: list[RpcChannel]) -> None:
    """Tells servers that it is over, again and again; who has not heard is named, and ends after its grace period."""
    end, unheard = time.monotonic() + _TELLING_S, list(channels)
    while unheard and time.monotonic() < end:
        missed = []
        for channel in unheard:
            try:
                channel.call("end", {}, timeout_s=min(1.0, max(0.05, end - time.monotonic())))
            except CallFailed:
                if not _has_ended(channel.peer):
                    missed.append(channel)
        unheard = missed
        if unheard:
            time.sleep(_RETRY_S)
    if unheard:
        named = ", ".join(channel.peer for channel in unheard)
        _say(
            f"{named} did not hear that the job is over; each ends by itself after its `jdist serve --grace-s` without a "
            "call"
        )
    _close(channels)


def _close(channels: list[RpcChannel]) -> None:
    while channels:
        channels.pop().close()


def devices_of_workers(servers: Servers, times: Times) -> int:
    """Asks the workers for their number of devices; one answer is enough."""
    # The other workers may come later, with as many devices. One that refuses, too, may mend; another token does not.
    connects = [functools.partial(servers.connect, address) for address in servers.workers]
    final = ("unauthenticated",)
    answers = ask_until_one_answers(connects, times.lost_after_s, give_up_s=times.ps_timeout_s, final=final)
    failed = [answer for answer in answers if isinstance(answer, CallFailed)]
    if len(failed) == len(answers):
        exc = next((exc for exc in failed if exc.reason in final), failed[0])
        raise ClusterError(f"the worker {exc.peer} does not answer: {exc}") from exc
    by_address = zip(servers.workers, answers, strict=True)
    devices = {address: answer["devices"] for address, answer in by_address if isinstance(answer, dict)}
    if len(set(devices.values())) > 1:
        raise StrategyError(
            f"the workers have different numbers of devices, {devices}; a step is made for one number. Give each as many, "
            "for example by CUDA_VISIBLE_DEVICES."
        )
    return next(iter(devices.values()))
