import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.launcher.events import Again, Asked, Fenced, JobEnded, Phase, Send, Settings, Start, Tick, World
from jdist.launcher.exit_cause import End, Task
from jdist.launcher.restarts import LONGEST_BACKOFF_S, Restarts, backoff_s
from jdist.launcher.supervisor import begin, step
from tests.launcher.launch_simulation import Child, simulate

TWO = Settings(smallest=2, largest=2, grace_s=10, stop_timeout_s=300, regrow_s=100)
FOUR = replace(TWO, smallest=1, largest=4, max_restarts=3)
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
EVALUATOR = Task("evaluator", 0)


def worker(index):
    return Task("worker", index)


def by_task(table, otherwise=Child(after_s=100)):  # noqa: B008  # a frozen value
    """Behaviour by (attempt, index), by index alone, or `otherwise`."""

    def child(attempt, task):
        key = task.index if task.type == "worker" else task.type
        return table.get((attempt, key), table.get(key, otherwise))

    return child


def test_all_that_end_well_end_the_launch_well():
    done = simulate(TWO, by_task({0: Child(after_s=5), 1: Child(after_s=90)}))
    assert (done.exit_code, done.sent, done.now) == (0, [], 90)
    assert done.attempts[0].outcome == "finished"


def test_others_may_end_by_themselves_after_a_failure():
    done = simulate(TWO, by_task({0: Child(after_s=5, code=-11), 1: Child(after_s=14, code=75)}))
    assert (done.exit_code, done.sent) == (128 + 11, [])
    assert done.attempts[0].guilty.task == worker(0)


def test_others_that_stay_are_asked_and_then_killed():
    done = simulate(TWO, by_task({0: Child(after_s=5, code=1), 1: Child(leaves=None)}))
    assert done.sent == [(15, worker(1), TERM), (25, worker(1), KILL)]
    assert done.exit_code == 1


def test_what_not_even_sigkill_ends_is_given_up_and_named():
    done = simulate(replace(TWO, max_restarts=3), by_task({0: Child(after_s=5, code=1), 1: Child(immortal=True)}))
    assert (done.exit_code, done.now, done.sizes) == (1, 35, [2])
    assert "process 1" in done.said[-1]


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_is_passed_on_once(number):
    done = simulate(TWO, by_task({}, Child(leaves=128 + number, leaves_after_s=200)), [(7, number)])
    assert sorted(done.sent) == [(7, worker(0), number), (7, worker(1), number)]
    assert (done.exit_code, done.attempts[0].outcome) == (128 + number, "stopped")


def test_a_second_signal_kills_at_once():
    done = simulate(TWO, by_task({}, Child(leaves_after_s=200)), [(7, INT), (9, INT)])
    assert (done.now, done.exit_code) == (9, 130)
    assert done.attempts[0].outcome == "stopped"


def test_the_same_signal_again_within_a_second_counts_once():
    done = simulate(TWO, by_task({}, Child(leaves=130, leaves_after_s=50)), [(7, INT), (7.4, INT), (8.2, INT)])
    assert sorted(done.sent) == [(7, worker(0), INT), (7, worker(1), INT)]
    assert (done.now, done.exit_code) == (57, 130)
    done = simulate(TWO, by_task({}, Child(leaves_after_s=200)), [(7, INT), (7.5, TERM)])
    assert done.now == 7.5


def test_a_stop_has_a_deadline():
    done = simulate(TWO, by_task({1: Child(leaves=None)}, Child(leaves=143)), [(7, TERM)])
    assert (done.now, done.exit_code) == (307, 137)
    assert done.attempts[0].guilty.task == worker(1)


def test_a_failed_save_while_stopping_is_a_failure():
    done = simulate(TWO, by_task({0: Child(leaves=1, leaves_after_s=5)}, Child(leaves=None)), [(7, TERM)])
    assert (done.exit_code, done.now) == (1, 7 + 5 + 10)
    assert [sent[2] for sent in done.sent] == [TERM, TERM, KILL]


def test_a_stop_that_comes_when_all_are_about_to_finish():
    assert simulate(TWO, by_task({}, Child(after_s=8, leaves=None)), [(7, TERM)]).exit_code == 0


