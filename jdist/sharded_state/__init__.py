"""Steps over a state in parts: `sharded`, in the devices' memory, and `central_storage`, in that of their hosts.

Start at `operations`; `step` computes gradients on the devices and `update` applies them where the state is, part by part.
`gathering` takes gradients by parts, and `on_parts` runs the function that is differentiated on them.

May import: step and what is below it.
"""
