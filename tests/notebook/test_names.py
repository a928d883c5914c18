"""The source of definitions, and the names that they use."""

import pytest

from jdist.notebook.source import NoSource, source_of
from tests.notebook.notebook_cells import namespace

FUNCTION = """\
@at_once(decorator_argument)
def f(a=default, *, b: annotation = 1):
    import os
    local = [x for x in later]
    def inner():
        return module.sub.attribute, a, local, f, print
    class Inner(base_later):
        pass
    return inner
"""
CLASS = """\
class C(base):
    field: int = body
    def method(self):
        return C, in_method
"""


def test_names_of_a_function_are_told_by_when_they_are_needed():
    names = namespace(
        "def at_once(x): return lambda f: f\ndecorator_argument = default = annotation = 0",
        FUNCTION,
    )
    found = source_of(names["f"], names["In"])
    assert found.text == FUNCTION
    assert found.at_once == ("annotation", "at_once", "decorator_argument", "default")
    assert found.later == ("base_later", "f", "later", "module", "print")
    assert "module.sub.attribute" in found.attributes
    assert found.is_decorated


def test_a_classes_body_runs_at_once_and_its_newest_definition_counts():
    names = namespace("base, body = object, 0\nclass C: pass", CLASS, "after = 1")
    found = source_of(names["C"], names["In"])
    assert found.text == CLASS
    assert found.at_once == ("base", "body", "int")
    assert found.later == ("C", "in_method")


def test_a_function_of_an_indented_block_is_dedented():
    names = namespace("if True:\n    def f():\n        return 1\n")
    assert source_of(names["f"], names["In"]).text == "def f():\n    return 1\n"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("f = lambda: 0", "is a lambda"),
        ("def outer():\n    def f(): return 1\n    return f\nf = outer()", "inside of another function"),
        ("exec('def f(): return 1')", "no source that Python could find"),
        ("f = type('f', (), {})", "of which no cell has the definition"),
    ],
)
def test_what_has_no_source_of_its_own(cell, message):
    names = namespace(cell)
    with pytest.raises(NoSource, match=message):
        source_of(names["f"], names["In"])
