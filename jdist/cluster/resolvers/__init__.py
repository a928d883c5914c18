"""Resolvers: pure functions from a platform's environment variables to a `ClusterSpec`.

Start at `resolve.resolve`, which asks one after the other, and refuses signs of several processes without their
addresses. `launchers` has a row for each launcher that gives each process a rank; `pods` is for Kubernetes and TPUs.

May import: spec, address and environment of `jdist.cluster`.
"""
