"""Several processes as threads of one, for tests: their messages go through the real membership, without sockets."""

from __future__ import annotations

import functools
import json
import math
import threading

from jdist.cluster.watch import membership
from jdist.cluster.watch.exchanges import Exchanges
from jdist.cluster.watch.membership import Membership

DEADLINE_S = 30


class Network:
    """Exchanges of `count` processes.

    Attributes:
        state: what process 0 keeps.
        exchanges: each process's own.
    """

    def __init__(self, count):
        self.state, self._lock = (
            Membership(count=count, silence_s=math.inf, start_by_s=math.inf, awake_s=0.0),
            threading.Lock(),
        )
        for process in range(count):
            self.state, _ = membership.join(self.state, process, f"host{process}:1", 0.0)
        self.exchanges = [Exchanges(functools.partial(self.send, process)) for process in range(count)]

    def send(self, process, message):
        """A message of a process to process 0, and what follows from it."""
        with self._lock:
            self.state, outgoing = membership.receive(self.state, process, json.loads(json.dumps(message)), 0.0)
            for to, answer in outgoing:
                for exchanges in self.exchanges if to is None else [self.exchanges[to]]:
                    if answer["type"] in ("values", "void"):
                        exchanges.take(answer)

    def beat(self):
        """Every process tells what it has forgotten, as each does once in a while."""
        for exchanges in self.exchanges:
            exchanges.send_forgotten()


def run(count, program):
    """What `program(process)` gives in each of so many threads, or the exception that it raises."""
    results: list = [TimeoutError("it has not come to an end")] * count

    def one(process):
        try:
            results[process] = program(process)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[process] = error

    threads = [threading.Thread(target=one, args=(process,), daemon=True) for process in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return results
