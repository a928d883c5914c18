"""`Program`: a notebook's function as a script, with all that it uses of the notebook.

The other processes run its source, which is then in a file, to be read and to be run again. They are no copies of this one
(fork): after JAX has started its threads, a forked child may hang. They get none of its objects (pickle): what a cell
defines cannot be imported elsewhere, and unpickling runs any code.
"""

from __future__ import annotations
import __future__

import builtins
import inspect
import os
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from jdist.errors import LaunchError
from jdist.notebook import source, values
from jdist.notebook.child import input_file
from jdist.notebook.source import NoSource

_CHILD = "jdist.notebook.child"
# Names that IPython sets in every notebook. The first two exist in Python as well.
_OF_IPYTHON = ("exit", "quit", "get_ipython")
# The calls that it makes of lines with `!` or `%`.
_MAGICS = {f"get_ipython().{name}" for name in ("system", "getoutput", "run_line_magic", "run_cell_magic")}
_SCRIPT = """\
# What `jdist.notebook_launch` ran in each process. To run it again: {command}
{future}
import sys

sys.path[:0] = {path}

{imports}

{definitions}

if __name__ == "__main__":
    {child}.run({name}, __file__)
"""


class Program:
    """A function with everything that it needs."""

    # `imports` are lines; `constants` plain values of the notebook, by name. `changes`: of
    # functions and classes, by name, the values that differ from their source; see
    # `source.changes`. `definitions` are sources of functions and classes, each after the names
    # that it needs at once. `future`: annotations stay text.

    def __init__(self, fn: Callable[..., Any] | str, args: Sequence[Any]) -> None:
        """Collects everything that a function, or "package.module:function", needs elsewhere."""
        self.imports, self.constants, self.changes = {f"import {_CHILD}"}, {}, {}
        self.definitions, self.future = [], False
        self._namespace: dict[str, Any] = {}
        self._cells: Sequence[str] = ()
        self._seen: set[str] = set()
        self._waiting: deque[tuple[str, str]] = deque()
        self.name = self._start(fn)
        while self._waiting:
            self._add(*self._waiting.popleft())
        self.args = tuple(args)
        for i, value in enumerate(args):
            try:
                values.check(value, jax_arrays=True)
            except values.NotPlain as exc:
                raise LaunchError(
                    f"`args[{i}]{exc.path}` is {values.kind(exc.value)}, which cannot be given to other processes: they take "
                    f"{values.PLAIN}, and arrays of JAX. Make it inside of `{self.name}`; instead of a PRNG key pass a seed."
                ) from None

    def write(self, folder: Path, *, command: str) -> Path:
        """Writes the script, whose first line has the `command` that runs it again, and its `input_file`."""
        # Not by the function's name alone: others would import a script `random.py` as `random`.
        script = folder / f"notebook_{self.name}.py"
        inputs = {"args": self.args, "names": self.constants, "changed": self.changes}
        values.write(input_file(script), inputs, jax_arrays=True)
        script.write_text(self._text(f"{command} -- {shlex.quote(str(script))}"), encoding="utf-8")
        return script

    def _text(self, command: str) -> str:
        below = (sys.prefix, sys.base_prefix)  # on every Python's path
        path = list(dict.fromkeys(os.path.abspath(entry) for entry in sys.path if not entry.startswith(below)))
        constants = "".join(f'{name} = {_CHILD}.given(__file__, "{name}")\n' for name in self.constants)
        return _SCRIPT.format(
            command=command,
            future="from __future__ import annotations\n" if self.future else "",
            path=path,
            imports="\n".join(sorted(self.imports, key=lambda line: (line.startswith("from"), line))),
            definitions="\n\n".join([constants] * bool(constants) + self.definitions),
            child=_CHILD,
            name=self.name,
        )

    def _start(self, fn: Callable[..., Any] | str) -> str:
        """Adds the function to call; returns its name."""
        if isinstance(fn, str):
            module, _, name = fn.partition(":")
            if not all(part.isidentifier() for part in (*module.split("."), name)):
                raise LaunchError(f"`fn` is {fn!r}; a name is 'package.module:function'.")
            self.imports.add(f"from {module} import {name}")
            return name
        definition = inspect.unwrap(fn) if callable(fn) else None
        if not isinstance(definition, FunctionType):
            raise LaunchError(
                f"`fn` is {values.kind(fn)}; pass a function that is defined by `def` at the top of a cell or a module, and "
                "its arguments as `args`."
            )
        name = definition.__name__
        self._namespace = {**definition.__globals__, name: fn}
        self._cells = self._namespace.get("In", ())  # IPython's, of a notebook
        self._waiting.append((name, name))
        return name

    def _add(self, user: str, name: str) -> None:
        """Adds the value of a name, and the names that it needs at once; the others wait."""
        there = self._namespace if name in self._namespace else vars(builtins)
        if name in self._seen or name not in there or name.startswith("__"):
            return  # an unknown name is the same error there as here
        self._seen.add(name)
        value = _unwrapped(there[name])
        is_of_ipython = _module_of(value).startswith("IPython.")  # also where it is a builtin, as `display` is
        if (is_of_ipython and name in _OF_IPYTHON) or (there is vars(builtins) and not is_of_ipython):
            return
        definition = inspect.unwrap(value) if callable(value) else None
        if isinstance(value, ModuleType):
            self.imports.add(
                f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
            )
        elif (line := _import_of(value, name)) is not None:
            self.imports.add(line)
        elif isinstance(definition, FunctionType | type):
            self._define(user, name, value, definition)
        else:
            try:
                values.check(value, jax_arrays=False)
            except values.NotPlain as exc:
                raise LaunchError(_refusal(user, name + exc.path, exc.value, self.name)) from None
            self.constants[name] = value

    def _define(self, user: str, name: str, value: object, definition: FunctionType | type) -> None:
        try:
            written = source.source_of(definition, self._cells)
            if _MAGICS & written.attributes:
                raise NoSource("has a line that begins with `!` or `%`, which only IPython knows; write it in Python")
            if definition.__name__ != name:
                raise NoSource(f"is another name of `{definition.__name__}`; use that one")
            if value is not definition and not written.is_decorated:
                raise NoSource(f"is made by a call from `{name}`; use a decorator, or make it inside of `{user}`")
            changes = source.changes(definition, written.node, self._namespace)
        except NoSource as exc:
            used = "" if user == name else f", which `{user}` uses,"
            raise LaunchError(f"`{name}`{used} {exc}. Other processes run its source.") from exc.__cause__
        for needed in written.at_once:
            self._add(name, needed)
        self._waiting.extend((name, needed) for needed in written.later)
        self.definitions.append(written.text)
        if changes:
            self.changes[name] = changes
            self.definitions.append(f'{_CHILD}.restore({name}, __file__, "{name}")\n')
        self.imports |= {f"import {module}" for module in _submodules(written.attributes, self._namespace)}
        if isinstance(definition, FunctionType):
            self.future |= bool(definition.__code__.co_flags & __future__.annotations.compiler_flag)


