"""Sources of batches, and the dataset that feeds them to the replicas."""

from jdist.data.arrays import ArraySource, from_arrays
from jdist.data.distribute import DistributedDataset, distributed_dataset
from jdist.data.source import RandomAccessSource

__all__ = ["ArraySource", "DistributedDataset", "RandomAccessSource", "distributed_dataset", "from_arrays"]
