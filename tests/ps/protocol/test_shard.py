"""The shard's state machine: what each message does in each state."""

import dataclasses

import pytest

from jdist.ps.protocol.messages import (
    Apply,
    Commit,
    Cut,
    Done,
    Drop,
    Fence,
    Forget,
    Held,
    Parameters,
    Pull,
    Push,
    Refused,
    Replace,
    Reply,
    Restore,
    Snapshot,
)
from jdist.ps.protocol.shard import Rules, Shard, receive


def restored(**rules):
    shard, _ = receive(Shard(rules=Rules(**rules)), Restore(generation=1))
    return shard


def push(closure, base=0, *, worker=0, epoch=1, result=None, finite=True, **more):
    return Push(
        generation=1,
        worker=worker,
        epoch=epoch,
        closure=closure,
        base=base,
        gradients=f"g{closure}.{worker}.{epoch}",
        result=result,
        finite=finite,
        **more,
    )


def stage(closure, base=0, **more):
    return push(closure, base, stage=True, **more)


def coordinator(cls, *, generation=1, **fields):
    return cls(generation=generation, **fields)


def run(shard, *messages):
    """The shard after messages, all commands, and the last answer."""
    commands = []
    for message in messages:
        shard, more = receive(shard, message)
        commands += more
    replies = [command.answer for command in commands if isinstance(command, Reply)]
    return shard, commands, replies[-1] if replies else None


def refused(answer):
    assert isinstance(answer, Refused), answer
    return answer.reason


def applied(commands):
    return [c.gradients for c in commands if isinstance(c, Apply)]


def test_an_empty_shard_takes_nothing_but_a_restore():
    for message in (push(0), coordinator(Pull), coordinator(Fence, fenced=0, below=2)):
        shard, commands, answer = run(Shard(), message)
        assert (shard, refused(answer)) == (Shard(), "empty")
    shard, commands, answer = run(Shard(), coordinator(Restore, version=7))
    assert commands == [Replace(version=7), Reply(call=None, answer=Done(version=7))]


def test_a_push_is_applied_at_once_and_only_once():
    shard, commands, answer = run(restored(), push(0), push(0))
    assert applied(commands) == [(("g0.0.1", 1.0),)]
    assert (shard.version, answer) == (1, Done(version=1))
    assert [c.ref for c in commands if isinstance(c, Forget)] == [
        "g0.0.1",
        "g0.0.1",
    ]  # of each push the arrays it brought


def test_a_stage_changes_nothing_until_its_commit():
    shard, commands, _ = run(restored(), stage(0), stage(0))
    assert (shard.version, applied(commands)) == (0, [])
    shard, commands, answer = run(shard, coordinator(Commit, closures=(0,)), coordinator(Commit, closures=(0,)))
    assert (shard.version, applied(commands), answer) == (1, [(("g0.0.1", 1.0),)], Done(version=1))


def test_a_commit_of_what_was_never_staged_is_refused_and_changes_nothing():
    before = run(restored(), stage(0))[0]
    shard, commands, answer = run(before, coordinator(Commit, closures=(0, 1)))
    assert (shard, refused(answer), applied(commands)) == (before, "unknown", [])


def test_what_is_settled_is_forgotten_and_acknowledged():
    shard = run(restored(), push(0, result="r0"), push(1, 1))[0]
    shard, commands, _ = run(shard, coordinator(Pull, settled=1))
    assert (set(shard.applied), [c.ref for c in commands if isinstance(c, Forget)]) == ({1}, ["r0"])
    for message in (push(0), stage(0), coordinator(Commit, closures=(0,))):
        assert run(shard, message)[2] == Done(version=2)


def test_a_drop_makes_a_closure_free_for_another_worker():
    shard = run(restored(), stage(0))[0]
    assert refused(run(shard, stage(0, worker=1))[2]) == "staged"
    shard, commands, _ = run(shard, coordinator(Drop, closures=(0, 5), of=0, below=2))
    assert [c.ref for c in commands if isinstance(c, Forget)] == ["g0.0.1"]
    shard, commands, _ = run(shard, stage(0, worker=1), coordinator(Commit, closures=(0,)))
    assert applied(commands) == [(("g0.1.1", 1.0),)]


def test_a_drop_that_comes_late_leaves_what_others_and_later_epochs_staged():
    shard = run(restored(), push(0), stage(1, 1, epoch=2), stage(2, 1, worker=1))[0]
    after, commands, answer = run(shard, coordinator(Drop, closures=(0, 1, 2), of=0, below=2))
    assert (after, answer, commands[:-1]) == (shard, Done(version=1), [])


