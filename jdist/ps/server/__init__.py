"""The process that keeps a shard of the state.

Start at `shard_server`: arrays, programs and a lock round the pure machine of `ps.protocol.shard`. `replicated_shard` is
one that leads or follows the shard's other copy; `backup_link` sends a leader's state and log to its backup.

May import: ps.transport and what is below it.
"""
