"""`jdist.notebook_launch` with real processes, from a script and from a notebook's kernel."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from jupyter_client.manager import KernelManager

import jdist
from jdist.errors import LaunchError, ProcessFailedError
from jdist.launcher.notebook import launch as notebook_launch_file
from jdist.strategies.absent_plugins import has_tpu

WAIT_S = 120
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own, in this process


# ---- from a script, whose functions are in `__main__`

SCRIPT = """
import sys, threading
import jax, jax.numpy as jnp
import jdist

RATE = 0.5

def create_state(w):
    return {"w": jnp.asarray(w)}

def train(steps, w):
    strategy = jdist.multi_worker()
    @jdist.distribute(strategy)
    def step(state, batch):
        loss, grad = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] @ w) ** 2, batch["mask"]))(state["w"])
        return {"w": state["w"] - RATE * grad}, {"loss": loss}
    state = strategy.init(create_state, w)
    x = jnp.eye(4)
    for batch in strategy.distribute_dataset([{"x": x}] * steps):
        state, metrics = step(state, batch)
    print(f"process {strategy.cluster.process_index} of {strategy.num_replicas} replicas", flush=True)
    return {"w": strategy.fetch(state)["w"], "loss": metrics["loss"]}

if __name__ == "__main__":
    w = jnp.ones(4)  # JAX runs here already
    found = jdist.notebook_launch(train, (3, w), devices_per_process=2, log_dir=sys.argv[1])
    print("returned", type(found["w"]).__module__, [round(float(x), 4) for x in found["w"]], found["loss"].shape)
    print("threads", [t.name for t in threading.enumerate() if "launch" in t.name])
"""


def test_a_script_trains_in_two_processes(tmp_path):
    (script := tmp_path / "mine.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, script, tmp_path / "logs"], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    for index in (0, 1):
        assert f"[{index}] process {index} of 4 replicas" in said
    assert "returned numpy [0.4219, 0.4219, 0.4219, 0.4219] ()" in said  # (1 - 0.5 * 2 / 4) ** 3
    assert said[-1] == "threads []"


# ---- what is refused, before anything is started


def fine():
    return 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "`processes` is 0; it must be a whole number, 1 or more"),
        ({"processes": "1:4"}, "`processes` is '1:4'; it must be a whole number"),
        ({"devices_per_process": 0}, "`devices_per_process` is 0; it must be a whole number, 1 or more"),
        ({"timeout_s": 0}, "`timeout_s` is 0; it must be a number of seconds above 0"),
        ({"grace_s": -1}, "`grace_s` is -1; it must be a number of seconds above 0"),
        ({"grace_s": "a"}, "`grace_s` is 'a'; it must be a number of seconds"),
        ({"timeout_s": float("nan")}, "`timeout_s` is nan; it must be a number of seconds"),
        ({"args": 3}, r"`args` is an int; .*args=\(x,\)"),
        ({"args": (1, threading.Lock())}, r"`args\[1\]` is a _thread.lock, which cannot go to another process"),
        ({"fn": "no name"}, "'no name'; a name is 'package.module:function'"),
        ({"fn": 3}, "`fn` is an int; pass a function"),
    ],
)
def test_options_that_are_not_right(tmp_path, options, message):
    with pytest.raises(LaunchError, match=message):
        jdist.notebook_launch(**{"fn": fine, **options}, log_dir=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_a_tpu_is_for_one_process(monkeypatch):
    check = notebook_launch_file._check_tpu
    with pytest.raises(
        LaunchError, match=r"processes=2: this machine has a TPU.*`jdist.tpu\(\)`.*devices_per_process=4"
    ):
        check(2, "", has_tpu=True)
    check(1, "", has_tpu=True)  # nothing here has started it
    check(2, "cpu", has_tpu=True)
    check(2, "", has_tpu=False)
    monkeypatch.setattr(notebook_launch_file, "_holds_tpu", lambda: True)
    with pytest.raises(LaunchError, match="this notebook has started the TPU"):
        check(1, "tpu,cpu", has_tpu=True)


def test_device_files_tell_of_a_tpu(tmp_path):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()
    assert not has_tpu(tmp_path)
    (tmp_path / "vfio" / "0").touch()
    assert has_tpu(tmp_path)


# ---- failures


def fail_in_one(index_that_fails):
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if task["index"] == index_that_fails:
        raise ValueError("no luck")
    return "fine"


def test_a_failure_comes_with_the_traceback_also_in_an_event_loop(tmp_path, capfd):
    async def cell():
        jdist.notebook_launch(fail_in_one, (1,), log_dir=tmp_path)

    with pytest.raises(ProcessFailedError) as failed:
        asyncio.run(cell())
    said = str(failed.value)
    assert said.startswith(f"process 1 ended with exit code 1; its log: {tmp_path}/attempt_0/process_1.log")
    assert 'raise ValueError("no luck")' in said
    assert said.endswith("ValueError: no luck")
    assert "attempt 0 failed" not in capfd.readouterr().err  # it is said once


def wait_for_ever():
    print("waiting", flush=True)
    while True:
        time.sleep(60)


def test_the_time_limit_ends_them(tmp_path):
    began = time.monotonic()
    with pytest.raises(ProcessFailedError, match=r"1 process had not ended after timeout_s=0\.5"):
        jdist.notebook_launch(wait_for_ever, processes=1, timeout_s=0.5, grace_s=10.0, log_dir=tmp_path)
    assert time.monotonic() - began < WAIT_S


ENDED = """
import os, sys, time, jdist
def wait():
    print("pid", os.getpid(), flush=True)
    time.sleep(600)
