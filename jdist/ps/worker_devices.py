"""How many devices each worker has."""

from __future__ import annotations

import time

from jdist.errors import ClusterError, StrategyError
from jdist.ps.options import Servers
from jdist.ps.times import Times
from jdist.ps.transport.seam import CallFailed


def devices_of_workers(servers: Servers, times: Times) -> int:
    """Asks the workers; all have as many.

    Raises:
        StrategyError: they have different numbers of devices.
        ClusterError: a worker does not answer.
    """
    found = {address: _devices_of(address, servers, times) for address in servers.workers}
    if len(set(found.values())) > 1:
        raise StrategyError(
            f"the workers have different numbers of devices, {found}; a step is made for one number. Give each as many, "
            "for example by CUDA_VISIBLE_DEVICES."
        )
    return next(iter(found.values()))


def _devices_of(address: str, servers: Servers, times: Times) -> int:
    channel, end = servers.connect(address), time.monotonic() + times.ps_timeout_s
    try:
        while True:
            try:
                header, _ = channel.call("status", {}, timeout_s=times.lost_after_s)
                return header["devices"]
            except CallFailed as exc:
                if exc.reason == "unauthenticated" or time.monotonic() > end:
                    raise ClusterError(f"the worker {address} does not answer: {exc}") from exc
                time.sleep(times.reconnect_s)
    finally:
        channel.close()
