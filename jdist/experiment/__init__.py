"""A config file -> a checked config -> a run.

Start at `run.run`. `load` and `validate` make a `config.Config`, `prepare` makes its parts.

Nothing is imported here: `config`, `load` and `validate` need no JAX, so that the command line answers at once and the platform
can be settled before JAX starts.

May import: loop, tasks, strategies, checkpoint and what is below them.
"""
