"""Resolvers: a platform's environment variables -> `ClusterSpec`, each a pure function.

Start at `resolve.resolve`, which asks one after the other, and refuses signs of several processes without their
addresses. `ranks` serves the launchers that give each process a rank.

May import: the files of `jdist.cluster` that it describes: spec, address, environment.
"""
