import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.cluster import simple
from jdist.errors import ClusterConfigError, ClusterError, DeviceError, StrategyError

ALONE = simple(jobs={"worker": ["127.0.0.1:2222"]}, task_type="worker", task_index=0)


def test_without_a_cluster_it_is_one_process_with_all_its_devices(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = jdist.multi_worker()
    assert (strategy.num_replicas, strategy.cluster.num_processes) == (len(jax.devices()), 1)
    assert strategy.cluster.is_chief


def test_in_the_evaluator_it_has_its_own_devices_and_waits_for_nobody():
    jobs = {"worker": ["127.0.0.1:2222", "127.0.0.1:2224"]}
    strategy = jdist.multi_worker(simple(jobs=jobs, task_type="evaluator", task_index=0))
    assert (strategy.num_replicas, strategy.cluster.num_processes) == (len(jax.devices()), 1)


def test_it_may_be_called_again_with_other_options():
    first = jdist.multi_worker(ALONE)
    again = jdist.multi_worker(ALONE, communication={"bytes_per_pack": 1000, "timeout_s": 60})
    assert first.mesh == again.mesh
    assert (first.reduction.name, again.reduction.name) == ("psum", "bucketed(1000)")


def test_one_process_takes_steps_as_mirrored_does():
    def step(state, batch):
        loss, grads = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] @ w) ** 2, batch["mask"]))(state)
        return state - 0.1 * grads, {"loss": loss}

    batch = {"x": np.arange(32, dtype=np.float32).reshape(16, 2) / 32, "mask": np.ones(16, bool)}
    results = []
    for strategy in (jdist.multi_worker(ALONE), jdist.mirrored()):
        state, metrics = jdist.distribute(strategy)(step)(jnp.ones(2), batch)
        results.append((strategy.fetch(state).tolist(), float(metrics["loss"])))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "psum"),
        ({"communication": {"bytes_per_pack": 4096}}, "bucketed(4096)"),
        ({"communication": jdist.CommunicationOptions(implementation="ring")}, "ring"),
        ({"all_reduce": "ring"}, "ring"),
        ({"all_reduce": "hierarchical"}, f"hierarchical({len(jax.devices())}, 1)"),
    ],
)
def test_how_gradients_are_reduced(options, name):
    assert jdist.multi_worker(ALONE, **options).reduction.name == name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cluster": "localhost:2222"}, StrategyError, r"`cluster` is a str; pass a `jdist\.cluster\.ClusterSpec`"),
        ({"transform": "pmap"}, StrategyError, r"`transform` is 'pmap'; it must be 'shard_map' or 'jit'"),
        ({"communication": 10}, StrategyError, r"`communication` is a int; pass a `jdist\.CommunicationOptions`"),
        (
            {"communication": {"timeout": 10}},
            StrategyError,
            r"no option 'timeout'\. .*It has: bytes_per_pack, timeout_s",
        ),
        ({"communication": {"timeout_s": -1}}, StrategyError, r"`timeout_s` is -1"),
        (
            {"communication": {"implementation": "nccl"}},
            DeviceError,
            r'is "nccl", which needs GPUs; JAX has cpu devices',
        ),
        (
            {"communication": {"bytes_per_pack": 9}, "all_reduce": "psum"},
            StrategyError,
            r"both say how gradients are summed",
        ),
        (
            {"all_reduce": "ring", "transform": "jit"},
            StrategyError,
            r"`all_reduce` is ring and `transform` is \"jit\"",
        ),
        ({"all_reduce": "no such"}, StrategyError, r"no such"),
    ],
)
def test_what_is_not_right_is_named(options, error, message):
    with pytest.raises(error, match=message):
        jdist.multi_worker(**{"cluster": ALONE} | options)


def test_a_parameter_server_has_no_place_in_it():
    jobs = {"worker": ["a:1"], "ps": ["b:1"]}
    with pytest.raises(ClusterConfigError, match="This process is ps 0; it has no `process_index`"):
        jdist.multi_worker(simple(jobs=jobs, task_type="ps", task_index=0))


def test_jax_was_used_before():
    jax.devices()
    two = simple(jobs={"worker": ["127.0.0.1:2222", "127.0.0.1:2224"]}, task_type="worker", task_index=0)
    with pytest.raises(
        ClusterError, match=r"JAX has started its devices already.*Call `jdist\.multi_worker\(\)` before"
    ):
        jdist.multi_worker(two)


def test_a_cluster_that_the_environment_describes_wrongly(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}')
    with pytest.raises(ClusterConfigError, match=r"TF_CONFIG: `task\.index`|TF_CONFIG: `task_index`"):
        jdist.multi_worker()


# ---- how processes communicate


def test_what_counts_when_nothing_is_said():
    options = jdist.CommunicationOptions()
    assert (options.bytes_per_pack, options.implementation) == (0, "auto")
    assert options.timeout_s + 2 * options.timeout_s / 5 < 20  # a loss is noticed within 20 s


@pytest.mark.parametrize("seconds", [1, 2.5, 3600])
def test_seconds_that_are_allowed(seconds):
    assert jdist.CommunicationOptions(timeout_s=seconds, start_timeout_s=seconds).timeout_s == seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes_per_pack": -1}, r"`bytes_per_pack` is -1; it must be a whole number of bytes, 0 or more"),
        ({"bytes_per_pack": 1.5}, r"`bytes_per_pack` is 1\.5"),
        ({"bytes_per_pack": True}, r"`bytes_per_pack` is True"),
        ({"timeout_s": 0}, r"`timeout_s` is 0; it must be a number of seconds, 1 or more"),
        ({"timeout_s": 0.5}, r"`timeout_s` is 0\.5"),
        ({"timeout_s": float("nan")}, r"`timeout_s` is nan"),
        ({"timeout_s": "10"}, r"`timeout_s` is '10'"),
        ({"start_timeout_s": float("inf")}, r"`start_timeout_s` is inf"),
        ({"start_timeout_s": True}, r"`start_timeout_s` is True"),
        ({"implementation": "mpi"}, r"`implementation` is 'mpi'; it must be one of 'auto', 'ring', 'nccl'"),
        ({"implementation": "ring", "bytes_per_pack": 1}, r'`implementation` "ring" sends all gradients as one'),
    ],
)
def test_an_option_that_is_not_right_is_named(options, message):
    with pytest.raises(StrategyError, match=message):
        jdist.CommunicationOptions(**options)


# ---- what a step tells the cluster of how far it is


class Cluster:
    """Takes the place of a cluster's runtime, and adds up what it is told."""

    num_processes, is_alone, steps = 1, False, 0

    def blocked(self):
        return contextlib.nullcontext()

    def follow(self, value, renew):
        pass

    def advance(self, steps, result):
        self.steps += steps


def test_each_call_counts_the_steps_that_it_made():
    cluster = Cluster()
    strategy = dataclasses.replace(jdist.mirrored(["cpu:0", "cpu:1"]), cluster=cluster)
    train_step = jdist.distribute(lambda w, b: (w + 1, {}), strategy, steps_per_call=3)
    eval_step = jdist.distribute(lambda w, b: {"w": w}, strategy, returns=("metrics",))
    state = strategy.init(lambda: jnp.float32(0))
    for steps in (3, 3, 2):  # the last call of a data set
        state, _ = train_step(state, {"x": np.ones((steps, 2))})
    eval_step(state, {"x": np.ones(2)})
    assert cluster.steps == int(state) == 8
