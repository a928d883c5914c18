"""Sources of batches, and the dataset that feeds them to the replicas.

Start at `feed.distributed_dataset`, which makes a `DistributedDataset`. A batch passes through a source (`sources`), its
`readers`, `batching` (which fills up a short one, with a mask) and `prefetch`, on to the devices. `lockstep` keeps several
processes together.

May import: cluster, support, errors.
"""

from jdist.data.adapters.recognize import from_rows
from jdist.data.dataset import DistributedDataset
from jdist.data.feed import distributed_dataset
from jdist.data.options import FeedOptions
from jdist.data.sources.files import FileSource, from_files
from jdist.data.sources.protocol import RandomAccessSource
from jdist.data.sources.rows import ArraySource, from_arrays
from jdist.data.sources.shards import shard

__all__ = [
    "ArraySource",
    "DistributedDataset",
    "FeedOptions",
    "FileSource",
    "RandomAccessSource",
    "distributed_dataset",
    "from_arrays",
    "from_files",
    "from_rows",
    "shard",
]
