"""Paths of leaves as patterns see them: names and numbers with "/" between, `params/block_0/kernel`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from jdist.support.suggest import closest

# A key as `jax.tree_util.keystr` writes it: `.name`, `['key']`, `[0]`, `[<flat index 0>]`.
_KEY = re.compile(r"""\.(\w+)|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]|\[<flat index (\d+)>\]|\[([^\[\]]*)\]""")


def join_path(path: Iterable[Any]) -> str:
    """Writes a path of JAX's keys as a pattern sees it."""
    return "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path)


def parse_path(written: str) -> str:
    """Converts a path that `jax.tree_util.keystr` wrote to one as a pattern sees it.

    Example:
        >>> parse_path(".params['block_0'][1].scale")
        'params/block_0/1/scale'
    """
    return "/".join(names_in(written))


def names_in(written: str) -> tuple[str, ...]:
    """Lists the names in a path that `jax.tree_util.keystr` wrote.

    Example:
        >>> names_in(".params['a/b'][1]")
        ('params', 'a/b', '1')
    """
    return tuple(
        ast.literal_eval(quoted) if quoted else name or index or other
        for name, quoted, index, other in _KEY.findall(written)
    )


def matches_path(pattern: str, path: str) -> bool:
    """Whether a regular expression matches a path or its end, from the name of a node on."""
    return re.fullmatch(rf"(?:.*/)?(?:{pattern})", path) is not None


def nearest_path(pattern: str, paths: Iterable[str]) -> str | None:
    """Finds the path whose end is nearest to a pattern; None where there are none."""
    ends = {"/".join(path.split("/")[-1 - pattern.count("/") :]): path for path in reversed(list(paths))}
    near = closest(pattern, ends, cutoff=0)
    return None if near is None else ends[near]
