"""Which versions two processes may differ in, and the sentence that names them; no other test has two versions at hand."""

import json
import platform

import jax
import pytest

import jdist
from jdist.support.versions import difference, versions

OURS = {"host": "a", "protocol": 1, "jdist": "0.1.0", "jax": "0.12.1", "jaxlib": "0.12.1", "python": "3.12.1"} | {
    "reads": [9, 11],
    "writes": 11,
}
JAX = "jax is 0.10.2 on b and 0.12.1 on a"


@pytest.mark.parametrize(
    ("theirs", "in_step", "with_programs", "text"),
    [
        ({}, None, None, None),
        ({"python": "3.11.9"}, None, None, None),
        ({"jax": "0.10.2"}, True, False, JAX),
        ({"jax": "0.10.2", "python": "3.11.9"}, True, False, f"{JAX}; Python is 3.11.9 on b and 3.12.1 on a"),
        ({"jaxlib": "0.12.0"}, True, False, "jaxlib is 0.12.0 on b and 0.12.1 on a"),
        ({"jdist": "0.2.0"}, True, False, "jdist is 0.2.0 on b and 0.1.0 on a"),
        ({"protocol": 2}, True, True, "jdist's wire protocol is 2 on b and 1 on a"),
        (
            {"jax": "0.10.2", "reads": [9, 10]},
            True,
            True,
            f"{JAX}; b reads exported programs of calling conventions [9, 10]",
        ),
        ({"jax": "0.14.0", "reads": [12, 13]}, True, True, "of calling conventions [12, 13], and a writes 11"),
        ({"jax": "0.10.2", "reads": "all"}, True, True, "calling conventions all"),
        ({"jax": "x\n\x1b[31m" + 99 * "y"}, True, False, "jax is x??[31myyyyyy"),
        ({"jax": {"a": []}}, True, False, "jax is ??a?? []? on b"),
    ],
)
def test_which_difference_matters_and_how_it_is_named(theirs, in_step, with_programs, text):
    theirs = OURS | {"host": "b"} | theirs
    for same_step, is_fatal in ((True, in_step), (False, with_programs)):
        found = difference(OURS, theirs, same_step=same_step)
        assert (found and found.is_fatal) == is_fatal
        if found and same_step != with_programs:
            assert text in found.text
            assert found.text.isprintable()


@pytest.mark.parametrize("theirs", [None, {}, [], "0.1.0"])
def test_a_peer_without_versions_fits_nowhere(theirs):
    for same_step in (True, False):
        found = difference(OURS, theirs, same_step=same_step)
        assert found
        assert found.is_fatal
        assert "jdist's wire protocol is unknown on the other host and 1 on a" in found.text


def test_the_versions_of_this_process_travel():
    ours = json.loads(json.dumps(versions()))
    assert (ours["jdist"], ours["jax"]) == (jdist.__version__, jax.__version__)
    assert ours["python"] == platform.python_version()
    assert difference(versions(), ours, same_step=True) is None
    assert difference(versions(), ours, same_step=False) is None
