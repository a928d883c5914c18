"""Checkpoints: written whole or not at all, read on any number of devices.

Start at `checkpointer.Checkpointer`. `save` writes in the background; `folder` is what a checkpoint is on disk;
`pieces` are the parts of leaves that no process has whole; `save` and `restore` are what processes do together;
`evaluator` reads while another job writes; `bucket` is an object store's paths, `orbax` reads Orbax's checkpoints,
`orbax_export` writes them.

May import: core and what is below it. (States on parameter servers are `core.remote.RemoteTree`s to it.)
"""

from jdist.checkpoint.checkpointer import Checkpointer as Checkpointer
from jdist.checkpoint.checkpointer import CheckpointWarning as CheckpointWarning
from jdist.checkpoint.checkpointer import Restored as Restored
from jdist.checkpoint.orbax import from_orbax as from_orbax
from jdist.checkpoint.orbax_export import to_orbax as to_orbax
