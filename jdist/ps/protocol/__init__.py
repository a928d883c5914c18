"""What coordinator, workers and shards say to each other, as pure state machines.

Start at `messages`, then docs/parameter_server_protocol.md. `scheduler` is the coordinator's half, `shard` a
shard's; `leadership` and `replica_role` those of two copies.

May import: errors, and itself.
"""
