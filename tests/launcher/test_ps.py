"""`jdist launch --workers --ps`: a parameter server's whole cluster on one machine, with real processes."""

import json
import re
import sys
from pathlib import Path

import pytest

from jdist.errors import LaunchError
from jdist.launcher.launch import launch, parse_servers
from tests.launcher.launch_children import await_files, await_gone, finish, launcher

linux = pytest.mark.skipif(sys.platform != "linux", reason="other processes' variables are read from /proc")
LINE = (Path(__file__).parents[1] / "ps" / "line_program.py").read_text()
# `servers()` gives the pid of each server of this launch that is up, by its log and its variables.
FIND = """
def serves(path):
    text = (path / "cmdline").read_text()
    return "serve\\0" in text and "guard.py" not in text
def servers():
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(v.split("=", 1) for v in (path / "environ").read_text().split("\\0") if "=" in v)
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            is_server = serves(path) and not serves(path.with_name(parent))  # not its reader of programs
        except OSError:
            continue
        if is_server and variables.get("JDIST_TOKEN") == os.environ["JDIST_TOKEN"]:
            its = json.loads(variables["TF_CONFIG"])["task"]
            found[f"{its['type']} {its['index']}"] = int(path.name)
    return found
def await_servers(number, but=()):
    deadline = time.monotonic() + 60
    while len(found := {k: v for k, v in servers().items() if v not in but}) < number:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found
"""
KILLS = (
    FIND
    + LINE.replace(
        "for batch in dataset:",
        """
for n, batch in enumerate(dataset):
    if n == 50:
        before = await_servers(3)
        os.kill(before["worker 1"], signal.SIGKILL)
        put("before", json.dumps(before))
""".strip(),
    )
    + """
after = await_servers(3, but=[before["worker 1"]])
put("after", json.dumps(after))
"""
)


@linux
def test_a_script_trains_and_a_worker_that_is_killed_is_started_again(tmp_path):
    with launcher(tmp_path, "--workers", "2", "--ps", "1", body=KILLS) as process:
        code, out = finish(process)
    assert code == 0, out
    assert "[launch] a chief, 2 workers and 1 ps of " in out
    assert "[chief] w 3.0, b 1.0 after 160 steps\n" in out
    assert "[launch] worker 1 was killed by SIGKILL; started again in " in out
    assert not re.search(r"^\[launch\]\s*$", out, re.MULTILINE), out  # it said nothing
    before, after = (json.loads(text) for text in await_files(tmp_path, "before", "after"))
    assert before.keys() == after.keys() == {"worker 0", "worker 1", "ps 0"}
    assert {name for name in before if before[name] != after[name]} == {"worker 1"}
    await_gone(*before.values(), *after.values())
    logs = {path.name: path.read_text() for path in (tmp_path / "logs" / "servers").iterdir()}
    assert logs.keys() == {"worker_0.log", "worker_1.log", "ps_0.log"}
    assert logs["ps_0.log"].count("listens on") == 1


@linux
def test_workers_find_the_dataset_functions_of_the_program(tmp_path):
    body = """
import numpy as np
import jdist

def make(context):
    return [{"x": np.full(2, context.input_pipeline_id, np.float32)}] * 3

if __name__ == "__main__":
    strategy = jdist.parameter_server(start_timeout_s=60)
    read = jdist.distribute(lambda n, batch: (n, {"x": batch["x"].mean()}), strategy)
    state = strategy.init(lambda: np.float32(0))
    batches = strategy.distribute_datasets_from_function(make)
    print("the sum is", sum(float(read(state, batch)[1]["x"]) for batch in batches))
"""
    with launcher(tmp_path, "--workers", "2", "--ps", "1", body=body) as process:
        code, out = finish(process)
    assert (code, "[chief] the sum is 3.0\n" in out) == (0, True), out


@linux
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    with launcher(
        tmp_path, "--workers", "1", "--ps", "2", body=FIND + 'put("pids", json.dumps(await_servers(3)))\nwait()'
    ) as process:
        pids = json.loads(await_files(tmp_path, "pids")[0]).values()
        process.kill()
        await_gone(*pids)


@linux
def test_a_chief_that_fails_is_started_again_with_the_same_servers(tmp_path):
    body = FIND + 'put(f"pids_{attempt}", json.dumps(await_servers(2)))\nsys.exit(attempt == 0)'
    with launcher(tmp_path, "--workers", "1", "--ps", "1", "--max-restarts", "1", body=body) as process:
        code, out = finish(process)
    assert (code, "restart 1 of 1" in out) == (0, True), out
    first, second = await_files(tmp_path, "pids_0", "pids_1")
    assert json.loads(first) == json.loads(second)
    await_gone(*json.loads(first).values())


@linux
def test_what_each_is_told(tmp_path):
    body = (
        FIND
        + """
await_servers(2)
put(task["type"], os.environ["TF_CONFIG"])
"""
    )
    with launcher(tmp_path, "--workers", "1", "--ps", "1", "--evaluator", body=body) as process:
        code, out = finish(process)
    assert code == 0, out
    chief, evaluator = (json.loads(text) for text in await_files(tmp_path, "chief", "evaluator"))
    assert chief["cluster"] == evaluator["cluster"]
    assert {job: len(addresses) for job, addresses in chief["cluster"].items()} == {"chief": 1, "worker": 1, "ps": 1}
    assert (chief["task"], evaluator["task"]) == ({"type": "chief", "index": 0}, {"type": "evaluator", "index": 0})
    assert "and an evaluator of" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2}, "`workers` is given without `ps`"),
        ({"ps": 2}, "`ps` is given without `workers`"),
        ({"workers": 0, "ps": 1}, "`workers` is 0; it must be a whole number, 1 or more"),
        ({"workers": 1, "ps": 1, "processes": 2}, "processes=2 and workers=1, ps=1 exclude each other"),
    ],
)
def test_what_is_asked_wrongly_is_refused(options, message):
    with pytest.raises(LaunchError, match=message):
        launch(["true"], **options)


def test_without_them_it_is_a_job_in_step():
    assert parse_servers(None, None, 4) is None
