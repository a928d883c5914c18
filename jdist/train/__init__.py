"""What surrounds the train step while a run lasts: checkpoints."""

from jdist.train.checkpoint import Checkpointer as Checkpointer
from jdist.train.checkpoint import CheckpointWarning as CheckpointWarning
from jdist.train.checkpoint import Restored as Restored
