"""ClusterSpec: numbers of processes, the chief, what it refuses, and how it says so; addresses."""

import dataclasses
import json
import re

import pytest

from jdist.cluster import ClusterSpec, tf_config
from jdist.cluster.address import host_problem, join, problem, split
from jdist.errors import ClusterConfigError, JDistError

WITH_CHIEF = {"worker": ("b:1", "c:1"), "chief": ("a:1",), "ps": ("p:1", "q:1"), "evaluator": ("e:1",)}
WORKERS = {"worker": ("a:1", "b:1")}


def spec(jobs=WORKERS, task_type="worker", task_index=0, **more):
    return ClusterSpec(jobs=jobs, task_type=task_type, task_index=task_index, **more)


@pytest.mark.parametrize(
    ("jobs", "task", "process_index", "is_chief", "address"),
    [
        (WITH_CHIEF, ("chief", 0), 0, True, "a:1"),
        (WITH_CHIEF, ("worker", 0), 1, False, "b:1"),
        (WITH_CHIEF, ("worker", 1), 2, False, "c:1"),
        (WORKERS, ("worker", 0), 0, True, "a:1"),
        (WORKERS, ("worker", 1), 1, False, "b:1"),
    ],
)
def test_the_processes_of_the_synchronous_job(jobs, task, process_index, is_chief, address):
    found = spec(jobs, *task)
    assert found.process_index == process_index
    assert found.is_chief is is_chief
    assert found.address == address
    assert found.num_processes == (3 if "chief" in jobs else 2)
    assert found.coordinator_address == "a:1"
    assert found.num_ps == len(jobs.get("ps", ()))


@pytest.mark.parametrize("task", [("ps", 1), ("evaluator", 0)])
def test_a_ps_and_an_evaluator_have_no_process_index(task):
    found = spec(WITH_CHIEF, *task)
    assert (found.num_processes, found.coordinator_address, found.is_chief) == (3, "a:1", False)
    with pytest.raises(
        ClusterConfigError, match=f"This process is {task[0]} {task[1]}; it has no `process_index`"
    ) as info:
        _ = found.process_index
    assert info.value.field == "task_type"


def test_an_evaluator_may_be_absent_from_the_cluster():
    found = spec(WORKERS, "evaluator", 0)
    assert found.address is None
    with pytest.raises(ClusterConfigError, match="`task_index` is 1; it must be from 0 to 0"):
        spec(WORKERS, "evaluator", 1)


def test_one_process_alone_needs_no_address():
    alone = spec({"worker": (None,)})
    assert (alone.num_processes, alone.process_index, alone.is_chief) == (1, 0, True)
    with pytest.raises(ClusterConfigError, match="one alone needs no coordinator"):
        _ = alone.coordinator_address


def test_addresses_of_other_processes_may_be_unknown():
    found = spec({"worker": ("a:1", None, None)}, "worker", 2)
    assert (found.num_processes, found.process_index, found.address) == (3, 2, None)
    assert found.processes == ("a:1", None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"jobs": {"wroker": ("a:1",)}},
            "`job` is 'wroker'; it must be one of chief, worker, ps, evaluator.* Did you mean 'worker'",
        ),
        ({"jobs": {"worker": "a:1"}}, "`worker` is 'a:1'; it must be a list"),
        ({"jobs": {"worker": ("a:1", 7)}}, r"`worker\[1\]` is 7; it must be a text"),
        ({"jobs": {"worker": ("a:1", "b:70000")}}, r"`worker\[1\]` is 'b:70000'.*port from 1 to 65535"),
        ({"jobs": {"worker": ("a:1", "A:1")}}, r"`worker\[1\]` is 'A:1'.*`worker\[0\]` has the same"),
        ({"jobs": {"worker": ("a:1", "a:01")}}, r"`worker\[1\]` is 'a:01'.*`worker\[0\]` has the same"),
        ({"jobs": {"worker": ("[::1]:1", "[0:0::1]:1")}}, r"`worker\[1\]` is .*`worker\[0\]` has the same"),
        ({"jobs": {"worker": ("a:1",), "ps": ("a:1",)}}, r"`ps\[0\]` is 'a:1'.*`worker\[0\]` has the same"),
        ({"jobs": {"worker": ("a:1",), "chief": ("b:1", "c:1")}}, "`chief` is .*one address at most"),
        ({"jobs": {"worker": ("a:1",), "evaluator": ("b:1", "c:1")}}, "`evaluator` is .*one address at most"),
        ({"jobs": {}}, "a job with at least one address"),
        ({"jobs": {"worker": ()}}, "a job with at least one address"),
        ({"jobs": [("worker", ("a:1",))]}, "a mapping from job to addresses"),
        ({"jobs": {"worker": (None, "b:1")}}, r"`worker\[0\]` is not set.*find process 0"),
        ({"jobs": {"worker": ("a:1",), "ps": (None,)}}, r"`ps\[0\]` is not set.*find every ps"),
        ({"task_type": "master"}, "`task_type` is 'master'; it must be one of"),
        ({"task_type": "wroker"}, "`task_type` is 'wroker'.*Did you mean 'worker'"),
        ({"task_type": "ps"}, "`task_type` is 'ps'; it must be a job of the cluster, which has worker"),
        ({"task_index": 2}, "`task_index` is 2; it must be from 0 to 1, as the cluster has 2 worker"),
        ({"task_index": -1}, "`task_index` is -1; it must be a whole number of at least 0"),
        ({"task_index": True}, "`task_index` is True"),
        ({"task_index": 1.0}, "`task_index` is 1.0"),
        ({"local_device_ids": ()}, "`local_device_ids` is"),
        ({"local_device_ids": (0, 0)}, "each once"),
        ({"local_device_ids": (0, -1)}, "whole numbers of at least 0"),
        ({"local_device_ids": (True,)}, "whole numbers of at least 0"),
        ({"local_device_ids": 0}, "whole numbers of at least 0"),
    ],
)
def test_what_a_spec_refuses(changes, message):
    with pytest.raises(ClusterConfigError, match=message):
        spec(**changes)