def test_a_later_attempt_takes_the_place_of_an_earlier_one():
    shard = run(restored(), stage(0))[0]
    again = dataclasses.replace(stage(0), attempt=1, gradients="again")
    shard, commands, _ = run(shard, again)
    assert commands[0] == Forget(ref="g0.0.1")
    assert refused(run(shard, stage(0))[2]) == "staged"  # the first, delivered late
    assert applied(run(shard, coordinator(Commit, closures=(0,)))[1]) == [(("again", 1.0),)]


def test_a_fenced_worker_changes_nothing_any_more():
    before = run(restored(), stage(0, result="r0"), push(1, 0, worker=1), push(2, 1, result="r2"))[0]
    shard, _, held = run(before, coordinator(Fence, fenced=0, below=2))
    assert held == Held(version=2, staged=frozenset({(0, 0)}), applied=frozenset({2}), results=((0, "r0"), (2, "r2")))
    for message in (
        push(3),
        stage(3),
        Commit(generation=1, worker=0, epoch=1, closures=(0,)),
        Pull(generation=1, worker=0, epoch=1),
    ):
        after, commands, answer = run(shard, message)
        assert (after, refused(answer), applied(commands)) == (shard, "fenced", [])
    assert isinstance(run(shard, push(3, 2, epoch=2))[2], Done)
    assert isinstance(run(shard, push(3, 2, worker=1))[2], Done)
    assert run(shard, coordinator(Fence, fenced=0, below=1))[0].fences == {0: 2}


def test_another_generation_is_refused_and_its_arrays_are_forgotten():
    shard, _, _ = run(restored(), coordinator(Restore, generation=3, version=5))
    for generation in (1, 4):
        message = dataclasses.replace(push(0), generation=generation)
        after, commands, answer = run(shard, message)
        assert (after, refused(answer), answer.generation) == (shard, "generation", 3)
        assert commands[0] == Forget(ref="g0.0.1")
    assert refused(run(shard, coordinator(Restore, generation=3))[2]) == "generation"


def test_a_restore_forgets_everything_and_answers_those_who_wait():
    before = run(restored(), stage(0, result="r"), coordinator(Snapshot, phase="freeze"), push(1, call="waits"))[0]
    shard, commands, _ = run(before, coordinator(Restore, generation=2, version=9, applied=frozenset({4}), settled=3))
    assert (shard.version, set(shard.applied), shard.staged, shard.frozen, shard.waiting) == (9, {4}, {}, 0, ())
    assert commands[1] == Reply(call="waits", answer=Refused(reason="generation", generation=2))
    assert {c.ref for c in commands if isinstance(c, Forget)} == {"g0.0.1", "r", "g1.0.1"}
    again = dataclasses.replace(push(4), generation=2)
    assert run(shard, again)[2] == Done(version=9)


def test_pulls_say_whether_anything_changed():
    shard = run(restored(), push(0))[0]
    assert run(shard, coordinator(Pull))[2] == Parameters(version=1, changed=True)
    assert run(shard, coordinator(Pull, known=0))[2] == Parameters(version=1, changed=True)
    assert run(shard, coordinator(Pull, known=1))[2] == Parameters(version=1, changed=False)


class TestStaleness:
    def test_beyond_the_bound_it_is_refused(self):
        assert run(restored(), push(0), push(1), push(2))[0].version == 3  # without a bound
        shard = run(restored(max_staleness=1), push(0), push(1, 0))[0]
        after, commands, answer = run(shard, push(2, 0))
        assert (refused(answer), after.version) == ("stale", 2)
        assert commands[0] == Forget(ref="g2.0.1")
        assert isinstance(run(after, push(2, 1))[2], Done)

    def test_or_counts_less(self):
        _, commands, _ = run(restored(max_staleness=0, on_stale="down_weight"), push(0), push(1, 0), push(2, 0))
        assert [gradients[0][1] for gradients in applied(commands)] == [1.0, 1 / 2, 1 / 3]

    def test_it_is_counted_from_admission_not_from_commit(self):
        shard = run(restored(max_staleness=0), stage(0), stage(1))[0]
        assert run(shard, coordinator(Commit, closures=(0, 1)))[0].version == 2

    def test_a_version_that_is_still_to_come_is_refused(self):
        assert refused(run(restored(), push(0, 1))[2]) == "stale"


