"""`jdist.show` and `strategy.report`: which device, host or server holds which part of a state."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.core.state_report import Place, rows_of
from jdist.errors import StepError
from jdist.support import leaves
from tests.by_default import some
from tests.pictures import check_picture

KEY = jax.random.key(0)
STRATEGIES = {
    "default": jdist.default,
    "one_device": lambda: jdist.one_device("cpu:3"),
    "mirrored": jdist.mirrored,
    "pmap": lambda: jdist.mirrored(transform="pmap"),
    "multi_worker": jdist.multi_worker,
    "central_storage": jdist.central_storage,
    "sharded": jdist.sharded,
    "within": lambda: jdist.sharded(within=4),
    "optimizer": lambda: jdist.mirrored(shard="optimizer"),
    "rules": lambda: jdist.sharded(mesh={"replica": -1, "model": 2}, rules=[("up", (None, "model"))]),
}


def create(key):
    params = {"up": jax.random.normal(key, (96, 64)), "bias": jnp.zeros(64), "down": jnp.ones((77, 31))}
    return jdist.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


SHAPES = jax.eval_shape(create, KEY)


def devices(report, members=None):
    """The places that hold something themselves: devices and hosts' memories."""
    for place in report.places if members is None else members:
        yield from devices(report, place.places) if place.places else (place,)


def bytes_by_device(report):
    return {place.name: place.num_bytes for place in devices(report) if place.name != "host memory"}


def bytes_of_shards(state, *, on_host):
    """The oracle: what JAX says that each device has of each array."""
    total = {}
    for x in jax.tree.leaves(state):
        for shard in x.addressable_shards:
            name = f"{shard.device.platform}:{shard.device.id}"
            is_there = (x.sharding.memory_kind != shard.device.default_memory().kind) == on_host
            total[name] = total.get(name, 0) + shard.data.nbytes * is_there
    return total


@pytest.mark.parametrize("name", some(STRATEGIES, ["default", "central_storage", "within", "optimizer", "rules"]))
def test_a_picture_has_the_bytes_that_each_device_holds_and_the_plan_is_what_becomes_of_it(name):
    strategy = STRATEGIES[name]()
    state = strategy.init(create, KEY)
    picture = strategy.report(state)
    assert bytes_by_device(picture) == bytes_of_shards(state, on_host=False)
    in_host_memory = sum(place.num_bytes for place in devices(picture) if place.name == "host memory")
    assert in_host_memory == sum(bytes_of_shards(state, on_host=True).values())
    assert str(strategy.report(SHAPES)) == str(picture)
    assert picture.num_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(SHAPES))
    # The same by where the arrays are, of whatever strategy.
    assert bytes_by_device(jdist.show(state)) == bytes_by_device(picture)
    assert str(picture).startswith(f"{strategy.name}: ")
    for each in (picture, jdist.show(state)):
        texts = check_picture(str(each.svg))
        assert all(place.name in texts for place in devices(each))


def test_each_device_has_the_part_that_jax_gives_it():
    strategy = jdist.sharded()
    state = strategy.init(lambda: {"w": jnp.arange(4096.0)})
    by_name = {place.name: place for place in devices(jdist.show(state))}
    for shard in state["w"].stored.addressable_shards:
        (holding,) = by_name[f"cpu:{shard.device.id}"].holdings
        assert holding.label == f"part {shard.index[0].start // 512} of 8"
        assert holding.spans == ((shard.index[0].start / 4096, shard.index[0].stop / 4096),)


def test_text_for_a_terminal():
    lines = str(jdist.sharded(["cpu:0", "cpu:1"]).report({"w": jax.ShapeDtypeStruct((64, 32), "float32")})).splitlines()
    assert lines == [
        "sharded: 2 replicas, 2 devices of 1 process, cpu (cpu)",
        "  a state of 1 array, 8.00 KiB; 4.00 KiB on each device (50.00% of it)",
        "  leaf   array            bytes  how it is kept                          bytes a device",
        "  ['w']  float32[64, 32]  8,192  in 2 parts over replica: [32, 32] each           4,096",
        "  all                     8,192  50.0% of it                                      4,096",
        "  A  in 2 parts over replica: 1 array, 8.00 KiB, 4.00 KiB on each (['w'])",
        "this machine",
        "  cpu:0  replica 0  4.00 KiB  A ########........ part 0 of 2",
        "  cpu:1  replica 1  4.00 KiB  A ........######## part 1 of 2",
    ]


def test_arrays_that_no_strategy_placed():
    state = {"a": jax.device_put(jnp.ones(10), jax.devices()[1]), "b": np.ones(3, np.float32), "c": 2}
    picture = jdist.show(state)
    held = {place.name: place.num_bytes for place in devices(picture)}
    assert held == {"host memory": 16, "cpu:1": 40}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    both = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P("y", "x")))
    assert "in 8 parts over y=2 x x=4" in str(jdist.show(both))
    check_picture(str(picture.svg))


def test_copies_in_a_hosts_memory_are_counted_for_each_device():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    state = [
        jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P(*spec), memory_kind="pinned_host"))
        for spec in ((), ("x",), (("x", "y"),))
    ]
    (host,) = (place for place in devices(jdist.show(state)) if place.name == "host memory")
    assert host.num_bytes == sum(bytes_of_shards(state, on_host=True).values()) == 8 * 32 + 2 * 32 + 32
    assert [each.label for each in host.holdings] == ["whole, 8 copies", "all 4 parts", "all 8 parts"]


