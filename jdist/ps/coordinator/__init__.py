"""The coordinator: schedules closures from the program's own process, and decides which take effect.

Start at `api.ClusterCoordinator`, which users see. `session` has the state's layout and programs; `closure_queue` the
closures, under one lock with the machine of `ps.protocol.scheduler`; `coordinator` connects them: `worker_link` to
workers, `snapshots` and `shard_watch` to shards. `servers` finds and ends remote servers.

Called by: `jdist.strategies.parameter_server`, through `api` and `session`.

May import: ps.worker and what is below it; no server.
"""
