"""`jdist.tpu`: its order and errors, and steps compiled by the real TPU compiler for TPUs that are not here."""

import importlib.util
import itertools
import json
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jdist
from jdist.cluster import runtime
from jdist.errors import DeviceError, StrategyError
from jdist.plan.collectives import collectives
from jdist.plan.hlo import parse
from jdist.strategies import absent_plugins, topology
from jdist.strategies.topology import by_host, parse_topology, topology_devices
from tests.by_default import some
from tests.strategies.tpu_steps import (
    TOPOLOGIES,
    batch_of,
    digits_batch,
    digits_step,
    size_bytes,
    stacked,
    the_all_reduce,
    transformer_batch,
    transformer_step,
)

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed here: pip install 'jdist[plan-tpu]'"
)


class TestWhereThereIsNoTpu:
    def test_the_error_says_what_jax_sees_and_how_to_get_one(self):
        with pytest.raises(
            DeviceError, match=r"JAX found no TPU; it sees cpu:0, .*In Colab: .*jdist\[tpu\].*topology="
        ):
            jdist.tpu()

    def test_a_name_is_compared_with_that_of_this_tpu(self, monkeypatch):
        with pytest.raises(StrategyError, match=r"`name` is 'my-tpu', but .*TPU_NAME is not set here"):
            jdist.tpu(name="my-tpu")
        monkeypatch.setenv("TPU_NAME", "my-tpu")
        for name in ("my-tpu", "local", "", None):
            with pytest.raises(DeviceError, match="JAX found no TPU"):  # the name is right, and that is all
                jdist.tpu(name=name)

    def test_several_hosts_come_together_first(self, monkeypatch):
        """As multi_worker, and before JAX is asked for devices."""
        config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        started = []
        monkeypatch.setattr(runtime, "start", lambda spec, **waits: started.append((spec.process_index, *waits)))
        with pytest.raises(DeviceError, match="JAX found no TPU"):
            jdist.tpu()
        assert started == [(1, "timeout_s", "start_timeout_s", "progress_timeout_s")]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("v5q:2x4", r"unknown TPU 'v5q'\. Did you mean 'v5p:2x4'\? Chips: v2, v3, v4, v5e"),
            ("v5p", r"'v5p' names no topology; write CHIP:SHAPE, such as .*Did you mean 'v5p:8x8x8'\?"),
            ("V5E:2x4", r"unknown TPU 'V5E'\. Did you mean 'v5e:2x4'\? Chips"),
            ("v3", r"'v3' names no topology; .*Did you mean 'v3:2x2'\?"),
            ("nothing:2x2", r"unknown TPU 'nothing'\. Chips"),
            ("v5e:8", r"'v5e:8' names no topology"),
            ("v5e:0x4", r"names no topology"),
            ("v5e:2x4,slices=0", r"names no topology"),
            (8, r"8 names no topology"),
        ],
    )
    def test_a_topology_that_is_none(self, name, message):
        with pytest.raises(DeviceError, match=message):
            jdist.tpu(topology=name)

    def test_the_parts_of_a_topology(self):
        for name in ("v5p:8x8x8", "v5e:2x4", "v6e:16x16,slices=4"):
            assert str(parse_topology(name)) == name
        assert parse_topology("v6e:16x16,slices=4").slices == 4

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            *{
                "v2-8": "v2:2x2",
                "v3-32": "v3:4x4",
                "v4-8": "v4:2x2x1",
                "v4-16": "v4:2x2x2",
                "v4-32": "v4:2x2x4",
            }.items(),
            *{"v4-128": "v4:4x4x4", "v5p-1024": "v5p:8x8x8", "v5e-1": "v5e:1x1", "v5e-8": "v5e:2x4"}.items(),
            *{"v5litepod-16": "v5e:4x4", "v5e-256": "v5e:16x16", "v6e-32": "v6e:4x8"}.items(),
        ],
    )
    def test_cloud_tpus_names_by_size(self, name, shape):
        assert str(parse_topology(name)) == shape

    def test_without_libtpu_one_sentence_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(absent_plugins.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(DeviceError, match=r"^compiling for 'v5e:2x4'.* pip install 'jdist\[plan-tpu\]'\.$"):
            jdist.tpu(topology="v5e:2x4")

    def test_an_all_reduce_that_jit_would_leave_out_is_refused(self):
        with pytest.raises(StrategyError, match='`all_reduce` is ring and `transform` is "jit"'):
            jdist.tpu(topology="v5e:2x4", transform="jit", all_reduce="ring")

    @pytest.mark.parametrize(
        "option", [{"transform": "pmap"}, {"transform": "shardmap"}, {"axis": "my axis"}, {"shard": "params"}]
    )
    def test_options_that_are_not_allowed(self, option):
        (name,) = option
        if name != "transform" and not absent_plugins.has_libtpu():
            pytest.skip("it is looked at once the devices are there")
        with pytest.raises(StrategyError, match=f"`{name}` is '{option[name]}'"):
            jdist.tpu(topology="v5e:2x4", **option)


@needs_libtpu
class TestOrder:
    @pytest.mark.parametrize(("name", "count"), TOPOLOGIES.items())
    def test_one_device_a_chip(self, name, count):
        devices = topology_devices(name)
        assert len(devices) == len(set(devices)) == count
        assert len({tuple(d.coords) for d in devices}) == count

    def test_neighbours_on_the_mesh_are_neighbours_in_the_torus(self):
        coords = [d.coords for d in topology_devices("v6e:16x16")]
        pairs = itertools.pairwise(coords)
        hops = [sum(min(abs(a - b), 16 - abs(a - b)) for a, b in zip(x, y, strict=True)) for x, y in pairs]
        assert hops.count(1) >= 15 * 16  # within each of 16 lines; from line to line it may be two

    def test_a_slice_lies_on_the_mesh_in_one_piece(self):
        strategy = jdist.tpu(topology="v5e:4x4,slices=2")
        assert [d.slice_index for d in strategy.devices] == [0] * 16 + [1] * 16

    @pytest.mark.parametrize("name", ["v5e:1x1", "v5e:1x2"])
    def test_less_than_a_host(self, name):
        assert len(topology_devices(name)) == int(name[-1])

    def test_a_shape_that_no_such_tpu_has(self):
        with pytest.raises(DeviceError, match=r"libtpu cannot describe 'v5p:3x3x3': Topology layout .* Forms: "):
            jdist.tpu(topology="v5p:3x3x3")

    def test_the_devices_of_a_host_lie_together(self):
        devices = topology_devices("v5e:4x4")
        hosts = {d.process_index for d in devices}
        assert len(hosts) > 1
        order = [d.process_index for d in by_host(devices, len(hosts))]
        assert order == sorted(order, key=order.index)  # each host in one piece
        with pytest.raises(
            DeviceError, match=rf"spans {len(hosts)} hosts, 16 devices, but the cluster .* has 1 process"
        ):
            by_host(devices, 1)

    def test_a_libtpu_that_cannot_be_loaded_is_another_error(self, monkeypatch):
        def fail(*args, **options):
            raise jax.errors.JaxRuntimeError("INTERNAL: Failed to open libtpu.so: file too short")

        monkeypatch.setattr(topology.topologies, "get_topology_desc", fail)
        with pytest.raises(
            DeviceError, match=r"^libtpu, which holds the TPU compiler, cannot be loaded: .*file too short"
        ) as e:
            jdist.tpu(topology="v5e:2x4")
        assert "Forms" not in str(e.value)

    def test_the_environment_is_as_it_was(self):
        before = dict(os.environ)
        topology_devices("v5e:2x4")
        assert dict(os.environ) == before


@needs_libtpu
def test_an_all_reduce_of_other_sizes_is_refused_when_the_strategy_is_built():
    with pytest.raises(StrategyError, match=r"hierarchical\(3, 2\) is for 6 replicas, but there are 8"):
        jdist.tpu(topology="v5e:2x4", all_reduce={"name": "hierarchical", "inner": 3, "outer": 2})


@needs_libtpu
class TestDevicesThatAreNotHere:
    def test_what_needs_them_is_refused(self):
        strategy = jdist.tpu(topology="v5e:2x4")
        step = jdist.distribute(lambda state, batch: state, strategy)
        for use in (
            lambda: strategy.init(lambda: jnp.zeros(3)),
            lambda: strategy.run(lambda: 1),
            lambda: strategy.distribute_values_from_function(lambda context: 1),
            lambda: strategy.check(jnp.zeros(3)),
            lambda: strategy.fetch(jnp.zeros(3)),
            lambda: strategy.distribute_dataset([{"x": jnp.zeros(8)}]),
            lambda: step(jnp.zeros(3), {"x": jnp.zeros(8)}),
        ):
            with pytest.raises(DeviceError, match=r"these devices are not here: .*'v5e:2x4'.*`step\.lower"):
                use()

    def test_a_step_that_keeps_residuals_is_lowered_too(self):
        strategy = jdist.tpu(topology="v5e:2x4", all_reduce={"name": "compressed", "dtype": "int8"})

        def step(w, batch):
            return w - jdist.grad(lambda w: jdist.mean((batch["x"] @ w) ** 2, batch["mask"]))(w), {}

        lowered = jdist.distribute(step, strategy).lower(
            jax.ShapeDtypeStruct((4,), jnp.float32), batch_of(16, x=((4,), jnp.float32))
        )
        assert "all_to_all" in lowered.as_text()

    def test_it_says_what_it_is(self):
        strategy = jdist.make_strategy("tpu", topology="v5e:2x4", axis="batch")
        assert (strategy.name, strategy.axes, strategy.num_replicas) == ("tpu", ("batch",), 8)
        assert strategy.topology == "v5e:2x4"
        assert jdist.mirrored().topology is None


@needs_libtpu
class TestTheDigitsStep:
    @pytest.mark.parametrize(("name", "count"), some(TOPOLOGIES.items(), [("v5e:2x4", 8)]))
    def test_it_exchanges_its_gradients_and_metrics_once(self, name, count):
        step, state = digits_step(jdist.tpu(topology=name))
        found = the_all_reduce(step, state, digits_batch(4 * count))
        assert (found.kind, found.axes, found.groups, found.group_size) == ("all-reduce", "replica", 1, count)
        scalars = 3  # the number of real rows, the loss, the accuracy
        assert found.bytes == size_bytes(state.params) + 4 * scalars

    def test_the_trips_of_a_loop_are_counted(self):
        step, state = digits_step(jdist.tpu(topology="v5e:2x4"), steps_per_call=5)
        found = the_all_reduce(step, state, stacked(digits_batch(32), 5))
        assert found.certain
        assert found.bytes == 5 * (size_bytes(state.params) + 4 * 3)


@needs_libtpu
def test_synchronised_batch_normalisation_exchanges_its_statistics_too():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=jdist.replica_axes())(nn.Dense(24)(x)))
            return nn.Dense(10)(x)

    model = Model()

    def create(key):
        variables = model.init(key, jnp.zeros((1, 64)))
        return variables["params"], variables["batch_stats"]

    @jdist.distribute(jdist.tpu(topology="v5e:2x4"))
    def train_step(state, batch):
        params, stats = state

        def loss_fn(params):
            logits, new = model.apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return jdist.mean(losses, batch["mask"]), new["batch_stats"]

        (loss, new), grads = jdist.value_and_grad(loss_fn, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new), {"loss": loss}

    state = jax.eval_shape(create, jax.random.key(0))
    found = the_all_reduce(train_step, state, batch_of(64, x=((64,), jnp.float32), label=((), jnp.int32)))
    mean_and_square = 2 * 24 * 4
    # Forwards the statistics, backwards what they pass on; the loss, the number of rows.
    assert found.bytes == size_bytes(state[0]) + 2 * mean_and_square + 4 * 2
    assert (found.axes, found.group_size) == ("replica", 8)


