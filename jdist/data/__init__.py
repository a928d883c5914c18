"""Sources of batches, and the dataset that feeds them to the replicas."""

from jdist.data.dataset import DistributedDataset
from jdist.data.distribute import distributed_dataset
from jdist.data.sources.arrays import ArraySource, from_arrays
from jdist.data.sources.files import FileSource, from_files
from jdist.data.sources.protocol import RandomAccessSource
from jdist.data.sources.shards import shard

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
