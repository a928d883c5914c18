"""Programs as data: what depends on what in a traced step, and how it is cut in two.

Start at `graph`, the one file that knows jaxprs. `variation` finds what differs between replicas; `split` cuts a step
where replicas or microbatches are combined, into the `phases`; `affine` finds leaves that follow from their old value by
`slope * old + offset`; `elementwise` finds updates that can be made in parts; `flops` counts products.

May import: replica, core and what is below them.
"""
