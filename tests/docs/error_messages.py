"""The messages that jdist's errors are made with, read from its source."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
from pathlib import Path
from typing import Any

from jdist import errors

ROOT = Path(__file__).parents[2]
ANY = "…"  # what varies from error to error

# Calls that make an error, and the class a reader sees: public errors, those of one room, which are raised as their base, and
# functions that give many refusals one form.
PUBLIC = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.JDistError)
}
MADE_BY = {name: name for name in PUBLIC} | {
    "OptionError": "ConfigError",
    "Problem": "ConfigError",
    "refused": "ClusterConfigError",
    "AttributeError": "AttributeError",
}


class _Scope:
    """A function's and its module's names, as far as they stand for text."""

    def __init__(self, module: Any, functions: dict[str, ast.FunctionDef], function: ast.AST | None):
        self.module = module
        self.functions = functions
        self.bound: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function) if function else ():
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.bound.setdefault(node.targets[0].id, []).append(node.value)

    def texts(self, node: ast.expr | None, depth: int = 0) -> list[str]:
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return _all("".join, [self.texts(value, depth) for value in values])
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.texts(value, depth)
            case ast.IfExp(body=body, orelse=orelse):
                return self.texts(body, depth) + self.texts(orelse, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _all("".join, [self.texts(left, depth), self.texts(right, depth)])
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[ast.List(elts=parts)]
            ):
                return _all(between.join, [self.texts(part, depth) for part in parts])
            case ast.Call(func=ast.Name(id=name)) if name in self.functions and depth < 3:
                made = _Scope(self.module, self.functions, self.functions[name])
                returned = [n.value for n in ast.walk(self.functions[name]) if isinstance(n, ast.Return)]
                return list(dict.fromkeys(t for value in returned for t in made.texts(value, depth + 1)))
            case ast.Name(id=name) if name in self.bound and depth < 3:
                return list(dict.fromkeys(t for value in self.bound[name] for t in self.texts(value, depth + 1)))
            case ast.Name(id=name) if isinstance(text := vars(self.module).get(name), str):
                return [text]
        return [ANY]


def _all(join: Any, parts: list[list[str]]) -> list[str]:
    return [join(each) for each in itertools.islice(itertools.product(*parts), 64)]


def _of_a_config(text: str) -> str:
    """What is wrong with a key, in the words of `jdist.experiment.validate.refusal`: where it was given, and a remedy."""
    return f"{ANY}: {text} ({ANY}).{ANY}"


def _message(call: ast.Call, name: str, scope: _Scope) -> list[str]:
    keywords = {each.arg: each.value for each in call.keywords}
    if name == "refused":
        variable, _, allowed, mend = [scope.texts(each) for each in call.args]
        field = [f": `{text}`" for text in scope.texts(keywords["field"])] if "field" in keywords else [""]
        found = ["is not set"] if ast.unparse(call.args[1]) == "None" else [f"is {ANY}"]
        return _all(lambda each: "{}{} {}; it must be {}. {}".format(*each), [variable, field, found, allowed, mend])
    if name == "Problem":
        return [_of_a_config(text) for text in scope.texts(keywords["text"])]
    if name == "OptionError":
        return [_of_a_config(text) for text in scope.texts(call.args[1])]
    return scope.texts(call.args[0])


@functools.cache
def messages() -> list[str]:
    """Every message behind the name of its class, with `…` for what varies; several where the text depends on a condition."""
    found: list[str] = []
    for path in sorted(p for p in (ROOT / "jdist").rglob("*.py") if p.name != "__main__.py"):
        module = importlib.import_module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        )
        tree = ast.parse(path.read_text())
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        holders = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        owner = {id(inner): holder for holder in holders for inner in ast.walk(holder)}  # the innermost comes last
        classes = {id(inner): n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for inner in ast.walk(n)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            of_a_class = path.name == "errors.py" and name == "super().__init__"
            if not of_a_class and not (name in MADE_BY and (node.args or name == "Problem")):
                continue
            scope = _Scope(module, functions, owner.get(id(node)))
            if of_a_class:
                found += (f"{classes[id(node)]}: {text}" for text in scope.texts(node.args[0]))
            else:
                found += (f"{MADE_BY[name]}: {text}" for text in _message(node, name, scope))
    return found