class TestNonFinite:
    def test_raise_refuses(self):
        shard, _, answer = run(restored(), push(0, finite=False))
        assert (refused(answer), shard.version, shard.applied) == ("non_finite", 0, {})

    def test_skip_changes_nothing_and_is_done(self):
        shard, commands, _ = run(restored(non_finite="skip"), push(0, finite=False), stage(1, finite=False))
        shard, more, _ = run(shard, coordinator(Commit, closures=(1,)))
        assert (applied(commands + more), shard.version, set(shard.applied)) == ([], 0, {0, 1})

    def test_apply_applies(self):
        assert run(restored(non_finite="apply"), push(0, finite=False))[0].version == 1


class TestFrozen:
    def test_pushes_wait_and_commits_do_not(self):
        shard = run(restored(), stage(0), coordinator(Snapshot, phase="freeze"))[0]
        shard, commands, answer = run(shard, push(1, call="a"), stage(2, call="b"))
        assert (commands, answer) == ([], None)
        shard, _, answer = run(shard, coordinator(Commit, closures=(0,)))
        assert answer == Done(version=1)
        assert run(shard, coordinator(Snapshot, phase="keep"))[2] == Cut(version=1, applied=frozenset({0}), settled=0)
        shard, commands, _ = run(shard, coordinator(Snapshot, phase="thaw"))
        assert [c.call for c in commands if isinstance(c, Reply)] == [None, "a", "b"]
        assert (shard.version, set(shard.staged), shard.waiting) == (2, {2}, ())

    def test_a_freeze_or_thaw_that_comes_late_changes_nothing(self):
        def freeze(n):
            return coordinator(Snapshot, phase="freeze", number=n)

        def thaw(n):
            return coordinator(Snapshot, phase="thaw", number=n)

        shard, _, answer = run(restored(), freeze(1), thaw(1), freeze(1))
        assert (shard.frozen, answer) == (0, Done(version=0))
        shard, commands, _ = run(shard, freeze(2), push(0, call="a"), thaw(1), freeze(1))
        assert (shard.frozen, len(shard.waiting), applied(commands)) == (2, 1, [])
        assert not run(shard, thaw(2))[0].waiting

    @pytest.mark.parametrize("frozen", [[], [3], [2, 3]])
    def test_a_snapshot_needs_a_freeze_of_its_number(self, frozen):
        before = [coordinator(Snapshot, phase="freeze", number=n) for n in frozen]
        assert refused(run(restored(), *before, coordinator(Snapshot, phase="keep", number=2))[2]) == "unknown"

    def test_a_worker_that_is_fenced_does_not_wait_any_more(self):
        frozen = run(restored(), coordinator(Snapshot, phase="freeze"))[0]
        shard = run(frozen, push(0, call="a"), push(1, worker=1, call="b"))[0]
        shard, commands, _ = run(shard, coordinator(Fence, fenced=0, below=2))
        assert commands[1] == Reply(call="a", answer=Refused(reason="fenced", generation=1))
        assert [m.closure for m in shard.waiting] == [1]


class TestRound:
    def test_is_one_update_by_the_mean(self):
        shard = run(restored(), stage(0), stage(1, worker=1))[0]
        shard, commands, answer = run(shard, *[coordinator(Commit, closures=(0, 1), as_one=True)] * 2)
        assert applied(commands) == [(("g0.0.1", 1.0), ("g1.1.1", 1.0))]
        assert (shard.version, answer) == (1, Done(version=1))

    def test_a_drop_that_comes_late_leaves_what_was_computed_again_from_the_new_version(self):
        drop = coordinator(Drop, closures=(1,), of=None, below=1)
        shard = run(restored(), stage(0), stage(1, worker=1), coordinator(Commit, closures=(0,), as_one=True))[0]
        shard, _, _ = run(shard, drop)
        assert shard.staged == {}
        shard, commands, answer = run(shard, stage(1, 1), drop)
        assert (set(shard.staged), answer, commands[-2:-1]) == (
            {1},
            Done(version=1),
            [Reply(call=None, answer=Done(version=1))],
        )

    def test_never_in_parts(self):
        shard = run(restored(), stage(0), stage(1), coordinator(Commit, closures=(0,)))[0]
        assert refused(run(shard, coordinator(Commit, closures=(0, 1), as_one=True))[2]) == "unknown"


@pytest.mark.parametrize(
    "message",
    [push(0), stage(0), Commit(generation=1, closures=(0,)), Drop(generation=1, closures=(1,), of=0, below=2)],
)
def test_the_old_state_is_left_as_it_was(message):
    shard = run(restored(), stage(0) if isinstance(message, Commit) else stage(1))[0]
    copy = dataclasses.replace(shard, staged=dict(shard.staged), applied=dict(shard.applied), fences=dict(shard.fences))
    receive(shard, message)
    assert shard == copy
