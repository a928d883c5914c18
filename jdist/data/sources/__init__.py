"""Sources of batches: arrays, files, shards, a function for each replica.

Start at `protocol.Source`, which each of them is.

May import: support, errors and `jdist.data.batching`.
"""
