"""What a strategy is, and the values that it lays out.

Start at `strategy.Strategy`: a mesh, a reduction and the operations that fill it with life. `context` says
which strategy and which replica are in force; `per_replica` holds a value for each replica; `precision` what a
step computes in.

May import: errors, support, reduction, data and cluster, whose types are in `Strategy`'s methods.
"""
