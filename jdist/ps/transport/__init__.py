"""The transport of messages and arrays: gRPC and data connections.

Start at `interface`; `shard_client` repeats a call until it is answered; `routed` asks whoever leads.

May import: ps.protocol, ps.program's plans, cluster, errors.
"""
