"""The protocol between coordinator, workers and shards, as messages and pure state machines.

Start at `messages`, then docs/parameter_server_protocol.md. `scheduler` is the coordinator's machine, with `sync_rounds`
for synchronous mode; `shard` is a shard's; `leadership` and `replica_role` are those of a shard's two copies.
`wire` writes messages and arrays as bytes.

May import: support, errors.
"""
