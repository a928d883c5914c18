"""A worker's connection: how loudly a failed one is told of. What it does, test_coordinator.py shows."""

import logging
import threading
import types

import pytest

from jdist.errors import StrategyError
from jdist.ps.coordinator.servers import Servers, devices_of_workers
from jdist.ps.coordinator.worker_link import WorkerLink
from jdist.ps.protocol.times import Times
from jdist.ps.transport.interface import CallFailed, Method
from tests.ps.fake_transport import FakeChannel, FakeServer


@pytest.mark.parametrize("value", [0, -1.0, "1", True, float("nan"), None])
def test_times_are_numbers_above_0(value):
    with pytest.raises(StrategyError, match=r"jdist.ps.Times: `ping_s` is .*; it must be a finite number above 0"):
        Times(ping_s=value)


def test_a_worker_that_refuses_is_asked_again():
    reasons = ["refused", "exhausted"]

    def status(header, arrays):
        if reasons:
            raise CallFailed("w", reasons.pop(0))
        return {"devices": 2}, []

    server = FakeServer("w", {"status": Method(status)})
    servers = Servers(workers=("w",), ps=(), connect=lambda address: FakeChannel(server), close=lambda: None)
    assert devices_of_workers(servers, Times()) == 2


def test_another_token_is_a_warning_once_and_a_loss_is_none():
    queue = types.SimpleNamespace(mutex=threading.RLock(), times=Times())
    link = WorkerLink(0, None, queue, None)  # type: ignore[arg-type]  # it is not started
    reasons = ["unavailable", "unauthenticated", "unauthenticated", "unavailable", "unauthenticated"]
    levels = [link._level(CallFailed("w:1", reason)) for reason in reasons]
    assert levels == [logging.INFO, logging.WARNING, logging.INFO, logging.INFO, logging.WARNING]
