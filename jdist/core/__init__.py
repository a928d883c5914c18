"""The strategy, and the values that it lays out.

Start at `strategy.Strategy`: a mesh, a reduction and the `operations` behind its methods. `context` keeps the current
strategy and replica; `per_replica` holds a value for each replica; `precision` what a
step computes in.

May import: errors, support, reduction, data and cluster, whose types are in `Strategy`'s methods.
"""
