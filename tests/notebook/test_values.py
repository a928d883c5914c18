"""Plain values in a file."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from jdist.notebook import values


def through_a_file(tmp_path, value):
    values.write(tmp_path / "v.npz", value, jax_arrays=True)
    return values.read(tmp_path / "v.npz")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**80,
        -1.5,
        float("inf"),
        "é\n",
        b"\0\xff",
        [],
        (1, [2, (3,)]),
        {"a": {1: "x", (2, "b"): None}},
        {},
        collections.OrderedDict(b=1, a=2),
        collections.Counter("abca"),
        collections.defaultdict(list, {"a": [1], "b": collections.defaultdict(None, {(1,): 2})}),
    ],
    ids=repr,
)
def test_plain_values_come_back_with_their_types(tmp_path, value):
    found = through_a_file(tmp_path, value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "float32", "float64", "complex64", "bfloat16", "float8_e4m3fn", "<U3", "M8[s]"]
)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_arrays_come_back_with_their_dtypes(tmp_path, dtype, shape):
    array = np.zeros(shape, jnp.dtype(dtype) if "float" in dtype else dtype)
    found = through_a_file(tmp_path, {"x": (array,)})["x"][0]
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


def test_scalars_of_numpy_stay_scalars(tmp_path):
    found = through_a_file(tmp_path, [np.float32(1.5), np.ones(1, jnp.bfloat16)[0]])
    assert [type(x) for x in found] == [np.float32, np.dtype("bfloat16").type]
    assert found == [1.5, 1.0]


def test_arrays_of_jax_become_numpys_where_they_are_allowed(tmp_path):
    assert_array_equal(through_a_file(tmp_path, jnp.arange(3)), np.arange(3))
    with pytest.raises(values.NotPlain) as refused:
        values.check({"a": [1, jnp.arange(3)]}, jax_arrays=False)
    assert refused.value.path == "['a'][1]"
    assert values.kind(refused.value.value) == "a jax.Array"


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.array([object()]), 1j, jax.random.key(0), {object(): 1}, np.ma.ones(3)]
    + [collections.defaultdict(lambda: 1), type("Own", (dict,), {})(a=1)],
)
def test_what_is_not_plain(value):
    with pytest.raises(values.NotPlain):
        values.check([value], jax_arrays=True)


def test_keys_of_numpy_are_their_own(tmp_path):
    found = through_a_file(tmp_path, {np.int64(3): np.float32(7), np.int64(5): 2, "a": np.arange(2)})
    assert list(found) == [3, 5, "a"]
    assert (found[3], found[5], found["a"].tolist()) == (7, 2, [0, 1])
