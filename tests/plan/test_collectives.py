"""What devices exchange, read from compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdist
from jdist.plan.collectives import BETWEEN_SLICES, axes_of, collectives, host_copies, replica_groups
from jdist.plan.hlo import parse


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("replica_groups={}", [(0, 1, 2, 3)]),
        ("dimensions={0}", [(0, 1, 2, 3)]),
        ("replica_groups=[1,4]<=[4]", [(0, 1, 2, 3)]),
        ("replica_groups=[2,2]<=[4]", [(0, 1), (2, 3)]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['host'=2,'core'=2] {'core'}", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['host'=2,'core'=2] {'host'}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['host'=2,'core'=2] {'host','core'}", [(0, 1, 2, 3)]),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=3], device_ids=([3,2]T(1,0)) {'c'}", [(0, 2, 4), (1, 3, 5)]),
        ("replica_groups=mesh['a'=2,'b'=3], device_ids=([6]) {'b'}", [(0, 1, 2), (3, 4, 5)]),
        ("source_target_pairs={{0,1},{1,0},{2,3}}", [(0, 1), (2, 3)]),
        ("replica_groups=something new", None),
    ],
)
def test_replica_groups_in_every_form(written, groups):
    assert replica_groups(f", channel_id=1, {written}, use_global_device_ids=true", 4) == groups


@pytest.mark.parametrize(
    ("groups", "mesh", "axes"),
    [
        ([(0, 1, 2, 3)], {"replica": 4}, "replica"),
        ([(0, 1), (2, 3)], {"host": 2, "core": 2}, "core"),
        ([(1, 3), (0, 2)], {"host": 2, "core": 2}, "host"),
        ([(0, 1, 2, 3)], {"host": 2, "core": 2}, "host x core"),
        ([(0, 1), (2, 3)], {"replica": 4}, "?"),
        ([(2, 3)], {"replica": 4}, "?"),
        ([(0, 1)], {"replica": 4}, "replica within a slice"),
        ([(0, 1)], {"group": 2, "in_group": 2}, "in_group"),
        ([(0, 2), (1, 3)], {"group": 4, "in_group": 2}, "group within a slice"),
        ([(0, 1, 2, 3)], {"group": 4, "in_group": 2}, "group x in_group within a slice"),
    ],
)
def test_the_mesh_axes_of_groups(groups, mesh, axes):
    assert axes_of(groups, mesh) == axes


def compiled(function, *shapes, mesh, specs, out):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    args = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(shapes, specs, strict=True)
    ]
    return parse(jax.jit(mapped).lower(*args).compile().as_text())


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "core"), axis_types=(AxisType.Auto,) * 2)


def test_kinds_bytes_and_axes(mesh):
    def step(x):
        summed = jax.lax.psum(x, "core")  # [4, 8] floats
        gathered = jax.lax.all_gather(x, "host")  # results in [2, 4, 8]
        scattered = jax.lax.psum_scatter(x, "core", tiled=True)  # of [4, 8]
        moved = jax.lax.ppermute(x, "core", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return summed, gathered, scattered, moved

    module = compiled(step, (32, 8), mesh=mesh, specs=(P(("host", "core")),), out=(P(), P(), P(), P()))
    found = {c.kind: (c.axes, c.groups, c.group_size, c.count, c.bytes) for c in collectives(module, dict(mesh.shape))}
    assert found["all-reduce"] == ("core", 2, 4, 1, 128)
    assert found["all-gather"] == ("host", 4, 2, 1, 256)
    assert found["reduce-scatter"] == ("core", 2, 4, 1, 128)
    assert found["collective-permute"] == ("core", 2, 4, 1, 128)
    assert host_copies(module)[0] == 0


def test_a_loop_is_counted_with_its_trips(mesh):
    def step(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(jax.lax.pmean(c, ("host", "core"))), None), x, None, length=6)[0]

    (found,) = collectives(compiled(step, (8,), mesh=mesh, specs=(P(),), out=P()), dict(mesh.shape))
    assert (found.axes, found.count, found.bytes, found.certain) == ("host x core", 6, 6 * 32, True)


def test_a_mirrored_step_exchanges_its_parameters_once():
    strategy = jdist.mirrored()

    @functools.partial(jdist.distribute, strategy=strategy, non_finite="apply")
    def step(w, batch):
        loss, grad = jdist.value_and_grad(lambda w: jdist.mean((batch["x"] @ w) ** 2))(w)
        return w - grad, {"loss": loss}

    w, x = jax.ShapeDtypeStruct((32, 16), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)
    module = parse(step.lower(w, {"x": x}).compile().as_text())
    found = collectives(module, dict(strategy.mesh.shape))
    assert {(c.kind, c.axes, c.group_size) for c in found} == {("all-reduce", "replica", 8)}
    assert sum(c.bytes for c in found) == 32 * 16 * 4 + 4  # and the loss


CHAIN = """HloModule m, num_partitions=2

