"""`jdist doctor`: what this machine and its cluster have, and what would keep a job from running.

Start at `report`, which asks each of the other files for its findings.

May import: everything below it; `together` stands for a user's program.
"""