if __name__ == "__main__":
    jdist.notebook_launch(wait, processes=1, log_dir=sys.argv[1])
"""


def test_a_signal_to_end_is_for_the_program_itself_too(tmp_path):
    (script := tmp_path / "mine.py").write_text(ENDED)
    with subprocess.Popen(
        [sys.executable, script, tmp_path / "logs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline().rpartition(" ")[2])
            process.terminate()
            process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def leave():
    sys.exit(0)


def test_one_that_leaves_returns_nothing(tmp_path):
    for fn, returned in (("tests.launcher.notebook.notebook_cells:nothing", None), (fine, 1), (leave, None)):
        assert jdist.notebook_launch(fn, processes=1, log_dir=tmp_path) == returned


def look_at_files():
    file = sys.argv[1]
    return file, *(os.stat(each).st_mode & 0o777 for each in (file, os.path.dirname(file)))


def test_the_function_goes_by_a_file_that_others_cannot_read(tmp_path):
    before = os.umask(0)
    try:
        file, _, folder_mode = jdist.notebook_launch(look_at_files, processes=1, log_dir=tmp_path)
    finally:
        os.umask(before)
    assert folder_mode == 0o700
    assert not os.path.exists(os.path.dirname(file))


def give_back():
    return {"s": [threading.Lock()]}


def test_a_result_that_cannot_be_handed_back(tmp_path):
    with pytest.raises(
        ProcessFailedError, match=r"`give_back` returned at \['s'\]\[0\] a _thread.lock, which cannot be"
    ):
        jdist.notebook_launch(give_back, processes=1, log_dir=tmp_path)


# ---- from a notebook

in_kernel = pytest.mark.xdist_group("kernel")  # so that there is one


class Kernel:
    """A notebook's kernel, whose cells are run one by one."""

    def __init__(self, folder):
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=WAIT_S)

    def run(self, cell, *, interrupt_at=None):
        """What a cell shows, and its error's name or None; the stop button is pressed once it shows `interrupt_at`."""
        own = self._client.execute(cell)
        text, error, deadline = "", None, time.monotonic() + WAIT_S
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            content = message["content"]
            if message["parent_header"].get("msg_id") != own:
                continue
            if message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] == "execute_result":
                text += content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                error = content["ename"]
                text += content["evalue"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return text, error
            if interrupt_at is not None and interrupt_at in text:
                interrupt_at = None
                self._manager.interrupt_kernel()

    def close(self):
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    made = Kernel(tmp_path_factory.mktemp("notebook"))
    yield made
    made.close()


@in_kernel
def test_a_cell_s_function_runs_and_its_output_comes_into_the_cell(kernel):
    kernel.run(
        "import json, os, time\nimport numpy as np\nimport jax.numpy as jnp\nimport jdist\nlive = jnp.ones(3)\nscale = 2"
    )
    kernel.run("class Scaled:\n    def __init__(self, x): self.x = scale * x")
    text, error = kernel.run("""
def work(x):
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    print("from", index, flush=True)
    return {"x": Scaled(x).x, "index": index}

jdist.notebook_launch(work, args=(np.arange(3),))
""")
    assert error is None, text
    assert {"[0] from 0", "[1] from 1"} <= set(text.splitlines())
    assert text.endswith("{'x': array([0, 2, 4]), 'index': 0}")
    text, error = kernel.run("def lives(): return live.sum()\njdist.notebook_launch(lives)")
    assert error == "LaunchError"
    assert "`lives` uses `live`, a jax.Array" in text
    kernel.run("import typing\nfrom flax.training.train_state import TrainState\nimport jax")
    kernel.run("class State(TrainState):\n    stats: typing.Any")
    text, error = kernel.run("""
def leaves():
    state = State(step=0, apply_fn=None, params=1, tx=None, opt_state=2, stats=3)
    return jax.tree.leaves(state), state
found = jdist.notebook_launch(leaves, processes=1)
found[0], type(found[1]) is State
""")
    assert (error, text.splitlines()[-1]) == (None, "([0, 1, 2, 3], True)"), text
    text, error = kernel.run(
        "def fails():\n    raise ValueError('in a cell')\njdist.notebook_launch(fails, processes=1)"
    )
    assert error == "ProcessFailedError"
    assert "    raise ValueError('in a cell')\n" in text  # the line of the cell


@in_kernel
def test_what_ipython_puts_in_the_place_of_python_s_own(kernel):
    """A notebook's `open`, `exit` and `display` are IPython's, and its `input` asks the notebook's reader."""
    text, error = kernel.run("""
import jdist
also = open
class Keeper:
    make = open
def in_notebook():
    try:
        return bool(get_ipython())
    except NameError:
        return False
def work(file, default=open):
    with open(file, "w") as written:
        written.write("kept")
    display(__name__)
    print(*(opens(file).read() for opens in (default, also, Keeper.make)), in_notebook())
    exit(0)
print(jdist.notebook_launch(work, ("file.txt",), processes=1), in_notebook())
""")
    assert error is None, text
    assert text.splitlines()[1:] == ["[0] __main__", "[0] kept kept kept False", "None True"]
    text, error = kernel.run("def ask(): return input()\njdist.notebook_launch(ask, processes=1)")
    assert error == "ProcessFailedError"
    assert "This process has no keyboard: ask in the notebook, pass the answer by `args`." in text
    for line in ("!ls", "%time 1", "x = !ls", "x = %who_ls"):
        text, error = kernel.run(f"def magic():\n    {line}\njdist.notebook_launch(magic, processes=1)")
        assert error == "LaunchError", text
        assert "`magic` has a line that begins with `!` or `%`, which only IPython knows; write it in Python." in text


@in_kernel
def test_an_interrupt_ends_the_run_and_nothing_else(kernel):
    kernel.run("""
import os, time, jdist
survivor = object()
def wait_or_not(wait, catches=False):
    try:
        print("pid", os.getpid(), flush=True)  # the interrupt may come at once
        while wait:
            time.sleep(0.05)
    except KeyboardInterrupt:
        if not catches:
            raise
    return "done"
""")
    text, error = kernel.run("jdist.notebook_launch(wait_or_not, (True,), processes=1)", interrupt_at="pid ")
    assert error == "KeyboardInterrupt", text
    assert "Traceback" not in text
    (pid,) = re.findall(r"\[0\] pid (\d+)", text)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    text, error = kernel.run("survivor, jdist.notebook_launch(wait_or_not, (False,), processes=1)")
    assert (error, "'done'" in text) == (None, True), text
    cell = "jdist.notebook_launch(wait_or_not, (True, True), processes=1)"
    text, error = kernel.run(cell, interrupt_at="pid ")
    assert (error, text.splitlines()[-1]) == (None, "'done'"), text


@in_kernel
def test_a_training_cell_that_was_interrupted_goes_on(kernel):
    kernel.run("""
import jax.numpy as jnp, jdist
strategy = jdist.mirrored()
@jdist.distribute(strategy)
def train_step(state, batch):
    loss, grad = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {"loss": loss}
state = strategy.init(lambda: {"w": jnp.ones(4), "n": jnp.int32(0)})
batch = {"x": jnp.eye(8, 4)}
""")
    cell = """
state = train_step.last_state or state
first = int(state["n"])
for number in range(BOUND):
    state, metrics = train_step(state, batch)
    if number % 50 == 49:
        print("at", first + number, flush=True)
print(first, int(state["n"]))
"""
    text, error = kernel.run(cell.replace("BOUND", "10**9"), interrupt_at="at ")
    assert error == "KeyboardInterrupt", text
    text, error = kernel.run(cell.replace("BOUND", "7"))
    assert error is None, text
    first, last = map(int, text.split())
    assert first >= 50
    assert last == first + 7
