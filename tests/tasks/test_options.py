"""The error that names an option of a task, and what turns other errors into it."""

from collections.abc import Sequence

import numpy as np
import pytest

from jdist.errors import ConfigError
from jdist.tasks.options import Count, Fraction, OptionError, Text, blaming, checked, near


@checked
def make(*, sizes: Sequence[Count] = (), rate: Fraction = 0.0, flag: bool = True, path: Text = "x"):
    return sizes, rate, flag, path


def test_the_error_says_the_option_what_is_wrong_and_what_to_do():
    error = OptionError("rows", "3 is odd.", remedy=" Say 4.", others=["columns"])
    assert str(error) == "task.options.rows: 3 is odd. Say 4."
    assert (error.option, error.text, error.remedy, error.others) == ("rows", "3 is odd.", " Say 4.", ("columns",))


def test_what_a_reader_refuses_is_the_fault_of_the_option_that_names_the_file():
    with pytest.raises(OptionError, match=r"^task\.options\.path: data\.npz: no array y\.$"), blaming("path"):
        raise ConfigError("data.npz: no array y.")


def test_an_option_that_is_blamed_already_stays_so_and_other_errors_pass():
    with pytest.raises(OptionError, match=r"^task\.options\.held_out: "), blaming("path"):
        raise OptionError("held_out", "2 is not below 1")
    with pytest.raises(ZeroDivisionError), blaming("path"):
        raise ZeroDivisionError


def test_near_names_are_those_of_the_same_kind(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist.npz").write_bytes(b"")
    assert near(tmp_path / "mnst") == f" Did you mean {tmp_path}/mnist?"
    assert near(tmp_path / "mnst.npz", ending=".npz") == f" Did you mean {tmp_path}/mnist.npz?"
    assert near(tmp_path / "mnst", ending=".npz") == f" Did you mean {tmp_path}/mnist.npz?"
    assert near(tmp_path / "digits") == ""
    assert near(tmp_path / "nowhere" / "mnist") == ""


@pytest.mark.parametrize(
    ("option", "value", "passed"),
    [
        ("sizes", (32,), [32]),
        ("sizes", [np.int64(8)], [8]),
        ("sizes", (np.int64(8), 4), [8, 4]),
        ("rate", np.float32(0.5), 0.5),
        ("rate", 0, 0),
        ("flag", np.bool_(False), False),
        ("path", " a b ", " a b "),
    ],
)
def test_a_program_may_pass_tuples_and_the_numbers_of_numpy(option, value, passed):
    assert passed in make(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sizes", (0,), r"sizes\.0: 0 is not >= 1"),
        ("rate", np.float32(1.5), "rate: 1.5 is not < 1"),
        ("rate", float("nan"), "rate: NaN is not"),
        ("path", "", 'path: "" is not at least 1 visible character long'),
        ("path", "  ", 'path: "  " is not at least 1 visible character long'),
    ],
)
def test_what_they_hold_is_checked(option, value, message):
    with pytest.raises(OptionError, match=rf"^task\.options\.{message}"):
        make(**{option: value})
