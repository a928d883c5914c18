"""What is an array of numbers, and in which dtype it is reduced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.core.per_replica import as_array, as_arrays, as_axis, check_numbers, countable, floating
from jdist.errors import StepError


def test_numbers_and_arrays_are_taken_and_arrays_stay_themselves():
    x = jnp.ones(3)
    assert as_array("f", "x", x) is x
    made = as_arrays("f", {"a": 1, "b": np.ones(2, np.float32), "c": jax.random.key(0), "d": None})
    assert (made["a"].dtype, made["b"].shape, made["c"].ndim, made["d"]) == (jnp.int32, (2,), 0, None)


@pytest.mark.parametrize("x", ["text", "float32", np.array(["text"]), object(), np.array([None]), b"bytes"])
def test_what_is_no_array_of_numbers_is_named(x):
    with pytest.raises(StepError, match=r"^f: leaf \['a'\] is .*, a \w+; it must be an array of numbers"):
        as_arrays("f", {"a": x})


def test_what_has_no_such_reduction_is_named():
    for op in ("mean", "sum", "max"):
        with pytest.raises(
            StepError, match=rf"f: the value is key<fry>\[2\], PRNG keys, which have no {op}.*aggregate"
        ):
            check_numbers("f", op, jax.random.split(jax.random.key(0)))
    with pytest.raises(StepError, match=r"leaf \['a'\] is complex64\[\]; complex .* no max\. Take that of `abs\(x\)`"):
        check_numbers("f", "max", {"a": jnp.complex64(1j)})
    check_numbers("f", "sum", jnp.complex64(1j))


def test_dtypes_of_a_mean_and_of_a_sum():
    assert [floating(jnp.asarray(x)).dtype for x in (3, True, np.float16(1))] == [jnp.float32, jnp.float32, jnp.float16]
    assert [countable(jnp.asarray(x)).dtype for x in (True, np.uint8(1))] == [jnp.int32, jnp.uint8]
    assert countable(jnp.bfloat16(1)).dtype == jnp.bfloat16
    assert countable(jnp.array([True, False])).tolist() == [1, 0]


def test_an_axis_is_an_int_of_any_kind():
    assert as_axis("f", np.int64(-1)) == as_axis("f", -1) == -1
    for wrong in (None, True, 1.0, "0", (0,)):
        with pytest.raises(StepError, match=r"f: `axis` is .*; it must be an int"):
            as_axis("f", wrong)
