"""The public name of `jdist.checkpoint`."""

from jdist.checkpoint import Checkpointer as Checkpointer
from jdist.checkpoint import CheckpointWarning as CheckpointWarning
from jdist.checkpoint import Restored as Restored
