"""`jdist launch`: the processes of a job on this host, started, watched and started again.

Start at `launch.launch`. `supervisor` is a pure state machine, `loop` feeds it with `events` and does what it
says; `exit_cause` says which process was to blame.

May import: cluster and what is below it.
"""
