"""Whether a step means the same on one replica as on many: `jdist.verify`.

It runs the step both ways on the first batch and names what differs, and why.

May import: step, nnx and what is below them.
"""
