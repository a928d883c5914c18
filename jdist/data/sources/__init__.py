"""Sources of batches: arrays, files, shards, a function for each replica.

Start at `protocol`: `RandomAccessSource`, and what is a source.

May import: support, errors and `jdist.data.batching`.
"""
