"""A worker's connection: how loudly a failed one is told of. What it does, test_ps_coordinator.py shows."""

import logging
import threading
import types

from jdist.ps.link import Times, WorkerLink
from jdist.ps.transport.seam import CallFailed


def test_another_token_is_a_warning_once_and_a_loss_is_none():
    link = WorkerLink(0, connect=None, hub=types.SimpleNamespace(mutex=threading.RLock()), times=Times())  # type: ignore[arg-type]  # it is not started
    reasons = ["unavailable", "unauthenticated", "unauthenticated", "unavailable", "unauthenticated"]
    levels = [link._level(CallFailed("w:1", reason)) for reason in reasons]
    assert levels == [logging.INFO, logging.WARNING, logging.INFO, logging.INFO, logging.WARNING]
