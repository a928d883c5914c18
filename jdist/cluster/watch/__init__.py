"""The processes of a job watch each other: a connection from each to process 0.

Start at `membership`, the pure state machine of process 0; `server` runs it; each process's `client` sends `messages`.
JAX's own heartbeat ends a job without naming the lost process, and carries no step, no phase and no values.

May import: support, errors, and `jdist.cluster`'s own files.
"""
