"""Values that definitions have now and their sources do not give."""

import re
import runpy

import pytest

from jdist.errors import LaunchError
from jdist.notebook.child import result_file
from jdist.notebook.program import Program
from jdist.notebook.values import read
from tests.notebook.notebook_cells import namespace


def script_of(tmp_path, names):
    return Program(names["f"], ()).write(tmp_path, command="jdist launch --processes 2")


def launched(tmp_path, *cells):
    """What `f` returns here, and where there is only its script."""
    names = namespace(*cells)
    script = script_of(tmp_path, names)
    runpy.run_path(str(script), run_name="__main__")
    return names["f"](), read(result_file(script))


@pytest.mark.parametrize(
    "cells",
    [
        ["RATE = 0.5\ndef f(rate=RATE): return rate", "RATE = 0.1"],
        ["def f(a=1, b=2, *, c=3): return a, b, c", "f.__defaults__ = (1, 5); f.__kwdefaults__ = {'c': 6}"],
        ["def f(seen=[]):\n    return seen", "f().append(4)"],
        ["import random\ndef f(seed=random.random()): return seed"],
        ["import functools\n@functools.cache\ndef scale(by=2): return by", "scale.__wrapped__.__defaults__ = (7,)"]
        + ["def f(): return scale()"],
        ["class C:\n    rate = 0.5\n    name: str = 'a'", "C.rate = 0.1", "def f(): return C.rate, C.name"],
        ["class C: pass", "C.rate, C.sizes = 3, [1, 2]", "def f(): return C.rate, C.sizes"],
        ["R = 1\nclass C:\n    rate = R\n    twice = rate\n    def get(self, x=R): return self.rate, self.twice, x"]
        + ["R = 2", "def f(): return C().get()"],
        ["class C:\n    @staticmethod\n    def get(x=1): return x\n    @property\n    def p(self): return 2"]
        + ["C.get.__defaults__ = (5,)", "def f(): return C.get(), C().p"],
        [
            "import dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 1",
            "C.y = 4",
            "def f(): return C().x, C.y",
        ],
    ],
    ids=lambda cells: cells[0].splitlines()[-1][:30],
)
def test_what_was_changed_goes_along(tmp_path, cells):
    here, there = launched(tmp_path, *cells)
    assert there == here


@pytest.mark.parametrize(
    "cell",
    [
        "import jax.numpy as jnp\ndef f(x=1, y=None, z=jnp.abs, w=jnp.ones(2), key=len): return x",
        "import flax.linen as nn\nclass C(nn.Module):\n    width: int = 3\n    act: object = nn.relu\n    @nn.compact\n"
        "    def __call__(self, x, train=False): return x\ndef f(): return C().width",
        "from flax import nnx\nclass C(nnx.Module):\n    rate = 3\n    def __init__(self, rngs=None): pass\n"
        "def f(): return C.rate",
        "import enum\nclass C(enum.Enum):\n    A = 1\n    B = 'b'\ndef f(): return C.A.value",
        "import enum\nclass C(enum.IntEnum):\n    A = 1\ndef f(): return int(C.A)",
        "from typing import NamedTuple\nclass C(NamedTuple):\n    x: int = 3\ndef f(): return C().x",
        "import dataclasses\n@dataclasses.dataclass(slots=True, frozen=True)\nclass C:\n    x: int = 3\n"
        "    y: list = dataclasses.field(default_factory=list)\ndef f(): return C().x",
        "import flax.struct\n@flax.struct.dataclass\nclass C:\n    x: int = 3\ndef f(): return C().x",
        "import functools\nclass C:\n    @functools.cached_property\n    def p(self): return 1\n"
        "    def _make(f): return lambda s: 2\n    @_make\n    def q(self): return 1\ndef f(): return C().p + C().q()",
    ],
    ids=lambda cell: cell.splitlines()[-1],
)
def test_what_is_as_it_was_written_is_left_to_the_source(tmp_path, cell):
    names = namespace(cell)
    script = script_of(tmp_path, names)
    assert "restore" not in script.read_text()
    runpy.run_path(str(script), run_name="__main__")
    assert read(result_file(script)) == names["f"]()


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ["import jax.numpy as jnp\ndef f(w=None): return w", "f.__defaults__ = (jnp.ones(2),)"],
            "`f` is no longer as its source says: the default of `w` is a jax.Array; run its definition again",
        ),
        (
            ["def g(): return 1\ndef f(g=g): return g()", "def g(): return 2"],
            "the default of `g` is a function; run its definition again",
        ),
        (["def f(a=1): return a", "f.__defaults__ = None"], "`f` has defaults for nothing, unlike its source"),
        (
            ["import jax.numpy as jnp\nclass C:\n    w = None", "C.w = jnp.ones(2)", "def f(): return C.w"],
            "`C`, which `f` uses, is no longer as its source says: `w` is a jax.Array",
        ),
        (
            ["import jax.numpy as jnp\nclass C: pass", "C.w = jnp.ones(2)", "def f(): return C.w"],
            "`w` is a jax.Array; make it in a function of its own",
        ),
        (
            ["class C:\n    def get(self): return 1", "C.get = lambda self: 2", "def f(): return C().get()"],
            "`get` is the function <lambda>; write it in the class",
        ),
        (
            ["class C: pass", "def other(self): return 2", "C.get = other", "def f(): return C().get()"],
            "`get` is the function other; write it in the class",
        ),
    ],
)
def test_what_cannot_go_along_as_it_is_is_refused(cells, message):
    names = namespace(*cells)
    with pytest.raises(LaunchError, match=re.escape(message)):
        Program(names["f"], ())
