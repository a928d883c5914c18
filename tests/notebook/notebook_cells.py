"""Functions that tests launch by their name, and cells that tests make functions of."""

from __future__ import annotations

import linecache


def namespace(*cells):
    """The names of a notebook in which these cells have run, as IPython keeps them."""
    names = {"__name__": "__main__", "In": ["", *cells]}
    for i, cell in enumerate(cells):
        file = f"<cell {i} of {hash(cells)}>"
        linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
        exec(compile(cell, file, "exec"), names)
    return names


def add(x, y):
    """Used as a function of a module."""
    return x + y
