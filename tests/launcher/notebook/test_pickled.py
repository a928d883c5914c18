"""Functions, classes and values of a notebook in another process, and results."""

import io
import pickle
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.errors import LaunchError
from jdist.launcher.notebook.pickled import Pickler, dumps, find_culprit
from tests.launcher.notebook.notebook_cells import add, run_cells


@pytest.fixture(autouse=True)
def _main(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # put back at the end


def launched(fn, args=()):
    """What a function returns in an empty `__main__`."""
    data = io.BytesIO(dumps(fn, args, "f")[1])
    sys.modules["__main__"] = types.ModuleType("__main__")
    unpickler = pickle.Unpickler(data)  # noqa: S301 # what `dumps` has just made
    _, fn, *args = [unpickler.load() for _ in range(2 + len(args))]
    return fn(*args)


IMPORTS = "import functools\nimport numpy as np\nimport xml.etree.ElementTree\nfrom functools import partial as p\n"


def test_what_it_uses_goes_along():
    names = run_cells(
        IMPORTS + "RATE, data = 0.5, {'x': np.arange(3)}",
        "class Base:\n    rate = RATE\n    def make(self): return Derived()",
        "class Derived(Base):\n    def __call__(self, x): return helper(x) * self.rate",
        "@functools.cache\ndef scale(): return p(max, 2)(1)",
        "def helper(x, *, by=RATE):\n    return (x + by) * scale()",
        "def f(more):\n    tag = xml.etree.ElementTree.Element('tag').tag\n    return Base().make()(data['x'] + more), tag",
    )
    result, tag = launched(names["f"], (jnp.float32(1),))
    assert (result.tolist(), tag) == ([1.5, 2.5, 3.5], "tag")


@pytest.mark.parametrize(
    "cells",
    [
        [
            "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)\ndef f(): return even(7)"
        ],
        ["from __future__ import annotations\ndef f(x: NoSuchType = 1):\n    return x"],
        ["from __future__ import annotations\nclass C:\n    x: NoSuchType = 1\ndef f():\n    return C.x"],
        ["def outer(n):\n    def f(): return n\n    return f", "f = outer(1)"],
        ["f = lambda: 1"],
        ["import functools\nf = functools.partial(int, '7')"],
        ["import optax\ntx = optax.adam(0.5)\ndef f(): return tx.init({'a': 1.0})[0].count.item()"],
        ["import jax\ndef step(x): return x + 1\nfast = step = jax.jit(step)\ndef f(): return fast(1).item()"],
        ["class C:\n    class Inner:\n        x = 2\n    def __init__(self): self.y = 4", "c, i = C(), C.Inner()"]
        + ["def f(): return c.y, i.x, isinstance(c, C)"],
        # What differs from the source by now.
        ["RATE = 0.5\ndef f(rate=RATE): return rate", "RATE = 0.1"],
        ["def f(a=1, b=2, *, c=3): return a, b, c", "f.__defaults__ = (1, 5); f.__kwdefaults__ = {'c': 6}"],
        ["import functools\n@functools.cache\ndef scale(by=2): return by", "scale.__wrapped__.__defaults__ = (7,)"]
        + ["def f(): return scale()"],
        ["class C:\n    rate = 0.5\n    name: str = 'a'", "C.rate = 0.1", "def f(): return C.rate, C.name"],
        ["class C: pass", "C.rate, C.sizes = 3, [1, 2]", "def f(): return C.rate, C.sizes"],
        ["R = 1\nclass C:\n    rate = R\n    twice = rate\n    def get(self, x=R): return self.rate, self.twice, x"]
        + ["R = 2", "def f(): return C().get()"],
        ["class C:\n    @staticmethod\n    def get(x=1): return x\n    @property\n    def p(self): return 2"]
        + ["C.get.__defaults__ = (5,)", "def f(): return C.get(), C().p"],
        ["class C:\n    def get(self): return 1", "C.get = lambda self: 2", "def f(): return C().get()"],
        ["import dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 1", "C.y = 4\ndef f(): return C().x, C.y"],
    ],
    ids=lambda cells: cells[0].splitlines()[-1][:30],
)
def test_it_returns_there_what_it_returns_here(cells):
    fn = run_cells(*cells)["f"]
    here = fn()
    assert launched(fn) == here


@pytest.mark.parametrize(
    "cell",
    [
        "import jax, flax.struct\n@flax.struct.dataclass\nclass C:\n    x: int = 3\n    y: int = flax.struct.field("
        "pytree_node=False, default=1)\ndef f(): return jax.tree.leaves(C())",
        "import jax\nfrom flax.training.train_state import TrainState\nclass C(TrainState):\n    stats: object\n"
        "def f(): return jax.tree.leaves(C(step=1, apply_fn=None, params=2, tx=None, opt_state=3, stats=4))",
        "import dataclasses, jax\n@jax.tree_util.register_dataclass\n@dataclasses.dataclass\nclass C:\n    x: int = 3\n"
        "    y: list = dataclasses.field(default_factory=list)\ndef f(): return jax.tree.leaves(C())",
        "import chex, jax\n@chex.dataclass\nclass C:\n    x: int = 3\ndef f(): return jax.tree.leaves(C())",
        "import equinox, jax\nclass C(equinox.Module):\n    x: int = 3\n    def __call__(self): return self.x\n"
        "def f(): return jax.tree.leaves(C()), C(2)()",
        "import flax.linen as nn\nclass C(nn.Module):\n    width: int = 3\n    act: object = nn.relu\n    @nn.compact\n"
        "    def __call__(self, x, train=False): return x\ndef f(): return C().width",
        "from flax import nnx\nclass C(nnx.Module):\n    rate = 3\n    def __init__(self, rngs=None): pass\n"
        "def f(): return C.rate",
        "import enum\nclass C(enum.Enum):\n    A = 1\n    B = 'b'\ndef f(): return C.A.value",
        "import enum\nclass C(enum.IntEnum):\n    A = 1\ndef f(): return int(C.A)",
        "from typing import NamedTuple\nclass C(NamedTuple):\n    x: int = 3\ndef f(): return C().x",
        "import dataclasses\n@dataclasses.dataclass(slots=True, frozen=True)\nclass C:\n    x: int = 3\n"
        "    y: list = dataclasses.field(default_factory=list)\ndef f(): return C().x",
        "import functools\nclass C:\n    @functools.cached_property\n    def p(self): return 1\n"
        "    def _make(f): return lambda s: 2\n    @_make\n    def q(self): return 1\ndef f(): return C().p + C().q()",
        "import jax.numpy as jnp\nclass C:\n    w = jnp.ones(2)\ndef f(): return C.w.sum().item()",
    ],
    ids=lambda cell: cell.splitlines()[-1],
)
def test_a_class_is_registered_there_as_it_is_here(cell):
    fn = run_cells(cell)["f"]
    here = fn()
    assert launched(fn) == here


def test_a_function_of_a_module_is_imported_there():
    assert b"tests.launcher.notebook.notebook_cells" in dumps(add, (1, 2), "add")[1]
    assert launched(add, (1, 2)) == 3


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ["import jax.numpy as jnp\nw = jnp.ones(3)", "def f(): return w"],
            r"`f` uses `w`, a jax.Array, .*args=\(w,\)\)`",
        ),
        (["import jax\nk = jax.random.key(1)", "def f(): return k"], r"`f` uses `k`, a jax.Array, .*pass its seed"),
        (
            ["import jax.numpy as jnp\nd, w = {'a': [jnp.ones(3)]}, jnp.ones(2)", "def f(a): return a.w, d"],
            r"`f` uses `d\['a'\]\[0\]`, a jax.Array",
        ),
        (
            ["import jax, jax.numpy as jnp\nw = jnp.ones(3)\n@jax.jit\ndef step(): return w", "def f(): return step()"],
            "`step` uses `w`, a jax.Array",
        ),
        (
            ["import jax.numpy as jnp\ndef outer(w):\n    def f(): return w\n    return f", "f = outer(jnp.ones(3))"],
            "`f` uses `w`, a jax.Array",
        ),
        (
            ["import jax.numpy as jnp\ndef f(w=None): return w", "f.__defaults__ = (jnp.ones(2),)"],
            r"`f` uses `f.__defaults__\[0\]`, a jax.Array",
        ),
        (
            ["import jax.numpy as jnp\nclass C:\n    w = None", "C.w = jnp.ones(2)", "def f(): return C.w"],
            "`C` uses `C.w`, a jax.Array",
        ),
        (
            [
                "import threading\nlock = threading.Lock()\nclass C:\n    def get(self): return lock",
                "def f(): return C()",
            ],
            r"`C` uses `lock`, a _thread.lock, which cannot go to another process \(.*\)\. Make it inside of `f`",
        ),
        (
            ["import types, sys\nlog = types.SimpleNamespace(to=sys.__stdin__.buffer)\ndef f(): return log"],
            r"`f` uses `log.to`, a _io.BufferedReader, which cannot go to another process",
        ),
        (
            ["import jdist\nstrategy = jdist.one_device()", "def f(): return strategy"],
            r"`f` uses `strategy.*`, a .*, which cannot go to another process .*Make it inside of `f`",
        ),
        (
            ["class C:\n    def get(self): get_ipython().system('ls')\ndef f(): return C()"],
            "`C` has a line that begins with `!`",
        ),
        (
            ["def outer():\n    class C: pass\n    return C", "C = outer()", "def f(): return C"],
            "`C` is a class inside of",
        ),
        (["class C: pass", "c = C()", "class C: pass", "def f(): return c"], "`C` has been defined again"),
        (["C = type('C', (), {})\ndef f(): return C"], "No cell defines the class `C`"),
    ],
)
def test_what_cannot_go_along_is_refused_by_name(cells, message):
    names = run_cells(*cells)
    with pytest.raises(LaunchError, match=re.compile(message, re.DOTALL)):
        dumps(names["f"], (), "f")


