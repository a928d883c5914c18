"""A job that the launcher has started, and that a strategy of one process makes no use of."""

import json
import warnings

import jax
import pytest

import jdist
from jdist.cluster import idle_launch
from jdist.errors import StrategyError

TWO = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
SERVERS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.fixture(autouse=True)
def coordinates_nobody(monkeypatch):
    """As a process in which no other test has had parameter servers."""
    monkeypatch.setattr(idle_launch, "_coordinates", False)


@pytest.fixture
def launched(monkeypatch):
    """Makes this process one that the launcher has started."""

    def launch(cluster, task, attempt="0"):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}}))
        if attempt is not None:
            monkeypatch.setenv("JDIST_LAUNCH_ATTEMPT", attempt)
        monkeypatch.setattr(idle_launch, "_coordinates", False)

    return launch


def step(state, batch):
    return state


def test_hosts_of_a_slice_that_no_variable_tells_of(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.warns(UserWarning, match=r"JAX runs as 4 processes, .* `jdist.multi_worker"):
        jdist.distribute(step, jdist.mirrored())
    with pytest.raises(StrategyError, match=r"JAX runs as 4 processes, but the cluster .* has 1"):
        jdist.multi_worker()
    jdist.distribute(step, jdist.default())  # warnings are errors


@pytest.mark.parametrize(
    ("cluster", "task", "text"),
    [
        (TWO, "worker", "as one of 2 processes, and each of them trains by itself"),
        (SERVERS, "chief", "with parameter servers, which nothing uses"),
    ],
)
def test_a_strategy_of_one_process_is_told_of(launched, cluster, task, text):
    launched(cluster, task)
    for distribute in (lambda made: jdist.distribute(step, made), lambda made: jdist.distribute(made)(step)):
        with pytest.warns(UserWarning, match=f"mirrored: `jdist launch` has started this process {text}") as warned:
            distribute(jdist.mirrored())
        assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            SRUN,
            r"mirrored: this process was started \(slurm\) as one of 2 processes, and each of them trains by itself",
        ),
        (
            {"TF_CONFIG": json.dumps({"cluster": TWO, "task": {"type": "worker", "index": 1}})},
            r"\(tf_config\) as one of 2",
        ),
        (
            {"PMI_SIZE": "8", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"},
            "the environment names other processes, and this one trains by itself. JAX_COORDINATOR_ADDRESS is not set",
        ),
    ],
)
def test_a_rank_of_any_launcher_is_told_of(monkeypatch, environ, text):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=text):
        jdist.distribute(step, jdist.mirrored())


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_JOB_NUM_NODES": "2"},  # a notebook in an allocation
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},  # one of so many trials
        {"LSB_MCPU_HOSTS": "hostA 2 hostB 2"},
    ],
)
def test_an_allocation_is_no_job(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jdist.distribute(step, jdist.mirrored())


@pytest.mark.parametrize(
    ("cluster", "task", "attempt"),
    [
        (TWO, "evaluator", "0"),
        ({"worker": ["127.0.0.1:1"]}, "worker", "0"),
        (SERVERS, "worker", "0"),  # runs what the chief sends
    ],
)
def test_nothing_is_said_where_nothing_is_left_unused(launched, cluster, task, attempt):
    launched(cluster, task, attempt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jdist.distribute(step, jdist.mirrored())


def test_a_coordinator_may_have_a_strategy_of_its_own(launched):
    launched(SERVERS, "chief")
    idle_launch.note_coordinator()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jdist.distribute(step, jdist.one_device())
