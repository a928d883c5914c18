"""How the site reads docstrings and signatures where griffe alone would show less."""

import ast
import importlib
import inspect
import re
from typing import Any

import griffe

ENTRY = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
OPTIONS = re.compile(r"^    \*\*options: .+(?:\n {8}.+)*", re.MULTILINE)
# Functions and methods of jdist return objects of these classes.
MADE_BY_JDIST = (
    "step.mesh_step.DistributedStep",
    "step.traced_step.TracedStep",
    "nnx.step.NNXStep",
    "data.dataset.DistributedDataset",
    "ps.coordinator.api.ClusterCoordinator",
    "ps.coordinator.remote_value.RemoteValue",
    "ps.coordinator.remote_state.RemoteState",
)


class Examples(griffe.Extension):
    """`Example:` and `Examples:` are one to the site; griffe knows the plural only."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    # griffe does not come to the members of a module that `Shadowed` replaces.
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for member in pkg.members.values():
            if isinstance(member, griffe.Module):
                self.on_package(pkg=member)
            elif isinstance(member, griffe.Object):
                self.on_object(obj=member)


def expression(annotation: Any, scope: griffe.Object) -> griffe.Expr | str | None:
    """Returns a type as code writes it, `Literal["a"]` and `int`, rather than as repr does."""
    text = annotation
    if not isinstance(annotation, str):
        text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(annotation))
    return griffe.safe_get_annotation(ast.parse(text, mode="eval").body, scope)


class SpelledKeywords(griffe.Extension):
    """Shows `**options: Unpack[...]` as the options that `inspect` lists, described as in `jdist.distribute`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if not isinstance(obj, griffe.Function):
            return
        unpacked = [p.name for p in obj.parameters if str(p.annotation).startswith("Unpack[")]
        if not unpacked:
            return
        found = importlib.import_module(obj.module.path)
        for name in obj.path.removeprefix(f"{obj.module.path}.").split("."):
            found = getattr(found, name)
        listed = [p for p in inspect.signature(found).parameters.values() if p.name not in obj.parameters]
        if not listed:
            return
        obj.parameters = griffe.Parameters(
            *(p for p in obj.parameters if p.name not in unpacked),
            *(
                griffe.Parameter(
                    p.name,
                    annotation=expression(p.annotation, obj.module),
                    kind=griffe.ParameterKind.keyword_only,
                    default=repr(p.default),
                )
                for p in listed
            ),
        )
        obj.overloads = None
        if obj.docstring:
            described = dict(ENTRY.findall(inspect.getdoc(importlib.import_module("jdist").distribute) or ""))
            entries = [f"    {p.name}: {described.get(p.name, '')}" for p in listed]
            obj.docstring.value = OPTIONS.sub(lambda _: "\n".join(entries), obj.docstring.value)


class Shadowed(griffe.Extension):
    """Shows `package.name` as the function that the package imports from its module of the same name, as Python does."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        modules = [module for module in pkg.modules.values() if not module.is_alias]
        for module in modules:
            self.on_package(pkg=module)
            if pkg.imports.get(module.name) == f"{module.path}.{module.name}":
                pkg.set_member(module.name, module[module.name])


class Constructors(griffe.Extension):
    """Hides the constructors that only jdist calls: those of its exceptions and of `MADE_BY_JDIST`."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for made in (*pkg["errors"].classes.values(), *(pkg[path] for path in MADE_BY_JDIST)):
            if "__init__" in made.members:
                made.del_member("__init__")