def test_a_failure_that_a_restart_can_mend():
    done = simulate(replace(TWO, max_restarts=1), by_task({(0, 1): Child(after_s=50, code=-9), (0, 0): Child(50, 75)}))
    assert (done.exit_code, done.sizes) == (0, [2, 2])
    assert [attempt.outcome for attempt in done.attempts] == ["failed", "finished"]


@pytest.mark.parametrize("code", [2, 126, 127])
def test_a_failure_that_no_restart_can_mend(code):
    done = simulate(replace(TWO, max_restarts=3), by_task({0: Child(after_s=5, code=code)}))
    assert (done.exit_code, done.sizes) == (code, [2])


@pytest.mark.parametrize("code", [1, 3, 75, 130, 143, -9, -6, -15])
def test_restarts_are_used_up(code):
    done = simulate(replace(TWO, max_restarts=3), by_task({}, Child(after_s=5, code=code)))
    assert len(done.sizes) == 4
    assert done.exit_code == (code if code > 0 else 128 - code)


def test_processes_that_agreed_to_leave_get_the_time_to_save():
    done = simulate(TWO, by_task({0: Child(after_s=5, code=143), 1: Child(after_s=200, code=143)}))
    assert (done.sent, done.exit_code) == ([], 143)


def test_the_job_comes_back_after_a_preemption_of_one_process():
    first = {(0, 0): Child(after_s=5, code=143), (0, 1): Child(after_s=6, code=143)}
    assert simulate(replace(FOUR, largest=2), by_task(first)).sizes == [2, 2]


def test_a_signal_while_it_waits_for_the_next_attempt():
    settings = replace(TWO, max_restarts=1)
    done = simulate(settings, by_task({}, Child(after_s=5, code=1)), [(5.1, TERM)])
    assert (done.exit_code, done.sizes) == (143, [2])


def test_a_signal_after_a_failure_ends_the_restarts():
    children = by_task({0: Child(after_s=5, code=1), 1: Child(leaves=143)})
    done = simulate(replace(TWO, max_restarts=5), children, [(7, INT)])
    assert (done.exit_code, done.sizes, done.sent) == (1, [2], [(7, worker(1), INT)])


def test_a_stall_is_blamed_on_the_one_that_had_to_be_killed():
    done = simulate(TWO, by_task({0: Child(after_s=25, code=75), 1: Child(leaves=None)}))
    assert done.attempts[0].guilty.task == worker(1)
    assert done.exit_code == 137


def test_who_stands_still_is_killed_soon_after_the_others_have_noticed():
    done = simulate(TWO, by_task({0: Child(after_s=25, code=75), 1: Child(leaves=None)}))
    assert done.sent == [(30, worker(1), KILL)]


def test_waits_grow_while_attempts_fail_at_once():
    waits = [backoff_s(quick, seed=3, attempt=0) for quick in range(1, 20)]
    assert waits == sorted(waits)
    assert waits[0] <= 1
    assert waits[-1] <= LONGEST_BACKOFF_S
    done = simulate(replace(TWO, max_restarts=5), by_task({}, Child(after_s=1, code=1)))
    assert done.starts[5] - done.starts[4] > done.starts[1] - done.starts[0]


def test_a_long_attempt_makes_the_wait_short_again():
    children = by_task({3: Child(after_s=100, code=1)})
    done = simulate(
        replace(TWO, max_restarts=5),
        lambda attempt, task: Child(after_s=1000 if attempt == 4 else 1, code=1) if attempt < 5 else children(5, task),
    )
    assert done.starts[5] - done.starts[4] - 1000 <= 1 < done.starts[4] - done.starts[3]


def test_waits_of_launchers_that_failed_together_differ():
    assert len({backoff_s(3, seed=seed, attempt=0) for seed in range(20)}) == 20


# ---- a number of processes that may change


def test_it_goes_on_with_those_that_are_left():
    lost_two = {(0, 1): Child(after_s=5, code=-9), (0, 3): Child(after_s=5, code=-9)}
    done = simulate(FOUR, by_task(lost_two, Child(after_s=20, code=75)), until=30)
    assert done.sizes == [4, 2]


def test_never_with_fewer_than_allowed():
    done = simulate(replace(FOUR, smallest=3), by_task({}, Child(after_s=50, code=-9)))
    assert done.sizes == [4, 3, 3, 3]


def test_a_lost_peer_without_a_crash_costs_no_process():
    done = simulate(FOUR, by_task({}, Child(after_s=50, code=75)))
    assert done.sizes == [4, 4, 4, 4]


