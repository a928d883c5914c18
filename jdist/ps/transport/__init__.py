"""The transport of messages and arrays: gRPC and data connections.

Start at `interface`; `shard_client` repeats a call until it is answered; `routed` asks whoever leads. `grpc_transport`
is the wire; `bulk` and `stream` its data connections.

Called by: the coordinator, workers and servers; the other files of ps know no gRPC.

May import: ps.protocol, ps.program's plans, cluster, errors.
"""
