"""Sources of batches, and the dataset that feeds them to the replicas."""

from jdist.data.arrays import ArraySource, from_arrays
from jdist.data.dataset import DistributedDataset
from jdist.data.distribute import distributed_dataset
from jdist.data.files import FileSource, from_files
from jdist.data.shards import shard
from jdist.data.source import RandomAccessSource

__all__ = [
    "ArraySource",
    "DistributedDataset",
    "FileSource",
    "RandomAccessSource",
    "distributed_dataset",
    "from_arrays",
    "from_files",
    "shard",
]
