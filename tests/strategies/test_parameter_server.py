"""The arguments of `jdist.parameter_server`: one list, and each is checked before there is any server."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest

import jdist
from jdist.cluster import ClusterSpec
from jdist.errors import StrategyError
from jdist.strategies.parameter_server import PsArguments, PsKeywords, parameter_server
from jdist.support.signature import check_options

SPEC = ClusterSpec(
    jobs={"chief": ("c:1",), "worker": ("w:1",), "ps": ("p:1",)}, task_type="chief", task_index=0, resolver="a test"
)


def test_an_editor_a_notebook_and_a_config_see_the_same_arguments():
    listed = {field.name: field.default for field in fields(PsArguments)}
    parameters = inspect.signature(jdist.parameter_server).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == listed
    assert ["cluster", *get_type_hints(PsKeywords)] == list(listed)


def test_numbers_of_numpy_become_numbers_that_travel():
    arguments = PsArguments(local_workers=np.int64(3), max_staleness=np.int32(2), insecure=np.bool_(True))
    values = arguments.local_workers, arguments.max_staleness, arguments.insecure
    assert (values, [type(x) for x in values]) == ((3, 2, True), [int, int, bool])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"local_worker": 2},
            r"has no option `local_worker`\. Did you mean 'local_workers'\? It has: cluster, local_wor",
        ),
        ({"local_workers": 0}, "`local_workers` is 0; it must be a whole number, 1 or more"),
        ({"local_ps": 1.0}, "`local_ps` is 1.0; it must be a whole number, 1 or more"),
        *(
            ({"start_timeout_s": wrong}, "`start_timeout_s` is .*; it must be a number of seconds, 0 or more")
            for wrong in (-1, float("nan"), True, "soon")
        ),
        ({"insecure": "no"}, "`insecure` is 'no'; it must be True or False"),
        ({"keep_servers": 1}, "`keep_servers` is 1; it must be True or False"),
        ({"partitioner": 2}, r"`partitioner` is 2; it must be `jdist\.ps\.fixed_shards\(n\)`"),
        ({"placement": "hash"}, "`placement` is 'hash'; it must be 'round_robin' or 'bytes'"),
        ({"placement": "byte"}, "Did you mean 'bytes'"),
        ({"mode": "asinc"}, "`mode` is 'asinc'.*Did you mean 'async'"),
        ({"backup_workers": None}, "`backup_workers` is None; it must be a whole number, 0 or more"),
        ({"backup_workers": 1}, "`backup_workers` is for"),
        ({"mode": "sync", "backup_workers": 2, "local_workers": 2}, "`backup_workers` is 2, and there are 2 workers"),
        ({"max_staleness": -1}, "`max_staleness` is -1; it must be a whole number, 0 or more"),
        ({"max_staleness": 1.5}, r"`max_staleness` is 1\.5"),
        ({"mode": "sync", "max_staleness": 3}, "`max_staleness` is for asynchronous"),
        ({"on_stale": "drop"}, "`on_stale` is 'drop'; it must be 'refuse' or 'down_weight'"),
        ({"wire": "bf61"}, "`wire` is 'bf61'; it must be 'float32' or 'bf16'"),
        ({"ps_replicas": 3}, "`ps_replicas` is 3; it must be a whole number from 1 to 2"),
        ({"ps_replicas": 2, "local_ps": 1}, "`ps_replicas` is 2 and there is 1 parameter server.*Give `local_ps=2`"),
        ({"ps_replicas": 2, "cluster": SPEC}, "there is 1 parameter server.*Add one to the cluster"),
        ({"times": 1.0}, r"`times` is a float; pass a `jdist\.ps\.Times`"),
        ({"axis": "a b"}, "`axis` is 'a b'"),
        ({"cluster": {}}, "`cluster` is a dict"),
        ({"cluster": SPEC, "local_ps": 1}, "both `cluster` and processes of this machine are given"),
    ],
)
def test_what_is_wrong_is_refused_before_there_is_any_server(arguments, words):
    with pytest.raises(StrategyError, match=words):
        parameter_server(**arguments)


def test_a_config_checks_its_options_by_their_types():
    (problem,) = check_options(jdist.parameter_server, {"local_workers": "two"}, called="parameter_server")
    assert problem.key == ("local_workers",)
    assert '"two" is not a whole number' in problem.text
