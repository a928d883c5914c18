"""`Pickler`: functions, classes and values of a notebook for other processes, and their result, by cloudpickle.

A class of the notebook goes as its source, which runs again: decorators and metaclasses register the classes that they make
(JAX's trees, flax, equinox), and would not know a copy. A copied `TrainState` lost the leaves of its subclass.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import dis
import functools
import inspect
import io
import linecache
import operator
import os
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from jdist.errors import LaunchError

# The calls that IPython makes of lines with `!` or `%`.
_MAGICS = {"system", "getoutput", "run_line_magic", "run_cell_magic"}
_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_FUTURE = __future__.annotations.compiler_flag


class Refused(Exception):
    """A value cannot go to another process; the message says why."""


class Pickler(cloudpickle.Pickler):
    """Pickles for another process; with `to_notebook`, for the notebook, which has its classes."""

    def __init__(self, file: io.BufferedIOBase, *, jax_arrays: bool, to_notebook: bool = False) -> None:
        super().__init__(file)
        self.jax_arrays, self._to_notebook = jax_arrays, to_notebook  # `jax_arrays` become NumPy's, or are refused
        self.namespace = vars(sys.modules["__main__"])
        # A function of the notebook, by which another process gets its namespace.
        self.anchor = FunctionType((lambda: None).__code__, self.namespace, "anchor")
        self.modules: set[str] = set()  # to import before unpickling
        self.lines: dict[str, list[str]] = {}  # of cells, for tracebacks

    def reducer_override(self, obj: Any) -> Any:
        """Reduces what cloudpickle does not, or not as a notebook needs it."""
        module = _module_of(obj)
        if is_jax_array(obj):
            return _on_host(obj, self.jax_arrays).__reduce__()
        if isinstance(obj, CodeType):  # cloudpickle leaves its file out, which tracebacks and steps name
            return _code, (obj.co_filename, *self.dispatch_table[CodeType](obj)[1])
        if isinstance(obj, type) and obj.__module__ == "__main__":
            return obj.__qualname__ if self._to_notebook else self._class(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if module.startswith("IPython.") and isinstance(obj, FunctionType) and hasattr(builtins, obj.__name__):
            return getattr, (builtins, obj.__name__)  # its `open`
        if module == "IPython.core.autocall":
            return getattr, (builtins, "exit")
        if isinstance(obj, MethodType) and obj.__name__ == "get_ipython":
            return getattr, (sys.modules[__name__], "no_ipython")
        if isinstance(obj, FunctionType) and obj.__globals__ is self.namespace:
            self._look_at(obj.__name__, obj.__code__)
        return super().reducer_override(obj)

    def _look_at(self, name: str, code: CodeType) -> None:
        """Refuses IPython's own syntax, and notes the modules and lines that a definition needs elsewhere."""
        names = _names_in(code)
        if "get_ipython" in names and names & _MAGICS:
            raise Refused(
                f"`{name}` has a line that begins with `!` or `%`, which only IPython knows; write it in Python."
            )
        if "display" in names and hasattr(builtins, "display"):
            self.modules.add("IPython.display")
        for package in (value for name in names if isinstance(value := self.namespace.get(name), ModuleType)):
            prefix = f"{package.__name__}."
            self.modules |= {
                name for name in sys.modules if name.startswith(prefix) and {*name[len(prefix) :].split(".")} <= names
            }
        if not os.path.exists(code.co_filename):
            self.lines[code.co_filename] = linecache.getlines(code.co_filename)

    def _class(self, cls: type) -> Any:
        outer, _, name = cls.__qualname__.rpartition(".")
        if "<locals>" in outer:
            raise Refused(f"`{name}` is a class inside of a function ({outer}); define it at the top of a cell.")
        if operator.attrgetter(cls.__qualname__)(sys.modules["__main__"]) is not cls:
            raise Refused(f"`{name}` has been defined again; make its objects again.")
        if outer:
            return getattr, (operator.attrgetter(outer)(sys.modules["__main__"]), name)
        text, node = source_of(cls)
        now, later = names_of(text)
        self._look_at(name, compile(text, name, "exec", dont_inherit=True))
        functions = {name: f for name, value in vars(cls).items() if (f := _function_in(value)) is not None}
        flags = [fn.__code__.co_flags & _FUTURE for fn in functions.values()]
        flags += [_FUTURE for each in inspect.get_annotations(cls).values() if isinstance(each, str)]
        values = [{name: self.namespace[name] for name in names if name in self.namespace} for names in (now, later)]
        defaults = {
            name: (fn.__defaults__, fn.__kwdefaults__)
            for name, fn in functions.items()
            if name in _methods(node) and _is_plain([*(fn.__defaults__ or ()), fn.__kwdefaults__ or {}])
        }
        arguments = self.anchor, name, text, max(flags, default=0), values[0]
        return define, arguments, (self.anchor, values[1], _attributes(cls, node), defaults), None, None, restore


