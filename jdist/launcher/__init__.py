"""`jdist launch`: starts the processes of a job on this host, or in Ray's actors, watches them, and restarts them.

Start at `launch.launch`; `ray.ray_launch` runs the same `loop`. `supervisor` is a pure state machine, `loop` feeds it
`events` and carries out its commands, and `restarts` has the waits; `worlds` runs the host of a job that goes on without
lost processes; `process` starts a process and shows its output; `exit_cause` finds which process is to blame.

May import: cluster and what is below it; `launcher.notebook` is a higher room of its own.
"""