def test_it_grows_again_after_a_while():
    done = simulate(FOUR, by_task({(0, 2): Child(after_s=50, code=-9)}, Child(after_s=1000)), until=500)
    assert done.sizes == [4, 3, 4]
    assert done.attempts[1].outcome == "grown"
    assert done.attempts[1].duration_s == pytest.approx(101)
    assert done.state.restarts == 1


def test_growing_that_fails_uses_no_restart_and_is_tried_later():
    done = simulate(FOUR, lambda attempt, task: Child(5, -9) if task.index == 3 else Child(2000), until=1000)
    assert done.sizes == [4, 3, 4, 3, 4, 3, 4, 3]
    assert done.state.restarts == 1
    grown = [attempt.duration_s for attempt in done.attempts if attempt.outcome == "grown"]
    assert grown == pytest.approx([101, 201, 401])


def test_a_failure_long_after_growing_is_an_ordinary_one():
    children = {(0, 2): Child(50, -9), (2, 2): Child(150, -9)}
    done = simulate(FOUR, by_task(children, Child(after_s=1000)))
    assert done.sizes[:4] == [4, 3, 4, 3]
    assert done.state.restarts == 2


def test_the_job_that_ends_while_it_should_grow_has_ended():
    slow = Child(after_s=105, leaves=None)
    done = simulate(FOUR, by_task({(0, 2): Child(50, -9)}, slow))
    assert (done.exit_code, done.sizes) == (0, [4, 3])


def test_a_crash_while_it_should_grow_is_a_failure():
    children = {(0, 2): Child(50, -9), (1, 0): Child(leaves=1)}
    done = simulate(FOUR, by_task(children, Child(after_s=1000)), until=400)
    assert done.sizes[:3] == [4, 3, 2]
    assert done.state.restarts == 2


# ---- an evaluator


WITH_EVALUATOR = replace(TWO, evaluator=True)


def test_the_evaluator_ends_with_the_job():
    done = simulate(WITH_EVALUATOR, by_task({"evaluator": Child(after_s=200)}))
    assert (done.exit_code, done.sent, done.now) == (0, [], 200)


def test_an_evaluator_that_stays_is_asked_to_leave():
    done = simulate(WITH_EVALUATOR, by_task({"evaluator": Child()}))
    assert (done.exit_code, done.sent) == (0, [(400, EVALUATOR, TERM)])
    assert "the job has ended; the evaluator has 300 s to come to its last checkpoint" in done.said


def test_an_evaluator_that_fails_does_not_stop_the_job_but_is_told():
    done = simulate(replace(WITH_EVALUATOR, max_restarts=3), by_task({"evaluator": Child(after_s=5, code=3)}))
    assert (done.exit_code, done.sizes, done.now) == (3, [2], 100)
    assert "the evaluator ended with exit code 3" in done.said[0]


def test_the_evaluator_leaves_at_once_when_a_worker_fails():
    children = {0: Child(after_s=5, code=1), 1: Child(after_s=6, code=75), "evaluator": Child()}
    done = simulate(WITH_EVALUATOR, by_task(children))
    assert (done.exit_code, done.sent, done.now) == (1, [(5, EVALUATOR, TERM)], 6)


def test_a_signal_to_the_launcher_while_only_the_evaluator_is_left():
    done = simulate(WITH_EVALUATOR, by_task({"evaluator": Child(leaves=130)}), [(150, INT)])
    assert (done.exit_code, done.now) == (130, 151)


def test_an_evaluator_that_was_asked_to_leave_is_not_asked_again():
    done = simulate(WITH_EVALUATOR, by_task({"evaluator": Child(leaves_after_s=5)}), [(402, INT)])
    assert (done.sent, done.now) == ([(400, EVALUATOR, TERM)], 405)


# ---- a job that goes on without lost processes


CONTINUE = replace(TWO, smallest=1, largest=3, max_restarts=3, on_loss="continue")
SPARE = replace(CONTINUE, spares=1)
JOIN = replace(CONTINUE, smallest=2, largest=2, join="far.away:4711")


def ended(at, **codes):
    """Ends of processes: `_1=-9`."""
    return [End(at=at, task=worker(int(name[1:])), code=code) for name, code in codes.items()]


def world(generation, *numbers, at=5.0):
    return [World(at=at, generation=generation, numbers=frozenset(numbers))]


