"""Steps over a state in parts in the hosts' memory: `central_storage`.

Start at `operations`; `step` computes gradients on the devices and `update` applies them on the hosts, part by part.

May import: step and what is below it.
"""
