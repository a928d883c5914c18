"""Splits a step: what workers compute, what servers apply, and how the state is laid out over them.

Start at `split_step`, which traces a step and splits it, then `layout`; `function_plan` and `shard_plan` are what travels.

Called by: `ps.coordinator.session`, which sends the parts to workers and servers.

May import: ps.protocol, step, jaxpr and what is below them.
"""