@needs_libtpu
@pytest.mark.parametrize(("name", "count"), some(TOPOLOGIES.items(), [("v5e:2x4", 8)]))
def test_a_transformer_exchanges_each_parameter_once(name, count):
    step, state = transformer_step(jdist.tpu(topology=name))
    found = the_all_reduce(step, state, transformer_batch(2 * count))
    assert (found.kind, found.axes, found.groups, found.group_size) == ("all-reduce", "replica", 1, count)
    assert found.bytes == size_bytes(state.params) + 4 * 2  # and the number of real rows, and the loss


@needs_libtpu
def test_slices_reduce_within_and_between():
    strategy = jdist.tpu(topology="v5e:2x4,slices=2")
    step = jdist.distribute(
        lambda w, batch: (w - jdist.grad(lambda w: jdist.mean((batch["x"] @ w) ** 2))(w), {}), strategy
    )
    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    lowered = step.lower(w, {"x": jax.ShapeDtypeStruct((64, 512), jnp.float32)})
    found = collectives(parse(lowered.compile().as_text()), dict(strategy.mesh.shape))
    axes = {c.axes for c in found}
    assert axes == {"replica within a slice", "between slices"}
    assert all(c.group_size == 8 for c in found if c.axes != "between slices")


# ---- the environment of libtpu, with a TPU and without


