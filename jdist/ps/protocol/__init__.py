"""The protocol between coordinator, workers and shards, as messages and pure state machines.

Start at `messages`, then docs/parameter_server_protocol.md. `scheduler` is the coordinator's machine, `shard` a shard's;
`leadership` and `replica_role` are those of a shard's two copies.

May import: errors, and itself.
"""