@pytest.mark.parametrize("spec", [("x", "y"), ("y", "x"), (("x", "y"),), (("y", "x"),), ("y",), (None, "x")], ids=str)
def test_the_number_of_a_part_is_its_place_in_the_array(spec):
    sharding = jax.NamedSharding(jax.make_mesh((4, 2), ("x", "y")), jax.P(*spec))
    shards = jax.device_put(jnp.ones((8, 8)), sharding).addressable_shards
    starts = {shard.device: tuple(each.start or 0 for each in shard.index) for shard in shards}
    order = sorted(set(starts.values()))
    numbers = {device: order.index(start) for device, start in starts.items()}
    picture = jdist.show(jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding))
    labels = {place.name: [each.label for each in place.holdings] for place in devices(picture)}
    assert labels == {f"cpu:{device.id}": [f"part {i} of {len(order)}"] for device, i in numbers.items()}
    assert leaves._parts_by_index(sharding, (8, 8)) == numbers  # of shardings without a mesh


@pytest.mark.parametrize(
    ("topology", "shard", "first", "last"),
    [
        ("v5p:16x16x16", "state", "host 0", "host 1023"),
        ("v5p:8x8x8,slices=8", {"within": 512}, "slice 0", "slice 7"),
        ("v5e:2x4", None, "host 0", "host 1"),
    ],
)
def test_chips_that_are_not_here_are_counted_where_they_are_alike(topology, shard, first, last):
    pytest.importorskip("libtpu", reason="describes TPUs that are not here")
    strategy = jdist.tpu(topology=topology, shard=shard)
    picture = strategy.report(SHAPES)
    assert set(bytes_by_device(picture).values()) == {strategy.report(SHAPES).bytes_per_device}
    assert len(list(devices(picture))) == len(strategy.devices)
    text, svg = str(picture), str(picture.svg)
    assert len(svg) < 40_000
    texts = check_picture(svg)
    assert {first, last} <= set(texts)
    named = len(set(re.findall(r"^ *host (\d+)$", text, re.M)))
    if len(strategy.devices) > 8:
        assert len(text.splitlines()) < 50
        assert named < 10
        outer = [each for depth, each in rows_of(picture.places) if depth == 0]
        (more,) = (each for each in outer if isinstance(each, str))
        counted = re.fullmatch(r"… ([\d,]+) more (host|slice)s?\b.*, alike", more)
        assert int(counted[1].replace(",", "")) + len(outer) - 1 == len(picture.places)


def test_what_a_strategy_would_refuse_is_marked():
    picture = jdist.sharded(whole_below=10**6).report(
        {"w": jax.ShapeDtypeStruct((1000, 1000), "float32")}
        | {str(i): jax.ShapeDtypeStruct((500, 1000), "float32") for i in range(2)}
    )
    assert "Lower `whole_below`" in str(picture)
    assert any(text.startswith("Refused: ") for text in check_picture(str(picture.svg)))


def test_without_a_state_the_devices_are_shown():
    picture = jdist.mirrored().report()
    assert "give it a state" in str(picture)
    assert [place.note for place in devices(picture)] == [f"replica {i}" for i in range(8)]
    check_picture(str(picture.svg))


def test_a_run_of_places_that_are_alike_keeps_its_order_and_those_that_differ():
    members = [Place(f"cpu:{i}") for i in range(20)]
    first, second, counted, last = (each for _, each in rows_of(members))
    assert [first, second, last] == [*members[:2], members[-1]]
    assert counted == "… 17 more devices, cpu:2 to cpu:18, alike"
    assert [each for _, each in rows_of(members[:8])] == members[:8]


def test_a_file_of_a_picture(tmp_path):
    picture = jdist.show({"w": jnp.ones(3)})
    picture.save(tmp_path / "a.svg")
    check_picture((tmp_path / "a.svg").read_text())
    with pytest.raises(StepError, match=r"'.*a\.png' does not end in \.svg"):
        picture.save(tmp_path / "a.png")


def test_what_is_in_no_place_is_described():
    strategy = jdist.mirrored()
    state = strategy.init(lambda: {"w": jnp.ones(8)})
    after, _ = jdist.distribute(lambda state, batch: ({"w": state["w"] + 1}, {}), strategy)(state, {"x": np.ones(8)})
    (leaf,) = jdist.show(state).leaves
    assert (leaf.kept, leaf.bytes_per_device) == ("deleted (donated to a step): was whole on each of 8 devices", 0)
    assert strategy.report(state).leaves == strategy.report(after).leaves == jdist.show(after).leaves
    found = jdist.show({"a": jax.ShapeDtypeStruct((3,), "float32"), "b": "text"})
    assert [each.kept for each in found.leaves] == ["only its shape is known", "on the host, a Python value"]
    check_picture(str(found.svg))
    traced = []
    jax.jit(lambda x: traced.append(str(jdist.show({"w": x}))))(jnp.ones(3))
    assert "traced: known when the program runs" in traced[0]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, r"without arrays \(dict\); give it one"),
        (None, r"without arrays \(NoneType\)"),
        (lambda key: {"w": jnp.ones(3)}, r"got a function; .*`strategy.report\(jax.eval_shape\(create, key\)\)`"),
    ],
)
def test_what_is_no_state_is_refused(state, text):
    with pytest.raises(StepError, match=f"jdist.show.*{text}"):
        jdist.show(state)
    if state is not None:
        with pytest.raises(StepError, match=f"strategy.report.*{text}"):
            jdist.mirrored().report(state)


def test_what_becomes_of_a_state_that_is_kept_otherwise():
    whole = {"w": jnp.ones((64, 64))}
    strategies = (jdist.mirrored(), jdist.one_device("cpu:1"), jdist.sharded(), jdist.sharded(within=4))
    for strategy in strategies:
        planned = strategy.report(jax.eval_shape(lambda: whole)).leaves
        for state in (whole, {"w": np.ones((64, 64), "f4")}, *(other.init(lambda: whole) for other in strategies)):
            assert strategy.report(state).leaves == planned
