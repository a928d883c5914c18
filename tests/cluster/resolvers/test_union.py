"""Clusters from arguments, and several joined."""

import json

import pytest

from jdist.cluster import jax_env, simple, slurm, tf_config, union
from jdist.errors import ClusterConfigError

CONFIG = {
    "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}),
}
SERVERS = simple(jobs={"ps": ["p:1", "q:1"]}, task_type="ps", task_index=0)


def test_simple():
    spec = simple(jobs={"worker": ["a:1", "b:1"]}, task_type="worker", task_index=1, local_device_ids=[0])
    assert (spec.process_index, spec.address, spec.local_device_ids, spec.resolver) == (1, "b:1", (0,), "simple")
    assert spec.origins["jobs"] == "`jobs`"


def test_simple_names_the_argument():
    with pytest.raises(ClusterConfigError, match="`task_index`: `task_index` is 7"):
        simple(jobs={"worker": ["a:1"]}, task_type="worker", task_index=7)


def test_the_first_part_says_which_task_this_is():
    spec = union(tf_config, SERVERS)(CONFIG)
    assert dict(spec.jobs) == {"worker": ("a:1", "b:1"), "ps": ("p:1", "q:1")}
    assert (spec.task_type, spec.task_index, spec.num_ps) == ("worker", 1, 2)
    assert spec.resolver == "union(tf_config, simple)"
    assert spec.origins["jobs"] == "TF_CONFIG, `jobs`"
    other = union(SERVERS, tf_config)(CONFIG)
    assert (other.task_type, other.task_index) == ("ps", 0)


def test_tasks_of_one_job_follow_each_other():
    more = simple(jobs={"worker": ["c:1"]}, task_type="worker", task_index=0)
    assert union(tf_config, more)(CONFIG).processes == ("a:1", "b:1", "c:1")


def test_parts_that_agree_count_once():
    devices = simple(jobs={"worker": ["a:1", "b:1"]}, task_type="worker", task_index=1, local_device_ids=[0])
    spec = union(devices, tf_config)(CONFIG)
    assert (spec.processes, spec.local_device_ids) == (("a:1", "b:1"), (0,))


def test_parts_that_do_not_apply_are_passed_over():
    assert union(jax_env, slurm, tf_config)(CONFIG).resolver == "union(tf_config)"
    assert union(jax_env, slurm)(CONFIG) is None
    assert union()(CONFIG) is None


def test_one_address_for_two_tasks():
    other = simple(jobs={"worker": ["b:1"]}, task_type="worker", task_index=0)
    with pytest.raises(ClusterConfigError, match=r"`worker\[2\]` is 'b:1'.*`worker\[1\]` has the same"):
        union(tf_config, other)(CONFIG)


def test_two_chiefs():
    chiefs = [simple(jobs={"chief": [f"{host}:1"]}, task_type="chief", task_index=0) for host in "cd"]
    with pytest.raises(ClusterConfigError, match=r"`chief` is .*one address at most"):
        union(*chiefs)({})
