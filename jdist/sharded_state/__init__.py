"""A state that lies in parts on the hosts: what `central_storage` does.

Start at `operations`; `step` computes gradients on the devices and `update` applies them on the hosts, part by part.

May import: step and what is below it.
"""
