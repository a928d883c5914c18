"""A launched job that goes on without a process that is killed, and with the one that replaces it."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.launcher.launch_children import finish, launcher, until

PROGRAM = Path(__file__).with_name("elastic_program.py")
EPOCHS = 150


@pytest.mark.soak  # as tests/cluster/worlds/test_jobs.py
def test_a_job_goes_on_without_a_killed_process_and_with_another(tmp_path):
    def places():
        return {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.at")}

    options = ["--processes", "3", "--on-loss", "continue"]
    with launcher(tmp_path, *options, line=[PROGRAM, tmp_path, EPOCHS]) as process:
        until(lambda: len(places()) == 3, "three processes did not begin", timeout_s=120)
        killed, *survivors = places()
        os.kill(killed, signal.SIGKILL)
        until(lambda: any(at[:2] == [2, 3] for at in places().values()), "no other process came in", timeout_s=120)
        (tmp_path / "end").touch()
        code, said = finish(process)
    assert code == 0, said
    seen = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.seen")}
    assert seen.keys() > set(survivors)
    assert len(seen) == 3
    assert all(set(rows) == {EPOCHS} for rows in seen.values())
    lost = re.search(r"process (\d) was killed by SIGKILL; the others go on; started again in", said)
    assert lost, said
    numbers = [n for n in "012" if n != lost[1]]
    assert f"world 1: processes {', '.join(numbers)} go on" in said
    assert "1 lost, 3 worlds: finished" in said
    events = [json.loads(line) for line in (tmp_path / "logs" / "events.jsonl").read_text().splitlines()]
    worlds = [event["numbers"] for event in events if event["event"] == "world"]
    assert worlds == [[0, 1, 2], list(map(int, numbers)), [0, 1, 2]]
    assert [event["number"] for event in events if event["event"] == "lost"] == [int(lost[1])]
