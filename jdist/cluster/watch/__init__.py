"""The processes of a job watch each other: a connection from each to process 0.

Start at `membership`, the pure state machine of process 0; `server` runs it, `client` is what each process has.
JAX's own heartbeat ends a job without naming who was lost, and keeps no step, no phase and no exchange of
values; that is why this is here.

May import: support, errors, and `jdist.cluster`'s own files.
"""
