"""Run folders: listed, compared, repeated, and made by the dozen.

Start at `outcome`, which reads a folder that `jdist.experiment` made; `sweep` makes many.

May import: experiment, launcher and what is below them.
"""
