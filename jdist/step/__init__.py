"""A step for one replica becomes a step over a mesh.

Start at `decorator.distribute`, which makes a `mesh_step.DistributedStep`. A call goes: `signature` (which
argument is what), `placement` (the state's arrays), `mesh_program` (the compiled program), `replica_program`
(what one replica runs), `outputs` (what comes back). `microbatches`, `non_finite`, `loops` and `error_feedback`
are what it may be wrapped in. Apart from a call, `verify` compares a step with the same one on one replica.

May import: jaxpr, replica, core, data, reduction and what is below them.
"""
