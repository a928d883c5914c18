"""The public name of `jdist.checkpoint`."""

from jdist.checkpoint import Checkpointer as Checkpointer
from jdist.checkpoint import CheckpointWarning as CheckpointWarning
from jdist.checkpoint import Restored as Restored
from jdist.checkpoint import from_orbax as from_orbax
from jdist.checkpoint import to_orbax as to_orbax
