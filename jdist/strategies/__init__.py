"""One file a strategy: a pure function that returns a `Strategy`.

Start at `mirrored`, then `local`, which it shares with the others of one process, and `by_name`, which lists all.

May import: step, sharded_state, ps and what is below them.
"""