def dumps(fn: Any, args: Any, name: str) -> tuple[Pickler, bytes]:
    """Pickles a function that is called `name`, and its arguments; raises a LaunchError that names what cannot go."""
    file = io.BytesIO()
    pickler = Pickler(file, jax_arrays=False)
    pickler.dump(pickler.anchor)
    for value, path in [(fn, name), *((value, f"args[{i}]") for i, value in enumerate(args))]:
        try:
            pickler.dump(value)
        except Exception as exc:  # noqa: BLE001 # any type's own method may raise anything
            culprit = find_culprit(value, path, exc, jax_arrays=pickler.jax_arrays)
            raise LaunchError(_refusal(*culprit, name)) from None
        pickler.jax_arrays = True  # in arguments
    return pickler, file.getvalue()


def find_culprit(value: Any, path: str, error: Exception, **options: bool) -> tuple[str, str, Any, Exception]:
    """Follows a value to its part that cannot go: the function that uses that, its path, the part, and its error."""
    user, seen = "", {id(value)}
    while True:
        for part_user, part_path, part in _parts(value, path):
            if id(part) not in seen and (found := _error(part, **options)) is not None:
                user, path, value, error = part_user or user, part_path, part, found
                seen.add(id(value))
                break
        else:
            return user, path, value, error


def kind(value: object) -> str:
    """Names the type of a value for errors: "a jax.Array", "a flax.linen.Dense"."""
    if is_jax_array(value):
        return "a jax.Array"
    of = type(value)
    name = of.__qualname__ if of.__module__ in ("builtins", "__main__") else f"{of.__module__}.{of.__qualname__}"
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def is_jax_array(value: object) -> bool:
    """Returns whether it is an array of JAX, without importing JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def source_of(cls: type) -> tuple[str, ast.ClassDef]:
    """Finds the newest definition of a class in the notebook's cells, or the script."""
    main = sys.modules["__main__"]
    script = "".join(linecache.getlines(getattr(main, "__file__", None) or ""))
    for text in reversed(getattr(main, "In", [script])):
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a cell that did not run
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                first = min(part.lineno for part in (node, *node.decorator_list))
                return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno])) + "\n", node
    raise Refused(
        f"No cell defines the class `{cls.__name__}`. Write it at the top of one, or into a module (in a "
        "notebook, `%%writefile my_module.py` makes one)."
    )


def names_of(text: str) -> tuple[set[str], set[str]]:
    """Finds the global names that a class's source uses as it runs, and those that its methods use when called."""
    now: set[str] = set()
    later: set[str] = set()

    def collect(table: symtable.SymbolTable, *, is_now: bool) -> None:
        names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        (now if is_now else later).update(names)
        for inner in table.get_children():
            collect(inner, is_now=is_now and inner.get_type() == "class")

    collect(symtable.symtable(text, "class", "exec"), is_now=True)
    return now, later - now


# ---- what pickles call


def define(anchor: FunctionType, name: str, text: str, flags: int, values: Mapping[str, Any]) -> type:
    """Runs a class's source in the namespace of `anchor`."""
    namespace, file = anchor.__globals__, f"<class {name}>"
    namespace.update(values)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(text, file, "exec", flags, dont_inherit=True), namespace)
    return namespace[name]


