"""`jdist runs --timeline`: what happened in a run, from the records of the run and of its launcher."""

import json
import re
import subprocess
import sys

import pytest

from jdist.cli.main import main
from jdist.cli.runs.show import trace
from jdist.cli.runs.timeline import LOST, read_timeline
from jdist.cli.runs.timeline_picture import draw
from jdist.errors import ConfigError
from jdist.launcher.record import Record, launch_of
from jdist.loop.report.times import TimesFile
from tests.pictures import check_picture

T = 1_800_000_000.0
LEFT_OUT = object()


def part(attempt, name, begin, end, first, last):
    of_attempt = {"step": last, "attempt": attempt, "part": name}
    return {**of_attempt, "begin": T + begin, "end": T + end, "first": first, "seconds": {}}


def times(launch=None):
    """A run that was killed at step 50 with a checkpoint of step 30, and went on to step 60."""
    of_launch = [{}, {}] if launch is None else [{"launch": str(launch), "launch_attempt": n} for n in (0, 2)]
    return [
        {"step": 0, "attempt": 0, "event": "begin", "at": T + 1, "processes": 2, "devices": 2, **of_launch[0]},
        part(0, "startup", 1, 3, 0, 1),
        part(0, "train", 3, 10, 1, 30),
        part(0, "checkpoint", 10, 11, 30, 30),
        part(0, "train", 11, 21, 30, 50),
        {"step": 30, "attempt": 1, "event": "begin", "at": T + 31, "processes": 2, "devices": 2, **of_launch[1]},
        part(1, "startup", 31, 33, 30, 31),
        part(1, "train", 33, 43, 31, 60),
        part(1, "evaluation", 43, 44, 60, 60),
        {"step": 60, "attempt": 1, "event": "end", "at": T + 44, "outcome": "finished"},
    ]


def events():
    """Of a launch whose second attempt did not come to train, and whose server outlives it."""
    return [
        {"at": T, "event": "launch", "command": ["a"], "max_restarts": 3},
        {"at": T, "event": "process", "attempt": 0, "process": "ps 0"},
        {"at": T, "event": "process", "attempt": 0, "process": "0"},
        {"at": T, "event": "process", "attempt": 0, "process": "1"},
        {"at": T + 22, "event": "end", "attempt": 0, "process": "1", "code": -9},
        {"at": T + 23, "event": "end", "attempt": 0, "process": "0", "code": 75},
        {"at": T + 24, "event": "process", "attempt": 1, "process": "0"},
        {"at": T + 25, "event": "end", "attempt": 1, "process": "0", "code": 1},
        {"at": T + 30, "event": "process", "attempt": 2, "process": "0"},
        {"at": T + 45, "event": "end", "attempt": 2, "process": "0", "code": 0},
        {"at": T + 45.5, "event": "signal", "signal": "SIGTERM"},
        {"at": T + 46, "event": "end", "attempt": 2, "process": "ps 0", "code": 0},
        {"at": T + 46, "event": "done", "code": 0},
    ]


def write(path, rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "logs/events.jsonl", events())
    write(tmp_path / "toy/times.jsonl", times("../logs"))
    return tmp_path / "toy"


def test_steps_behind_the_checkpoint_of_a_killed_attempt_are_lost(run):
    timeline = read_timeline(run)
    killed, finished = timeline.attempts
    assert (killed.first, killed.last, killed.kept, killed.lost_steps, killed.outcome) == (0, 50, 30, 20, "killed")
    assert (finished.first, finished.last, finished.lost_steps, finished.outcome) == (30, 60, 0, "finished")
    # The launcher saw the last process go two seconds behind the last line: what happened then is lost, too.
    assert killed.end == T + 23
    assert [(s.begin - T, s.end - T, s.last) for s in killed.spans if s.part == LOST] == [(11, 21, 50), (21, 23, 50)]
    assert (timeline.lost_steps, timeline.lost_s, timeline.begin - T, timeline.end - T) == (20, 12, 0, 46)


