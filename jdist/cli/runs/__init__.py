"""Run folders: lists, comparisons, replays and sweeps of runs.

Start at `summary`, which reads a folder that `jdist.experiment` made; `sweep` makes many. `contents` shows checkpoints.

May import: experiment, launcher and what is below them.
"""
