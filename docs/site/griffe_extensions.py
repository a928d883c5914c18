"""How the site reads docstrings and signatures where griffe alone would show less."""

import importlib
import inspect
import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """`Example:` and `Examples:` are one to the site; griffe knows the plural only."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


class SpelledKeywords(griffe.Extension):
    """Shows `**options: Unpack[...]` as the options themselves, unless the docstring explains `**options`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if not isinstance(obj, griffe.Function):
            return
        unpacked = [p.name for p in obj.parameters if str(p.annotation).startswith("Unpack[")]
        documented = obj.docstring.value if obj.docstring else ""
        if not unpacked or f"**{unpacked[0]}:" in documented:
            return
        found = importlib.import_module(obj.module.path)
        for name in obj.path.removeprefix(f"{obj.module.path}.").split("."):
            found = getattr(found, name)
        listed = [p for p in inspect.signature(found).parameters.values() if p.name not in obj.parameters]
        obj.parameters = griffe.Parameters(
            *(p for p in obj.parameters if p.name not in unpacked),
            *(
                griffe.Parameter(
                    p.name,
                    annotation=griffe.ExprName(str(p.annotation)),
                    kind=griffe.ParameterKind.keyword_only,
                    default=repr(p.default),
                )
                for p in listed
            ),
        )
        obj.overloads = None
