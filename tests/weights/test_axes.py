"""Axes of tensors and leaves: any box of a leaf, read from the tensor by its boxes, is what transposing the whole gives."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.errors import CheckpointError
from jdist.weights.axes import Axes
from jdist.weights.rules import Rule, parse_rules, sources_of

# Each with the numbers of its rule, the shape of the tensor, and NumPy's way from there to the leaf.
CASES = {
    "out in -> in out": ({}, (5, 6), lambda x: x.T),
    "out in height width -> height width in out": ({}, (2, 3, 4, 5), lambda x: x.transpose(2, 3, 1, 0)),
    "(heads width) in -> in heads width": ({}, (6, 5), lambda x: x.T.reshape(5, 2, 3)),
    "in (qkv heads width) -> in heads width": (
        {"qkv": 1},
        (4, 18),
        lambda x: np.split(x, 3, 1)[1].reshape(4, 2, 3),
    ),
    "(qkv out) in -> in out": ({"qkv": 2}, (12, 5), lambda x: np.split(x, 3, 0)[2].T),
    "(out qkv) in -> in out": ({"qkv": 0}, (12, 5), lambda x: x[::3].T),
    "(a b c) -> (c a b)": ({"a": 2, "b": 3}, (24,), lambda x: x.reshape(2, 3, 4).transpose(2, 0, 1).reshape(-1)),
    "() () out -> out": ({}, (1, 1, 7), lambda x: x.reshape(7)),
    "layers out in -> layers in out": ({}, (3, 4, 5), lambda x: x.transpose(0, 2, 1)),
    "(in group) out -> (group in) out": (
        {"group": 2},
        (6, 4),
        lambda x: x.reshape(3, 2, 4).transpose(1, 0, 2).reshape(6, 4),
    ),
}


def view_of(text, numbers, tensor_shape, leaf_shape):
    ((source,),) = sources_of(parse_rules([("tensor", "leaf", text, numbers)]), "leaf", leaf_shape)
    return source.view(tensor_shape)


@pytest.mark.parametrize("text", CASES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_box_of_a_leaf_is_read_from_boxes_of_the_tensor(text, data):
    numbers, shape, turn = CASES[text]
    tensor = np.arange(math.prod(shape)).reshape(shape)
    want = turn(tensor)
    view = view_of(text, numbers, shape, want.shape)
    assert view.tensor_shape == shape
    bounds = st.tuples
    extent = [data.draw(bounds(st.integers(0, n), st.integers(0, n)).map(sorted)) for n in want.shape]
    got, count = np.full(want.shape, -1), 0
    for box, ranges in view.boxes(extent):
        values = tensor[box]
        assert values.shape == tuple(each.stop - each.start for each in box)
        view.write(values, ranges, got)
        assert view.is_in(values, ranges, got)
        count += values.size
    within = tuple(slice(*each) for each in extent)
    np.testing.assert_array_equal(got[within], want[within])
    assert count == want[within].size == (got >= 0).sum()  # no element more


@pytest.mark.parametrize("text", CASES)
def test_a_whole_leaf_makes_its_part_of_the_tensor(text):
    numbers, shape, turn = CASES[text]
    tensor = np.arange(math.prod(shape)).reshape(shape)
    leaf = np.ascontiguousarray(turn(tensor))
    made = np.full(shape, -1)
    view_of(text, numbers, shape, leaf.shape).read(leaf, made)
    np.testing.assert_array_equal(made[made >= 0], tensor[made >= 0])
    assert (made >= 0).sum() == leaf.size


def test_several_tensors_make_a_leaf():
    rules = parse_rules(
        [
            (f"h.{{layer}}.{each}.w", "h/qkv/w", "out in -> layer in (qkv out)", {"qkv": i})
            for i, each in enumerate("qkv")
        ]
    )
    rng = np.random.default_rng(0)
    tensors = {f"h.{i}.{each}.w": rng.normal(size=(4, 5)) for i in range(2) for each in "qkv"}
    leaf, count = np.full((2, 5, 12), np.nan), 0
    for (source,) in sources_of(rules, "h/qkv/w", leaf.shape):
        tensor = tensors[source.names[0]]
        view = source.view(tensor.shape)
        for box, ranges in view.boxes(None):
            view.write(tensor[box], ranges, leaf)
        count += 1
        again = np.empty_like(tensor)
        view.read(leaf, again)
        np.testing.assert_array_equal(again, tensor)
    assert count == 6
    want = [np.concatenate([tensors[f"h.{i}.{each}.w"].T for each in "qkv"], 1) for i in range(2)]
    np.testing.assert_array_equal(leaf, want)


@pytest.mark.parametrize("text", ["out in", "out out -> out", "out-in -> in", "(a (b c)) -> a b c", "a -> b b"])
def test_axes_that_are_none(text):
    with pytest.raises(CheckpointError, match="must be the names of the tensor's axes"):
        Axes.parse(text)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (("only one",), "a rule is"),
        ("tensor", "a rule is"),
        ((1, "path"), "a rule is"),
        (("tensor", "path", "a -> a", {"a": -1}), "a rule is"),
        (("tensor", "path", "a -> a", {"a": True}), "a rule is"),
        (("tensor", "path", "a -> a", {"b": 1}), "'b' has a number but is not an axis"),
        (("w.{i", "path"), "'{' in 'w.{i' belongs to no {field} and no"),
        (("w.{1}", "path"), r"'{' in 'w.\{1}' belongs to no {field} and no"),
        (("[model.w", "path"), "'\\[' in '\\[model.w' belongs to no"),
        (("w", "{layer-1}/w"), "'{' in '{layer-1}/w' belongs to no"),
    ],
)
def test_rules_that_are_none(rule, says):
    with pytest.raises(CheckpointError, match=says):
        Rule(rule)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (("qkv.w", "leaf", "in (qkv out) -> in out"), "qkv is on one side only; give its index"),
        (("{layer}.w", "leaf"), "layer is on one side only"),
        (("w", "leaf", "a -> a"), r"its shape \[4, 6\] does not fit the axes"),
        (("w", "leaf", "a b -> (a b)"), r"its shape \[4, 6\] does not fit the axes"),
    ],
)
def test_rules_that_do_not_fit_a_leaf(rule, says):
    with pytest.raises(CheckpointError, match=says):
        sources_of(parse_rules([rule]), "leaf", (4, 6))


def test_names():
    rule = Rule(("[model.]layers.{layer}.w", "layer_{layer}/w"))
    ((source,),) = sources_of([rule], "params/layer_3/w", (2,))
    assert source.names == ("model.layers.3.w", "layers.3.w")
    assert rule.path_of("layers.12.w") == rule.path_of("model.layers.12.w") == "layer_12/w"
    assert rule.path_of("model.layers.1.2.w") is None
    assert sources_of([rule], "layer_3/ww", (2,)) == []
