import signal
from threading import get_ident

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdist.cluster import failpoints
from jdist.cluster.failpoints import Failure, Point, parse
from jdist.errors import ClusterConfigError

KILL = Failure(process=1, attempt=0, point=Point.AFTER_STEP, signal=signal.SIGKILL, nth=3)


@pytest.fixture
def sent(monkeypatch):
    """What this process would have sent itself."""
    found = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: found.append((thread == get_ident(), number)))
    yield found
    failpoints.arm(0, {})


def arm(text, *, process=1, **environ):
    failpoints.arm(process, {"JDIST_FAILPOINTS": text, **environ})


@pytest.mark.parametrize("point", Point)
def test_every_point_has_a_name(point):
    assert parse(f"process=0:{point.value}:stop")[0].point is point


def test_several_are_divided_by_semicolons():
    stop = Failure(process=0, attempt=2, point=Point.IN_SAVE, signal=signal.SIGSTOP, nth=1)
    assert parse("process=1:step=after:kill@3; process=0:attempt=2:save=in:stop") == (KILL, stop)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "process=1:step=after:kill@3;",
        "step=after:kill",
        "process=-1:step=after:kill",
        "process=x:step=after:kill",
        "process=1:step=later:kill",
        "process=1:stop=after:kill",
        "process=1:STEP=after:kill",
        "process=1:step=after:explode",
        "process=1:step=after:kill@0",
        "process=1:step=after:kill@",
        "process=1:step=after:kill@-1",
        "process=1:step=after:kill,process=2:step=after:kill",
        "process=1:attempt=:step=after:kill",
        "process=١:step=after:kill",
    ],
)
def test_what_is_not_known_is_refused(text):
    with pytest.raises(
        ClusterConfigError, match=r"JDIST_FAILPOINTS is .*; it must be process=N:POINT:kill or .*POINT is one of"
    ):
        parse(text)


@given(st.text())
def test_any_text_is_understood_or_refused(text):
    try:
        found = parse(text)
    except ClusterConfigError:
        return
    assert found


def test_it_happens_the_nth_time_and_once(sent, capfd):
    arm("process=1:step=after:kill@3")
    for times in (0, 0, 1, 1):
        failpoints.reached(Point.BEFORE_STEP)
        failpoints.reached(Point.AFTER_STEP)
        assert sent == [(True, signal.SIGKILL)] * times
    assert capfd.readouterr().err == "jdist: failpoint step=after, SIGKILL\n"


@pytest.mark.parametrize(
    ("text", "process", "attempt", "happens"),
    [
        ("process=1:step=in:stop", 1, "0", True),
        ("process=1:step=in:stop", 0, "0", False),
        ("process=1:step=in:stop", 1, "1", False),
        ("process=1:attempt=1:step=in:stop", 1, "1", True),
    ],
)
def test_it_happens_in_its_process_and_attempt(sent, text, process, attempt, happens):
    arm(text, process=process, JDIST_LAUNCH_ATTEMPT=attempt)
    assert failpoints.armed() == happens
    failpoints.reached(Point.IN_STEP)
    assert bool(sent) == happens


def test_nothing_happens_without_the_variable(sent):
    failpoints.arm(1, {})
    for point in Point:
        failpoints.reached(point)
    assert (sent, failpoints.armed()) == ([], False)