def test_a_refusal_names_variable_field_and_value():
    with pytest.raises(ClusterConfigError) as info:
        spec({"worker": ("a:1", "b:0")}, origins={"jobs": "SOME_VARIABLE"})
    assert (info.value.variable, info.value.field, info.value.value) == ("SOME_VARIABLE", "worker[1]", "b:0")
    assert isinstance(info.value, JDistError)
    assert isinstance(info.value, ValueError)


def test_a_spec_is_immutable():
    found = spec()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.task_index = 1
    with pytest.raises(TypeError):
        found.jobs["worker"] = ()
    assert dataclasses.replace(found, task_index=1).process_index == 1


def test_lists_become_tuples_and_empty_jobs_are_left_out():
    found = spec({"ps": [], "worker": ["a:1", "b:1"]}, local_device_ids=[1, 0])
    assert dict(found.jobs) == WORKERS
    assert found.local_device_ids == (1, 0)


@pytest.mark.parametrize("task", [("chief", 0), ("worker", 1), ("ps", 1), ("evaluator", 0)])
def test_as_tf_config_is_read_again(task):
    found = spec(WITH_CHIEF, *task)
    again = tf_config({"TF_CONFIG": json.dumps(found.as_tf_config())})
    assert again is not None
    assert (again.jobs, again.task_type, again.task_index) == (found.jobs, *task)


def test_as_tf_config_keeps_addresses_that_are_not_known():
    found = spec({"worker": ("a:1", None)}, "worker", 1)
    again = tf_config({"TF_CONFIG": json.dumps(found.as_tf_config())})
    assert again is not None
    assert again.processes == ("a:1", None)


def test_describe_says_where_each_value_came_from():
    found = spec(
        WITH_CHIEF | {"worker": tuple(f"n{i}:1" for i in range(12))},
        "worker",
        3,
        resolver="slurm",
        origins={"jobs": "SLURM_STEP_NODELIST", "task_index": "SLURM_PROCID", "local_device_ids": "SLURM_LOCALID"},
        local_device_ids=(2, 3),
    )
    assert found.describe() == (
        "cluster from slurm\n"
        "  chief         a:1  [SLURM_STEP_NODELIST]\n"
        "  worker        n0:1, n1:1, n2:1, n3:1, ..., n11:1 (12 in all)  [SLURM_STEP_NODELIST]\n"
        "  ps            p:1, q:1  [SLURM_STEP_NODELIST]\n"
        "  evaluator     e:1  [SLURM_STEP_NODELIST]\n"
        "  this process  worker 3, process 4 of 13  [SLURM_PROCID]\n"
        "  GPUs          2, 3  [SLURM_LOCALID]"
    )
    assert repr(found) == (
        "ClusterSpec(worker 3, process 4 of 13; cluster: 1 chief, 12 worker, 2 ps, 1 evaluator; from slurm)"
    )


def test_describe_without_origins():
    assert spec({"worker": (None,)}).describe().splitlines()[1:] == [
        "  worker        (address not known)",
        "  this process  worker 0, process 0 of 1",
        "  GPUs          all",
    ]


# ---- addresses


@pytest.mark.parametrize(
    "address", ["a:1", "a.b-c_d.example:65535", "10.0.0.1:2222", "[::1]:8080", "[fe80::1%eth0]:80", "_x.svc.:80"]
)
def test_addresses(address):
    assert problem(address) is None
    assert join(*split(address)) == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "both the host and the port"),
        ("host", "both the host and the port"),
        (":2222", "both the host and the port"),
        ("host:", "port from 1 to 65535"),
        ("host:0", "port from 1 to 65535"),
        ("host:65536", "port from 1 to 65535"),
        ("host:-1", "port from 1 to 65535"),
        ("host:2 2", "port from 1 to 65535"),
        ("host:٢٢", "port from 1 to 65535"),
        ("fe80::1:2222", "IPv6 address in brackets"),
        ("[fe80::zz]:2222", "The brackets must hold an IPv6 address"),
        ("grpc://host:2222", r"Leave out .* \(grpc://\)"),
        ("host name:2222", "letters, digits, dots and hyphens"),
        ("hôte:2222", "letters, digits, dots and hyphens"),
        ("-host:2222", "letters, digits, dots and hyphens"),
        ("host\n:2222", "letters, digits, dots and hyphens"),
        ("[]:2222", "letters, digits, dots and hyphens"),
    ],
)
def test_what_is_no_address(address, message):
    assert re.search(message, problem(address) or "")


def test_a_host_alone():
    assert host_problem("n1") is None
    assert host_problem("fe80::1") is None
    assert host_problem("a b") is not None