def test_a_compiler_takes_no_lock_and_asks_no_server(tmp_path):
    wanted = absent_plugins.compiler_environment({}, dev=tmp_path)
    assert wanted["ALLOW_MULTIPLE_LIBTPU_LOAD"] == wanted["TPU_SKIP_MDS_QUERY"] == "1"
    assert "TPU_SKIP_MDS_QUERY" not in absent_plugins.compiler_environment({"TPU_SKIP_MDS_QUERY": "0"}, dev=tmp_path)


def test_a_machine_with_a_tpu_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(absent_plugins, "has_libtpu", lambda: True)
    assert set(absent_plugins.quiet_environment({}, dev=tmp_path)) == {
        "TPU_SKIP_MDS_QUERY",
        "TPU_ACCELERATOR_TYPE",
        "TPU_WORKER_HOSTNAMES",
    }
    (tmp_path / "accel0").touch()
    assert absent_plugins.quiet_environment({}, dev=tmp_path) == {}
    assert set(absent_plugins.compiler_environment({}, dev=tmp_path)) == {"ALLOW_MULTIPLE_LIBTPU_LOAD"}


def test_without_libtpu_there_is_nothing_to_quieten(tmp_path, monkeypatch):
    monkeypatch.setattr(absent_plugins, "has_libtpu", lambda: False)
    assert absent_plugins.quiet_environment({}, dev=tmp_path) == {}
