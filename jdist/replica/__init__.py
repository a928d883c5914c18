"""The functions that a step calls on its replica: collectives, gradients, losses, aggregation, the train state.

Start at `collectives`: `all_reduce`, `replica_id` and the like, which are the identity without a strategy. `gradients` and
`aggregation` stand on them.

May import: core and what is below it.
"""