def after(config, *events):
    """The state after groups of events, and the commands of the last group."""
    state, commands = begin(config, 0.0)
    for group in events:
        commands = []
        for event in group:
            state, more = step(state, event)
            commands += more
    return state, commands


def tick(at):
    return [Tick(at=at)]


def test_a_lost_process_is_started_again_and_the_others_go_on():
    state, commands = after(CONTINUE, world(0, 0, 1, 2), ended(50.0, _1=-9))
    assert commands[0].startswith("process 1 was killed by SIGKILL; the others go on; started again in ")
    assert (state.phase, state.running, state.plan) == (Phase.RUNNING, {worker(0), worker(2)}, ())
    assert 50.5 <= state.due <= 51.0
    state, commands = step(state, Tick(at=51.0))
    assert (commands, state.restarts, state.due) == ((Again(worker(1)),), 1, None)
    assert state.running == {worker(0), worker(1), worker(2)}
    _, commands = step(state, *world(2, 0, 1, 2))
    assert commands == ("world 2: processes 0, 1, 2 go on",)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "starting it again would not help"),
        (143, "(asked to stop, not by the launcher); the others go on"),
        (-11, "it is not started again: max_restarts is 0"),
    ],
)
def test_a_lost_process_that_is_not_started_again(code, words):
    state, commands = after(replace(CONTINUE, max_restarts=0), world(0, 0, 1, 2), ended(50.0, _1=code))
    assert (state.phase, state.due) == (Phase.RUNNING, None)
    assert commands[0].endswith(words)


def test_before_the_first_world_a_failure_is_one_of_all():
    state, commands = after(CONTINUE, ended(5.0, _1=1))
    assert (state.phase, commands) == (
        Phase.FAILING,
        ["process 1 ended with exit code 1; the others have 10 s to end by themselves"],
    )


def test_a_lost_process_that_stands_still_is_killed_and_started_again():
    lost = (world(0, 0, 1, 2), [Fenced(at=50.0, number=1)])
    state, commands = after(CONTINUE, *lost, tick(51.0))
    assert commands[-1] == Send(frozenset({worker(1)}), KILL)
    state, _ = after(CONTINUE, *lost, tick(51.0), ended(51.1, _1=-9), tick(53.0))
    assert (state.running, state.sent) == ({worker(0), worker(1), worker(2)}, {})  # a later SIGTERM reaches it
    _, commands = after(CONTINUE, *lost, ended(50.1, _1=1), tick(50.9 + 1))
    assert commands == [Again(worker(1))]  # it had ended by itself


ALL = world(0, 0, 1, 2)
REASON = [JobEnded(at=60.0, why="no process is left that has the state")]


@pytest.mark.parametrize(
    ("config", "events", "code"),
    [
        (CONTINUE, [ALL, ended(9.0, _0=0, _1=0, _2=0)], 0),
        (SPARE, [ALL, ended(9.0, _0=0, _1=0, _2=0), ended(9.1, _3=75)], 0),
        (SPARE, [ALL, ended(9.0, _1=-9), world(1, 0, 2, 3), ended(9.2, _0=0, _3=0, _2=0)], 0),
        (CONTINUE, [ALL, world(1, 0, 2), ended(9.0, _1=-9), ended(9.2, _0=0, _2=0)], 0),
        (
            CONTINUE,
            [ALL, ended(9.0, _1=-9), world(1, 0, 2), tick(11.0), world(2, 0, 1, 2), ended(20.0, _0=0, _2=0, _1=0)],
            0,
        ),
        (
            CONTINUE,
            [ALL, ended(9.0, _1=-9), world(1, 0, 2), tick(11.0), ended(11.0, _0=0, _2=0), REASON, ended(61.0, _1=75)],
            0,
        ),
        (CONTINUE, [ALL, ended(9.0, _0=0, _2=1, _1=0)], 1),  # the end of its program fails
        (CONTINUE, [ALL, ended(9.0, _1=-9), REASON, ended(61.0, _0=75, _2=75)], 137),
        (CONTINUE, [ALL, ended(9.0, _1=-9), world(1, 0, 2), ended(9.1, _0=-11), ended(9.2, _2=-9)], 139),
        (CONTINUE, [ended(9.0, _0=75, _1=3, _2=75)], 3),
        (CONTINUE, [world(0, 0, 1, 4711), ended(9.0, _0=-9, _1=-9, _2=2), REASON], 137),  # 4711 has joined
        (JOIN, [ended(9.0, _0=-9), tick(11.0), ended(20.0, _0=0, _1=0)], 0),
        (JOIN, [ended(9.0, _0=0), REASON, ended(60.0, _1=75)], 0),
        (JOIN, [REASON, ended(60.0, _0=75, _1=75)], 75),
        (JOIN, [ended(9.0, _0=2, _1=0)], 2),
    ],
)
def test_how_a_job_that_goes_on_ends(config, events, code):
    state, _ = after(replace(config, max_restarts=config.max_restarts if code == 0 or config.join else 0), *events)
    assert (state.phase, state.exit_code) == (Phase.DONE, code)


