"""TF_CONFIG."""

import json

import pytest

from jdist.cluster import tf_config
from jdist.errors import ClusterConfigError

WORKERS = {"worker": ["a:1", "b:1"]}


def resolved(cluster=WORKERS, task_type="worker", index=0, **more):
    config = {"cluster": cluster, "task": {"type": task_type, "index": index}, **more}
    return tf_config({"TF_CONFIG": json.dumps(config)})


@pytest.mark.parametrize("index", [1, "1", " 1 ", "01"])
def test_an_index_is_a_number_or_its_text(index):
    assert resolved(index=index).process_index == 1


@pytest.mark.parametrize("index", [True, 1.0, "one", "1.0", "-1", "", None, [1], -1, "٣", 1e300])
def test_what_is_no_index(index):
    with pytest.raises(ClusterConfigError) as info:
        resolved(index=index)
    assert (info.value.variable, info.value.field) == ("TF_CONFIG", "task.index")


def test_worker_0_is_chief_where_there_is_none():
    assert resolved(index=0).is_chief
    assert not resolved({"chief": ["c:1"], **WORKERS}, index=0).is_chief
    assert resolved({"chief": ["c:1"], **WORKERS}, "chief").is_chief


def test_master_is_the_chief():
    spec = resolved({"master": ["c:1"], **WORKERS}, "master")
    assert (spec.task_type, spec.is_chief, spec.process_index) == ("chief", True, 0)
    assert resolved({"master": ["c:1"], **WORKERS}, index=1).process_index == 2
    with pytest.raises(ClusterConfigError, match=r"cluster\.master.*word for `chief`"):
        resolved({"master": ["c:1"], "chief": ["d:1"], **WORKERS})


def test_other_keys_are_not_read():
    assert resolved(environment="cloud", rpc_layer="grpc").num_processes == 2


def test_every_value_is_from_tf_config():
    spec = resolved()
    assert spec.resolver == "tf_config"
    assert set(spec.origins.values()) == {"TF_CONFIG"}
    assert spec.local_device_ids is None


def test_jax_local_device_ids():
    config = json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": 0}})
    spec = tf_config({"TF_CONFIG": config, "JAX_LOCAL_DEVICE_IDS": "1, 3"})
    assert spec.local_device_ids == (1, 3)
    assert spec.origins["local_device_ids"] == "JAX_LOCAL_DEVICE_IDS"


def test_tasks_by_index():
    assert resolved({"worker": {"1": "b:1", "0": "a:1"}}).processes == ("a:1", "b:1")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"0": "a:1", "2": "c:1"}, r"`worker\[1\]` is not set; it must be there, as the tasks are 0, 2"),
        ({"1": "b:1"}, r"`worker\[0\]` is not set"),
        ({"0": "a:1", "00": "b:1"}, "`cluster.worker` is '00'; it must be an index of its own"),
        ({"first": "a:1"}, "`cluster.worker` is 'first'"),
    ],
)
def test_gaps_among_tasks_by_index(tasks, message):
    with pytest.raises(ClusterConfigError, match=message):
        resolved({"worker": tasks})


@pytest.mark.parametrize("config", [None, "", "  ", "{}", '{"cluster": {}}', '{"environment": "cloud"}'])
def test_it_does_not_apply(config):
    assert tf_config({} if config is None else {"TF_CONFIG": config}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("worker", "TF_CONFIG is 'worker'; it must be a JSON object. It is not JSON from character 0 on"),
        ('{"cluster": ', "not JSON from character 11 on"),
        ("[1]", r"TF_CONFIG is '\[1\]'; it must be a JSON object"),
        ('"x"', "it must be a JSON object"),
        ("null", "TF_CONFIG is 'null'; it must be a JSON object"),
        ('{"cluster": NaN}', "JSON has no NaN or Infinity"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": ' + "9" * 5000 + "}}", "too long"),
        ("[" * 100_000, "nested a few levels"),
        ('{"a": ' * 100_000, "nested a few levels"),
        ('{"cluster": {}, "cluster": {}}', "`cluster` is {}; it must be given once"),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', "`worker` is .*given once"),
        ('{"task": {"type": "worker", "index": 0}}', "`cluster` is not set; it must be there, as `task` is"),
        ('{"cluster": {"worker": ["a:1"]}}', "`task` is not set"),
        ('{"cluster": {"worker": ["a:1"]}, "task": "worker"}', "`task` is 'worker'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', "`task.type` is not set"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": 0, "index": 0}}', "`task.type` is 0"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "`task.index` is not set"),
        ('{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}', "`cluster` is .*object from job"),
        ('{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}', "`worker` is 'a:1'.*a list"),
        ('{"cluster": {"worker": [["a:1"]]}, "task": {"type": "worker", "index": 0}}', r"`worker\[0\]` is"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}', "`task_type` is 'ps'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "`task_index` is 1"),
        ('{"sparseCluster": {"worker": {"1": "a:1"}}, "task": {"type": "worker"}}', "enableDynamicWorker"),
    ],
)
def test_what_is_refused(config, message):
    with pytest.raises(ClusterConfigError, match=message) as info:
        tf_config({"TF_CONFIG": config})
    assert info.value.variable == "TF_CONFIG"
    assert len(str(info.value)) < 600
