"""The coordinator's machine: closures that a worker declines, and closures that are cancelled."""

from jdist.ps.protocol.scheduler import Dispatch, handle
from jdist.ps.protocol.scheduler_events import (
    Assign,
    Cancelled,
    Finish,
    Lost,
    Registered,
    Reported,
    Rerun,
    Rollback,
    Scheduled,
)


class Machine:
    """Workers that do as they are told, without shards."""

    def __init__(self, *, workers, closures, depth=1):
        self.dispatch, self.commands = Dispatch(num_shards=0, depth=depth), []
        for worker in range(workers):
            self.tell(Registered(worker=worker))
        self.tell(Scheduled(count=closures))

    def tell(self, event):
        self.dispatch, commands = handle(self.dispatch, event)
        self.commands += commands
        return commands

    def report(self, worker, closure, outcome="done"):
        known = self.dispatch.workers[worker]
        return self.tell(
            Reported(
                worker=worker,
                epoch=known.epoch,
                generation=self.dispatch.generation,
                closure=closure,
                outcome=outcome,
            )
        )

    def has(self):
        return {w: known.closures for w, known in self.dispatch.workers.items()}


def test_what_a_worker_declines_goes_to_another_and_the_worker_goes_on():
    machine = Machine(workers=2, closures=4)
    assert machine.has() == {0: (0,), 1: (1,)}
    machine.report(0, 0, "declined")
    assert machine.has() == {0: (2,), 1: (1,)}
    machine.report(1, 1)
    assert machine.has() == {0: (2,), 1: (0,)}
    machine.report(1, 0)
    assert machine.has() == {0: (2,), 1: (3,)}
    machine.report(0, 2)
    machine.report(1, 3)
    assert machine.dispatch.is_idle


def test_what_was_declined_is_asked_again_when_a_worker_comes_or_goes():
    machine = Machine(workers=2, closures=2)
    machine.report(1, 1, "declined")
    assert machine.has() == {0: (0,), 1: ()}
    machine.report(0, 0, "declined")
    assert machine.has() == {0: (1,), 1: (0,)}
    machine.report(0, 1, "declined")  # both have declined it: it is for somebody who is not there
    machine.report(1, 0)
    assert machine.has() == {0: (), 1: ()}
    machine.tell(Lost(worker=0, epoch=1))
    assert machine.has() == {0: (), 1: (1,)}
    machine.report(1, 1, "declined")
    assert machine.has()[1] == ()
    machine.tell(Registered(worker=0))
    assert machine.has() == {0: (1,), 1: ()}


def test_what_was_declined_is_asked_again_when_a_worker_turns_out_not_to_be_there():
    machine = Machine(workers=1, closures=1)
    machine.report(0, 0, "declined")
    assert machine.has() == {0: ()}
    machine.tell(Lost(worker=1, epoch=0))
    assert (machine.has(), machine.dispatch.workers[1].state) == ({0: (0,), 1: ()}, "absent")
    machine.report(0, 0, "declined")
    machine.tell(Lost(worker=1, epoch=0))  # as before: nothing has changed
    assert machine.has()[0] == ()


def test_closures_are_cancelled_one_by_one():
    machine = Machine(workers=1, closures=6)
    assert machine.tell(Cancelled(only=frozenset({0, 2, 3}))) == [
        Finish(closure=2, outcome="void"),
        Finish(closure=3, outcome="void"),
    ]
    assert [machine.dispatch.is_waiting(c) for c in range(7)] == [False, True, False, False, True, True, False]
    assert machine.tell(Cancelled(only=frozenset({2}))) == []
    for closure in (0, 1, 4):
        assert machine.has() == {0: (closure,)}
        machine.report(0, closure)
    assert machine.dispatch.settled == 5
    machine.tell(Scheduled(count=1))
    assert machine.tell(Cancelled()) == [Finish(closure=6, outcome="void")]
    machine.report(0, 5)
    assert machine.dispatch.is_idle


def test_all_that_waits_may_be_cancelled_before_anything_was_handed_out():
    machine = Machine(workers=0, closures=2)
    machine.tell(Cancelled(only=frozenset({0})))
    machine.tell(Cancelled(only=frozenset({1})))
    assert machine.dispatch.is_idle
    machine.tell(Registered(worker=0))
    machine.tell(Scheduled(count=1))
    assert machine.has() == {0: (2,)}


def test_after_a_rollback_a_cancelled_closure_stays_cancelled():
    machine = Machine(workers=1, closures=4)
    machine.tell(Cancelled(only=frozenset({1, 3})))
    machine.report(0, 0)
    assert machine.has() == {0: (2,)}
    assert machine.tell(Rollback(settled=0, applied=frozenset({1, 3})))[0] == Rerun(count=1)
    machine.report(0, 0)
    machine.report(0, 2)
    assert machine.dispatch.is_idle
    assert not any(isinstance(c, Assign) and {1, 3} & {*c.closures} for c in machine.commands)


def test_a_closure_that_a_lost_worker_had_can_be_cancelled():
    machine = Machine(workers=1, closures=2)
    machine.tell(Lost(worker=0, epoch=1))
    assert machine.dispatch.returned == (0,)
    assert machine.tell(Cancelled(only=frozenset({0}))) == [Finish(closure=0, outcome="void")]
    machine.tell(Registered(worker=0))
    assert machine.has() == {0: (1,)}