def test_arguments_that_cannot_go_along():
    with pytest.raises(LaunchError, match=r"`args\[1\]\['k'\]` is a generator, .*Make it inside of `add`"):
        dumps(add, (1, {"k": (x for x in "ab")}), "add")
    with pytest.raises(LaunchError, match=r"`args\[0\]` is a jax.Array, .*pass a key's seed"):
        dumps(add, (jax.random.key(0), 1), "add")


@pytest.mark.parametrize("dtype", ["bool", "float64", "complex64", "bfloat16", "float8_e4m3fn", "<U3", "M8[s]"])
def test_arrays_arrive_with_their_dtypes(dtype):
    array = np.zeros((2, 3), jnp.dtype(dtype) if "float" in dtype else dtype)
    found, scalar = launched(lambda *args: args, ({"x": array}, array[0, 0]))
    assert (found["x"].dtype, found["x"].shape, type(scalar)) == (array.dtype, array.shape, type(array[0, 0]))
    assert found["x"].tobytes() == array.tobytes()


def test_a_result_has_numpys_arrays_and_the_notebooks_classes():
    names = run_cells("class C:\n    pass\nc = C()")
    names["c"].w = [jnp.arange(3)]
    file = io.BytesIO()
    Pickler(file, jax_arrays=True, to_notebook=True).dump(names["c"])
    assert b"class C" not in file.getvalue()
    found = pickle.loads(file.getvalue())  # noqa: S301 # of the line above
    assert (type(found), type(found.w[0]), found.w[0].tolist()) == (names["C"], np.ndarray, [0, 1, 2])
    value = {"c": names["c"], "s": [(x for x in "ab")]}
    options = {"jax_arrays": True, "to_notebook": True}
    del names["In"]  # a process has no cells
    assert find_culprit(value, "", TypeError(), **options)[1:3] == ("['s'][0]", value["s"][0])
