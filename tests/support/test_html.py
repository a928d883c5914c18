"""What notebooks show of states, datasets, clusters and plans."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from IPython.lib.pretty import pretty
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jdist
from jdist.ps.coordinator.remote_state import RemoteState
from jdist.support.leaves import describe, leaves_of, table_of
from jdist.support.table import Table


def create_state(width=4):
    params = {"<b>": jnp.ones((8, width)), "w": jnp.ones(3, jnp.bfloat16)}
    return jdist.TrainState.create(params=params, tx=optax.sgd(0.1), rng=jax.random.key(0), seen=jnp.int32(0))


def rows_of(html):
    """The cells of each row, still escaped."""
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_all_text_is_escaped():
    html = Table("<t>", [("<a>", "b & c\nd")], header=("<x>", "y"), notes=["n < m"])._repr_html_()
    assert rows_of(html) == [["&lt;x&gt;", "y"], ["&lt;a&gt;", "b &amp; c<br>d"]]
    assert "<caption>&lt;t&gt;</caption>" in html
    assert html.endswith("<p>n &lt; m</p>")


def test_columns_of_numbers_are_set_to_the_right():
    rows = [("a", 5, "-", "1 of 2", "one"), ("bcd", "1,234", "nan", "", "2")]
    assert str(Table("of these", rows, ("name", "n", "-0.5", "parts", "words"), ["a note"])).splitlines() == [
        "of these",
        "  name      n  -0.5   parts  words",
        "  a         5     -  1 of 2  one",
        "  bcd   1,234   nan          2",
        "  a note",
    ]
    assert str(Table("", rows[:1])) == "a  5  -  1 of 2  one"
    assert str(Table("none", (), ("name",))) == "none"


def test_a_state_says_of_each_leaf_where_it_lives():
    strategy = jdist.mirrored(["cpu:0", "cpu:1", "cpu:2"])
    state = strategy.init(create_state)
    copies = "whole on each of 3 devices"
    assert rows_of(state._repr_html_()) == [
        ["leaf", "array", "bytes", "how it is kept", "bytes a device"],
        ["step", "int32[]", "4", copies, "4"],
        ["params[&#x27;&lt;b&gt;&#x27;]", "float32[8, 4]", "128", copies, "128"],
        ["params[&#x27;w&#x27;]", "bfloat16[3]", "6", copies, "6"],
        ["rng", "key&lt;fry&gt;[]", "8", copies, "8"],
        ["extra[&#x27;seen&#x27;]", "int32[]", "4", copies, "4"],
        ["all", "", "150", "100.0% of it", "150"],
    ]
    assert {row[3] for row in rows_of(strategy.fetch(state)._repr_html_())[1:-1]} <= {"whole on cpu:0", "on the host"}


def test_a_state_that_was_donated_is_shown_as_before():
    state = create_state()
    before = rows_of(state._repr_html_())
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    after = rows_of(state._repr_html_())
    assert [row[:3] for row in after] == [row[:3] for row in before]
    assert {row[3] for row in after[1:-1]} == {"deleted (donated to a step): was whole on cpu:0"}
    text = pretty(state).splitlines()  # which IPython makes beside the HTML
    assert [line.split()[0] for line in text[:4]] == ["TrainState", "leaf", "step", "params['<b>']"]
    assert re.search(r"float32\[8, 4\] +128  deleted \(donated to a step\): was whole on cpu:0 +0$", text[3])


def test_a_state_of_other_things_is_shown_as_they_are():
    shapes = jax.tree.map(jnp.shape, create_state())
    assert shapes._repr_html_() is None
    assert pretty(shapes) == repr(shapes)


def test_a_large_state_is_cut():
    html = table_of(leaves_of([0.0] * 1234), "many")._repr_html_()
    assert len(rows_of(html)) == 1 + 100 + 2
    assert rows_of(html)[-2:] == [["… 1,134 more", "", "", "", ""], ["all", "", "4,936", "0.0% of it", "0"]]


MESH = functools.partial(jax.make_mesh, (2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: jnp.ones(3), "whole on cpu:0"),
        (lambda: jax.device_put(1.0, jax.devices("cpu")[3]), "whole on cpu:3"),
        (lambda: jax.device_put(np.ones((4, 6)), _by("x", "y")), "in 4 parts over x=2 x y=2: [2, 3] each"),
        (lambda: jax.device_put(np.ones((4, 6)), _by("x")), "in 2 parts over x, 2 copies of each: [2, 6] each"),
        (lambda: jax.device_put(np.ones(4), _by().with_memory_kind("unpinned_host")), "whole on each of 4 devices in host"),
        (lambda: jax.ShapeDtypeStruct((4,), "f4"), "only its shape is known"),
        (lambda: jax.ShapeDtypeStruct((4,), "f4", sharding=_by("x")), "in 2 parts over x, 2 copies of each: [2] each"),
        (lambda: jax.ShapeDtypeStruct((4,), "f4", sharding=_abstract("x")), "P"),
        (lambda: np.float32(1), "on the host"),
        (lambda: "text", "on the host, a Python value"),
    ],
)  # fmt: skip
def test_where_a_leaf_lives(make, where):
    assert describe("", make()).kept.startswith(where)


def _by(*axes):
    return NamedSharding(MESH(), PartitionSpec(*axes))


def _abstract(*axes):
    return NamedSharding(AbstractMesh((2, 2), ("x", "y")), PartitionSpec(*axes))


def test_traced_states_are_shown_too():
    seen = []
    jax.eval_shape(lambda state: seen.append(state._repr_html_()), create_state())
    assert {row[3] for row in rows_of(seen[0])[1:-1]} == {"traced: known when the program runs"}
    shapes = jax.eval_shape(create_state)
    assert {row[3] for row in rows_of(shapes._repr_html_())[1:-1]} == {"only its shape is known"}


def test_a_state_spread_over_host_memory():
    strategy = jdist.central_storage(["cpu:0", "cpu:1"])
    state = strategy.init(functools.partial(create_state, 512))
    found = rows_of(state._repr_html_())[2]
    assert found == [
        "params[&#x27;&lt;b&gt;&#x27;]",
        "float32[8, 512]",
        "16,384",
        "in 2 parts over replica in host memory: [2048] each, stored as [4096]",
        "0",
    ]


def test_a_state_on_parameter_servers():
    html = RemoteState(None, create_state())._repr_html_()
    assert {row[3] for row in rows_of(html)[1:-1]} == {"on the parameter servers"}
    assert ["params[&#x27;w&#x27;]", "bfloat16[3]", "6", "on the parameter servers", "0"] in rows_of(html)


def test_a_dataset_says_what_it_knows_without_reading():
    rows = {"x": np.ones((100, 3), np.float32)}
    dataset = jdist.mirrored(["cpu:0", "cpu:1"]).distribute_dataset(
        jdist.data.from_arrays(rows, global_batch=33, epochs=2)
    )
    assert rows_of(dataset._repr_html_()) == [
        ["replicas", "2"],
        ["global batch", "33 rows, padded to 34: 17 a replica"],
        ["steps of a pass", "8"],
        ["at step", "0"],
        ["steps a call", "1"],
    ]
    next(iter(dataset))
    html = dataset._repr_html_()
    assert ["at step", "1"] in rows_of(html)
    assert ["[&#x27;x&#x27;]", "float32[34, 3]", "408"] in [row[:3] for row in rows_of(html)]

    def untouched():
        raise AssertionError("was read")
        yield

    plain = jdist.mirrored(["cpu:0"]).distribute_dataset(untouched())
    assert ["global batch", "known after the first batch"] in rows_of(plain._repr_html_())
    assert ["steps of a pass", "not known: a plain iterable"] in rows_of(plain._repr_html_())


def test_a_cluster_says_who_is_where():
    spec = jdist.cluster.ClusterSpec(
        jobs={"chief": ("a:1",), "worker": ("b:2", None)},
        task_type="worker",
        task_index=1,
        resolver="<mine>",
        origins={"jobs": "MY_JOBS"},
    )
    html = spec._repr_html_()
    assert "<caption>cluster from &lt;mine&gt;</caption>" in html
    assert rows_of(html) == [
        ["job", "addresses", "from"],
        ["chief", "a:1", "MY_JOBS"],
        ["worker", "b:2, (address not known)", "MY_JOBS"],
        ["this process", "worker 1, process 2 of 3", ""],
        ["GPUs", "all", ""],
    ]


def test_a_plan_shows_in_tables_what_its_text_says():
    plan = jdist.plan.plan_config("configs/digits.yaml", "task.options.width=4", topology="cpu:8")
    text = jdist.plan.show(plan)
    cells = [cell for row in rows_of(plan._repr_html_()) for cell in row]
    assert {"arguments", "temporaries", "all-reduce", "FLOPs"} <= set(cells)
    assert all(re.sub("&#x27;", "'", cell) in text for cell in cells)
    assert repr(plan) == "Plan(cpu:8: 8 cpu devices, global batch 128, fits; `jdist.plan.show` has all of it)"
