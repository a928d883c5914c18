"""A step taken apart: what workers compute, what shards apply, and how the state is cut among them.

Start at `split_step`, which traces a step; `layout` cuts the state, `update_units` its update; `function_plan` is what travels.

May import: ps.protocol, step, jaxpr and what is below them.
"""