def test_rows_say_how_far_the_newest_attempt_came_where_its_times_do_not(run):
    write(run / "times.jsonl", times("../logs")[:5])
    write(run / "metrics.jsonl", [{"step": 50}, {"step": 60}])
    (killed,) = read_timeline(run).attempts
    assert (killed.last, killed.outcome, killed.lost_steps) == (60, "killed", 0)
    assert (killed.spans[-1].first, killed.spans[-1].last) == (50, 60)
    write(run / "times.jsonl", times("../logs")[:-1])
    assert [attempt.last for attempt in read_timeline(run).attempts] == [50, 60]
    write(run / "times.jsonl", times("../logs"))
    write(run / "metrics.jsonl", [{"step": 99}])  # of an attempt that has ended all is known
    assert [attempt.last for attempt in read_timeline(run).attempts] == [50, 60]


def test_a_span_that_began_before_the_checkpoint_is_cut_where_it_was_saved(tmp_path):
    rows = times()
    rows[2:5] = [part(0, "train", 3, 13, 1, 51)]  # five steps a second
    write(tmp_path / "times.jsonl", rows)
    spans = read_timeline(tmp_path).attempts[0].spans
    assert [(s.part, s.begin - T, s.end - T, s.first, s.last) for s in spans[1:]] == [
        ("train", 3, pytest.approx(8.8), 1, 30),
        ("lost", pytest.approx(8.8), 13, 30, 51),
    ]


def test_processes_are_those_of_the_launches_that_the_run_names(run):
    timeline = read_timeline(run)
    found = [(p.name, p.begin - T, p.end - T, p.how, p.attempt) for p in timeline.processes]
    assert found == [
        ("ps 0", 0, 46, "exit code 0", 0),
        ("process 0", 0, 23, "exit code 75", 0),
        ("process 1", 0, 22, "killed by SIGKILL", 0),
        ("process 0", 24, 25, "exit code 1", None),
        ("process 0", 30, 45, "exit code 0", 1),
    ]
    assert timeline.signals == ((T + 45.5, "SIGTERM"),)


def test_two_launches_with_one_folder_of_logs_are_told_apart(tmp_path):
    """The launcher of the first was killed, so that of its process 0 no end is written; both count attempts from 0."""
    lines = times("../logs")
    lines[5]["launch_attempt"] = 0
    write(tmp_path / "toy/times.jsonl", lines)
    first = [line for line in events()[:5] if line.get("process") != "ps 0"]
    second = [
        {"at": T + 30, "event": "launch", "command": ["a"], "max_restarts": 3},
        {"at": T + 30, "event": "process", "attempt": 0, "process": "0"},
        {"at": T + 45, "event": "end", "attempt": 0, "process": "0", "code": 0},
    ]
    write(tmp_path / "logs/events.jsonl", first + second)
    timeline = read_timeline(tmp_path / "toy")
    found = [(p.name, p.begin - T, timeline.end_of(p) - T, p.how, p.attempt) for p in timeline.processes]
    assert found == [
        ("process 0", 0, 30, "end not recorded", 0),
        ("process 1", 0, 22, "killed by SIGKILL", 0),
        ("process 0", 30, 45, "exit code 0", 1),
    ]