def restore(cls: type, state: tuple[FunctionType, dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    """Restores the values that a class has in the notebook by now, after its source was run."""
    anchor, values, attributes, defaults = state
    anchor.__globals__.update(values)
    for name, value in attributes.items():
        setattr(cls, name, value)
    for name, (positional, by_name) in defaults.items():
        function = _function_in(vars(cls)[name])
        assert function is not None  # it is the same source
        function.__defaults__, function.__kwdefaults__ = positional, by_name


def no_ipython() -> None:
    raise NameError("name 'get_ipython' is not defined: a launched process is plain Python")


def _code(file: str, *arguments: Any) -> CodeType:
    return CodeType(*arguments).replace(co_filename=file)


def _cached(fn: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


# ---- parts of values


def _error(value: Any, **options: bool) -> Exception | None:
    try:
        Pickler(io.BytesIO(), **options).dump(value)
    except Exception as exc:  # noqa: BLE001 # any type's own method may raise anything
        return exc
    return None


def _parts(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Lists the parts of a value: for the names that a function or class uses its own name, the path, the part."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        used = {name: value.__globals__.get(name) for name in sorted(_globals_in(value.__code__))}
        used |= {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}
        used |= {f"{value.__name__}.__defaults__[{i}]": part for i, part in enumerate(value.__defaults__ or ())}
        yield from ((value.__name__, name, part) for name, part in used.items())
    elif isinstance(value, type) and value.__module__ == "__main__":
        with contextlib.suppress(Refused):  # without a source
            text, node = source_of(value)
            namespace = vars(sys.modules["__main__"])
            used = {name: namespace.get(name) for name in sorted(set().union(*names_of(text)))}
            used |= {f"{value.__name__}.{name}": part for name, part in _attributes(value, node).items()}
            yield from ((value.__name__, name, part) for name, part in used.items())
    elif isinstance(value, Mapping):
        yield from (("", f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from (("", f"{path}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, MethodType | functools.partial):
        yield "", path, value.__func__ if isinstance(value, MethodType) else value.func
    elif hasattr(value, "__wrapped__"):
        yield "", path, value.__wrapped__
    elif not isinstance(value, type | ModuleType) and not is_jax_array(value):
        yield from (("", f"{path}.{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _refusal(user: str, path: str, value: Any, error: Exception, name: str) -> str:
    """Says which value of the notebook cannot go to another process, and what to write instead."""
    if isinstance(error, Refused) and not is_jax_array(value):
        return f"{error} (Other processes run `{name}`.)"
    head = f"`{user}` uses `{path}`, {kind(value)}" if user else f"`{path}` is {kind(value)}"
    if not is_jax_array(value):
        why = str(error).partition("\n")[0] or type(error).__name__
        return f"{head}, which cannot go to another process ({why}). Make it inside of `{name}`."
    if not user:
        return (
            f"{head}, which is not whole in this process, or a PRNG key. Make it inside of `{name}`; pass a key's seed."
        )
    return (
        f"{head}, which stays in this process. Pass it as an argument, "
        f"`jdist.notebook_launch({name}, args=({path},))`: it comes as a NumPy array. (For a PRNG key pass its seed.)"
    )


def _on_host(value: Any, is_taken: bool) -> np.ndarray:
    import jax

    is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not is_taken or is_key or not (value.is_fully_addressable or value.is_fully_replicated):
        raise Refused("an array of JAX")
    return np.asarray(value)


def _names_in(code: CodeType) -> set[str]:
    """Lists the names that code uses, with the functions and classes inside of it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


def _globals_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return names.union(*map(_globals_in, inner))


def _module_of(value: object) -> str:
    """Names the module of a function's code, or of a value's class: a wrapper's `__module__` is the wrapped function's."""
    return str(value.__globals__.get("__name__", "") if isinstance(value, FunctionType) else type(value).__module__)


def _function_in(value: Any) -> FunctionType | None:
    """Unwraps decorators, `staticmethod`, `classmethod` and `property`."""
    value = value.fget if isinstance(value, property) else value
    value = inspect.unwrap(value.__func__ if isinstance(value, staticmethod | classmethod) else value)
    return value if isinstance(value, FunctionType) else None


def _methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def _attributes(cls: type, node: ast.ClassDef) -> dict[str, Any]:
    """Finds a class's plain attributes, and functions and arrays of JAX that its source does not make."""
    assigned = (each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign))
    computed = (each for each in assigned if not isinstance(each.value, ast.Constant))
    made = {part.id for each in computed for part in ast.walk(each) if isinstance(part, ast.Name)}
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("_")
        if _is_plain(value)
        or (is_jax_array(value) and name not in made)
        or (
            isinstance(value, FunctionType)
            and value.__module__ == "__main__"
            and value.__qualname__ != f"{cls.__qualname__}.{name}"
        )
    }


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set, dict):
        return all(map(_is_plain, [*value, *value.values()] if type(value) is dict else value))
    return type(value) in _ATOMS or isinstance(value, np.generic) or type(value) is np.ndarray
