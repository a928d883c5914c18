"""Functions of a notebook as scripts."""

import ast
import re
import runpy

import jax.numpy as jnp
import numpy as np
import pytest

from jdist.errors import LaunchError
from jdist.notebook.child import result_file
from jdist.notebook.program import Program
from jdist.notebook.values import read
from tests.notebook.notebook_cells import add, namespace

IMPORTS = "import functools\nimport numpy as np\nimport xml.etree.ElementTree\nfrom functools import partial as p\n"


def run(tmp_path, fn, args=()):
    """What the function returns where there is only its script."""
    script = Program(fn, args).write(tmp_path, command="jdist launch --processes 3")
    runpy.run_path(str(script), run_name="__main__")
    return read(result_file(script))


def launched(tmp_path, *cells, args=()):
    return run(tmp_path, namespace(*cells)["f"], args)


def test_what_it_uses_goes_along(tmp_path):
    cells = [
        IMPORTS + "RATE, data = 0.5, {'x': np.arange(3)}",
        "class Base:\n    rate = RATE\n    def make(self): return Derived()",
        "class Derived(Base):\n    def __call__(self, x): return helper(x) * self.rate",
        "@functools.cache\ndef scale(): return p(max, 2)(1)",
        "def helper(x, *, by=RATE):\n    return (x + by) * scale()",
        "def f(more):\n    tag = xml.etree.ElementTree.Element('tag').tag\n    return Base().make()(data['x'] + more), tag",
    ]
    result, tag = launched(tmp_path, *cells, args=(jnp.float32(1),))
    assert (result.tolist(), tag) == ([1.5, 2.5, 3.5], "tag")


def test_the_script_is_to_be_read(tmp_path):
    cells = [
        "import optax\nfrom optax import adam\nRATE = 0.1",
        "def f():\n    return adam(RATE), optax.adam, np_is_missing\n",
    ]
    script = Program(namespace(*cells)["f"], ()).write(tmp_path, command="jdist launch --processes 3")
    text = script.read_text()
    assert script.name == "notebook_f.py"
    assert f"jdist launch --processes 3 -- {script}" in text.splitlines()[0]
    assert "import optax\n" in text
    assert "from optax import adam\n" in text  # not from where optax keeps it
    assert 'RATE = jdist.notebook.child.given(__file__, "RATE")' in text
    assert cells[1] in text


def test_functions_of_modules_are_imported(tmp_path):
    for fn in (add, "tests.notebook.notebook_cells:add"):
        text = Program(fn, (1, 2)).write(tmp_path, command="jdist launch --processes 3").read_text()
        assert "from tests.notebook.notebook_cells import add\n" in text
    assert run(tmp_path, add, (1, 2)) == 3


def test_annotations_stay_text_where_they_were(tmp_path):
    cell = "from __future__ import annotations\ndef f(x: NoSuchType = 1):\n    return x"
    assert launched(tmp_path, cell) == 1


def test_functions_may_call_each_other_and_themselves(tmp_path):
    cells = [
        "def even(n): return n == 0 or odd(n - 1)",
        "def odd(n): return n != 0 and even(n - 1)",
        "def f(): return even(7)",
    ]
    assert launched(tmp_path, *cells) is False


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ["import jax.numpy as jnp\nw = jnp.ones(3)", "def f(): return w"],
            r"`f` uses `w`, a jax.Array, .*args=\(w,\)\)`",
        ),
        (
            ["import jax.numpy as jnp\nd = {'a': [jnp.ones(3)]}", "def f(): return d"],
            r"`f` uses `d\['a'\]\[0\]`, a jax.Array",
        ),
        (
            ["import optax\ntx = optax.adam(1)\ndef make(): return tx", "def f(): return make()"],
            "`make` uses `tx`, .*Make it inside of `f`.* its imports, functions and classes, and plain values",
        ),
        (
            ["import jax\ndef step(x): return x\nfast = jax.jit(step)", "def f(): return fast(1)"],
            "`fast`, which `f` uses, is another name of `step`",
        ),
        (
            ["import jax\ndef step(x): return x\nstep = jax.jit(step)", "def f(): return step(1)"],
            "`step`, which `f` uses, is made by a call from `step`; use a decorator",
        ),
        (
            ["def outer(n):\n    def f(): return n\n    return f", "f = outer(1)"],
            "`f` is defined inside of another function",
        ),
        (["f = lambda: 1"], "is a lambda; give it a name by `def`"),
        (["import functools\nf = functools.partial(print)"], "`fn` is a functools.partial; pass a function"),
        (["f = 'no name'"], "'no name'; a name is 'package.module:function'"),
        (["f = 3"], "`fn` is an int"),
    ],
)
def test_what_cannot_go_along_is_refused_by_name(cells, message):
    names = namespace(*cells)
    with pytest.raises(LaunchError, match=re.compile(message, re.DOTALL)):
        Program(names["f"], ())


def test_arguments_that_cannot_be_given():
    with pytest.raises(LaunchError, match=r"`args\[1\]\['k'\]` is an object, .*Make it inside of `add`"):
        Program(add, (1, {"k": object()}))


def test_a_result_that_cannot_be_handed_back(tmp_path):
    with pytest.raises(LaunchError, match=r"`f` returned at \['s'\] a set, which cannot be handed back"):
        launched(tmp_path, "def f(): return {'s': {1}}")


def test_the_script_finds_what_the_notebook_found(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "mine")
    script = Program(add, (1, 2)).write(tmp_path, command="jdist launch --processes 3")
    (line,) = [line for line in script.read_text().splitlines() if line.startswith("sys.path")]
    assert str(tmp_path / "mine") in ast.literal_eval(line.partition("= ")[2])


def test_values_are_those_of_the_moment(tmp_path):
    names = namespace("x = np_array = None", "def f(): return x")
    names["x"] = np.float32(2)
    assert run(tmp_path, names["f"]) == np.float32(2)