def _unwrapped(value: object) -> object:
    """Unwraps a function that IPython has wrapped, as it does with `open`."""
    if isinstance(value, FunctionType) and _module_of(value).startswith("IPython."):
        return inspect.unwrap(value)
    return value


def _module_of(value: object) -> str:
    """Names the module of a value's code, or of its class: a wrapper's `__module__` is the wrapped function's."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return str(getattr(value.__func__, "__module__", "")) if isinstance(value, MethodType) else type(value).__module__


def _import_of(value: object, name: str) -> str | None:
    """Makes the line that imports a function or class under a name; None if no module has it."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualified, str) or module == "__main__":
        return None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):  # `from optax import adam`, although it is defined in optax._src.alias
        package = ".".join(parts[:count])
        if getattr(sys.modules.get(package), qualified, None) is value:
            return f"from {package} import {qualified}" + ("" if qualified == name else f" as {name}")
    return None


def _submodules(attributes: Iterable[str], namespace: Mapping[str, object]) -> set[str]:
    """Finds the modules that dotted names reach from an imported package, `xml.etree` in `xml.etree.ElementTree`."""
    modules: set[str] = set()
    for dotted in attributes:
        parts = dotted.split(".")
        if isinstance(namespace.get(parts[0]), ModuleType):
            modules |= {".".join(parts[:n]) for n in range(2, len(parts) + 1)} & sys.modules.keys()
    return modules


def _refusal(user: str, what: str, value: object, name: str) -> str:
    head = f"`{user}` uses `{what}`, {values.kind(value)}, which stays in this process. "
    if values.is_jax_array(value):
        return head + (
            f"Pass it as an argument, `jdist.notebook_launch({name}, args=({what},))`: it comes as a NumPy array. (For a "
            "PRNG key pass its seed.)"
        )
    return head + (
        f"Make it inside of `{name}`, or in a function that is called there. What a launched function can use of a notebook "
        f"are its imports, functions and classes, and plain values: {values.PLAIN}."
    )
