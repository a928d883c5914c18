"""Sources of batches: arrays, files, shards, a function for each replica.

Start at `protocol.RandomAccessSource`, and `protocol.check_source` for what else is a source.

May import: support, errors, and of `jdist.data` what is beside this folder but for its dataset and readers.
"""
