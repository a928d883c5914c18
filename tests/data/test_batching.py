"""Shapes, padding and masks of batches."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import sparse

import jdist
from jdist.data import batching
from jdist.data.batching import element_spec, plan_layout
from jdist.data.leaves import count_rows, to_numpy
from jdist.data.options import FeedOptions
from jdist.data.position import WHOLE
from jdist.data.readers import part_of
from jdist.errors import BatchError


def layout_of(batch, *, global_batch=None, num_replicas=2, partial: Any = "pad", with_mask=False):
    full = (count_rows(to_numpy(batch)) if global_batch is None else global_batch,)
    return plan_layout(batch, full, FeedOptions(num_replicas=num_replicas, partial=partial, with_mask=with_mask))


def fit(layout, batch, *, copy) -> Any:
    return batching.fit(dataclasses.replace(layout, copy=copy), part_of(to_numpy(batch), WHOLE, layout.rows))


def with_options(layout, **options):
    return dataclasses.replace(layout, options=dataclasses.replace(layout.options, **options))


def fit_one(batch, *, copy=False, **options):
    return fit(layout_of(batch, **options), batch, copy=copy)


def test_dict_gains_a_mask_that_is_all_true_when_the_batch_is_full():
    fitted = fit_one({"x": np.arange(4)})
    assert sorted(fitted) == ["mask", "x"]
    assert fitted["mask"].dtype == np.bool_
    assert fitted["mask"].tolist() == [True] * 4


def test_short_batch_repeats_its_rows_in_turn_under_a_false_mask():
    layout = layout_of({"x": np.arange(8)})
    fitted = fit(layout, {"x": np.array([5, 6, 7])}, copy=False)
    assert fitted["x"].tolist() == [5, 6, 7, 5, 6, 7, 5, 6]
    assert fitted["mask"].tolist() == [True] * 3 + [False] * 5


def test_pad_rounds_the_global_batch_up_to_the_replicas():
    layout = layout_of({"x": np.arange(9)}, num_replicas=4)
    assert (layout.global_batch, layout.rows) == (9, 12)


@given(
    full=st.integers(1, 40),
    found=st.integers(1, 40),
    num_replicas=st.integers(1, 9),
    width=st.integers(0, 3),
)
@settings(deadline=None)
def test_every_real_row_comes_once_under_the_mask(full, found, num_replicas, width):
    found = min(found, full)
    rows = np.arange(found * width, dtype=np.float32).reshape(found, width)
    layout = layout_of({"x": np.zeros((full, width), np.float32)}, num_replicas=num_replicas)
    fitted = fit(layout, {"x": rows}, copy=False)
    assert layout.rows % num_replicas == 0
    assert full <= layout.rows < full + num_replicas
    assert fitted["x"].shape == (layout.rows, width)
    assert fitted["mask"].sum() == found
    np.testing.assert_array_equal(fitted["x"][fitted["mask"]], rows)
    assert {tuple(row) for row in fitted["x"]} == {tuple(row) for row in rows}


@pytest.mark.parametrize(
    ("mask", "described"),
    [
        (np.zeros((4, 8), np.int32), r"int32\[rows, 8\]"),
        (np.ones(4, bool), r"bool\[rows\]"),
        ({"a": np.arange(4), "b": np.ones(4)}, r"int64\[rows\], float64\[rows\]"),
    ],
)
def test_a_leaf_in_the_masks_place_is_refused_unless_the_mask_stands_next_to_the_batch(mask, described):
    batch = {"x": np.arange(4), "mask": mask}
    with pytest.raises(BatchError, match=rf"leaf `mask` of its own \({described}\).*Rename.*`with_mask=True`"):
        fit_one(batch)
    layout = layout_of(batch, with_mask=True)
    fitted, real = fit(layout, jax.tree.map(lambda x: x[:3], batch), copy=False)
    assert real.tolist() == [True, True, True, False]
    for leaf, own in zip(jax.tree.leaves(fitted), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(leaf, own[[0, 1, 2, 0]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Ragged:
    values: Any
    num_rows: int = dataclasses.field(metadata={"static": True})


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        (sparse.BCOO.fromdense(np.ones((4, 3)), n_batch=1), "BCOO"),
        (Ragged(np.ones((4, 2)), 4), "Ragged"),
    ],
)
def test_a_node_with_the_number_of_rows_in_its_static_part_is_refused(node, kind):
    for batch, path in (({"x": np.ones(4), "node": node}, r"\['node'\]"), ((np.ones(4), [node]), r"\[1\]\[0\]")):
        with pytest.raises(BatchError, match=rf"batch node {path} is a {kind}, a container with 4,.*leaves of a dict"):
            fit_one(batch)
    step = jdist.distribute(lambda w, batch: (w, {"sum": batch["x"].sum()}), jdist.mirrored(jax.devices()[:2]))
    with pytest.raises(BatchError, match=rf"batch node .* is a {kind}"):
        step(0.0, {"x": np.ones(4), "node": node})


def test_a_node_without_the_number_of_rows_is_a_container():
    fitted = fit_one({"x": Ragged(np.arange(3), 7)}, num_replicas=2)
    assert fitted["x"].values.tolist() == [0, 1, 2, 0]
    assert fitted["x"].num_rows == 7


def test_other_trees_pass_unchanged_when_full():
    x, y = fit_one((np.arange(4), np.arange(4)))
    assert x.tolist() == y.tolist() == [0, 1, 2, 3]


def test_other_trees_come_with_a_mask_on_request():
    layout = layout_of((np.arange(4), np.arange(4)), with_mask=True)
    (x, _), mask = fit(layout, (np.arange(1), np.arange(1)), copy=False)
    assert x.shape == (4,)
    assert mask.tolist() == [True, False, False, False]


def test_drop_leaves_short_batches_out_and_still_masks_the_others():
    layout = layout_of({"x": np.arange(4)}, partial="drop")
    assert fit(layout, {"x": np.arange(3)}, copy=False) is None
    assert fit(layout, {"x": np.arange(4)}, copy=False)["mask"].all()


ROWS = {"x": np.zeros((4, 3), np.float32)}


@pytest.mark.parametrize(
    ("first", "options", "now", "message"),
    [
        ((np.arange(4),), {}, (np.arange(1),), r"1 rows and needs 4 for 2 replicas.*tuple.*with_mask.*dict.*drop"),
        (ROWS, {"partial": "error"}, {"x": ROWS["x"][:3]}, r'3 rows instead of 4.*partial="pad".*partial="drop"'),
        ({"x": np.arange(4)}, {}, {"x": np.arange(5)}, "5 rows, but a full batch has 4"),
        (ROWS, {}, {"x": np.zeros((4, 3))}, r"\['x'\] was float32\[rows, 3\] and is float64\[rows, 3\]"),
        (ROWS, {}, {"x": ROWS["x"][:, :2]}, r"\['x'\] was float32\[rows, 3\] and is float32\[rows, 2\]"),
        (ROWS, {}, {"z": ROWS["x"]}, r"\['x'\] is missing; \['z'\] is new"),
        ((np.arange(4), np.arange(4)), {}, [np.arange(4), np.arange(4)], "its tree was .* and is "),
    ],
)
def test_a_batch_that_does_not_go_with_the_first_is_refused(first, options, now, message):
    layout = layout_of(first, **options)
    with pytest.raises(BatchError, match=message):
        fit(layout, now, copy=False)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({0: np.arange(4)}, {}, r"keys must be strings, but they are \[0\]"),
        *(
            (
                {"x": np.arange(9)},
                {"num_replicas": 4, "partial": partial},
                "9 rows does not divide by 4 replicas.*8 or 12",
            )
            for partial in ("drop", "error")
        ),
        ({"x": np.arange(3)}, {"num_replicas": 8, "partial": "error"}, "use a global batch of 8, or"),
        ({"x": np.arange(4), "y": np.arange(3)}, {}, r"\['x'\]: 4, \['y'\]: 3"),
    ],
)
def test_a_first_batch_that_is_refused(batch, options, message):
    with pytest.raises(BatchError, match=message):
        fit_one(batch, **options)


def test_batch_without_rows_is_left_out():
    assert fit(layout_of({"x": np.arange(4)}), {"x": np.arange(0)}, copy=False) is None


class Table:
    column_names = ("x", "y")  # as Arrow's; pandas and Polars have `columns`

    def __array__(self, dtype=None, copy=None):
        return np.zeros((3, 2))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (3, "single value"),
        (
            Table(),
            r"is a table, a Table\. Make it a dict of arrays, "
            r"`\{name: table\[name\]\.to_numpy\(\) for name in table\.column_names\}`",
        ),
        (np.float32(1), "single value"),
        (np.array(["a", "b"]), "dtype <U1"),
        (np.array([{}, None]), "dtype object"),
        (object(), r"\(a object\) has dtype object"),
        (np.zeros(2, "datetime64[s]"), "dtype datetime64"),
        (np.zeros(2, [("a", "f4")]), "which a device cannot hold"),
    ],
)
def test_leaves_that_are_no_arrays_of_numbers_are_refused_by_name(leaf, message):
    with pytest.raises(BatchError, match=message) as caught:
        to_numpy({"good": np.arange(2), "bad": leaf})
    assert "['bad']" in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"key": jax.random.split(jax.random.key(0), 4)}, r"\['key'\] .*numpy cannot read"),
        ({}, r"has no leaves: \{\}$"),
        (None, "has no leaves: None; the function that makes it must return it"),
        (np.array("word"), r"leaf \(the batch itself\)"),
    ],
)
def test_trees_that_hold_no_rows_are_refused(tree, message):
    with pytest.raises(BatchError, match=message):
        to_numpy(tree)


def test_the_batch_may_be_one_array():
    assert fit_one(np.arange(4)).tolist() == [0, 1, 2, 3]


class HasArray:
    """What a torch CPU tensor looks like to numpy."""

    def __array__(self, dtype=None, copy=None):
        return np.arange(4, dtype=dtype)


def test_jax_arrays_and_things_with_array_are_taken():
    tree = to_numpy({"jax": jnp.arange(4), "tensor": HasArray()})
    assert {type(leaf) for leaf in tree.values()} == {np.ndarray}
    assert count_rows(tree) == 4


@pytest.mark.parametrize("dtype", [np.float64, np.bool_, np.uint8, np.int64, ml_dtypes.bfloat16])
def test_dtypes_stay_on_the_host(dtype):
    assert fit_one({"x": np.zeros(3, dtype)})["x"].dtype == dtype


def test_foreign_byte_order_is_turned_to_native():
    array = to_numpy(np.array([1, 2], ">i4"))
    assert array.dtype.isnative
    assert array.tolist() == [1, 2]


def test_copy_separates_a_full_batch_from_its_source():
    buffer = np.arange(4)
    copied, shared = fit_one({"x": buffer}, copy=True), fit_one({"x": buffer}, copy=False)
    buffer[:] = 9
    assert copied["x"].tolist() == [0, 1, 2, 3]
    assert shared["x"].tolist() == [9, 9, 9, 9]


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize(
    ("batch", "with_mask"),
    [
        ({"x": np.zeros((5, 2), np.float32), "y": np.zeros(5, np.int32)}, False),
        ({"x": np.zeros((5, 2), np.float32), "y": np.zeros(5, np.int32)}, True),
        ({"x": np.zeros(5, np.float32), "mask": np.ones((5, 1), np.float32)}, True),
        (collections.namedtuple("Pair", "x y")(np.zeros(5, np.float32), np.zeros((5, 1), np.uint8)), False),
        (collections.namedtuple("Pair", "x y")(np.zeros(5, np.float32), np.zeros((5, 1), np.uint8)), True),
    ],
)
def test_element_spec_describes_what_fit_makes(batch, with_mask, steps_per_call):
    layout = layout_of(batch, num_replicas=5, with_mask=with_mask)
    fitted = fit(layout, batch, copy=False)
    head = () if steps_per_call == 1 else (steps_per_call,)
    expected = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(head + leaf.shape, leaf.dtype), fitted)
    assert element_spec(with_options(layout, steps_per_call=steps_per_call)) == expected


def test_element_spec_has_the_dtypes_of_the_device():
    spec = element_spec(layout_of({"x": np.zeros(4, np.float64)}))
    assert spec["x"].dtype == jnp.zeros(4, float).dtype
