import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from jdist.support.signature import alternatives, check_options, misfit, signature


def says(value, annotation, default=inspect.Parameter.empty):
    parameter = inspect.Parameter("n", inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
    problem = misfit(value, parameter, ("n",))
    return None if problem is None else f"{'.'.join(problem.key[1:])} {problem.text}".lstrip()


@pytest.mark.parametrize(
    ("annotation", "fits", "words"),
    [
        (int, [3, 0, -1], "a whole number"),
        (float, [3, 0.5], "a number"),
        (bool, [True, False], "true or false"),
        (str, ["", "x"], "text"),
        (list, [[], ["x"]], "a list"),
        (Sequence[int], [[1]], "a list"),
        (tuple[int, ...], [[1]], "a list"),
        (dict[str, int], [{"a": 1}], "a mapping of keys to values"),
        (Annotated[int, Field(ge=3)], [3], "a whole number"),
        (Mapping, [{}], "a mapping of keys to values"),
        (int | None, [3, None], "a whole number or null"),
        (str | Sequence[str] | None, ["x", ["x"], None], "text or a list or null"),
        (Literal["a", "b"], ["a", "b"], "'a' or 'b'"),
    ],
)
def test_values_of_the_type_are_allowed_and_no_others(annotation, fits, words):
    for value in fits:
        assert says(value, annotation) is None
    samples = {True: "true", 3: "3", 0.5: "0.5", "x": '"x"'}
    for value, shown in [*samples.items(), (None, "null"), ([1], "[1]"), ({"a": 1}, '{"a": 1}')]:
        kinds = {type(fit) for fit in fits} | ({int} if annotation is float else set())
        if type(value) not in kinds:
            assert says(value, annotation) == f"{shown} is not {words}"


@pytest.mark.parametrize(
    ("value", "annotation", "words"),
    [
        (2, Annotated[int, Field(ge=3)], "2 is not >= 3"),
        (2, Annotated[int, Field(ge=3)] | None, "2 is not >= 3 or null"),
        ([1, "x"], Sequence[int], '1 "x" is not a whole number'),
        ([1, "x"], str | Sequence[int] | None, '1 "x" is not a whole number'),
        ({"a": [1, 2.5]}, dict[str, list[int]], "a.1 2.5 is not a whole number"),
    ],
)
def test_limits_and_items_are_checked(value, annotation, words):
    assert says(value, annotation) == words


@pytest.mark.parametrize("annotation", [inspect.Parameter.empty, Any, bytes, int | bytes, "int", list[int] | set])
def test_a_type_without_a_word_in_configs_is_left_to_the_function(annotation):
    assert says("x", annotation) is None


def test_null_is_allowed_where_it_is_the_default():
    assert says(None, int, default=None) is None
    assert says(None, int, default=3) == "null is not a whole number"


def test_members_of_unions_within_unions_are_found():
    assert alternatives(int | (str | None)) == (int, str, type(None))


def test_annotations_written_as_text_are_read_where_they_can_be():
    def good(n: "int"): ...

    def unknown(n: "OnlyForTypeCheckers"): ...  # noqa: F821 - the name is not to be found

    assert signature(good).parameters["n"].annotation is int
    assert signature(unknown).parameters["n"].annotation == "OnlyForTypeCheckers"


def test_positional_arguments_are_an_option_only_where_a_list_stands_for_them():
    def make(*sizes: int): ...

    def problems(value, **told):
        return [f"{'.'.join(p.key)}: {p.text}" for p in check_options(make, {"sizes": value}, called="make", **told)]

    assert problems([1]) == ["sizes: make has no such option"]
    assert problems([1], lists=True) == []
    assert problems(1, lists=True) == ["sizes: 1 is not a list"]
