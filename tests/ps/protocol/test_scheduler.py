"""The coordinator's machine: closures that a worker declines, closures that are cancelled, and rounds."""

from jdist.ps.protocol.messages import Commit, Done, Drop, Fence, Held
from jdist.ps.protocol.scheduler import Dispatch, handle
from jdist.ps.protocol.scheduler_events import (
    Answered,
    Assign,
    Cancelled,
    Decide,
    Decided,
    Finish,
    Lost,
    Registered,
    Reported,
    Rerun,
    Rollback,
    Scheduled,
    Tell,
)
from jdist.ps.protocol.sync_rounds import Rounds


class Machine:
    """Workers that do as they are told, with or without shards."""

    def __init__(self, *, workers, closures, depth=1, shards=0, rounds=None):
        self.dispatch, self.commands = Dispatch(num_shards=shards, depth=depth, rounds=rounds), []
        for worker in range(workers):
            self.tell(Registered(worker=worker))
        self.tell(Scheduled(count=closures))

    def tell(self, event):
        self.dispatch, commands = handle(self.dispatch, event)
        self.commands += commands
        return commands

    def report(self, worker, closure, outcome="done"):
        sender = {"worker": worker, "epoch": self.dispatch.workers[worker].epoch}
        return self.tell(Reported(**sender, generation=self.dispatch.generation, closure=closure, outcome=outcome))

    def answer(self, message, answer):
        """All shards answer; the commands."""
        shards = range(self.dispatch.num_shards)
        return [c for s in shards for c in self.tell(Answered(shard=s, message=message, answer=answer))]

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


def of_a_round(*, workers=2, spare=0):
    return Machine(workers=workers, closures=4, shards=2, rounds=Rounds(size=2, spare=spare))


def told(commands):
    """The message that all shards are told."""
    (message,) = {c.message for c in commands if isinstance(c, Tell)}
    return message


def test_a_round_is_committed_once_all_of_it_is_staged_and_the_next_begins_after_it():
    machine = of_a_round()
    assert machine.has() == {0: (0,), 1: (1,)}
    assert machine.report(0, 0, "staged") == []  # the other half of the round is still computed
    assert machine.report(1, 1, "staged") == [Decide(closures=(0, 1))]
    message = told(machine.tell(Decided(closures=(0, 1), commit=True)))
    assert (type(message), message.closures, message.as_one) == (Commit, (0, 1), True)
    machine.answer(message, Done(version=1))
    assert machine.has() == {0: (2,), 1: (3,)}
    assert (machine.dispatch.settled, machine.dispatch.rounds.version) == (2, 1)


def test_a_round_that_is_decided_against_is_dropped_and_counts_as_done():
    machine = of_a_round()
    for worker in (0, 1):
        machine.report(worker, worker, "staged")
    message = told(machine.tell(Decided(closures=(0, 1), commit=False)))
    assert isinstance(message, Drop)
    machine.answer(message, Done(version=0))
    assert (machine.dispatch.settled, machine.dispatch.rounds.version) == (2, 0)


def test_a_worker_lost_in_a_round_costs_only_what_it_had_not_reported():
    machine = of_a_round()
    machine.report(0, 0, "staged")
    fence = told(machine.tell(Lost(worker=1, epoch=1)))
    assert isinstance(fence, Fence)
    held = Held(version=0, staged=frozenset({(1, 0)}), applied=frozenset())
    machine.answer(told(machine.answer(fence, held)), Done(version=0))
    assert machine.has()[0] == (1,)
    assert machine.report(0, 1, "staged") == [Decide(closures=(0, 1))]


def test_with_spare_workers_what_comes_last_is_forgotten_and_computed_again():
    machine = of_a_round(workers=3, spare=1)
    assert [*machine.report(0, 0, "staged"), *machine.report(1, 1, "staged")] == [Decide(closures=(0, 1))]
    machine.report(2, 2, "staged")
    commit = told(machine.tell(Decided(closures=(0, 1), commit=True)))
    drop = told(machine.answer(commit, Done(version=1)))
    assert (type(drop), drop.closures) == (Drop, (2,))
    machine.answer(drop, Done(version=1))
    again = {closure: worker for worker, closures in machine.has().items() for closure in closures}
    assert set(again) == {2, 3}
    # Staged from old parameters, and reported after the commit: forgotten, too.
    assert isinstance(told(machine.report(again[2], 2, "staged")), Drop)
