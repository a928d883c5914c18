"""Sources of batches: arrays, files, shards, a function for each replica.

Start at `protocol.RandomAccessSource`, and `protocol.check_source` for what else is a source.

May import: support, errors, and the files next to this folder but for its dataset and readers.
"""
