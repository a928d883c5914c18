"""Datasets of other libraries as sources of jdist, each by an adapter that is imported when such a dataset is given.

Start at `recognize.adapted`.

May import: `jdist.data.sources`, support and errors.
"""