%start (a: f32[4]) -> (f32[4], f32[8]) {
  %a = f32[4]{0} parameter(0)
  %all-gather.1 = f32[8]{0} all-gather(%a), replica_groups={{0,1}}, frontend_attributes={chain_id="0"}
  ROOT %c = (f32[4]{0}, f32[8]{0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (a: f32[4], x: f32[9]) -> (f32[8], f32[9]) {
  %a = f32[4]{0} parameter(0)
  %x = f32[9]{0} parameter(1)
  %all-gather.2 = f32[8]{0} all-gather(%a), replica_groups={{0,1}}, frontend_attributes={chain_id="0"}
  ROOT %t = (f32[8]{0}, f32[9]{0}) tuple(%all-gather.2, %x)
}

%done (a: f32[4]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  %all-gather.3 = f32[8]{0} all-gather(%a), replica_groups={{0,1}}, frontend_attributes={chain_id="0"}
  ROOT %c = f32[8]{0} custom-call(%a, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%whole (a: f32[4]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  ROOT %all-gather.4 = f32[8]{0} all-gather(%a), replica_groups={{0,1}}, frontend_attributes={chain_id="1"}
}

ENTRY %main (a: f32[4], x: f32[9]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  %x = f32[9]{0} parameter(1)
  %s = (f32[4]{0}, f32[8]{0}) fusion(%a), kind=kCustom, calls=%start
  %b = (f32[8]{0}, f32[9]{0}) fusion(%a, %x), kind=kCustom, calls=%beside
  %w = f32[8]{0} fusion(%a), kind=kCustom, calls=%whole
  ROOT %d = f32[8]{0} fusion(%a), kind=kCustom, calls=%done
}
"""


def test_a_collective_beside_other_work_is_counted_once():
    (found,) = collectives(parse(CHAIN), {"replica": 2})
    assert (found.kind, found.count, found.bytes) == ("all-gather", 2, 2 * 32)


SLICES = """HloModule m, num_partitions=2

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %token = token[] after-all()
  %send = (f32[8]{0}, u32[], token[]) send(%a, %token), is_host_transfer=true, KIND
  %outfeed = token[] outfeed(%a, %token)
  ROOT %out = f32[8]{0} copy(%a)
}
"""


@pytest.mark.parametrize(
    ("transfer", "kind", "size"),
    [
        ("ALL_REDUCE", "all-reduce", 32),
        ("ALL_GATHER", "all-gather", 2 * 32),  # what the two slices have in the end
        ("REDUCE_SCATTER", "reduce-scatter", 32),
        ("ALL_TO_ALL", "all-to-all", 32),
        ("ONE_TO_ONE", "collective-permute", 32),
    ],
)
def test_messages_between_slices_are_told_by_their_kind(transfer, kind, size):
    module = parse(SLICES.replace("KIND", f'frontend_attributes={{_xla_megascale_transfer_type="{transfer}"}}'))
    (found,) = collectives(module, {"replica": 4})
    assert (found.kind, found.axes, found.count, found.bytes) == (kind + BETWEEN_SLICES, "between slices", 1, size)
    assert host_copies(module) == (1, 32)  # the outfeed
    assert host_copies(parse(SLICES.replace("KIND", "channel_id=1"))) == (2, 64)
