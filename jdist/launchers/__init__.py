"""Launchers that place a job's processes by another engine: Ray.

Start at `ray.ray`. `place` is what runs on an engine's node, `actor` a process there as the launcher sees it; the launcher
itself, which watches and restarts, is that of `jdist launch`.

May import: launcher and what is below it.
"""

from jdist.launchers.ray import ray as ray
