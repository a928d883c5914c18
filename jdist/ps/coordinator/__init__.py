"""The program's own process: it schedules closures and decides what counts.

Start at `api.ClusterCoordinator`, which users see. `session` has the state's layout, `engine` the machine of
`ps.protocol.scheduler` with its threads: `worker_link` one a worker, `shard_calls`, `snapshots` and
`replica_watch` for the shards.

May import: ps.worker, ps.transport, ps.program, ps.protocol, step.
"""
