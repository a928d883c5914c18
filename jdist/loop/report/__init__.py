"""Reports of a training run: a bar or lines while it lasts, rows of metrics, curves.

Start at `history.History`; `metrics_file` is the same on disk, `progress` while it lasts.

May import: support, errors.
"""
