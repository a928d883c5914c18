"""Jobs that go on without a lost process: who is in which world, and how a process moves to the next one.

A *world* is a set of processes that run JAX together; each has a *generation*. Start at `generations`, which decides who
is in the next world; `host` runs it in a process of its own, `member` is a process's connection to that, and `rebuild`
takes JAX out of one world and into the next.

May import: support, errors, and `jdist.cluster`'s own files.
"""
