"""Checkpoints: written whole or not at all, read on any number of devices.

Start at `checkpointer.Checkpointer`. `save` writes in the background; `folder` is what a checkpoint is on disk;
`pieces` are the parts of leaves that no process has whole; `evaluator` reads while another job writes.

May import: core, ps' remote states, cluster and what is below them.
"""

from jdist.checkpoint.checkpointer import Checkpointer as Checkpointer
from jdist.checkpoint.checkpointer import CheckpointWarning as CheckpointWarning
from jdist.checkpoint.checkpointer import Restored as Restored