def test_all_are_started_again_if_the_job_cannot_go_on():
    state, commands = after(CONTINUE, ALL, ended(9.0, _1=-9), tick(11.0), REASON, ended(61.0, _0=75, _1=75, _2=75))
    assert (state.phase, state.restarts, state.size) == (Phase.WAITING, 2, 3)
    assert "restart 2 of 3" in commands[-1]
    state, commands = step(state, Tick(at=100.0))
    assert commands == (Start(1, (worker(0), worker(1), worker(2))),)
    assert (state.world, state.before, state.timers) == (None, 0, {})


def test_a_spare_that_was_not_needed_is_ended_with_the_job():
    state, commands = after(SPARE, ALL, ended(9.0, _0=0, _1=0, _2=0), tick(19.0), tick(29.0))
    assert (state.phase, commands[-1]) == (Phase.FINISHING, Send(frozenset({worker(3)}), KILL))
    state, _ = step(state, End(at=29.0, task=worker(3), code=-9))
    assert state.exit_code == 0


def test_a_signal_is_passed_on_to_all_and_nothing_is_started_again():
    lost = (ALL, ended(9.0, _1=-9), [Asked(at=9.2, signal=TERM)])
    _, commands = after(SPARE, *lost)
    assert commands[-1] == Send(frozenset({worker(0), worker(2), worker(3)}), TERM)
    state, commands = after(SPARE, *lost, tick(11.0), ended(12.0, _3=75, _0=143, _2=143))
    assert (state.phase, state.exit_code, commands[-1].lost) == (Phase.DONE, 143, 1)


# ---- servers, each of which is started again alone


PS, SERVED = Task("ps", 0, serves=True), Task("worker", 0, serves=True)


@pytest.fixture
def running():
    """Both servers run since 0 s."""
    restarts = Restarts([PS, SERVED], seed=0)
    assert (restarts.next_at, restarts.due(0.0), restarts.next_at) == (0.0, [PS, SERVED], None)
    return restarts


def test_one_that_dies_is_due_alone_after_ever_longer_waits(running):
    now, waits = 0.0, []
    for _ in range(8):
        said = running.ended(PS, -9, now)
        assert said.startswith("ps 0 was killed by SIGKILL; started again in ")
        waits.append(running.next_at - now)
        assert running.due(now) == []
        now += waits[-1]
        assert running.due(now) == [PS]
    assert all(0.5 * 2**n <= wait <= 2**n for n, wait in enumerate(waits[:6]))
    assert max(waits) <= 60


def test_after_a_long_life_the_wait_is_short_again(running):
    for now in (0.0, 10.0, 20.0):
        running.ended(SERVED, 1, now)
        running.due(now + 60)
    running.ended(SERVED, 1, 1000.0)
    assert running.next_at <= 1001.0


def test_one_that_was_told_that_all_is_over_waits_for_the_next_attempt(running):
    assert running.ended(PS, 0, 5.0) == ""
    assert running.next_at is None
    running.attempt()
    assert running.due(6.0) == [PS]
    running.attempt()
    assert running.due(7.0) == []


def test_one_whose_settings_are_wrong_is_not_started_again(running):
    assert running.ended(SERVED, 2, 5.0) == "worker 0 ended with exit code 2; starting it again would not help"
    assert running.next_at is None


# ---- whatever happens


