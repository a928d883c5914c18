"""A config file -> a checked config -> a run.

Nothing is imported here: `config`, `load` and `validate` need no JAX, so that the command line answers at
once and the platform can be settled before JAX starts; `run` needs all of it.
"""