@pytest.mark.parametrize("is_held", [True, False])
def test_a_fit_that_still_runs_was_not_killed(tmp_path, is_held):
    write(tmp_path / "times.jsonl", times()[:5])
    (tmp_path / ".job").touch()
    holds = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    line = [sys.executable, "-c", holds if is_held else "print()", str(tmp_path / ".job")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if not is_held:
            process.wait(30)
        assert read_timeline(tmp_path).attempts[0].outcome == ("running" if is_held else "killed")
        process.kill()


def test_a_launch_that_is_no_run_has_its_processes(run, capsys):
    assert main(["runs", "--timeline", str(run.parent / "logs")]) == 0
    assert "logs: 5 processes in 46.0 s; none of them has recorded steps" in capsys.readouterr().out
    check_picture((run.parent / "logs/timeline.svg").read_text())


def test_a_run_whose_launchers_logs_are_gone_has_its_attempts(run):
    (run.parent / "logs/events.jsonl").unlink()
    timeline = read_timeline(run)
    assert timeline.processes == ()
    assert timeline.attempts[0].end == T + 21
    check_picture(str(draw(timeline)))


def test_the_picture(run):
    svg = str(draw(read_timeline(run)))
    texts = check_picture(svg)
    lanes = {"attempts", "steps", "evaluations", "checkpoints", "process 0", "process 1", "ps 0"}
    assert lanes | {"done again: lost"} <= set(texts)
    assert "attempt 0 killed at step 50. process 1: killed by SIGKILL. 20 steps are done again." in texts
    assert "attempt 1 goes on from step 30" in texts
    assert "the launcher was sent SIGTERM" in texts


def test_the_picture_of_a_long_run_stays_small(tmp_path):
    rows = [{"step": 0, "attempt": 0, "event": "begin", "at": T}]
    for i in range(20_000):
        rows.append(part(0, "train", 2 * i, 2 * i + 1.9, 10 * i, 10 * (i + 1)))
        rows.append(part(0, "checkpoint", 2 * i + 1.9, 2 * i + 2, 10 * (i + 1), 10 * (i + 1)))
    write(tmp_path / "times.jsonl", rows)
    svg = str(draw(read_timeline(tmp_path)))
    assert len(svg) < 60_000
    assert "step 200,000" in check_picture(svg)


def test_many_restarts_and_processes(tmp_path):
    rows, launched = [], []
    for n in range(20):
        of_launch = {"launch": ".", "launch_attempt": n}
        rows.append({"step": 10 * n, "attempt": n, "event": "begin", "at": T + 9 * n, **of_launch})
        rows.append(part(n, "train", 9 * n, 9 * n + 8, 10 * n, 10 * n + 12))
        for p in range(16):
            launched.append({"at": T + 9 * n, "event": "process", "attempt": n, "process": str(p)})
            launched.append({"at": T + 9 * n + 8, "event": "end", "attempt": n, "process": str(p), "code": -6})
    write(tmp_path / "times.jsonl", rows)
    write(tmp_path / "events.jsonl", launched)
    texts = check_picture(str(draw(read_timeline(tmp_path))))
    assert "… 4 more processes" in texts


def test_the_trace_follows_the_trace_event_format(run):
    made = json.loads(json.dumps(trace(read_timeline(run))))
    assert made["displayTimeUnit"] in ("ms", "ns")
    names = {}
    open_spans = {}
    for event in made["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":  # metadata
                assert event["name"] in ("process_name", "thread_name")
                names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            case "X":  # complete: a time and a duration in microseconds
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                assert event["cat"]
                assert ("thread_name", event["pid"], event["tid"]) in names
                assert ("process_name", event["pid"], 0) in names
                # Complete events of one thread must not overlap but where one lies in the other.
                assert event["ts"] >= open_spans.get((event["pid"], event["tid"]), 0)
                open_spans[event["pid"], event["tid"]] = event["ts"] + event["dur"]
            case "i":  # instant: its scope is global, process or thread
                assert event["s"] in ("g", "p", "t")
                assert event["ts"] >= 0
            case "C":  # counter: numbers by name
                assert all(isinstance(x, int | float) for x in event["args"].values())
            case other:
                pytest.fail(f"a phase that is not used: {other}")
    complete = [event for event in made["traceEvents"] if event["ph"] == "X" and event["cat"] == "attempt"]
    assert [(e["ts"], e["dur"], e["args"]["steps_done_again"]) for e in complete] == [
        (1_000_000, 22_000_000, 20),
        (31_000_000, 13_000_000, 0),
    ]
    kills = [e for e in made["traceEvents"] if e["ph"] == "i" and e["name"] == "killed by SIGKILL"]
    assert [(names["process_name", e["pid"], 0], e["ts"]) for e in kills] == [("process 1", 22_000_000)]
    ts = [event["ts"] for event in made["traceEvents"] if "ts" in event]
    assert ts == sorted(ts)


def test_as_json(run, capsys):
    assert main(["runs", "--timeline", str(run), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["lost_steps"] == 20
    assert printed["processes"][2]["how"] == "killed by SIGKILL"
    assert json.loads((run / "timeline.json").read_text())["traceEvents"]


def test_a_line_torn_by_a_kill_is_left_out_and_another_is_named(run):
    logs = run.parent / "logs/events.jsonl"
    logs.write_text(logs.read_text() + '{"at": 18')
    assert len(read_timeline(run).processes) == 5
    logs.write_text('{"at": 18\n' + logs.read_text())
    with pytest.raises(ConfigError, match=r'events\.jsonl:1: not a JSON object with "at" and "event"'):
        read_timeline(run)


@pytest.mark.parametrize(
    ("place", "changed", "says"),
    [
        (0, {"at": LEFT_OUT}, "1: has no number for at. Mend"),
        (2, {"begin": LEFT_OUT}, "3: has no number for begin. Mend"),
        (9, {"attempt": LEFT_OUT}, "10: has no number for attempt. Mend"),
        (9, {"outcome": LEFT_OUT}, '10: an end has no "outcome"'),
        (2, {"seconds": {"steps": None}}, '3: "seconds" are not numbers by part'),
        (2, {"seconds": [1]}, '3: "seconds" are not numbers by part'),
        (2, {"begin": float("nan")}, "3: has no number for begin"),
        (2, {"part": ["train"]}, '3: "part" is not a name'),
        (0, {"at": True}, "1: has no number for at"),
        (0, {"event": "other"}, " attempt 0 has no line that begins it"),
    ],
)
def test_a_line_of_times_that_holds_nonsense_is_named(run, place, changed, says):
    lines = times("../logs")
    lines[place] = {name: value for name, value in (lines[place] | changed).items() if value is not LEFT_OUT}
    write(run / "times.jsonl", lines)
    with pytest.raises(ConfigError, match=re.escape(f"toy/times.jsonl:{says}")):
        read_timeline(run)
    with pytest.raises(ConfigError, match=re.escape(f"toy/times.jsonl:{says}")):  # of a run that would go on, too
        TimesFile(run, step=0, at=0.0, writes=False, about={})


def test_what_has_no_timeline_is_named(tmp_path, monkeypatch, capsys, run):
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "runs/digits"
    empty.mkdir(parents=True)
    for name, at in (("config.yaml", empty), (".lock", empty)):
        (at / name).touch()
    for arguments, text in (
        (["runs/digit"], "runs/digit: no such run. Did you mean 'runs/digits'?"),
        (
            ["runs/digits"],
            "runs/digits: has no record of times: neither times.jsonl, of a run that has begun to train",
        ),
        ([], "takes one run, got 0"),
        (["a", "b"], "takes one run, got 2"),
    ):
        assert main(["runs", "--timeline", *arguments]) == 2
        assert text in capsys.readouterr().err


def test_a_launchers_record_outlives_a_disk_that_refuses(tmp_path):
    said = []
    record = Record(tmp_path / "missing", said.append)
    record.add("launch")
    record.add("done", code=0)
    assert len(said) == 1
    assert "events.jsonl is not whole: No such file or directory" in said[0]


def test_a_process_knows_the_launch_that_it_is_of(tmp_path):
    environ = {"JDIST_RECORD_DIR": str(tmp_path / "attempt_2"), "JDIST_LAUNCH_ATTEMPT": "2"}
    assert launch_of(environ, tmp_path / "runs/toy") == {"launch": "../..", "launch_attempt": 2}
    assert launch_of({}, tmp_path) == {}
