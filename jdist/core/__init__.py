"""The strategy, and the values that it lays out.

Start at `strategy.Strategy`: a mesh, a reduction and the `operations` behind its methods. `context` keeps the current
strategy and replica; `per_replica` holds a value for each replica; `step_state` has what a step adds to the user's
state, and `collective_marks` the equations by which collectives are found in its jaxpr; `precision` says what it computes in.

May import: errors, support, reduction, and data and cluster for the types in `Strategy`'s methods.
"""
