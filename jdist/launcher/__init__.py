"""`jdist launch`: starts the processes of a job on this host, watches them, and restarts them.

Start at `launch.launch`. `supervisor` is a pure state machine, `loop` feeds it `events` and carries out its commands;
`exit_cause` finds which process is to blame.

May import: cluster and what is below it.
"""
