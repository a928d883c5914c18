"""The process that keeps a shard of the state.

Start at `serve`. `shard_server` holds arrays round the pure machine of `ps.protocol.shard`; `replicated_shard`
keeps a second copy of it.

May import: ps.transport, ps.program, ps.protocol.
"""