CODES = st.sampled_from([0, 0, 1, 2, 75, 143, 130, -6, -9, -11, -15])
MOMENTS = st.sampled_from([0.0, 1.0, 5.0, 10.0, 11.0, 29.0, 31.0, 100.0, 400.0])
CHILDREN = st.builds(
    Child,
    after_s=st.one_of(st.none(), MOMENTS),
    code=CODES,
    leaves=st.one_of(st.none(), CODES),
    leaves_after_s=MOMENTS,
)
EIGHT = st.lists(CHILDREN, min_size=8, max_size=8)
ASKS = st.lists(st.tuples(MOMENTS, st.sampled_from([INT, TERM])), max_size=3)
SETTINGS = st.builds(
    lambda smallest, more, **others: Settings(smallest=smallest, largest=smallest + more, **others),
    smallest=st.integers(1, 3),
    more=st.integers(0, 2),
    evaluator=st.booleans(),
    max_restarts=st.integers(0, 4),
    grace_s=st.sampled_from([0.5, 10.0]),
    stop_timeout_s=st.sampled_from([0.5, 10.0, 300.0]),
    regrow_s=st.sampled_from([50.0, 300.0]),
)


@settings(max_examples=200, deadline=None)
@given(SETTINGS, EIGHT, ASKS)
def test_it_ends_and_nothing_is_left(config, behaviours, asks):
    # Children that never end by themselves may go on for ever, so the user stops them at last.
    asks = [*asks, (5000.0, TERM)]
    done = simulate(
        config, lambda attempt, task: behaviours[(attempt * 5 + task.index + (task.type != "worker")) % 8], asks
    )
    assert done.state.phase is Phase.DONE
    assert not done.alive
    assert not done.state.running
    assert 0 <= done.exit_code <= 255
    assert done.now <= 5000 + config.stop_timeout_s + 3 * config.grace_s
    assert all(config.smallest <= size <= config.largest for size in done.sizes)
    assert done.state.restarts <= config.max_restarts
    assert [attempt.number for attempt in done.attempts] == list(range(len(done.attempts)))
    if done.exit_code == 0:
        assert all(end.code == 0 for end in done.attempts[-1].ends if end.task.type == "worker")
    # A process is told at most once by each of INT and TERM in an attempt, unless it is killed: a second would cut its save.
    soft = [(task, i) for (_, task, n), i in zip(done.sent, done.sent_in, strict=True) if n != KILL]
    assert len(soft) == len(set(soft))


@settings(max_examples=200, deadline=None)
@given(SETTINGS, EIGHT, MOMENTS)
def test_after_a_failure_all_are_gone_in_bounded_time(config, behaviours, failed_at):
    crash = Child(after_s=failed_at, code=-9)
    config = replace(config, max_restarts=0)
    done = simulate(config, lambda attempt, task: crash if task == worker(0) else behaviours[task.index])
    first = min((end for end in done.attempts[0].ends if end.code != 0), key=lambda end: end.at)
    assert (
        done.now <= max(first.at, failed_at) + config.stop_timeout_s * (first.code in (130, 143)) + 3 * config.grace_s
    )


EVENTS = st.one_of(
    st.builds(Tick, at=st.just(0.0)),
    st.builds(End, at=st.just(0.0), task=st.builds(worker, st.integers(0, 5)), code=CODES),
    st.builds(World, at=st.just(0.0), generation=st.just(1), numbers=st.frozensets(st.integers(0, 6))),
    st.builds(Fenced, at=st.just(0.0), number=st.integers(0, 6)),
    st.builds(JobEnded, at=st.just(0.0), why=st.just("it is over")),
    st.builds(Asked, at=st.just(0.0), signal=st.just(TERM)),
)


@settings(max_examples=400, deadline=None)
@given(SETTINGS, st.sampled_from([{}, {"spares": 1}, {"join": "far.away:1"}]), st.lists(EVENTS, max_size=40))
def test_no_order_of_events_breaks_it(config, continues, events):
    config = replace(config, on_loss="continue", evaluator=False, **continues) if continues else config
    state, _ = begin(config, 0.0)
    for now, event in enumerate(events):
        before = state
        state, commands = step(state, replace(event, at=float(now)))
        if before.phase is Phase.DONE:
            assert (state, commands) == (before, ())
        assert (state.phase is Phase.DONE) == (state.exit_code is not None)
        assert state.phase not in (Phase.WAITING, Phase.DONE) or not state.running
        assert state.restarts <= config.max_restarts
        assert state.running or state.due is not None or state.phase in (Phase.DONE, Phase.RUNNING)
        for task in (command.task for command in commands if isinstance(command, Again)):
            assert task in state.running - before.running
